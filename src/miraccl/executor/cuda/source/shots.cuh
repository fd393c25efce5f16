// One-shot and two-shot collectives (schedule.algos.one_shot, two_shot) on packets: every thread
// sends, receives and clears its own packets, without any barrier.
//
//   one_shot  all_reduce      in -> all;     out = sum in the order of the ranks
//             reduce_scatter  in[p] -> p;    out = sum in the order of the ranks
//             all_gather      in -> all;     out[r] = data of rank r
//             all_to_all      in[p] -> p;    out[r] = data of rank r
//             broadcast       in of the root -> all
//             reduce          in -> the root, out = sum in the order of the ranks
//   two_shot  all_reduce      chunk p of in -> p, which adds up in rank order, sends the sum to
//   all;
//                             chunks are whole packets
//
// This file is a thread's work on its packets of one tile; single_tile.cuh and fanout.cuh are the
// kernels of one tile, tiled.cuh and double_buffered.cuh those of several.
//
// Memory ordering: packets carry their flags (packets.cuh), so no fence is used. Source: NCCL
// src/device/symmetric/all_reduce.cuh.

#if defined(MODE_TWO_SHOT)
#define SHOTS 2
#else
#define SHOTS 1
#endif

// Address of packet ``i`` of the tile in ``slot`` from ``src`` in the memory of ``dst``. A rank has
// no run for its own data.
__device__ __forceinline__ uint4* packet_of(const Args& a, const Geometry& g, u32 dst, u32 src,
                                            u32 slot, int shot, u32 i) {
  u32 run = slot * (u32)(SHOTS * (RANKS - 1)) + shot * (RANKS - 1) + (src < dst ? src : src - 1);
  return packet_at(g, dst == a.rank ? a.inbox[src] : a.outbox[dst], run, i);
}

// Rooted operations move data only between the root and the others. Packet 0 (FRAME_MASK: the first
// 32) still goes from every rank to every rank: a rank that ends the launch has then heard from all
// others, as the alternation of the buffer halves requires. All tiles of rooted operations have
// slots; none is reused.
#if defined(MODE_BROADCAST) || defined(MODE_REDUCE)
#define ROOTED 1
#else
#define ROOTED 0
#endif
#if defined(FRAME_MASK)
#define HELLO_PACKETS 32
#else
#define HELLO_PACKETS 1
#endif
__device__ __forceinline__ bool carries(const Args& a, u32 src, u32 dst, u64 i) {
#if defined(MODE_BROADCAST)
  return src == a.root || i < HELLO_PACKETS;
#elif defined(MODE_REDUCE)
  return dst == a.root || i < HELLO_PACKETS;
#else
  return true;
#endif
}

// Return true if packet ``i`` of this rank's work arrives from ``src``.
__device__ __forceinline__ bool is_expected(const Args& a, const Workload& w, u32 src, int shot,
                                            Index i) {
  return src != a.rank && i < w.limit && (shot == 1 || carries(a, src, a.rank, i));
}

// First shot: the same data to all ranks, or different data to each.
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
#define SAME_FOR_ALL 1
#else
#define SAME_FOR_ALL 0
#endif

// Load this thread's vectors of tile ``k`` for rank ``dst``.
__device__ __forceinline__ void load_tile(const Args& a, const Geometry& g, const Workload& w,
                                          u32 k, u32 dst, Vec* v) {
  Index tile_start = (Index)k * g.tile + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (tile_start + u * g.stride < w.limit)
      v[u] = outgoing_vec(a, w, dst, tile_start + u * g.stride);
}

__device__ __forceinline__ void send_tile_to(const Args& a, const Geometry& g, const Workload& w,
                                             u32 k, u32 slot, u32 dst, const Vec* v) {
  Index tile_start = (Index)k * g.tile + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 tile_index = g.first + u * g.stride;
    if (tile_start + u * g.stride < w.limit && carries(a, a.rank, dst, tile_start + u * g.stride))
      send_packet(g, packet_of(a, g, dst, a.rank, slot, 0, tile_index), tile_index,
                  encode_packet(g, tile_start + u * g.stride, v[u]));
  }
}

