// Packets: 16 bytes that carry their own arrival flag, the buffer they lie in, and the operation's
// work. The kernels are in single_tile.cuh, fanout.cuh, tiled.cuh, double_buffered.cuh, ring.cuh,
// chain.cuh and tree.cuh.
//
// A packet is written by one 16-byte store. Memory that awaits packets holds ones. There are three
// framings:
//   FRAME_WORD  16 bytes of floats. Every word (for float64: every pair of words) is its own flag:
//               all ones is a NaN, and a user's NaN with these bits is replaced by another NaN
//               (Lamport buffers; FlashInfer and TensorRT-LLM use -0.0).
//   FRAME_MASK  16 bytes of any data. Words are xored with a number derived from the launch number
//               and their position, so ones rarely result, whatever the data; where they do, ESCAPE
//               is sent instead, and two side packets per warp tell which words it stands for.
//               Every word is its own flag here as well: the whole wire carries data, and paths
//               need to keep only 4 bytes together, while NCCL's LL128 (src/device/prims_ll128.h)
//               spends a sixteenth on flags and needs NVLink. All conditions on packets are uniform
//               within a warp.
//   FRAME_PAIR  8 bytes of data and two zero words as flags (NCCL's LL, src/device/prims_ll.h).
// All framings leave the memory full of ones, so they share it.
//
// Memory ordering: a packet is its own flag, so no fence separates data from flag. Stores of a rank
// need no order among each other.
//
// Reuse of memory: the packet buffer has two halves, used by launches in turn. A rank that begins
// launch e + 2 has finished e + 1, for which it needed packets that this rank sent in e + 1, hence
// after this rank's launch e ended and all its packets of e were read and cleared. So no rank
// writes into a packet that has not been cleared, and no acknowledgement is needed. A launch larger
// than a half reuses its slots; each kernel states when (docs/design/kernels.md).
//
// The launch number is in device memory, so captured launches can be replayed. All blocks read it
// when they begin; a ticket tells which block was the last to read it, and that block advances it.

#define EMPTY 0xffffffffu
#define EMPTY_WORD 0xffffffffffffffffull
#define ESCAPE 0xfffffffeu

__device__ __forceinline__ bool has_arrived(const uint4& p) {
#if defined(FRAME_PAIR)
  return p.y != EMPTY && p.w != EMPTY;
#elif defined(FRAME_WORD) && defined(TYPE_FLOAT64)
  return (p.x & p.y) != EMPTY && (p.z & p.w) != EMPTY;
#else
  return p.x != EMPTY && p.y != EMPTY && p.z != EMPTY && p.w != EMPTY;
#endif
}

struct Geometry {
  u64 launch;      // its number
  u64 half;        // byte offset of the buffer half of this launch from a region's base
  u32 tile;        // packets that one source sends to one rank per tile
  u32 run_stride;  // packets from one run to the next: the tile, and with FRAME_MASK two side
                   // packets for each 32
  u32 mask_key;    // of FRAME_MASK
  u32 first;  // this thread's first packet in a tile; the next ones follow at ``stride``, so a warp
              // accesses neighbours
  u32 stride;
  u32 warp, warps;  // index of this warp in the launch, and their number
};

