"""Lowering of a schedule to the arguments of the kernel ``steps``, which interprets it in protocol
Simple (source/steps.cuh).

The slots of a FIFO, the layout of a buffer half and the blocks of a launch follow from the
schedule; all ranks compute the same.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.lower import (
    CommArgs,
    lower_packets,
    pack_args,
    plan_signature,
    scalar_bits,
)
from miraccl.executor.cuda.plan import DevicePlan, Request, kernel_spec
from miraccl.executor.cuda.source import KernelSpec
from miraccl.schedule import catalog
from miraccl.schedule.interpret import completing_steps
from miraccl.schedule.ir import Buffer, Op, Schedule, Step
from miraccl.schedule.verify import FIFO_DEPTH, verify
from miraccl.types import Collective, RedOp

MAX_CHUNKS = 255  # of a step: one byte in layout.STEP


def part_elements(count: int, parts: int, itemsize: int) -> int:
    """Return the elements of a part, a whole number of vectors, so that parts begin on 16 bytes.

    All parts are equal but the last ones, which may be shorter or empty.
    """
    per_vector = max(1, 16 // itemsize)
    return max(1, -(-count // (parts * per_vector))) * per_vector


def schedule_of(plan: DevicePlan, request: Request, order: Sequence[int]) -> Schedule | None:
    """Return the schedule for the kernel ``steps``; None for a packet plan.

    ``order``: order of the ring, for schedules in which only neighbours communicate.
    """
    return (
        None
        if plan.uses_packets
        else catalog.build(plan.algo, request.collective, request.nranks, request.root, order=order)
    )


@dataclass(frozen=True, kw_only=True)
class WindowOffsets:
    """Positions of input and output in memory that peers address.

    Attributes:
        in_offsets: Bytes from this rank's input to each peer's, as mapped in this process; empty if
            the input is in no window.
        out_offsets: The same of the output.
        position: Window position, which all ranks must share.
    """

    in_offsets: tuple[int, ...] = ()
    out_offsets: tuple[int, ...] = ()
    position: tuple[int, ...] = ()


NO_WINDOWS = WindowOffsets()


def lower_steps(
    schedule: Schedule,
    plan: DevicePlan,
    request: Request,
    comm_args: CommArgs,
    windows: WindowOffsets = NO_WINDOWS,
) -> bytearray:
    """Return the arguments of the kernel ``steps``; raise ``InvalidUsage`` if it cannot run the
    schedule.
    """
    itemsize = request.dtype.itemsize if request.reduces else 1
    count = request.count if request.reduces else request.block_bytes
    channels = [channel[comm_args.rank] for channel in schedule.channels]
    _check(schedule, channels, request, comm_args.rank)
    _check_windows(schedule, request, windows, comm_args.direct)
    blocks = grid_blocks(plan, schedule) // schedule.nchannels  # of a channel
    part = part_elements(count, schedule.parts, itemsize)
    vector = 16 // itemsize
    senders, nslots = senders_of(schedule), fifo_slots(schedule)
    widest, slots, scratch = half_usage(schedule)
    capacity = part
    if slots + scratch:
        capacity = (
            layout.slot_bytes(slots + scratch, blocks * schedule.nchannels) // widest // 16 * vector
        )
        if not capacity:
            raise InvalidUsage(
                f"cannot run schedule {schedule.name!r}: "
                f"its slots and scratch memory exceed a buffer half of {layout.HALF_BYTES} bytes"
            )
    tile = tile_elements(part, blocks, capacity, vector)
    slot = widest * tile * itemsize if slots else 0
    whole = completing_steps(schedule) if request.op is RedOp.AVG else frozenset()
    first, encoded = [0], b""
    for number, steps in enumerate(channels):
        for index, step in enumerate(steps):
            complete = (number, comm_args.rank, index) in whole
            encoded += b"".join(
                _encode(each, complete)
                for each in _primitives(step, comm_args.rank, schedule.nranks)
            )
        first.append(len(encoded) // struct.calcsize(layout.STEP))
    first += [first[-1]] * (layout.MAX_CHANNELS + 1 - len(first))
    here = [
        senders[comm_args.rank].index(peer) if peer in senders[comm_args.rank] else 0
        for peer in range(request.nranks)
    ]
    there = [peers.index(comm_args.rank) if comm_args.rank in peers else 0 for peers in senders]
    behind = slots * blocks * schedule.nchannels * slot
    shape = (
        part,
        tile,
        schedule.parts,
        schedule.nchannels,
        *first,
        slot,
        behind,
        schedule.scratch_chunks,
    )
    apart = (
        at
        for each in (windows.in_offsets, windows.out_offsets)
        for at in (*each, *[0] * (layout.MAX_RANKS - len(each)))
    )
    head = struct.pack(layout.PROGRAM_HEAD, *shape, *apart, bytes(here), bytes(there))
    table = encoded.ljust(step_capacity(schedule) * struct.calcsize(layout.STEP), b"\0")
    signature = plan_signature(plan, request, windows.position)
    scalar, needs = (
        scalar_bits(request),
        layout.NEEDS_ALL,
    )  # every rank waits for all op records at the end
    args = pack_args(
        comm_args,
        count=count,
        root=request.root,
        nslots=nslots,
        scalar=scalar,
        signature=signature,
        needs=needs,
    )
    return args + bytearray(head + table)


@lru_cache(maxsize=256)
def fifo_slots(schedule: Schedule) -> int:
    """Return the slots of each FIFO: few and large, but as many as the schedule needs to be free of
    deadlock.
    """
    try:
        verify(schedule, fifo_depth=layout.FIFO_SLOTS)
    except ScheduleError:
        return FIFO_DEPTH
    return layout.FIFO_SLOTS


def lower_plan(
    schedule: Schedule | None,
    plan: DevicePlan,
    request: Request,
    comm_args: CommArgs,
    windows: WindowOffsets = NO_WINDOWS,
) -> bytearray:
    """Return the arguments of a plan's kernel; ``schedule`` is the result of ``schedule_of``."""
    if schedule is None:
        return lower_packets(plan, request, comm_args)
    return lower_steps(schedule, plan, request, comm_args, windows)


