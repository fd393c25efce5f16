// Definitions shared by all kernels: launch arguments, element types, operators, vectors, the op
// log, and bounded waits.
//
// The generator (executor/cuda/source.py) writes macros in front of this text: RANKS, THREADS,
// UNROLL, TYPE_<dtype>, OP_<operator>, FRAME_<framing>, MODE_<collective>, ARCH, and the offsets of
// executor/cuda/layout.py. machine.cuh follows, which holds all PTX.
//
// Memory ordering: kernels of different ranks communicate through symmetric memory with
// system-scope relaxed loads and stores (machine.cuh). Each protocol states what it adds: packets
// and rows carry their own flags and need no fence; protocol Simple and the error report use
// fences.
//
// Bounded waits follow NCCL's checkAbort (src/device/primitives.h); the argument structs are NCCL's
// ncclKernelComm and ncclDevKernelArgs (src/include/device.h).

// layout.TREE_LINKS: this rank's neighbours in a tree; NO_RANK where there is none
struct TreeLinks {
  u8 parent, children[2];
  u8 child_index;  // index among its parent's children
};

struct Args {  // layout.ARGS
  const void* in;
  void* out;
  u64 count;  // elements of a block
  u32 rank, root;
  u32 nslots, lookahead;  // packet kernels: slots of a half, tiles sent ahead
  u64 timeout_ns;
  u64 scalar;      // OP_PREMUL_SUM: this rank's factor, the bits of an A
  u64 signature;   // low word: hash of the operation, equal on all ranks; high word: ranks this one
                   // needs (``needs_word``)
  u32 prev, next;  // neighbours in the ring, for kernels in which only neighbours communicate
  u32 position;    // index of this rank in the ring
  TreeLinks trees[2];   // used by tree.cuh
  u32* host;            // layout.HOST_*: words in host memory
  char* own;            // this rank's symmetric memory
  char* inbox[RANKS];   // regions that receive packets, messages and signals from each peer
  char* outbox[RANKS];  // the peers' regions for this rank's packets, mapped in this process
};
static_assert(sizeof(Args) == ARGS_BYTES, "layout.ARGS");

// ---- element types: T in memory, A for accumulation

