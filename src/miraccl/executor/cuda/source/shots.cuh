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
// Here is what a thread does with its packets of a piece; once.cuh and fan.cuh are the kernels of one piece, pieces.cuh and parts.cuh those of many.

#if defined(MODE_TWO_SHOT)
#define SHOTS 2
#else
#define SHOTS 1
#endif

// Where packet ``i`` of the piece in ``slot`` from ``src`` lies in the memory of ``dst``. A rank has no place for its own.
__device__ __forceinline__ uint4* place(const Args& a, const Geometry& g, u32 dst, u32 src, u32 slot, int shot, u32 i) {
  u32 run = slot * (u32)(SHOTS * (RANKS - 1)) + shot * (RANKS - 1) + (src < dst ? src : src - 1);
  return place_in(g, dst == a.rank ? a.inbox[src] : a.outbox[dst], run, i);
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

// Whether packet ``i`` of what this rank works on comes to it from ``src``.
__device__ __forceinline__ bool comes(const Args& a, const Work& w, u32 src, int shot, Index i) {
  return src != a.rank && i < w.limit && (shot == 1 || moves(a, src, a.rank, i));
}

// What goes out in the first shot: the same to all, or to every rank its own.
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
#define SAME 1
#else
#define SAME 0
#endif

// This thread's vectors of piece ``k`` for rank ``dst``.
__device__ __forceinline__ void load_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 dst, Vec* v) {
  Index at = (Index)k * g.piece + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (at + u * g.stride < w.limit) v[u] = outgoing(a, w, dst, at + u * g.stride);
}

__device__ __forceinline__ void push_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, u32 dst, const Vec* v) {
  Index at = (Index)k * g.piece + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 here = g.first + u * g.stride;
    if (at + u * g.stride < w.limit && moves(a, a.rank, dst, at + u * g.stride))
      push(g, place(a, g, dst, a.rank, slot, 0, here), here, to_packet(g, at + u * g.stride, v[u]));
  }
}

// The rank ``d`` places after this one.
__device__ __forceinline__ u32 rank_after(const Args& a, u32 d) { return a.rank + d < RANKS ? a.rank + d : a.rank + d - RANKS; }

// What lies in the places of this thread's packets from everybody; all loads are under way before the first is looked at.
__device__ __forceinline__ void load_packets(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, u32 shot, uint4 (&p)[RANKS][UNROLL]) {
  Index at = (Index)k * g.piece + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (at + u * g.stride >= w.limit) continue;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && (shot == 1 || moves(a, r, a.rank, at + u * g.stride)))
        p[r][u] = load_packet(place(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
  }
}

