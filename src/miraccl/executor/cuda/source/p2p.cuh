// Messages between pairs of ranks: any number of sends and receives in one launch.
//
// What goes in one direction between this rank and a peer is a queue, served in order by lanes. A lane is a warp here and a warp of the peer, and
// a ring of rows in the receiver's memory. Lanes know nothing of one another, so sends and receives of a launch progress at the same time and
// no order of them can deadlock. A message is cut into groups of vectors, which are dealt to the lanes in turn; how many lanes take part follows
// from its size alone, so both sides agree without a word.
//
// A row is what a warp writes by one store of 16 bytes per thread, and says by itself that it has come:
//   FRAME_LINE  four lines of 128 bytes, each with 124 bytes of data and a flag in its last word. NVLink and L2 keep a line that eight threads
//               write whole (NCCL, src/device/prims_ll128.h, whose flag takes 8 bytes).
//   FRAME_PAIR  8 bytes of data and two flags per thread, for paths that keep only 8 bytes together (NCCL, src/device/prims_ll.h).
// The flag is the number of the lap around the ring. Rows are always written whole and in order, so what lay there carries the flag of the lap before:
// there is nothing to clear, and wrapping does no harm. The receiver writes how many rows it has taken back to the sender every quarter of a ring (credit).
// Counts of rows are kept in device memory from launch to launch, so captured launches can be replayed, and it does not matter how messages are
// distributed over launches. A message begins with a header, its size and type; a receiver that expects another one reports both sizes and poisons
// the credits, so that the sender hears of it. The sender may be at a later message by then: which one was refused is left in its memory.
//
// Collectives that are messages (gather, scatter, those with counts that only move data, the barrier) are numbered. What number and which one is in the
// header, too, so that a message which nobody took is not taken for one of a later collective; and all peers are told of it when it begins, so that ranks
// which wait for one another in different collectives hear of that.

struct Message {         // layout.MESSAGE
  u64 address;
  u64 size;              // bytes; the type of the elements in the eight highest bits
};
#define SIZE_BYTES(size) ((size) & 0x00ffffffffffffffull)
#define POISON (1ull << 63)   // as a signed number less than any credit
#define ANOTHER (1ull << 48)  // with it: the size is right, but the message belongs to another operation
__device__ __forceinline__ bool is_bulk(const Message& m) { return SIZE_BYTES(m.size) >= BULK_FROM; }

struct Queue {           // layout.QUEUE
  u8 kind, peer;         // kind: TO_PEER, FROM_PEER, TO_SELF, TO_BULK, FROM_BULK
  u16 lanes;             // TO_BULK, FROM_BULK: blocks (bulk.cuh)
  u32 begin;             // the first of its lanes, or blocks, in this launch
  u32 first, count;      // messages; TO_SELF: source and target in turn
  u16 slot, slots;       // FROM_BULK: its part of the pool
  u32 unused;
};
static_assert(sizeof(Queue) == QUEUE_BYTES, "layout.QUEUE");

struct Exchange {        // layout.EXCHANGE_HEAD
  Args a;
  const Message* table;  // null: the messages follow the queues
  u32 nqueues, lanes;    // lanes of a message at most, the same on all ranks
  u32 bulk, draws;       // blocks for large messages, which are the first ones; warps that draw the number of a collective, 0: plain messages
  u64 room[ROOM / 8];    // the queues, then the messages
};
static_assert(sizeof(Exchange) == HEAD_BYTES + ROOM, "layout.EXCHANGE_HEAD");

#define ROWS 8           // that a warp handles at a time: two groups
#define QUARTER (RING_ROWS / 4)
#ifndef WARP_SPINS_BEFORE_CHECK
#define WARP_SPINS_BEFORE_CHECK 4096u  // polls of a warp; milliseconds
#endif

// ---- places

__device__ __forceinline__ u64* lane_word(char* box, u64 offset, u32 peer, u32 lane) { return (u64*)(box + offset + ((u64)peer * LANES + lane) * WORD_STRIDE); }

__device__ __forceinline__ uint4* ring_of(const Args& a, u32 dst, u32 src, u32 lane) {
  u64 ring = (u64)(src < dst ? src : src - 1) * LANES + lane;
  return (uint4*)((dst == a.rank ? a.inbox[src] : a.outbox[dst]) + RINGS_OFFSET + ring * (RING_ROWS * ROW_BYTES));
}
__device__ __forceinline__ u32 flag_of(u64 row) { return (u32)(row / RING_ROWS) + 1; }
__device__ __forceinline__ u32 place_of(u64 row) { return (u32)(row % RING_ROWS) * 32; }

