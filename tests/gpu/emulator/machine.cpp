// The blocks of machine.h: one launch of a kernel on every rank at once.
//
// A fiber is entered once by setcontext and from then on by _longjmp, which, unlike swapcontext, asks the system for nothing.

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sched.h>
#include <setjmp.h>
#include <thread>
#include <ucontext.h>
#include <vector>

#include "machine.h"  // last: it gives words of the C library to CUDA

struct Fiber { ucontext_t start; jmp_buf place; std::unique_ptr<char[]> stack; bool started = false, ended = false; };
struct Held { u64* p; u64 v; };
struct Block {
  std::vector<Held> held;
  u64 random;
  u32 lands;  // of 1024 stores that are held, in a round of all fibers
  jmp_buf home;
  std::vector<Fiber> fibers;
  void (*kernel)(const void*);
  const void* args;
};
#define STACK (96 << 10)
#define MOST_SPARE 4096
// stacks to use again: what takes longest about new ones is that their pages are new
static std::vector<std::unique_ptr<char[]>>& spare = *new std::vector<std::unique_ptr<char[]>>;
static std::mutex of_spare;
static void take_stacks(std::vector<Fiber>& fibers) {
  std::lock_guard<std::mutex> alone(of_spare);
  for (Fiber& f : fibers) {
    if (spare.empty()) f.stack.reset(new char[STACK]);
    else { f.stack = std::move(spare.back()); spare.pop_back(); }
  }
}
static void leave_stacks(std::vector<Fiber>& fibers) {
  std::lock_guard<std::mutex> alone(of_spare);
  for (Fiber& f : fibers) if (spare.size() < MOST_SPARE) spare.push_back(std::move(f.stack));
}
static thread_local Block* block;
extern "C" {
i64 clock_ahead;  // what a test adds to the clock
u64 clock_reads;  // how often kernels have looked at it
u32 clock_held;   // while it is set, they look on
}
extern "C" { u32 weak_memory; }  // 0: not weak; else where chance begins
__thread Dim threadIdx, blockIdx, gridDim, blockDim;
__thread Meeting* meeting;
__thread Warp* warps;
__thread u32 progress;

// ---- weak memory

static u32 chance() {
  u64& s = block->random;
  s ^= s << 13; s ^= s >> 7; s ^= s << 17;
  return (u32)(s >> 20);
}
static void land_one() {
  std::vector<Held>& held = block->held;
  size_t i = chance() % held.size();
  for (size_t j = 0; j < i; j++) if (held[j].p == held[i].p) i = j;  // the first one to this address
  __atomic_store_n(held[i].p, held[i].v, __ATOMIC_SEQ_CST);
  held.erase(held.begin() + i);
}
bool hold(u64* p, u64 v) {
  if (!weak_memory) return false;
  block->held.push_back({p, v});
  if (block->held.size() > 600) land_one();
  return true;
}
void land_all() { while (!block->held.empty()) land_one(); }
static void land_some() { for (size_t n = block->held.size(); n > 0; n--) if (chance() % 1024 < block->lands) land_one(); }
static void begin_chance(u32 number) {
  static u32 launches;
  static const u32 lands[] = {1024, 300, 60, 12};
  u64 salt = (u64)weak_memory << 32 ^ (u64)__atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED) << 8 ^ number;
  block->random = salt * 0x9e3779b97f4a7c15ull | 1;
  for (int i = 0; i < 5; i++) chance();
  block->lands = lands[chance() % 4];
}

void yield() {
  u32 me = threadIdx.x;
  if (!_setjmp(block->fibers[me].place)) _longjmp(block->home, 1);
  threadIdx.x = me;
}
u64 now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  __atomic_fetch_add(&clock_reads, 1ull, __ATOMIC_RELAXED);
  while (__atomic_load_n(&clock_held, __ATOMIC_ACQUIRE)) sched_yield();
  return u64(t.tv_sec) * 1000000000ull + t.tv_nsec + __atomic_load_n(&clock_ahead, __ATOMIC_RELAXED);
}
void never_meet() {  // on a GPU this may go well or not
  fprintf(stderr, "a kernel on an emulated GPU: threads of block %u wait for others that have ended\n", blockIdx.x);
  abort();
}
static void fiber_main() {
  block->kernel(block->args);
  meeting->gone++; warp().meeting.gone++; progress++;
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
  block = &b; begin_chance(number); meeting = &all; warps = in_warps.data();
  blockIdx.x = number; gridDim.x = blocks; blockDim.x = threads;
  b.kernel = kernel; b.args = args;
  b.fibers.resize(threads);
  take_stacks(b.fibers);
  for (Fiber& f : b.fibers) {
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get(); f.start.uc_stack.ss_size = STACK; f.start.uc_link = nullptr;
    makecontext(&f.start, fiber_main, 0);
  }
  for (u32 left = threads; left > 0;) {
    u32 before = progress;
    land_some();
    for (u32 t = 0; t < threads; t++) {
      if (b.fibers[t].ended) continue;
      threadIdx.x = t;
      go_on(b.fibers[t]);
      if (b.fibers[t].ended) left--;
    }
    if (progress == before) sched_yield();  // Linux takes a whole slice for it, also from who has something to do
  }
  land_all();
  leave_stacks(b.fibers);
}

void launch(void (*kernel)(const void*), const void* const* args, const u32* blocks, u32 nranks, u32 threads) {
  std::vector<std::thread> all;
  for (u32 r = 0; r < nranks; r++)
    for (u32 b = 0; b < blocks[r]; b++)
      all.emplace_back(run_block, b, blocks[r], threads, kernel, args[r]);
  for (std::thread& t : all) t.join();
}
