// Copy of a list of extents by one launch: group i of GROUP threads copies extents i, i + groups,
// ... The host cuts large extents, so that groups have like shares (p2p/device.py). Memory of
// another process or GPU is mapped; the end of the kernel orders its stores before the notification
// of the host.

struct CopyExtent {
  u64 src, dst, bytes;
};
struct ScatterArgs {
  u64 table, count;
};

// Four vectors of a thread are loaded before the first is stored, which hides the latency of a load:
// those of a group are 16 KiB, a block of a KV cache. A block of 512 threads on one such extent had
// two per thread in flight, 135 GB/s on 8 multiprocessors of an H200.
#define VECTORS 4

template <class Word>
__device__ __forceinline__ void copy_words(u64 dst, u64 src, u64 bytes) {
  const Word* from = (const Word*)src;
  Word* to = (Word*)dst;
  u64 count = bytes / sizeof(Word);
  for (u64 first = threadIdx.x % GROUP; first < count; first += GROUP * VECTORS) {
    Word values[VECTORS];
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
      if (first + (u64)k * GROUP < count) values[k] = from[first + (u64)k * GROUP];
#pragma unroll
    for (int k = 0; k < VECTORS; k++)
      if (first + (u64)k * GROUP < count) to[first + (u64)k * GROUP] = values[k];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scatter(const __grid_constant__ ScatterArgs a) {
  const CopyExtent* table = (const CopyExtent*)a.table;
  u64 groups = (u64)gridDim.x * (THREADS / GROUP);
  for (u64 i = (u64)blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP; i < a.count;
       i += groups) {
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