// Message ``i`` of the launch. Those in the arguments are read as arguments, which costs no way to memory.
__device__ __forceinline__ Message message(const Exchange& x, u32 i) {
  if (!x.table) return ((const Message*)((const Queue*)x.room + x.nqueues))[i];
  return {load_listed(&x.table[i].address), load_listed(&x.table[i].size)};
}

struct Cut {             // of a message
  char* p;
  u64 bytes, groups;
  u32 lanes;
  bool aligned;
};
__device__ __forceinline__ Cut cut(const Message& m, u32 limit) {
  Cut c;
  c.p = (char*)m.address; c.bytes = SIZE_BYTES(m.size);
#if defined(__CUDACC_RTC__)
  __builtin_assume(__isGlobal(c.p));  // an address from a table says by itself nothing about where it lies
#endif
  u64 vectors = (c.bytes + 15) / 16;
  c.groups = vectors <= FIRST_VECTORS ? 1 : 1 + (vectors - FIRST_VECTORS + GROUP_VECTORS - 1) / GROUP_VECTORS;
#if BULK
  if (is_bulk(m)) c.groups = 1;                     // the rest goes another way
#endif
  c.lanes = c.groups < limit ? (u32)c.groups : limit;
  c.aligned = (m.address & 15) == 0;
  return c;
}
__device__ __forceinline__ u64 first_byte(u64 group) { return group ? (FIRST_VECTORS + (group - 1) * GROUP_VECTORS) * 16 : 0; }

// ---- groups and rows. The first group of a message has less room: a thread's first vector is the header.

#if defined(FRAME_LINE)
#define LOADS 4          // vectors of a thread at most
#define HEADER_THREAD 7
// A flag thread spreads three vectors over the four rows of a group, beside four flags; the others have one vector in each row.
__device__ __forceinline__ int vector_of(u32 t, int u, bool first) {
  if ((t & 7) == 7) return first || u == 3 ? -1 : 112 + 4 * u + (int)(t / 8);
  return 28 * u + (int)(t - t / 8);
}
__device__ __forceinline__ u32 rows_of(u64 bytes, bool first) { return bytes > 84 * 16 ? 4 : bytes > 56 * 16 ? 3 : bytes > 28 * 16 ? 2 : 1; }
__device__ __forceinline__ void frame(uint4* row, const uint4* d, u32 t) {
  if ((t & 7) != 7) {
#pragma unroll
    for (int u = 0; u < 4; u++) row[u] = d[u];
  } else {
    row[0] = d[0];
    row[1] = make_uint4(d[0].w, d[1].x, d[1].y, 0);
    row[2] = make_uint4(d[1].z, d[1].w, d[2].x, 0);
    row[3] = make_uint4(d[2].y, d[2].z, d[2].w, 0);
  }
}
__device__ __forceinline__ void unframe(uint4* d, const uint4* row, u32 t) {
  if ((t & 7) != 7) {
#pragma unroll
    for (int u = 0; u < 4; u++) d[u] = row[u];
  } else {
    d[0] = make_uint4(row[0].x, row[0].y, row[0].z, row[1].x);
    d[1] = make_uint4(row[1].y, row[1].z, row[2].x, row[2].y);
    d[2] = make_uint4(row[2].z, row[3].x, row[3].y, row[3].z);
  }
}
__device__ __forceinline__ u64 size_in(const uint4* row) { return (u64)row[0].y << 32 | row[0].x; }  // the header's, from the first rows
__device__ __forceinline__ u32 tag_in(const uint4* row) { return row[0].z; }
#define HEADER_ROWS 1
__device__ __forceinline__ void store_row(uint4* p, uint4 v, u32 flag, u32 t) { if ((t & 7) == 7) v.w = flag; store_line(p, v); }
__device__ __forceinline__ uint4 load_row(const uint4* p) { return load_line(p); }
__device__ __forceinline__ bool is_there(const uint4& v, u32 flag, u32 t) { return (t & 7) != 7 || v.w == flag; }
#else
#define LOADS 2
#define HEADER_THREAD 0
__device__ __forceinline__ int vector_of(u32 t, int u, bool first) { return 32 * u + (int)t - (first ? 1 : 0); }
__device__ __forceinline__ u32 rows_of(u64 bytes, bool first) { return bytes + (first ? 16 : 0) > 32 * 16 ? 4 : 2; }
__device__ __forceinline__ void frame(uint4* row, const uint4* d, u32 t) {
#pragma unroll
  for (int u = 0; u < 2; u++) { row[2 * u] = make_uint4(d[u].x, 0, d[u].y, 0); row[2 * u + 1] = make_uint4(d[u].z, 0, d[u].w, 0); }
}
__device__ __forceinline__ void unframe(uint4* d, const uint4* row, u32 t) {
#pragma unroll
  for (int u = 0; u < 2; u++) d[u] = make_uint4(row[2 * u].x, row[2 * u].z, row[2 * u + 1].x, row[2 * u + 1].z);
}
__device__ __forceinline__ u64 size_in(const uint4* row) { return (u64)row[0].z << 32 | row[0].x; }
__device__ __forceinline__ u32 tag_in(const uint4* row) { return row[1].x; }
#define HEADER_ROWS 2
__device__ __forceinline__ void store_row(uint4* p, uint4 v, u32 flag, u32 t) { v.y = v.w = flag; store_packet(p, v); }
__device__ __forceinline__ uint4 load_row(const uint4* p) { return load_packet(p); }
__device__ __forceinline__ bool is_there(const uint4& v, u32 flag, u32 t) { return v.y == flag && v.w == flag; }
#endif

