// What depends on the machine: PTX for memory that other GPUs see, for conversions and for time. No header is included: the
// text compiles with NVRTC alone. tests/gpu/emulator/machine.h gives the same functions on a CPU.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// ---- memory that other GPUs see

__device__ __forceinline__ uint4 load_packet(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_packet(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0],{%1,%2,%3,%4};" :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Nothing orders this one but a fence, the end of the kernel, or a load of this thread that sees it.
__device__ __forceinline__ void store_late(uint4* p, uint4 v) { *p = v; }
// A line is 128 bytes that eight lanes of a warp write and read by one instruction; NVLink and L2 keep it whole (NCCL, src/device/prims_ll128.h).
__device__ __forceinline__ uint4 load_line(const uint4* p) { __syncwarp(); return load_packet(p); }
__device__ __forceinline__ void store_line(uint4* p, uint4 v) { __syncwarp(); store_packet(p, v); }
__device__ __forceinline__ u64 load_word(const u64* p) {
  u64 v; asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v; asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v;
}
// A word that a peer polls: nothing beside it is written, for who has seen the word may already clear or reuse what lies there.
__device__ __forceinline__ void store_word(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" :: "l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ __forceinline__ u64 now_ns() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
// A block's turn: the value before, counted up and back to zero after ``last``.
__device__ __forceinline__ u32 draw(u32* p, u32 last) {
  u32 v; asm volatile("atom.relaxed.gpu.global.inc.u32 %0,[%1],%2;" : "=r"(v) : "l"(p), "r"(last) : "memory"); return v;
}
// The first lane of a warp counts one up and gets the value before, others get 0. Were what is added the same in all lanes, ptxas would add for the whole
// warp and hand the result around at once, and so wait for it.
__device__ __forceinline__ u64 draw_as_first(u64* p, u32 lane) {
  u64 v = 0;
  asm volatile("{.reg .pred first; .reg .u64 one; setp.eq.u32 first,%2,0; cvt.u64.u32 one,%2; add.u64 one,one,1;"
               "@first atom.relaxed.gpu.global.add.u64 %0,[%1],one;}"
               : "+l"(v) : "l"(p), "r"(lane) : "memory");
  return v;
}
__device__ __forceinline__ void count_up(u64* p, u64 by) { asm volatile("red.relaxed.gpu.global.add.u64 [%0],%1;" :: "l"(p), "l"(by) : "memory"); }

// ---- other memory

// A list of this launch's. A compiler would make of this load and of one from the arguments a single one, from whatever memory it may be.
__device__ __forceinline__ u64 load_listed(const u64* p) { u64 v; asm volatile("ld.global.u64 %0,[%1];" : "=l"(v) : "l"(p)); return v; }
// Zeros where ``there`` does not hold. No branch, after which the next load would wait for this one.
__device__ __forceinline__ uint4 load_where(bool there, const uint4* p) {
  uint4 v = {0, 0, 0, 0};
  asm volatile("{.reg .pred there; setp.ne.u32 there,%5,0; @there ld.global.v4.u32 {%0,%1,%2,%3},[%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((u32)there));
  return v;
}

__device__ __forceinline__ void between_polls() {}

// Where the launch says so (executor/cuda/launch.py), a grid is set up while the one before it in the stream runs, as soon as all blocks of that one let it
// (``before_next_grid``). Then it waits for that one's end and memory itself (programmatic dependent launch).
__device__ __forceinline__ void after_grid_before() {
#if ARCH >= 90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void before_next_grid() {
#if ARCH >= 90
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- conversions

__device__ __forceinline__ float half_value(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ u16 half_bits(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
__device__ __forceinline__ u16 bfloat16_bits(float x) {
#if ARCH >= 80
  u16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y;
#else
  u32 b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return 0x7fff;      // a NaN stays one
  return (u16)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);    // round to nearest, ties to even
#endif
}

