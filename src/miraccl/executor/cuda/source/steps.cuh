// Interpreter of any schedule, protocol Simple: each block executes the steps of its rank.
//
// Blocks are independent. Block b belongs to channel b % channels, is number n = b / channels of
// that channel's ``blocks`` blocks, and moves tiles n, n + blocks, ... of every chunk; a tile has
// ``tile`` elements, the same on all ranks. Between two ranks each block has a FIFO of ``nslots``
// slots in the receiver's memory. The sender writes a slot, fences and raises the tail there; the
// receiver reads the slot and raises the head in the sender's memory (NCCL
// src/device/prims_simple.h).
//
// Memory ordering: one fence per slot between the data and the tail, and acquire loads of tail,
// head and signal words. With large slots links carry more that way than with a flag in each
// packet.
//
// The FIFOs lie in the buffer half of the launch (packets.cuh), shared by the ranks that send to
// this one. Heads and tails start and end as ones, like the whole half: the receiver clears slots
// and tails, the sender clears heads after the last one has arrived. The launch counts like a
// packet launch and has an op record. Every rank waits for the records of all others before it
// ends: the alternation of the halves requires that, and it detects ranks that called different
// operations.
//
// Behind the FIFOs each block has scratch memory for one tile of every scratch chunk, reused for
// the next tiles; peers whose steps address it do the same. A block executes all steps on a tile
// before the next tile, so each tile is an operation of its own. A schedule's proof
// (schedule/proof.py) includes that it does not access memory of a rank that has not begun the
// operation or has left it.
//
// Steps on memory that peers address (schedule.ir.Op: PUT and later) find a peer's input and output
// by their distance from this rank's, which is the same for all positions in a window. Signals are
// words like heads and tails.

struct Step {                       // layout.STEP
  u8 op, src_buf, dst_buf, npeers;  // op: SEND, RECV, ... (schedule.ir.Op)
  signed char recv_peer, send_peer;
  u8 chunks, complete;  // complete: the sum includes all ranks
  u16 src, dst;
  u32 unused;
  u64 peers;  // four bits each, in the order of the additions
};
static_assert(sizeof(Step) == STEP_BYTES, "layout.STEP");

struct Program {  // layout.PROGRAM_HEAD
  Args a;
  u64 part;  // elements of a part of a block; the last parts may be shorter or empty
  u64 tile;  // elements of a chunk that a block moves at a time
  u32 parts, channels;
  u32 first[MAX_CHANNELS + 1];
  u32 slot;                    // bytes of a slot
  u32 scratch;                 // byte offset of the first block's scratch memory in a half
  u32 scratch_chunks;          // tiles of scratch memory of a block
  i64 in_offsets[MAX_RANKS];   // bytes from this rank's input to each peer's, as mapped in this
                               // process
  i64 out_offsets[MAX_RANKS];  // likewise between outputs
  u8 recv_fifo[MAX_RANKS];     // index of a peer's FIFO in this rank's half
  u8 send_fifo[MAX_RANKS];     // index of this rank's FIFO in a peer's half
  Step steps[MAX_STEPS];
};
static_assert(sizeof(Program) == PROGRAM_BYTES, "layout.PROGRAM_HEAD");

struct FifoCounts {  // shared memory: messages and signals of this launch to and from each peer
  u32 sent[RANKS], received[RANKS];
  u32 signalled[RANKS], signals_seen[RANKS];
  u32 aborted;
};

// Words at the end of a half, per peer and block: messages arrived from it (tail), messages it has
// received (head), and its signals.
__device__ __forceinline__ u64* tail_word(const Geometry& g, char* region, u32 peer) {
  return (u64*)(region + g.half + HALF_BYTES) - (peer * BLOCKS + blockIdx.x + 1) * 2;
}
__device__ __forceinline__ u64* head_word(const Geometry& g, char* region, u32 peer) {
  return tail_word(g, region, RANKS + peer);
}
__device__ __forceinline__ u64* signal_word(const Geometry& g, char* region, u32 peer) {
  return tail_word(g, region, 2 * RANKS + peer);
}
__device__ __forceinline__ u32 load_count(const u64* word) {
  u64 v = load_acquire(word);
  return v == EMPTY_WORD ? 0u : (u32)v;
}

