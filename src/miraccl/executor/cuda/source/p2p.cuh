// Messages between pairs of ranks: any number of sends and receives in one launch.
//
// All messages in one direction between this rank and a peer form a peer queue, served in order by
// warp queues. A warp queue is a warp here, a warp at the peer, and a FIFO of rows in the
// receiver's memory. Warp queues are independent, so sends and receives of a launch progress
// concurrently, and no order of them can deadlock. A message is cut into groups of vectors, dealt
// to the warp queues in turn; the number of warp queues follows from its size alone, so both sides
// agree without communication.
//
// A row is one 16-byte store by each thread of a warp, and carries its own arrival flags:
//   FRAME_LINE  four lines of 128 bytes, each with 124 bytes of data and a flag in its last word.
//               NVLink and L2 keep a line that eight threads write whole (NCCL
//               src/device/prims_ll128.h, whose flag takes 8 bytes).
//   FRAME_PAIR  8 bytes of data and two flags per thread, for paths that keep only 8 bytes together
//               (NCCL src/device/prims_ll.h).
//
// Memory ordering: the flag is the lap number of the FIFO. Rows are written whole and in order, so
// a row's previous content has the flag of the previous lap: nothing is cleared, and wrap-around is
// harmless. Flags and data are in one store, so no fence is needed. The receiver reports the rows
// it has received every quarter of a FIFO (credit). Row counts are kept in device memory between
// launches, so captured launches can be replayed, and the distribution of messages over launches
// does not matter.
//
// A message begins with a header, its size and type. A receiver that expects another header reports
// both sizes and poisons the credits, which notifies the sender; the sender may have advanced to a
// later message, so the rejected one is recorded in its memory.
//
// Message collectives (gather, scatter, those with counts that only move data, the barrier) are
// numbered. The header includes number and operation, so an unmatched message is not mistaken for
// one of a later collective; all peers are notified when the collective begins, so ranks that wait
// for each other in different collectives detect it. Source: NCCL src/device/sendrecv.h.

struct MessageDesc {  // layout.MESSAGE
  u64 address;
  u64 size;  // bytes; element type in the eight highest bits
};
#define SIZE_BYTES(size) ((size) & 0x00ffffffffffffffull)
#define POISON (1ull << 63)  // as a signed number less than any credit
// with POISON: sizes agree, but the message belongs to another operation
#define OTHER_OP (1ull << 48)
__device__ __forceinline__ bool is_bulk(const MessageDesc& m) {
  return SIZE_BYTES(m.size) >= BULK_MIN_BYTES;
}

struct PeerQueue {   // layout.QUEUE
  u8 kind, peer;     // kind: TO_PEER, FROM_PEER, TO_SELF, TO_BULK, FROM_BULK
  u16 warp_queues;   // TO_BULK, FROM_BULK: blocks (bulk.cuh)
  u32 first_worker;  // first of its warps, or blocks, in this launch
  u32 first, count;  // messages; TO_SELF: source and destination alternate
  u16 slot, slots;   // FROM_BULK: its share of the pool
  u32 unused;
};
static_assert(sizeof(PeerQueue) == QUEUE_BYTES, "layout.QUEUE");

struct P2pArgs {  // layout.EXCHANGE_HEAD
  Args a;
  const MessageDesc* table;  // null: the messages follow the queues
  u32 nqueues, warp_queues;  // maximum warp queues of a message, equal on all ranks
  u32 bulk, drawing_warps;  // blocks for large messages, the first ones; warps that draw the number
                            // of a message collective, 0: plain messages
  u64 payload[CAPACITY_BYTES / 8];  // the queues, then the messages
};
static_assert(sizeof(P2pArgs) == HEAD_BYTES + CAPACITY_BYTES, "layout.EXCHANGE_HEAD");

#define ROWS_PER_STEP 8  // rows that a warp handles at a time: two groups
#define CREDIT_ROWS (FIFO_ROWS / 4)
#ifndef WARP_SPINS_BEFORE_CHECK
#define WARP_SPINS_BEFORE_CHECK 4096u  // polls of a warp; milliseconds
#endif

// ---- addresses

__device__ __forceinline__ u64* warp_queue_word(char* region, u64 offset, u32 peer,
                                                u32 warp_queue) {
  return (u64*)(region + offset + ((u64)peer * WARP_QUEUES + warp_queue) * WORD_STRIDE);
}

__device__ __forceinline__ uint4* row_fifo(const Args& a, u32 dst, u32 src, u32 warp_queue) {
  u64 fifo = (u64)(src < dst ? src : src - 1) * WARP_QUEUES + warp_queue;
  return (uint4*)((dst == a.rank ? a.inbox[src] : a.outbox[dst]) + ROW_FIFOS_OFFSET +
                  fifo * (FIFO_ROWS * ROW_BYTES));
}
__device__ __forceinline__ u32 lap_flag(u64 row) { return (u32)(row / FIFO_ROWS) + 1; }
__device__ __forceinline__ u32 fifo_index(u64 row) { return (u32)(row % FIFO_ROWS) * 32; }

