// Trees (schedule.algos.double_binary_tree) on packets: sums rise from the leaves to the root, results fall from the root to the leaves.
//   all_reduce  both, in NCCL's pair of trees
//   reduce      sums rise in two trees that hang from the root of the operation
//   broadcast   the root's data fall in these
//
// The warps of a launch belong to the two trees in turns, and so do runs of 32 * UNROLL vectors: both have half of the work, whatever the size, and
// nothing is cut. A thread takes its packets of a piece from its children, adds them to its own in the order of the schedule (16- and 8-bit floats in
// float32), rounds the sum and pushes it to its parent; the root ends it, keeps it and pushes it to its children, who keep it and pass it on.
//
// In all_reduce a thread pushes piece j up in iteration j and takes piece j - lag from above, so that a tree is full of pieces. Nobody sends acks:
//   up    Who pushes piece j has taken j - 1 - lag from its parent. That one pushed it in its iteration j - 1, or as the root in j - 1 - lag, after
//         it had read, cleared and seen cleared what rose in all iterations before that one: pieces up to j - 2 - lag at least.
//   down  Who pushes piece k to a child has taken from it piece k (the root), or k + lag, or the last one of all. The child pushed this one after
//         it had seen cleared what fell in all iterations before: pieces up to k - 1 - lag at least.
// Hence nslots >= lag + 2. Every result is made of packets that all ranks sent in this launch, as the use of the banks demands (packets.cuh).
// In reduce and broadcast nobody hears from the rank it sends to: there are acks and hellos (acks.cuh).

#if defined(MODE_ALL_REDUCE_TREE)
#define RISES 1
#define FALLS 1
#else
#define RISES REDUCES
#define FALLS (!REDUCES)
#endif
#define ONE_WAY (!(RISES && FALLS))

// What a piece brings to a rank: a message from the first child, one from the second, one from the parent.
#define SOURCES (2 * RISES + FALLS)
#define FROM_PARENT (SOURCES - 1)
__device__ __forceinline__ uint4* source_place(const Geometry& g, char* box, u32 slot, u32 source, u32 i) { return place_in(g, box, slot * SOURCES + source, i); }

// An iteration: this thread's first vectors that rise and fall, and the slots that they come in.
struct Turn {
  u64 rise, fall;
  u32 rise_slot, fall_slot;
};
__device__ __forceinline__ uint4* from_child(const Args& a, const Geometry& g, const Branch& t, const Turn& turn, int c, u32 i) {
  return source_place(g, a.inbox[t.down[c]], turn.rise_slot, c, i);
}
__device__ __forceinline__ uint4* from_parent(const Args& a, const Geometry& g, const Branch& t, const Turn& turn, u32 i) {
  return source_place(g, a.inbox[t.up], turn.fall_slot, FROM_PARENT, i);
}

// What lies in the places of an iteration.
struct Coming { uint4 below[2][UNROLL], above[UNROLL]; };
__device__ __forceinline__ void load_coming(const Args& a, const Geometry& g, const Work& w, const Branch& t, const Turn& turn, Coming& p) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 here = g.first + u * g.stride;
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (RISES && t.down[c] != NOBODY && turn.rise + u * g.stride < w.limit) p.below[c][u] = load_packet(from_child(a, g, t, turn, c, here));
    if (FALLS && t.up != NOBODY && turn.fall + u * g.stride < w.limit) p.above[u] = load_packet(from_parent(a, g, t, turn, here));
  }
}

// Returns when what this thread cleared in an iteration lies cleared in L2 (``wait_empty``).
__device__ __forceinline__ void settle(const Args& a, const Geometry& g, const Work& w, const Branch& t, const Turn& turn, Watch& watch) {
  Coming p;
  load_coming(a, g, w, t, turn, p);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 here = g.first + u * g.stride;
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (RISES && t.down[c] != NOBODY && turn.rise + u * g.stride < w.limit) wait_empty(a, watch, from_child(a, g, t, turn, c, here), p.below[c][u]);
    if (FALLS && t.up != NOBODY && turn.fall + u * g.stride < w.limit) wait_empty(a, watch, from_parent(a, g, t, turn, here), p.above[u]);
  }
}

