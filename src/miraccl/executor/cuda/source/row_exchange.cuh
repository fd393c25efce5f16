// Sum of arrays that are mostly zero, over the GPUs of a host: ``row_send`` scans this rank's array
// and stores rows with any bit set into every peer's workspace, ``row_reduce`` waits for the peers
// and sums the union of all ranks' rows. Schedule: ``row_schedules.build_one_shot``, executor:
// executor/cuda/row_exchange.py. The host takes no part: numbers of rows stay on the GPUs.
//
// A workspace (layout.SPARSE_*) has an index and a list of rows for each rank. A word of an index
// belongs to a chunk of CHUNK_ROWS rows: a bit for each row that the rank has sent, and above
// those the position of the chunk's first row in the list. Warps draw positions from a counter, so
// lists are in no order; the sum is in the order of ranks all the same. Words of zero are not
// stored: ``row_reduce`` clears what it has read.
//
// Memory ordering: ``row_send`` only stores. ``row_reduce`` follows it in the stream; its block 0
// fences and stores an op record to every peer, with the number of rows. A rank that has seen it,
// and fenced, may read what the peer has sent. The last block of ``row_reduce`` fences and tells
// the peers that this rank's workspace may be written again, for which their next ``row_send``
// waits: one workspace is enough.
//
// A rank that would send more than ``limit`` rows, or of whose sample too many rows have a bit set,
// stops. All ranks see that in the numbers of rows, so all open the gate (packets.cuh) for the dense
// sum, the next launch, or none.

struct RowExchange {  // row_exchange.pack_args
  Args a;             // count: elements of T in the array
  u64 limit;          // rows that a rank may send
  u64 index_bytes;    // of one rank's index
  u64 list_bytes;     // of one rank's rows
  u64 sample_limit;   // rows of the array, by the sample, from which the sum is dense
  char* box[RANKS];   // workspaces
};
static_assert(sizeof(RowExchange) == ROW_EXCHANGE_BYTES, "layout.row_exchange_bytes");

#define CHUNK_ROWS (SPARSE_CHUNK_BYTES / SPARSE_ROW_BYTES)
#define CHUNK_VECTORS (SPARSE_CHUNK_BYTES / VEC_BYTES)
#define ROW_VECTORS (SPARSE_ROW_BYTES / VEC_BYTES)
#define LANE_VECTORS (CHUNK_VECTORS / 32)
#define CHUNK_BITS ((1u << CHUNK_ROWS) - 1)
static_assert(ROW_VECTORS == 16 && CHUNK_ROWS == 16, "half a warp handles a row");

__device__ __forceinline__ u64* box_word(const RowExchange& x, u32 rank, u32 offset) {
  return (u64*)(x.box[rank] + offset);
}
// Word of a chunk in the index of rank ``from`` in the workspace of ``rank``.
__device__ __forceinline__ u64* index_word(const RowExchange& x, u32 rank, u32 from, u64 chunk) {
  return (u64*)(x.box[rank] + SPARSE_HEAD_BYTES + from * x.index_bytes) + chunk;
}
// Row of rank ``from`` in the workspace of another rank, which has no list for its own rows.
__device__ __forceinline__ char* sent_row(const RowExchange& x, u32 rank, u32 from, u64 position) {
  return x.box[rank] + SPARSE_HEAD_BYTES + RANKS * x.index_bytes +
         (from < rank ? from : from - 1) * x.list_bytes + position * SPARSE_ROW_BYTES;
}
__device__ __forceinline__ u64 count_vectors(const RowExchange& x) {
  return (x.a.count + ELEMS - 1) / ELEMS;
}

#if defined(KERNEL_ROW_SEND)
// Wait until all peers have read what this rank sent in the operation before. Return true if a
// wait was aborted.
__device__ __forceinline__ bool await_workspaces(const RowExchange& x) {
  const Args& a = x.a;
  u32 peer = threadIdx.x;
  bool failed = false;
  if (peer < RANKS && peer != a.rank) {
    SpinWait spin = {0, 0, 0};
    u64 finished = load_word(box_word(x, a.rank, SPARSE_FINISHED_OFFSET));
    const u64* theirs = box_word(x, a.rank, SPARSE_PEERS_OFFSET + peer * WORD_STRIDE);
    while (!failed && load_acquire(theirs) < finished)
      failed = check_abort(a, spin, peer, AWAIT_CREDIT);
  }
  return __syncthreads_or(failed);
}

