"""The proof that a schedule is a right implementation of its collective, or a ``ScheduleError`` that says where it is not.

Every chunk carries its provenance: which ranks' contributions to which input chunk it holds (the idea is that of msccl-tools'
checker).  The schedule runs once on these symbols, with FIFOs of the given depth, and is refused when

- a reference or a peer is out of range, or the input is written (``_check_static``);
- a chunk is reduced that holds a contribution already, or chunks of different places are reduced with each other;
- a chunk goes where a chunk of another place belongs (sizes differ from part to part and, in uneven operations, from block to
  block: other chunks belong into scratch, and there at the same part);
- memory is read that nothing has written;
- a message has another number of chunks than the step that takes it, or is left over, or a signal is left over;
- the ranks get stuck;
- two accesses to a chunk, one of them a write, are not ordered: between channels, which keep no order, or between a rank and a
  peer that reads or writes its memory;
- at the end an output chunk does not hold each required contribution exactly once, or a rank may leave a barrier too early;
- where that is claimed: an addition is not the next one in the order of the ranks.

One run is enough.  Each FIFO and signal has one producer and one consumer, and no step looks at what has arrived so far, so that
the ranks form a Kahn network: which step reads which message, and whether all get stuck, does not depend on the interleaving.
What may depend on it is found as an unordered access, with vector clocks (Lamport; Mattern) that advance over messages, signals
and barriers.  Waiting for room in a FIFO is not counted as an order, because the depth of a run may be larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.schedule.proof import ScheduleProof
from miraccl.schedule.text import format_location

#: messages under way between two ranks on one channel; an executor's FIFO is at least as deep
FIFO_DEPTH = 8


def verify(
    schedule: Schedule,
    *,
    in_place: bool = False,
    fifo_depth: int = FIFO_DEPTH,
    direct: bool = False,
    rank_ordered: bool = False,
) -> None:
    """Prove ``schedule`` right or raise ``ScheduleError`` naming channel, rank, step and chunk.

    ``in_place``: input and output overlap as the collective defines.  ``fifo_depth``: messages a FIFO holds.  ``direct``: a
    sending step copies nothing but posts where the chunk lies (``src``, or ``dst`` for RECV_COPY_SEND and
    RECV_REDUCE_COPY_SEND; RECV_REDUCE_SEND keeps nothing and still copies), and the receiver reads it there when it receives; so
    nobody may overwrite such a chunk before it has been read.  A proof with ``direct`` is also one without.  At the end of a
    direct run a rank has to wait until its posted chunks have been read; that is the executor's part.

    ``rank_ordered``: every sum is that of rank 0, 1, 2 ... from left to right, with the operands as ``interpret`` folds them, also a
    sum that no output holds (see ``provenance.add_in_rank_order``).
    """
    _check_static(schedule)
    ScheduleProof(schedule, in_place, fifo_depth, direct, rank_ordered).run()


def is_direct_safe(schedule: Schedule, in_place: bool) -> bool:
    """Whether a right schedule stays right when receivers read the sender's memory (see ``verify``)."""
    try:
        verify(schedule, in_place=in_place, direct=True)
    except ScheduleError:
        return False
    return True


# What can be seen without running


def _check_static(schedule: Schedule) -> None:
    sizes = [
        [schedule.chunks_at(buffer, rank) for buffer in Buffer] for rank in range(schedule.nranks)
    ]
    for channel, ranks in enumerate(schedule.channels):
        for rank, steps in enumerate(ranks):
            for number, step in enumerate(steps):
                problem = _peer_problem(step, rank, schedule.nranks) or _ref_problem(
                    step, rank, sizes
                )
                if problem:
                    raise ScheduleError(
                        f"{format_location(schedule, channel, rank, number)}: {problem}"
                    )


def _peer_problem(step: Step, rank: int, nranks: int) -> str:
    recv_peer, send_peer, peers = step.recv_peer, step.send_peer, step.peers
    for peer in (recv_peer, send_peer):
        if peer is not None and not 0 <= peer < nranks:
            return f"rank {peer} is out of range, there are {nranks} ranks"
        if peer == rank:
            return "a rank has no FIFO to itself; use COPY"
    if peers:
        for peer in peers:
            if not 0 <= peer < nranks:
                return f"rank {peer} is out of range, there are {nranks} ranks"
        if len(set(peers)) != len(peers):
            return "a peer is listed twice"
        if rank in peers and step.op in (Op.SIGNAL, Op.WAIT):
            return "a rank does not signal itself"
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


def _outside(ref: Ref, owner: int, sizes: Sequence[Sequence[int]]) -> str:
    return f"{ref} is out of range: the {ref.buffer.name.lower()} of rank {owner} has {sizes[owner][ref.buffer]} chunks"
