// The kernels of executor/cuda/source on a CPU: the functions of machine.cuh and what CUDA C++ adds to C++, written anew.
//
// A block is a thread of the operating system, a CUDA thread in it a fiber. A fiber runs until it polls (`yield` in the loops that wait) or meets
// a barrier, so any number of blocks and ranks wait for one another as on GPUs. Memory is the processor's: coherent and, on x86, with stores in order.
// What this finds: wrong indices, slots used too early, deadlocks, sums in the wrong order, reliance on 16 bytes arriving at once. Missing fences
// and memory that is used again before it was seen cleared it finds where memory is weak (``hold``).

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

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
struct Dim { u32 x; };

// ---- the block of this thread: machine.cpp, compiled once for all kernels

#define OF_THREAD extern __thread __attribute__((tls_model("initial-exec")))
struct Meeting { u32 came, round, gone; bool any, result; };  // gone: threads that have ended
struct Warp { Meeting meeting; u64 lane[32][2]; };
OF_THREAD Dim threadIdx, blockIdx, gridDim, blockDim;
OF_THREAD Meeting* meeting;
OF_THREAD Warp* warps;
OF_THREAD u32 progress;  // counts what threads of the block do besides waiting
void yield();
// Where memory is weak, stores that others see stay in a buffer of their block and land later and in any order, but for those to one
// address. Gives false where they land at once.
[[noreturn]] void never_meet();
bool hold(u64* p, u64 v);
void land_all();
extern "C" void launch(void (*kernel)(const void*), const void* const* args, const u32* blocks, u32 nranks, u32 threads);

// All of ``expected`` fibers come here before any goes on; gives whether any of them said so.
inline bool meet(Meeting& m, u32 expected, bool mine) {
  u32 round = m.round;
  m.any = m.any || mine;
  if (++m.came == expected) { m.came = 0; m.result = m.any; m.any = false; m.round++; }
  else while (m.round == round) {
    if (m.came + m.gone == expected) never_meet();
    yield();
  }
  return m.result;
}
inline u32 lanes_of_warp() { u32 left = blockDim.x - (threadIdx.x & ~31u); return left < 32 ? left : 32; }
inline Warp& warp() { return warps[threadIdx.x / 32]; }
inline void __syncthreads() { progress++; meet(*meeting, blockDim.x, false); }
inline int __syncthreads_or(int x) { progress++; return meet(*meeting, blockDim.x, x != 0); }
inline void __syncwarp(u32 = ~0u) { meet(warp().meeting, lanes_of_warp(), false); }
inline int __any_sync(u32, int x) { return meet(warp().meeting, lanes_of_warp(), x != 0); }
inline int __all_sync(u32, int x) { return !meet(warp().meeting, lanes_of_warp(), x == 0); }
inline u32 __ballot_sync(u32, int x) {
  Warp& w = warp();
  w.lane[threadIdx.x & 31][0] = x != 0;
  __syncwarp();
  u32 bits = 0;
  for (u32 lane = 0; lane < lanes_of_warp(); lane++) bits |= (u32)w.lane[lane][0] << lane;
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
template <class X> inline X __shfl_sync(u32, X x, int from) { u64 bits = 0; memcpy(&bits, &x, sizeof x); bits = shuffle(bits, from); memcpy(&x, &bits, sizeof x); return x; }

// ---- memory that other ranks see

inline uint4 load_packet(const uint4* p) {
  union { u64 q[2]; uint4 v; } u;
  u.q[0] = __atomic_load_n((const u64*)p, __ATOMIC_ACQUIRE); u.q[1] = __atomic_load_n((const u64*)p + 1, __ATOMIC_ACQUIRE);
  return u.v;
}
// The halves of a packet may arrive at different times; now and then others run in between.
inline void store_halves(uint4* p, uint4 v) {
  union { uint4 v; u64 q[2]; } u = {v};
  __atomic_store_n((u64*)p, u.q[0], __ATOMIC_RELEASE);
  if (++progress % 16 == 0) sched_yield();
  __atomic_store_n((u64*)p + 1, u.q[1], __ATOMIC_RELEASE);
}
inline bool hold_halves(uint4* p, uint4 v) {
  union { uint4 v; u64 q[2]; } u = {v};
  return hold((u64*)p, u.q[0]) && hold((u64*)p + 1, u.q[1]);
}
inline void store_late(uint4* p, uint4 v) { if (!hold_halves(p, v)) *p = v; }
inline void store_packet(uint4* p, uint4 v) { if (!hold_halves(p, v)) store_halves(p, v); }
// Of a line the last lane is read first and written last, of this lane the half with the flag.
inline uint4 load_flagged(const uint4* p) {
  union { u64 q[2]; uint4 v; } u;
  u.q[1] = __atomic_load_n((const u64*)p + 1, __ATOMIC_ACQUIRE); u.q[0] = __atomic_load_n((const u64*)p, __ATOMIC_ACQUIRE);
  return u.v;
}
#define SPINS_BEFORE_CHECK 256u  // polls of a wait between two looks at host memory: fibers are slow; no fewer than wait_freed counts
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
inline u64 load_listed(const u64* p) { return *p; }
inline uint4 load_where(bool there, const uint4* p) { return there ? *p : uint4{0, 0, 0, 0}; }
inline void store_word(u64* p, u64 v) { progress++; if (!hold(p, v)) __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline void fence() { land_all(); __atomic_thread_fence(__ATOMIC_SEQ_CST); }
u64 now_ns();
inline u32 draw(u32* p, u32 last) {
  u32 v = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &v, v >= last ? 0 : v + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
  return v;
}
inline u64 draw_as_first(u64* p, u32 lane) { return lane == 0 ? __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL) : 0; }
inline void count_up(u64* p, u64 by) { __atomic_fetch_add(p, by, __ATOMIC_ACQ_REL); }
inline u32 atomicCAS_system(u32* p, u32 old, u32 v) { __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); return old; }
inline void between_polls() { yield(); }
inline void after_grid_before() {}
inline void before_next_grid() {}

// ---- conversions

inline float __uint_as_float(u32 b) { float f; memcpy(&f, &b, 4); return f; }
inline u32 __float_as_uint(float f) { u32 b; memcpy(&b, &f, 4); return b; }
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
  if (a < 0x38800000u) {                                     // subnormal: in units of 2^-24, to nearest even
    float scaled = __uint_as_float(a) * 16777216.0f;
    u32 whole = (u32)scaled; float rest = scaled - whole;
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