__device__ __forceinline__ bool any_bit(const Vec& v) {
  return (v.w[0] | v.w[1] | v.w[2] | v.w[3]) != 0;
}

// ---- sample: before they send anything, warps count the rows of one chunk each, at places spread
// over the array, and add them up in a word: chunks above, rows below. Without it two GPUs sent half
// of 256 MiB, 380 us, before a rank saw that all of it is set.

#define SAMPLE_SHARE 16  // chunks of the array for one of the sample
#define MIN_SAMPLES 64    // fewer say too little
#define SAMPLE_SHIFT 32

__device__ __forceinline__ u64 count_samples(u64 chunks) {
  u64 samples = chunks / SAMPLE_SHARE < warps_of_grid() ? chunks / SAMPLE_SHARE : warps_of_grid();
  return samples < MIN_SAMPLES ? 0 : samples;
}
// Chunk that a warp samples. The order in which warps come is that of the array, so their chunks
// are not: the first eighth of them speaks for all.
__device__ __forceinline__ u64 sampled_chunk(u64 chunks) {
  return (u64)((u32)warp_of_grid() * 0x9e3779b1u) * chunks >> 32;
}
// Return true if the sample has an eighth of its chunks and too many rows.
__device__ __forceinline__ bool is_too_dense(const RowExchange& x, u64 samples, u64 chunks) {
  u64 word = load_word(box_word(x, x.a.rank, SPARSE_SAMPLED_OFFSET));
  u64 sampled = word >> SAMPLE_SHIFT, rows = word & ((1ull << SAMPLE_SHIFT) - 1);
  return sampled > samples / 8 && rows * chunks > x.sample_limit * sampled;
}

