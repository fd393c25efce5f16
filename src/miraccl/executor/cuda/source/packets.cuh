// One-shot and two-shot collectives on packets that tell by themselves whether they have come (protocol LL).
//
// A packet is 16 bytes, written by one store. Memory that waits for packets is filled with ones. FLAGGED packets hold 8 bytes of data
// and two words of zeros as flags (NCCL's LL, src/device/prims_ll.h); the others hold 16 bytes of data and every word (for float64:
// every pair of words) is its own flag: all ones is a NaN, and a NaN of the user's with these bits becomes another NaN (the idea of
// Lamport buffers: FlashInfer and TensorRT-LLM use -0.0). Both kinds leave the memory full of ones again, so they share it.
//
// Who may write where: memory is two banks, used by launches in turn. A rank that begins launch e + 2 has finished e + 1, for which it
// needed packets that this rank sent in e + 1, hence after its own launch e ended and all its packets of e were read and cleared. So
// nobody ever writes into a packet that has not been cleared, without a word of acknowledgement. Within a launch larger than a bank,
// slots are used again: a thread pushes at most ``ahead`` pieces ahead of the one it read, cleared and saw cleared (``settle``), and
// nslots >= 2 * ahead + 2 >= 4 gives the same argument thread by thread (docs/gpu.md, "Slots").
//
// The number of the launch is in device memory, so that captured launches can be replayed. All blocks read it when they begin; a ticket
// tells which block was last to read, and that one counts it up.

#define EMPTY 0xffffffffu

__device__ __forceinline__ bool arrived(const uint4& p) {
#if FLAGGED
  return p.y != EMPTY && p.w != EMPTY;
#elif defined(TYPE_FLOAT64)
  return (p.x & p.y) != EMPTY && (p.z & p.w) != EMPTY;
#else
  return p.x != EMPTY && p.y != EMPTY && p.z != EMPTY && p.w != EMPTY;
#endif
}

__device__ __forceinline__ u32 other_nan(u32 w) { return w == EMPTY ? 0x7fffffffu : w; }

__device__ __forceinline__ uint4 to_packet(const Vec& v) {
#if FLAGGED
  return make_uint4(v.w[0], 0u, v.w[1], 0u);
#elif defined(TYPE_FLOAT64)
  return make_uint4(v.w[0], (v.w[0] & v.w[1]) == EMPTY ? 0x7fffffffu : v.w[1], v.w[2], (v.w[2] & v.w[3]) == EMPTY ? 0x7fffffffu : v.w[3]);
#else
  return make_uint4(other_nan(v.w[0]), other_nan(v.w[1]), other_nan(v.w[2]), other_nan(v.w[3]));
#endif
}

__device__ __forceinline__ Vec from_packet(const uint4& p) {
  Vec v;
#if FLAGGED
  v.w[0] = p.x; v.w[1] = p.z;
#else
  v.w[0] = p.x; v.w[1] = p.y; v.w[2] = p.z; v.w[3] = p.w;
#endif
  return v;
}

struct Geometry {
  u64 launch;      // its number
  u64 bank;        // bytes from a rank's base to the bank of this launch
  u32 piece;       // packets that one source sends one rank per piece
  u32 first;       // this thread's first packet in a piece; the others follow at ``stride``
  u32 stride;
};

// Where packet ``i`` of the piece in ``slot`` from ``src`` lies in the memory of ``dst``. A rank has no place for its own.
template <int SHOTS> __device__ __forceinline__ uint4* place(const Args& a, const Geometry& g, u32 dst, u32 src, u32 slot, int shot, u32 i) {
  u32 lane = slot * (u32)(SHOTS * (RANKS - 1)) + shot * (RANKS - 1) + (src < dst ? src : src - 1);
  return (uint4*)((dst == a.rank ? a.inbox[src] : a.outbox[dst]) + g.bank) + (u64)lane * g.piece + i;
}