// Message ``i`` of the launch. Messages in the arguments are read from constant memory, without a
// memory access.
__device__ __forceinline__ MessageDesc message(const P2pArgs& x, u32 i) {
  if (!x.table) return ((const MessageDesc*)((const PeerQueue*)x.payload + x.nqueues))[i];
  return {load_table_word(&x.table[i].address), load_table_word(&x.table[i].size)};
}

struct Partition {  // division of a message into groups
  char* p;
  u64 bytes, groups;
  u32 warp_queues;
  bool aligned;
};
__device__ __forceinline__ Partition partition(const MessageDesc& m, u32 limit) {
  Partition c;
  c.p = (char*)m.address;
  c.bytes = SIZE_BYTES(m.size);
#if defined(__CUDACC_RTC__)
  // the compiler cannot infer the memory space of an address from a table
  __builtin_assume(__isGlobal(c.p));
#endif
  u64 vectors = (c.bytes + 15) / 16;
  c.groups = vectors <= FIRST_VECTORS
                 ? 1
                 : 1 + (vectors - FIRST_VECTORS + GROUP_VECTORS - 1) / GROUP_VECTORS;
#if BULK
  if (is_bulk(m)) c.groups = 1;  // the rest is sent by bulk.cuh
#endif
  c.warp_queues = c.groups < limit ? (u32)c.groups : limit;
  c.aligned = (m.address & 15) == 0;
  return c;
}
__device__ __forceinline__ u64 first_byte(u64 group) {
  return group ? (FIRST_VECTORS + (group - 1) * GROUP_VECTORS) * 16 : 0;
}

// ---- groups and rows. The first group of a message is shorter: the header replaces one thread's
// first vector.

#if defined(FRAME_LINE)
#define LOADS 4  // vectors of a thread, at most
#define HEADER_THREAD 7
// A flag thread distributes three vectors over the four rows of a group, beside four flags; the
// other threads have one vector per row.
__device__ __forceinline__ int vector_of(u32 lane, int u, bool first) {
  if ((lane & 7) == 7) return first || u == 3 ? -1 : 112 + 4 * u + (int)(lane / 8);
  return 28 * u + (int)(lane - lane / 8);
}
__device__ __forceinline__ u32 rows_of(u64 bytes, bool first) {
  return bytes > 84 * 16 ? 4 : bytes > 56 * 16 ? 3 : bytes > 28 * 16 ? 2 : 1;
}
__device__ __forceinline__ void pack_rows(uint4* row, const uint4* d, u32 lane) {
  if ((lane & 7) != 7) {
#pragma unroll
    for (int u = 0; u < 4; u++) row[u] = d[u];
  } else {
    row[0] = d[0];
    row[1] = make_uint4(d[0].w, d[1].x, d[1].y, 0);
    row[2] = make_uint4(d[1].z, d[1].w, d[2].x, 0);
    row[3] = make_uint4(d[2].y, d[2].z, d[2].w, 0);
  }
}
__device__ __forceinline__ void unpack_rows(uint4* d, const uint4* row, u32 lane) {
  if ((lane & 7) != 7) {
#pragma unroll
    for (int u = 0; u < 4; u++) d[u] = row[u];
  } else {
    d[0] = make_uint4(row[0].x, row[0].y, row[0].z, row[1].x);
    d[1] = make_uint4(row[1].y, row[1].z, row[2].x, row[2].y);
    d[2] = make_uint4(row[2].z, row[3].x, row[3].y, row[3].z);
  }
}
// of the header, in the first rows
__device__ __forceinline__ u64 header_size(const uint4* row) {
  return (u64)row[0].y << 32 | row[0].x;
}
__device__ __forceinline__ u32 header_tag(const uint4* row) { return row[0].z; }
#define HEADER_ROWS 1
__device__ __forceinline__ void store_row(uint4* p, uint4 v, u32 flag, u32 lane) {
  if ((lane & 7) == 7) v.w = flag;
  store_line(p, v);
}
__device__ __forceinline__ uint4 load_row(const uint4* p) { return load_line(p); }
__device__ __forceinline__ bool row_arrived(const uint4& v, u32 flag, u32 lane) {
  return (lane & 7) != 7 || v.w == flag;
}
#else
#define LOADS 2
#define HEADER_THREAD 0
__device__ __forceinline__ int vector_of(u32 lane, int u, bool first) {
  return 32 * u + (int)lane - (first ? 1 : 0);
}
__device__ __forceinline__ u32 rows_of(u64 bytes, bool first) {
  return bytes + (first ? 16 : 0) > 32 * 16 ? 4 : 2;
}
__device__ __forceinline__ void pack_rows(uint4* row, const uint4* d, u32 lane) {
#pragma unroll
  for (int u = 0; u < 2; u++) {
    row[2 * u] = make_uint4(d[u].x, 0, d[u].y, 0);
    row[2 * u + 1] = make_uint4(d[u].z, 0, d[u].w, 0);
  }
}
__device__ __forceinline__ void unpack_rows(uint4* d, const uint4* row, u32 lane) {
#pragma unroll
  for (int u = 0; u < 2; u++)
    d[u] = make_uint4(row[2 * u].x, row[2 * u].z, row[2 * u + 1].x, row[2 * u + 1].z);
}
__device__ __forceinline__ u64 header_size(const uint4* row) {
  return (u64)row[0].z << 32 | row[0].x;
}
__device__ __forceinline__ u32 header_tag(const uint4* row) { return row[1].x; }
#define HEADER_ROWS 2
__device__ __forceinline__ void store_row(uint4* p, uint4 v, u32 flag, u32 lane) {
  v.y = v.w = flag;
  store_packet(p, v);
}
__device__ __forceinline__ uint4 load_row(const uint4* p) { return load_packet(p); }
__device__ __forceinline__ bool row_arrived(const uint4& v, u32 flag, u32 lane) {
  return v.y == flag && v.w == flag;
}
#endif

