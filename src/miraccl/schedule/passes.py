"""Transformations of schedules: more channels, more parts, other ranks, fused steps.

A pass preserves the result of a correct schedule, but not its resource needs: with more messages in
flight a schedule may need deeper FIFOs, so verify the result. Passes that cut blocks differently
keep runs of chunks contiguous within a block, but not across blocks; apply ``split_messages`` first
to messages that span blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from miraccl.errors import InvalidUsage
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step, input_blocks, output_blocks
from miraccl.types import Collective

RefMap = Callable[[Ref], Ref]


def interleave(schedules: Sequence[Schedule], name: str | None = None) -> Schedule:
    """Combine schedules of one collective, each on its own channels and its own parts of every
    block.

    Raise ``InvalidUsage`` if they differ in collective, nranks or root, or if a message spans
    blocks.
    """
    if not schedules:
        raise InvalidUsage("cannot interleave: no schedule given")
    first = schedules[0]
    key = (first.collective, first.nranks, first.root)
    if any((s.collective, s.nranks, s.root) != key for s in schedules):
        raise InvalidUsage("cannot interleave schedules of different collectives, ranks or roots")
    parts = sum(schedule.parts for schedule in schedules)
    channels: list[tuple[tuple[Step, ...], ...]] = []
    offset = scratch_blocks = 0
    for schedule in schedules:
        move = _map_to_part_offset(schedule, parts, offset)
        channels += [
            tuple(tuple(_map_refs(step, move) for step in steps) for steps in ranks)
            for ranks in schedule.channels
        ]
        offset += schedule.parts
        scratch_blocks = max(scratch_blocks, -(-schedule.scratch_chunks // schedule.parts))
    return replace(
        first,
        name=name or first.name,
        parts=parts,
        channels=tuple(channels),
        scratch_chunks=scratch_blocks * parts,
    )


def split_channels(schedule: Schedule, nchannels: int) -> Schedule:
    """Return a schedule with ``nchannels`` copies of each channel, each for its share of every
    chunk.

    Raise ``InvalidUsage`` if a message spans blocks.
    """
    if nchannels < 1:
        raise InvalidUsage(
            f"cannot split a schedule into {nchannels} channels: at least 1 is required"
        )
    return schedule if nchannels == 1 else interleave([schedule] * nchannels)


def pipeline(schedule: Schedule, depth: int) -> Schedule:
    """Cut every chunk into ``depth`` slices and repeat each step once per slice.

    Ranks then forward the first slice before the last has arrived. Raise ``InvalidUsage`` if a
    message spans blocks.
    """
    if depth < 1:
        raise InvalidUsage(f"cannot pipeline with depth {depth}: at least 1 is required")
    parts = schedule.parts * depth
    moves = [_map_to_part_offset(schedule, parts, stage * schedule.parts) for stage in range(depth)]

    def stages(step: Step) -> list[Step]:
        return [_map_refs(step, move) for move in moves] if step.chunks else [step]

    scratch = -(-schedule.scratch_chunks // schedule.parts) * parts
    return replace(_map_steps(schedule, stages), parts=parts, scratch_chunks=scratch)


def stagger(schedule: Schedule, depth: int) -> Schedule:
    """Cut every chunk into ``depth`` slices that run one after the other and overlap.

    A slice starts when the one before is half through: while a rank processes a message, the other
    slice's is on its way. For schedules in which every message of a FIFO is sent and received after
    the same number of receives, but for a constant, so that both ends reorder alike. Raise
    ``InvalidUsage`` if a message spans blocks.
    """
    if depth < 1:
        raise InvalidUsage(f"cannot stagger {depth} slices: at least 1 is required")
    parts = schedule.parts * depth
    moves = [_map_to_part_offset(schedule, parts, stage * schedule.parts) for stage in range(depth)]

    def staggered(steps: Sequence[Step]) -> tuple[Step, ...]:
        # stages: the steps from one receive up to the next one
        stages: list[list[Step]] = [[]]
        for step in steps:
            if step.recv_peer is not None:
                stages.append([])
            stages[-1].append(step)
        interval = max(1, len(stages) // 2)
        return tuple(
            _map_refs(step, moves[slice_])
            for turn in range(interval * (depth - 1) + len(stages))
            for slice_ in range(depth)
            if 0 <= turn - interval * slice_ < len(stages)
            for step in stages[turn - interval * slice_]
        )

    channels = tuple(tuple(map(staggered, ranks)) for ranks in schedule.channels)
    scratch = -(-schedule.scratch_chunks // schedule.parts) * parts
    return replace(schedule, channels=channels, parts=parts, scratch_chunks=scratch)


def split_messages(schedule: Schedule) -> Schedule:
    """Split steps of several chunks into steps of one chunk; the bytes stay the same."""

    def single(step: Step) -> list[Step]:
        count = step.chunks
        return (
            [step]
            if count <= 1
            else [
                _map_refs(step, lambda ref, k=k: Ref(ref.buffer, ref.index + k, 1, ref.table))  # type: ignore[misc]
                for k in range(count)
            ]
        )

    return _map_steps(schedule, single)


def relabel(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Return the schedule with rank ``order[i]`` in the role of rank ``i``.

    Used to make a ring follow the machine's links. Blocks that belong to ranks are relabelled as
    well. Peers of folds are sorted, so sums in rank order stay in rank order. Raise
    ``InvalidUsage`` if ``order`` is not a permutation or a message spans blocks that are no longer
    adjacent.
    """
    nranks, parts = schedule.nranks, schedule.parts
    if sorted(order) != list(range(nranks)):
        raise InvalidUsage(f"cannot relabel: {list(order)} is not a permutation of {nranks} ranks")
    per_rank = {
        Buffer.INPUT: input_blocks(schedule.collective, nranks) == nranks > 1,
        Buffer.OUTPUT: output_blocks(schedule.collective, nranks) == nranks > 1,
        Buffer.SCRATCH: False,
    }

    def move(ref: Ref) -> Ref:
        if not per_rank[ref.buffer]:
            return ref
        chunks = [order[chunk // parts] * parts + chunk % parts for chunk in ref]
        return _contiguous_ref(ref, chunks)

    def peer(rank: int | None) -> int | None:
        return None if rank is None else order[rank]

    def renamed(step: Step) -> list[Step]:
        peers = tuple(order[rank] for rank in step.peers)
        peers = tuple(sorted(peers)) if step.op.reduces else peers
        return [
            replace(
                _map_refs(step, move),
                recv_peer=peer(step.recv_peer),
                send_peer=peer(step.send_peer),
                peers=peers,
            )
        ]

    role = {rank: i for i, rank in enumerate(order)}
    moved = _map_steps(schedule, renamed)
    channels = tuple(tuple(ranks[role[rank]] for rank in range(nranks)) for ranks in moved.channels)
    return replace(
        moved, channels=channels, root=order[schedule.root] if schedule.collective.rooted else 0
    )


_FUSED = {
    Op.RECV: Op.RECV_COPY_SEND,
    Op.RECV_REDUCE: Op.RECV_REDUCE_COPY_SEND,
    Op.RECV_REDUCE_COPY: Op.RECV_REDUCE_COPY_SEND,
}


def fuse(schedule: Schedule) -> Schedule:
    """Merge each receiving step with a SEND of the same chunks that follows it directly.

    The data is then read from memory once instead of twice.
    """

    def joined(steps: Iterable[Step]) -> tuple[Step, ...]:
        done: list[Step] = []
        for step in steps:
            last = done[-1] if done else None
            if (
                last is not None
                and step.op is Op.SEND
                and last.op in _FUSED
                and last.dst == step.src
            ):
                source = last.dst if last.op is Op.RECV_REDUCE else last.src
                done[-1] = replace(last, op=_FUSED[last.op], src=source, send_peer=step.send_peer)
            else:
                done.append(step)
        return tuple(done)

    channels = tuple(tuple(joined(steps) for steps in ranks) for ranks in schedule.channels)
    return replace(schedule, channels=channels)


def _map_steps(schedule: Schedule, change: Callable[[Step], list[Step]]) -> Schedule:
    channels = tuple(
        tuple(tuple(new for step in steps for new in change(step)) for steps in ranks)
        for ranks in schedule.channels
    )
    return replace(schedule, channels=channels)


def _map_refs(step: Step, move: RefMap) -> Step:
    if step.src is None and step.dst is None:
        return step
    src = None if step.src is None else move(step.src)
    return replace(step, src=src, dst=None if step.dst is None else move(step.dst))


def _map_to_part_offset(schedule: Schedule, parts: int, offset: int) -> RefMap:
    """Return the map of chunks when blocks have ``parts`` chunks and ``schedule``'s start at
    ``offset``.
    """
    old = schedule.parts

    def move(ref: Ref) -> Ref:
        return _contiguous_ref(ref, [chunk // old * parts + offset + chunk % old for chunk in ref])

    return move


def _contiguous_ref(ref: Ref, chunks: list[int]) -> Ref:
    """Return ``ref`` moved to ``chunks``; raise ``InvalidUsage`` if they are not contiguous."""
    if chunks[-1] - chunks[0] != len(chunks) - 1 or any(b - a != 1 for a, b in pairwise(chunks)):
        raise InvalidUsage(
            f"cannot move {ref}: it spans blocks whose chunks do not stay contiguous; apply"
            " split_messages first"
        )
    return Ref(ref.buffer, chunks[0], len(chunks), ref.table)


def supports_channels(schedule: Schedule) -> bool:
    """Return True if ``split_channels`` and ``pipeline`` accept ``schedule``: no message spans
    blocks.
    """
    if schedule.collective is Collective.BARRIER:
        return True
    parts = schedule.parts
    refs = (
        ref
        for ranks in schedule.channels
        for steps in ranks
        for step in steps
        for ref in (step.src, step.dst)
        if ref is not None
    )
    return all(ref.index // parts == (ref.index + ref.chunks - 1) // parts for ref in refs)
