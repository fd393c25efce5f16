// Any schedule, protocol Simple: a block walks over the steps of its rank.
//
// Blocks are independent: block b belongs to channel b % channels, is number n = b / channels of its ``blocks`` blocks, and moves the pieces
// n, n + blocks, ... of every chunk; a piece has ``piece`` elements, the same on all ranks. Between two ranks each block has a FIFO of ``nslots`` slots in the
// memory of the receiver. The sender writes a slot, fences and raises the tail there; the receiver reads and raises the head in the
// memory of the sender (NCCL src/device/prims_simple.h). One fence a slot, not one a packet: where slots are large, links carry more than by packets.
//
// FIFOs lie in the bank of the launch (packets.cuh), which is shared by the ranks that send to the same one. Heads and tails begin and end as
// ones, as all of the bank: the receiver clears slots and tails, the sender heads, once the last one has come. A launch is one of those that
// packets count, and is on the board as theirs are. Every rank waits for every other's entry before it ends: that is what the use of the
// banks demands, and it finds ranks that called different operations.
//
// Behind the FIFOs a block has room for one piece of every chunk of scratch, and uses it again for the next pieces; so do peers whose steps address
// it. A block goes through all steps of a piece before the next one, so each piece is like an operation of its own, and memory of a rank that has
// not come to an operation, or has left it, is not touched: that is part of the proof of a schedule (schedule/proof.py).
//
// Steps on memory that peers address (schedule.ir.Op: PUT and what follows) find a peer's input and output by how far they are from this rank's,
// which is the same for all places in a window. Signals are words as heads and tails are.

struct Step {            // layout.STEP
  u8 op, src_buf, dst_buf, npeers;  // op: SEND, RECV, ... (schedule.ir.Op says what they mean)
  signed char recv_peer, send_peer;
  u8 chunks, whole;      // whole: the sum is everybody's
  u16 src, dst;
  u32 unused;
  u64 peers;             // four bits each, in the order of the additions
};
static_assert(sizeof(Step) == STEP_BYTES, "layout.STEP");

struct Program {         // layout.PROGRAM_HEAD
  Args a;
  u64 part;              // elements of a part of a block; the last ones may be shorter or empty
  u64 piece;             // elements that a block moves of one chunk at a time
  u32 parts, channels;
  u32 first[MAX_CHANNELS + 1];
  u32 slot;              // bytes of a slot
  u32 scratch;           // bytes from a bank to the scratch of the first block
  u32 scratch_chunks;    // pieces of it that a block has
  i64 in_at[MAX_RANKS];  // bytes from this rank's input to a peer's, as this process has them mapped; for steps that read or write there
  i64 out_at[MAX_RANKS]; // and from output to output
  u8 from[MAX_RANKS];    // which of the FIFOs in this rank's bank is that of a peer
  u8 to[MAX_RANKS];      // which of those in a peer's bank is that of this rank
  Step steps[MAX_STEPS];
};
static_assert(sizeof(Program) == PROGRAM_BYTES, "layout.PROGRAM_HEAD");

struct Ends {            // shared memory: messages and signals of this launch to and from every peer
  u32 sent[RANKS], taken[RANKS];
  u32 told[RANKS], heard[RANKS];
  u32 dead;
};

// The ends of banks hold the words: for every peer and block the number of messages that have come from it, that it has taken, and of its signals.
__device__ __forceinline__ u64* tail_of(const Geometry& g, char* box, u32 peer) { return (u64*)(box + g.bank + BANK_BYTES) - (peer * BLOCKS + blockIdx.x + 1) * 2; }
__device__ __forceinline__ u64* head_of(const Geometry& g, char* box, u32 peer) { return tail_of(g, box, RANKS + peer); }
__device__ __forceinline__ u64* signals_of(const Geometry& g, char* box, u32 peer) { return tail_of(g, box, 2 * RANKS + peer); }
__device__ __forceinline__ u32 count_at(const u64* word) { u64 v = load_acquire(word); return v == NEVER ? 0u : (u32)v; }