// ``threads`` of each block share the packets of a piece; this one is number ``thread`` of them.
__device__ __forceinline__ Geometry begin(const Args& a, u32 thread, u32 threads) {
  Geometry g;
  g.launch = load_word((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH);
  g.bank = PACKETS_OFFSET + (g.launch & 1) * BANK_BYTES;
  g.stride = gridDim.x * threads;
  g.first = blockIdx.x * threads + thread;
  g.piece = g.stride * UNROLL;
  return g;
}

// Called once by all threads of a block. The barrier takes a bit made of the number of the launch, so every thread has it, and it may change.
// No fence: it would wait for the pushes, a round trip over NVLink. Thread 0 goes on and looks at its ticket at the end (``count_launch``).
__device__ __forceinline__ u32 draw_ticket(const Args& a, const Geometry& g) {
  u32 ticket = 0;
  __syncthreads_or(g.launch == NEVER);
  if (threadIdx.x == 0) {
    ticket = draw((u32*)(a.own + STATE_OFFSET) + 2 * STATE_TICKET, gridDim.x - 1);
  }
  return ticket;
}

__device__ __forceinline__ void count_launch(const Args& a, u32 ticket) {
  if (threadIdx.x == 0 && ticket == gridDim.x - 1) count_up((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH);
}

// Wait until the packet at ``q`` has come and give what it holds; ``p`` is what was read there already.
__device__ __forceinline__ Vec read_packet(const Args& a, Watch& watch, uint4* q, uint4 p, u32 src, u32 shot) {
  watch.spins = 0;
  while (!arrived(p)) {
    if (give_up(a, watch, src, shot)) break;
    p = load_packet(q);
  }
  return from_packet(p);
}

__device__ __forceinline__ void clear_packet(uint4* q) { *q = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

// ---- the parts of the two algorithms, each for the packets of one thread in one piece

struct Work {
  const T* in;
  T* out;
  u64 count, limit;    // elements of a block; packets of a chunk (two_shot) or block
  u64 shift;           // two_shot: packets by which the order within a chunk is turned from one chunk to the next
  u32 pieces;
  bool aligned, reuse;
};

#ifndef SHIFT_FROM
#define SHIFT_FROM (1u << 20)
#endif
#define LANES (2 * (RANKS - 1))  // messages of a ring
#if defined(MODE_TWO_SHOT) || defined(MODE_RING)
#define CHUNKED 1    // the block is cut into a chunk per rank
#else
#define CHUNKED 0
#endif
#if defined(MODE_TWO_SHOT)
#define SHOTS 2
#else
#define SHOTS 1
#endif

__device__ __forceinline__ Work look_at(const Args& a, const Geometry& g) {
  Work w;
  w.in = (const T*)a.in; w.out = (T*)a.out; w.count = a.count;
  u64 odd = (u64)a.in | (u64)a.out;
#if defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  odd |= a.count * sizeof(T);
#endif
  w.aligned = (odd & (VEC_BYTES - 1)) == 0;
  w.limit = (a.count + ELEMS - 1) / ELEMS;
#if CHUNKED
  w.limit = (w.limit + RANKS - 1) / RANKS;
  w.shift = w.limit >= SHIFT_FROM ? (w.limit * 5 / (16 * RANKS) + 2648) & ~7ull : 0;
#endif
  w.pieces = (u32)((w.limit + g.piece - 1) / g.piece);
  w.reuse = w.pieces > a.nslots;
  return w;
}

#if CHUNKED
// The vector of the whole that packet i of chunk q is. Chunks of large operations are walked through from different places: addresses of
// all chunks that differ by a power of two alone are slow.
__device__ __forceinline__ u64 spot(const Work& w, u32 q, u64 i) {
  i += q * w.shift;
  return q * w.limit + (i >= w.limit ? i - w.limit : i);
}
#endif

// What goes to rank ``dst`` in packet i.
__device__ __forceinline__ Vec outgoing(const Work& w, u32 dst, u64 i) {
#if CHUNKED
  return load_vec(w.in, spot(w, dst, i) * ELEMS, w.count, w.aligned);
#elif defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_TO_ALL)
  return load_vec(w.in + dst * w.count, i * ELEMS, w.count, w.aligned);
#else
  return load_vec(w.in, i * ELEMS, w.count, w.aligned);
#endif
}

// Rooted operations move data between the root and the others only. Their packet 0 goes from every rank to every rank all the same: who ends
// one launch has then heard of everybody's, as the use of the banks demands. They have room for all pieces (no slot is used again).
#if defined(MODE_BROADCAST) || defined(MODE_REDUCE)
#define ROOTED 1
#else
#define ROOTED 0
#endif
__device__ __forceinline__ bool moves(const Args& a, u32 src, u32 dst, u64 i) {
#if defined(MODE_BROADCAST)
  return src == a.root || i == 0;
#elif defined(MODE_REDUCE)
  return dst == a.root || i == 0;
#else
  return true;
#endif
}

// First shot: to every peer what it needs, the next rank first.
__device__ __forceinline__ void push_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot) {
  u64 at = (u64)k * g.piece + g.first;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
  uint4 same[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (at + u * g.stride < w.limit) same[u] = to_packet(outgoing(w, 0, at + u * g.stride));
#endif
#pragma unroll
  for (int d = 1; d < RANKS; d++) {
    u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER) || ROOTED
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit && moves(a, a.rank, dst, at + u * g.stride)) store_packet(place<SHOTS>(a, g, dst, a.rank, slot, 0, g.first + u * g.stride), same[u]);
#else
    uint4 p[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit) p[u] = to_packet(outgoing(w, dst, at + u * g.stride));
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < w.limit) store_packet(place<SHOTS>(a, g, dst, a.rank, slot, 0, g.first + u * g.stride), p[u]);
#endif
  }
}