// ---- users' memory: whole vectors where addresses allow, else units that do; ``left`` bytes are there

template <class W> __device__ __forceinline__ uint4 load_units(const char* p, u64 left) {
  u32 w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 16; j += sizeof(W))
    if (j < left) w[j / 4] |= (u32)*(const W*)(p + j) << (8 * (j & 3));
  return make_uint4(w[0], w[1], w[2], w[3]);
}
template <class W> __device__ __forceinline__ void store_units(char* p, const uint4& v, u64 left) {
  u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 16; j += sizeof(W))
    if (j < left) *(W*)(p + j) = (W)(w[j / 4] >> (8 * (j & 3)));
}
__device__ __noinline__ uint4 load_part(const char* p, u64 left) {
  u64 odd = (u64)p | left;
  return odd & 1 ? load_units<u8>(p, left) : odd & 2 ? load_units<u16>(p, left) : load_units<u32>(p, left);
}
__device__ __noinline__ void store_part(char* p, uint4 v, u64 left) {
  u64 odd = (u64)p | left;
  if (odd & 1) store_units<u8>(p, v, left); else if (odd & 2) store_units<u16>(p, v, left); else store_units<u32>(p, v, left);
}
__device__ __forceinline__ u64 vector_left(u64 bytes, u64 at) { return bytes - at < 16 ? bytes - at : 16; }

// Groups that are whole take no branches.
__device__ __forceinline__ bool is_whole(const Cut& c, u64 at) { return c.aligned && at + GROUP_VECTORS * 16 <= c.bytes; }

// All loads of whole vectors are under way before anything waits for one.
__device__ __forceinline__ void load_group(uint4* d, const Cut& c, u64 group, u32 t) {
  u64 at = first_byte(group);
  bool whole = is_whole(c, at);
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    int i = vector_of(t, u, group == 0);
    u64 here = at + i * 16;
    d[u] = load_where(i >= 0 && (whole || (c.aligned && here + 16 <= c.bytes)), (const uint4*)(c.p + here));
  }
  if (whole || (c.aligned && c.bytes % 16 == 0)) return;
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    int i = vector_of(t, u, group == 0);
    u64 here = at + i * 16;
    if (i >= 0 && here < c.bytes && (!c.aligned || here + 16 > c.bytes)) d[u] = load_part(c.p + here, vector_left(c.bytes, here));
  }
}
__device__ __forceinline__ void store_group(const uint4* d, const Cut& c, u64 group, u32 t) {
  u64 at = first_byte(group);
  if (is_whole(c, at)) {
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      int i = vector_of(t, u, group == 0);
      if (i >= 0) *(uint4*)(c.p + at + i * 16) = d[u];
    }
  } else {
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      int i = vector_of(t, u, group == 0);
      u64 here = at + i * 16;
      if (i < 0 || here >= c.bytes) continue;
      if (c.aligned && here + 16 <= c.bytes) *(uint4*)(c.p + here) = d[u];
      else store_part(c.p + here, d[u], vector_left(c.bytes, here));
    }
  }
}
// Rows of the groups ``group`` and ``group + lanes``; only the last group of a message is not full.
__device__ __forceinline__ u32 rows_at(const Cut& c, u64 group) {
  u64 second = group + c.lanes;
  if (second < c.groups) return 4 + rows_of(c.bytes - first_byte(second), false);
  return rows_of(c.bytes - first_byte(group), group == 0);
}

