// One-shot and two-shot collectives on packets: every thread pushes, reads and clears its own packets; no barrier is on the way.
//
//   one_shot  all_reduce      in -> all;     out = sum in the order of the ranks      (schedule.algos.one_shot)
//             reduce_scatter  in[p] -> p;    out = sum in the order of the ranks
//             all_gather      in -> all;     out[r] = what r sent
//             all_to_all      in[p] -> p;    out[r] = what r sent
//             broadcast       in of the root -> all
//             reduce          in -> the root, out = sum in the order of the ranks
//   two_shot  all_reduce      chunk p of in -> p, which adds up in the order of the ranks and sends the sum to all
//                             (schedule.algos.two_shot; chunks are whole packets)
//
// Slots are used again in operations of more pieces than slots: a thread pushes at most ``ahead`` pieces ahead of the one it read, cleared and saw
// cleared (``settle``), and nslots >= 2 * ahead + 2 >= 4 gives the argument of packets.cuh thread by thread.

#if defined(MODE_TWO_SHOT)
#define SHOTS 2
#else
#define SHOTS 1
#endif

// Where packet ``i`` of the piece in ``slot`` from ``src`` lies in the memory of ``dst``. A rank has no place for its own.
__device__ __forceinline__ uint4* place(const Args& a, const Geometry& g, u32 dst, u32 src, u32 slot, int shot, u32 i) {
  u32 lane = slot * (u32)(SHOTS * (RANKS - 1)) + shot * (RANKS - 1) + (src < dst ? src : src - 1);
  return (uint4*)((dst == a.rank ? a.inbox[src] : a.outbox[dst]) + g.bank) + (u64)lane * g.room + i;
}

// Rooted operations move data between the root and the others only. Their packet 0 (of masked ones: the first 32) goes from every rank to every rank all the same: who ends
// one launch has then heard of everybody's, as the use of the banks demands. They have room for all pieces (no slot is used again).
#if defined(MODE_BROADCAST) || defined(MODE_REDUCE)
#define ROOTED 1
#else
#define ROOTED 0
#endif
#if defined(FRAME_MASK)
#define HELLO 32
#else
#define HELLO 1
#endif
__device__ __forceinline__ bool moves(const Args& a, u32 src, u32 dst, u64 i) {
#if defined(MODE_BROADCAST)
  return src == a.root || i < HELLO;
#elif defined(MODE_REDUCE)
  return dst == a.root || i < HELLO;
#else
  return true;
#endif
}

// First shot: to every peer what it needs, the next rank first.
__device__ __forceinline__ void push_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot) {
  u64 at = (u64)k * g.piece + g.first;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
  uint4 same[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (at + u * g.stride < w.limit) same[u] = to_packet(g, at + u * g.stride, outgoing(a, w, 0, at + u * g.stride));
#endif
#pragma unroll
  for (int d = 1; d < RANKS; d++) {
    u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit && moves(a, a.rank, dst, at + u * g.stride)) push(g, place(a, g, dst, a.rank, slot, 0, g.first + u * g.stride), g.first + u * g.stride, same[u]);
#else
    uint4 p[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit) p[u] = to_packet(g, at + u * g.stride, outgoing(a, w, dst, at + u * g.stride));
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit) push(g, place(a, g, dst, a.rank, slot, 0, g.first + u * g.stride), g.first + u * g.stride, p[u]);
#endif
  }
}

// Returns when what this thread cleared of a piece lies cleared in L2 (``wait_empty``).
__device__ __forceinline__ void settle(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, u32 shot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit) p[r][u] = load_packet(place(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit)
        wait_empty(a, watch, place(a, g, a.rank, r, slot, shot, g.first + u * g.stride), p[r][u]);
}

// What came in the first shot: added up in the order of the ranks, or put in its place.
__device__ __forceinline__ void take_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];  // all loads are under way before the first is looked at
  Vec own[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (at + u * g.stride >= w.limit) continue;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && moves(a, r, a.rank, at + u * g.stride))
        p[r][u] = load_packet(place(a, g, a.rank, r, slot, 0, g.first + u * g.stride));
    own[u] = outgoing(a, w, a.rank, at + u * g.stride);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u64 i = at + u * g.stride;
    if (i >= w.limit) continue;
#if ROOTED
    Sum sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        if (!moves(a, r, a.rank, i)) continue;
        uint4* q = place(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = take(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, 0);
      }
#if defined(MODE_BROADCAST)
      if (r == a.root && r != a.rank) store_vec(w.out, i, w.count, w.aligned, v);
#else
      if (r == 0) sum.begin(v); else sum.add(v);
#endif
    }
#if defined(MODE_REDUCE)
    if (a.rank == a.root) store_vec(w.out, i, w.count, w.aligned, sum.end());
#endif
#elif defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        uint4* q = place(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = take(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, 0);
      }
      store_vec(w.out + r * w.count, i, w.count, w.aligned, v);
    }
#else
    Sum sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        uint4* q = place(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = take(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, 0);
      }
      if (r == 0) sum.begin(v); else sum.add(v);
    }
    Vec total = sum.end();
#if defined(MODE_TWO_SHOT)
    uint4 packet = to_packet(g, i, total);
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
      push(g, place(a, g, dst, a.rank, slot, 1, g.first + u * g.stride), g.first + u * g.stride, packet);
    }
    store_vec(w.out, spot(w, a.rank, i), w.count, w.aligned, total);
#else
    store_vec(w.out, i, w.count, w.aligned, total);
#endif
#endif
  }
}

#if defined(MODE_TWO_SHOT)
// Second shot: the sums of the others.
__device__ __forceinline__ void collect_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit) p[r][u] = load_packet(place(a, g, a.rank, r, slot, 1, g.first + u * g.stride));
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      u64 i = at + u * g.stride;
      if (r == a.rank || i >= w.limit) continue;
      uint4* q = place(a, g, a.rank, r, slot, 1, g.first + u * g.stride);
      Vec v = take(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, 1);
      store_vec(w.out, spot(w, r, i), w.count, w.aligned, v);
    }
}
#endif

__device__ __forceinline__ u32 after(const Args& a, u32 slot) { return slot + 1 == a.nslots ? 0 : slot + 1; }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = look_at(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  u32 pushed = 0, push_slot = 0, slot = 0, ahead = a.ahead < w.pieces ? a.ahead : w.pieces - 1;
  for (; pushed <= ahead; pushed++, push_slot = after(a, push_slot)) push_piece(a, g, w, pushed, push_slot);
  judge(a, g, past);
  u32 ticket = draw_ticket(a, g);
#if defined(MODE_TWO_SHOT)
  u32 last = 0;
#endif
  for (u32 k = 0; k < w.pieces; k++) {
    take_piece(a, g, w, k, slot, watch);
#if defined(MODE_TWO_SHOT)
    if (k > 0) collect_piece(a, g, w, k - 1, last, watch);
    if (w.reuse && k > 0) settle(a, g, w, k - 1, last, 1, watch);
    last = slot;
#endif
    if (w.reuse) settle(a, g, w, k, slot, 0, watch);
    slot = after(a, slot);
    if (pushed < w.pieces) { push_piece(a, g, w, pushed++, push_slot); push_slot = after(a, push_slot); }
  }
#if defined(MODE_TWO_SHOT)
  collect_piece(a, g, w, w.pieces - 1, last, watch);
#endif
  count_launch(a, ticket);
}
