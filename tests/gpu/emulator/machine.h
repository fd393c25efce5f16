// CPU implementation of machine.cuh and of the CUDA additions to C++, to run the kernels of
// executor/cuda/source without a GPU.
//
// A block is an OS thread, a CUDA thread a fiber in it. A fiber runs until it polls (``yield`` in
// waiting loops) or reaches a barrier, so any number of blocks and ranks wait for each other as on
// GPUs. Memory is the processor's: coherent and, on x86, with stores in order. This finds wrong
// indices, slots reused too early, deadlocks, sums in the wrong order, and reliance on 16 bytes
// arriving at once. Missing fences and memory reused before it was seen cleared are found with weak
// memory (``buffer_store``).

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sched.h>
#include <ctime>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static thread_local
#define __restrict__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Dim {
  u32 x;
};

// ---- the block of this thread: machine.cpp, compiled once for all kernels

#define THREAD_LOCAL extern __thread __attribute__((tls_model("initial-exec")))
// exited: threads that have returned
struct Barrier {
  u32 arrived, round, exited;
  bool any, result;
};
struct Warp {
  Barrier block_barrier;
  u64 lane[32][2];
};
THREAD_LOCAL Dim threadIdx, blockIdx, gridDim, blockDim;
THREAD_LOCAL Barrier* block_barrier;
THREAD_LOCAL Warp* warps;
THREAD_LOCAL u32 progress;  // counts actions of the block's threads other than waiting
void yield();
// With weak memory, stores visible to others stay in a buffer of their block and land later in any
// order, except that stores to one address keep theirs. Returns false if the store lands at once.
[[noreturn]] void barrier_deadlock();
bool buffer_store(u64* p, u64 v);
void drain_stores();
extern "C" void launch(void (*kernel)(const void*), const void* const* args, const u32* blocks,
                       u32 nranks, u32 threads);

// Wait until all ``expected`` fibers have arrived; return true if any of them passed true.
inline bool barrier_wait(Barrier& m, u32 expected, bool mine) {
  u32 round = m.round;
  m.any = m.any || mine;
  if (++m.arrived == expected) {
    m.arrived = 0;
    m.result = m.any;
    m.any = false;
    m.round++;
  } else
    while (m.round == round) {
      if (m.arrived + m.exited == expected) barrier_deadlock();
      yield();
    }
  return m.result;
}
inline u32 warp_size() {
  u32 left = blockDim.x - (threadIdx.x & ~31u);
  return left < 32 ? left : 32;
}
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline void __syncthreads() {
  progress++;
  barrier_wait(*block_barrier, blockDim.x, false);
}
inline int __syncthreads_or(int x) {
  progress++;
  return barrier_wait(*block_barrier, blockDim.x, x != 0);
}
inline void __syncwarp(u32 = ~0u) { barrier_wait(warp().block_barrier, warp_size(), false); }
inline int __any_sync(u32, int x) {
  return barrier_wait(warp().block_barrier, warp_size(), x != 0);
}
inline int __all_sync(u32, int x) {
  return !barrier_wait(warp().block_barrier, warp_size(), x == 0);
}
inline u32 __ballot_sync(u32, int x) {
  Warp& w = warp();
  w.lane[threadIdx.x & 31][0] = x != 0;
  __syncwarp();
  u32 bits = 0;
  for (u32 lane = 0; lane < warp_size(); lane++) bits |= (u32)w.lane[lane][0] << lane;
  __syncwarp();
  return bits;
}
inline u64 shuffle(u64 x, u32 from) {
  Warp& w = warp();
  w.lane[threadIdx.x & 31][0] = x;
  __syncwarp();
  u64 y = w.lane[from & 31][0];
  __syncwarp();
  return y;
}
template <class X>
inline X __shfl_sync(u32, X x, int from) {
  u64 bits = 0;
  memcpy(&bits, &x, sizeof x);
  bits = shuffle(bits, from);
  memcpy(&x, &bits, sizeof x);
  return x;
}

// ---- memory that other ranks access

