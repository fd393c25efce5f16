// Machine-dependent functions: PTX for memory shared with other GPUs, conversions, time and grid
// dependencies. No header is included, so the text compiles with NVRTC alone.
// tests/gpu/emulator/machine.h defines the same functions for a CPU.
//
// Memory ordering: all accesses to memory that other GPUs see have system scope.
// ``load_packet``/``store_packet`` and ``load_word``/``store_word`` are relaxed; order comes from
// ``fence`` (acq_rel), ``load_acquire``, or a value that carries its own flag.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- memory that other GPUs access

__device__ __forceinline__ uint4 load_packet(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_packet(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
// Store ordered only by a fence, the end of the kernel, or a load of the same thread that sees the
// value.
__device__ __forceinline__ void store_unordered(uint4* p, uint4 v) { *p = v; }
// A line is 128 bytes that eight lanes of a warp access with one instruction; NVLink and L2 keep it
// whole (NCCL src/device/prims_ll128.h).
__device__ __forceinline__ uint4 load_line(const uint4* p) {
  __syncwarp();
  return load_packet(p);
}
__device__ __forceinline__ void store_line(uint4* p, uint4 v) {
  __syncwarp();
  store_packet(p, v);
}
__device__ __forceinline__ u64 load_word(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Store one word that a peer polls. Only this word is written: once the peer has seen it, it may
// already clear or reuse the memory beside it.
__device__ __forceinline__ void store_word(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
// Atomic increment that wraps to zero after ``last``; returns the value before.
__device__ __forceinline__ u32 atomic_inc_wrap(u32* p, u32 last) {
  u32 v;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0,[%1],%2;"
               : "=r"(v)
               : "l"(p), "r"(last)
               : "memory");
  return v;
}
// Lane 0 adds one and gets the value before, other lanes get 0. The addend depends on the lane: for
// an addend equal in all lanes ptxas would aggregate over the warp, broadcast the result at once
// and so wait for it.
__device__ __forceinline__ u64 atomic_add_lane0(u64* p, u32 lane) {
  u64 v = 0;
  asm volatile(
      "{.reg .pred first; .reg .u64 one; setp.eq.u32 first,%2,0; cvt.u64.u32 one,%2; add.u64 "
      "one,one,1;"
      "@first atom.relaxed.gpu.global.add.u64 %0,[%1],one;}"
      : "+l"(v)
      : "l"(p), "r"(lane)
      : "memory");
  return v;
}
__device__ __forceinline__ void atomic_add(u64* p, u64 by) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" ::"l"(p), "l"(by) : "memory");
}

// Add and return the value before.
__device__ __forceinline__ u64 atomic_add_return(u64* p, u64 by) {
  u64 v;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0,[%1],%2;"
               : "=l"(v)
               : "l"(p), "l"(by)
               : "memory");
  return v;
}

// ---- other memory

// Load a vector that is read once and not written during this launch. Not volatile: the compiler
// may have several in flight.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}
__device__ __forceinline__ u32 count_bits(u32 x) {
  u32 n;
  asm("popc.b32 %0,%1;" : "=r"(n) : "r"(x));
  return n;
}

// Return ``x``, about which the compiler then knows nothing.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Load a word of this launch's message table. The asm keeps the compiler from merging this load
// with one from the arguments, which are in another memory space.
__device__ __forceinline__ u64 load_table_word(const u64* p) {
  u64 v;
  asm volatile("ld.global.u64 %0,[%1];" : "=l"(v) : "l"(p));
  return v;
}
// Load a packet, or zeros if ``condition`` is false. Predicated instead of branched: after a branch
// the next load would wait for this one.
__device__ __forceinline__ uint4 load_if(bool condition, const uint4* p) {
  uint4 v = {0, 0, 0, 0};
  asm volatile(
      "{.reg .pred there; setp.ne.u32 there,%5,0; @there ld.global.v4.u32 {%0,%1,%2,%3},[%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"((u32)condition));
  return v;
}

__device__ __forceinline__ void poll_pause() {}

// Programmatic dependent launch (executor/cuda/launch.py): the grid is set up while the one before
// it in the stream runs, as soon as all blocks of that grid have called ``launch_dependents``.
// ``wait_previous_grid`` waits for the end of that grid and for its memory.
__device__ __forceinline__ void wait_previous_grid() {
#if ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void launch_dependents() {
#if ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- conversions

__device__ __forceinline__ float half_value(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ u16 half_bits(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ u16 bfloat16_bits(float x) {
#if ARCH >= 80
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;    // keep NaN a NaN
  return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);  // round to nearest, ties to even
#endif
}