// ---- user memory: whole vectors where aligned, else the largest unit that is; ``left`` bytes are
// valid

template <class W>
__device__ __forceinline__ uint4 load_units(const char* p, u64 left) {
  u32 w[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 16; j += sizeof(W))
    if (j < left) w[j / 4] |= (u32) * (const W*)(p + j) << (8 * (j & 3));
  return make_uint4(w[0], w[1], w[2], w[3]);
}
template <class W>
__device__ __forceinline__ void store_units(char* p, const uint4& v, u64 left) {
  u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 16; j += sizeof(W))
    if (j < left) *(W*)(p + j) = (W)(w[j / 4] >> (8 * (j & 3)));
}
__device__ __noinline__ uint4 load_partial(const char* p, u64 left) {
  u64 odd = (u64)p | left;
  return odd & 1   ? load_units<u8>(p, left)
         : odd & 2 ? load_units<u16>(p, left)
                   : load_units<u32>(p, left);
}
__device__ __noinline__ void store_partial(char* p, uint4 v, u64 left) {
  u64 odd = (u64)p | left;
  if (odd & 1)
    store_units<u8>(p, v, left);
  else if (odd & 2)
    store_units<u16>(p, v, left);
  else
    store_units<u32>(p, v, left);
}
__device__ __forceinline__ u64 bytes_left(u64 bytes, u64 start) {
  return bytes - start < 16 ? bytes - start : 16;
}

// Full groups take no branches.
__device__ __forceinline__ bool is_full(const Partition& c, u64 start) {
  return c.aligned && start + GROUP_VECTORS * 16 <= c.bytes;
}

// All loads of whole vectors are in flight before any is awaited.
__device__ __forceinline__ void load_group(uint4* d, const Partition& c, u64 group, u32 lane) {
  u64 start = first_byte(group);
  bool full = is_full(c, start);
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    int i = vector_of(lane, u, group == 0);
    u64 offset = start + i * 16;
    d[u] = load_if(i >= 0 && (full || (c.aligned && offset + 16 <= c.bytes)),
                   (const uint4*)(c.p + offset));
  }
  if (full || (c.aligned && c.bytes % 16 == 0)) return;
#pragma unroll
  for (int u = 0; u < LOADS; u++) {
    int i = vector_of(lane, u, group == 0);
    u64 offset = start + i * 16;
    if (i >= 0 && offset < c.bytes && (!c.aligned || offset + 16 > c.bytes))
      d[u] = load_partial(c.p + offset, bytes_left(c.bytes, offset));
  }
}
__device__ __forceinline__ void store_group(const uint4* d, const Partition& c, u64 group,
                                            u32 lane) {
  u64 start = first_byte(group);
  if (is_full(c, start)) {
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      int i = vector_of(lane, u, group == 0);
      if (i >= 0) *(uint4*)(c.p + start + i * 16) = d[u];
    }
  } else {
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      int i = vector_of(lane, u, group == 0);
      u64 offset = start + i * 16;
      if (i < 0 || offset >= c.bytes) continue;
      if (c.aligned && offset + 16 <= c.bytes)
        *(uint4*)(c.p + offset) = d[u];
      else
        store_partial(c.p + offset, d[u], bytes_left(c.bytes, offset));
    }
  }
}
// Rows of the groups ``group`` and ``group + warp_queues``; only the last group of a message is not
// full.
__device__ __forceinline__ u32 rows_of_pair(const Partition& c, u64 group) {
  u64 second = group + c.warp_queues;
  if (second < c.groups) return 4 + rows_of(c.bytes - first_byte(second), false);
  return rows_of(c.bytes - first_byte(group), group == 0);
}

// ---- message collectives: their numbers, and what peers publish of theirs

