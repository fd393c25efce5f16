// Large messages of the kernel p2p, protocol Simple: blocks copy chunks into slots of the
// receiver's pool, with one fence per chunk instead of a flag in every line. Links carry more that
// way once many chunks are in flight (docs/design/experiments-gpu.md).
//
// The first group of a large message goes through a warp queue, with the header; the rest is cut
// into chunks. Chunk c of a message lies in slot c modulo ``slots``. The blocks of a queue take
// chunks in turn; sender and receiver may have different numbers of blocks:
//   grant    the receiver has begun a message and assigned slots of its pool to it; all queues of a
//            launch share the pool.
//   arrived  a chunk is complete in its slot; one word per slot of the pool.
//   freed    a chunk has been received; its slot may take the chunk ``slots`` later. Not reported
//            if there is none: the sender would not poll the word, and the next message's value,
//            stored by another multiprocessor, might land before it.
// Words carry the number of the message since the communicator began, so they need no reset, and
// captured launches can be replayed.
//
// Memory ordering: fence between a chunk's stores and its ``arrived`` word, acquire loads of
// ``arrived`` and ``freed``. Source: NCCL src/device/prims_simple.h.

__device__ __forceinline__ u64* bulk_word(char* region, u64 offset, u32 i) {
  return (u64*)(region + offset + (u64)i * BULK_STRIDE);
}
__device__ __forceinline__ u64* bulk_sent_word(const Args& a, u32 peer) {
  return bulk_word(a.own, BULK_COUNTS_OFFSET, peer);
}
__device__ __forceinline__ u64* bulk_received_word(const Args& a, u32 peer) {
  return bulk_word(a.own, BULK_COUNTS_OFFSET, MAX_RANKS + peer);
}
__device__ __forceinline__ u32* bulk_ended_word(const Args& a, u32 queue) {
  return (u32*)bulk_word(a.own, BULK_COUNTS_OFFSET, 2 * MAX_RANKS + queue);
}
__device__ __forceinline__ u64* grant_word(char* region, u32 src) {
  return bulk_word(region, BULK_GRANTS_OFFSET, src);
}
__device__ __forceinline__ u64* freed_word(char* region, u32 src, u32 slot) {
  return bulk_word(region, BULK_FREED_OFFSET, src * BULK_SLOTS + slot);
}
__device__ __forceinline__ u64* arrived_word(char* region, u32 slot) {
  return bulk_word(region, BULK_ARRIVED_OFFSET, slot);
}
__device__ __forceinline__ char* slot_address(char* region, u32 slot) {
  return region + BULK_OFFSET + (u64)slot * CHUNK_BYTES;
}
__device__ __forceinline__ u64 chunk_tag(u32 src, u64 number, u64 chunk) {
  return (u64)(src + 1) << 56 | (number & 0xffffffffu) << 24 | ((chunk + 1) & 0xffffffu);
}

struct BulkBlock {  // shared memory of a block
  u64 number;       // messages of the queue before this launch
  u32 slot, slots;  // of the pool, assigned to this message
  u32 aborted;
};

// Copy bytes [start, start + n) of a message, n at most a chunk, between user memory and a slot.
template <bool IN>
__device__ __forceinline__ void copy_chunk(const Partition& c, u64 start, char* slot) {
  u64 n = c.bytes - start < CHUNK_BYTES ? c.bytes - start : CHUNK_BYTES;
  for (u64 first = threadIdx.x * 16ull; first < n; first += 4 * THREADS * 16ull) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      u64 in_slot = first + u * THREADS * 16ull, remaining = n - in_slot;
      if (in_slot >= n) continue;
      if (IN)
        v[u] = load_packet((const uint4*)(slot + in_slot));
      else
        v[u] = c.aligned && remaining >= 16
                   ? *(const uint4*)(c.p + start + in_slot)
                   : load_partial(c.p + start + in_slot, remaining < 16 ? remaining : 16);
    }
