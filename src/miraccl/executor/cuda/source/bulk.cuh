// Large messages of the kernel p2p, protocol Simple: blocks copy chunks into slots of the receiver's pool, with one fence a chunk instead of a flag in
// every line. Links carry more that way, once there are many chunks under way (docs/gpu-experiments.md).
//
// The first group of a large message goes through a lane, with the header; the rest is cut into chunks. Chunk c of a message lies in slot c modulo
// ``slots``. The blocks of a queue take chunks in turn, and sender and receiver may have different numbers of blocks:
//   grant    the receiver has begun a message, and these slots of its pool are the message's; all queues of a launch share the pool.
//   arrived  a chunk lies in its slot; one word per slot of the pool.
//   freed    a chunk has been taken, its slot may be used for the chunk ``slots`` later. Not told where there is none: the sender would not look for
//            the word, and the next message's, from another multiprocessor, might land before it.
// Words bear the number of the message since the communicator began, so they need not be reset, and captured launches can be replayed.

__device__ __forceinline__ u64* bulk_word(char* box, u64 offset, u32 i) { return (u64*)(box + offset + (u64)i * BULK_STRIDE); }
__device__ __forceinline__ u64* sent_of(const Args& a, u32 peer) { return bulk_word(a.own, BULK_COUNTS_OFFSET, peer); }
__device__ __forceinline__ u64* taken_of(const Args& a, u32 peer) { return bulk_word(a.own, BULK_COUNTS_OFFSET, MAX_RANKS + peer); }
__device__ __forceinline__ u32* ended_of(const Args& a, u32 queue) { return (u32*)bulk_word(a.own, BULK_COUNTS_OFFSET, 2 * MAX_RANKS + queue); }
__device__ __forceinline__ u64* grant_of(char* box, u32 src) { return bulk_word(box, BULK_GRANTS_OFFSET, src); }
__device__ __forceinline__ u64* freed_of(char* box, u32 src, u32 slot) { return bulk_word(box, BULK_FREED_OFFSET, src * BULK_SLOTS + slot); }
__device__ __forceinline__ u64* arrived_of(char* box, u32 slot) { return bulk_word(box, BULK_ARRIVED_OFFSET, slot); }
__device__ __forceinline__ char* slot_at(char* box, u32 slot) { return box + BULK_OFFSET + (u64)slot * CHUNK_BYTES; }
__device__ __forceinline__ u64 chunk_tag(u32 src, u64 number, u64 chunk) { return (u64)(src + 1) << 56 | (number & 0xffffffffu) << 24 | ((chunk + 1) & 0xffffffu); }

struct Bulk {            // shared memory of a block
  u64 number;            // messages of the queue before this launch
  u32 slot, slots;       // of the pool, for this message
  u32 dead;
};

// Bytes [at, at + n) of a message, n at most a chunk, between user's memory and a slot.
template <bool IN> __device__ __forceinline__ void copy_chunk(const Cut& c, u64 at, char* slot) {
  u64 n = c.bytes - at < CHUNK_BYTES ? c.bytes - at : CHUNK_BYTES;
  for (u64 first = threadIdx.x * 16ull; first < n; first += 4 * THREADS * 16ull) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      u64 here = first + u * THREADS * 16ull, left = n - here;
      if (here >= n) continue;
      if (IN) v[u] = load_packet((const uint4*)(slot + here));
      else v[u] = c.aligned && left >= 16 ? *(const uint4*)(c.p + at + here) : load_part(c.p + at + here, left < 16 ? left : 16);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
      u64 here = first + u * THREADS * 16ull, left = n - here;
      if (here >= n) continue;
      if (!IN) store_late((uint4*)(slot + here), v[u]);
      else if (c.aligned && left >= 16) *(uint4*)(c.p + at + here) = v[u];
      else store_part(c.p + at + here, v[u], left < 16 ? left : 16);
    }
  }
}
__device__ __forceinline__ u64 chunks_of(const Cut& c) { return (c.bytes - FIRST_VECTORS * 16 + CHUNK_BYTES - 1) / CHUNK_BYTES; }

// One thread of a block, as ``give_up``.
__device__ __forceinline__ bool block_gives_up(const Exchange& x, Watch& w, u32 peer, u32 what, u64 needed = 0) {
  if (w.waited == NEVER) return true;
  between_polls();
  if (++w.spins < SPINS_BEFORE_CHECK) return false;
  w.spins = 0;
  w.waited = look_around(x, w.waited, peer, what, needed);
  return w.waited == NEVER;
}

// Thread 0: whether the receiver has refused a header, and so poisoned the credits of the lanes. It grants and frees no more.
__device__ __forceinline__ bool refused(const Args& a, u32 peer, u64 size) {
  u64 taken = load_word(lane_word(a.inbox[peer], LANE_CREDIT_OFFSET, peer, 0));
  if (taken & POISON) report_refusal(a, peer, size, taken);
  return (taken & POISON) != 0;
}

// Thread 0: until the receiver has begun message ``number``.
__device__ __forceinline__ bool wait_grant(const Exchange& x, Bulk& s, Watch& w, u32 peer, u64 number, u64 size) {
  const Args& a = x.a;
  const u64* word = grant_of(a.inbox[peer], peer);
  w.spins = 0;
  for (;;) {
    u64 grant = load_word(word);
    if ((u32)(grant >> 32) == (u32)(number + 1)) { s.slot = (u32)grant >> 16; s.slots = (u32)grant & 0xffff; return true; }
    if (refused(a, peer, size) || block_gives_up(x, w, peer, WHAT_ROOM, need(NEED_BULK, number + 1))) return false;
  }
}

