// Double-buffered two_shot (shots.cuh), for operations that exceed one buffer half: each tile
// counts as a launch of its own number and lies in the half of that number, so consecutive tiles
// alternate between the halves.
//
// Slots for several tiles would be small, and each would be read, cleared and seen cleared before
// reuse (tiled.cuh). Here tiles are as large as a half allows, and while one is summed up the next
// one is in flight.
//
// Reuse of memory is argued tile by tile and thread by thread, because every thread has the same
// packets in each tile:
//   - tile 1 goes into the half of the previous launch: a thread that has a peer's packets of tile
//     0 knows that the peer has ended that launch;
//   - tile k overwrites tile k - 2: a peer whose part of tile k - 1 is summed up has read and
//     cleared tile k - 2 and seen it cleared;
//   - the same holds for the last but one tile when a thread has the sums of the last one: the next
//     launch may use that half, and the launch after it the half of the last tile, as after any
//     launch (packets.cuh).

__device__ __forceinline__ void send_tile(const Args& a, const Geometry& g, const Workload& w,
                                          u32 k) {
  Vec v[RANKS - 1][UNROLL];  // all loads are in flight before the first is awaited
#pragma unroll
  for (int d = 1; d < RANKS; d++) load_tile(a, g, w, k, nth_peer(a, d), v[d - 1]);
#pragma unroll
  for (int d = 1; d < RANKS; d++) send_tile_to(a, g, w, k, 0, nth_peer(a, d), v[d - 1]);
}

__device__ __forceinline__ void reduce_tile(const Args& a, const Geometry& g, const Workload& w,
                                            u32 k, SpinWait& spin) {
  Vec own[UNROLL];
  load_tile(a, g, w, k, a.rank, own);
  spin.launch = (u32)g.launch + 1;
  recv_tile(a, g, w, k, 0, own, spin);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = make_geometry();
  Workload w = work_of(a, g);
  g.tile = w.limit / w.tiles;  // warps have packets as a whole, or none
  bool active = g.first < g.tile;
  wait_previous_grid();
  set_launch(g, load_launch_number(a));
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  if (active) send_tile(a, g, w, 0);
  compare_ops(a, g, publish_op(a, g));
  u32 ticket = take_ticket(a, g);
  if (active) {
    reduce_tile(a, g, w, 0, spin);
    for (u32 k = 1; k < w.tiles; k++) {
      Geometry previous = g;
      if (k > 1) recv_results(a, previous, w, k - 1, 0, spin);
      set_launch(g, previous.launch + 1);
      send_tile(a, g, w, k);
      compare_ops(a, g, publish_op(a, g));
      if (k == 1) recv_results(a, previous, w, 0, 0, spin);
      await_tile_cleared(a, previous, w, k - 1, 0, 0, spin);
      await_tile_cleared(a, previous, w, k - 1, 0, 1, spin);
      reduce_tile(a, g, w, k, spin);
    }
    recv_results(a, g, w, w.tiles - 1, 0, spin);
  }
  // only here: blocks of the next grid may take all registers of a multiprocessor and would occupy
  // those where small launches fit
  launch_dependents();
  advance_launch(a, ticket, w.tiles);
}