// Load this lane's vectors of a chunk, each 32 after the one before; beyond the end they are zero.
__device__ __forceinline__ void load_chunk(const RowExchange& x, u64 first, bool aligned,
                                           Vec (&v)[LANE_VECTORS]) {
  const T* in = (const T*)x.a.in;
  if (aligned && (first / CHUNK_VECTORS + 1) * CHUNK_VECTORS * ELEMS <= x.a.count) {
#pragma unroll
    for (int j = 0; j < LANE_VECTORS; j++) {
      uint4 q = load_once((const uint4*)in + first + 32 * j);
      v[j].w[0] = q.x;
      v[j].w[1] = q.y;
      v[j].w[2] = q.z;
      v[j].w[3] = q.w;
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < LANE_VECTORS; j++)
    v[j] = load_elements(in, (first + 32 * j) * ELEMS, x.a.count);
}

// Store the rows of a chunk in which a bit is set to all peers. Return false if there are too many.
__device__ __forceinline__ bool send_rows(const RowExchange& x, u64 chunk, u32 lane, u32 bits,
                                          const Vec (&v)[LANE_VECTORS]) {
  const Args& a = x.a;
  u64 position = 0;
  u32 rows = count_bits(bits);
  if (lane == 0) position = atomic_add_return(box_word(x, a.rank, SPARSE_SENT_OFFSET), rows);
  position = __shfl_sync(WHOLE_WARP, position, 0);
  if (position + rows > x.limit) return false;
  if (lane < RANKS)
    store_word(index_word(x, lane, a.rank, chunk), position << CHUNK_ROWS | bits);
#pragma unroll
  for (int j = 0; j < LANE_VECTORS; j++) {
    u32 bit = 1u << (2 * j + lane / ROW_VECTORS);
    if (!(bits & bit)) continue;
    uint4 q = make_uint4(v[j].w[0], v[j].w[1], v[j].w[2], v[j].w[3]);
    u64 row = position + count_bits(bits & (bit - 1));
    for (u32 d = 1; d < RANKS; d++) {
      u32 peer = (a.rank + d) % RANKS;
      store_unordered((uint4*)sent_row(x, peer, a.rank, row) + lane % ROW_VECTORS, q);
    }
  }
  return true;
}

// Load a chunk and return the bits of its rows.
__device__ __forceinline__ u32 scan_chunk(const RowExchange& x, u64 chunk, u32 lane, bool aligned,
                                          Vec (&v)[LANE_VECTORS]) {
  load_chunk(x, chunk * CHUNK_VECTORS + lane, aligned, v);
  bool held[LANE_VECTORS], any = false;
#pragma unroll
  for (int j = 0; j < LANE_VECTORS; j++) {
    held[j] = any_bit(v[j]);
    // A factor may make bits or clear them. Rows with any bit before are sent, so that others need
    // not be written; -0.0 is a bit after.
    v[j] = own_vec(x.a, v[j]);
#if defined(OP_PREMUL_SUM)
    held[j] |= any_bit(v[j]);
#endif
    any |= held[j];
  }
  if (!__any_sync(WHOLE_WARP, any)) return 0;
  u32 bits = 0;
#pragma unroll
  for (int j = 0; j < LANE_VECTORS; j++) {
    u32 lanes = __ballot_sync(WHOLE_WARP, held[j]);
    bits |= (u32)((lanes & 0xffffu) != 0) << (2 * j) | (u32)(lanes >> 16 != 0) << (2 * j + 1);
  }
  return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_send(const __grid_constant__ RowExchange x) {
  if (await_workspaces(x)) return;
  u32 lane = threadIdx.x % 32;
  bool aligned = (u64)x.a.in % VEC_BYTES == 0;
  u64 chunks = (count_vectors(x) + CHUNK_VECTORS - 1) / CHUNK_VECTORS;
  u64 samples = count_samples(chunks);
  bool counts = warp_of_grid() < samples;
  u64 chunk = warp_of_grid();
  while (counts || chunk < chunks) {
    Vec v[LANE_VECTORS];
    u32 bits = scan_chunk(x, counts ? sampled_chunk(chunks) : chunk, lane, aligned, v);
    if (counts) {
      if (lane == 0)
        atomic_add(box_word(x, x.a.rank, SPARSE_SAMPLED_OFFSET),
                   1ull << SAMPLE_SHIFT | count_bits(bits));
      counts = false;
      continue;
    }
    chunk += warps_of_grid();
    if (bits == 0) continue;
    // lanes may have read the word at different times
    if (samples != 0 && __any_sync(WHOLE_WARP, is_too_dense(x, samples, chunks))) {
      if (lane == 0) atomic_add(box_word(x, x.a.rank, SPARSE_SENT_OFFSET), x.limit + 1);
      return;
    }
    if (!send_rows(x, chunk - warps_of_grid(), lane, bits, v)) return;
  }
}
#endif

#if defined(KERNEL_ROW_REDUCE)
struct RowCounts {  // shared memory
  u32 sent[RANKS];
  u64 finished;  // operations, after this one
  bool is_last;  // block
};

// Publish this rank's op record and wait for those of the peers, with the rows they have sent.
// Return true on all threads if a wait was aborted or a peer runs another operation.
__device__ __forceinline__ bool exchange_counts(const RowExchange& x, u32 launch, RowCounts& e) {
  const Args& a = x.a;
  u32 t = threadIdx.x, all = 1u << NEEDS_ALL_SHIFT;
  u64 sent = load_word(box_word(x, a.rank, SPARSE_SENT_OFFSET));
  u32 own = sent < 0xffffffffu ? (u32)sent : 0xffffffffu;
  bool failed = false;
  if (blockIdx.x == 0 && t < RANKS) {
    fence();  // what ``row_send`` has stored is visible before the record
    if (t == a.rank)
      *own_op_word(a.own, launch) = op_word(launch, (u32)a.signature);
    else
      store_packet(op_record(a.outbox[t], a.rank, launch),
                   make_uint4(launch, (u32)a.signature, own, needs_word(launch, all)));
  }
  if (t == a.rank) e.sent[t] = own;
  if (t < RANKS && t != a.rank) {
    SpinWait spin = {0, 0, launch};
    const uint4* address = op_record(a.inbox[t], t, launch);
    uint4 reported = load_packet(address);
    // the halves of a record may arrive separately
    while (!failed && (reported.x != launch || reported.w != needs_word(launch, all))) {
      failed = check_abort(a, spin, t, AWAIT_ARRIVAL);
      reported = load_packet(address);
    }
    if (!failed && reported.y != (u32)a.signature) {
      report(a.host, ERROR_MISMATCH, t, AWAIT_ARRIVAL, launch, (u32)a.signature);
      failed = true;
    }
    e.sent[t] = reported.z;
    fence();
  }
  return __syncthreads_or(failed);
}

// Vectors of a lane in flight, one of each rank, and those of several rows.
#define REDUCE_ROWS (RANKS <= 2 ? 4 : RANKS <= 4 ? 2 : 1)

// Sum a vector of each of the rows that ``bit`` names, 0: none, over all ranks. A row that a rank
// has not sent is zero there and takes part: -0.0 + 0.0 is 0.0, as in the sum of whole arrays.
// WHOLE: input and output are aligned, and all vectors of the chunk whole. The other case is apart,
// because its calls would keep ``v`` in local memory, and loads would wait for each other.
template <int U, bool WHOLE>
__device__ __forceinline__ void reduce_vectors(const RowExchange& x, u64 chunk, const u32 (&bit)[U],
                                               u32 lane, const u64 (&words)[RANKS]) {
  const Args& a = x.a;
  const T* in = (const T*)a.in;
  T* out = (T*)a.out;
  u64 first = chunk * CHUNK_VECTORS + lane % ROW_VECTORS, i[U];
  Vec v[U][RANKS];
#pragma unroll
  for (int u = 0; u < U; u++) {
    i[u] = first + count_bits(bit[u] - 1) * ROW_VECTORS;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      u32 bits = (u32)words[r] & CHUNK_BITS;
      u64 row = (words[r] >> CHUNK_ROWS) + count_bits(bits & (bit[u] - 1));
      bool held = (bits & bit[u]) != 0, own = r == a.rank;
      const uint4* from = own ? (const uint4*)in + i[u]
                              : (const uint4*)sent_row(x, a.rank, r, row) + lane % ROW_VECTORS;
      uint4 q = load_if(held && (WHOLE || !own), from);
      v[u][r].w[0] = q.x;
      v[u][r].w[1] = q.y;
      v[u][r].w[2] = q.z;
      v[u][r].w[3] = q.w;
      if (!WHOLE && held && own) v[u][r] = load_elements(in, i[u] * ELEMS, a.count);
    }
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    if (bit[u] == 0 || i[u] * ELEMS >= a.count) continue;
    Accumulator sum;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      // not of a row that this rank has not sent: a factor below zero would make -0.0
      if (r == a.rank && ((u32)words[r] & bit[u])) v[u][r] = own_vec(a, v[u][r]);
      if (r == 0)
        sum.init(v[u][r]);
      else
        sum.add(v[u][r]);
    }
    Vec result = sum.result();
    if (WHOLE)
      store_unordered((uint4*)out + i[u],
                      make_uint4(result.w[0], result.w[1], result.w[2], result.w[3]));
    else
      store_vec(out, i[u], a.count, (u64)out % VEC_BYTES == 0, result);
  }
}