// Entry of rank ``src`` for a collective number: layout.MESSAGE_OP. The two 8-byte halves may
// arrive separately.
__device__ __forceinline__ uint4* message_op_entry(char* region, u32 src, u32 number) {
  return (uint4*)(region + MESSAGE_OPS_OFFSET) + src * MESSAGE_OP_ENTRIES +
         number % MESSAGE_OP_ENTRIES;
}

// Hash of the operation and its position in the order of all collectives; never 0.
__device__ __forceinline__ u32 op_tag(u32 number, u32 launches, u32 signature) {
  u32 tag = signature ^ number * 0x9e3779b1u ^ launches * 0x85ebca6bu;
  return tag ? tag : 1u;
}

__shared__ u32 tags[THREADS / 32];  // tag of each warp's messages, 0 for plain ones

// Number of this launch's message collective, drawn by a warp. The word counts collectives in its
// upper half, and the warps of this launch that have drawn in the lower half. All three loads are
// in flight together; ``begin_message_op`` waits for them.
struct OpNumber {
  u64 word, launches, stopped;
};
__device__ __forceinline__ OpNumber draw_op_number(const P2pArgs& x, u32 lane) {
  u64* state = (u64*)(x.a.own + STATE_OFFSET);
  return {atomic_add_lane0(state + STATE_MESSAGE_OPS, lane), load_word(state + STATE_LAUNCH),
          load_word(state + STATE_WAIT_FAILED)};
}
// The warp that drew first publishes the operation to the peers. Return false if a wait of an
// earlier launch has failed: this launch is not begun.
__device__ __noinline__ bool begin_message_op(const P2pArgs& x, OpNumber op_number, u32 lane) {
  const Args& a = x.a;
  if (__any_sync(WHOLE_WARP, op_number.stopped != 0)) return false;
  if (lane == 0 && (u32)op_number.word == x.drawing_warps - 1)
    atomic_add((u64*)(a.own + STATE_OFFSET) + STATE_MESSAGE_OPS, (1ull << 32) - x.drawing_warps);
  u64 word = __shfl_sync(WHOLE_WARP, op_number.word, 0);
  u32 number = (u32)(word >> 32) + 1, launches = (u32)op_number.launches,
      tag = op_tag(number, launches, (u32)a.signature);
  if ((u32)word == 0 && lane < RANKS)
    store_packet(message_op_entry(lane == a.rank ? a.own : a.outbox[lane], a.rank, number),
                 make_uint4(number, tag, (u32)a.signature, launches));
  if (lane == 0) tags[threadIdx.x / 32] = tag;
  __syncwarp();
  return true;
}

// ---- cycles of ranks that wait for each other in launches of messages

// Wait word of rank ``src`` waiting for ``peer``, sent to all ranks: NEED_*, the count of ``peer``
// that ends the wait, and the ranks that ``src`` itself holds.
//
// A rank holds another one if that one needs more than this rank's count, and this rank is in a
// launch that does not serve it: until the launch ends, the other one keeps waiting, and its wait
// word stays true. Only the awaited rank knows its count, so only it reports that. Launches of a
// communicator run one after another. Hence a cycle in which each rank is held by the one it waits
// for never ends, and a detected cycle is certain at whatever time it is observed.
#define WAIT_VALID (1ull << 63)
#define WAIT_NEED 56
#define WAIT_HOLDS 48
#define WAIT_COUNT ((1ull << WAIT_HOLDS) - 1)
#define NEED_SENT 0u    // rows of warp queue 0 that the peer has sent
#define NEED_CREDIT 1u  // rows of warp queue 0 that the peer has reported as received
#define NEED_BULK 2u    // large messages that the peer has received
__device__ __forceinline__ u64 needed_progress(u32 kind, u64 count) {
  return WAIT_VALID | (u64)kind << WAIT_NEED | count;
}
__device__ __forceinline__ u32 need_kind(u64 reported) { return (u32)(reported >> WAIT_NEED) & 3; }
__device__ __forceinline__ u32 held_mask(u64 reported) {
  return (u32)(reported >> WAIT_HOLDS) & 0xff;
}
__device__ __forceinline__ u64* wait_word(char* region, u32 src, u32 peer) {
  return (u64*)(region + WAITS_OFFSET) + src * MAX_RANKS + peer;
}

