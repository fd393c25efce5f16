// Rows of an array of which most are zero: scan, list, gather, scatter, and the owner's sum. The
// schedule names the tables and parts (executor/cuda/row_lowering.py); a launch handles the rows of
// one message or one sum. Only memory of this launch's stream is accessed, so no ordering is needed.
//
// A warp handles a row; vectors of 16 bytes where array, message and row size allow them.

struct RowArgs {  // row_lowering.pack_args
  const char* in;   // scan, gather: array; scatter: message
  char* out;        // gather: message; scatter, fold: array
  u64 row_bytes, total_bytes;  // the last row of the array may be shorter
  u64* bitmap;      // scan: written; list: read
  u64 words;        // of the bitmap
  i64* list;        // list: written; others: rows to handle, ascending
  u64 count;        // rows in ``list``
  u64* found;       // list: number of rows in the bitmap
  u64 own;          // fold: operand that is an array instead of a message; RANKS if there is none
  const char* operand[RANKS];  // fold: in the order of the sum
  const i64* rows[RANKS];      // fold: rows of each operand, ascending
  u64 nrows[RANKS];
};
static_assert(sizeof(RowArgs) == ROW_ARGS_BYTES, "layout.row_args_bytes");

__device__ __forceinline__ u64 row_length(const RowArgs& a, u64 row) {
  u64 start = row * a.row_bytes;
  if (start >= a.total_bytes) return 0;
  return a.row_bytes < a.total_bytes - start ? a.row_bytes : a.total_bytes - start;
}
__device__ __forceinline__ bool rows_aligned(const RowArgs& a, const void* p) {
  return ((u64)p | a.row_bytes) % 16 == 0;
}

#if defined(KERNEL_ROW_SCAN)
// Vectors that a lane has in flight, 32 apart. With two per row and lane, in loops whose length is
// known at run time, 256 MiB took 129 us on an H200, half of what its memory delivers.
#define SCAN_VECTORS 8
#define BATCH_BYTES (SCAN_VECTORS * 32 * 16)
#define GRANULE 256  // bytes that half a warp loads at a time

// Bits that are set in this lane's share of a row, as any word that is not zero.
__device__ __forceinline__ u32 row_bits(const char* p, u64 bytes, u32 lane, bool aligned) {
  u32 held = 0;
  u64 vectors = aligned ? bytes / 16 : 0;
  for (u64 i = lane; i < vectors; i += 32) {
    uint4 v = load_once((const uint4*)p + i);
    held |= v.x | v.y | v.z | v.w;
  }
  for (u64 i = vectors * 16 + lane; i < bytes; i += 32) held |= (u8)p[i];
  return held;
}

// Bits of 32 whole rows, aligned and of whole granules.
__device__ __forceinline__ u32 scan_granules(const char* p, u64 row_bytes, u32 lane) {
  u32 bits = 0, per_row = (u32)(row_bytes / GRANULE), batches = (u32)(32 * row_bytes / BATCH_BYTES);
  const uint4* from = (const uint4*)p + lane;
  for (u32 batch = 0; batch < batches; batch++, from += BATCH_BYTES / 16) {
    u32 held[SCAN_VECTORS], any = 0;
#pragma unroll
    for (u32 j = 0; j < SCAN_VECTORS; j++) {
      uint4 v = load_once(from + 32 * j);
      held[j] = v.x | v.y | v.z | v.w;
    }
#pragma unroll
    for (u32 j = 0; j < SCAN_VECTORS; j++) any |= held[j];
    if (!__any_sync(WHOLE_WARP, any != 0)) continue;
#pragma unroll
    for (u32 j = 0; j < SCAN_VECTORS; j++) {
      u32 lanes = __ballot_sync(WHOLE_WARP, held[j] != 0), granule = 2 * (batch * SCAN_VECTORS + j);
      if (lanes & 0xffffu) bits |= 1u << granule / per_row;
      if (lanes >> 16) bits |= 1u << (granule + 1) / per_row;
    }
  }
  return bits;
}

// Write a bit for each row in which any bit is set; bits after the last row are zero.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_scan(const __grid_constant__ RowArgs a) {
  u32 lane = threadIdx.x & 31;
  bool aligned = rows_aligned(a, a.in), granules = aligned && a.row_bytes % GRANULE == 0;
  for (u64 group = warp_of_grid(); group < 2 * a.words; group += warps_of_grid()) {
    u32 bits = 0;
    const char* first = a.in + group * 32 * a.row_bytes;
    if (granules && (group + 1) * 32 * a.row_bytes <= a.total_bytes) {
      bits = scan_granules(first, a.row_bytes, lane);
    } else {
      for (u32 i = 0; i < 32; i++) {
        u64 bytes = row_length(a, group * 32 + i);
        if (__any_sync(WHOLE_WARP, row_bits(first + i * a.row_bytes, bytes, lane, aligned) != 0))
          bits |= 1u << i;
      }
    }
    if (lane == 0) ((u32*)a.bitmap)[group] = bits;
  }
}
#endif