// ---- collectives that are messages: their numbers, and what peers say of theirs

// The entry of rank ``src`` for a number: layout.MOVE. Each half may arrive before the other.
__device__ __forceinline__ uint4* move_entry(char* box, u32 src, u32 number) { return (uint4*)(box + MOVES_OFFSET) + src * MOVE_ENTRIES + number % MOVE_ENTRIES; }

// What all ranks must agree about, and where in the order of all collectives; never 0.
__device__ __forceinline__ u32 move_tag(u32 number, u32 launches, u32 signature) {
  u32 tag = signature ^ number * 0x9e3779b1u ^ launches * 0x85ebca6bu;
  return tag ? tag : 1u;
}

__shared__ u32 tags[THREADS / 32];  // of warps: what their messages bear, 0 for plain ones

// A warp draws the number of this launch's collective. The word counts collectives in its upper half, and who has drawn in this launch in the lower one.
// All is under way then; nothing waits for it before ``begin_move``.
struct Drawn {
  u64 word, launches, stopped;
};
__device__ __forceinline__ Drawn draw_move(const Exchange& x, u32 t) {
  u64* state = (u64*)(x.a.own + STATE_OFFSET);
  return {draw_as_first(state + STATE_MOVES, t), load_word(state + STATE_LAUNCH), load_word(state + STATE_STOPPED)};
}
// Who has drawn first tells the peers. False where a wait of an earlier launch has failed: this one is not begun.
__device__ __noinline__ bool begin_move(const Exchange& x, Drawn drawn, u32 t) {
  const Args& a = x.a;
  if (__any_sync(WHOLE_WARP, drawn.stopped != 0)) return false;
  if (t == 0 && (u32)drawn.word == x.draws - 1) count_up((u64*)(a.own + STATE_OFFSET) + STATE_MOVES, (1ull << 32) - x.draws);
  u64 word = __shfl_sync(WHOLE_WARP, drawn.word, 0);
  u32 number = (u32)(word >> 32) + 1, launches = (u32)drawn.launches, tag = move_tag(number, launches, (u32)a.signature);
  if ((u32)word == 0 && t < RANKS)
    store_packet(move_entry(t == a.rank ? a.own : a.outbox[t], a.rank, number), make_uint4(number, tag, (u32)a.signature, launches));
  if (t == 0) tags[threadIdx.x / 32] = tag;
  __syncwarp();
  return true;
}

// ---- circles: ranks of which each waits in a launch of messages for the next one, the last one for the first

// What rank ``src`` says of its wait for ``peer``, to all ranks: NEED_*, how far that count of ``peer`` must have come, and which ranks it holds itself.
//
// A rank holds another one that needs more than its count has come to, while it is in a launch that does not help: until that ends, the other one goes on
// waiting, and what it has said of that wait stays true. Only who is waited for knows its count, so only it says so. Launches of a communicator run one
// after another. So a circle in which each rank is held by the one that it waits for never ends, and what is found is certain whenever it is looked at.
#define WAIT_SAID (1ull << 63)
#define WAIT_NEED 56
#define WAIT_HOLDS 48
#define WAIT_COUNT ((1ull << WAIT_HOLDS) - 1)
#define NEED_SENT 0u     // rows of the first lane that the peer has sent
#define NEED_CREDIT 1u   // rows of it that the peer has told that it has taken
#define NEED_BULK 2u     // large messages that the peer has taken
__device__ __forceinline__ u64 need(u32 kind, u64 count) { return WAIT_SAID | (u64)kind << WAIT_NEED | count; }
__device__ __forceinline__ u32 kind_of(u64 said) { return (u32)(said >> WAIT_NEED) & 3; }
__device__ __forceinline__ u32 holds_of(u64 said) { return (u32)(said >> WAIT_HOLDS) & 0xff; }
__device__ __forceinline__ u64* wait_word(char* box, u32 src, u32 peer) { return (u64*)(box + WAITS_OFFSET) + src * MAX_RANKS + peer; }

