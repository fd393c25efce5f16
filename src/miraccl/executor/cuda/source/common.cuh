// What all kernels share: the arguments of a launch, element types, operators, vectors, and waiting that ends.
//
// The generator (executor/cuda/source.py) puts before this text: RANKS, THREADS, UNROLL, TYPE_<dtype>, OP_<operator>,
// FRAME_<kind of packet>, MODE_<collective>, ARCH and the offsets of executor/cuda/layout.py; then machine.cuh, all that is PTX.

struct Branch {        // layout.BRANCH: this rank's place in a tree; NOBODY where there is no such rank
  u8 up, down[2];
  u8 child;            // which of its parent's children it is
};

struct Args {          // layout.ARGS
  const void* in;
  void* out;
  u64 count;           // elements of a block
  u32 rank, root;
  u32 nslots, ahead;   // packet kernels: slots of a bank, pieces that are pushed ahead
  u64 timeout_ns;
  u64 scalar;          // OP_PREMUL_SUM: this rank's factor, the bits of an A
  u64 signature;       // 32 bits of what all ranks must agree about; above them whom this rank needs (``need_word``)
  u32 prev, next;      // this rank's neighbours in the ring that kernels follow who talk to neighbours only
  u32 position;        // its place there
  Branch trees[2];     // of the kernel that follows them
  u32* host;           // layout.HOST_*: words in host memory
  char* own;           // this rank's memory on its GPU
  char* inbox[RANKS];  // the region through which a peer's packets, messages and signals come here
  char* outbox[RANKS]; // the region of a peer through which this rank's go there, mapped here
};
static_assert(sizeof(Args) == ARGS_BYTES, "layout.ARGS");

// ---- element types: T as it lies in memory, A as it is added up

