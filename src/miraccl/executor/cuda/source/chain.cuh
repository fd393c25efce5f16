// Chain (schedule.algos.chain) on packets: broadcast from the root, rank by rank along the ring; reduce to the root the other way round.
//
// Every thread takes its packets of a piece from the rank before it in the chain, keeps or adds up, and pushes to the next one, so every link carries
// each byte once and only neighbours talk. Nobody hears from the rank it sends to, so two things are said aloud:
//   acks    slots are used again after the receiver's warp has said how many pieces it has read, cleared and seen cleared: one packet per warp.
//   hello   every rank says to every other that it has begun this launch, as the use of the banks demands (packets.cuh).
// Both begin and end as ones. The last ack is the one that the sender waits for, so it may wipe it away.

// The places of a bank: slots of pieces, then an ack per warp, then a hello per rank.
__device__ __forceinline__ uint4* chain_place(const Geometry& g, char* box, u32 slot, u32 i) { return (uint4*)(box + g.bank) + (u64)slot * g.room + i; }
__device__ __forceinline__ uint4* ack_place(const Args& a, const Geometry& g, char* box) { return chain_place(g, box, a.nslots, g.warp); }
__device__ __forceinline__ uint4* hello_place(const Args& a, const Geometry& g, char* box, u32 src) { return chain_place(g, box, a.nslots, g.warps + src); }

__device__ __forceinline__ void wait_ack(const Args& a, Watch& watch, const uint4* ack, u32 taken, u32 peer) {
  watch.spins = 0;
  for (u32 seen = load_packet(ack).x; seen == EMPTY || seen < taken; seen = load_packet(ack).x)
    if (give_up(a, watch, peer, WHAT_ROOM)) break;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = look_at(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
#if defined(MODE_REDUCE_CHAIN)
  u32 up = a.next, down = a.prev;
  bool first = up == a.root, last = a.rank == a.root;
#else
  u32 up = a.prev, down = a.next;
  bool first = a.rank == a.root, last = down == a.root;
#endif
  bool greets = blockIdx.x == 0 && threadIdx.x < RANKS && threadIdx.x != a.rank;
  if (greets) store_packet(hello_place(a, g, a.outbox[threadIdx.x], a.rank), make_uint4(0, 0, 0, 0));
  uint4* ack = ack_place(a, g, a.inbox[down]);
  u32 ticket = 0, slot = 0;
  for (u32 k = 0; k < w.pieces; k++) {
    u64 at = (u64)k * g.piece + g.first;
    uint4 p[UNROLL];
    Vec v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) p[u] = load_packet(chain_place(g, a.inbox[up], slot, g.first + u * g.stride));
      if (first || REDUCES) v[u] = outgoing(a, w, 0, i);
    }
    if (!last && k >= a.nslots) wait_ack(a, watch, ack, k + 1 - a.nslots, down);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) {
        uint4* q = chain_place(g, a.inbox[up], slot, g.first + u * g.stride);
        Vec got = take(a, g, watch, q, g.first + u * g.stride, i, p[u], up, 0);
#if REDUCES
        Sum sum;
        sum.begin(v[u]);
        sum.add(got);
        v[u] = last ? sum.end() : sum.partial();
#else
        v[u] = got;
#endif
      }
      if (!last) push(g, chain_place(g, a.outbox[down], slot, g.first + u * g.stride), g.first + u * g.stride, to_packet(g, i, v[u]));
      if (REDUCES ? last : !first) store_vec(w.out, i, w.count, w.aligned, v[u]);
    }
    if (k == 0) { judge(a, g, past); ticket = draw_ticket(a, g); }
    if (!first && k + a.nslots < w.pieces) {
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        uint4* q = chain_place(g, a.inbox[up], slot, g.first + u * g.stride);
        if (at + u * g.stride < w.limit) wait_empty(a, watch, q, load_packet(q));
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) store_packet(ack_place(a, g, a.outbox[up]), make_uint4(k + 1, 0, 0, 0));
    }
    slot = slot + 1 == a.nslots ? 0 : slot + 1;
  }
  __syncwarp();
  if (!last && w.reuse && threadIdx.x % 32 == 0) clear_packet(ack);
  if (greets) {
    uint4* q = hello_place(a, g, a.inbox[threadIdx.x], threadIdx.x);
    watch.spins = 0;
    while (load_packet(q).x == EMPTY) if (give_up(a, watch, threadIdx.x, 0)) break;
    clear_packet(q);
  }
  count_launch(a, ticket);
}