#pragma unroll
    for (int u = 0; u < 4; u++) {
      u64 in_slot = first + u * THREADS * 16ull, remaining = n - in_slot;
      if (in_slot >= n) continue;
      if (!IN)
        store_unordered((uint4*)(slot + in_slot), v[u]);
      else if (c.aligned && remaining >= 16)
        *(uint4*)(c.p + start + in_slot) = v[u];
      else
        store_partial(c.p + start + in_slot, v[u], remaining < 16 ? remaining : 16);
    }
  }
}
__device__ __forceinline__ u64 chunks_of(const Partition& c) {
  return (c.bytes - FIRST_VECTORS * 16 + CHUNK_BYTES - 1) / CHUNK_BYTES;
}

// ``check_abort`` for one thread of a block.
__device__ __forceinline__ bool block_check_abort(const P2pArgs& x, SpinWait& w, u32 peer,
                                                  u32 awaited, u64 progress_needed = 0) {
  if (w.wait_time == WAIT_ENDED) return true;
  poll_pause();
  if (++w.polls < SPINS_BEFORE_CHECK) return false;
  w.polls = 0;
  w.wait_time = check_p2p_wait(x, w.wait_time, peer, awaited, progress_needed);
  return w.wait_time == WAIT_ENDED;
}

// Thread 0: return true if the receiver has rejected a header and so poisoned the credits of the
// warp queues. It then grants and frees nothing more.
__device__ __forceinline__ bool is_rejected(const Args& a, u32 peer, u64 size) {
  u64 credited = load_word(warp_queue_word(a.inbox[peer], CREDIT_OFFSET, peer, 0));
  if (credited & POISON) report_rejection(a, peer, size, credited);
  return (credited & POISON) != 0;
}

// Thread 0: wait until the receiver has begun message ``number``.
__device__ __forceinline__ bool await_grant(const P2pArgs& x, BulkBlock& s, SpinWait& w, u32 peer,
                                            u64 number, u64 size) {
  const Args& a = x.a;
  const u64* word = grant_word(a.inbox[peer], peer);
  w.polls = 0;
  for (;;) {
    u64 grant_slots = load_word(word);
    if ((u32)(grant_slots >> 32) == (u32)(number + 1)) {
      s.slot = (u32)grant_slots >> 16;
      s.slots = (u32)grant_slots & 0xffff;
      return true;
    }
    if (is_rejected(a, peer, size) ||
        block_check_abort(x, w, peer, AWAIT_CREDIT, needed_progress(NEED_BULK, number + 1)))
      return false;
  }
}

// Thread 0: wait until a chunk has been received. A slot is about to become free in most waits, so
// rejections are checked rarely.
__device__ __forceinline__ bool await_freed(const P2pArgs& x, SpinWait& w, const u64* word, u64 tag,
                                            u32 peer, u64 size) {
  w.polls = 0;
  while (load_acquire(word) != tag)
    if ((w.polls % 256 == 255 && is_rejected(x.a, peer, size)) ||
        block_check_abort(x, w, peer, AWAIT_CREDIT))
      return false;
  return true;
}
__device__ __forceinline__ bool await_arrived(const P2pArgs& x, SpinWait& w, const u64* word,
                                              u64 tag, u32 peer) {
  w.polls = 0;
  while (load_acquire(word) != tag)
    if (block_check_abort(x, w, peer, AWAIT_MESSAGE)) return false;
  return true;
}

