// Double binary trees (schedule.algos.double_binary_tree) on packets: sums rise from the leaves to
// the root, results descend from the root to the leaves.
//   all_reduce  both, in NCCL's pair of trees
//   reduce      sums rise in two trees whose root is that of the operation
//   broadcast   the root's data descend in the same trees
//
// Warps of a launch alternate between the two trees, and so do runs of 32 * UNROLL vectors: each
// tree has half of the work, whatever the size, and nothing is split. A thread receives its packets
// of a tile from its children, adds them to its own in the order of the schedule (16- and 8-bit
// floats in float32), rounds the sum and sends it to its parent; the root finishes it, keeps it and
// sends it to its children, which keep it and pass it on.
//
// In all_reduce a thread sends tile j up in iteration j and receives tile j - lag from above, so a
// tree is filled with tiles. No acks are needed:
//   up    A rank that sends tile j has received j - 1 - lag from its parent. The parent sent it in
//         its iteration j - 1, or as the root in j - 1 - lag, after it had read, cleared and seen
//         cleared what rose in all earlier iterations: tiles up to j - 2 - lag at least.
//   down  A rank that sends tile k to a child has received from it tile k (the root), or k + lag,
//         or the last tile. The child sent that after it had seen cleared what descended in all
//         earlier iterations: tiles up to k - 1 - lag at least.
// Hence nslots >= lag + 2. Every result consists of packets that all ranks sent in this launch, as
// the alternation of the buffer halves requires (packets.cuh). In reduce and broadcast a rank
// receives nothing from the rank it sends to: there are acks and hellos (acks.cuh).
//
// Memory ordering: packets carry their flags; there is no fence. Source: NCCL src/graph/trees.cc
// and src/device/all_reduce.h (runTreeUpDown).

#if defined(MODE_ALL_REDUCE_TREE)
#define REDUCE_UP 1
#define BROADCAST_DOWN 1
#else
#define REDUCE_UP REDUCES
#define BROADCAST_DOWN (!REDUCES)
#endif
#define ONE_WAY (!(REDUCE_UP && BROADCAST_DOWN))

// Sources of a tile's packets at a rank: first child, second child, parent.
#define SOURCES (2 * REDUCE_UP + BROADCAST_DOWN)
#define PARENT_SOURCE (SOURCES - 1)
__device__ __forceinline__ uint4* source_packet(const Geometry& g, char* region, u32 slot,
                                                u32 source, u32 i) {
  return packet_at(g, region, slot * SOURCES + source, i);
}

// State of an iteration: this thread's first vectors going up and down, and the slots of their
// packets.
struct Iteration {
  u64 up_vector, down_vector;
  u32 up_slot, down_slot;
};
__device__ __forceinline__ uint4* child_packet(const Args& a, const Geometry& g,
                                               const TreeLinks& links, const Iteration& iter, int c,
                                               u32 i) {
  return source_packet(g, a.inbox[links.children[c]], iter.up_slot, c, i);
}
__device__ __forceinline__ uint4* parent_packet(const Args& a, const Geometry& g,
                                                const TreeLinks& links, const Iteration& iter,
                                                u32 i) {
  return source_packet(g, a.inbox[links.parent], iter.down_slot, PARENT_SOURCE, i);
}

// Packets of an iteration, as loaded.
struct Incoming {
  uint4 from_children[2][UNROLL], from_parent[UNROLL];
};
__device__ __forceinline__ void load_incoming(const Args& a, const Geometry& g, const Workload& w,
                                              const TreeLinks& links, const Iteration& iter,
                                              Incoming& p) {
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 tile_index = g.first + u * g.stride;
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (REDUCE_UP && links.children[c] != NO_RANK && iter.up_vector + u * g.stride < w.limit)
        p.from_children[c][u] = load_packet(child_packet(a, g, links, iter, c, tile_index));
    if (BROADCAST_DOWN && links.parent != NO_RANK && iter.down_vector + u * g.stride < w.limit)
      p.from_parent[u] = load_packet(parent_packet(a, g, links, iter, tile_index));
  }
}

// Wait until the packets that this thread cleared in an iteration are cleared in L2
// (``await_cleared``).
__device__ __forceinline__ void await_iteration_cleared(const Args& a, const Geometry& g,
                                                        const Workload& w, const TreeLinks& links,
                                                        const Iteration& iter, SpinWait& spin) {
  Incoming p;
  load_incoming(a, g, w, links, iter, p);
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    u32 tile_index = g.first + u * g.stride;
#pragma unroll
    for (int c = 0; c < 2; c++)
      if (REDUCE_UP && links.children[c] != NO_RANK && iter.up_vector + u * g.stride < w.limit)
        await_cleared(a, spin, child_packet(a, g, links, iter, c, tile_index),
                      p.from_children[c][u]);
    if (BROADCAST_DOWN && links.parent != NO_RANK && iter.down_vector + u * g.stride < w.limit)
      await_cleared(a, spin, parent_packet(a, g, links, iter, tile_index), p.from_parent[u]);
  }
}

// One-way trees: wait until the receivers have freed the slot of this warp's tile ``j``.
__device__ __forceinline__ void await_credit(const Args& a, const Geometry& g,
                                             const TreeLinks& links, SpinWait& spin, u32 j) {
  u32 runs = a.nslots * SOURCES, consumed = j + 1 - a.nslots;
  if (REDUCE_UP && links.parent != NO_RANK)
    await_ack(a, spin, ack_word(g, a.inbox[links.parent], runs, 0), consumed, links.parent);
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (BROADCAST_DOWN && links.children[c] != NO_RANK)
      await_ack(a, spin, ack_word(g, a.inbox[links.children[c]], runs, c), consumed,
                links.children[c]);
}

