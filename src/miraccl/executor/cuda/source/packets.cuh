// Packets that tell by themselves whether they have come, and the memory they lie in. The kernels are in shots.cuh, ring.cuh and chain.cuh.
//
// A packet is 16 bytes, written by one store. Memory that waits for packets is filled with ones. There are three kinds:
//   FRAME_WORD  16 bytes of floats. Every word (for float64: every pair of words) is its own flag: all ones is a NaN, and a NaN of the user's with
//               these bits becomes another NaN (the idea of Lamport buffers: FlashInfer and TensorRT-LLM use -0.0).
//   FRAME_PAIR  8 bytes of data and two words of zeros as flags (NCCL's LL, src/device/prims_ll.h).
//   FRAME_LINE  eight packets of a line of 128 bytes: 120 bytes of data and one flag in the last (NCCL's LL128, src/device/prims_ll128.h). A warp
//               writes and reads four lines together, so all conditions about packets are the same for the lanes of a warp.
// All leave the memory full of ones again, so they share it.
//
// Who may write where: memory is two banks, used by launches in turn. A rank that begins launch e + 2 has finished e + 1, for which it
// needed packets that this rank sent in e + 1, hence after its own launch e ended and all its packets of e were read and cleared. So
// nobody ever writes into a packet that has not been cleared, without a word of acknowledgement. Within a launch larger than a bank,
// slots are used again; each kernel says when (docs/gpu.md, "Slots").
//
// The number of the launch is in device memory, so that captured launches can be replayed. All blocks read it when they begin; a ticket
// tells which block was last to read, and that one counts it up.

#define EMPTY 0xffffffffu
#define WHOLE_WARP 0xffffffffu

__device__ __forceinline__ bool arrived(const uint4& p) {
#if defined(FRAME_LINE)
  return !__any_sync(WHOLE_WARP, (threadIdx.x & 7) == 7 && p.w == EMPTY);
#elif defined(FRAME_PAIR)
  return p.y != EMPTY && p.w != EMPTY;
#elif defined(TYPE_FLOAT64)
  return (p.x & p.y) != EMPTY && (p.z & p.w) != EMPTY;
#else
  return p.x != EMPTY && p.y != EMPTY && p.z != EMPTY && p.w != EMPTY;
#endif
}

__device__ __forceinline__ uint4 fetch(const uint4* q) {
#if defined(FRAME_LINE)
  return load_line(q);
#else
  return load_packet(q);
#endif
}
__device__ __forceinline__ void push(uint4* q, uint4 p) {
#if defined(FRAME_LINE)
  store_line(q, p);
#else
  store_packet(q, p);
#endif
}

__device__ __forceinline__ u32 other_nan(u32 w) { return w == EMPTY ? 0x7fffffffu : w; }

__device__ __forceinline__ uint4 to_packet(const Vec& v) {
#if defined(FRAME_LINE)
  bool flag = (threadIdx.x & 7) == 7;
  return make_uint4(v.w[0], v.w[1], flag ? 0u : v.w[2], flag ? 0u : v.w[3]);
#elif defined(FRAME_PAIR)
  return make_uint4(v.w[0], 0u, v.w[1], 0u);
#elif defined(TYPE_FLOAT64)
  return make_uint4(v.w[0], (v.w[0] & v.w[1]) == EMPTY ? 0x7fffffffu : v.w[1], v.w[2], (v.w[2] & v.w[3]) == EMPTY ? 0x7fffffffu : v.w[3]);
#else
  return make_uint4(other_nan(v.w[0]), other_nan(v.w[1]), other_nan(v.w[2]), other_nan(v.w[3]));
#endif
}

__device__ __forceinline__ Vec from_packet(const uint4& p) {
  Vec v;
#if defined(FRAME_PAIR)
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
  u32 first;       // this thread's first packet in a piece; the others follow at ``stride``: a warp has neighbours only
  u32 stride;
  u32 warp, warps; // this warp's number among those of the launch
};