__device__ __forceinline__ char* slot_address(const Program& p, const Geometry& g, char* region,
                                              u32 fifo, u32 message) {
  return region + g.half +
         (((u64)fifo * gridDim.x + blockIdx.x) * p.a.nslots + message % p.a.nslots) * p.slot;
}
__device__ __forceinline__ char* recv_slot(const Program& p, const Geometry& g, const FifoCounts& e,
                                           u32 peer) {
  return slot_address(p, g, p.a.inbox[peer], p.recv_fifo[peer], e.received[peer]);
}
__device__ __forceinline__ char* send_slot(const Program& p, const Geometry& g, const FifoCounts& e,
                                           u32 peer) {
  return slot_address(p, g, p.a.outbox[peer], p.send_fifo[peer], e.sent[peer]);
}

// Thread 0: wait for a message from ``peer``.
__device__ __forceinline__ void await_message(const Args& a, const Geometry& g, FifoCounts& e,
                                              SpinWait& w, u32 peer) {
  const u64* tail = tail_word(g, a.inbox[peer], peer);
  w.polls = 0;
  while (load_count(tail) <= e.received[peer])
    if (check_abort(a, w, peer, AWAIT_MESSAGE)) {
      e.aborted = 1;
      return;
    }
}
// Wait until ``peer`` has received all but ``unread`` of the messages sent to it.
__device__ __forceinline__ bool await_received(const Args& a, const Geometry& g,
                                               const FifoCounts& e, SpinWait& w, u32 peer,
                                               u32 unread) {
  const u64* head = head_word(g, a.inbox[peer], peer);
  w.polls = 0;
  while (load_count(head) + unread < e.sent[peer])
    if (check_abort(a, w, peer, AWAIT_CREDIT)) return false;
  return true;
}
// Thread 0: free the slot of the last message; all loads from it ended at the barrier before.
__device__ __forceinline__ void release_slot(const Args& a, const Geometry& g, FifoCounts& e,
                                             u32 peer) {
  store_word(head_word(g, a.outbox[peer], a.rank), ++e.received[peer]);
}

// Scratch memory of this block.
__device__ __forceinline__ char* scratch_address(const Program& p, const Geometry& g) {
  return p.a.own + g.half + p.scratch + (u64)blockIdx.x * p.scratch_chunks * p.tile * sizeof(T);
}

// Address of the tile at element ``offset`` of a chunk in a buffer of this rank.
__device__ __forceinline__ T* local_address(const Program& p, const Geometry& g, u32 buffer,
                                            u32 chunk, u64 offset) {
  if (buffer == SCRATCH) return (T*)scratch_address(p, g) + chunk * p.tile;
  return (T*)(buffer == OUTPUT ? p.a.out : (void*)p.a.in) + (u64)(chunk / p.parts) * p.a.count +
         (u64)(chunk % p.parts) * p.part + offset;
}

// At the end: reset this block's share of the half to ones.
__device__ __forceinline__ void clear_fifos(const Program& p, const Geometry& g,
                                            const FifoCounts& e, SpinWait& w) {
  const Args& a = p.a;
  for (u32 peer = 0; peer < RANKS; peer++) {
    u32 used = e.received[peer] < a.nslots ? e.received[peer] : a.nslots;
    uint4* slots = (uint4*)slot_address(p, g, a.inbox[peer], p.recv_fifo[peer], 0);
    for (u64 i = threadIdx.x; i < (u64)used * p.slot / 16; i += THREADS) clear_packet(slots + i);
  }
  if (p.scratch_chunks) {
    uint4* scratch = (uint4*)scratch_address(p, g);
    for (u64 i = threadIdx.x; i < (p.scratch_chunks * p.tile * sizeof(T) + 15) / 16; i += THREADS)
      clear_packet(scratch + i);
  }
  u32 peer = threadIdx.x;
  if (peer >= RANKS) return;
  if (e.received[peer]) clear_packet((uint4*)tail_word(g, a.inbox[peer], peer));
  if (e.signals_seen[peer]) clear_packet((uint4*)signal_word(g, a.inbox[peer], peer));
  if (e.sent[peer] && await_received(a, g, e, w, peer, 0))
    clear_packet((uint4*)head_word(g, a.inbox[peer], peer));
}

