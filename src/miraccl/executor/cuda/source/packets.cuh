// Packets that tell by themselves whether they have come, and the memory they lie in. The kernels are in once.cuh, fan.cuh, pieces.cuh, parts.cuh, ring.cuh, chain.cuh and tree.cuh.
//
// A packet is 16 bytes, written by one store. Memory that waits for packets is filled with ones. There are three kinds:
//   FRAME_WORD  16 bytes of floats. Every word (for float64: every pair of words) is its own flag: all ones is a NaN, and a NaN of the user's with
//               these bits becomes another NaN (the idea of Lamport buffers: FlashInfer and TensorRT-LLM use -0.0).
//   FRAME_MASK  16 bytes of anything. Words are xored with a number made of the number of the launch and of their place, so that ones hardly ever
//               come out, whatever the data; where they do, ESCAPE is sent instead, and a side packet per warp says which words it stands for.
//               Every word is its own flag here, too: all of the wire carries data, and no path needs to keep more than 4 bytes together, while
//               NCCL's LL128 (src/device/prims_ll128.h) spends a sixteenth on flags and needs NVLink. All conditions about packets are the
//               same for the lanes of a warp.
//   FRAME_PAIR  8 bytes of data and two words of zeros as flags (NCCL's LL, src/device/prims_ll.h).
// All leave the memory full of ones again, so they share it.
//
// Who may write where: memory is two banks, used by launches in turn. A rank that begins launch e + 2 has finished e + 1, for which it
// needed packets that this rank sent in e + 1, hence after its own launch e ended and all its packets of e were read and cleared. So
// nobody ever writes into a packet that has not been cleared, without a word of acknowledgement. Within a launch larger than a bank,
// slots are used again; each kernel says when (docs/gpu-kernels.md, "Slots").
//
// The number of the launch is in device memory, so that captured launches can be replayed. All blocks read it when they begin; a ticket
// tells which block was last to read, and that one counts it up.

#define EMPTY 0xffffffffu
#define ESCAPE 0xfffffffeu

__device__ __forceinline__ bool arrived(const uint4& p) {
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
  u64 bank;        // bytes from a rank's base to the bank of this launch
  u32 piece;       // packets that one source sends one rank per piece
  u32 room;        // packets of memory for them: with two side packets for each 32, where there are side packets
  u32 key;         // of the masks
  u32 first;       // this thread's first packet in a piece; the others follow at ``stride``: a warp has neighbours only
  u32 stride;
  u32 warp, warps; // this warp's number among those of the launch
};

