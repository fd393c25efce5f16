// two_shot in parts (shots.cuh), for what a bank holds in one piece only in parts: each part is a launch by its number, and lies in that one's bank.
// Slots for several pieces would be small, and each would be read, cleared and seen cleared before it is used again (pieces.cuh); parts are as
// large as a bank allows, and while one is summed up the next one is on its way. What a launch relies on is kept part by part and thread by
// thread, as the threads with packets have as many in every part:
//   - part 1 goes into the bank of the launch before: who has this thread's part 0 from a peer knows that this one has ended that launch;
//   - part k goes over part k - 2: whose part k - 1 is summed up has read and cleared that one, and seen it cleared;
//   - so has every peer for the part before the last when this thread has the last one's sums: the next launch may use that bank, and the one
//     after it the last one's, as after any launch (packets.cuh).

__device__ __forceinline__ void send_part(const Args& a, const Geometry& g, const Work& w, u32 k) {
  Vec v[RANKS - 1][UNROLL];  // all loads are under way before the first is waited for
#pragma unroll
  for (int d = 1; d < RANKS; d++) load_piece(a, g, w, k, rank_after(a, d), v[d - 1]);
#pragma unroll
  for (int d = 1; d < RANKS; d++) push_piece(a, g, w, k, 0, rank_after(a, d), v[d - 1]);
}

__device__ __forceinline__ void sum_part(const Args& a, const Geometry& g, const Work& w, u32 k, Watch& watch) {
  Vec own[UNROLL];
  load_piece(a, g, w, k, a.rank, own);
  watch.launch = (u32)g.launch + 1;
  take_piece(a, g, w, k, 0, own, watch);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = spread();
  Work w = work_of(a, g);
  g.piece = w.limit / w.pieces;  // whole warps have packets, or none
  bool works = g.first < g.piece;
  after_grid_before();
  use_number(g, number_of_launch(a));
  Watch watch = {0, 0, (u32)g.launch + 1};
  if (works) send_part(a, g, w, 0);
  judge(a, g, announce(a, g));
  u32 ticket = draw_ticket(a, g);
  if (works) {
    sum_part(a, g, w, 0, watch);
    for (u32 k = 1; k < w.pieces; k++) {
      Geometry before = g;
      if (k > 1) collect_piece(a, before, w, k - 1, 0, watch);
      use_number(g, before.launch + 1);
      send_part(a, g, w, k);
      judge(a, g, announce(a, g));
      if (k == 1) collect_piece(a, before, w, 0, 0, watch);
      settle(a, before, w, k - 1, 0, 0, watch);
      settle(a, before, w, k - 1, 0, 1, watch);
      sum_part(a, g, w, k, watch);
    }
    collect_piece(a, g, w, w.pieces - 1, 0, watch);
  }
  before_next_grid();  // only now: blocks of the next one, which may take all registers of a multiprocessor, would stand where small launches have room
  count_launch(a, ticket, w.pieces);
}