// Operations of one piece, and parts of such a size, look at all packets that have not come at once: one rank's after the other's, each would cost
// a latency of its own (a quarter of a microsecond per peer on H200). Others wait for one at a time, and leave the memory to the packets that come.
#define TOGETHER ((SINGLE || PARTS) && RANKS > 2)
__device__ __forceinline__ void await_packets(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, int shot, uint4 (&p)[RANKS][UNROLL], Watch& watch) {
  Index at = (Index)k * g.piece + g.first;
  watch.spins = 0;
  for (;;) {
    u32 late = RANKS;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        Index i = at + u * g.stride;
        if (!comes(a, w, r, shot, i) || arrived(p[r][u])) continue;
        p[r][u] = load_packet(place(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
        late = r;
      }
    if (late == RANKS || give_up(a, watch, late, shot == 0 ? WHAT_PACKET : WHAT_RESULT)) return;
  }
}
// Lanes that waited each for its own packets go on apart: what the warp stores next goes out in shreds, over NVLink, too. Where it stores much after
// it has waited, they are brought together before (two_shot of 16 MiB between two H200: 57 to 52 us); small operations go without (1.7 to 1.8 us).
#define BY_WARPS (!SINGLE)
// Returns when all packets of this thread's vector ``u`` have come, for a whole warp; ``p`` is what was read there already.
__device__ __forceinline__ void await_vector(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, int shot, int u, uint4 (&p)[RANKS][UNROLL], Watch& watch) {
#if BY_WARPS
#if !TOGETHER
  Index i = (Index)k * g.piece + g.first + u * g.stride;
#pragma unroll
  for (int r = 0; r < RANKS; r++)
    if (comes(a, w, r, shot, i))
      await_packet(a, watch, place(a, g, a.rank, r, slot, shot, g.first + u * g.stride), p[r][u], r, shot == 0 ? WHAT_PACKET : WHAT_RESULT);
#endif
  __syncwarp();
#endif
}
__device__ __forceinline__ Vec receive(const Args& a, const Geometry& g, Watch& watch, uint4* q, u32 here, u64 i, const uint4& p, u32 src, u32 what) {
#if TOGETHER || BY_WARPS
  return open_packet(a, g, watch, q, here, i, p, src, what);
#else
  return take(a, g, watch, q, here, i, p, src, what);
#endif
}

// What came in the first shot: added up in the order of the ranks, or put in its place. ``own`` are this rank's vectors for itself.
__device__ __forceinline__ void take_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, const Vec* own, Watch& watch) {
  Index at = (Index)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
  load_packets(a, g, w, k, slot, 0, p);
#if TOGETHER
  await_packets(a, g, w, k, slot, 0, p, watch);
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    Index i = at + u * g.stride;
    await_vector(a, g, w, k, slot, 0, u, p, watch);
    if (i >= w.limit) continue;
    Sum sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        if (!comes(a, w, r, 0, i)) continue;
        uint4* q = place(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = receive(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, WHAT_PACKET);
      }
#if defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
      store_vec(w.out + r * w.count, i, w.count, w.aligned, v);
#elif defined(MODE_BROADCAST)
      if (r == a.root && r != a.rank) store_vec(w.out, i, w.count, w.aligned, v);
#else
      if (r == 0) sum.begin(v); else sum.add(v);
#endif
    }
#if defined(MODE_TWO_SHOT)
    Vec total = sum.end();
    uint4 packet = to_packet(g, i, total);
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = rank_after(a, d);
      push(g, place(a, g, dst, a.rank, slot, 1, g.first + u * g.stride), g.first + u * g.stride, packet);
    }
    store_vec(w.out, spot(w, a.rank, i), w.count, w.aligned, total);
#elif defined(MODE_ALL_REDUCE) || defined(MODE_REDUCE_SCATTER)
    store_vec(w.out, i, w.count, w.aligned, sum.end());
#elif defined(MODE_REDUCE)
    if (a.rank == a.root) store_vec(w.out, i, w.count, w.aligned, sum.end());
#endif
  }
}

#if defined(MODE_TWO_SHOT)
// Second shot: the sums of the others.
__device__ __forceinline__ void collect_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, Watch& watch) {
  Index at = (Index)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
  load_packets(a, g, w, k, slot, 1, p);
#if TOGETHER
  await_packets(a, g, w, k, slot, 1, p, watch);
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    await_vector(a, g, w, k, slot, 1, u, p, watch);
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Index i = at + u * g.stride;
      if (r == a.rank || i >= w.limit) continue;
      uint4* q = place(a, g, a.rank, r, slot, 1, g.first + u * g.stride);
      Vec v = receive(a, g, watch, q, g.first + u * g.stride, i, p[r][u], r, WHAT_RESULT);
      store_vec(w.out, spot(w, r, i), w.count, w.aligned, v);
    }
  }
}
#endif

// Returns when what this thread cleared of a piece lies cleared in L2 (``wait_empty``).
__device__ __forceinline__ void settle(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, u32 shot, Watch& watch) {
  Index at = (Index)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
  load_packets(a, g, w, k, slot, shot, p);
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (comes(a, w, r, shot, at + u * g.stride))
        wait_empty(a, watch, place(a, g, a.rank, r, slot, shot, g.first + u * g.stride), p[r][u]);
  __syncwarp();  // as after ``await_vector``
}