#if defined(TYPE_FLOAT32)
typedef float T;
typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return x; }
__device__ __forceinline__ T narrow(A x) { return x; }
#elif defined(TYPE_FLOAT64)
typedef double T;
typedef double A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return x; }
__device__ __forceinline__ T narrow(A x) { return x; }
#elif defined(TYPE_BFLOAT16)
typedef u16 T;
typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ T narrow(A x) { return bfloat16_bits(x); }
#elif defined(TYPE_FLOAT16)
typedef u16 T;
typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return half_value(x); }
__device__ __forceinline__ T narrow(A x) { return half_bits(x); }
#elif defined(TYPE_FLOAT8_E4M3) || defined(TYPE_FLOAT8_E5M2)
typedef u8 T;
typedef float A;
#define IS_FLOAT 1
// OCP 8-bit floats (E4M3 has no infinity: overflow becomes NaN), by integer arithmetic, because
// conversion instructions need sm_89.
#if defined(TYPE_FLOAT8_E4M3)
#define F8_MANTISSA 3
#define F8_BIAS 7
#define F8_LARGEST 0x7e
#define F8_BEYOND 0x7f
#define F8_NAN 0x7f
#else
#define F8_MANTISSA 2
#define F8_BIAS 15
#define F8_LARGEST 0x7b
#define F8_BEYOND 0x7c
#define F8_NAN 0x7e
#endif
#define F8_UNIT (127 + F8_BIAS + F8_MANTISSA - 1)  // exponent of 1 / the smallest number
__device__ __forceinline__ A widen(T x) {
  u32 sign = (u32)(x & 0x80) << 24, bits = x & 0x7f;
#if defined(TYPE_FLOAT8_E4M3)
  if (bits == 0x7f) return __uint_as_float(sign | 0x7fc00000u);
#else
  if (bits >= 0x7c) return __uint_as_float(sign | 0x7f800000u | (bits & 3) << 21);
#endif
  if (bits >> F8_MANTISSA)
    return __uint_as_float(sign | (bits + ((127 - F8_BIAS) << F8_MANTISSA)) << (23 - F8_MANTISSA));
  return __uint_as_float(
      sign | __float_as_uint((float)bits * __uint_as_float((u32)(254 - F8_UNIT) << 23)));
}
__device__ __forceinline__ T narrow(A x) {
  u32 b = __float_as_uint(x), sign = (b >> 24) & 0x80, a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return (T)(sign | F8_NAN);
  // subnormal: in units of the smallest number, to nearest even
  if (a < (u32)(128 - F8_BIAS) << 23) {
    float scaled = __uint_as_float(a) * __uint_as_float((u32)F8_UNIT << 23);
    u32 whole = (u32)scaled;
    float rest = scaled - (float)whole;
    return (T)(sign | (whole + (rest > 0.5f || (rest == 0.5f && (whole & 1)))));
  }
  a += (1u << (22 - F8_MANTISSA)) - 1 + ((a >> (23 - F8_MANTISSA)) & 1);
  a = (a - ((u32)(127 - F8_BIAS) << 23)) >> (23 - F8_MANTISSA);
  return (T)(sign | (a > F8_LARGEST ? F8_BEYOND : a));
}
#else
#define IS_FLOAT 0
#if defined(TYPE_INT8)
typedef signed char T;
#elif defined(TYPE_UINT8)
typedef u8 T;
#elif defined(TYPE_INT32)
typedef int T;
#elif defined(TYPE_UINT32)
typedef u32 T;
#elif defined(TYPE_INT64)
typedef i64 T;
#elif defined(TYPE_UINT64)
typedef u64 T;
#endif
typedef T A;
__device__ __forceinline__ A widen(T x) { return x; }
__device__ __forceinline__ T narrow(A x) { return x; }
#endif

__device__ __forceinline__ A combine(A a, A b) {
#if defined(OP_PROD)
  return (A)(a * b);
#elif defined(OP_MIN) || defined(OP_MAX)
#if IS_FLOAT
  if (a != a || b != b) return a + b;  // propagate NaN
#endif
#if defined(OP_MIN)
  return b < a ? b : a;
#else
  return a < b ? b : a;
#endif
#else
  return (A)(a + b);  // sums, including those that become averages
#endif
}

__device__ __forceinline__ A finish(A a) {
#if defined(OP_AVG) && defined(TYPE_INT8)
  // NVRTC 12.9 and 13.0 narrow the division to 8 bits and lose a sign extension in ``row_reduce``:
  // -11 / 2 was 123 in the first byte of vectors (PTX: 79 cvt.s16.s8 for 80 elements).
  return (A)(opaque(a) / (int)RANKS);
#elif defined(OP_AVG)
  return (A)(a / (A)RANKS);  // integers are truncated towards zero
#else
  return a;
#endif
}

// Own element as it enters the sum: for OP_PREMUL_SUM multiplied by this rank's scalar and rounded.
__device__ __forceinline__ T own_element(const Args& a, T x) {
#if defined(OP_PREMUL_SUM)
  return narrow((A)(widen(x) * *(const A*)&a.scalar));
#else
  return x;
#endif
}

#define WHOLE_WARP 0xffffffffu

__device__ __forceinline__ u64 warp_of_grid() {
  return ((u64)blockIdx.x * THREADS + threadIdx.x) / 32;
}
__device__ __forceinline__ u64 warps_of_grid() { return (u64)gridDim.x * THREADS / 32; }

// ---- vectors: the unit of work of one thread, carried by a packet of 16 bytes (packets.cuh).
// FRAME_PAIR packets hold 8 bytes of data, the others 16.

