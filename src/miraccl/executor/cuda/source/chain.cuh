// Chain (schedule.algos.chain) on packets: broadcast from the root along the ring, reduce to the
// root in the opposite direction.
//
// Every thread receives its packets of a tile from the previous rank of the chain, keeps or adds
// them, and sends them to the next one: every link carries each byte once, and only neighbours
// communicate.
//
// Memory ordering: packets carry their flags (packets.cuh); slots are reused after acks (acks.cuh).
// Source: NCCL src/device/broadcast.h and reduce.h.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  Geometry g = begin_launch(a);
  Workload w = work_of(a, g);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
#if defined(MODE_REDUCE_CHAIN)
  u32 upstream = a.next, downstream = a.prev;
  bool first = upstream == a.root, last = a.rank == a.root;
#else
  u32 upstream = a.prev, downstream = a.next;
  bool first = a.rank == a.root, last = downstream == a.root;
#endif
  send_hellos(a, g, a.nslots);
  u64* ack = ack_word(g, a.inbox[downstream], a.nslots, 0);
  u32 ticket = 0, slot = 0;
  for (u32 k = 0; k < w.tiles; k++) {
    u64 tile_start = (u64)k * g.tile + g.first;
    uint4 p[UNROLL];
    Vec v[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = tile_start + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) p[u] = load_packet(packet_at(g, a.inbox[upstream], slot, g.first + u * g.stride));
      if (first || REDUCES) v[u] = outgoing_vec(a, w, 0, i);
    }
    if (!last && k >= a.nslots) await_ack(a, spin, ack, k + 1 - a.nslots, downstream);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = tile_start + u * g.stride;
      if (i >= w.limit) continue;
      if (!first) {
        uint4* q = packet_at(g, a.inbox[upstream], slot, g.first + u * g.stride);
        Vec received =
            recv_packet(a, g, spin, q, g.first + u * g.stride, i, p[u], upstream, AWAIT_PACKET);
#if REDUCES
        Accumulator sum;
        sum.init(v[u]);
        sum.add(received);
        v[u] = last ? sum.result() : sum.partial();
#else
        v[u] = received;
#endif
      }
      if (!last)
        send_packet(g, packet_at(g, a.outbox[downstream], slot, g.first + u * g.stride),
                    g.first + u * g.stride, encode_packet(g, i, v[u]));
      if (REDUCES ? last : !first) store_vec(w.out, i, w.count, w.aligned, v[u]);
    }
    if (k == 0) {
      compare_ops(a, g, peer_op);
      ticket = take_ticket(a, g);
    }
    if (!first && k + a.nslots < w.tiles) {
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        uint4* q = packet_at(g, a.inbox[upstream], slot, g.first + u * g.stride);
        if (tile_start + u * g.stride < w.limit) await_cleared(a, spin, q, load_packet(q));
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) store_word(ack_word(g, a.outbox[upstream], a.nslots, 0), k + 1);
    }
    slot = slot + 1 == a.nslots ? 0 : slot + 1;
  }
  __syncwarp();
  if (!last && w.reuses_slots && threadIdx.x % 32 == 0) *ack = EMPTY_WORD;
  await_hellos(a, g, spin, a.nslots);
  advance_launch(a, ticket);
}