// Where data go one way: until this warp's piece ``j`` has room at all that it sends to.
__device__ __forceinline__ void wait_room(const Args& a, const Geometry& g, const Branch& t, Watch& watch, u32 j) {
  u32 runs = a.nslots * SOURCES, taken = j + 1 - a.nslots;
  if (RISES && t.up != NOBODY) wait_ack(a, watch, ack_place(g, a.inbox[t.up], runs, 0), taken, t.up);
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (FALLS && t.down[c] != NOBODY) wait_ack(a, watch, ack_place(g, a.inbox[t.down[c]], runs, c), taken, t.down[c]);
}

// One thread of a warp: piece ``j`` has been read and cleared; who sent it may use its slot again.
__device__ __forceinline__ void tell_room(const Args& a, const Geometry& g, const Branch& t, u32 j) {
  u32 runs = a.nslots * SOURCES;
  if (FALLS && t.up != NOBODY) store_word(ack_place(g, a.outbox[t.up], runs, t.child), j + 1);
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (RISES && t.down[c] != NOBODY) store_word(ack_place(g, a.outbox[t.down[c]], runs, 0), j + 1);
}

// One thread of a warp, at the end: the acks that it has seen.
__device__ __forceinline__ void clear_acks(const Args& a, const Geometry& g, const Branch& t) {
  u32 runs = a.nslots * SOURCES;
  if (RISES && t.up != NOBODY) *ack_place(g, a.inbox[t.up], runs, 0) = NEVER;
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (FALLS && t.down[c] != NOBODY) *ack_place(g, a.inbox[t.down[c]], runs, c) = NEVER;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  Work w = work_of(a, g);
  Watch watch = {0, 0, (u32)g.launch + 1};
  Past past = announce(a, g);
  Branch t = a.trees[g.warp % 2];
  Turn turn = {g.first, w.limit, 0, 0};
  bool top = t.up == NOBODY;
  u32 ticket = 0, lag = ONE_WAY ? 0 : a.ahead;
  if (ONE_WAY) greet(a, g, a.nslots * SOURCES);
  for (u32 j = 0; j < w.pieces + lag; j++) {
    if (j == lag) turn.fall = g.first;
    Coming p;
    Vec v[UNROLL];
    load_coming(a, g, w, t, turn, p);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if ((RISES || top) && turn.rise + u * g.stride < w.limit) v[u] = outgoing(a, w, 0, turn.rise + u * g.stride);
    if (j == 0) ticket = draw_ticket(a, g);
    if (ONE_WAY && j >= a.nslots) wait_room(a, g, t, watch, j);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u32 here = g.first + u * g.stride;
      u64 i = turn.rise + u * g.stride;
      if (!RISES || i >= w.limit) continue;
      Sum sum;
      sum.begin(v[u]);
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (t.down[c] != NOBODY) sum.add(take(a, g, watch, from_child(a, g, t, turn, c, here), here, i, p.below[c][u], t.down[c], WHAT_PACKET));
      v[u] = top ? sum.end() : sum.partial();
      if (!top) push(g, source_place(g, a.outbox[t.up], turn.rise_slot, t.child, here), here, to_packet(g, i, v[u]));
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u32 here = g.first + u * g.stride;
      u64 i = (top ? turn.rise : turn.fall) + u * g.stride;
      if (!(FALLS || top) || i >= w.limit) continue;
      if (!top) v[u] = take(a, g, watch, from_parent(a, g, t, turn, here), here, i, p.above[u], t.up, WHAT_RESULT);
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (FALLS && t.down[c] != NOBODY)
          push(g, source_place(g, a.outbox[t.down[c]], top ? turn.rise_slot : turn.fall_slot, FROM_PARENT, here), here, to_packet(g, i, v[u]));
      if (RISES || !top) store_vec(w.out, i, w.count, w.aligned, v[u]);
    }
    if (j == 0) judge(a, g, past);
    if (w.reuse && j + a.nslots < w.pieces + lag) {  // something will come again to the same places
      settle(a, g, w, t, turn, watch);
      __syncwarp();
      if (ONE_WAY && threadIdx.x % 32 == 0) tell_room(a, g, t, j);
    }
    turn.rise += g.piece;
    turn.rise_slot = turn.rise_slot + 1 == a.nslots ? 0 : turn.rise_slot + 1;
    if (j < lag) continue;
    turn.fall += g.piece;
    turn.fall_slot = turn.fall_slot + 1 == a.nslots ? 0 : turn.fall_slot + 1;
  }
  __syncwarp();
  if (ONE_WAY && w.reuse && threadIdx.x % 32 == 0) clear_acks(a, g, t);
  if (ONE_WAY) hear_greetings(a, g, watch, a.nslots * SOURCES);
  count_launch(a, ticket);
}