__device__ __forceinline__ u32 take_lowest(u32& bits) {
  u32 lowest = bits & (~bits + 1);
  bits ^= lowest;
  return lowest;
}
// Sum the rows of a chunk that ``bits`` names; half a warp handles a row.
__device__ __forceinline__ void reduce_rows(const RowExchange& x, u64 chunk, u32 bits, u32 lane,
                                            const u64 (&words)[RANKS]) {
  bool whole = ((u64)x.a.in | (u64)x.a.out) % VEC_BYTES == 0 &&
               (chunk + 1) * CHUNK_VECTORS * ELEMS <= x.a.count;
  while (bits) {
    u32 bit[REDUCE_ROWS];
#pragma unroll
    for (int u = 0; u < REDUCE_ROWS; u++) {
      u32 first = take_lowest(bits), second = take_lowest(bits);
      bit[u] = lane < ROW_VECTORS ? first : second;
    }
    if (whole) {
      reduce_vectors<REDUCE_ROWS, true>(x, chunk, bit, lane, words);
      continue;
    }
    for (int u = 0; u < REDUCE_ROWS; u++) {
      u32 one[1] = {bit[u]};
      reduce_vectors<1, false>(x, chunk, one, lane, words);
    }
  }
}

// Handle all chunks: a warp reads 32 words of each index at a time, which belong to chunks far
// apart, so that rows next to each other are the work of many warps. Without ``sums`` the words
// are only cleared. Return the rows that this lane has seen in the union.
__device__ __forceinline__ u64 reduce_chunks(const RowExchange& x, bool sums) {
  const Args& a = x.a;
  u32 lane = threadIdx.x % 32;
  u64 chunks = (count_vectors(x) + CHUNK_VECTORS - 1) / CHUNK_VECTORS, stride = warps_of_grid();
  bool fills = a.in != a.out;  // rows that no rank has sent are zero in the output
  u64 seen = 0;
  for (u64 first = warp_of_grid(); first < chunks; first += 32 * stride) {
    u64 own_chunk = first + lane * stride, words[RANKS];
    u32 own_bits = 0;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++)
      words[r] = own_chunk < chunks ? load_word(index_word(x, a.rank, r, own_chunk)) : 0;
#pragma unroll
    for (u32 r = 0; r < RANKS; r++) {
      if (words[r]) *index_word(x, a.rank, r, own_chunk) = 0;
      own_bits |= (u32)words[r] & CHUNK_BITS;
    }
    if (!sums) continue;
    seen += count_bits(own_bits);
    if (fills && own_chunk < chunks) own_bits = CHUNK_BITS;
    for (u32 left = __ballot_sync(WHOLE_WARP, own_bits != 0); left != 0; left &= left - 1) {
      u32 from = count_bits((left & (~left + 1)) - 1);
      u64 theirs[RANKS];
#pragma unroll
      for (u32 r = 0; r < RANKS; r++) theirs[r] = __shfl_sync(WHOLE_WARP, words[r], from);
      u32 bits = __shfl_sync(WHOLE_WARP, own_bits, from);
      reduce_rows(x, first + from * stride, bits, lane, theirs);
    }
  }
  return seen;
}

