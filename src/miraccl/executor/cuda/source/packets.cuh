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
// slots are used again: a thread pushes ``ahead`` pieces ahead of the one it reads and fences once per piece, and
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
  u64 bank;        // bytes from a rank's base to the bank of this launch
  u32 piece;       // packets that one source sends one rank per piece
  u32 first;       // this thread's first packet in a piece; the others follow at ``stride``
  u32 stride;
};

// Where packet ``i`` of piece ``k`` from ``src`` lies in the memory of ``dst``. A rank has no place for its own.
template <int SHOTS> __device__ __forceinline__ uint4* place(const Args& a, const Geometry& g, u32 dst, u32 src, u32 k, int shot, u32 i) {
  u32 lane = (k % a.nslots) * (u32)(SHOTS * (RANKS - 1)) + shot * (RANKS - 1) + (src < dst ? src : src - 1);
  return (uint4*)(a.base[dst] + g.bank) + (u64)lane * g.piece + i;
}

__device__ __forceinline__ Geometry begin(const Args& a) {
  Geometry g;
  u64* state = (u64*)(a.base[a.rank] + STATE_OFFSET);
  u64 launch = load_word(state + STATE_LAUNCH);
  g.bank = PACKETS_OFFSET + (launch & 1) * BANK_BYTES;
  g.stride = gridDim.x * THREADS;
  g.first = blockIdx.x * THREADS + threadIdx.x;
  g.piece = g.stride * UNROLL;
  return g;
}

// Called once by all threads of a block, anywhere after ``begin``.
__device__ __forceinline__ void count_launch(const Args& a) {
  __syncthreads();  // all threads of the block have read the number of the launch
  if (threadIdx.x == 0) {
    u64* state = (u64*)(a.base[a.rank] + STATE_OFFSET);
    __threadfence();
    if (atomicInc((u32*)(state + STATE_TICKET), gridDim.x - 1) == gridDim.x - 1) atomicAdd(state + STATE_LAUNCH, 1ull);
  }
}

// UNROLL packets of every source of one piece: all loads are under way before the first is looked at.
struct Inbox {
  uint4 p[RANKS][UNROLL];
};

// Wait until the packet at ``q`` has come, leave its place empty, and give what it holds; ``p`` is what was read there already.
__device__ __forceinline__ Vec take_packet(const Args& a, Watch& watch, uint4* q, uint4 p, u32 src, u32 shot) {
  while (!arrived(p)) {
    if (give_up(a, watch, src, shot)) break;
    p = load_packet(q);
  }
  *q = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  return from_packet(p);
}

#if defined(MODE_TWO_SHOT)

// all_reduce in two shots: block of chunk p goes to rank p, which adds up in the order of the ranks and sends the sum to all.
// Lowered from schedule.algos.two_shot; chunks are whole packets.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  const T* in = (const T*)a.in;
  T* out = (T*)a.out;
  bool aligned = (((u64)in | (u64)out) & (VEC_BYTES - 1)) == 0;
  u64 nvec = (a.count + ELEMS - 1) / ELEMS, chunk = (nvec + RANKS - 1) / RANKS;
  u32 pieces = (u32)((chunk + g.piece - 1) / g.piece);
  bool reuse = pieces > a.nslots;
  Watch watch = {0, 0, false};

  auto push = [&](u32 k) {
    u64 at = (u64)k * g.piece + g.first;
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        u64 i = at + u * g.stride;
        if (i < chunk)
          store_packet(place<2>(a, g, dst, a.rank, k, 0, g.first + u * g.stride), to_packet(load_vec(in, (dst * chunk + i) * ELEMS, a.count, aligned)));
      }
    }
  };
  auto reduce = [&](u32 k) {
    u64 at = (u64)k * g.piece + g.first;
    Inbox box;
    Vec own[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i < chunk) {
        own[u] = load_vec(in, (a.rank * chunk + i) * ELEMS, a.count, aligned);
#pragma unroll
        for (int r = 0; r < RANKS; r++)
          if (r != a.rank) box.p[r][u] = load_packet(place<2>(a, g, a.rank, r, k, 0, g.first + u * g.stride));
      }
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= chunk) continue;
      Sum sum;
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        Vec v = own[u];
        if (r != a.rank) {
          uint4* q = place<2>(a, g, a.rank, r, k, 0, g.first + u * g.stride);
          v = take_packet(a, watch, q, box.p[r][u], r, 0);
        }
        if (r == 0) sum.begin(v); else sum.add(v);
      }
      Vec total = sum.end();
      uint4 packet = to_packet(total);