__device__ __forceinline__ char* slot_of(const Program& p, const Geometry& g, char* box, u32 fifo, u32 message) {
  return box + g.bank + (((u64)fifo * gridDim.x + blockIdx.x) * p.a.nslots + message % p.a.nslots) * p.slot;
}
__device__ __forceinline__ char* slot_from(const Program& p, const Geometry& g, const Ends& e, u32 peer) {
  return slot_of(p, g, p.a.inbox[peer], p.from[peer], e.taken[peer]);
}
__device__ __forceinline__ char* slot_to(const Program& p, const Geometry& g, const Ends& e, u32 peer) {
  return slot_of(p, g, p.a.outbox[peer], p.to[peer], e.sent[peer]);
}

// Thread 0: until a message from ``peer`` is there.
__device__ __forceinline__ void wait_message(const Args& a, const Geometry& g, Ends& e, Watch& w, u32 peer) {
  const u64* tail = tail_of(g, a.inbox[peer], peer);
  w.spins = 0;
  while (count_at(tail) <= e.taken[peer]) if (give_up(a, w, peer, WHAT_MESSAGE)) { e.dead = 1; return; }
}
// Until ``peer`` has taken all but ``left`` of the messages to it.
__device__ __forceinline__ bool wait_taken(const Args& a, const Geometry& g, const Ends& e, Watch& w, u32 peer, u32 left) {
  const u64* head = head_of(g, a.inbox[peer], peer);
  w.spins = 0;
  while (count_at(head) + left < e.sent[peer]) if (give_up(a, w, peer, WHAT_ROOM)) return false;
  return true;
}
// Thread 0: the slot of the last message is free again, for loads have ended at the barrier before.
__device__ __forceinline__ void tell_taken(const Args& a, const Geometry& g, Ends& e, u32 peer) { store_word(head_of(g, a.outbox[peer], a.rank), ++e.taken[peer]); }

// This block's.
__device__ __forceinline__ char* scratch_of(const Program& p, const Geometry& g) {
  return p.a.own + g.bank + p.scratch + (u64)blockIdx.x * p.scratch_chunks * p.piece * sizeof(T);
}

// Where the piece ``at`` of a chunk of a buffer of this rank begins.
__device__ __forceinline__ T* spot(const Program& p, const Geometry& g, u32 buffer, u32 chunk, u64 at) {
  if (buffer == SCRATCH) return (T*)scratch_of(p, g) + chunk * p.piece;
  return (T*)(buffer == OUTPUT ? p.a.out : (void*)p.a.in) + (u64)(chunk / p.parts) * p.a.count + (u64)(chunk % p.parts) * p.part + at;
}

// At the end: this block leaves its part of the bank full of ones.
__device__ __forceinline__ void clear_fifos(const Program& p, const Geometry& g, const Ends& e, Watch& w) {
  const Args& a = p.a;
  for (u32 peer = 0; peer < RANKS; peer++) {
    u32 used = e.taken[peer] < a.nslots ? e.taken[peer] : a.nslots;
    uint4* slots = (uint4*)slot_of(p, g, a.inbox[peer], p.from[peer], 0);
    for (u64 i = threadIdx.x; i < (u64)used * p.slot / 16; i += THREADS) clear_packet(slots + i);
  }
  if (p.scratch_chunks) {
    uint4* scratch = (uint4*)scratch_of(p, g);
    for (u64 i = threadIdx.x; i < (p.scratch_chunks * p.piece * sizeof(T) + 15) / 16; i += THREADS) clear_packet(scratch + i);
  }
  u32 peer = threadIdx.x;
  if (peer >= RANKS) return;
  if (e.taken[peer]) clear_packet((uint4*)tail_of(g, a.inbox[peer], peer));
  if (e.heard[peer]) clear_packet((uint4*)signals_of(g, a.inbox[peer], peer));
  if (e.sent[peer] && wait_taken(a, g, e, w, peer, 0)) clear_packet((uint4*)head_of(g, a.inbox[peer], peer));
}