// Ranks that this rank holds, as encoded in its wait words.
__device__ __noinline__ u64 held_ranks(const P2pArgs& x) {
  const Args& a = x.a;
  const PeerQueue* queues = (const PeerQueue*)x.payload;
  u32 sends_to = 0, receives_from = 0, held = 0;
#pragma unroll 1
  for (u32 i = 0; i < x.nqueues; i++) {
    u32 kind = queues[i].kind, bit = 1u << queues[i].peer;
    if (kind == TO_PEER || kind == TO_BULK)
      sends_to |= bit;
    else
      receives_from |= bit;
  }
#pragma unroll 1
  for (u32 r = 0; r < RANKS; r++) {
    u64 reported = r == a.rank ? 0 : load_word(wait_word(a.inbox[r], r, a.rank));
    if (!reported) continue;
    u32 kind = need_kind(reported), served = kind == NEED_SENT ? sends_to : receives_from;
    const u64* count = (const u64*)(a.own + BULK_COUNTS_OFFSET + (MAX_RANKS + r) * BULK_STRIDE);
    if (kind == NEED_SENT) count = warp_queue_word(a.own, ROWS_SENT_OFFSET, r, 0);
    if (kind == NEED_CREDIT) count = warp_queue_word(a.outbox[r], CREDIT_OFFSET, a.rank, 0);
    if (!(served >> r & 1) && load_word(count) < (reported & WAIT_COUNT)) held |= 1u << r;
  }
  return (u64)held << WAIT_HOLDS;
}

// Publish the wait word ``own_wait`` and report a cycle that includes this rank; otherwise return
// ``wait_time`` as it is. Rarely called, by one thread that waits for ``peer``.
//
// Memory ordering: a rank's wait for ``peer`` is stored at ``peer`` last, behind a fence. ``peer``,
// which may hold it, reports it as held only after it has seen that word, so a rank that sees the
// holder's word sees the held rank's word as well.
__device__ __noinline__ u64 find_cycle(const Args& a, u64 wait_time, u32 peer, u32 awaited,
                                       u64 own_wait) {
  fence();
  if (load_word(wait_word(a.own, a.rank, peer)) != own_wait) {
#pragma unroll 1
    for (u32 r = 0; r < RANKS; r++)
      if (r != peer)
        store_word(wait_word(r == a.rank ? a.own : a.outbox[r], a.rank, peer), own_wait);
    fence();
    store_word(wait_word(a.outbox[peer], a.rank, peer), own_wait);
  }
  // 4 bits per rank: its holder
  u32 known = held_mask(own_wait), pending = known, holder = 0,
      credit_waiters = need_kind(own_wait) == NEED_SENT ? 0 : 1u << a.rank;
#pragma unroll 1
  for (u32 r = 0; r < RANKS; r++)
    if (known >> r & 1) holder |= a.rank << 4 * r;
#pragma unroll 1
  while (pending) {
    u32 r = 0;
    while (!(pending >> r & 1)) r++;
    pending &= pending - 1;
    u64 reported = load_word(wait_word(a.inbox[r], r, holder >> 4 * r & 15));
    fence();
    if (need_kind(reported) != NEED_SENT) credit_waiters |= 1u << r;
    if (r == peer && held_mask(reported) >> a.rank & 1) {
      if (claim_report(a.host)) {
        volatile u32* host = a.host;
        host[HOST_CYCLE] = holder;
        host[HOST_CYCLE + 1] = credit_waiters;
        publish_report(a.host, ERROR_CYCLE, peer, awaited, 0, (u32)a.signature);
      }
      return end_wait(a.inbox[peer], a.own);
    }
    u32 more = held_mask(reported) & ~known & ~(1u << a.rank);
    known |= more;
    pending |= more;
#pragma unroll 1
    for (u32 rank = 0; rank < RANKS; rank++)
      if (more >> rank & 1) holder |= r << 4 * rank;
  }
  return wait_time;
}

// ---- waiting and failing, per warp

