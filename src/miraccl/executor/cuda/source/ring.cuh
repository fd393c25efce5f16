// Ring (schedule.algos.ring) on packets, for all_reduce of large blocks: only neighbours talk, which NVLink carries better than all pairs at once.
//
// A thread handles all HOPS per iteration, each of another piece: in iteration j it takes hop t of piece j - 1 - t, which its
// neighbour pushed in iteration j - 1, and pushes hop t + 1 of that piece. Sums are rounded at every hop. Nobody hears from the rank it
// sends to, except around the ring: what it takes in iteration j was made possible by the pushes of the rank n - 1 hops before it in iteration
// j - (n - 1), after that rank had settled everything before; hence nslots >= n + 1.
#define HOPS (2 * (RANKS - 1))  // that a chunk makes: around for the sum, around again for the result

__device__ __forceinline__ uint4* hop_place(const Args& a, const Geometry& g, char* box, u32 piece, u32 hop, u32 i) {
  return place_in(g, box, (piece % a.nslots) * HOPS + hop, i);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = work_of(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  u32 prev = a.prev, next = a.next, last = (a.position + RANKS - 1) % RANKS, ticket = 0;  // chunks are numbered as the places in the ring
  for (u32 j = 0; j < w.pieces + HOPS; j++) {
    uint4 p[HOPS][UNROLL];
    Vec own[RANKS - 1][UNROLL];
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j < t + 1 || m >= w.pieces || i >= w.limit) continue;
        p[t][u] = load_packet(hop_place(a, g, a.inbox[prev], m, t, g.first + u * g.stride));
        if (t < RANKS - 1) own[t][u] = outgoing(a, w, (a.position + 2 * RANKS - 2 - t) % RANKS, i);
      }
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t, here = g.first + u * g.stride;
        u64 i = (u64)m * g.piece + here;
        if (j < t + 1 || m >= w.pieces || i >= w.limit) continue;
        uint4* q = hop_place(a, g, a.inbox[prev], m, t, here);
        Vec v = take(a, g, watch, q, here, i, p[t][u], prev, WHAT_PACKET);
        if (t < RANKS - 1) {
          Sum sum;
          sum.begin(own[t][u]);
          sum.add(v);
          v = t == RANKS - 2 ? sum.end() : sum.partial();
        }
        if (t + 1 < HOPS) push(g, hop_place(a, g, a.outbox[next], m, t + 1, here), here, to_packet(g, i, v));
        if (t >= RANKS - 2) store_vec(w.out, spot(w, (a.position + 2 * RANKS - 2 - t) % RANKS, i), w.count, w.aligned, v);
      }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
      u32 here = g.first + u * g.stride;
      u64 i = (u64)j * g.piece + here;
      if (j < w.pieces && i < w.limit) push(g, hop_place(a, g, a.outbox[next], j, 0, here), here, to_packet(g, i, outgoing(a, w, last, i)));
    }
    if (j == 0) { judge(a, g, past); ticket = draw_ticket(a, g); }
    if (!w.reuse) continue;
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j >= t + 1 && m < w.pieces && i < w.limit) p[t][u] = load_packet(hop_place(a, g, a.inbox[prev], m, t, g.first + u * g.stride));
      }
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j >= t + 1 && m < w.pieces && i < w.limit) wait_empty(a, watch, hop_place(a, g, a.inbox[prev], m, t, g.first + u * g.stride), p[t][u]);
      }
  }
  count_launch(a, ticket);
}
