// Shots of one piece (shots.cuh): what small messages are, whose time is made of latencies. So
//   - all loads are under way before anything waits for one: the number of the launch, without which no packet has an address, and the data;
//   - what can wait stands after the packets have left: the board, the ticket;
//   - the text is short, since most of it is read for the first time: no loops, and what is rare is out of the way (RARELY).

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = spread();
  Work w = work_of(a, g);
  after_grid_before();
  before_next_grid();
  u64 number = number_of_launch(a);
  Vec own[UNROLL], v[SAME ? 1 : RANKS - 1][UNROLL];
#if SAME
  load_piece(a, g, w, 0, 0, own);
#else
#pragma unroll
  for (int d = 1; d < RANKS; d++) load_piece(a, g, w, 0, rank_after(a, d), v[d - 1]);
  load_piece(a, g, w, 0, a.rank, own);
#endif
  use_number(g, number);
#pragma unroll
  for (int d = 1; d < RANKS; d++) push_piece(a, g, w, 0, 0, rank_after(a, d), SAME ? own : v[d - 1]);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  u32 ticket = draw_ticket(a, g);
  take_piece(a, g, w, 0, 0, own, watch);
#if defined(MODE_TWO_SHOT)
  collect_piece(a, g, w, 0, 0, watch);
#endif
  judge(a, g, past);
  count_launch(a, ticket);
}
