// Device barrier: work enqueued on any rank before it has completed when a rank's stream continues.
// One block of one warp; lane r waits for rank r.
//
// Copy engines write to peers' memory between two barriers (executor/cuda/copies.py). Each rank
// stores an op record to every peer and waits for theirs. Two spare words of the record hold the
// window position that this rank uses; peers must use the same. The two 8-byte halves of a record
// may arrive separately, so each bears the launch number.
//
// Memory ordering: a system-scope fence before the record publishes what kernels and copy engines
// wrote; a second one after the wait orders what follows. ``root`` tells whether streams wait for
// peers' words until the next barrier; that is recorded for the host, which bounds the time.
// Source: NCCL src/ce_coll.cc.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    device_barrier(const __grid_constant__ Args a) {
  Geometry g = begin_launch(a);
  u32 launch = (u32)g.launch + 1, t = threadIdx.x;
  SpinWait spin = {0, 0, launch};
  fence();  // writes of copy engines and earlier kernels are visible before the record
  if (t == a.rank) *own_op_word(a.own, launch) = op_word(launch, (u32)a.signature);
  if (t < RANKS && t != a.rank) {
    // offsets have less than 48 bits; never zero
    u32 own_needs = needs_word(launch, 1u << NEEDS_ALL_SHIFT), low = (u32)a.count,
        high = own_needs | (u32)(a.count >> 32);
    store_packet(op_record(a.outbox[t], a.rank, launch),
                 make_uint4(launch, (u32)a.signature, low, high));
    const uint4* address = op_record(a.inbox[t], t, launch);
    uint4 reported = load_packet(address);
    while (reported.x != launch || reported.w >> NEEDS_ALL_SHIFT != own_needs >> NEEDS_ALL_SHIFT) {
      if (check_abort(a, spin, t, AWAIT_ARRIVAL)) break;
      reported = load_packet(address);
    }
    bool matches = reported.y == (u32)a.signature && reported.z == low && reported.w == high;
    if (reported.x == launch && !matches)
      report(a.host, ERROR_MISMATCH, t, AWAIT_ARRIVAL, launch, (u32)a.signature);
  }
  fence();
  u32 ticket = take_ticket(a, g);
  advance_launch(a, ticket);
  if (t == 0) store_word((u64*)(a.own + STATE_OFFSET) + STATE_COPIES, a.root ? launch : 0);
}