// Whom this rank holds, as a word that says so has them.
__device__ __noinline__ u64 held_here(const Exchange& x) {
  const Args& a = x.a;
  const Queue* queues = (const Queue*)x.room;
  u32 gives = 0, takes = 0, held = 0;
#pragma unroll 1
  for (u32 i = 0; i < x.nqueues; i++) {
    u32 kind = queues[i].kind, bit = 1u << queues[i].peer;
    if (kind == TO_PEER || kind == TO_BULK) gives |= bit; else takes |= bit;
  }
#pragma unroll 1
  for (u32 r = 0; r < RANKS; r++) {
    u64 said = r == a.rank ? 0 : load_word(wait_word(a.inbox[r], r, a.rank));
    if (!said) continue;
    u32 kind = kind_of(said), helps = kind == NEED_SENT ? gives : takes;
    const u64* count = (const u64*)(a.own + BULK_COUNTS_OFFSET + (MAX_RANKS + r) * BULK_STRIDE);
    if (kind == NEED_SENT) count = lane_word(a.own, LANE_SENT_OFFSET, r, 0);
    if (kind == NEED_CREDIT) count = lane_word(a.outbox[r], LANE_CREDIT_OFFSET, a.rank, 0);
    if (!(helps >> r & 1) && load_word(count) < (said & WAIT_COUNT)) held |= 1u << r;
  }
  return (u64)held << WAIT_HOLDS;
}

// Rarely called, by one thread that waits for ``peer``: says so, ``mine``, and reports a circle that this rank is in; as ``check_wait`` otherwise.
// Who is held is told of by its holder, who has seen what it says of its wait; so a rank tells the one that it waits for last, and who has seen the
// holder's word sees the other's as well.
__device__ __noinline__ u64 look_for_circle(const Args& a, u64 waited, u32 peer, u32 what, u64 mine) {
  fence();
  if (load_word(wait_word(a.own, a.rank, peer)) != mine) {
#pragma unroll 1
    for (u32 r = 0; r < RANKS; r++) if (r != peer) store_word(wait_word(r == a.rank ? a.own : a.outbox[r], a.rank, peer), mine);
    fence();
    store_word(wait_word(a.outbox[peer], a.rank, peer), mine);
  }
  u32 known = holds_of(mine), left = known, next = 0, rooms = kind_of(mine) == NEED_SENT ? 0 : 1u << a.rank;  // ``next``: 4 bits for each rank, who holds it
#pragma unroll 1
  for (u32 r = 0; r < RANKS; r++) if (known >> r & 1) next |= a.rank << 4 * r;
#pragma unroll 1
  while (left) {
    u32 r = 0;
    while (!(left >> r & 1)) r++;
    left &= left - 1;
    u64 said = load_word(wait_word(a.inbox[r], r, next >> 4 * r & 15));
    fence();
    if (kind_of(said) != NEED_SENT) rooms |= 1u << r;
    if (r == peer && holds_of(said) >> a.rank & 1) {
      if (is_first_report(a.host)) {
        volatile u32* host = a.host;
        host[HOST_CIRCLE] = next; host[HOST_CIRCLE + 1] = rooms;
        publish_report(a.host, ERROR_CIRCLE, peer, what, 0, (u32)a.signature);
      }
      return stop_waiting(a.inbox[peer], a.own);
    }
    u32 more = holds_of(said) & ~known & ~(1u << a.rank);
    known |= more; left |= more;
#pragma unroll 1
    for (u32 other = 0; other < RANKS; other++) if (more >> other & 1) next |= r << 4 * other;
  }
  return waited;
}

// ---- waiting and failing, as a warp

