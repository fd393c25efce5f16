// Single-tile shots (shots.cuh) among three or more ranks, for the smallest messages: FANOUT
// neighbouring threads share a packet, one thread per rank.
//
// In single_tile.cuh a thread talks to all ranks, so its code grows with their number, and most
// instructions are fetched for the first time. Here a thread sends to one rank and receives from
// one, as with two ranks; sums take the other vectors from registers of the neighbouring threads,
// in the order of the ranks.
//
// Memory ordering and layout are those of single_tile.cuh: packets lie at the same addresses. Not
// for FRAME_MASK, whose packets are the work of whole warps.

__device__ __forceinline__ Geometry make_fanout_geometry() {
  Geometry g = make_geometry();
  g.first = (blockIdx.x * THREADS + threadIdx.x) / FANOUT;
  g.tile = g.run_stride = gridDim.x * THREADS / FANOUT;
  return g;
}

// Vector of rank ``src`` in this thread's group of FANOUT threads.
__device__ __forceinline__ Vec vector_of_rank(const Vec& v, u32 src) {
  Vec x;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++)
    x.w[j] = __shfl_sync(WHOLE_WARP, v.w[j], (int)(threadIdx.x % 32 / FANOUT * FANOUT + src));
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = make_fanout_geometry();
  Workload w = work_of(a, g);
  u32 peer = threadIdx.x % FANOUT, i = g.first;
  bool active = i < w.limit && peer < RANKS, remote = active && peer != a.rank;
  wait_previous_grid();
  launch_dependents();
  u64 launch_number = load_launch_number(a);
  Vec v;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++) v.w[j] = 0;
  if (active) v = outgoing_vec(a, w, peer, i);
  set_launch(g, launch_number);
  if (remote && carries(a, a.rank, peer, i))
    send_packet(g, packet_of(a, g, peer, a.rank, 0, 0, i), i, encode_packet(g, i, v));
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
  u32 ticket = take_ticket(a, g);
  if (remote && carries(a, peer, a.rank, i)) {
    uint4* q = packet_of(a, g, a.rank, peer, 0, 0, i);
    v = recv_packet(a, g, spin, q, i, i, load_packet(q), peer, AWAIT_PACKET);
  }
#if defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  if (active) store_vec(w.out + peer * w.count, i, w.count, w.aligned, v);
#elif defined(MODE_BROADCAST)
  if (remote && peer == a.root) store_vec(w.out, i, w.count, w.aligned, v);
#else
  __syncwarp();
  Accumulator sum;
  sum.init(vector_of_rank(v, 0));
#pragma unroll
  for (u32 r = 1; r < RANKS; r++) sum.add(vector_of_rank(v, r));
  Vec total = sum.result();
#if defined(MODE_TWO_SHOT)
  if (active && !remote) store_vec(w.out, chunk_vector(w, peer, i), w.count, w.aligned, total);
  if (remote) {
    send_packet(g, packet_of(a, g, peer, a.rank, 0, 1, i), i, encode_packet(g, i, total));
    uint4* q = packet_of(a, g, a.rank, peer, 0, 1, i);
    v = recv_packet(a, g, spin, q, i, i, load_packet(q), peer, AWAIT_RESULT);
    store_vec(w.out, chunk_vector(w, peer, i), w.count, w.aligned, v);
  }
#elif defined(MODE_REDUCE)
  if (active && peer == 0 && a.rank == a.root) store_vec(w.out, i, w.count, w.aligned, total);
#else
  if (active && peer == 0) store_vec(w.out, i, w.count, w.aligned, total);
#endif
#endif
  compare_ops(a, g, peer_op);
  advance_launch(a, ticket);
}