// Block 0, at the end: wait for the op record of every peer.
__device__ __forceinline__ void await_peer_ops(const Args& a, SpinWait& w) {
  u32 t = threadIdx.x;
  if (blockIdx.x != 0 || t >= RANKS || t == a.rank) return;
  const uint4* address = op_record(a.inbox[t], t, w.launch);
  uint4 reported = load_packet(address);
  w.polls = 0;
  while (reported.x != w.launch) {
    if (check_abort(a, w, t, AWAIT_ARRIVAL)) return;
    reported = load_packet(address);
  }
  if (reported.y != (u32)a.signature)
    report(a.host, ERROR_MISMATCH, t, AWAIT_ARRIVAL, w.launch, (u32)a.signature);
}

// Add up elements [0, n) of up to RANKS sources (one source: copy bit by bit) into one or two
// destinations. NCCL's reduceCopy (src/device/common_kernel.h).
struct ReduceCopy {
  const T* src[RANKS];
  bool complete;  // the sum then includes all ranks
  int nsrc, own;  // own: index of the source that is this rank's input, to be scaled by
                  // OP_PREMUL_SUM; -1: none
  T* dst;
  T* remote_dst;
  u64 n;
};

__device__ __forceinline__ Vec load_raw(const T* p, u64 i) {
  Vec v;
  uint4 q = load_packet((const uint4*)(p + i));
  v.w[0] = q.x;
  v.w[1] = q.y;
  v.w[2] = q.z;
  v.w[3] = q.w;
  return v;
}
__device__ __forceinline__ void store_raw(T* p, u64 i, const Vec& v) {
  *(uint4*)(p + i) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}
__device__ __forceinline__ void store_remote(T* p, u64 i, const Vec& v) {
  store_unordered((uint4*)(p + i), make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]));
}