// Rarely called, by one thread: as ``check_wait``. In a collective the wait ends also where the peer has run another one in the place of this one or of one of
// the last, and where it is past this one: it has begun a later operation, so all that it sent before has landed. The poll before a look may have been too
// early for that: the second look at a peer that is past ends the wait. A peer whose own waits have failed is not past anything.
//
// For a plain message a peer is past where it is in a launch that this rank has not begun, and that does not end there without this rank.
//
// A warp that has drawn finds its number by its tag. Others cannot know whether their launch has told its number yet: the last one in this rank's entries, or
// the one after that, is theirs.
#define SEEN_PAST (1ull << 62)  // the highest bit of the time
__device__ __noinline__ u64 check_message(const Args& a, u64 waited, u32 peer, u32 what) {
  bool past = false, another = false, known = false;
  u32 signature = (u32)a.signature, launches = (u32)load_word((const u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH), crossed = 0, theirs = 0;
  if (signature) {
    u32 number = load_packet(move_entry(a.own, a.rank, 0)).x;
    u32 tag = tags[threadIdx.x / 32];
#pragma unroll 1
    for (u32 i = 0; i < MOVE_ENTRIES; i++) {
      uint4 said = load_packet(move_entry(a.inbox[peer], peer, i)), mine = load_packet(move_entry(a.own, a.rank, i));
      if (said.x == mine.x && said.y != mine.y) { another = true; signature = mine.z; }
      if ((int)(mine.x - number) > 0) number = mine.x;
      known |= tag != 0 && mine.y == tag;
    }
    if (!known) number++;
#pragma unroll 1
    for (u32 i = 0; i < MOVE_ENTRIES; i++) past |= (int)(load_packet(move_entry(a.inbox[peer], peer, i)).x - number) > 0;
  }
#pragma unroll 1
  for (u32 i = 0; i < BOARD_ENTRIES && peer != a.rank; i++) {
    uint4 said = load_packet(board(a.inbox[peer], peer, i));
    if ((int)(said.x - launches) <= 0 || (!signature && !is_needed(said, a.rank))) continue;
    past = true; crossed = said.x; theirs = said.y;
  }
  if (past && load_word(stopped_word(a.outbox[peer])) != 0) past = false;
  if (another || (past && (waited & SEEN_PAST))) {
    if (signature) report(a.host, ERROR_MISMATCH, peer, what, 0, signature); else report(a.host, ERROR_CROSSED, peer, what, crossed, theirs);
    return stop_waiting(a.inbox[peer], a.own);
  }
  waited = check_wait(a.host, a.timeout_ns, waited & ~SEEN_PAST, peer, what, a.inbox[peer], a.own, 0, signature);
  return past ? waited | SEEN_PAST : waited;
}

// One thread, rarely: how long it has waited, as ``check_message``; ``needed``: what the peer must have done, as ``need`` gives it, 0: circles are not
// looked for.
__device__ __forceinline__ u64 look_around(const Exchange& x, u64 waited, u32 peer, u32 what, u64 needed) {
  waited = check_message(x.a, waited, peer, what);
  return needed && !(waited & SEEN_PAST) ? look_for_circle(x.a, waited, peer, what, needed | held_here(x)) : waited;
}

__device__ __forceinline__ bool warp_gives_up(const Exchange& x, Watch& w, u32 t, u32 peer, u32 what, u64 needed) {
  bool over = false;
  if (t == 0) {
    between_polls();
    if (++w.spins >= WARP_SPINS_BEFORE_CHECK) {
      w.spins = 0;
      w.waited = look_around(x, w.waited, peer, what, needed);
      over = w.waited == NEVER;
    }
  }
  return __any_sync(WHOLE_WARP, over);
}

// One thread: this rank has a message of ``mine`` where the peer has one of ``theirs`` (both as Message.size).
__device__ __noinline__ void report_sizes(const Args& a, u32 peer, u32 what, u64 mine, u64 theirs) {
  if (!is_first_report(a.host)) return;
  volatile u32* host = a.host;
  host[HOST_SIZES] = (u32)mine; host[HOST_SIZES + 1] = (u32)(mine >> 32);
  host[HOST_SIZES + 2] = (u32)theirs; host[HOST_SIZES + 3] = (u32)(theirs >> 32);
  publish_report(a.host, ERROR_SIZES, peer, what, 0, (u32)a.signature);
}
// One thread: the peer has refused a message, as the poisoned credit ``taken`` says.
__device__ __noinline__ void report_refusal(const Args& a, u32 peer, u64 mine, u64 taken) {
  if (taken & ANOTHER) report(a.host, ERROR_MISMATCH, peer, WHAT_SEND, 0, (u32)a.signature);
  else report_sizes(a, peer, WHAT_SEND, mine, taken & ~POISON);
}

// ---- what a warp does with a queue

// What a lane reads first, the number of the collective, what has come of its credit and the data, is under way together: each is a way to memory, and the
// first row leaves after the longest. The credit is read anew for each pair of groups, while their data come.
__device__ __forceinline__ void send_lane(const Exchange& x, const Queue& q, u32 lane, u32 t) {
  const Args& a = x.a;
  const u64* credit = lane_word(a.inbox[q.peer], LANE_CREDIT_OFFSET, q.peer, lane);
  u64* counter = lane_word(a.own, LANE_SENT_OFFSET, q.peer, lane);
  uint4* ring = ring_of(a, q.peer, a.rank, lane) + t;
  bool draws = lane == 0 && x.draws;
  Drawn drawn = {0, 0, 0};
  if (draws) drawn = draw_move(x, t); else if (lane == 0) drawn.stopped = load_word(stopped_word(a.own));
  u64 before = load_word(counter), sent = 0;
  Watch watch = {0, 0};
  __syncwarp();
  for (u32 m = q.first; m < q.first + q.count; m++) {
    Cut c = cut(message(x, m), x.lanes);
    if (lane >= c.lanes) continue;
    for (u64 g = lane; g < c.groups; g += 2 * c.lanes) {
      bool two = g + c.lanes < c.groups;
      u32 rows = rows_at(c, g);
      u64 taken = load_word(credit);
      uint4 d[2 * LOADS], v[4];
      load_group(d, c, g, t);
      if (two) load_group(d + LOADS, c, g + c.lanes, t);
      if (draws && sent == 0 && !begin_move(x, drawn, t)) return;
      if (g == 0 && t == HEADER_THREAD) { u64 size = message(x, m).size; d[0] = make_uint4((u32)size, (u32)(size >> 32), tags[threadIdx.x / 32], 0); }
      watch.spins = 0; watch.waited = 0;
      u64 row = before + sent;
      while (__any_sync(WHOLE_WARP, drawn.stopped != 0 || (i64)(row + rows) > (i64)(taken + RING_ROWS))) {
        // a wait of an earlier launch has failed, and what is sent may hang on it: no header, no message
        if (__any_sync(WHOLE_WARP, drawn.stopped != 0)) return;
        taken = load_word(credit);
        if (__any_sync(WHOLE_WARP, (taken & POISON) != 0)) {  // by now a credit that was under way may be there instead: who saw it reports
          if (taken & POISON) report_refusal(a, q.peer, message(x, m).size, taken);
          return;
        }
        if (warp_gives_up(x, watch, t, q.peer, WHAT_ROOM, lane ? 0 : need(NEED_CREDIT, row + rows - RING_ROWS))) return;
      }
#pragma unroll
      for (int u = 0; u < ROWS; u++) {
        if (u == 0) frame(v, d, t);
        if (u == 4 && two) frame(v, d + LOADS, t);
        if (u < rows) store_row(ring + place_of(row + u), v[u % 4], flag_of(row + u), t);
      }
      sent += rows;
    }
  }
  __syncwarp();
  if (t == 0) *counter = before + sent;
}

// The receiver has a message of size ``mine``; thread HEADER_THREAD knows the size that came, which is the same where tags differ.
__device__ __noinline__ void refuse(const Exchange& x, u32 peer, u64 mine, u64 theirs, u32 t) {
  if (t == HEADER_THREAD) {
    if (mine == theirs) report(x.a.host, ERROR_MISMATCH, peer, WHAT_RECV, 0, (u32)x.a.signature);
    else report_sizes(x.a, peer, WHAT_RECV, mine, theirs);
    store_word((u64*)(x.a.outbox[peer] + REFUSED_OFFSET + x.a.rank * WORD_STRIDE), POISON | theirs);
  }
  u64 poison = POISON | mine | (__any_sync(WHOLE_WARP, t == HEADER_THREAD && mine == theirs) ? ANOTHER : 0);
  fence();
  for (u32 l = t; l < x.lanes; l += 32) store_word(lane_word(x.a.outbox[peer], LANE_CREDIT_OFFSET, x.a.rank, l), poison);
}

// Whether this thread sees a header that is not the one of the message.
__device__ __forceinline__ bool is_refused(const uint4* v, u64 row, u64 size, u32 t) {
  if (t != HEADER_THREAD) return false;
#pragma unroll
  for (int u = 0; u < HEADER_ROWS; u++) if (!is_there(v[u], flag_of(row + u), t)) return false;
  return size_in(v) != size || tag_in(v) != tags[threadIdx.x / 32];
}

__device__ __forceinline__ void receive_lane(const Exchange& x, const Queue& q, u32 lane, u32 t) {
  const Args& a = x.a;
  u64* credit = lane_word(a.outbox[q.peer], LANE_CREDIT_OFFSET, a.rank, lane);
  u64* counter = lane_word(a.own, LANE_TAKEN_OFFSET, q.peer, lane);
  const uint4* ring = ring_of(a, a.rank, q.peer, lane) + t;
  u64 row = load_word(counter);
  Watch watch = {0, 0};
  __syncwarp();
  for (u32 m = q.first; m < q.first + q.count; m++) {
    Cut c = cut(message(x, m), x.lanes);
    if (lane >= c.lanes) continue;
    for (u64 g = lane; g < c.groups; g += 2 * c.lanes) {
      bool two = g + c.lanes < c.groups;
      u32 rows = rows_at(c, g);
      uint4 d[LOADS], v[ROWS];
      watch.spins = 0; watch.waited = 0;
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int u = 0; u < ROWS; u++)
          if (u < rows) v[u] = load_row(ring + place_of(row + u));
#pragma unroll
        for (int u = 0; u < ROWS; u++)
          if (u < rows && !is_there(v[u], flag_of(row + u), t)) missing = true;
        // the header is looked at as soon as it is there: the rows that this rank expects may never come
        bool other = g == 0 && is_refused(v, row, message(x, m).size, t);
        if (!__any_sync(WHOLE_WARP, missing || other)) break;
        if (__any_sync(WHOLE_WARP, other)) {
          refuse(x, q.peer, message(x, m).size, size_in(v), t);
          return;
        }
        if (warp_gives_up(x, watch, t, q.peer, WHAT_MESSAGE, lane ? 0 : need(NEED_SENT, row + 1))) return;
      }
      u64 next = row + rows;
      if (t == 0 && next / QUARTER != row / QUARTER) store_word(credit, next);  // the votes above have waited for all loads
      row = next;
      unframe(d, v, t);
      store_group(d, c, g, t);
      if (!two) continue;
      unframe(d, v + 4, t);
      store_group(d, c, g + c.lanes, t);
    }
  }
  __syncwarp();
  if (t == 0) *counter = row;
}

