// The blocks of machine.h: one launch of a kernel on every rank at once.
//
// A fiber is entered once by setcontext and from then on by _longjmp, which, unlike swapcontext, asks the system for nothing.

#include <memory>
#include <sched.h>
#include <setjmp.h>
#include <thread>
#include <ucontext.h>
#include <vector>

#include "machine.h"  // last: it gives words of the C library to CUDA

struct Fiber { ucontext_t start; jmp_buf place; std::unique_ptr<char[]> stack; bool started = false, ended = false; };
struct Block {
  jmp_buf home;
  std::vector<Fiber> fibers;
  void (*kernel)(const void*);
  const void* args;
};
#define STACK (96 << 10)
static thread_local Block* block;
extern "C" { i64 clock_ahead; u64 clock_reads; }  // what a test adds to the clock, and how often kernels have looked at it
__thread Dim threadIdx, blockIdx, gridDim, blockDim;
__thread Meeting* meeting;
__thread Warp* warps;

void yield() {
  u32 me = threadIdx.x;
  if (!_setjmp(block->fibers[me].place)) _longjmp(block->home, 1);
  threadIdx.x = me;
}
u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  __atomic_fetch_add(&clock_reads, 1ull, __ATOMIC_RELAXED);
  return u64(t.tv_sec) * 1000000000ull + t.tv_nsec + __atomic_load_n(&clock_ahead, __ATOMIC_RELAXED);
}
static void fiber_main() {
  block->kernel(block->args);
  block->fibers[threadIdx.x].ended = true;
  _longjmp(block->home, 1);
}
static __attribute__((noinline)) void go_on(Fiber& f) {
  if (_setjmp(block->home)) return;
  if (f.started) _longjmp(f.place, 1);
  f.started = true;
  setcontext(&f.start);
}
static void run_block(u32 number, u32 blocks, u32 threads, void (*kernel)(const void*), const void* args) {
  Block b;
  Meeting all = {};
  std::vector<Warp> in_warps((threads + 31) / 32);
  block = &b; meeting = &all; warps = in_warps.data();
  blockIdx.x = number; gridDim.x = blocks; blockDim.x = threads;
  b.kernel = kernel; b.args = args;
  b.fibers.resize(threads);
  for (Fiber& f : b.fibers) {
    f.stack.reset(new char[STACK]);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get(); f.start.uc_stack.ss_size = STACK; f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
  }
  for (u32 left = threads; left > 0;) {
    for (u32 t = 0; t < threads; t++) {
      if (b.fibers[t].ended) continue;
      threadIdx.x = t;
      go_on(b.fibers[t]);
      if (b.fibers[t].ended) left--;
    }
    sched_yield();
  }
}

void launch(void (*kernel)(const void*), const void* const* args, const u32* blocks, u32 nranks, u32 threads) {
  std::vector<std::thread> all;
  for (u32 r = 0; r < nranks; r++)
    for (u32 b = 0; b < blocks[r]; b++)
      all.emplace_back(run_block, b, blocks[r], threads, kernel, args[r]);
  for (std::thread& t : all) t.join();
}
