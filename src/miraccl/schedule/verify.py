"""Proof that a schedule implements its collective, or a ``ScheduleError`` that locates the fault.

Every chunk carries its provenance: the input chunk and the ranks whose contributions it holds (as
in the checker of msccl-tools). The schedule runs once on these symbols with FIFOs of the given
depth. It is rejected if

- a reference or peer is out of range, or the input is written (``_check_static``);
- a reduction adds a contribution that is already included, or reduces different chunks with each
  other;
- a chunk is stored where another chunk belongs. Sizes differ between parts and, in uneven
  operations, between blocks; other chunks belong in scratch, at the same part;
- memory is read before it is written;
- the number of chunks of a message differs from that of the receiving step, or a message or signal
  is not consumed;
- the ranks deadlock;
- two accesses to a chunk, at least one of them a write, are unordered: between channels, which are
  never ordered, or between a rank and a peer that reads or writes its memory;
- at the end an output chunk does not hold each required contribution exactly once, or a rank may
  leave a barrier too early;
- rank order is claimed and an addition is not the next one in rank order.

One run is sufficient. Each FIFO and signal has one producer and one consumer, and no step depends
on arrival times, so the ranks form a Kahn process network: the matching of reads to messages, and
deadlock, do not depend on the interleaving. Effects that may depend on it are found as unordered
accesses, with vector clocks (Lamport 1978; Mattern 1988) that advance over messages, signals and
barriers. Waiting for a free FIFO slot does not count as an ordering, because a run may use deeper
FIFOs.
"""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.proof import ScheduleProof
from miraccl.schedule.text import format_location

#: messages in flight between two ranks on one channel; executors' FIFOs are at least as deep
FIFO_DEPTH = 8


def verify(
    schedule: Schedule,
    *,
    in_place: bool = False,
    fifo_depth: int = FIFO_DEPTH,
    direct: bool = False,
    rank_ordered: bool = False,
) -> None:
    """Prove that ``schedule`` is correct or raise ``ScheduleError`` with channel, rank, step and
    chunk.

    - ``in_place``: input and output overlap as the collective defines.
    - ``fifo_depth``: messages a FIFO holds.
    - ``direct``: sending steps copy nothing but post the location of the chunk (``src``, or ``dst``
      for RECV_COPY_SEND and RECV_REDUCE_COPY_SEND; RECV_REDUCE_SEND stores nothing and still
      copies), and the receiver reads it there. Such a chunk must not be overwritten before it has
      been read. A proof with ``direct`` implies one without. At the end of a direct run the
      executor must wait until a rank's posted chunks have been read.
    - ``rank_ordered``: every sum, including sums no output holds, is that of rank 0, 1, 2 ... from
      left to right, with the operands in the order in which ``interpret`` folds them
      (``provenance.add_in_rank_order``).
    """
    _check_static(schedule)
    ScheduleProof(schedule, in_place, fifo_depth, direct, rank_ordered).run()


def is_direct_safe(schedule: Schedule, in_place: bool) -> bool:
    """Return True if a correct schedule stays correct when receivers read the sender's memory.

    See ``direct`` of ``verify``.
    """
    try:
        verify(schedule, in_place=in_place, direct=True)
    except ScheduleError:
        return False
    return True


# Checks that need no run


def _check_static(schedule: Schedule) -> None:
    sizes = [
        [schedule.chunks_at(buffer, rank) for buffer in Buffer]
        for rank in range(schedule.participants)
    ]
    for channel, ranks in enumerate(schedule.channels):
        for rank, steps in enumerate(ranks):
            for number, step in enumerate(steps):
                problem = (
                    _peer_problem(step, rank, schedule.participants)
                    or _ref_problem(step, rank, sizes)
                    or _table_problem(step, len(schedule.tables))
                )
                if problem:
                    raise ScheduleError(
                        f"{format_location(schedule, channel, rank, number)}: {problem}"
                    )


def _peer_problem(step: Step, rank: int, nranks: int) -> str:
    recv_peer, send_peer, peers = step.recv_peer, step.send_peer, step.peers
    for peer in (recv_peer, send_peer):
        if peer is not None and not 0 <= peer < nranks:
            return f"rank {peer} is not in 0..{nranks - 1}"
        if peer == rank:
            return "a rank cannot send to itself; use COPY"
    if peers:
        for peer in peers:
            if not 0 <= peer < nranks:
                return f"rank {peer} is not in 0..{nranks - 1}"
        if len(set(peers)) != len(peers):
            return "a peer is listed twice"
        if rank in peers and step.op in (Op.SIGNAL, Op.WAIT):
            return "a rank cannot signal itself"
    return ""


def _ref_problem(step: Step, rank: int, sizes: Sequence[Sequence[int]]) -> str:
    src, dst, op = step.src, step.dst, step.op
    if src is not None:
        where: Sequence[int] = (rank,)
        if op is Op.REDUCE_FROM_PEERS:
            where = step.peers
        elif op is Op.GET and step.recv_peer is not None:
            where = (step.recv_peer,)
        for owner in where:
            if src.index + src.chunks > sizes[owner][src.buffer]:
                return _outside(src, owner, sizes)
    if dst is not None:
        owner = step.send_peer if op is Op.PUT and step.send_peer is not None else rank
        if dst.buffer is Buffer.INPUT:
            return f"{dst} is written, but the input is read only"
        if dst.index + dst.chunks > sizes[owner][dst.buffer]:
            return _outside(dst, owner, sizes)
    return ""


def _table_problem(step: Step, ntables: int) -> str:
    for ref in (step.src, step.dst):
        if ref is None or (ref.table is None and not ntables):
            continue
        if ref.table is None:
            return f"{ref} names no table of rows, as all references of this schedule must"
        if not 0 <= ref.table < ntables:
            return f"{ref} names table {ref.table}; the schedule has {ntables} tables"
    return ""


def _outside(ref: Ref, owner: int, sizes: Sequence[Sequence[int]]) -> str:
    return (
        f"{ref} is out of range: the {ref.buffer.name.lower()} of rank {owner} has"
        f" {sizes[owner][ref.buffer]} chunks"
    )
