// Chain (schedule.algos.chain) on packets: broadcast from the root, rank by rank along the ring; reduce to the root the other way round.
//
// Every thread takes its packets of a piece from the rank before it in the chain, keeps or adds up, and pushes to the next one, so every link carries
// each byte once and only neighbours talk. Slots are used again after acks (acks.cuh).

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = work_of(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
#if defined(MODE_REDUCE_CHAIN)
  u32 up = a.next, down = a.prev;
  bool first = up == a.root, last = a.rank == a.root;
#else
  u32 up = a.prev, down = a.next;
  bool first = a.rank == a.root, last = down == a.root;
#endif
  greet(a, g, a.nslots);
  u64* ack = ack_place(g, a.inbox[down], a.nslots, 0);
  u32 ticket = 0, slot = 0;
  for (u32 k = 0; k < w.pieces; k++) {
    u64 at = (u64)k * g.piece + g.first;
    uint4 p[UNROLL];
    Vec v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) p[u] = load_packet(place_in(g, a.inbox[up], slot, g.first + u * g.stride));
      if (first || REDUCES) v[u] = outgoing(a, w, 0, i);
    }
    if (!last && k >= a.nslots) wait_ack(a, watch, ack, k + 1 - a.nslots, down);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) {
        uint4* q = place_in(g, a.inbox[up], slot, g.first + u * g.stride);
        Vec got = take(a, g, watch, q, g.first + u * g.stride, i, p[u], up, WHAT_PACKET);
#if REDUCES
        Sum sum;
        sum.begin(v[u]);
        sum.add(got);
        v[u] = last ? sum.end() : sum.partial();
#else
        v[u] = got;
#endif
      }
      if (!last) push(g, place_in(g, a.outbox[down], slot, g.first + u * g.stride), g.first + u * g.stride, to_packet(g, i, v[u]));
      if (REDUCES ? last : !first) store_vec(w.out, i, w.count, w.aligned, v[u]);
    }
    if (k == 0) { judge(a, g, past); ticket = draw_ticket(a, g); }
    if (!first && k + a.nslots < w.pieces) {
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        uint4* q = place_in(g, a.inbox[up], slot, g.first + u * g.stride);
        if (at + u * g.stride < w.limit) wait_empty(a, watch, q, load_packet(q));
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) store_word(ack_place(g, a.outbox[up], a.nslots, 0), k + 1);
    }
    slot = slot + 1 == a.nslots ? 0 : slot + 1;
  }
  __syncwarp();
  if (!last && w.reuse && threadIdx.x % 32 == 0) *ack = NEVER;
  hear_greetings(a, g, watch, a.nslots);
  count_launch(a, ticket);
}
