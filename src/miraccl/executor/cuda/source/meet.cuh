// All ranks meet on their streams: what was enqueued before on any rank is done when a rank's stream goes on. One block of one warp.
//
// Copy engines write to peers' memory between two such meetings. The two words that an entry of the board has to spare say where this rank's
// window is used; peers must use the same place of theirs. The halves of an entry may arrive one after the other, so each bears the number.
//
// Where ``root`` says so, streams wait for words of peers until the next meeting. That is noted for the host, which counts the time.

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) meet_peers(const __grid_constant__ Args a) {
  Geometry g = begin(a);
  u32 launch = (u32)g.launch + 1, t = threadIdx.x;
  Watch watch = {0, 0, launch};
  fence();  // what copy engines and kernels before this one wrote is there before the entry
  if (t == a.rank) *note_of(a.own, launch) = noted(launch, (u32)a.signature);
  if (t < RANKS && t != a.rank) {
    u32 mine = need_word(launch, 1u << NEEDS_ALL_SHIFT), low = (u32)a.count, high = mine | (u32)(a.count >> 32);  // places have less than 48 bits; never zero
    store_packet(board(a.outbox[t], a.rank, launch), make_uint4(launch, (u32)a.signature, low, high));
    const uint4* entry = board(a.inbox[t], t, launch);
    uint4 said = load_packet(entry);
    while (said.x != launch || said.w >> NEEDS_ALL_SHIFT != mine >> NEEDS_ALL_SHIFT) {
      if (give_up(a, watch, t, WHAT_MEETING)) break;
      said = load_packet(entry);
    }
    bool same = said.y == (u32)a.signature && said.z == low && said.w == high;
    if (said.x == launch && !same) report(a.host, ERROR_MISMATCH, t, WHAT_MEETING, launch, (u32)a.signature);
  }
  fence();
  u32 ticket = draw_ticket(a, g);
  count_launch(a, ticket);
  if (t == 0) store_word((u64*)(a.own + STATE_OFFSET) + STATE_COPIES, a.root ? launch : 0);
}