// ``threads`` of each block share the packets of a piece; this one is number ``thread`` of them.
__device__ __forceinline__ Geometry begin(const Args& a, u32 thread, u32 threads) {
  Geometry g;
  g.launch = load_word((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH);
  g.bank = PACKETS_OFFSET + (g.launch & 1) * BANK_BYTES;
  g.stride = 32;
  g.warp = (blockIdx.x * threads + thread) / 32;
  g.warps = gridDim.x * threads / 32;
  g.first = g.warp * 32 * UNROLL + thread % 32;
  g.piece = g.warps * 32 * UNROLL;
  return g;
}

// Block 0 says what it runs and looks at what peers said of the launch before: this one's entries may not have come yet.
struct Past {
  uint4 said;
  u32 signature;
};
__device__ __forceinline__ Past announce(const Args& a, const Geometry& g) {
  Past past = {{0, 0, 0, 0}, 0};
  u32 launch = (u32)g.launch + 1, t = threadIdx.x;
  u64* signatures = (u64*)(a.own + STATE_OFFSET) + STATE_SIGNATURES;
  if (blockIdx.x != 0 || t >= RANKS) return past;
  if (t == a.rank) {
    signatures[launch % BOARD_ENTRIES] = a.signature;
  } else {
    store_packet(board(a.outbox[t], a.rank, launch), make_uint4(launch, (u32)a.signature, 0, 0));
    past.said = load_packet(board(a.inbox[t], t, launch - 1));
    past.signature = (u32)load_word(signatures + (launch - 1) % BOARD_ENTRIES);
  }
  return past;
}
__device__ __forceinline__ void judge(const Args& a, const Geometry& g, const Past& past) {
  u32 before = (u32)g.launch;
  if (before != 0 && past.said.x == before && past.said.y != past.signature) report(a.host, ERROR_MISMATCH, threadIdx.x, before);
}

// Called once by all threads of a block. The barrier takes a bit made of the number of the launch, so every thread has it, and it may change.
// No fence: it would wait for the pushes, a round trip over NVLink. Thread 0 goes on and looks at its ticket at the end (``count_launch``).
__device__ __forceinline__ u32 draw_ticket(const Args& a, const Geometry& g) {
  u32 ticket = 0;
  __syncthreads_or(g.launch == NEVER);
  if (threadIdx.x == 0) ticket = draw((u32*)(a.own + STATE_OFFSET) + 2 * STATE_TICKET, gridDim.x - 1);
  return ticket;
}

__device__ __forceinline__ void count_launch(const Args& a, u32 ticket) {
  if (threadIdx.x == 0 && ticket == gridDim.x - 1) count_up((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH);
}

// Of lines, all lanes of a warp stop waiting together.
__device__ __forceinline__ bool stop_waiting(const Args& a, Watch& watch, u32 src, u32 shot) {
  bool stop = give_up(a, watch, src, shot);
#if defined(FRAME_LINE)
  stop = __any_sync(WHOLE_WARP, stop);
  if (stop) watch.since = NEVER;
#endif
  return stop;
}

// Wait until the packet at ``q`` has come and give what it holds; ``p`` is what was read there already.
__device__ __forceinline__ Vec read_packet(const Args& a, Watch& watch, uint4* q, uint4 p, u32 src, u32 shot) {
  watch.spins = 0;
  while (!arrived(p)) {
    if (stop_waiting(a, watch, src, shot)) break;
    p = fetch(q);
  }
  return from_packet(p);
}

__device__ __forceinline__ void clear_packet(uint4* q) { *q = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY); }

// Returns when a packet that this thread cleared lies cleared in L2, where peers' stores arrive: what is read there is ones again. A fence would do,
// too, but seems to wait for all stores of the multiprocessor, also those that wait for their turn on NVLink: 328 GB/s instead of 348.
__device__ __forceinline__ void wait_empty(const Args& a, Watch& watch, const uint4* q, uint4 p) {
  watch.spins = 0;
  while ((p.x & p.y & p.z & p.w) != EMPTY) {
    if (give_up(a, watch, a.rank, 0)) break;
    p = load_packet(q);
  }
}

// ---- the operation: a block, or a chunk of it per rank, cut into pieces; each thread has UNROLL packets of a piece

struct Work {
  const T* in;
  T* out;
  u64 count, limit;    // elements of a block; packets of a chunk (two_shot, ring) or block
  u64 shift;           // packets by which the order within a chunk is turned from one chunk to the next
  u32 pieces;
  bool aligned, reuse;
};

#ifndef SHIFT_FROM
#define SHIFT_FROM (1u << 20)
#endif
#if defined(MODE_TWO_SHOT) || defined(MODE_RING)
#define CHUNKED 1    // the block is cut into a chunk per rank
#else
#define CHUNKED 0
#endif
__device__ __forceinline__ Work look_at(const Args& a, const Geometry& g) {
  Work w;
  w.in = (const T*)a.in; w.out = (T*)a.out; w.count = a.count;
  u64 odd = (u64)a.in | (u64)a.out;
#if defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  odd |= a.count * sizeof(T);
#endif
  w.aligned = (odd & (ALIGNMENT - 1)) == 0;
  w.limit = vectors_of(a.count * sizeof(T));
#if CHUNKED
  w.limit = (w.limit + RANKS - 1) / RANKS;
#if defined(FRAME_LINE)
  w.limit = (w.limit + 31) & ~31ull;
#endif
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
__device__ __forceinline__ Vec outgoing(const Args& a, const Work& w, u32 dst, u64 i) {
#if CHUNKED
  return own_vec(a, load_vec(w.in, spot(w, dst, i), w.count, w.aligned));
#elif defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_TO_ALL)
  return own_vec(a, load_vec(w.in + dst * w.count, i, w.count, w.aligned));
#else
  return own_vec(a, load_vec(w.in, i, w.count, w.aligned));
#endif
}
