// Blocks of machine.h: one launch of a kernel on every rank at once.
//
// A fiber is entered once by setcontext and then by _longjmp, which, unlike swapcontext, makes no
// system call.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sched.h>
#include <setjmp.h>
#include <thread>
#include <ucontext.h>
#include <vector>

#include "machine.h"  // last: it redefines names of the C library for CUDA

struct Fiber {
  ucontext_t start;
  jmp_buf packet_of;
  std::unique_ptr<char[]> stack;
  bool started = false, ended = false;
};
struct BufferedStore {
  u64* p;
  u64 v;
};
struct Block {
  std::vector<BufferedStore> buffered;
  u64 random;
  // probability, of 1024, that a buffered store lands in a round of all fibers
  u32 drain_chance, clear_chance;
  jmp_buf home;
  std::vector<Fiber> fibers;
  void (*kernel)(const void*);
  const void* args;
};
#define STACK (96 << 10)
#define MAX_SPARE 4096
// stacks for reuse: most of the cost of a new stack is its page faults
static std::vector<std::unique_ptr<char[]>>& spare = *new std::vector<std::unique_ptr<char[]>>;
static std::mutex spare_lock;
static void acquire_stacks(std::vector<Fiber>& fibers) {
  std::lock_guard<std::mutex> guard(spare_lock);
  for (Fiber& f : fibers) {
    if (spare.empty())
      f.stack.reset(new char[STACK]);
    else {
      f.stack = std::move(spare.back());
      spare.pop_back();
    }
  }
}
static void release_stacks(std::vector<Fiber>& fibers) {
  std::lock_guard<std::mutex> guard(spare_lock);
  for (Fiber& f : fibers)
    if (spare.size() < MAX_SPARE) spare.push_back(std::move(f.stack));
}
static thread_local Block* block;
extern "C" {
i64 clock_offset;  // nanoseconds that a test adds to the clock
u64 clock_reads;   // clock reads by kernels
u32 clock_paused;  // while set, kernels that read the clock block
}
extern "C" {
u32 weak_memory;
}  // 0: strong memory; else the random seed
__thread Dim threadIdx, blockIdx, gridDim, blockDim;
__thread Barrier* block_barrier;
__thread Warp* warps;
__thread u32 progress;

// ---- weak memory

static u32 next_random() {
  u64& s = block->random;
  s ^= s << 13;
  s ^= s >> 7;
  s ^= s << 17;
  return (u32)(s >> 20);
}
// Land the oldest store to the address of store ``i``.
static void land(size_t i) {
  std::vector<BufferedStore>& buffered = block->buffered;
  for (size_t j = 0; j < i; j++)
    if (buffered[j].p == buffered[i].p) i = j;
  __atomic_store_n(buffered[i].p, buffered[i].v, __ATOMIC_SEQ_CST);
  buffered.erase(buffered.begin() + i);
}
static void drain_one() { land(next_random() % block->buffered.size()); }
bool buffer_store(u64* p, u64 v) {
  if (!weak_memory) return false;
  block->buffered.push_back({p, v});
  if (block->buffered.size() > 600) drain_one();
  return true;
}
void drain_stores() {
  while (!block->buffered.empty()) drain_one();
}
static void drain_some() {
  for (size_t i = block->buffered.size(); i-- > 0;) {
    bool clears = block->buffered[i].v == ~0ull;  // to the words of an empty packet
    if (next_random() % 1024 < (clears ? block->clear_chance : block->drain_chance)) land(i);
  }
}
static void seed_random(u32 number) {
  static u32 launches;
  static const u32 drain_chance[] = {1024, 300, 60, 12};
  u64 salt = (u64)weak_memory << 32 ^ (u64)__atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED) << 8 ^
             number;
  block->random = salt * 0x9e3779b97f4a7c15ull | 1;
  for (int i = 0; i < 5; i++) next_random();
  block->drain_chance = drain_chance[next_random() % 4];
  block->clear_chance = drain_chance[next_random() % 4];
}

void yield() {
  u32 me = threadIdx.x;
  if (!_setjmp(block->fibers[me].packet_of)) _longjmp(block->home, 1);
  threadIdx.x = me;
}
u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  __atomic_fetch_add(&clock_reads, 1ull, __ATOMIC_RELAXED);
  while (__atomic_load_n(&clock_paused, __ATOMIC_ACQUIRE)) sched_yield();
  return u64(t.tv_sec) * 1000000000ull + t.tv_nsec +
         __atomic_load_n(&clock_offset, __ATOMIC_RELAXED);
}
void barrier_deadlock() {  // on a GPU this is undefined
  fprintf(stderr,
          "a kernel on an emulated GPU: threads of block %u wait for others that have ended\n",
          blockIdx.x);
  abort();
}
static void fiber_main() {
  block->kernel(block->args);
  block_barrier->exited++;
  warp().block_barrier.exited++;
  progress++;
  block->fibers[threadIdx.x].ended = true;
  _longjmp(block->home, 1);
}
static __attribute__((noinline)) void resume(Fiber& f) {
  if (_setjmp(block->home)) return;
  if (f.started) _longjmp(f.packet_of, 1);
  f.started = true;
  setcontext(&f.start);
}
static void run_block(u32 number, u32 blocks, u32 threads, void (*kernel)(const void*),
                      const void* args) {
  Block b;
  Barrier block_state = {};
  std::vector<Warp> warp_storage((threads + 31) / 32);
  block = &b;
  seed_random(number);
  block_barrier = &block_state;
  warps = warp_storage.data();
  blockIdx.x = number;
  gridDim.x = blocks;
  blockDim.x = threads;
  b.kernel = kernel;
  b.args = args;
  b.fibers.resize(threads);
  acquire_stacks(b.fibers);
  for (Fiber& f : b.fibers) {
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = STACK;
    f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
  }
  for (u32 left = threads; left > 0;) {
    u32 before = progress;
    drain_some();
    for (u32 t = 0; t < threads; t++) {
      if (b.fibers[t].ended) continue;
      threadIdx.x = t;
      resume(b.fibers[t]);
      if (b.fibers[t].ended) left--;
    }
    // Linux takes a full time slice for it, also from threads with work
    if (progress == before) sched_yield();
  }
  drain_stores();
  release_stacks(b.fibers);
}

void launch(void (*kernel)(const void*), const void* const* args, const u32* blocks, u32 nranks,
            u32 threads) {
  std::vector<std::thread> block_state;
  for (u32 r = 0; r < nranks; r++)
    for (u32 b = 0; b < blocks[r]; b++)
      block_state.emplace_back(run_block, b, blocks[r], threads, kernel, args[r]);
  for (std::thread& t : block_state) t.join();
}