def kernel_for(plan: DevicePlan, request: Request, schedule: Schedule | None) -> KernelSpec:
    """Return the kernel to compile for a plan; ``schedule`` is the result of ``schedule_of``."""
    spec, capacity = kernel_spec(plan, request), step_capacity(schedule) if schedule else 0
    return replace(spec, capacity=capacity) if capacity > layout.STEP_CAPACITIES[0] else spec


def step_capacity(schedule: Schedule) -> int:
    """Return the steps that the arguments hold, the same on all ranks.

    Raises:
        InvalidUsage: The schedule has more steps of a rank than a launch can hold.
    """
    ranks = (
        [step for channel in schedule.channels for step in channel[rank]]
        for rank in range(schedule.nranks)
    )
    most = max(
        sum(len(_primitives(step, rank, schedule.nranks)) for step in steps)
        for rank, steps in enumerate(ranks)
    )
    for capacity in layout.STEP_CAPACITIES:
        if most <= capacity:
            return capacity
    raise InvalidUsage(
        f"cannot run schedule {schedule.name!r}: it has {most} steps of a rank, "
        f"a launch holds {layout.STEP_CAPACITIES[-1]}"
    )


def tile_elements(part: int, blocks: int, capacity: int, vector: int) -> int:
    """Return the elements of a part's tile for ``blocks`` blocks.

    As many as ``capacity`` allows, but in equal rounds, so that no block works alone at the end.
    """
    # Tiles begin on 128 bytes: 1 GiB in tiles that did not took 358 GB/s instead of 365.
    line = 8 * vector
    if capacity < line:
        return max(vector, capacity)
    rounds = -(-part // (blocks * capacity))
    return min(capacity, -(-part // (blocks * rounds * line)) * line)


def senders_of(schedule: Schedule) -> list[list[int]]:
    """Return the ranks that send to each rank, in the order of its FIFOs."""
    sends = [
        {step.send_peer for channel in schedule.channels for step in channel[r] if step.op.sends}
        for r in range(schedule.nranks)
    ]
    return [
        [peer for peer, targets in enumerate(sends) if rank in targets]
        for rank in range(schedule.nranks)
    ]


def half_usage(schedule: Schedule) -> tuple[int, int, int]:
    """Return (chunks of the widest message, slots of a block, slots' worth of scratch memory)."""
    widest = max(
        (
            step.chunks
            for channel in schedule.channels
            for steps in channel
            for step in steps
            if step.op.sends
        ),
        default=1,
    )
    return (
        widest,
        fifo_slots(schedule) * max(map(len, senders_of(schedule))),
        -(-schedule.scratch_chunks // widest),
    )


def grid_blocks(plan: DevicePlan, schedule: Schedule | None) -> int:
    """Return the blocks of the launch: a multiple of the channels, few enough for their slots to
    fit a
    half.
    """
    if schedule is None:
        return plan.blocks
    (widest, slots, scratch), blocks = (
        half_usage(schedule),
        max(1, plan.blocks // schedule.nchannels),
    )
    while (
        blocks > 1
        and slots + scratch
        and layout.slot_bytes(slots + scratch, blocks * schedule.nchannels) < 16 * widest
    ):
        blocks //= 2
    return blocks * schedule.nchannels


def _check(
    schedule: Schedule, channels: Sequence[Sequence[Step]], request: Request, rank: int
) -> None:
    bystander = schedule.collective is Collective.REDUCE and rank != schedule.root
    here = (step.dst for steps in channels for step in steps if step.op is not Op.PUT)
    if bystander and any(dst and dst.buffer is Buffer.OUTPUT for dst in here):
        raise InvalidUsage(
            f"cannot run schedule {schedule.name!r}: it writes the output of ranks without one"
        )
    if schedule.nchannels > layout.MAX_CHANNELS:
        raise InvalidUsage(
            f"cannot run schedule {schedule.name!r}: it has {schedule.nchannels} channels, "
            f"a launch holds {layout.MAX_CHANNELS}"
        )
    for steps in channels:
        for step in steps:
            if step.chunks > MAX_CHUNKS:
                raise InvalidUsage(
                    f"cannot run schedule {schedule.name!r}: it has a step of "
                    f"{step.chunks} chunks, at most {MAX_CHUNKS} are allowed"
                )
            if (
                request.op is RedOp.PREMUL_SUM
                and step.remote
                and step.remote.buffer is Buffer.INPUT
            ):
                raise InvalidUsage(
                    f"cannot run a pre-multiplied sum with schedule {schedule.name!r}: "
                    "it reads inputs of peers, whose factors this rank does not know"
                )


def _check_windows(
    schedule: Schedule, request: Request, windows: WindowOffsets, direct: bool
) -> None:
    for buffer, at in ((Buffer.INPUT, windows.in_offsets), (Buffer.OUTPUT, windows.out_offsets)):
        if buffer in schedule.addressed and not at:
            name = buffer.name.lower()
            text = (
                f"cannot run {request.collective.label} by {schedule.name!r}: peers access the "
                f"{name}, which is in no window"
            )
            raise InvalidUsage(
                text,
                hint='use memory of comm.empty(..., device="cuda"), '
                "at the same window position on all ranks",
            )
    if Buffer.SCRATCH in schedule.addressed and not direct:
        raise InvalidUsage(
            f"cannot run schedule {schedule.name!r}: it accesses scratch memory of other GPUs, "
            "which have no peer access here"
        )


def _primitives(step: Step, rank: int, nranks: int) -> tuple[Step, ...]:
    """Return the kernel's steps for ``step``: a barrier is a signal to all others and a wait for
    all.
    """
    if step.op is not Op.BARRIER:
        return (step,)
    others = tuple(peer for peer in range(nranks) if peer != rank)
    return (Step(op=Op.SIGNAL, peers=others), Step(op=Op.WAIT, peers=others)) if others else ()


def _encode(step: Step, whole: bool) -> bytes:
    order = sum(peer << (4 * index) for index, peer in enumerate(step.peers))
    return struct.pack(
        layout.STEP,
        step.op,
        step.src.buffer if step.src else 0,
        step.dst.buffer if step.dst else 0,
        len(step.peers),
        -1 if step.recv_peer is None else step.recv_peer,
        -1 if step.send_peer is None else step.send_peer,
        step.chunks,
        whole,
        step.src.index if step.src else 0,
        step.dst.index if step.dst else 0,
        order,
    )
