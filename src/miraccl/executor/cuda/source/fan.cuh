// Shots of one piece (shots.cuh) among three and more ranks, for the smallest messages: FAN neighbouring threads share a packet, one for each rank.
//
// once.cuh, where a thread talks to all ranks, has a text that grows with their number, and most of its instructions are read for the first time.
// Here a thread sends to one rank and waits for one, as between two ranks; sums are taken from the others' registers, in the order of the ranks.
// Packets lie where once.cuh has them. Not for masked ones, which are the work of whole warps.

__device__ __forceinline__ Geometry spread_fans() {
  Geometry g = spread();
  g.first = (blockIdx.x * THREADS + threadIdx.x) / FAN;
  g.piece = g.room = gridDim.x * THREADS / FAN;
  return g;
}

// What rank ``src`` is to bring to the vector of this thread's fan.
__device__ __forceinline__ Vec held_by(const Vec& v, u32 src) {
  Vec x;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++) x.w[j] = __shfl_sync(WHOLE_WARP, v.w[j], (int)(threadIdx.x % 32 / FAN * FAN + src));
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = spread_fans();
  Work w = work_of(a, g);
  u32 peer = threadIdx.x % FAN, i = g.first;
  bool works = i < w.limit && peer < RANKS, other = works && peer != a.rank;
  after_grid_before();
  before_next_grid();
  u64 number = number_of_launch(a);
  Vec v;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++) v.w[j] = 0;
  if (works) v = outgoing(a, w, peer, i);
  use_number(g, number);
  if (other && moves(a, a.rank, peer, i)) push(g, place(a, g, peer, a.rank, 0, 0, i), i, to_packet(g, i, v));
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  u32 ticket = draw_ticket(a, g);
  if (other && moves(a, peer, a.rank, i)) {
    uint4* q = place(a, g, a.rank, peer, 0, 0, i);
    v = take(a, g, watch, q, i, i, load_packet(q), peer, WHAT_PACKET);
  }
#if defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  if (works) store_vec(w.out + peer * w.count, i, w.count, w.aligned, v);
#elif defined(MODE_BROADCAST)
  if (other && peer == a.root) store_vec(w.out, i, w.count, w.aligned, v);
#else
  __syncwarp();
  Sum sum;
  sum.begin(held_by(v, 0));
#pragma unroll
  for (u32 r = 1; r < RANKS; r++) sum.add(held_by(v, r));
  Vec total = sum.end();
#if defined(MODE_TWO_SHOT)
  if (works && !other) store_vec(w.out, spot(w, peer, i), w.count, w.aligned, total);
  if (other) {
    push(g, place(a, g, peer, a.rank, 0, 1, i), i, to_packet(g, i, total));
    uint4* q = place(a, g, a.rank, peer, 0, 1, i);
    v = take(a, g, watch, q, i, i, load_packet(q), peer, WHAT_RESULT);
    store_vec(w.out, spot(w, peer, i), w.count, w.aligned, v);
  }
#elif defined(MODE_REDUCE)
  if (works && peer == 0 && a.rank == a.root) store_vec(w.out, i, w.count, w.aligned, total);
#else
  if (works && peer == 0) store_vec(w.out, i, w.count, w.aligned, total);
#endif
#endif
  judge(a, g, past);
  count_launch(a, ticket);
}