// ``check_deadline`` for messages; rarely called, by one thread. In a message collective the wait
// also ends if the peer has run another one in place of this one or one of the last, or if the peer
// is past this one: it has begun a later operation, so everything it sent before has landed. The
// poll before the check may have been too early for that, so the second check that finds the peer
// past ends the wait. A peer whose own waits have failed does not count as past.
//
// For a plain message, a peer is past if it is in a launch that this rank has not begun and that
// does not end there without this rank.
//
// A warp that has drawn finds its number by its tag. Other warps cannot know whether their launch
// has published its number yet: it is the last one in this rank's entries, or the one after that.
#define SEEN_PAST (1ull << 62)  // the highest bit of the time
__device__ __noinline__ u64 check_message(const Args& a, u64 wait_time, u32 peer, u32 awaited) {
  bool peer_is_past = false, other_op = false, known = false;
  u32 signature = (u32)a.signature,
      launches = (u32)load_word((const u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH),
      crossed_launch = 0, crossed_signature = 0;
  if (signature) {
    u32 number = load_packet(message_op_entry(a.own, a.rank, 0)).x;
    u32 tag = tags[threadIdx.x / 32];
#pragma unroll 1
    for (u32 i = 0; i < MESSAGE_OP_ENTRIES; i++) {
      uint4 reported = load_packet(message_op_entry(a.inbox[peer], peer, i)),
            own = load_packet(message_op_entry(a.own, a.rank, i));
      if (reported.x == own.x && reported.y != own.y) {
        other_op = true;
        signature = own.z;
      }
      if ((int)(own.x - number) > 0) number = own.x;
      known |= tag != 0 && own.y == tag;
    }
    if (!known) number++;
#pragma unroll 1
    for (u32 i = 0; i < MESSAGE_OP_ENTRIES; i++)
      peer_is_past |= (int)(load_packet(message_op_entry(a.inbox[peer], peer, i)).x - number) > 0;
  }
#pragma unroll 1
  for (u32 i = 0; i < OP_LOG_ENTRIES && peer != a.rank; i++) {
    uint4 reported = load_packet(op_record(a.inbox[peer], peer, i));
    if ((int)(reported.x - launches) <= 0 || (!signature && !is_needed(reported, a.rank))) continue;
    peer_is_past = true;
    crossed_launch = reported.x;
    crossed_signature = reported.y;
  }
  if (peer_is_past && load_word(wait_failed_word(a.outbox[peer])) != 0) peer_is_past = false;
  if (other_op || (peer_is_past && (wait_time & SEEN_PAST))) {
    if (signature)
      report(a.host, ERROR_MISMATCH, peer, awaited, 0, signature);
    else
      report(a.host, ERROR_CROSSED, peer, awaited, crossed_launch, crossed_signature);
    return end_wait(a.inbox[peer], a.own);
  }
  wait_time = check_deadline(a.host, a.timeout_ns, wait_time & ~SEEN_PAST, peer, awaited,
                             a.inbox[peer], a.own, 0, signature);
  return peer_is_past ? wait_time | SEEN_PAST : wait_time;
}

// Full check of a waiting thread: ``check_message``, then cycles. ``progress_needed`` is encoded by
// ``needed_progress``; 0: do not look for cycles.
__device__ __forceinline__ u64 check_p2p_wait(const P2pArgs& x, u64 wait_time, u32 peer,
                                              u32 awaited, u64 progress_needed) {
  wait_time = check_message(x.a, wait_time, peer, awaited);
  return progress_needed && !(wait_time & SEEN_PAST)
             ? find_cycle(x.a, wait_time, peer, awaited, progress_needed | held_ranks(x))
             : wait_time;
}

__device__ __forceinline__ bool warp_check_abort(const P2pArgs& x, SpinWait& w, u32 lane, u32 peer,
                                                 u32 awaited, u64 progress_needed) {
  bool aborted = false;
  if (lane == 0) {
    poll_pause();
    if (++w.polls >= WARP_SPINS_BEFORE_CHECK) {
      w.polls = 0;
      w.wait_time = check_p2p_wait(x, w.wait_time, peer, awaited, progress_needed);
      aborted = w.wait_time == WAIT_ENDED;
    }
  }
  return __any_sync(WHOLE_WARP, aborted);
}

// One thread: report that this rank has a message of ``own_size`` where the peer has ``peer_size``
// (as MessageDesc.size).
__device__ __noinline__ void report_sizes(const Args& a, u32 peer, u32 awaited, u64 own_size,
                                          u64 peer_size) {
  if (!claim_report(a.host)) return;
  volatile u32* host = a.host;
  host[HOST_SIZES] = (u32)own_size;
  host[HOST_SIZES + 1] = (u32)(own_size >> 32);
  host[HOST_SIZES + 2] = (u32)peer_size;
  host[HOST_SIZES + 3] = (u32)(peer_size >> 32);
  publish_report(a.host, ERROR_SIZES, peer, awaited, 0, (u32)a.signature);
}
// One thread: report that the peer has rejected a message, as the poisoned credit ``credited``
// says.
__device__ __noinline__ void report_rejection(const Args& a, u32 peer, u64 own_size, u64 credited) {
  if (credited & OTHER_OP)
    report(a.host, ERROR_MISMATCH, peer, AWAIT_SEND, 0, (u32)a.signature);
  else
    report_sizes(a, peer, AWAIT_SEND, own_size, credited & ~POISON);
}

// ---- work of a warp on a queue

// The first loads of a warp queue (collective number, row count, credit, data) are in flight
// together: each is a memory round trip, and the first row leaves after the longest. The credit is
// loaded anew for each pair of groups, while their data arrive.
__device__ __forceinline__ void send_warp_queue(const P2pArgs& x, const PeerQueue& q,
                                                u32 warp_queue, u32 lane) {
  const Args& a = x.a;
  const u64* credit = warp_queue_word(a.inbox[q.peer], CREDIT_OFFSET, q.peer, warp_queue);
  u64* counter = warp_queue_word(a.own, ROWS_SENT_OFFSET, q.peer, warp_queue);
  uint4* fifo = row_fifo(a, q.peer, a.rank, warp_queue) + lane;
  bool drawing_warps = warp_queue == 0 && x.drawing_warps;
  OpNumber op_number = {0, 0, 0};
  if (drawing_warps)
    op_number = draw_op_number(x, lane);
  else if (warp_queue == 0)
    op_number.stopped = load_word(wait_failed_word(a.own));
  u64 before = load_word(counter), sent = 0;
  SpinWait spin = {0, 0};
  __syncwarp();
  for (u32 m = q.first; m < q.first + q.count; m++) {
    Partition c = partition(message(x, m), x.warp_queues);
    if (warp_queue >= c.warp_queues) continue;
    for (u64 g = warp_queue; g < c.groups; g += 2 * c.warp_queues) {
      bool has_second = g + c.warp_queues < c.groups;
      u32 rows = rows_of_pair(c, g);
      u64 credited = load_word(credit);
      uint4 d[2 * LOADS], v[4];
      load_group(d, c, g, lane);
      if (has_second) load_group(d + LOADS, c, g + c.warp_queues, lane);
      if (drawing_warps && sent == 0 && !begin_message_op(x, op_number, lane)) return;
      if (g == 0 && lane == HEADER_THREAD) {
        u64 size = message(x, m).size;
        d[0] = make_uint4((u32)size, (u32)(size >> 32), tags[threadIdx.x / 32], 0);
      }
      spin.polls = 0;
      spin.wait_time = 0;
      u64 row = before + sent;
      while (__any_sync(
          WHOLE_WARP, op_number.stopped != 0 || (i64)(row + rows) > (i64)(credited + FIFO_ROWS))) {
        // a wait of an earlier launch has failed, and these data may depend on it: send no header
        // and no message
        if (__any_sync(WHOLE_WARP, op_number.stopped != 0)) return;
        credited = load_word(credit);
        // a credit in flight may have replaced the poison by now: the lane that saw the poison
        // reports
        if (__any_sync(WHOLE_WARP, (credited & POISON) != 0)) {
          if (credited & POISON) report_rejection(a, q.peer, message(x, m).size, credited);
          return;
        }
        if (warp_check_abort(x, spin, lane, q.peer, AWAIT_CREDIT,
                             warp_queue ? 0 : needed_progress(NEED_CREDIT, row + rows - FIFO_ROWS)))
          return;
      }
#pragma unroll
      for (int u = 0; u < ROWS_PER_STEP; u++) {
        if (u == 0) pack_rows(v, d, lane);
        if (u == 4 && has_second) pack_rows(v, d + LOADS, lane);
        if (u < rows) store_row(fifo + fifo_index(row + u), v[u % 4], lap_flag(row + u), lane);
      }
      sent += rows;
    }
  }
  __syncwarp();
  if (lane == 0) *counter = before + sent;
}

// Reject a message: this rank expects size ``own_size``; lane HEADER_THREAD has the received size,
// which is equal if the tags differ.
__device__ __noinline__ void reject_message(const P2pArgs& x, u32 peer, u64 own_size, u64 peer_size,
                                            u32 lane) {
  if (lane == HEADER_THREAD) {
    if (own_size == peer_size)
      report(x.a.host, ERROR_MISMATCH, peer, AWAIT_RECV, 0, (u32)x.a.signature);
    else
      report_sizes(x.a, peer, AWAIT_RECV, own_size, peer_size);
    store_word((u64*)(x.a.outbox[peer] + REJECTED_OFFSET + x.a.rank * WORD_STRIDE),
               POISON | peer_size);
  }
  u64 poison =
      POISON | own_size |
      (__any_sync(WHOLE_WARP, lane == HEADER_THREAD && own_size == peer_size) ? OTHER_OP : 0);
  fence();
  for (u32 l = lane; l < x.warp_queues; l += 32)
    store_word(warp_queue_word(x.a.outbox[peer], CREDIT_OFFSET, x.a.rank, l), poison);
}

// Return true if this lane sees a header that does not match the message.
__device__ __forceinline__ bool is_wrong_header(const uint4* v, u64 row, u64 size, u32 lane) {
  if (lane != HEADER_THREAD) return false;
#pragma unroll
  for (int u = 0; u < HEADER_ROWS; u++)
    if (!row_arrived(v[u], lap_flag(row + u), lane)) return false;
  return header_size(v) != size || header_tag(v) != tags[threadIdx.x / 32];
}

__device__ __forceinline__ void recv_warp_queue(const P2pArgs& x, const PeerQueue& q,
                                                u32 warp_queue, u32 lane) {
  const Args& a = x.a;
  u64* credit = warp_queue_word(a.outbox[q.peer], CREDIT_OFFSET, a.rank, warp_queue);
  u64* counter = warp_queue_word(a.own, ROWS_RECEIVED_OFFSET, q.peer, warp_queue);
  const uint4* fifo = row_fifo(a, a.rank, q.peer, warp_queue) + lane;
  u64 row = load_word(counter);
  SpinWait spin = {0, 0};
  __syncwarp();
  for (u32 m = q.first; m < q.first + q.count; m++) {
    Partition c = partition(message(x, m), x.warp_queues);
    if (warp_queue >= c.warp_queues) continue;
    for (u64 g = warp_queue; g < c.groups; g += 2 * c.warp_queues) {
      bool has_second = g + c.warp_queues < c.groups;
      u32 rows = rows_of_pair(c, g);
      uint4 d[LOADS], v[ROWS_PER_STEP];
      spin.polls = 0;
      spin.wait_time = 0;
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int u = 0; u < ROWS_PER_STEP; u++)
          if (u < rows) v[u] = load_row(fifo + fifo_index(row + u));
#pragma unroll
        for (int u = 0; u < ROWS_PER_STEP; u++)
          if (u < rows && !row_arrived(v[u], lap_flag(row + u), lane)) missing = true;
        // check the header as soon as it has arrived: the rows that this rank expects may never
        // come
        bool other = g == 0 && is_wrong_header(v, row, message(x, m).size, lane);
        if (!__any_sync(WHOLE_WARP, missing || other)) break;
        if (__any_sync(WHOLE_WARP, other)) {
          reject_message(x, q.peer, message(x, m).size, header_size(v), lane);
          return;
        }
        if (warp_check_abort(x, spin, lane, q.peer, AWAIT_MESSAGE,
                             warp_queue ? 0 : needed_progress(NEED_SENT, row + 1)))
          return;
      }
      u64 next = row + rows;
      // the votes above have waited for all loads
      if (lane == 0 && next / CREDIT_ROWS != row / CREDIT_ROWS) store_word(credit, next);
      row = next;
      unpack_rows(d, v, lane);
      store_group(d, c, g, lane);
      if (!has_second) continue;
      unpack_rows(d, v + 4, lane);
      store_group(d, c, g + c.warp_queues, lane);
    }
  }
  __syncwarp();
  if (lane == 0) *counter = row;
}

