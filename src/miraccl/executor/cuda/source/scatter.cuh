// Copy of a list of extents by one launch: block i copies extents i, i + gridDim.x, ... The host
// cuts large extents, so that blocks have like shares (p2p/device.py). Memory of another process
// or GPU is mapped; the end of the kernel orders its stores before the notification of the host.

struct CopyExtent {
  u64 src, dst, bytes;
};
struct ScatterArgs {
  u64 table, count;
};

// Four vectors of a thread are loaded before the first is stored, which hides the latency of a load.
#define VECTORS 4

template <class Word>
__device__ __forceinline__ void copy_words(u64 dst, u64 src, u64 bytes) {
  const Word* from = (const Word*)src;
  Word* to = (Word*)dst;
  u64 count = bytes / sizeof(Word);
  for (u64 first = threadIdx.x; first < count; first += (u64)THREADS * VECTORS) {
    Word values[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
      if (first + (u64)k * THREADS < count) values[k] = from[first + (u64)k * THREADS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
      if (first + (u64)k * THREADS < count) to[first + (u64)k * THREADS] = values[k];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter(const __grid_constant__ ScatterArgs a) {
  const CopyExtent* table = (const CopyExtent*)a.table;
  for (u64 i = blockIdx.x; i < a.count; i += gridDim.x) {
    u64 src = table[i].src, dst = table[i].dst, bytes = table[i].bytes;
    u64 low = src | dst | bytes;
    if ((low & 15) == 0)
      copy_words<uint4>(dst, src, bytes);
    else if ((low & 3) == 0)
      copy_words<u32>(dst, src, bytes);
    else
      copy_words<u8>(dst, src, bytes);
  }
}
