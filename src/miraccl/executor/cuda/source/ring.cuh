// Ring all_reduce (schedule.algos.ring) on packets, for large blocks: only neighbours communicate,
// which NVLink carries better than all pairs at once.
//
// A thread handles all HOPS per iteration, each of another tile: in iteration j it receives hop t
// of tile j - 1 - t, which its neighbour sent in iteration j - 1, and sends hop t + 1 of that tile.
// Sums are rounded at every hop, as in NCCL (src/device/all_reduce.h, runRing).
//
// Reuse of slots: a rank receives nothing directly from the rank it sends to, but around the ring:
// data received in iteration j depend on packets that the rank n - 1 hops before sent in iteration
// j - (n - 1), after it had seen everything earlier cleared; hence nslots >= n + 1. Packets carry
// their flags; there is no fence.
#define HOPS (2 * (RANKS - 1))  // hops of a chunk: once around for the sum, once for the result

__device__ __forceinline__ uint4* hop_packet(const Args& a, const Geometry& g, char* region,
                                             u32 tile, u32 hop, u32 i) {
  return packet_at(g, region, (tile % a.nslots) * HOPS + hop, i);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = begin_launch(a);
  Workload w = work_of(a, g);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
  // chunks are numbered by ring index
  u32 prev = a.prev, next = a.next, last = (a.position + RANKS - 1) % RANKS, ticket = 0;
  for (u32 j = 0; j < w.tiles + HOPS; j++) {
    uint4 p[HOPS][UNROLL];
    Vec own[RANKS - 1][UNROLL];
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.tile + g.first + u * g.stride;
        if (j < t + 1 || m >= w.tiles || i >= w.limit) continue;
        p[t][u] = load_packet(hop_packet(a, g, a.inbox[prev], m, t, g.first + u * g.stride));
        if (t < RANKS - 1)
          own[t][u] = outgoing_vec(a, w, (a.position + 2 * RANKS - 2 - t) % RANKS, i);
      }
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t, tile_index = g.first + u * g.stride;
        u64 i = (u64)m * g.tile + tile_index;
        if (j < t + 1 || m >= w.tiles || i >= w.limit) continue;
        uint4* q = hop_packet(a, g, a.inbox[prev], m, t, tile_index);
        Vec v = recv_packet(a, g, spin, q, tile_index, i, p[t][u], prev, AWAIT_PACKET);
        if (t < RANKS - 1) {
          Accumulator sum;
          sum.init(own[t][u]);
          sum.add(v);
          v = t == RANKS - 2 ? sum.result() : sum.partial();
        }
        if (t + 1 < HOPS)
          send_packet(g, hop_packet(a, g, a.outbox[next], m, t + 1, tile_index), tile_index,
                      encode_packet(g, i, v));
        if (t >= RANKS - 2)
          store_vec(w.out, chunk_vector(w, (a.position + 2 * RANKS - 2 - t) % RANKS, i), w.count,
                    w.aligned, v);
      }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
      u32 tile_index = g.first + u * g.stride;
      u64 i = (u64)j * g.tile + tile_index;
      if (j < w.tiles && i < w.limit)
        send_packet(g, hop_packet(a, g, a.outbox[next], j, 0, tile_index), tile_index,
                    encode_packet(g, i, outgoing_vec(a, w, last, i)));
    }
    if (j == 0) {
      compare_ops(a, g, peer_op);
      ticket = take_ticket(a, g);
    }
    if (!w.reuses_slots) continue;
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.tile + g.first + u * g.stride;
        if (j >= t + 1 && m < w.tiles && i < w.limit)
          p[t][u] = load_packet(hop_packet(a, g, a.inbox[prev], m, t, g.first + u * g.stride));
      }
#pragma unroll
    for (u32 t = 0; t < HOPS; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.tile + g.first + u * g.stride;
        if (j >= t + 1 && m < w.tiles && i < w.limit)
          await_cleared(a, spin, hop_packet(a, g, a.inbox[prev], m, t, g.first + u * g.stride),
                        p[t][u]);
      }
  }
  advance_launch(a, ticket);
}