#if defined(FRAME_PAIR)
#define VEC_BYTES 8
#else
#define VEC_BYTES 16
#endif
#define VEC_WORDS (VEC_BYTES / 4)
#define ELEMS ((int)(VEC_BYTES / sizeof(T)))

union Vec {
  u32 w[VEC_WORDS];
  T e[ELEMS];
};

// Index type of elements, vectors and bytes. Single-tile and double-buffered launches are small
// enough for 32 bits, which is less work. Their cold paths (partial vectors) are kept out of line,
// so that the instructions fetched for nearly all vectors stay few.
#if SINGLE_TILE || DOUBLE_BUFFERED
typedef u32 Index;
#define COLD __noinline__
#else
typedef u64 Index;
#define COLD __forceinline__
#endif
#if defined(MODE_ALL_TO_ALL) || defined(MODE_REDUCE_SCATTER)
#define COLD_LOAD __forceinline__  // several blocks, whose loads should be in flight together
#else
#define COLD_LOAD COLD
#endif

// Number of vectors for ``bytes``. FRAME_MASK packets are handled by whole warps, so the count is a
// multiple of 32 and warps do not diverge in loops.
__device__ __forceinline__ Index vectors_of(Index bytes) {
#if defined(FRAME_MASK)
  return (bytes + 511) / 512 * 32;
#else
  return (bytes + VEC_BYTES - 1) / VEC_BYTES;
#endif
}

// Load elements from ``first`` on where they do not form one aligned vector; elements beyond the
// end are zero.
__device__ COLD_LOAD Vec load_elements(const T* p, Index first, Index count) {
  Vec v;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++) v.w[j] = 0;
#pragma unroll
  for (int j = 0; j < ELEMS; j++)
    if (first + j < count) v.e[j] = p[first + j];
  return v;
}

__device__ COLD void store_elements(T* p, Index first, Index count, Vec v) {
#pragma unroll
  for (int j = 0; j < ELEMS; j++)
    if (first + j < count) p[first + j] = v.e[j];
}

// Load vector ``i`` of an array of ``count`` elements.
__device__ __forceinline__ Vec load_vec(const T* p, Index i, Index count, bool aligned) {
  Index first = i * ELEMS;
  if (!aligned || first + ELEMS > count) return load_elements(p, first, count);
  Vec v;
#if defined(FRAME_PAIR)
  uint2 q = *(const uint2*)(p + first);
  v.w[0] = q.x;
  v.w[1] = q.y;
#else
  uint4 q = *(const uint4*)(p + first);
  v.w[0] = q.x;
  v.w[1] = q.y;
  v.w[2] = q.z;
  v.w[3] = q.w;
#endif
  return v;
}

__device__ __forceinline__ void store_vec(T* p, Index i, Index count, bool aligned, const Vec& v) {
  Index first = i * ELEMS;
  if (!aligned || first + ELEMS > count) {
    store_elements(p, first, count, v);
    return;
  }
#if defined(FRAME_PAIR)
  *(uint2*)(p + first) = make_uint2(v.w[0], v.w[1]);
#else
  *(uint4*)(p + first) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
#endif
}

__device__ __forceinline__ Vec own_vec(const Args& a, Vec v) {
#if defined(OP_PREMUL_SUM)
#pragma unroll
  for (int j = 0; j < ELEMS; j++) v.e[j] = own_element(a, v.e[j]);
#endif
  return v;
}

struct Accumulator {
  A a[ELEMS];
  __device__ __forceinline__ void init(const Vec& v) {
#pragma unroll
    for (int j = 0; j < ELEMS; j++) a[j] = widen(v.e[j]);
  }
  __device__ __forceinline__ void add(const Vec& v) {
#pragma unroll
    for (int j = 0; j < ELEMS; j++) a[j] = combine(a[j], widen(v.e[j]));
  }
  __device__ __forceinline__ Vec partial() const {  // intermediate sum, before ``finish``
    Vec v;
#pragma unroll
    for (int j = 0; j < ELEMS; j++) v.e[j] = narrow(a[j]);
    return v;
  }
  __device__ __forceinline__ Vec result() const {
    Vec v;
#pragma unroll
    for (int j = 0; j < ELEMS; j++) v.e[j] = narrow(finish(a[j]));
    return v;
  }
};