#if defined(TYPE_FLOAT32)
typedef float T; typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return x; }
__device__ __forceinline__ T narrow(A x) { return x; }
#elif defined(TYPE_FLOAT64)
typedef double T; typedef double A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return x; }
__device__ __forceinline__ T narrow(A x) { return x; }
#elif defined(TYPE_BFLOAT16)
typedef u16 T; typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ T narrow(A x) { return bfloat16_bits(x); }
#elif defined(TYPE_FLOAT16)
typedef u16 T; typedef float A;
#define IS_FLOAT 1
__device__ __forceinline__ A widen(T x) { return half_value(x); }
__device__ __forceinline__ T narrow(A x) { return half_bits(x); }
#elif defined(TYPE_FLOAT8_E4M3) || defined(TYPE_FLOAT8_E5M2)
typedef u8 T; typedef float A;
#define IS_FLOAT 1
// OCP 8-bit floats (E4M3 without infinity: what is too large becomes NaN), by integer arithmetic: conversions need no sm_89.
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
#define F8_UNIT (127 + F8_BIAS + F8_MANTISSA - 1)           // exponent of 1 / the smallest number
__device__ __forceinline__ A widen(T x) {
  u32 sign = (u32)(x & 0x80) << 24, bits = x & 0x7f;
#if defined(TYPE_FLOAT8_E4M3)
  if (bits == 0x7f) return __uint_as_float(sign | 0x7fc00000u);
#else
  if (bits >= 0x7c) return __uint_as_float(sign | 0x7f800000u | (bits & 3) << 21);
#endif
  if (bits >> F8_MANTISSA) return __uint_as_float(sign | (bits + ((127 - F8_BIAS) << F8_MANTISSA)) << (23 - F8_MANTISSA));
  return __uint_as_float(sign | __float_as_uint((float)bits * __uint_as_float((u32)(254 - F8_UNIT) << 23)));
}
__device__ __forceinline__ T narrow(A x) {
  u32 b = __float_as_uint(x), sign = (b >> 24) & 0x80, a = b & 0x7fffffffu;
  if (a > 0x7f800000u) return (T)(sign | F8_NAN);
  if (a < (u32)(128 - F8_BIAS) << 23) {                      // below the smallest normal number: in units, to nearest even
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
  if (a != a || b != b) return a + b;                       // NaN goes through
#endif
#if defined(OP_MIN)
  return b < a ? b : a;
#else
  return a < b ? b : a;
#endif
#else
  return (A)(a + b);                                        // sums, also those that will be averages
#endif
}

__device__ __forceinline__ A finish(A a) {
#if defined(OP_AVG)
  return (A)(a / (A)RANKS);                                 // integers are truncated towards zero
#else
  return a;
#endif
}

// A rank's own element as it is added up: multiplied by the rank's scalar first, and rounded, where the operator says so.
__device__ __forceinline__ T own_element(const Args& a, T x) {
#if defined(OP_PREMUL_SUM)
  return narrow((A)(widen(x) * *(const A*)&a.scalar));
#else
  return x;
#endif
}

#define WHOLE_WARP 0xffffffffu

// ---- vectors: what one thread handles at a time, in packets of 16 bytes (packets.cuh). FRAME_PAIR packets hold 8 bytes of data, the others 16.

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

// Of elements, vectors and bytes. What one launch handles in one piece, or in parts, is short, and 32 bits are less work; what is out of the way of
// nearly all vectors of it is out of the way of its text, too.
#if SINGLE || PARTS
typedef u32 Index;
#define RARELY __noinline__
#else
typedef u64 Index;
#define RARELY __forceinline__
#endif
#if defined(MODE_ALL_TO_ALL) || defined(MODE_REDUCE_SCATTER)
#define RARELY_LOADED __forceinline__  // several blocks, whose loads are to be under way together
#else
#define RARELY_LOADED RARELY
#endif

// Vectors of ``bytes``. FRAME_MASK packets are handled by whole warps, so that a warp is in a loop as a whole.
__device__ __forceinline__ Index vectors_of(Index bytes) {
#if defined(FRAME_MASK)
  return (bytes + 511) / 512 * 32;
#else
  return (bytes + VEC_BYTES - 1) / VEC_BYTES;
#endif
}

// The elements from ``first`` on, where they are not a whole vector in one place; what lies beyond the end is zero.
__device__ RARELY_LOADED Vec load_elements(const T* p, Index first, Index count) {
  Vec v;
#pragma unroll
  for (int j = 0; j < VEC_WORDS; j++) v.w[j] = 0;
#pragma unroll
  for (int j = 0; j < ELEMS; j++) if (first + j < count) v.e[j] = p[first + j];
  return v;
}

__device__ RARELY void store_elements(T* p, Index first, Index count, Vec v) {
#pragma unroll
  for (int j = 0; j < ELEMS; j++) if (first + j < count) p[first + j] = v.e[j];
}

// Vector ``i`` of an array of ``count`` elements.
__device__ __forceinline__ Vec load_vec(const T* p, Index i, Index count, bool aligned) {
  Index first = i * ELEMS;
  if (!aligned || first + ELEMS > count) return load_elements(p, first, count);
  Vec v;
#if defined(FRAME_PAIR)
  uint2 q = *(const uint2*)(p + first); v.w[0] = q.x; v.w[1] = q.y;
#else
  uint4 q = *(const uint4*)(p + first); v.w[0] = q.x; v.w[1] = q.y; v.w[2] = q.z; v.w[3] = q.w;
#endif
  return v;
}

__device__ __forceinline__ void store_vec(T* p, Index i, Index count, bool aligned, const Vec& v) {
  Index first = i * ELEMS;
  if (!aligned || first + ELEMS > count) { store_elements(p, first, count, v); return; }
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

struct Sum {
  A a[ELEMS];
  __device__ __forceinline__ void begin(const Vec& v) {
#pragma unroll
    for (int j = 0; j < ELEMS; j++) a[j] = widen(v.e[j]);
  }
  __device__ __forceinline__ void add(const Vec& v) {
#pragma unroll
    for (int j = 0; j < ELEMS; j++) a[j] = combine(a[j], widen(v.e[j]));
  }
  __device__ __forceinline__ Vec partial() const {  // not yet everybody's
    Vec v;
#pragma unroll
    for (int j = 0; j < ELEMS; j++) v.e[j] = narrow(a[j]);
    return v;
  }
  __device__ __forceinline__ Vec end() const {
    Vec v;
#pragma unroll
    for (int j = 0; j < ELEMS; j++) v.e[j] = narrow(finish(a[j]));
    return v;
  }
};

// ---- the board: what peers say they run. Ranks that call different operations are told, instead of waiting for ever or adding up wrong data.

// The entry of rank ``src`` for launch number ``launch`` (from 1): the number, the signature, a word for the kernel's own use, and whom it needs.
__device__ __forceinline__ uint4* board(char* box, u32 src, u32 launch) {
  return (uint4*)(box + BOARD_OFFSET) + src * BOARD_ENTRIES + launch % BOARD_ENTRIES;
}
// ``needs``: a bit for each rank without which the launch does not end here, or the bit of all. The number is there since halves of an entry may arrive
// one after the other.
__device__ __forceinline__ u32 need_word(u32 launch, u32 needs) { return launch << (NEEDS_ALL_SHIFT + 1) | needs; }
__device__ __forceinline__ bool is_needed(const uint4& said, u32 rank) {
  return (said.w >> (NEEDS_ALL_SHIFT + 1) << (NEEDS_ALL_SHIFT + 1)) == need_word(said.x, 0) && (said.w & (1u << NEEDS_ALL_SHIFT | 1u << rank)) != 0;
}

// Where a rank, whose memory is ``own``, notes what it runs in a launch, and what stands there.
__device__ __forceinline__ u64* note_of(char* own, u32 launch) { return (u64*)(own + STATE_OFFSET) + STATE_SIGNATURES + launch % BOARD_ENTRIES; }
__device__ __forceinline__ u64 noted(u32 launch, u32 signature) { return (u64)launch << 32 | signature; }

// The first error stays; everybody who waits ends. The host reads what belongs to it once it has seen the error.
__device__ __forceinline__ bool is_first_report(u32* host_words) { return atomicCAS_system(host_words + HOST_CLAIM, 0u, 1u) == 0u; }
__device__ __forceinline__ void publish_report(u32* host_words, u32 error, u32 peer, u32 what, u32 launch, u32 signature) {
  volatile u32* host = host_words;
  host[HOST_PEER] = peer; host[HOST_WHAT] = what; host[HOST_LAUNCH] = launch; host[HOST_SIGNATURE] = signature;
  fence();
  host[HOST_ERROR] = error;
  fence();
  host[HOST_ABORT] = 1u;  // the other threads of this rank need not wait for their own deadlines
}
__device__ __noinline__ void report(u32* host_words, u32 error, u32 peer, u32 what, u32 launch, u32 signature) {
  if (is_first_report(host_words)) publish_report(host_words, error, peer, what, launch, signature);
}

// ---- waiting: every loop looks at the abort word, at the board and at its deadline, rarely (NCCL src/device/primitives.h, checkAbort)

// Rarely called: how long this thread has waited in this launch, or NEVER to stop waiting. ``peer`` is who is waited for, ``what`` a code of
// layout.WHAT_*, ``launch`` the number of the launch, 0 if it is not on the board. A peer that has found a mismatch comes no more, so the entry of
// the launch before counts, too, and both are looked at before the abort word. Takes and gives values, so that the counters of the caller stay in
// registers.
//
// What this rank ran before stands with its number: in a launch in parts block 0, which writes that down, may be parts ahead or behind.
//
// Time is in units of 2^20 ns: in the upper half of ``waited`` how long, in the lower half when this thread looked last. Between two looks not
// more than LONGEST_GAP counts. Clocks of GPUs may jump, and a GPU that others share stands still for this kernel: neither may end a wait.
//
// All that a peer which has left has ever stored has landed, so what is missing afterwards never comes. The poll before a look may have been too
// early for that: the first look at a peer that has left marks ``waited``, and the second one, many polls later, ends the wait.
//
// Where a wait ends so, that is noted in this rank's memory, and in what the peer shares if that is elsewhere: kernels of this rank that follow may end at
// once, and seem to have come further than they have.
#define NEVER 0xffffffffffffffffull
#define LONGEST_GAP 1000u
#define SEEN_LEFT (1ull << 63)
static_assert(HOST_ABORT % 2 == 0 && HOST_LEFT == HOST_ABORT + 1, "one load reads both");
__device__ __forceinline__ u64* stopped_word(char* box) { return (u64*)(box + STATE_OFFSET) + STATE_STOPPED; }
__device__ __noinline__ u64 stop_waiting(char* box, char* own) {
  store_word(stopped_word(own), 1);
  if (box != own) store_word(stopped_word(box), 1);
  return NEVER;
}
__device__ __noinline__ u64 check_wait(u32* host_words, u64 timeout_ns, u64 waited, u32 peer, u32 what, char* box, char* own, u32 launch, u32 signature) {
  u32 now = (u32)(now_ns() >> 20), gap = waited == 0 ? 0 : now - (u32)waited;
  u64 time = ((waited & ~SEEN_LEFT) >> 32) + (gap < LONGEST_GAP ? gap : LONGEST_GAP);
  for (u32 back = 0; back < 2 && launch > back; back++) {
    u32 number = launch - back;
    uint4 said = load_packet(board(box, peer, number));
    u64 mine = back == 0 ? noted(number, signature) : load_word(note_of(own, number));
    if (said.x == number && (u32)(mine >> 32) == number && said.y != (u32)mine) {
      report(host_words, ERROR_MISMATCH, peer, what, number, (u32)mine);
      return stop_waiting(box, own);
    }
  }
  u64 words = load_word((const u64*)(host_words + HOST_ABORT));
  if ((u32)words != 0) return stop_waiting(box, own);
  u64 left = words >> 32 >> peer & 1 ? SEEN_LEFT : 0;
  bool in_vain = (left & waited) != 0;
  if (!in_vain && time <= timeout_ns >> 20) return left | time << 32 | now;
  report(host_words, in_vain ? ERROR_LEFT : ERROR_TIMEOUT, peer, what, launch, signature);
  return stop_waiting(box, own);
}

// ``spins`` counts the polls of one wait: looking reads host memory, and threads that did so for every few thousand polls of an operation,
// however short its waits, made all others wait for the bus (seven times slower at 1 GiB).
struct Watch {
  u64 waited;  // as ``check_wait`` has it
  u32 spins;
  u32 launch;
};
#ifndef SPINS_BEFORE_CHECK
#define SPINS_BEFORE_CHECK 16384u  // polls of a wait; several milliseconds
#endif

__device__ __forceinline__ bool give_up(const Args& a, Watch& w, u32 peer, u32 what) {
  if (w.waited == NEVER) return true;
  between_polls();
  if (++w.spins < SPINS_BEFORE_CHECK) return false;
  w.spins = 0;
  w.waited = check_wait(a.host, a.timeout_ns, w.waited, peer, what, a.inbox[peer], a.own, w.launch, (u32)a.signature);
  return w.waited == NEVER;
}