// Both return when packets that this thread cleared lie cleared in L2, where peers' stores arrive: what is read there is ones again. A fence would
// do, too, but seems to wait for all stores of the multiprocessor, also those that wait for their turn on NVLink: 328 GB/s instead of 348.
__device__ __forceinline__ void wait_empty(const Args& a, Watch& watch, uint4* q, uint4 p) {
  watch.spins = 0;
  while ((p.x & p.y & p.z & p.w) != EMPTY) {
    if (give_up(a, watch, a.rank, 0)) break;
    p = load_packet(q);
  }
}

__device__ __forceinline__ void settle(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, u32 shot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit) p[r][u] = load_packet(place<SHOTS>(a, g, a.rank, r, slot, shot, g.first + u * g.stride));
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit)
        wait_empty(a, watch, place<SHOTS>(a, g, a.rank, r, slot, shot, g.first + u * g.stride), p[r][u]);
}

// What came in the first shot: added up in the order of the ranks, or put in its place.
__device__ __forceinline__ void take_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];  // all loads are under way before the first is looked at
  Vec own[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    if (at + u * g.stride >= w.limit) continue;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && moves(a, r, a.rank, at + u * g.stride))
        p[r][u] = load_packet(place<SHOTS>(a, g, a.rank, r, slot, 0, g.first + u * g.stride));
    own[u] = outgoing(w, a.rank, at + u * g.stride);
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u64 i = at + u * g.stride;
    if (i >= w.limit) continue;
#if ROOTED
    Sum sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        if (!moves(a, r, a.rank, i)) continue;
        uint4* q = place<SHOTS>(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = read_packet(a, watch, q, p[r][u], r, 0);
        clear_packet(q);
      }
#if defined(MODE_BROADCAST)
      if (r == a.root && r != a.rank) store_vec(w.out, i * ELEMS, w.count, w.aligned, v);
#else
      if (r == 0) sum.begin(v); else sum.add(v);
#endif
    }
#if defined(MODE_REDUCE)
    if (a.rank == a.root) store_vec(w.out, i * ELEMS, w.count, w.aligned, sum.end());
