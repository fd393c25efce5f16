// Single-tile shots (shots.cuh): small messages, whose time consists of latencies. Therefore
//   - all loads are in flight before anything waits for one: the launch number, without which no
//     packet has an address, and the data;
//   - work that can wait follows after the packets have left: the op record, the ticket;
//   - the code is short, since most of it is fetched for the first time: no loops, cold paths out
//     of line (COLD).
//
// Memory ordering: packets carry their flags, and no slot is reused within the launch
// (packets.cuh). Source: NCCL src/device/symmetric/all_reduce.cuh (AllReduce_AGxLL_R,
// AllReduce_RSxLD_AGxST).

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = make_geometry();
  Workload w = work_of(a, g);
  wait_previous_grid();
  launch_dependents();
  u64 launch_number = load_launch_number(a);
  Vec own[UNROLL], v[SAME_FOR_ALL ? 1 : RANKS - 1][UNROLL];
#if SAME_FOR_ALL
  load_tile(a, g, w, 0, 0, own);
#else
#pragma unroll
  for (int d = 1; d < RANKS; d++) load_tile(a, g, w, 0, nth_peer(a, d), v[d - 1]);
  load_tile(a, g, w, 0, a.rank, own);
#endif
  set_launch(g, launch_number);
#pragma unroll
  for (int d = 1; d < RANKS; d++)
    send_tile_to(a, g, w, 0, 0, nth_peer(a, d), SAME_FOR_ALL ? own : v[d - 1]);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
  u32 ticket = take_ticket(a, g);
  recv_tile(a, g, w, 0, 0, own, spin);
#if defined(MODE_TWO_SHOT)
  recv_results(a, g, w, 0, 0, spin);
#endif
  compare_ops(a, g, peer_op);
  advance_launch(a, ticket);
}