__device__ __forceinline__ void send_bulk(const P2pArgs& x, const PeerQueue& q, u32 block) {
  const Args& a = x.a;
  __shared__ BulkBlock s;
  SpinWait spin = {0, 0, 0};
  if (threadIdx.x == 0) {
    s.number = load_word(bulk_sent_word(a, q.peer));
    s.aborted = 0;
  }
  __syncthreads();
  u64 number = s.number;
  for (u32 m = q.first; m < q.first + q.count; m++) {
    if (!is_bulk(message(x, m))) continue;
    Partition c = partition(message(x, m), x.warp_queues);
    u64 chunks = chunks_of(c);
    // a block without a chunk must not wait: the message may be over and its grant overwritten by
    // that of the next one
    if (threadIdx.x == 0 && block < chunks &&
        !await_grant(x, s, spin, q.peer, number, message(x, m).size))
      s.aborted = 1;
    for (u64 k = block; k < chunks; k += q.warp_queues) {
      if (threadIdx.x == 0 && !s.aborted && k >= s.slots) {
        const u64* freed = freed_word(a.inbox[q.peer], q.peer, (u32)(k % s.slots));
        if (!await_freed(x, spin, freed, chunk_tag(a.rank, number, k - s.slots), q.peer,
                         message(x, m).size))
          s.aborted = 1;
      }
      __syncthreads();
      if (s.aborted) return;
      u32 slot = s.slot + (u32)(k % s.slots);
      copy_chunk<false>(c, FIRST_VECTORS * 16 + k * CHUNK_BYTES,
                        slot_address(a.outbox[q.peer], slot));
      __syncthreads();
      if (threadIdx.x == 0) {
        fence();
        store_word(arrived_word(a.outbox[q.peer], slot), chunk_tag(a.rank, number, k));
      }
    }
    // thread 0 may be at the next message already and set ``aborted`` there: no thread reads ``s``
    // before all have met at the barrier
    number++;
  }
  if (threadIdx.x == 0 &&
      atomic_inc_wrap(bulk_ended_word(a, q.peer), q.warp_queues - 1) == q.warp_queues - 1)
    *bulk_sent_word(a, q.peer) = number;
}

__device__ __forceinline__ void grant_slots(const Args& a, const PeerQueue& q, u64 number) {
  store_word(grant_word(a.outbox[q.peer], a.rank),
             (number + 1) << 32 | (u32)q.slot << 16 | q.slots);
}

__device__ __forceinline__ void recv_bulk(const P2pArgs& x, const PeerQueue& q, u32 block) {
  const Args& a = x.a;
  __shared__ BulkBlock s;
  SpinWait spin = {0, 0, 0};
  // blocks that have finished a message of this launch
  u32 *ended_blocks = bulk_ended_word(a, MAX_RANKS + q.peer), remaining = 0;
  for (u32 m = q.first; m < q.first + q.count; m++) remaining += is_bulk(message(x, m));
  if (threadIdx.x == 0) {
    s.number = load_word(bulk_received_word(a, q.peer));
    s.aborted = 0;
    if (block == 0) grant_slots(a, q, s.number);
  }
  __syncthreads();
  u64 number = s.number, first_number = number;
  for (u32 m = q.first; m < q.first + q.count; m++) {
    if (!is_bulk(message(x, m))) continue;
    Partition c = partition(message(x, m), x.warp_queues);
    u64 chunks = chunks_of(c);
    for (u64 k = block; k < chunks; k += q.warp_queues) {
      u32 slot_index = (u32)(k % q.slots), slot = q.slot + slot_index;
      if (threadIdx.x == 0 && !s.aborted &&
          !await_arrived(x, spin, arrived_word(a.inbox[q.peer], slot), chunk_tag(q.peer, number, k),
                         q.peer))
        s.aborted = 1;
      __syncthreads();
      if (s.aborted) return;
      copy_chunk<true>(c, FIRST_VECTORS * 16 + k * CHUNK_BYTES,
                       slot_address(a.inbox[q.peer], slot));
      __syncthreads();
      if (threadIdx.x == 0 && k + q.slots < chunks)
        store_word(freed_word(a.outbox[q.peer], a.rank, slot_index), chunk_tag(q.peer, number, k));
    }
    number++;
    remaining--;
    // the last block to finish a message starts the next one: all slots are free
    if (threadIdx.x == 0) {
      u32 ended_before = (u32)(number - first_number - 1) * q.warp_queues;
      spin.polls = 0;
      while (load_word((const u64*)ended_blocks) < ended_before && !s.aborted)
        if (block_check_abort(x, spin, a.rank, AWAIT_MESSAGE)) s.aborted = 1;
      if (!s.aborted && atomic_inc_wrap(ended_blocks, ~0u) == ended_before + q.warp_queues - 1) {
        if (remaining)
          grant_slots(a, q, number);
        else {
          *ended_blocks = 0;
          *bulk_received_word(a, q.peer) = number;
        }
      }
    }
  }
}
