// Shots of several tiles (shots.cuh). Operations of more tiles than slots reuse slots: a thread
// sends at most ``lookahead`` tiles ahead of the one it has read, cleared and seen cleared
// (``await_tile_cleared``), and nslots >= 2 * lookahead + 2 >= 4 gives the reuse argument of
// packets.cuh thread by thread. Packets carry their flags; there is no fence.

// First shot: send each peer its data, the next rank first.
__device__ __forceinline__ void send_tile(const Args& a, const Geometry& g, const Workload& w,
                                          u32 k, u32 slot) {
  Vec v[UNROLL];
#pragma unroll
  for (int d = 1; d < RANKS; d++) {
    u32 dst = nth_peer(a, d);
    if (d == 1 || !SAME_FOR_ALL) load_tile(a, g, w, k, dst, v);
    send_tile_to(a, g, w, k, slot, dst, v);
  }
}

__device__ __forceinline__ u32 next_slot(const Args& a, u32 slot) {
  return slot + 1 == a.nslots ? 0 : slot + 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = begin_launch(a);
  Workload w = work_of(a, g);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
  u32 sent = 0, send_slot = 0, slot = 0,
      lookahead = a.lookahead < w.tiles ? a.lookahead : w.tiles - 1;
  for (; sent <= lookahead; sent++, send_slot = next_slot(a, send_slot))
    send_tile(a, g, w, sent, send_slot);
  compare_ops(a, g, peer_op);
  u32 ticket = take_ticket(a, g);
#if defined(MODE_TWO_SHOT)
  u32 last = 0;
#endif
  for (u32 k = 0; k < w.tiles; k++) {
    Vec own[UNROLL];
    load_tile(a, g, w, k, a.rank, own);
    recv_tile(a, g, w, k, slot, own, spin);
#if defined(MODE_TWO_SHOT)
    if (k > 0) recv_results(a, g, w, k - 1, last, spin);
    if (w.reuses_slots && k > 0) await_tile_cleared(a, g, w, k - 1, last, 1, spin);
    last = slot;
#endif
    if (w.reuses_slots) await_tile_cleared(a, g, w, k, slot, 0, spin);
    slot = next_slot(a, slot);
    if (sent < w.tiles) {
      send_tile(a, g, w, sent++, send_slot);
      send_slot = next_slot(a, send_slot);
    }
  }
#if defined(MODE_TWO_SHOT)
  recv_results(a, g, w, w.tiles - 1, last, spin);
#endif
  advance_launch(a, ticket);
}