// The last block: keep the result for the host, prepare the next operation, free the peers' lists.
__device__ __forceinline__ void finish_exchange(const RowExchange& x, bool sums, RowCounts& e) {
  const Args& a = x.a;
  u32 t = threadIdx.x;
  u64* result = box_word(x, a.rank, SPARSE_RESULT_OFFSET);
  if (t < RANKS) result[3 + t] = e.sent[t];
  if (t == 0) {
    u64* finished = box_word(x, a.rank, SPARSE_FINISHED_OFFSET);
    u64* summed = box_word(x, a.rank, SPARSE_SUMMED_OFFSET);
    e.finished = *finished + 1;
    result[1] = sums;
    result[2] = load_word(summed);
    result[0] = *finished = e.finished;
    *summed = 0;
    *box_word(x, a.rank, SPARSE_SENT_OFFSET) = *box_word(x, a.rank, SPARSE_SAMPLED_OFFSET) = 0;
    *((u64*)(a.own + STATE_OFFSET) + STATE_GATE) = !sums;
    atomic_add((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH, 1);
  }
  __syncthreads();
  fence();  // all blocks have read and cleared what the peers have sent
  if (t < RANKS && t != a.rank)
    store_word(box_word(x, t, SPARSE_PEERS_OFFSET + a.rank * WORD_STRIDE), e.finished);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    row_reduce(const __grid_constant__ RowExchange x) {
  const Args& a = x.a;
  __shared__ RowCounts e;
  u32 t = threadIdx.x;
  if (exchange_counts(x, (u32)load_launch_number(a) + 1, e)) return;
  bool sums = !__syncthreads_or(t < RANKS && e.sent[t] > x.limit);
  u64 seen = reduce_chunks(x, sums);
  if (seen) atomic_add(box_word(x, a.rank, SPARSE_SUMMED_OFFSET), seen);
  __syncthreads();
  if (t == 0) {
    fence();
    e.is_last = atomic_inc_wrap((u32*)box_word(x, a.rank, SPARSE_TICKET_OFFSET), gridDim.x - 1) ==
                gridDim.x - 1;
    fence();
  }
  __syncthreads();
  if (e.is_last) finish_exchange(x, sums, e);
}
#endif
