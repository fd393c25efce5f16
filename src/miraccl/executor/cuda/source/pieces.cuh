// Shots of many pieces (shots.cuh). Slots are used again in operations of more pieces than slots: a thread pushes at most ``ahead`` pieces ahead
// of the one it read, cleared and saw cleared (``settle``), and nslots >= 2 * ahead + 2 >= 4 gives the argument of packets.cuh thread by thread.

// First shot: to every peer what it needs, the next rank first.
__device__ __forceinline__ void send_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot) {
  Vec v[UNROLL];
#pragma unroll
  for (int d = 1; d < RANKS; d++) {
    u32 dst = rank_after(a, d);
    if (d == 1 || !SAME) load_piece(a, g, w, k, dst, v);
    push_piece(a, g, w, k, slot, dst, v);
  }
}

__device__ __forceinline__ u32 after(const Args& a, u32 slot) { return slot + 1 == a.nslots ? 0 : slot + 1; }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = work_of(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  u32 pushed = 0, push_slot = 0, slot = 0, ahead = a.ahead < w.pieces ? a.ahead : w.pieces - 1;
  for (; pushed <= ahead; pushed++, push_slot = after(a, push_slot)) send_piece(a, g, w, pushed, push_slot);
  judge(a, g, past);
  u32 ticket = draw_ticket(a, g);
#if defined(MODE_TWO_SHOT)
  u32 last = 0;
#endif
  for (u32 k = 0; k < w.pieces; k++) {
    Vec own[UNROLL];
    load_piece(a, g, w, k, a.rank, own);
    take_piece(a, g, w, k, slot, own, watch);
#if defined(MODE_TWO_SHOT)
    if (k > 0) collect_piece(a, g, w, k - 1, last, watch);
    if (w.reuse && k > 0) settle(a, g, w, k - 1, last, 1, watch);
    last = slot;
#endif
    if (w.reuse) settle(a, g, w, k, slot, 0, watch);
    slot = after(a, slot);
    if (pushed < w.pieces) { send_piece(a, g, w, pushed++, push_slot); push_slot = after(a, push_slot); }
  }
#if defined(MODE_TWO_SHOT)
  collect_piece(a, g, w, w.pieces - 1, last, watch);
#endif
  count_launch(a, ticket);
}