#endif
#elif defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        uint4* q = place<SHOTS>(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = read_packet(a, watch, q, p[r][u], r, 0);
        clear_packet(q);
      }
      store_vec(w.out + r * w.count, i * ELEMS, w.count, w.aligned, v);
    }
#else
    Sum sum;
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      Vec v = own[u];
      if (r != a.rank) {
        uint4* q = place<SHOTS>(a, g, a.rank, r, slot, 0, g.first + u * g.stride);
        v = read_packet(a, watch, q, p[r][u], r, 0);
        clear_packet(q);
      }
      if (r == 0) sum.begin(v); else sum.add(v);
    }
    Vec total = sum.end();
#if defined(MODE_TWO_SHOT)
    uint4 packet = to_packet(total);
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
      store_packet(place<SHOTS>(a, g, dst, a.rank, slot, 1, g.first + u * g.stride), packet);
    }
    store_vec(w.out, spot(w, a.rank, i) * ELEMS, w.count, w.aligned, total);
#else
    store_vec(w.out, i * ELEMS, w.count, w.aligned, total);
#endif
#endif
  }
}

#if defined(MODE_TWO_SHOT)
// Second shot: the sums of the others.
__device__ __forceinline__ void collect_piece(const Args& a, const Geometry& g, const Work& w, u32 k, u32 slot, Watch& watch) {
  u64 at = (u64)k * g.piece + g.first;
  uint4 p[RANKS][UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != a.rank && at + u * g.stride < w.limit) p[r][u] = load_packet(place<SHOTS>(a, g, a.rank, r, slot, 1, g.first + u * g.stride));
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      u64 i = at + u * g.stride;
      if (r == a.rank || i >= w.limit) continue;
      uint4* q = place<SHOTS>(a, g, a.rank, r, slot, 1, g.first + u * g.stride);
      Vec v = read_packet(a, watch, q, p[r][u], r, 1);
      clear_packet(q);
      store_vec(w.out, spot(w, r, i) * ELEMS, w.count, w.aligned, v);
    }
}
#endif

#if defined(MODE_RING)

// ---- ring (schedule.algos.ring), all_reduce of large blocks: only neighbours talk, which NVLink carries better than all pairs at once.
//
// A thread handles LANES messages per iteration, of LANES different pieces: in iteration j it takes message t of piece j - 1 - t, which its
// neighbour pushed in iteration j - 1, and pushes message t + 1 of that piece. Sums are rounded at every hop. Nobody hears from the rank it
// sends to, except around the ring: what it takes in iteration j was made possible by the pushes of the rank n - 1 hops before it in iteration
// j - (n - 1), after that rank had settled everything before; hence nslots >= n + 1.
__device__ __forceinline__ uint4* lane_place(const Args& a, const Geometry& g, char* box, u32 piece, u32 lane, u32 i) {
  return (uint4*)(box + g.bank) + (u64)((piece % a.nslots) * LANES + lane) * g.piece + i;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a, threadIdx.x, THREADS);
  Work w = look_at(a, g);
  Watch watch = {0, 0};
  u32 next = a.rank + 1 == RANKS ? 0 : a.rank + 1, before = a.rank == 0 ? RANKS - 1 : a.rank - 1, ticket = 0;
  for (u32 j = 0; j < w.pieces + LANES; j++) {
    uint4 p[LANES][UNROLL];
    Vec own[RANKS - 1][UNROLL];
#pragma unroll
    for (u32 t = 0; t < LANES; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j < t + 1 || m >= w.pieces || i >= w.limit) continue;
        p[t][u] = load_packet(lane_place(a, g, a.inbox[before], m, t, g.first + u * g.stride));
        if (t < RANKS - 1) own[t][u] = outgoing(w, (a.rank + 2 * RANKS - 2 - t) % RANKS, i);
      }