#if defined(KERNEL_ROW_LIST)
__device__ __forceinline__ u32 count_word(u64 word) {
  return count_bits((u32)word) + count_bits((u32)(word >> 32));
}

// Write the numbers of the rows of a bitmap in ascending order. One block: 2^20 rows are 16 words
// per thread.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_list(const __grid_constant__ RowArgs a) {
  __shared__ u32 before[THREADS];
  u64 share = (a.words + THREADS - 1) / THREADS, first = threadIdx.x * share;
  u64 end = first + share < a.words ? first + share : a.words;
  u32 mine = 0;
  for (u64 word = first; word < end; word++) mine += count_word(a.bitmap[word]);
  before[threadIdx.x] = mine;
  __syncthreads();
  for (u32 step = 1; step < THREADS; step *= 2) {
    u32 more = threadIdx.x >= step ? before[threadIdx.x - step] : 0;
    __syncthreads();
    before[threadIdx.x] += more;
    __syncthreads();
  }
  u64 at = before[threadIdx.x] - mine;
  for (u64 word = first; word < end; word++) {
    u64 left = a.bitmap[word];
    while (left != 0) {
      u64 lowest = left & (~left + 1);
      a.list[at++] = (i64)(word * 64 + count_word(lowest - 1));
      left ^= lowest;
    }
  }
  if (threadIdx.x == THREADS - 1) *a.found = before[threadIdx.x];
}
#endif

__device__ __forceinline__ void copy_row(char* to, const char* from, u64 bytes, u32 lane,
                                         bool aligned) {
  u64 vectors = aligned ? bytes / 16 : 0;
  for (u64 i = lane; i < vectors; i += 32) ((uint4*)to)[i] = ((const uint4*)from)[i];
  for (u64 i = vectors * 16 + lane; i < bytes; i += 32) to[i] = from[i];
}

#if defined(KERNEL_ROW_GATHER)
// Put the listed rows of an array one after another into a message.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_gather(const __grid_constant__ RowArgs a) {
  bool aligned = rows_aligned(a, a.in) && rows_aligned(a, a.out);
  for (u64 i = warp_of_grid(); i < a.count; i += warps_of_grid()) {
    u64 row = (u64)a.list[i];
    copy_row(a.out + i * a.row_bytes, a.in + row * a.row_bytes, row_length(a, row),
             threadIdx.x & 31, aligned);
  }
}
#endif

#if defined(KERNEL_ROW_SCATTER)
// Put the rows of a message at their places in an array.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_scatter(const __grid_constant__ RowArgs a) {
  bool aligned = rows_aligned(a, a.in) && rows_aligned(a, a.out);
  for (u64 i = warp_of_grid(); i < a.count; i += warps_of_grid()) {
    u64 row = (u64)a.list[i];
    copy_row(a.out + row * a.row_bytes, a.in + i * a.row_bytes, row_length(a, row),
             threadIdx.x & 31, aligned);
  }
}
#endif

#if defined(KERNEL_ROW_FOLD)
// Address of a row in an operand, null if it is not listed there.
__device__ __forceinline__ const char* operand_row(const RowArgs& a, u32 number, i64 row) {
  const i64* rows = a.rows[number];
  u64 low = 0, high = a.nrows[number];
  while (low < high) {
    u64 middle = (low + high) / 2;
    if (rows[middle] < row)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == a.nrows[number] || rows[low] != row) return nullptr;
  return a.operand[number] + (number == a.own ? (u64)row : low) * a.row_bytes;
}

// Fold each listed row over all operands, in their order, rounded once. A row that an operand lacks
// is zero there and takes part: -0.0 + 0.0 is 0.0, as in the sum of whole arrays.
extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_fold(const __grid_constant__ RowArgs a) {
  u32 lane = threadIdx.x & 31;
  for (u64 i = warp_of_grid(); i < a.count; i += warps_of_grid()) {
    i64 row = a.list[i];
    const char* found = lane < RANKS ? operand_row(a, lane, row) : nullptr;
    const T* from[RANKS];
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) from[r] = (const T*)__shfl_sync(WHOLE_WARP, (u64)found, r);
    T* to = (T*)(a.out + (u64)row * a.row_bytes);
    u64 elements = row_length(a, (u64)row) / sizeof(T);
    for (u64 e = lane; e < elements; e += 32) {
      A sum = from[0] != nullptr ? widen(from[0][e]) : (A)0;
#pragma unroll
      for (u32 r = 1; r < RANKS; r++)
        sum = combine(sum, from[r] != nullptr ? widen(from[r][e]) : (A)0);
      to[e] = narrow(finish(sum));
    }
  }
}
#endif