// The rank ``d`` after this one, modulo RANKS.
__device__ __forceinline__ u32 nth_peer(const Args& a, u32 d) {
  return a.rank + d < RANKS ? a.rank + d : a.rank + d - RANKS;
}

// Load this thread's packets from all ranks; all loads are in flight before the first is examined.
__device__ __forceinline__ void load_tile_packets(const Args& a, const Geometry& g,
                                                  const Workload& w, u32 k, u32 slot, u32 shot,
                                                  uint4 (&p)[RANKS][UNROLL]) {
  Index tile_start = (Index)k * g.tile + g.first;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (tile_start + u * g.stride >= w.limit) continue;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && (shot == 1 || carries(a, r, a.rank, tile_start + u * g.stride)))
        p[r][u] = load_packet(packet_of(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
  }
}

// Single-tile and double-buffered kernels poll all missing packets together: one rank after the
// other, each would cost a latency of its own (a quarter of a microsecond per peer on H200). Other
// kernels wait for one packet at a time and leave the memory bandwidth to arriving packets.
#define POLL_TOGETHER ((SINGLE_TILE || DOUBLE_BUFFERED) && RANKS > 2)
__device__ __forceinline__ void await_tile_packets(const Args& a, const Geometry& g,
                                                   const Workload& w, u32 k, u32 slot, int shot,
                                                   uint4 (&p)[RANKS][UNROLL], SpinWait& spin) {
  Index tile_start = (Index)k * g.tile + g.first;
  spin.polls = 0;
  for (;;) {
    u32 missing_rank = RANKS;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        Index i = tile_start + u * g.stride;
        if (!is_expected(a, w, r, shot, i) || has_arrived(p[r][u])) continue;
        p[r][u] = load_packet(packet_of(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
        missing_rank = r;
      }
    if (missing_rank == RANKS ||
        check_abort(a, spin, missing_rank, shot == 0 ? AWAIT_PACKET : AWAIT_RESULT))
      return;
  }
}
// Lanes that waited each for its own packets stay diverged, and the warp's next stores go out in
// fragments, over NVLink as well. Kernels that store much after a wait reconverge first (two_shot
// of 16 MiB between two H200: 52 instead of 57 us); small operations do not (1.7 instead of 1.8
// us).
#define RECONVERGE (!SINGLE_TILE)
// Wait for all packets of this thread's vector ``u``, as a whole warp; ``p`` holds the values
// already loaded.
__device__ __forceinline__ void await_vector(const Args& a, const Geometry& g, const Workload& w,
                                             u32 k, u32 slot, int shot, int u,
                                             uint4 (&p)[RANKS][UNROLL], SpinWait& spin) {
#if RECONVERGE
#if !POLL_TOGETHER
  Index i = (Index)k * g.tile + g.first + u * g.stride;
#pragma unroll
  for (int r = 0; r < RANKS; r++)
    if (is_expected(a, w, r, shot, i))
      await_packet(a, spin, packet_of(a, g, a.rank, r, slot, shot, g.first + u * g.stride), p[r][u],
                   r, shot == 0 ? AWAIT_PACKET : AWAIT_RESULT);
#endif
  __syncwarp();
#endif
}
__device__ __forceinline__ Vec recv_vector(const Args& a, const Geometry& g, SpinWait& spin,
                                           uint4* q, u32 tile_index, u64 i, const uint4& p, u32 src,
                                           u32 awaited) {
#if POLL_TOGETHER || RECONVERGE
  return consume_packet(a, g, spin, q, tile_index, i, p, src, awaited);
#else
  return recv_packet(a, g, spin, q, tile_index, i, p, src, awaited);
#endif
}

// Receive the first shot: add up in the order of the ranks, or store at the source's position.
// ``own`` holds this rank's vectors for itself.
__device__ __forceinline__ void recv_tile(const Args& a, const Geometry& g, const Workload& w,
                                          u32 k, u32 slot, const Vec* own, SpinWait& spin) {
  Index tile_start = (Index)k * g.tile + g.first;
  uint4 p[RANKS][UNROLL];
  load_tile_packets(a, g, w, k, slot, 0, p);
#if POLL_TOGETHER
  await_tile_packets(a, g, w, k, slot, 0, p, spin);
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    Index i = tile_start + u * g.stride;
    await_vector(a, g, w, k, slot, 0, u, p, spin);
    if (i >= w.limit) continue;
    Accumulator sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        if (!is_expected(a, w, r, 0, i)) continue;
        uint4* q = packet_of(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = recv_vector(a, g, spin, q, g.first + u * g.stride, i, p[r][u], r, AWAIT_PACKET);
      }
#if defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
      store_vec(w.out + r * w.count, i, w.count, w.aligned, v);
#elif defined(MODE_BROADCAST)
      if (r == a.root && r != a.rank) store_vec(w.out, i, w.count, w.aligned, v);
#else
      if (r == 0)
        sum.init(v);
      else
        sum.add(v);
#endif
    }
#if defined(MODE_TWO_SHOT)
    Vec total = sum.result();
    uint4 packet = encode_packet(g, i, total);
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = nth_peer(a, d);
      send_packet(g, packet_of(a, g, dst, a.rank, slot, 1, g.first + u * g.stride),
                  g.first + u * g.stride, packet);
    }
    store_vec(w.out, chunk_vector(w, a.rank, i), w.count, w.aligned, total);