#pragma unroll
    for (u32 t = 0; t < LANES; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t, here = g.first + u * g.stride;
        u64 i = (u64)m * g.piece + here;
        if (j < t + 1 || m >= w.pieces || i >= w.limit) continue;
        uint4* q = lane_place(a, g, a.inbox[before], m, t, here);
        Vec v = read_packet(a, watch, q, p[t][u], before, 0);
        clear_packet(q);
        if (t < RANKS - 1) {
          Sum sum;
          sum.begin(own[t][u]);
          sum.add(v);
          v = t == RANKS - 2 ? sum.end() : sum.partial();
        }
        if (t + 1 < LANES) store_packet(lane_place(a, g, a.outbox[next], m, t + 1, here), to_packet(v));
        if (t >= RANKS - 2) store_vec(w.out, spot(w, (a.rank + 2 * RANKS - 2 - t) % RANKS, i) * ELEMS, w.count, w.aligned, v);
      }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
      u64 i = (u64)j * g.piece + g.first + u * g.stride;
      if (j < w.pieces && i < w.limit) store_packet(lane_place(a, g, a.outbox[next], j, 0, g.first + u * g.stride), to_packet(outgoing(w, before, i)));
    }
    if (j == 0) ticket = draw_ticket(a, g);
    if (!w.reuse) continue;
#pragma unroll
    for (u32 t = 0; t < LANES; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j >= t + 1 && m < w.pieces && i < w.limit) p[t][u] = load_packet(lane_place(a, g, a.inbox[before], m, t, g.first + u * g.stride));
      }
#pragma unroll
    for (u32 t = 0; t < LANES; t++)
#pragma unroll
      for (u32 u = 0; u < UNROLL; u++) {
        u32 m = j - 1 - t;
        u64 i = (u64)m * g.piece + g.first + u * g.stride;
        if (j >= t + 1 && m < w.pieces && i < w.limit) wait_empty(a, watch, lane_place(a, g, a.inbox[before], m, t, g.first + u * g.stride), p[t][u]);
      }
  }
  count_launch(a, ticket);
}

#else

// ---- the kernel: every thread pushes, reads and clears its own packets; no barrier is on the way
//
//   one_shot  all_reduce      in -> all;     out = sum in the order of the ranks      (schedule.algos.one_shot)
//             reduce_scatter  in[p] -> p;    out = sum in the order of the ranks
//             all_gather      in -> all;     out[r] = what r sent
//             all_to_all      in[p] -> p;    out[r] = what r sent
//             broadcast       in of the root -> all
//             reduce          in -> the root, out = sum in the order of the ranks
//   two_shot  all_reduce      chunk p of in -> p, which adds up in the order of the ranks and sends the sum to all
//                             (schedule.algos.two_shot; chunks are whole packets)

__device__ __forceinline__ u32 after(const Args& a, u32 slot) { return slot + 1 == a.nslots ? 0 : slot + 1; }

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a, threadIdx.x, THREADS);
  Work w = look_at(a, g);
  Watch watch = {0, 0};
  u32 pushed = 0, push_slot = 0, slot = 0, ahead = a.ahead < w.pieces ? a.ahead : w.pieces - 1;
  for (; pushed <= ahead; pushed++, push_slot = after(a, push_slot)) push_piece(a, g, w, pushed, push_slot);
  u32 ticket = draw_ticket(a, g);
#if defined(MODE_TWO_SHOT)
  u32 last = 0;
#endif
  for (u32 k = 0; k < w.pieces; k++) {
    take_piece(a, g, w, k, slot, watch);
#if defined(MODE_TWO_SHOT)
    if (k > 0) collect_piece(a, g, w, k - 1, last, watch);
    if (w.reuse && k > 0) settle(a, g, w, k - 1, last, 1, watch);
    last = slot;
#endif
    if (w.reuse) settle(a, g, w, k, slot, 0, watch);
    slot = after(a, slot);
    if (pushed < w.pieces) { push_piece(a, g, w, pushed++, push_slot); push_slot = after(a, push_slot); }
  }
#if defined(MODE_TWO_SHOT)
  collect_piece(a, g, w, w.pieces - 1, last, watch);
#endif
  count_launch(a, ticket);
}

#endif