template <int U>
__device__ __forceinline__ void read_source(const ReduceCopy& m, int s, u64 first, u64 stride,
                                            Vec (&v)[U]) {
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = load_raw(m.src[s], (first + u * stride) * ELEMS);
}
template <int U>
__device__ __forceinline__ void scale_own_source(const Args& a, const ReduceCopy& m, int s,
                                                 Vec (&v)[U]) {
  if (m.own != s) return;
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = own_vec(a, v[u]);
}
// Loads of the second source are in flight before the first is needed.
template <int U>
__device__ __forceinline__ void reduce_copy_vectors(const Args& a, const ReduceCopy& m, u64 first,
                                                    u64 stride) {
  Vec v[U];
  read_source<U>(m, 0, first, stride, v);
#if REDUCES
  Vec w[U];
  if (m.nsrc > 1) read_source<U>(m, 1, first, stride, w);
#endif
  scale_own_source<U>(a, m, 0, v);
#if REDUCES
  if (m.nsrc > 1) {
    Accumulator sum[U];
#pragma unroll
    for (int u = 0; u < U; u++) sum[u].init(v[u]);
    for (int s = 1; s < m.nsrc; s++) {
      if (s > 1) read_source<U>(m, s, first, stride, w);
      scale_own_source<U>(a, m, s, w);
#pragma unroll
      for (int u = 0; u < U; u++) sum[u].add(w[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = m.complete ? sum[u].result() : sum[u].partial();
  }
#endif
  if (m.remote_dst) {
#pragma unroll
    for (int u = 0; u < U; u++) store_remote(m.remote_dst, (first + u * stride) * ELEMS, v[u]);
  }
  if (m.dst) {
#pragma unroll
    for (int u = 0; u < U; u++) store_raw(m.dst, (first + u * stride) * ELEMS, v[u]);
  }
}

__device__ __forceinline__ void reduce_copy(const Args& a, const ReduceCopy& m) {
  u64 addresses = (u64)m.dst | (u64)m.remote_dst;
  for (int s = 0; s < m.nsrc; s++) addresses |= (u64)m.src[s];
  u64 vectors = (addresses & 15) ? 0 : m.n / ELEMS, i = threadIdx.x;
  for (; i + (UNROLL - 1) * THREADS < vectors; i += UNROLL * THREADS)
    reduce_copy_vectors<UNROLL>(a, m, i, THREADS);
  for (; i < vectors; i += THREADS) reduce_copy_vectors<1>(a, m, i, THREADS);
  // the remainder, or everything if addresses are not aligned
  for (u64 j = vectors * ELEMS + threadIdx.x; j < m.n; j += THREADS) {
    T x = m.own == 0 ? own_element(a, m.src[0][j]) : m.src[0][j];
#if REDUCES
    if (m.nsrc > 1) {
      A sum = widen(x);
      for (int s = 1; s < m.nsrc; s++)
        sum = combine(sum, widen(m.own == s ? own_element(a, m.src[s][j]) : m.src[s][j]));
      x = narrow(m.complete ? finish(sum) : sum);
    }
#endif
    if (m.remote_dst) m.remote_dst[j] = x;
    if (m.dst) m.dst[j] = x;
  }
}

// Address of the same tile in a peer's buffer.
__device__ __forceinline__ T* peer_address(const Program& p, const Geometry& g, u32 peer,
                                           u32 buffer, u32 chunk, u64 offset) {
  char* local = (char*)local_address(p, g, buffer, chunk, offset);
  if (peer == p.a.rank) return (T*)local;
  return (T*)(local + (buffer == SCRATCH  ? p.a.outbox[peer] - p.a.own
                       : buffer == OUTPUT ? p.out_offsets[peer]
                                          : p.in_offsets[peer]));
}

// One thread per peer that the step names: signal that everything before is done, or wait for the
// peer's signal. Return true on all threads if a wait was aborted.
__device__ __forceinline__ bool signal_or_wait(const Args& a, const Geometry& g, const Step& s,
                                               FifoCounts& e, SpinWait& w) {
  u32 peer = threadIdx.x;
  bool named = false, failed = false;
  for (u32 j = 0; j < s.npeers; j++) named |= ((s.peers >> (4 * j)) & 15) == peer;
  if (named && s.op == SIGNAL) {
    fence();
    store_word(signal_word(g, a.outbox[peer], a.rank), ++e.signalled[peer]);
  } else if (named) {
    const u64* word = signal_word(g, a.inbox[peer], peer);
    w.polls = 0;
    while (!failed && load_count(word) <= e.signals_seen[peer])
      failed = check_abort(a, w, peer, AWAIT_SIGNAL);
    e.signals_seen[peer]++;
  }
  return __syncthreads_or(failed);
}

// Set up the work of a step on the tile at ``offset`` of its chunk ``c``; false if that chunk has
// no such tile.
__device__ __forceinline__ bool plan_reduce_copy(const Program& p, const Geometry& g,
                                                 const FifoCounts& e, const Step& s, u32 c,
                                                 u64 offset, ReduceCopy& m) {
  const Args& a = p.a;
  u32 src = s.src + c, dst = s.dst + c;
  bool writes_local = s.op == RECV || s.op == RECV_COPY_SEND || s.op == RECV_REDUCE || s.op == GET;
  u64 begin = (writes_local ? dst : src) % p.parts * p.part, end = begin + p.part;
  if (end > a.count) end = a.count;
  begin += offset;
  if (end > begin + p.tile) end = begin + p.tile;
  if (begin >= end) return false;
  m.n = end - begin;
  m.complete = s.complete;
  m.nsrc = 0;
  m.own = -1;
  m.dst = nullptr;
  m.remote_dst = nullptr;
  T* local_src = local_address(p, g, s.src_buf, src, offset);
  T* local_dst = local_address(p, g, s.dst_buf, dst, offset);
  u32 from = s.recv_peer, to = s.send_peer;
  switch (s.op) {
    case RECV_REDUCE_ALL:
    case REDUCE_FROM_PEERS:
      for (u32 j = 0; j < s.npeers; j++) {
        u32 peer = (s.peers >> (4 * j)) & 15;
        if (peer == a.rank && s.src_buf == INPUT) m.own = m.nsrc;
        T* remote_src = s.op == REDUCE_FROM_PEERS ? peer_address(p, g, peer, s.src_buf, src, offset)
                                                  : (T*)recv_slot(p, g, e, peer) + c * p.tile;
        m.src[m.nsrc++] = peer == a.rank ? local_src : remote_src;
      }
      m.dst = local_dst;
      return true;
    case PUT:
      m.own = s.src_buf == INPUT ? 0 : -1;
      m.src[m.nsrc++] = local_src;
      m.dst = peer_address(p, g, to, s.dst_buf, dst, offset);
      return true;
    case GET:
      m.src[m.nsrc++] = peer_address(p, g, from, s.src_buf, src, offset);
      m.dst = local_dst;
      return true;
  }
  if (!REDUCES && s.op == COPY && local_src == local_dst) return false;
  if (!writes_local) {
    m.own = s.src_buf == INPUT ? 0 : -1;
    m.src[m.nsrc++] = local_src;
  }
  if (s.op == RECV_REDUCE) m.src[m.nsrc++] = local_dst;
  if (s.recv_peer >= 0) m.src[m.nsrc++] = (T*)recv_slot(p, g, e, from) + c * p.tile;
  if (s.op != SEND && s.op != RECV_REDUCE_SEND) m.dst = local_dst;
  if (s.send_peer >= 0) m.remote_dst = (T*)send_slot(p, g, e, to) + c * p.tile;
  return true;
}

// Wait for a message from each rank that the step receives from, and for a free slot if it sends.
__device__ __forceinline__ void await_step(const Args& a, const Geometry& g, const Step& s,
                                           FifoCounts& e, SpinWait& w) {
  if (s.op > RECV_REDUCE_ALL) return;
  if (s.op == RECV_REDUCE_ALL) {
    for (u32 j = 0; j < s.npeers; j++) {
      u32 peer = (s.peers >> (4 * j)) & 15;
      if (peer != a.rank) await_message(a, g, e, w, peer);
    }
  } else if (s.recv_peer >= 0)
    await_message(a, g, e, w, s.recv_peer);
  if (s.send_peer >= 0 && e.sent[s.send_peer] >= a.nslots &&
      !await_received(a, g, e, w, s.send_peer, a.nslots - 1))
    e.aborted = 1;
}
__device__ __forceinline__ void complete_step(const Args& a, const Geometry& g, const Step& s,
                                              FifoCounts& e) {
  if (s.op > RECV_REDUCE_ALL) return;
  if (s.op == RECV_REDUCE_ALL) {
    for (u32 j = 0; j < s.npeers; j++) {
      u32 peer = (s.peers >> (4 * j)) & 15;
      if (peer != a.rank) release_slot(a, g, e, peer);
    }
  } else if (s.recv_peer >= 0)
    release_slot(a, g, e, s.recv_peer);
  if (s.send_peer >= 0) {
    fence();
    store_word(tail_word(g, a.outbox[s.send_peer], a.rank), ++e.sent[s.send_peer]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    steps(const __grid_constant__ Program p) {
  const Args& a = p.a;
  END_IF_GATED(a);
  __shared__ FifoCounts e;
  Geometry g = begin_launch(a);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  compare_ops(a, g, publish_op(a, g));
  u32 ticket = take_ticket(a, g);
  if (threadIdx.x < RANKS)
    e.sent[threadIdx.x] = e.received[threadIdx.x] = e.signalled[threadIdx.x] =
        e.signals_seen[threadIdx.x] = 0;
  if (threadIdx.x == 0) e.aborted = 0;
  __syncthreads();
  u32 channel = blockIdx.x % p.channels, n = blockIdx.x / p.channels,
      blocks = gridDim.x / p.channels;
  u64 longest = p.part < a.count ? p.part : a.count;  // elements of the longest chunk
  for (u64 offset = n * p.tile; offset < longest; offset += blocks * p.tile) {
    for (u32 step_index = p.first[channel]; step_index < p.first[channel + 1]; step_index++) {
      const Step& s = p.steps[step_index];
      if (s.op >= SIGNAL) {
        if (signal_or_wait(a, g, s, e, spin)) return;
        continue;
      }
      if (threadIdx.x == 0) await_step(a, g, s, e, spin);
      __syncthreads();
      if (e.aborted) return;
      for (u32 c = 0; c < s.chunks; c++) {
        ReduceCopy m;
        if (plan_reduce_copy(p, g, e, s, c, offset, m)) reduce_copy(a, m);
      }
      __syncthreads();
      if (threadIdx.x == 0) complete_step(a, g, s, e);
    }
  }
  __syncthreads();
  clear_fifos(p, g, e, spin);
  await_peer_ops(a, spin);
  advance_launch(a, ticket);
}
