// What is said aloud where data go one way only, along a chain or along trees, so that nobody hears from the rank it sends to:
//   acks    slots are used again after the receiver's warp has said how many pieces it has read, cleared and seen cleared: one word per warp.
//   hello   every rank says to every other that it has begun this launch, as the use of the banks demands (packets.cuh).
// Both begin and end as ones. The last ack is the one that the sender waits for, so it may wipe it away.
//
// They lie in the bank behind its ``runs`` of packets: first a hello per rank, then an ack per warp for each receiver.

__device__ __forceinline__ u64* hello_place(const Geometry& g, char* box, u32 runs, u32 src) { return (u64*)place_in(g, box, runs, src); }
__device__ __forceinline__ u64* ack_place(const Geometry& g, char* box, u32 runs, u32 receiver) {
  return (u64*)place_in(g, box, runs, RANKS + receiver * g.warps + g.warp);
}

__device__ __forceinline__ void wait_ack(const Args& a, Watch& watch, const u64* ack, u32 taken, u32 peer) {
  watch.spins = 0;
  for (u64 seen = load_word(ack); seen == NEVER || seen < taken; seen = load_word(ack))
    if (give_up(a, watch, peer, WHAT_ROOM)) break;
}

__device__ __forceinline__ bool greets(const Args& a) { return blockIdx.x == 0 && threadIdx.x < RANKS && threadIdx.x != a.rank; }
__device__ __forceinline__ void greet(const Args& a, const Geometry& g, u32 runs) {
  if (greets(a)) store_word(hello_place(g, a.outbox[threadIdx.x], runs, a.rank), 0);
}
__device__ __forceinline__ void hear_greetings(const Args& a, const Geometry& g, Watch& watch, u32 runs) {
  if (!greets(a)) return;
  u64* hello = hello_place(g, a.inbox[threadIdx.x], runs, threadIdx.x);
  watch.spins = 0;
  while (load_word(hello) == NEVER) if (give_up(a, watch, threadIdx.x, WHAT_PACKET)) break;
  *hello = NEVER;
}