__device__ __forceinline__ void copy_to_self(const P2pArgs& x, const PeerQueue& q, u32 warp_queue,
                                             u32 lane) {
  for (u32 m = q.first; m < q.first + q.count; m += 2) {
    MessageDesc source = message(x, m);
    const char* from = (const char*)source.address;
    char* to = (char*)message(x, m + 1).address;
#if defined(__CUDACC_RTC__)
    __builtin_assume(__isGlobal(from));
    __builtin_assume(__isGlobal(to));
#endif
    u64 bytes = SIZE_BYTES(source.size), stride = q.warp_queues * 512ull;
    bool aligned = (((u64)from | (u64)to) & 15) == 0;
    for (u64 start = warp_queue * 512ull + lane * 16; start < bytes; start += 4 * stride) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        u64 offset = start + u * stride;
        if (offset >= bytes) continue;
        v[u] = aligned && offset + 16 <= bytes
                   ? *(const uint4*)(from + offset)
                   : load_partial(from + offset, bytes_left(bytes, offset));
      }
#pragma unroll
      for (int u = 0; u < 4; u++) {
        u64 offset = start + u * stride;
        if (offset >= bytes) continue;
        if (aligned && offset + 16 <= bytes)
          *(uint4*)(to + offset) = v[u];
        else
          store_partial(to + offset, v[u], bytes_left(bytes, offset));
      }
    }
  }
}