// Block 0, at the end: until every peer has said what it runs in this launch.
__device__ __forceinline__ void hear_peers(const Args& a, Watch& w) {
  u32 t = threadIdx.x;
  if (blockIdx.x != 0 || t >= RANKS || t == a.rank) return;
  const uint4* entry = board(a.inbox[t], t, w.launch);
  uint4 said = load_packet(entry);
  w.spins = 0;
  while (said.x != w.launch) {
    if (give_up(a, w, t, WHAT_MEETING)) return;
    said = load_packet(entry);
  }
  if (said.y != (u32)a.signature) report(a.host, ERROR_MISMATCH, t, WHAT_MEETING, w.launch, (u32)a.signature);
}

// Elements [0, n) of up to RANKS sources are added up (one source: copied bit by bit) into one or two places.
struct Move {
  const T* src[RANKS];
  bool whole;            // with these, the sum is everybody's
  int nsrc, own;         // own: which source is this rank's input, to be multiplied where the operator says so; -1: none
  T* dst;
  T* far;
  u64 n;
};

__device__ __forceinline__ Vec load_raw(const T* p, u64 i) {
  Vec v; uint4 q = load_packet((const uint4*)(p + i)); v.w[0] = q.x; v.w[1] = q.y; v.w[2] = q.z; v.w[3] = q.w; return v;
}
__device__ __forceinline__ void store_raw(T* p, u64 i, const Vec& v) { *(uint4*)(p + i) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]); }
__device__ __forceinline__ void store_far(T* p, u64 i, const Vec& v) { store_late((uint4*)(p + i), make_uint4(v.w[0], v.w[1], v.w[2], v.w[3])); }

