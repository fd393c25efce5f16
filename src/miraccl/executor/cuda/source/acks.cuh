// Acknowledgements for kernels in which data flow one way only (chain, tree), where a rank receives
// nothing from the rank it sends to:
//   acks   a slot is reused after the receiver's warp has reported the number of tiles it has read,
//          cleared and seen cleared: one word per warp.
//   hello  every rank tells every other that it has begun this launch, which the alternation of the
//          buffer halves requires (packets.cuh).
//
// Both words start and end as ones. The sender waits for the last ack before it resets the word, so
// no ack arrives after the reset. An ack is stored after the loads that saw the slot cleared and
// ``__syncwarp``, so no fence is needed.
//
// The words lie in the buffer half behind its ``runs`` of packets: a hello per rank, then an ack
// per warp for each receiver.

__device__ __forceinline__ u64* hello_word(const Geometry& g, char* region, u32 runs, u32 src) {
  return (u64*)packet_at(g, region, runs, src);
}
__device__ __forceinline__ u64* ack_word(const Geometry& g, char* region, u32 runs, u32 receiver) {
  return (u64*)packet_at(g, region, runs, RANKS + receiver * g.warps + g.warp);
}

__device__ __forceinline__ void await_ack(const Args& a, SpinWait& spin, const u64* ack,
                                          u32 consumed, u32 peer) {
  spin.polls = 0;
  for (u64 seen = load_word(ack); seen == EMPTY_WORD || seen < consumed; seen = load_word(ack))
    if (check_abort(a, spin, peer, AWAIT_CREDIT)) break;
}

__device__ __forceinline__ bool sends_hello(const Args& a) {
  return blockIdx.x == 0 && threadIdx.x < RANKS && threadIdx.x != a.rank;
}
__device__ __forceinline__ void send_hellos(const Args& a, const Geometry& g, u32 runs) {
  if (sends_hello(a)) store_word(hello_word(g, a.outbox[threadIdx.x], runs, a.rank), 0);
}
__device__ __forceinline__ void await_hellos(const Args& a, const Geometry& g, SpinWait& spin,
                                             u32 runs) {
  if (!sends_hello(a)) return;
  u64* hello = hello_word(g, a.inbox[threadIdx.x], runs, threadIdx.x);
  spin.polls = 0;
  while (load_word(hello) == EMPTY_WORD)
    if (check_abort(a, spin, threadIdx.x, AWAIT_PACKET)) break;
  *hello = EMPTY_WORD;
}