// One thread of a warp: tile ``j`` has been read and cleared; its sender may reuse the slot.
__device__ __forceinline__ void send_acks(const Args& a, const Geometry& g, const TreeLinks& links,
                                          u32 j) {
  u32 runs = a.nslots * SOURCES;
  if (BROADCAST_DOWN && links.parent != NO_RANK)
    store_word(ack_word(g, a.outbox[links.parent], runs, links.child_index), j + 1);
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (REDUCE_UP && links.children[c] != NO_RANK)
      store_word(ack_word(g, a.outbox[links.children[c]], runs, 0), j + 1);
}

// One thread of a warp, at the end: reset the acks received.
__device__ __forceinline__ void clear_acks(const Args& a, const Geometry& g,
                                           const TreeLinks& links) {
  u32 runs = a.nslots * SOURCES;
  if (REDUCE_UP && links.parent != NO_RANK)
    *ack_word(g, a.inbox[links.parent], runs, 0) = EMPTY_WORD;
#pragma unroll
  for (int c = 0; c < 2; c++)
    if (BROADCAST_DOWN && links.children[c] != NO_RANK)
      *ack_word(g, a.inbox[links.children[c]], runs, c) = EMPTY_WORD;
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    packets(const __grid_constant__ Args a) {
  END_IF_GATED(a);
  Geometry g = begin_launch(a);
  Workload w = work_of(a, g);
  SpinWait spin = {0, 0, (u32)g.launch + 1};
  PeerOp peer_op = publish_op(a, g);
  TreeLinks links = a.trees[g.warp % 2];
  Iteration iter = {g.first, w.limit, 0, 0};
  bool is_root = links.parent == NO_RANK;
  u32 ticket = 0, lag = ONE_WAY ? 0 : a.lookahead;
  if (ONE_WAY) send_hellos(a, g, a.nslots * SOURCES);
  for (u32 j = 0; j < w.tiles + lag; j++) {
    if (j == lag) iter.down_vector = g.first;
    Incoming p;
    Vec v[UNROLL];
    load_incoming(a, g, w, links, iter, p);
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
      if ((REDUCE_UP || is_root) && iter.up_vector + u * g.stride < w.limit)
        v[u] = outgoing_vec(a, w, 0, iter.up_vector + u * g.stride);
    if (j == 0) ticket = take_ticket(a, g);
    if (ONE_WAY && j >= a.nslots) await_credit(a, g, links, spin, j);
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u32 tile_index = g.first + u * g.stride;
      u64 i = iter.up_vector + u * g.stride;
      if (!REDUCE_UP || i >= w.limit) continue;
      Accumulator sum;
      sum.init(v[u]);
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (links.children[c] != NO_RANK)
          sum.add(recv_packet(a, g, spin, child_packet(a, g, links, iter, c, tile_index),
                              tile_index, i, p.from_children[c][u], links.children[c],
                              AWAIT_PACKET));
      v[u] = is_root ? sum.result() : sum.partial();
      if (!is_root)
        send_packet(
            g,
            source_packet(g, a.outbox[links.parent], iter.up_slot, links.child_index, tile_index),
            tile_index, encode_packet(g, i, v[u]));
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      u32 tile_index = g.first + u * g.stride;
      u64 i = (is_root ? iter.up_vector : iter.down_vector) + u * g.stride;
      if (!(BROADCAST_DOWN || is_root) || i >= w.limit) continue;
      if (!is_root)
        v[u] = recv_packet(a, g, spin, parent_packet(a, g, links, iter, tile_index), tile_index, i,
                           p.from_parent[u], links.parent, AWAIT_RESULT);
#pragma unroll
      for (int c = 0; c < 2; c++)
        if (BROADCAST_DOWN && links.children[c] != NO_RANK)
          send_packet(
              g,
              source_packet(g, a.outbox[links.children[c]], is_root ? iter.up_slot : iter.down_slot,
                            PARENT_SOURCE, tile_index),
              tile_index, encode_packet(g, i, v[u]));
      if (REDUCE_UP || !is_root) store_vec(w.out, i, w.count, w.aligned, v[u]);
    }
    if (j == 0) compare_ops(a, g, peer_op);
    if (w.reuses_slots && j + a.nslots < w.tiles + lag) {  // the same slots will be used again
      await_iteration_cleared(a, g, w, links, iter, spin);
      __syncwarp();
      if (ONE_WAY && threadIdx.x % 32 == 0) send_acks(a, g, links, j);
    }
    iter.up_vector += g.tile;
    iter.up_slot = iter.up_slot + 1 == a.nslots ? 0 : iter.up_slot + 1;
    if (j < lag) continue;
    iter.down_vector += g.tile;
    iter.down_slot = iter.down_slot + 1 == a.nslots ? 0 : iter.down_slot + 1;
  }
  __syncwarp();
  if (ONE_WAY && w.reuses_slots && threadIdx.x % 32 == 0) clear_acks(a, g, links);
  if (ONE_WAY) await_hellos(a, g, spin, a.nslots * SOURCES);
  advance_launch(a, ticket);
}