__device__ __forceinline__ u64 load_launch_number(const Args& a) {
  return load_word((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH);
}

__device__ __forceinline__ void set_launch(Geometry& g, u64 number) {
  g.launch = number;
  g.half = PACKETS_OFFSET + (number & 1) * HALF_BYTES;
  g.mask_key = (u32)number * 0x85ebca6bu + 0x01234567u;
}

// A gated launch does nothing unless the kernel before it has opened the gate, which it does on all
// ranks or on none (row_exchange.cuh). It then counts as no launch.
#if GATED
#define END_IF_GATED(a) \
  if (load_word((u64*)((a).own + STATE_OFFSET) + STATE_GATE) == 0) return
#else
#define END_IF_GATED(a)
#endif

// Distribute the packets of a tile over the threads of all blocks.
__device__ __forceinline__ Geometry make_geometry() {
  Geometry g;
  g.stride = 32;
  g.warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
  g.warps = gridDim.x * THREADS / 32;
  g.first = g.warp * 32 * UNROLL + threadIdx.x % 32;
  g.tile = g.warps * 32 * UNROLL;
#if defined(FRAME_MASK)
  g.run_stride = g.tile + g.tile / 16;
#else
  g.run_stride = g.tile;
#endif
  return g;
}

__device__ __forceinline__ Geometry begin_launch(const Args& a) {
  Geometry g = make_geometry();
  set_launch(g, load_launch_number(a));
  return g;
}

// Block 0 publishes what this rank runs and loads the peers' records of the launch before: those of
// this launch may not have arrived yet.
struct PeerOp {
  uint4 reported;
  u32 signature;
};
__device__ __forceinline__ PeerOp publish_op(const Args& a, const Geometry& g) {
  PeerOp peer_op = {{0, 0, 0, 0}, 0};
  u32 launch = (u32)g.launch + 1, t = threadIdx.x;
  if (blockIdx.x != 0 || t >= RANKS) return peer_op;
  if (t == a.rank) {
    *own_op_word(a.own, launch) = op_word(launch, (u32)a.signature);
  } else {
    store_packet(
        op_record(a.outbox[t], a.rank, launch),
        make_uint4(launch, (u32)a.signature, 0, needs_word(launch, (u32)(a.signature >> 32))));
    peer_op.reported = load_packet(op_record(a.inbox[t], t, launch - 1));
    peer_op.signature = (u32)load_word(own_op_word(a.own, launch - 1));
  }
  return peer_op;
}
__device__ __forceinline__ void compare_ops(const Args& a, const Geometry& g,
                                            const PeerOp& peer_op) {
  u32 before = (u32)g.launch;
  if (before != 0 && peer_op.reported.x == before && peer_op.reported.y != peer_op.signature)
    report(a.host, ERROR_MISMATCH, threadIdx.x, AWAIT_ARRIVAL, before, peer_op.signature);
}

// Take a ticket; called once by all threads of a block. The barrier consumes a bit computed from
// the launch number, so every thread has read it before it may be advanced. No fence: it would wait
// for the packets sent, a round trip over NVLink. Thread 0 looks at its ticket only at the end
// (``advance_launch``).
__device__ __forceinline__ u32 take_ticket(const Args& a, const Geometry& g) {
  u32 ticket = 0;
  __syncthreads_or(g.launch == EMPTY_WORD);
  if (threadIdx.x == 0)
    ticket = atomic_inc_wrap((u32*)(a.own + STATE_OFFSET) + 2 * STATE_TICKET, gridDim.x - 1);
  return ticket;
}

// The block with the last ticket advances the launch number. ``launches``: number of launches that
// this one counts for (double_buffered.cuh).
__device__ __forceinline__ void advance_launch(const Args& a, u32 ticket, u32 launches = 1) {
  if (threadIdx.x == 0 && ticket == gridDim.x - 1)
    atomic_add((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH, launches);
}

// Address of packet ``i`` of a run. A half consists of runs; each holds the packets of a tile from
// one source.
__device__ __forceinline__ uint4* packet_at(const Geometry& g, char* region, u32 run, u32 i) {
  return (uint4*)(region + g.half) + (u64)run * g.run_stride + i;
}

__device__ __forceinline__ void clear_packet(uint4* q) {
  store_unordered(q, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY));
}

// Wait until a packet that this thread cleared is cleared in L2, where peers' stores arrive, that
// is, until loads return ones. A fence would do as well but seems to wait for all stores of the
// multiprocessor, including those queued for NVLink: 328 GB/s instead of 348.
__device__ __forceinline__ void await_cleared(const Args& a, SpinWait& spin, const uint4* q,
                                              uint4 p) {
  spin.polls = 0;
  while ((p.x & p.y & p.z & p.w) != EMPTY) {
    if (check_abort(a, spin, a.rank, AWAIT_PACKET)) break;
    p = load_packet(q);
  }
}

// ---- encoding of packets. ``i`` is the vector's number, equal at sender and receiver.

__device__ __forceinline__ u32 replace_empty_nan(u32 w) { return w == EMPTY ? 0x7fffffffu : w; }

// 0x9e3779b1 is odd: each data word is masked to ones at only one position in 2^32.
__device__ __forceinline__ u32 mask_word(const Geometry& g, u64 i, u32 word) {
  return ((u32)i * 4u + word) * 0x9e3779b1u ^ g.mask_key;
}

__device__ __forceinline__ uint4 encode_packet(const Geometry& g, u64 i, const Vec& v) {
#if defined(FRAME_PAIR)
  return make_uint4(v.w[0], 0u, v.w[1], 0u);
#elif defined(FRAME_MASK)
  return make_uint4(v.w[0] ^ mask_word(g, i, 0), v.w[1] ^ mask_word(g, i, 1),
                    v.w[2] ^ mask_word(g, i, 2), v.w[3] ^ mask_word(g, i, 3));
#elif defined(TYPE_FLOAT64)
  return make_uint4(v.w[0], (v.w[0] & v.w[1]) == EMPTY ? 0x7fffffffu : v.w[1], v.w[2],
                    (v.w[2] & v.w[3]) == EMPTY ? 0x7fffffffu : v.w[3]);
#else
  return make_uint4(replace_empty_nan(v.w[0]), replace_empty_nan(v.w[1]), replace_empty_nan(v.w[2]),
                    replace_empty_nan(v.w[3]));
#endif
}

__device__ __forceinline__ Vec decode_packet(const Geometry& g, u64 i, const uint4& p) {
  Vec v;
#if defined(FRAME_PAIR)
  v.w[0] = p.x;
  v.w[1] = p.z;
#elif defined(FRAME_MASK)
  v.w[0] = p.x ^ mask_word(g, i, 0);
  v.w[1] = p.y ^ mask_word(g, i, 1);
  v.w[2] = p.z ^ mask_word(g, i, 2);
  v.w[3] = p.w ^ mask_word(g, i, 3);
#else
  v.w[0] = p.x;
  v.w[1] = p.y;
  v.w[2] = p.z;
  v.w[3] = p.w;
#endif
  return v;
}

#if defined(FRAME_MASK)
// The two side packets for a warp's packets of a tile; ``q`` is the address of packet
// ``tile_index``.
__device__ __forceinline__ uint4* side_packets(const Geometry& g, uint4* q, u32 tile_index) {
  return q - tile_index + g.tile + tile_index / 32 * 2;
}

// Rarely called, by whole warps: send words that are ones or ESCAPE as ESCAPE, and in the side
// packets which of them are ones.
__device__ __noinline__ uint4 escape(uint4 p, uint4* side) {
  u32 x = __ballot_sync(WHOLE_WARP, p.x == EMPTY), y = __ballot_sync(WHOLE_WARP, p.y == EMPTY);
  u32 z = __ballot_sync(WHOLE_WARP, p.z == EMPTY), w = __ballot_sync(WHOLE_WARP, p.w == EMPTY);
  u32 lane = threadIdx.x % 32;
  if (lane < 2)
    store_packet(side + lane, lane == 0 ? make_uint4(x, 0u, y, 0u) : make_uint4(z, 0u, w, 0u));
  return make_uint4(p.x < ESCAPE ? p.x : ESCAPE, p.y < ESCAPE ? p.y : ESCAPE,
                    p.z < ESCAPE ? p.z : ESCAPE, p.w < ESCAPE ? p.w : ESCAPE);
}

__device__ __forceinline__ bool needs_escape(const uint4& p) {
  return p.x >= ESCAPE || p.y >= ESCAPE || p.z >= ESCAPE || p.w >= ESCAPE;
}

// Rarely called, by whole warps: inverse of ``escape``.
__device__ __noinline__ uint4 unescape(const Args& a, SpinWait& spin, uint4 p, uint4* side, u32 src,
                                       u32 awaited) {
  u32 lane = threadIdx.x % 32;
  uint4 reported = make_uint4(0, 0, 0, 0);
  if (lane < 2) {
    reported = load_packet(side + lane);
    spin.polls = 0;
    while (reported.y == EMPTY || reported.w == EMPTY) {
      if (check_abort(a, spin, src, awaited)) break;
      reported = load_packet(side + lane);
    }
    clear_packet(side + lane);
    await_cleared(a, spin, side + lane, load_packet(side + lane));
  }
  u32 x = __shfl_sync(WHOLE_WARP, reported.x, 0), y = __shfl_sync(WHOLE_WARP, reported.z, 0);
  u32 z = __shfl_sync(WHOLE_WARP, reported.x, 1), w = __shfl_sync(WHOLE_WARP, reported.z, 1);
  return make_uint4(p.x | (x >> lane & 1), p.y | (y >> lane & 1), p.z | (z >> lane & 1),
                    p.w | (w >> lane & 1));
}
#endif

// Send ``p`` to ``q``, the address of packet ``tile_index`` of a tile.
__device__ __forceinline__ void send_packet(const Geometry& g, uint4* q, u32 tile_index, uint4 p) {
#if defined(FRAME_MASK)
  if (__any_sync(WHOLE_WARP, needs_escape(p))) p = escape(p, side_packets(g, q, tile_index));
#endif
  store_packet(q, p);
}

// Decode the packet ``p``, which has arrived at ``q``, and clear it.
__device__ __forceinline__ Vec consume_packet(const Args& a, const Geometry& g, SpinWait& spin,
                                              uint4* q, u32 tile_index, u64 i, uint4 p, u32 src,
                                              u32 awaited) {
#if defined(FRAME_MASK)
  if (__any_sync(WHOLE_WARP, needs_escape(p)))
    p = unescape(a, spin, p, side_packets(g, q, tile_index), src, awaited);
#endif
  clear_packet(q);
  return decode_packet(g, i, p);
}

// Wait for the packet at ``q``; ``p`` is the value already loaded from there.
__device__ __forceinline__ void await_packet(const Args& a, SpinWait& spin, const uint4* q,
                                             uint4& p, u32 src, u32 awaited) {
  spin.polls = 0;
  while (!has_arrived(p)) {
    if (check_abort(a, spin, src, awaited)) break;
    p = load_packet(q);
  }
}

// Wait for the packet at ``q``, decode and clear it.
__device__ __forceinline__ Vec recv_packet(const Args& a, const Geometry& g, SpinWait& spin,
                                           uint4* q, u32 tile_index, u64 i, uint4 p, u32 src,
                                           u32 awaited) {
  await_packet(a, spin, q, p, src, awaited);
  return consume_packet(a, g, spin, q, tile_index, i, p, src, awaited);
}

// ---- the operation: a block, or one chunk of it per rank, cut into tiles; each thread has UNROLL
// packets of a tile

struct Workload {
  const T* in;
  T* out;
  Index count, limit;  // elements of a block; packets of a chunk (two_shot, ring) or of the block
  Index shift;  // packets by which the order within a chunk is rotated from one chunk to the next
  u32 tiles;
  bool aligned, reuses_slots;
};

#ifndef SHIFT_MIN
#define SHIFT_MIN (1u << 20)
#endif
#if defined(MODE_TWO_SHOT) || defined(MODE_RING)
#define CHUNKED 1  // the block is cut into one chunk per rank
#else
#define CHUNKED 0
#endif
__device__ __forceinline__ Workload work_of(const Args& a, const Geometry& g) {
  Workload w;
  w.in = (const T*)a.in;
  w.out = (T*)a.out;
  w.count = (Index)a.count;
  u64 odd = (u64)a.in | (u64)a.out;
#if defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_GATHER) || defined(MODE_ALL_TO_ALL)
  odd |= a.count * sizeof(T);
#endif
  w.aligned = (odd & (VEC_BYTES - 1)) == 0;
  w.limit = vectors_of(w.count * (Index)sizeof(T));
#if CHUNKED
  w.limit = (w.limit + RANKS - 1) / RANKS;
#if defined(FRAME_MASK)
  w.limit = (w.limit + 31) & ~(Index)31;
#endif
  w.shift = w.limit >= SHIFT_MIN ? (w.limit * 5 / (16 * RANKS) + 2648) & ~(Index)7 : 0;
#endif
#if DOUBLE_BUFFERED
  w.tiles = (w.limit + g.tile - 1) / g.tile;
  // equal tiles of whole warps
  w.limit = ((w.limit + w.tiles - 1) / w.tiles + 32 * UNROLL - 1) / (32 * UNROLL) * (32 * UNROLL) *
            w.tiles;
  w.reuses_slots = false;
#elif SINGLE_TILE
  w.tiles = 1;
  w.reuses_slots = false;
#else
  w.tiles = (u32)((w.limit + g.tile - 1) / g.tile);
  w.reuses_slots = w.tiles > a.nslots;
#endif
  return w;
}

#if CHUNKED
// Vector of the block that is packet ``i`` of chunk ``q``. Large operations traverse their chunks
// from different starting points: addresses of all chunks that differ only by a power of two are
// slow.
__device__ __forceinline__ Index chunk_vector(const Workload& w, u32 q, Index i) {
  i += q * w.shift;
  return q * w.limit + (i >= w.limit ? i - w.limit : i);
}
#endif

// Own vector sent to rank ``dst`` in packet ``i``.
__device__ __forceinline__ Vec outgoing_vec(const Args& a, const Workload& w, u32 dst, Index i) {
#if CHUNKED
  return own_vec(a, load_vec(w.in, chunk_vector(w, dst, i), w.count, w.aligned));
#elif defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_TO_ALL)
  return own_vec(a, load_vec(w.in + dst * w.count, i, w.count, w.aligned));
#else
  return own_vec(a, load_vec(w.in, i, w.count, w.aligned));
#endif
}