inline uint4 load_packet(const uint4* p) {
  union {
    u64 q[2];
    uint4 v;
  } u;
  u.q[0] = __atomic_load_n((const u64*)p, __ATOMIC_ACQUIRE);
  u.q[1] = __atomic_load_n((const u64*)p + 1, __ATOMIC_ACQUIRE);
  return u.v;
}
// The halves of a packet may arrive at different times; now and then another thread runs in
// between.
inline void store_halves(uint4* p, uint4 v) {
  union {
    uint4 v;
    u64 q[2];
  } u = {v};
  __atomic_store_n((u64*)p, u.q[0], __ATOMIC_RELEASE);
  if (++progress % 16 == 0) sched_yield();
  __atomic_store_n((u64*)p + 1, u.q[1], __ATOMIC_RELEASE);
}
inline bool buffer_halves(uint4* p, uint4 v) {
  union {
    uint4 v;
    u64 q[2];
  } u = {v};
  return buffer_store((u64*)p, u.q[0]) && buffer_store((u64*)p + 1, u.q[1]);
}
inline void store_unordered(uint4* p, uint4 v) {
  if (!buffer_halves(p, v)) *p = v;
}
inline void store_packet(uint4* p, uint4 v) {
  if (!buffer_halves(p, v)) store_halves(p, v);
}
// The last lane of a line is read first and written last, and within it the half with the flag.
inline uint4 load_flagged(const uint4* p) {
  union {
    u64 q[2];
    uint4 v;
  } u;
  u.q[1] = __atomic_load_n((const u64*)p + 1, __ATOMIC_ACQUIRE);
  u.q[0] = __atomic_load_n((const u64*)p, __ATOMIC_ACQUIRE);
  return u.v;
}
// polls between two checks: fibers are slow; not fewer than await_freed counts
#define SPINS_BEFORE_CHECK 256u
#define WARP_SPINS_BEFORE_CHECK 64u
inline uint4 load_line(const uint4* p) {
  bool flag = (threadIdx.x & 7) == 7;
  uint4 v;
  if (flag) v = load_flagged(p);
  __syncwarp();
  if (!flag) v = load_packet(p);
  return v;
}
inline void store_line(uint4* p, uint4 v) {
  bool flag = (threadIdx.x & 7) == 7;
  if (!flag) store_halves(p, v);
  __syncwarp();
  if (flag) store_halves(p, v);
}
inline u64 load_word(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
inline u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline u64 load_table_word(const u64* p) { return *p; }
inline int opaque(int x) { return x; }
inline uint4 load_if(bool condition, const uint4* p) { return condition ? *p : uint4{0, 0, 0, 0}; }
inline void store_word(u64* p, u64 v) {
  progress++;
  if (!buffer_store(p, v)) __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
inline void fence() {
  drain_stores();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
u64 now_ns();
inline u32 atomic_inc_wrap(u32* p, u32 last) {
  u32 v = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &v, v >= last ? 0 : v + 1, false, __ATOMIC_ACQ_REL,
                                      __ATOMIC_RELAXED)) {
  }
  return v;
}
inline u64 atomic_add_lane0(u64* p, u32 lane) {
  return lane == 0 ? __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL) : 0;
}
inline void atomic_add(u64* p, u64 by) { __atomic_fetch_add(p, by, __ATOMIC_ACQ_REL); }
inline u64 atomic_add_return(u64* p, u64 by) {
  return __atomic_fetch_add(p, by, __ATOMIC_ACQ_REL);
}
inline uint4 load_once(const uint4* p) { return *p; }
inline u32 count_bits(u32 x) { return (u32)__builtin_popcount(x); }
inline u32 atomicCAS_system(u32* p, u32 old, u32 v) {
  __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return old;
}
inline void poll_pause() { yield(); }
inline void wait_previous_grid() {}
inline void launch_dependents() {}

// ---- conversions

inline float __uint_as_float(u32 b) {
  float f;
  memcpy(&f, &b, 4);
  return f;
}
inline u32 __float_as_uint(float f) {
  u32 b;
  memcpy(&b, &f, 4);
  return b;
}
inline float half_value(u16 b) {
  u32 sign = (u32)(b & 0x8000) << 16, exponent = (b >> 10) & 31, mantissa = b & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
  if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
  float f = mantissa * (1.0f / 16777216.0f);
  return sign ? -f : f;
}
inline u16 half_bits(float x) {
  u32 b = __float_as_uint(x), sign = (b >> 16) & 0x8000, a = b & 0x7fffffff;
  if (a > 0x7f800000u) return (u16)(0x7fff);
  if (a >= 0x477ff000u) return (u16)(sign | 0x7c00);
  if (a < 0x38800000u) {  // subnormal: in units of 2^-24, to nearest even
    float scaled = __uint_as_float(a) * 16777216.0f;
    u32 whole = (u32)scaled;
    float rest = scaled - whole;
    if (rest > 0.5f || (rest == 0.5f && (whole & 1))) whole++;
    return (u16)(sign | whole);
  }
  a += 0xfff + ((a >> 13) & 1);
  return (u16)(sign | ((a - 0x38000000u) >> 13));
}
inline u16 bfloat16_bits(float x) {
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}