// ---- op log: each rank publishes the operation it runs, so that ranks calling different
// operations fail instead of hanging or adding up wrong data

// Op record of rank ``src`` for launch number ``launch`` (from 1): x number, y signature, z
// kernel-specific, w ranks it needs.
__device__ __forceinline__ uint4* op_record(char* region, u32 src, u32 launch) {
  return (uint4*)(region + OP_LOG_OFFSET) + src * OP_LOG_ENTRIES + launch % OP_LOG_ENTRIES;
}
// Needed ranks, one bit each, or NEEDS_ALL: the launch cannot end without them. The launch number
// is repeated because the two 8-byte halves of a record may arrive separately.
__device__ __forceinline__ u32 needs_word(u32 launch, u32 needs) {
  return launch << (NEEDS_ALL_SHIFT + 1) | needs;
}
__device__ __forceinline__ bool is_needed(const uint4& reported, u32 rank) {
  return (reported.w >> (NEEDS_ALL_SHIFT + 1) << (NEEDS_ALL_SHIFT + 1)) ==
             needs_word(reported.x, 0) &&
         (reported.w & (1u << NEEDS_ALL_SHIFT | 1u << rank)) != 0;
}

// This rank's own record of what it runs in a launch: address in ``own``, and value.
__device__ __forceinline__ u64* own_op_word(char* own, u32 launch) {
  return (u64*)(own + STATE_OFFSET) + STATE_SIGNATURES + launch % OP_LOG_ENTRIES;
}
__device__ __forceinline__ u64 op_word(u32 launch, u32 signature) {
  return (u64)launch << 32 | signature;
}

// Only the first error is kept, and all waits end. The host reads the details after it has seen
// HOST_ERROR, hence the fences.
__device__ __forceinline__ bool claim_report(u32* host_words) {
  return atomicCAS_system(host_words + HOST_CLAIM, 0u, 1u) == 0u;
}
__device__ __forceinline__ void publish_report(u32* host_words, u32 error, u32 peer, u32 awaited,
                                               u32 launch, u32 signature) {
  volatile u32* host = host_words;
  host[HOST_PEER] = peer;
  host[HOST_AWAITED] = awaited;
  host[HOST_LAUNCH] = launch;
  host[HOST_SIGNATURE] = signature;
  fence();
  host[HOST_ERROR] = error;
  fence();
  host[HOST_ABORT] = 1u;  // other threads of this rank need not reach their own deadlines
}
__device__ __noinline__ void report(u32* host_words, u32 error, u32 peer, u32 awaited, u32 launch,
                                    u32 signature) {
  if (claim_report(host_words)) publish_report(host_words, error, peer, awaited, launch, signature);
}

// ---- bounded waits: each polling loop checks, at intervals, the abort word, the op log and its
// deadline (NCCL src/device/primitives.h, checkAbort)