__device__ __forceinline__ u64 number_of_launch(const Args& a) { return load_word((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH); }

__device__ __forceinline__ void use_number(Geometry& g, u64 number) {
  g.launch = number;
  g.bank = PACKETS_OFFSET + (number & 1) * BANK_BYTES;
  g.key = (u32)number * 0x85ebca6bu + 0x01234567u;
}

// The threads of all blocks share the packets of a piece.
__device__ __forceinline__ Geometry spread() {
  Geometry g;
  g.stride = 32;
  g.warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
  g.warps = gridDim.x * THREADS / 32;
  g.first = g.warp * 32 * UNROLL + threadIdx.x % 32;
  g.piece = g.warps * 32 * UNROLL;
#if defined(FRAME_MASK)
  g.room = g.piece + g.piece / 16;
#else
  g.room = g.piece;
#endif
  return g;
}

__device__ __forceinline__ Geometry begin(const Args& a) {
  Geometry g = spread();
  use_number(g, number_of_launch(a));
  return g;
}

// Block 0 says what it runs and looks at what peers said of the launch before: this one's entries may not have come yet.
struct Past {
  uint4 said;
  u32 signature;
};
__device__ __forceinline__ Past announce(const Args& a, const Geometry& g) {
  Past past = {{0, 0, 0, 0}, 0};
  u32 launch = (u32)g.launch + 1, t = threadIdx.x;
  if (blockIdx.x != 0 || t >= RANKS) return past;
  if (t == a.rank) {
    *note_of(a.own, launch) = noted(launch, (u32)a.signature);
  } else {
    store_packet(board(a.outbox[t], a.rank, launch), make_uint4(launch, (u32)a.signature, 0, need_word(launch, (u32)(a.signature >> 32))));
    past.said = load_packet(board(a.inbox[t], t, launch - 1));
    past.signature = (u32)load_word(note_of(a.own, launch - 1));
  }
  return past;
}
__device__ __forceinline__ void judge(const Args& a, const Geometry& g, const Past& past) {
  u32 before = (u32)g.launch;
  if (before != 0 && past.said.x == before && past.said.y != past.signature) report(a.host, ERROR_MISMATCH, threadIdx.x, WHAT_MEETING, before, past.signature);
}

// Called once by all threads of a block. The barrier takes a bit made of the number of the launch, so every thread has it, and it may change.
// No fence: it would wait for the pushes, a round trip over NVLink. Thread 0 goes on and looks at its ticket at the end (``count_launch``).
__device__ __forceinline__ u32 draw_ticket(const Args& a, const Geometry& g) {
  u32 ticket = 0;
  __syncthreads_or(g.launch == NEVER);
  if (threadIdx.x == 0) ticket = draw((u32*)(a.own + STATE_OFFSET) + 2 * STATE_TICKET, gridDim.x - 1);
  return ticket;
}

// ``launches``: how many this one is, by their numbers (parts.cuh).
__device__ __forceinline__ void count_launch(const Args& a, u32 ticket, u32 launches = 1) {
  if (threadIdx.x == 0 && ticket == gridDim.x - 1) count_up((u64*)(a.own + STATE_OFFSET) + STATE_LAUNCH, launches);
}

// A bank holds runs of packets: a piece from one source fills one. The place of packet ``i`` of a run.
__device__ __forceinline__ uint4* place_in(const Geometry& g, char* box, u32 run, u32 i) { return (uint4*)(box + g.bank) + (u64)run * g.room + i; }

__device__ __forceinline__ void clear_packet(uint4* q) { store_late(q, make_uint4(EMPTY, EMPTY, EMPTY, EMPTY)); }

// Returns when a packet that this thread cleared lies cleared in L2, where peers' stores arrive: what is read there is ones again. A fence would do,
// too, but seems to wait for all stores of the multiprocessor, also those that wait for their turn on NVLink: 328 GB/s instead of 348.
__device__ __forceinline__ void wait_empty(const Args& a, Watch& watch, const uint4* q, uint4 p) {
  watch.spins = 0;
  while ((p.x & p.y & p.z & p.w) != EMPTY) {
    if (give_up(a, watch, a.rank, WHAT_PACKET)) break;
    p = load_packet(q);
  }
}

// ---- packets and what they hold. ``i`` is the number of the vector, the same for who sends and who receives.

__device__ __forceinline__ u32 other_nan(u32 w) { return w == EMPTY ? 0x7fffffffu : w; }

// 0x9e3779b1 is odd: every word of data is masked to ones at one place in 2^32 only.
__device__ __forceinline__ u32 mask_of(const Geometry& g, u64 i, u32 word) { return ((u32)i * 4u + word) * 0x9e3779b1u ^ g.key; }

__device__ __forceinline__ uint4 to_packet(const Geometry& g, u64 i, const Vec& v) {
#if defined(FRAME_PAIR)
  return make_uint4(v.w[0], 0u, v.w[1], 0u);
#elif defined(FRAME_MASK)
  return make_uint4(v.w[0] ^ mask_of(g, i, 0), v.w[1] ^ mask_of(g, i, 1), v.w[2] ^ mask_of(g, i, 2), v.w[3] ^ mask_of(g, i, 3));
#elif defined(TYPE_FLOAT64)
  return make_uint4(v.w[0], (v.w[0] & v.w[1]) == EMPTY ? 0x7fffffffu : v.w[1], v.w[2], (v.w[2] & v.w[3]) == EMPTY ? 0x7fffffffu : v.w[3]);
#else
  return make_uint4(other_nan(v.w[0]), other_nan(v.w[1]), other_nan(v.w[2]), other_nan(v.w[3]));
#endif
}

__device__ __forceinline__ Vec from_packet(const Geometry& g, u64 i, const uint4& p) {
  Vec v;
#if defined(FRAME_PAIR)
  v.w[0] = p.x; v.w[1] = p.z;
#elif defined(FRAME_MASK)
  v.w[0] = p.x ^ mask_of(g, i, 0); v.w[1] = p.y ^ mask_of(g, i, 1); v.w[2] = p.z ^ mask_of(g, i, 2); v.w[3] = p.w ^ mask_of(g, i, 3);
#else
  v.w[0] = p.x; v.w[1] = p.y; v.w[2] = p.z; v.w[3] = p.w;
#endif
  return v;
}

#if defined(FRAME_MASK)
// The two side packets of a warp's packets of a piece; ``q`` is the place of packet ``here`` of the piece.
__device__ __forceinline__ uint4* side_of(const Geometry& g, uint4* q, u32 here) { return q - here + g.piece + here / 32 * 2; }

// Rarely called, by whole warps: words that are ones or ESCAPE are sent as ESCAPE, and which of them are ones in the side packets.
__device__ __noinline__ uint4 escape(uint4 p, uint4* side) {
  u32 x = __ballot_sync(WHOLE_WARP, p.x == EMPTY), y = __ballot_sync(WHOLE_WARP, p.y == EMPTY);
  u32 z = __ballot_sync(WHOLE_WARP, p.z == EMPTY), w = __ballot_sync(WHOLE_WARP, p.w == EMPTY);
  u32 lane = threadIdx.x % 32;
  if (lane < 2) store_packet(side + lane, lane == 0 ? make_uint4(x, 0u, y, 0u) : make_uint4(z, 0u, w, 0u));
  return make_uint4(p.x < ESCAPE ? p.x : ESCAPE, p.y < ESCAPE ? p.y : ESCAPE, p.z < ESCAPE ? p.z : ESCAPE, p.w < ESCAPE ? p.w : ESCAPE);
}

__device__ __forceinline__ bool is_special(const uint4& p) { return p.x >= ESCAPE || p.y >= ESCAPE || p.z >= ESCAPE || p.w >= ESCAPE; }

// Rarely called, by whole warps: what ``escape`` was given.
__device__ __noinline__ uint4 unescape(const Args& a, Watch& watch, uint4 p, uint4* side, u32 src, u32 what) {
  u32 lane = threadIdx.x % 32;
  uint4 said = make_uint4(0, 0, 0, 0);
  if (lane < 2) {
    said = load_packet(side + lane);
    watch.spins = 0;
    while (said.y == EMPTY || said.w == EMPTY) {
      if (give_up(a, watch, src, what)) break;
      said = load_packet(side + lane);
    }
    clear_packet(side + lane);
    wait_empty(a, watch, side + lane, load_packet(side + lane));
  }
  u32 x = __shfl_sync(WHOLE_WARP, said.x, 0), y = __shfl_sync(WHOLE_WARP, said.z, 0);
  u32 z = __shfl_sync(WHOLE_WARP, said.x, 1), w = __shfl_sync(WHOLE_WARP, said.z, 1);
  return make_uint4(p.x | (x >> lane & 1), p.y | (y >> lane & 1), p.z | (z >> lane & 1), p.w | (w >> lane & 1));
}
#endif

// Send ``p`` to ``q``, the place of packet ``here`` of a piece.
__device__ __forceinline__ void push(const Geometry& g, uint4* q, u32 here, uint4 p) {
#if defined(FRAME_MASK)
  if (__any_sync(WHOLE_WARP, is_special(p))) p = escape(p, side_of(g, q, here));
#endif
  store_packet(q, p);
}

// What the packet ``p``, which has come, holds; its place ``q`` is cleared.
__device__ __forceinline__ Vec open_packet(const Args& a, const Geometry& g, Watch& watch, uint4* q, u32 here, u64 i, uint4 p, u32 src, u32 what) {
#if defined(FRAME_MASK)
  if (__any_sync(WHOLE_WARP, is_special(p))) p = unescape(a, watch, p, side_of(g, q, here), src, what);
#endif
  clear_packet(q);
  return from_packet(g, i, p);
}

// Returns when the packet has come; ``p`` is what was read there already.
__device__ __forceinline__ void await_packet(const Args& a, Watch& watch, const uint4* q, uint4& p, u32 src, u32 what) {
  watch.spins = 0;
  while (!arrived(p)) {
    if (give_up(a, watch, src, what)) break;
    p = load_packet(q);
  }
}

// What it holds, then.
__device__ __forceinline__ Vec take(const Args& a, const Geometry& g, Watch& watch, uint4* q, u32 here, u64 i, uint4 p, u32 src, u32 what) {
  await_packet(a, watch, q, p, src, what);
  return open_packet(a, g, watch, q, here, i, p, src, what);
}

// ---- the operation: a block, or a chunk of it per rank, cut into pieces; each thread has UNROLL packets of a piece

struct Work {
  const T* in;
  T* out;
  Index count, limit;  // elements of a block; packets of a chunk (two_shot, ring) or block
  Index shift;                   // packets by which the order within a chunk is turned from one chunk to the next
  u32 pieces;
  bool aligned, reuse;
};

#ifndef SHIFT_FROM
#define SHIFT_FROM (1u << 20)
#endif
#if defined(MODE_TWO_SHOT) || defined(MODE_RING)
#define CHUNKED 1    // the block is cut into a chunk per rank
#else
#define CHUNKED 0
#endif
__device__ __forceinline__ Work work_of(const Args& a, const Geometry& g) {
  Work w;
  w.in = (const T*)a.in; w.out = (T*)a.out; w.count = (Index)a.count;
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
  w.shift = w.limit >= SHIFT_FROM ? (w.limit * 5 / (16 * RANKS) + 2648) & ~(Index)7 : 0;
#endif
#if PARTS
  w.pieces = (w.limit + g.piece - 1) / g.piece;
  w.limit = ((w.limit + w.pieces - 1) / w.pieces + 32 * UNROLL - 1) / (32 * UNROLL) * (32 * UNROLL) * w.pieces;  // equal ones, of whole warps
  w.reuse = false;
#elif SINGLE
  w.pieces = 1;
  w.reuse = false;
#else
  w.pieces = (u32)((w.limit + g.piece - 1) / g.piece);
  w.reuse = w.pieces > a.nslots;
#endif
  return w;
}

#if CHUNKED
// The vector of the whole that packet i of chunk q is. Chunks of large operations are walked through from different places: addresses of
// all chunks that differ by a power of two alone are slow.
__device__ __forceinline__ Index spot(const Work& w, u32 q, Index i) {
  i += q * w.shift;
  return q * w.limit + (i >= w.limit ? i - w.limit : i);
}
#endif

// What goes to rank ``dst`` in packet i.
__device__ __forceinline__ Vec outgoing(const Args& a, const Work& w, u32 dst, Index i) {
#if CHUNKED
  return own_vec(a, load_vec(w.in, spot(w, dst, i), w.count, w.aligned));
#elif defined(MODE_REDUCE_SCATTER) || defined(MODE_ALL_TO_ALL)
  return own_vec(a, load_vec(w.in + dst * w.count, i, w.count, w.aligned));
#else
  return own_vec(a, load_vec(w.in, i, w.count, w.aligned));
#endif
}