#if BULK
__device__ __forceinline__ void send_bulk(const P2pArgs& x, const PeerQueue& q, u32 block);
__device__ __forceinline__ void recv_bulk(const P2pArgs& x, const PeerQueue& q, u32 block);
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    p2p(const __grid_constant__ P2pArgs x) {
  u32 block = blockIdx.x - x.bulk, blocks = gridDim.x - x.bulk;
  // neighbouring warps on different multiprocessors
  u32 warp = threadIdx.x / 32 * blocks + block, lane = threadIdx.x % 32;
  wait_previous_grid();
  if (lane == 0) tags[threadIdx.x / 32] = 0;
  const PeerQueue* queues = (const PeerQueue*)x.payload;
  for (u32 i = 0; i < x.nqueues; i++) {
    const PeerQueue& q = queues[i];
#if BULK
    if (blockIdx.x < x.bulk || q.kind >= TO_BULK) {
      if (q.kind < TO_BULK || blockIdx.x < q.first_worker ||
          blockIdx.x - q.first_worker >= q.warp_queues)
        continue;
      if (q.kind == TO_BULK)
        send_bulk(x, q, blockIdx.x - q.first_worker);
      else
        recv_bulk(x, q, blockIdx.x - q.first_worker);
      return;
    }
#endif
    if (warp < q.first_worker || warp - q.first_worker >= q.warp_queues) continue;
    u32 warp_queue = warp - q.first_worker;
    if (q.kind == TO_PEER) {
      send_warp_queue(x, q, warp_queue, lane);  // draws the number itself
      return;
    }
    // only warp queue 0 sends headers
    if (warp_queue == 0 && x.drawing_warps && !begin_message_op(x, draw_op_number(x, lane), lane))
      return;
    if (q.kind == FROM_PEER)
      recv_warp_queue(x, q, warp_queue, lane);
    else
      copy_to_self(x, q, warp_queue, lane);
    return;
  }
}