// Thread 0: until a chunk has been taken. Room is about to come in most waits, so a refusal is looked for rarely.
__device__ __forceinline__ bool wait_freed(const Exchange& x, Watch& w, const u64* word, u64 tag, u32 peer, u64 size) {
  w.spins = 0;
  while (load_acquire(word) != tag)
    if ((w.spins % 256 == 255 && refused(x.a, peer, size)) || block_gives_up(x, w, peer, WHAT_ROOM)) return false;
  return true;
}
__device__ __forceinline__ bool wait_arrived(const Exchange& x, Watch& w, const u64* word, u64 tag, u32 peer) {
  w.spins = 0;
  while (load_acquire(word) != tag) if (block_gives_up(x, w, peer, WHAT_MESSAGE)) return false;
  return true;
}

__device__ __forceinline__ void send_bulk(const Exchange& x, const Queue& q, u32 block) {
  const Args& a = x.a;
  __shared__ Bulk s;
  Watch watch = {0, 0, 0};
  if (threadIdx.x == 0) { s.number = load_word(sent_of(a, q.peer)); s.dead = 0; }
  __syncthreads();
  u64 number = s.number;
  for (u32 m = q.first; m < q.first + q.count; m++) {
    if (!is_bulk(message(x, m))) continue;
    Cut c = cut(message(x, m), x.lanes);
    u64 chunks = chunks_of(c);
    // a block without a chunk must not wait: the message may be over, and the grant of the next one in the place of its own
    if (threadIdx.x == 0 && block < chunks && !wait_grant(x, s, watch, q.peer, number, message(x, m).size)) s.dead = 1;
    for (u64 k = block; k < chunks; k += q.lanes) {
      if (threadIdx.x == 0 && !s.dead && k >= s.slots) {
        const u64* freed = freed_of(a.inbox[q.peer], q.peer, (u32)(k % s.slots));
        if (!wait_freed(x, watch, freed, chunk_tag(a.rank, number, k - s.slots), q.peer, message(x, m).size)) s.dead = 1;
      }
      __syncthreads();
      if (s.dead) return;
      u32 slot = s.slot + (u32)(k % s.slots);
      copy_chunk<false>(c, FIRST_VECTORS * 16 + k * CHUNK_BYTES, slot_at(a.outbox[q.peer], slot));
      __syncthreads();
      if (threadIdx.x == 0) { fence(); store_word(arrived_of(a.outbox[q.peer], slot), chunk_tag(a.rank, number, k)); }
    }
    number++;  // thread 0 may go on to the next message and find that dead: nobody looks at ``s`` before they all have met there
  }
  if (threadIdx.x == 0 && draw(ended_of(a, q.peer), q.lanes - 1) == q.lanes - 1) *sent_of(a, q.peer) = number;
}

__device__ __forceinline__ void grant(const Args& a, const Queue& q, u64 number) {
  store_word(grant_of(a.outbox[q.peer], a.rank), (number + 1) << 32 | (u32)q.slot << 16 | q.slots);
}

__device__ __forceinline__ void receive_bulk(const Exchange& x, const Queue& q, u32 block) {
  const Args& a = x.a;
  __shared__ Bulk s;
  Watch watch = {0, 0, 0};
  u32 *ended = ended_of(a, MAX_RANKS + q.peer), left = 0;  // blocks that have ended a message of this launch
  for (u32 m = q.first; m < q.first + q.count; m++) left += is_bulk(message(x, m));
  if (threadIdx.x == 0) {
    s.number = load_word(taken_of(a, q.peer)); s.dead = 0;
    if (block == 0) grant(a, q, s.number);
  }
  __syncthreads();
  u64 number = s.number, begun = number;
  for (u32 m = q.first; m < q.first + q.count; m++) {
    if (!is_bulk(message(x, m))) continue;
    Cut c = cut(message(x, m), x.lanes);
    u64 chunks = chunks_of(c);
    for (u64 k = block; k < chunks; k += q.lanes) {
      u32 place = (u32)(k % q.slots), slot = q.slot + place;
      if (threadIdx.x == 0 && !s.dead && !wait_arrived(x, watch, arrived_of(a.inbox[q.peer], slot), chunk_tag(q.peer, number, k), q.peer)) s.dead = 1;
      __syncthreads();
      if (s.dead) return;
      copy_chunk<true>(c, FIRST_VECTORS * 16 + k * CHUNK_BYTES, slot_at(a.inbox[q.peer], slot));
      __syncthreads();
      if (threadIdx.x == 0 && k + q.slots < chunks) store_word(freed_of(a.outbox[q.peer], a.rank, place), chunk_tag(q.peer, number, k));
    }
    number++; left--;
    if (threadIdx.x == 0) {  // the block that ends a message last lets the next one begin: all slots are free
      u32 before = (u32)(number - begun - 1) * q.lanes;
      watch.spins = 0;
      while (load_word((const u64*)ended) < before && !s.dead) if (block_gives_up(x, watch, a.rank, WHAT_MESSAGE)) s.dead = 1;
      if (!s.dead && draw(ended, ~0u) == before + q.lanes - 1) {
        if (left) grant(a, q, number);
        else { *ended = 0; *taken_of(a, q.peer) = number; }
      }
    }
  }
}