template <int U> __device__ __forceinline__ void read_source(const Move& m, int s, u64 first, u64 stride, Vec (&v)[U]) {
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = load_raw(m.src[s], (first + u * stride) * ELEMS);
}
template <int U> __device__ __forceinline__ void own_source(const Args& a, const Move& m, int s, Vec (&v)[U]) {
  if (m.own != s) return;
#pragma unroll
  for (int u = 0; u < U; u++) v[u] = own_vec(a, v[u]);
}
// The second source is on its way before the first is needed.
template <int U> __device__ __forceinline__ void move_vectors(const Args& a, const Move& m, u64 first, u64 stride) {
  Vec v[U];
  read_source<U>(m, 0, first, stride, v);
#if REDUCES
  Vec w[U];
  if (m.nsrc > 1) read_source<U>(m, 1, first, stride, w);
#endif
  own_source<U>(a, m, 0, v);
#if REDUCES
  if (m.nsrc > 1) {
    Sum sum[U];
#pragma unroll
    for (int u = 0; u < U; u++) sum[u].begin(v[u]);
    for (int s = 1; s < m.nsrc; s++) {
      if (s > 1) read_source<U>(m, s, first, stride, w);
      own_source<U>(a, m, s, w);
#pragma unroll
      for (int u = 0; u < U; u++) sum[u].add(w[u]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) v[u] = m.whole ? sum[u].end() : sum[u].partial();
  }
#endif
  if (m.far) {
#pragma unroll
    for (int u = 0; u < U; u++) store_far(m.far, (first + u * stride) * ELEMS, v[u]);
  }
  if (m.dst) {
#pragma unroll
    for (int u = 0; u < U; u++) store_raw(m.dst, (first + u * stride) * ELEMS, v[u]);
  }
}

__device__ __forceinline__ void move(const Args& a, const Move& m) {
  u64 all = (u64)m.dst | (u64)m.far;
  for (int s = 0; s < m.nsrc; s++) all |= (u64)m.src[s];
  u64 whole = (all & 15) ? 0 : m.n / ELEMS, i = threadIdx.x;
  for (; i + (UNROLL - 1) * THREADS < whole; i += UNROLL * THREADS) move_vectors<UNROLL>(a, m, i, THREADS);
  for (; i < whole; i += THREADS) move_vectors<1>(a, m, i, THREADS);
  for (u64 j = whole * ELEMS + threadIdx.x; j < m.n; j += THREADS) {  // the rest, or everything where addresses are odd
    T x = m.own == 0 ? own_element(a, m.src[0][j]) : m.src[0][j];
#if REDUCES
    if (m.nsrc > 1) {
      A sum = widen(x);
      for (int s = 1; s < m.nsrc; s++) sum = combine(sum, widen(m.own == s ? own_element(a, m.src[s][j]) : m.src[s][j]));
      x = narrow(m.whole ? finish(sum) : sum);
    }
#endif
    if (m.far) m.far[j] = x;
    if (m.dst) m.dst[j] = x;
  }
}

// The same of a peer's.
__device__ __forceinline__ T* spot_at(const Program& p, const Geometry& g, u32 peer, u32 buffer, u32 chunk, u64 at) {
  char* here = (char*)spot(p, g, buffer, chunk, at);
  if (peer == p.a.rank) return (T*)here;
  return (T*)(here + (buffer == SCRATCH ? p.a.outbox[peer] - p.a.own : buffer == OUTPUT ? p.out_at[peer] : p.in_at[peer]));
}

// A thread for each peer that the step names: tells it that all before is done, or waits until it has said so. Whether any of them gave up.
__device__ __forceinline__ bool signal_or_wait(const Args& a, const Geometry& g, const Step& s, Ends& e, Watch& w) {
  u32 peer = threadIdx.x;
  bool named = false, over = false;
  for (u32 j = 0; j < s.npeers; j++) named |= ((s.peers >> (4 * j)) & 15) == peer;
  if (named && s.op == SIGNAL) {
    fence();
    store_word(signals_of(g, a.outbox[peer], a.rank), ++e.told[peer]);
  } else if (named) {
    const u64* word = signals_of(g, a.inbox[peer], peer);
    w.spins = 0;
    while (!over && count_at(word) <= e.heard[peer]) over = give_up(a, w, peer, WHAT_SIGNAL);
    e.heard[peer]++;
  }
  return __syncthreads_or(over);
}

// What a step does with the piece ``at`` of its chunk number ``c``; false where that chunk has none.
__device__ __forceinline__ bool plan_move(const Program& p, const Geometry& g, const Ends& e, const Step& s, u32 c, u64 at, Move& m) {
  const Args& a = p.a;
  u32 src = s.src + c, dst = s.dst + c;
  bool into = s.op == RECV || s.op == RECV_COPY_SEND || s.op == RECV_REDUCE || s.op == GET;
  u64 begin = (into ? dst : src) % p.parts * p.part, end = begin + p.part;
  if (end > a.count) end = a.count;
  begin += at;
  if (end > begin + p.piece) end = begin + p.piece;
  if (begin >= end) return false;
  m.n = end - begin; m.whole = s.whole; m.nsrc = 0; m.own = -1; m.dst = nullptr; m.far = nullptr;
  T* near_src = spot(p, g, s.src_buf, src, at);
  T* near_dst = spot(p, g, s.dst_buf, dst, at);
  u32 from = s.recv_peer, to = s.send_peer;
  switch (s.op) {
    case RECV_REDUCE_ALL:
    case REDUCE_FROM_PEERS:
      for (u32 j = 0; j < s.npeers; j++) {
        u32 peer = (s.peers >> (4 * j)) & 15;
        if (peer == a.rank && s.src_buf == INPUT) m.own = m.nsrc;
        T* far_src = s.op == REDUCE_FROM_PEERS ? spot_at(p, g, peer, s.src_buf, src, at) : (T*)slot_from(p, g, e, peer) + c * p.piece;
        m.src[m.nsrc++] = peer == a.rank ? near_src : far_src;
      }
      m.dst = near_dst;
      return true;
    case PUT:
      m.own = s.src_buf == INPUT ? 0 : -1;
      m.src[m.nsrc++] = near_src;
      m.dst = spot_at(p, g, to, s.dst_buf, dst, at);
      return true;
    case GET:
      m.src[m.nsrc++] = spot_at(p, g, from, s.src_buf, src, at);
      m.dst = near_dst;
      return true;
  }
  if (!REDUCES && s.op == COPY && near_src == near_dst) return false;
  if (!into) { m.own = s.src_buf == INPUT ? 0 : -1; m.src[m.nsrc++] = near_src; }
  if (s.op == RECV_REDUCE) m.src[m.nsrc++] = near_dst;
  if (s.recv_peer >= 0) m.src[m.nsrc++] = (T*)slot_from(p, g, e, from) + c * p.piece;
  if (s.op != SEND && s.op != RECV_REDUCE_SEND) m.dst = near_dst;
  if (s.send_peer >= 0) m.far = (T*)slot_to(p, g, e, to) + c * p.piece;
  return true;
}

// A message from each rank that the step takes one from, and a slot where it sends one.
__device__ __forceinline__ void wait_for_step(const Args& a, const Geometry& g, const Step& s, Ends& e, Watch& w) {
  if (s.op > RECV_REDUCE_ALL) return;
  if (s.op == RECV_REDUCE_ALL) {
    for (u32 j = 0; j < s.npeers; j++) { u32 peer = (s.peers >> (4 * j)) & 15; if (peer != a.rank) wait_message(a, g, e, w, peer); }
  } else if (s.recv_peer >= 0) wait_message(a, g, e, w, s.recv_peer);
  if (s.send_peer >= 0 && e.sent[s.send_peer] >= a.nslots && !wait_taken(a, g, e, w, s.send_peer, a.nslots - 1)) e.dead = 1;
}
__device__ __forceinline__ void tell_of_step(const Args& a, const Geometry& g, const Step& s, Ends& e) {
  if (s.op > RECV_REDUCE_ALL) return;
  if (s.op == RECV_REDUCE_ALL) {
    for (u32 j = 0; j < s.npeers; j++) { u32 peer = (s.peers >> (4 * j)) & 15; if (peer != a.rank) tell_taken(a, g, e, peer); }
  } else if (s.recv_peer >= 0) tell_taken(a, g, e, s.recv_peer);
  if (s.send_peer >= 0) { fence(); store_word(tail_of(g, a.outbox[s.send_peer], a.rank), ++e.sent[s.send_peer]); }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) steps(const __grid_constant__ Program p) {
  const Args& a = p.a;
  __shared__ Ends e;
  Geometry g = begin(a);
  Watch watch = {0, 0, (u32)g.launch + 1};
  judge(a, g, announce(a, g));
  u32 ticket = draw_ticket(a, g);
  if (threadIdx.x < RANKS) e.sent[threadIdx.x] = e.taken[threadIdx.x] = e.told[threadIdx.x] = e.heard[threadIdx.x] = 0;
  if (threadIdx.x == 0) e.dead = 0;
  __syncthreads();
  u32 channel = blockIdx.x % p.channels, n = blockIdx.x / p.channels, blocks = gridDim.x / p.channels;
  u64 longest = p.part < a.count ? p.part : a.count;  // of any chunk
  for (u64 at = n * p.piece; at < longest; at += blocks * p.piece) {
    for (u32 number = p.first[channel]; number < p.first[channel + 1]; number++) {
      const Step& s = p.steps[number];
      if (s.op >= SIGNAL) {
        if (signal_or_wait(a, g, s, e, watch)) return;
        continue;
      }
      if (threadIdx.x == 0) wait_for_step(a, g, s, e, watch);
      __syncthreads();
      if (e.dead) return;
      for (u32 c = 0; c < s.chunks; c++) {
        Move m;
        if (plan_move(p, g, e, s, c, at, m)) move(a, m);
      }
      __syncthreads();
      if (threadIdx.x == 0) tell_of_step(a, g, s, e);
    }
  }
  __syncthreads();
  clear_fifos(p, g, e, watch);
  hear_peers(a, watch);
  count_launch(a, ticket);
}