__device__ __forceinline__ void copy_lane(const Exchange& x, const Queue& q, u32 lane, u32 t) {
  for (u32 m = q.first; m < q.first + q.count; m += 2) {
    Message source = message(x, m);
    const char* from = (const char*)source.address;
    char* to = (char*)message(x, m + 1).address;
#if defined(__CUDACC_RTC__)
    __builtin_assume(__isGlobal(from));
    __builtin_assume(__isGlobal(to));
#endif
    u64 bytes = SIZE_BYTES(source.size), stride = q.lanes * 512ull;
    bool aligned = (((u64)from | (u64)to) & 15) == 0;
    for (u64 at = lane * 512ull + t * 16; at < bytes; at += 4 * stride) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        u64 here = at + u * stride;
        if (here >= bytes) continue;
        v[u] = aligned && here + 16 <= bytes ? *(const uint4*)(from + here) : load_part(from + here, vector_left(bytes, here));
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
        u64 here = at + u * stride;
        if (here >= bytes) continue;
        if (aligned && here + 16 <= bytes) *(uint4*)(to + here) = v[u]; else store_part(to + here, v[u], vector_left(bytes, here));
      }
    }
  }
}

#if BULK
__device__ __forceinline__ void send_bulk(const Exchange& x, const Queue& q, u32 block);
__device__ __forceinline__ void receive_bulk(const Exchange& x, const Queue& q, u32 block);
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) p2p(const __grid_constant__ Exchange x) {
  u32 block = blockIdx.x - x.bulk, blocks = gridDim.x - x.bulk;
  u32 warp = threadIdx.x / 32 * blocks + block, t = threadIdx.x % 32;  // neighbours on different multiprocessors
  after_grid_before();
  if (t == 0) tags[threadIdx.x / 32] = 0;
  const Queue* queues = (const Queue*)x.room;
  for (u32 i = 0; i < x.nqueues; i++) {
    const Queue& q = queues[i];
#if BULK
    if (blockIdx.x < x.bulk || q.kind >= TO_BULK) {
      if (q.kind < TO_BULK || blockIdx.x < q.begin || blockIdx.x - q.begin >= q.lanes) continue;
      if (q.kind == TO_BULK) send_bulk(x, q, blockIdx.x - q.begin); else receive_bulk(x, q, blockIdx.x - q.begin);
      return;
    }
#endif
    if (warp < q.begin || warp - q.begin >= q.lanes) continue;
    u32 lane = warp - q.begin;
    if (q.kind == TO_PEER) {
      send_lane(x, q, lane, t);  // draws by itself
      return;
    }
    if (lane == 0 && x.draws && !begin_move(x, draw_move(x, t), t)) return;  // headers are the first lane's
    if (q.kind == FROM_PEER) receive_lane(x, q, lane, t); else copy_lane(x, q, lane, t);
    return;
  }
}