// Update the wait time of this thread; WAIT_ENDED if the wait must end. Rarely called. ``peer`` is
// the awaited rank, ``awaited`` a code layout.AWAIT_*, ``launch`` the launch number, or 0 if the
// launch has no op record. Values are passed and returned, so that the caller's counters stay in
// registers.
//
// A peer that has found a mismatch sends nothing more; its record may be that of the launch before,
// so both records are compared, and before the abort word. The own record is compared with its
// number because in a double-buffered launch block 0, which writes it, may be tiles ahead or
// behind.
//
// Time is in units of 2^20 ns: the upper half of ``wait_time`` is the time waited, the lower half
// the time of the last check. Between two checks at most MAX_GAP counts, because GPU clocks may
// jump and a time-sliced GPU suspends the kernel; neither may end a wait.
//
// All stores of an exited peer have landed, so data still missing after its exit never arrive. The
// poll before the check may have been too early to see them: the first check that finds the peer
// exited sets EXIT_SEEN, and the next one, many polls later, ends the wait.
//
// A failed wait is recorded in this rank's memory and, if that is elsewhere, in the memory shared
// with the peer: later kernels of this rank may end at once and then appear to be further than they
// are.
#define WAIT_ENDED 0xffffffffffffffffull
#define MAX_GAP 1000u
#define EXIT_SEEN (1ull << 63)
static_assert(HOST_ABORT % 2 == 0 && HOST_EXITED == HOST_ABORT + 1, "one load reads both");
__device__ __forceinline__ u64* wait_failed_word(char* region) {
  return (u64*)(region + STATE_OFFSET) + STATE_WAIT_FAILED;
}
__device__ __noinline__ u64 end_wait(char* region, char* own) {
  store_word(wait_failed_word(own), 1);
  if (region != own) store_word(wait_failed_word(region), 1);
  return WAIT_ENDED;
}
__device__ __noinline__ u64 check_deadline(u32* host_words, u64 timeout_ns, u64 wait_time, u32 peer,
                                           u32 awaited, char* region, char* own, u32 launch,
                                           u32 signature) {
  u32 now = (u32)(now_ns() >> 20), gap = wait_time == 0 ? 0 : now - (u32)wait_time;
  u64 elapsed = ((wait_time & ~EXIT_SEEN) >> 32) + (gap < MAX_GAP ? gap : MAX_GAP);
  for (u32 age = 0; age < 2 && launch > age; age++) {
    u32 launch_number = launch - age;
    uint4 reported = load_packet(op_record(region, peer, launch_number));
    u64 expected =
        age == 0 ? op_word(launch_number, signature) : load_word(own_op_word(own, launch_number));
    if (reported.x == launch_number && (u32)(expected >> 32) == launch_number &&
        reported.y != (u32)expected) {
      report(host_words, ERROR_MISMATCH, peer, awaited, launch_number, (u32)expected);
      return end_wait(region, own);
    }
  }
  u64 abort_words = load_word((const u64*)(host_words + HOST_ABORT));
  if ((u32)abort_words != 0) return end_wait(region, own);
  u64 exited = abort_words >> 32 >> peer & 1 ? EXIT_SEEN : 0;
  bool peer_exited = (exited & wait_time) != 0;
  if (!peer_exited && elapsed <= timeout_ns >> 20) return exited | elapsed << 32 | now;
  report(host_words, peer_exited ? ERROR_EXITED : ERROR_TIMEOUT, peer, awaited, launch, signature);
  return end_wait(region, own);
}

// ``polls`` counts the polls of one wait. The check reads host memory; when every thread did it
// each few thousand polls of an operation, however short its waits were, all others waited for the
// bus (seven times slower at 1 GiB).
struct SpinWait {
  u64 wait_time;  // as in ``check_deadline``
  u32 polls;
  u32 launch;
};
#ifndef SPINS_BEFORE_CHECK
#define SPINS_BEFORE_CHECK 16384u  // polls of one wait; several milliseconds
#endif

__device__ __forceinline__ bool check_abort(const Args& a, SpinWait& w, u32 peer, u32 awaited) {
  if (w.wait_time == WAIT_ENDED) return true;
  poll_pause();
  if (++w.polls < SPINS_BEFORE_CHECK) return false;
  w.polls = 0;
  w.wait_time = check_deadline(a.host, a.timeout_ns, w.wait_time, peer, awaited, a.inbox[peer],
                               a.own, w.launch, (u32)a.signature);
  return w.wait_time == WAIT_ENDED;
}
