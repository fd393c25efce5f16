// Pre-multiplied sum of a single rank: its input times its scalar, rounded once. One element per
// thread and iteration; only the user's memory is accessed, so no ordering is needed.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    scale(const __grid_constant__ Args a) {
  for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < a.count; i += (u64)gridDim.x * THREADS)
    ((T*)a.out)[i] = own_element(a, ((const T*)a.in)[i]);
}