#pragma unroll
      for (int d = 1; d < RANKS; d++) {
        u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
        store_packet(place<2>(a, g, dst, a.rank, k, 1, g.first + u * g.stride), packet);
      }
      store_vec(out, (a.rank * chunk + i) * ELEMS, a.count, aligned, total);
    }
  };
  auto collect = [&](u32 k) {
    u64 at = (u64)k * g.piece + g.first;
    Inbox box;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r != a.rank && at + u * g.stride < chunk) box.p[r][u] = load_packet(place<2>(a, g, a.rank, r, k, 1, g.first + u * g.stride));
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        u64 i = at + u * g.stride;
        if (r == a.rank || i >= chunk) continue;
        uint4* q = place<2>(a, g, a.rank, r, k, 1, g.first + u * g.stride);
        store_vec(out, (r * chunk + i) * ELEMS, a.count, aligned, take_packet(a, watch, q, box.p[r][u], r, 1));
      }
  };

  u32 pushed = 0, ahead = a.ahead < pieces ? a.ahead : pieces - 1;
  for (; pushed <= ahead; pushed++) push(pushed);
  count_launch(a);
  for (u32 k = 0; k < pieces; k++) {
    reduce(k);
    if (k > 0) collect(k - 1);
    if (reuse) fence();
    if (pushed < pieces) push(pushed++);
  }
  collect(pieces - 1);
}

#else

// One shot: whoever has something sends it to everybody who needs it. Lowered from schedule.algos.one_shot.
//   all_reduce      in -> all;     out = sum in the order of the ranks
//   reduce_scatter  in[p] -> p;    out = sum in the order of the ranks
//   all_gather      in -> all;     out[r] = what r sent
//   all_to_all      in[p] -> p;    out[r] = what r sent
//   broadcast       in -> all at the root; the others send an empty packet, so that nobody runs ahead
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) packets(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  const T* in = (const T*)a.in;
  T* out = (T*)a.out;
  u64 count = a.count, nvec = (count + ELEMS - 1) / ELEMS;
#if defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  bool aligned = (((u64)in | (u64)out | (count * sizeof(T))) & (VEC_BYTES - 1)) == 0;
#else
  bool aligned = (((u64)in | (u64)out) & (VEC_BYTES - 1)) == 0;
#endif
  u32 pieces = (u32)((nvec + g.piece - 1) / g.piece);
  bool reuse = pieces > a.nslots;
  Watch watch = {0, 0, false};

  auto push = [&](u32 k) {
    u64 at = (u64)k * g.piece + g.first;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER)
    uint4 same[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if (at + u * g.stride < nvec) same[u] = to_packet(load_vec(in, (at + u * g.stride) * ELEMS, count, aligned));
#endif
#pragma unroll
    for (int d = 1; d < RANKS; d++) {
      u32 dst = a.rank + d; if (dst >= RANKS) dst -= RANKS;
#pragma unroll
      for (int u = 0; u < UNROLL; u++) {
        u64 i = at + u * g.stride;
        if (i >= nvec) continue;
#if defined(MODE_ALL_REDUCE) || defined(MODE_ALL_GATHER)
        uint4 packet = same[u];
#else
        uint4 packet = to_packet(load_vec(in + dst * count, i * ELEMS, count, aligned));
#endif
        store_packet(place<1>(a, g, dst, a.rank, k, 0, g.first + u * g.stride), packet);
      }
    }
  };
  auto take = [&](u32 k) {
    u64 at = (u64)k * g.piece + g.first;
    Inbox box;
    Vec own[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= nvec) continue;
#pragma unroll
      for (int r = 0; r < RANKS; r++)
        if (r != a.rank) box.p[r][u] = load_packet(place<1>(a, g, a.rank, r, k, 0, g.first + u * g.stride));
#if defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_TO_ALL)
      own[u] = load_vec(in + a.rank * count, i * ELEMS, count, aligned);
#else
      own[u] = load_vec(in, i * ELEMS, count, aligned);
#endif
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u64 i = at + u * g.stride;
      if (i >= nvec) continue;
      Sum sum;
#pragma unroll
      for (int r = 0; r < RANKS; r++) {
        Vec v = own[u];
        if (r != a.rank) {
          uint4* q = place<1>(a, g, a.rank, r, k, 0, g.first + u * g.stride);
          v = take_packet(a, watch, q, box.p[r][u], r, 0);
        }
#if defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
        store_vec(out + r * count, i * ELEMS, count, aligned, v);
#else
        if (r == 0) sum.begin(v); else sum.add(v);
#endif
      }
#if defined(MODE_ALL_REDUCE) || defined(MODE_REDUCE_SCATTER)
      store_vec(out, i * ELEMS, count, aligned, sum.end());
#endif
    }
  };

  u32 pushed = 0, ahead = a.ahead < pieces ? a.ahead : pieces - 1;
  for (; pushed <= ahead; pushed++) push(pushed);
  count_launch(a);
  for (u32 k = 0; k < pieces; k++) {
    take(k);
    if (reuse) fence();
    if (pushed < pieces) push(pushed++);
  }
}
#endif