#elif defined(MODE_ALL_REDUCE) || defined(MODE_REDUCE_SCATTER)
    store_vec(w.out, i, w.count, w.aligned, sum.result());
#elif defined(MODE_REDUCE)
    if (a.rank == a.root) store_vec(w.out, i, w.count, w.aligned, sum.result());
#endif
  }
}

#if defined(MODE_TWO_SHOT)
// Second shot: receive the sums of the other ranks.
__device__ __forceinline__ void recv_results(const Args& a, const Geometry& g, const Workload& w,
                                             u32 k, u32 slot, SpinWait& spin) {
  Index tile_start = (Index)k * g.tile + g.first;
  uint4 p[RANKS][UNROLL];
  load_tile_packets(a, g, w, k, slot, 1, p);
#if POLL_TOGETHER
  await_tile_packets(a, g, w, k, slot, 1, p, spin);
#endif
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    await_vector(a, g, w, k, slot, 1, u, p, spin);
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Index i = tile_start + u * g.stride;
      if (r == a.rank || i >= w.limit) continue;
      uint4* q = packet_of(a, g, a.rank, r, slot, 1, g.first + u * g.stride);
      Vec v = recv_vector(a, g, spin, q, g.first + u * g.stride, i, p[r][u], r, AWAIT_RESULT);
      store_vec(w.out, chunk_vector(w, r, i), w.count, w.aligned, v);
    }
  }
}
#endif

// Wait until the packets that this thread cleared in a tile are cleared in L2 (``await_cleared``).
__device__ __forceinline__ void await_tile_cleared(const Args& a, const Geometry& g,
                                                   const Workload& w, u32 k, u32 slot, u32 shot,
                                                   SpinWait& spin) {
  Index tile_start = (Index)k * g.tile + g.first;
  uint4 p[RANKS][UNROLL];
  load_tile_packets(a, g, w, k, slot, shot, p);
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (is_expected(a, w, r, shot, tile_start + u * g.stride))
        await_cleared(a, spin, packet_of(a, g, a.rank, r, slot, shot, g.first + u * g.stride),
                      p[r][u]);
  __syncwarp();  // reconverge, see RECONVERGE
}
