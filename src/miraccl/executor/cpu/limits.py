"""Limits of CPU ranks beyond those of the verifier; all ranks reject a schedule alike, before
sending.

Only schedules of users come near these limits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.kernels.layout import NSLOTS
from miraccl.executor.cpu.sizes import ALIGN
from miraccl.schedule.ir import Buffer, Op, Schedule, Step
from miraccl.schedule.text import format_location

#: steps on rows that the engine has
ROW_OPS = frozenset((Op.SEND, Op.RECV, Op.COPY, Op.RECV_COPY_SEND, Op.RECV_REDUCE_ALL))
SYNCS = frozenset((Op.SIGNAL, Op.WAIT, Op.BARRIER))
#: Part of a step that is executed at once: (ranks received from, ranks posted to, description).
StepPart = tuple[Sequence[int], Sequence[int], str]
MESSAGE, SIGNAL, BARRIER_SIGNAL = "a message", "a signal", "a signal of a barrier"


def check_limits(schedule: Schedule) -> None:
    """Check that CPU ranks can run the schedule. Raises ``InvalidUsage`` naming the first step they
    cannot.
    """
    if schedule.tables:
        _check_rows(schedule)
    if schedule.needs_addressable_memory and schedule.scratch_chunks:
        _check_remote_memory(schedule)
    if schedule.ops & SYNCS:
        for channel in range(schedule.nchannels):
            _check_order(schedule, channel)


def _check_rows(schedule: Schedule) -> None:
    """Check that CPU ranks can run all steps on rows (``kernels.rows``)."""
    for number, channel in enumerate(schedule.channels):
        for rank, steps in enumerate(channel):
            for position, step in enumerate(steps):
                where = format_location(schedule, number, rank, position)
                if step.op not in ROW_OPS:
                    names = ", ".join(op.name for op in sorted(ROW_OPS))
                    raise InvalidUsage(f"{where}: CPU ranks move rows with {names} only")
                for ref in (step.src, step.dst):
                    if ref is not None and (ref.chunks > 1 or ref.buffer is Buffer.SCRATCH):
                        raise InvalidUsage(
                            f"{where}: rows on CPUs are those of one chunk of input or output"
                        )


def check_width(schedule: Schedule, slot_bytes: int) -> None:
    """Check that a message of the widest step fits into a slot. Raises ``InvalidUsage``."""
    if slot_bytes // schedule.widest < ALIGN:
        raise InvalidUsage(
            f"cannot run {schedule.name}: a step moves {schedule.widest} chunks, too many for "
            f"slots of {slot_bytes} bytes"
        )


def _check_remote_memory(schedule: Schedule) -> None:
    """Check that no step addresses scratch of a peer: signals name inputs and outputs only."""
    for number, channel in enumerate(schedule.channels):
        for rank, steps in enumerate(channel):
            for position, step in enumerate(steps):
                if step.remote is not None and step.remote.buffer is Buffer.SCRATCH:
                    raise InvalidUsage(
                        f"{format_location(schedule, number, rank, position)}: peers "
                        "cannot address scratch memory on CPUs"
                    )


def _check_order(schedule: Schedule, channel: int) -> None:
    """Check signals, which go through the FIFO of the messages: they are consumed in the order of
    their posts, and need lines there.
    """
    nranks, programs = schedule.participants, schedule.channels[channel]
    fifos: defaultdict[tuple[int, int], deque[str]] = defaultdict(deque)  # by sender and receiver
    parts = [
        [(i, part) for i, step in enumerate(steps) for part in _parts(step, r, nranks)]
        for r, steps in enumerate(programs)
    ]
    positions, ready = [0] * nranks, deque(range(nranks))
    while ready:
        rank = ready.popleft()
        while positions[rank] < len(parts[rank]):
            number, (senders, receivers, kind) = parts[rank][positions[rank]]
            if not all(fifos[sender, rank] for sender in senders) or any(
                len(fifos[rank, peer]) == NSLOTS for peer in receivers
            ):
                break
            for sender in senders:
                if (posted := fifos[sender, rank].popleft()) is not kind:
                    text = (
                        f"{posted} precedes {kind} from rank {sender}, and CPU ranks consume them "
                        "in the order of their posts"
                    )
                    raise InvalidUsage(
                        f"{format_location(schedule, channel, rank, number)}: {text}"
                    )
            for peer in receivers:
                fifos[rank, peer].append(kind)
            positions[rank] += 1
            ready.extend((*senders, *receivers))
    for rank, (position, steps) in enumerate(zip(positions, parts, strict=True)):
        if position < len(steps):
            text = (
                f"gets stuck on CPUs: at most {NSLOTS} messages and signals are in flight from one "
                "rank to another"
            )
            raise InvalidUsage(
                f"{format_location(schedule, channel, rank, steps[position][0])}: {text}"
            )


def sync_peers(step: Step, rank: int, nranks: int) -> list[int]:
    """Return the other ranks that a signal, wait or barrier concerns."""
    return [
        peer for peer in (range(nranks) if step.op is Op.BARRIER else step.peers) if peer != rank
    ]


def _parts(step: Step, rank: int, nranks: int) -> Iterator[StepPart]:
    """Yield the parts of a step as the engine runs them (``kernels.steps``)."""
    if step.op not in SYNCS:
        yield (
            step.senders(rank),
            [step.send_peer] if step.op.sends and step.send_peer is not None else [],
            MESSAGE,
        )
        return
    kind = BARRIER_SIGNAL if step.op is Op.BARRIER else SIGNAL
    peers = sync_peers(step, rank, nranks)
    if step.op is not Op.WAIT:
        yield from (((), (peer,), kind) for peer in peers)
    if step.op is not Op.SIGNAL:
        yield from (((peer,), (), kind) for peer in peers)
