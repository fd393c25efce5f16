"""One collective on emulated GPUs: planned and lowered like real ones, compared with its
definition.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miraccl.executor.cuda import schedules
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import DevicePlan, Request, kernel_spec
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp
from tests.gpu.emulator import EmulatedMachine
from tests.gpu.worker import compare, make_input

_SHARED_IN = (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
_GATHERED_OUT = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)


@functools.cache
def machine(nranks: int) -> EmulatedMachine:
    return EmulatedMachine(nranks)


def make_request(
    collective: Collective,
    dtype: DType,
    count: int,
    nranks: int,
    algo: str,
    proto: str,
    root: int = 0,
) -> Request:
    return Request(
        collective=collective,
        dtype=dtype,
        op=RedOp.SUM,
        count=count,
        nranks=nranks,
        root=root,
        algo=algo,
        proto=proto,
    )


def small_plan(request: Request, unroll: int = 1) -> DevicePlan:
    """Return a request's plan with two blocks of 64 threads, so that there are several tiles."""
    plan = choose(request)
    if not plan.uses_packets:
        return plan
    return DevicePlan(algo=plan.algo, proto=plan.proto, blocks=2, threads=64, unroll=unroll)


def masked_to_ones(count: int, launch: int, seed: int) -> Any:
    """Return words most of which are masked to ones or ESCAPE in a launch (``mask_word`` of
    source/packets.cuh).
    """
    place = np.arange(count, dtype=np.uint64)
    masks = (place * 0x9E3779B1 & 0xFFFFFFFF) ^ ((launch * 0x85EBCA6B + 0x01234567) & 0xFFFFFFFF)
    wanted = (
        np.random.default_rng(seed)
        .choice([0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD, 5], count, p=[0.45, 0.3, 0.05, 0.2])
        .astype(np.uint64)
    )
    if seed % 2:
        wanted[: count // 2] = 5  # none in these
    return (wanted ^ masks).astype(np.uint32)


def run(
    machine: EmulatedMachine,
    asked: Request,
    plan: DevicePlan | None = None,
    *,
    repeat: int = 1,
    offset: int = 0,
    close: bool = False,
    scalars: Sequence[float] | None = None,
    inputs: Sequence[Any] | None = None,
    order: Sequence[int] = (),
    want: Any = None,
) -> list[str]:
    """Run a collective ``repeat`` times and return each rank's differences from the definition.

    ``offset``: elements from an aligned address to the arrays. ``order``: order of the ring.
    ``want``: expected result of all ranks if rounding makes it differ from the definition.
    """
    plan = plan or choose(asked)
    spec, nranks = (
        schedules.kernel_for(plan, asked, schedules.schedule_of(plan, asked, order)),
        asked.nranks,
    )
    width = nranks if asked.collective in _SHARED_IN else 1
    inputs = inputs or [make_input(r, asked.count * width, asked.dtype, 1) for r in range(nranks)]
    whole = [
        x if asked.collective is not Collective.BROADCAST or r == asked.root else None
        for r, x in enumerate(inputs)
    ]
    wants = (
        expected_outputs(asked.collective, whole, op=asked.op, root=asked.root, scalars=scalars)
        if want is None
        else [want] * nranks
    )
    rooted = asked.collective in (Collective.BROADCAST, Collective.REDUCE)
    answers = [""] * nranks
    for _ in range(repeat):
        sources = [_placed(x, offset) for x in inputs]
        size = asked.count * (nranks if asked.collective in _GATHERED_OUT else 1)
        targets = (
            sources
            if rooted
            else [_placed(np.zeros(size, NUMPY_DTYPE[asked.dtype]), offset) for _ in range(nranks)]
        )
        machine.launch(spec, *_lowered(machine, asked, plan, sources, targets, scalars, order))
        for rank in range(nranks):
            defined = wants[rank]
            want = inputs[rank] if defined is None else defined
            scale = None
            if close:
                scale = (
                    sum(np.abs(x.astype(np.float64)) for x in inputs)
                    if asked.reduces
                    else np.abs(want.astype(np.float64))
                )
                if asked.collective is Collective.REDUCE_SCATTER:
                    scale = scale[rank * asked.count : (rank + 1) * asked.count]
            answers[rank] = answers[rank] or compare(targets[rank], want, asked.dtype, scale)
    for rank, error in enumerate(machine.errors()):
        answers[rank] = answers[rank] or (f"error word {error}" if error else "")
    if not machine.packets_are_cleared():
        answers[0] = answers[0] or "packets were left behind"
    return answers


def launch_each(machine: EmulatedMachine, requests: Sequence[Request | None]) -> None:
    """Run one launch with a request per rank; None: the rank does not launch."""
    first = next(request for request in requests if request is not None)
    args, blocks, held = [], [], np.zeros((len(requests), 64 << 10), np.uint8)
    for rank, request in enumerate(requests):
        mine = request or first
        plan, comm_args = small_plan(mine), machine.comm_args(rank)
        schedule = schedules.schedule_of(plan, mine, ())
        args.append(schedules.lower_plan(schedule, plan, mine, comm_args))
        struct.pack_into("<QQ", args[-1], 0, held[rank].ctypes.data, held[rank].ctypes.data)
        blocks.append(schedules.grid_blocks(plan, schedule) if request else 0)
    machine.launch(kernel_spec(small_plan(first), first), args, blocks)


def run_in_a_row(
    machine: EmulatedMachine, operations: Sequence[tuple[Request, DevicePlan]]
) -> list[str]:
    """Run in-place operations on integers, ranks unsynchronised; return the differences."""
    launches, held, wants = [], [], []
    for number, (asked, plan) in enumerate(operations):
        inputs = [make_input(r, asked.count, asked.dtype, number) for r in range(machine.nranks)]
        whole = [
            x if asked.collective is not Collective.BROADCAST or r == asked.root else None
            for r, x in enumerate(inputs)
        ]
        defined = expected_outputs(asked.collective, whole, op=asked.op, root=asked.root)
        wants.append([x if want is None else want for x, want in zip(inputs, defined)])
        held.append([_placed(x, 0) for x in inputs])
        launches.append(
            (kernel_spec(plan, asked), *_lowered(machine, asked, plan, held[-1], held[-1]))
        )
    machine.launch_in_a_row(launches)
    answers = []
    for (asked, _), arrays, want in zip(operations, held, wants):
        wrong = [compare(x, w, asked.dtype, None) for x, w in zip(arrays, want)]
        answers.append(", ".join(f"rank {rank}: {text}" for rank, text in enumerate(wrong) if text))
    if any(machine.errors()) or not machine.packets_are_cleared():
        answers.append(f"error words {machine.errors()}, or packets were left behind")
    return answers


def _lowered(
    machine: EmulatedMachine,
    asked: Request,
    plan: DevicePlan,
    sources: Sequence[Any],
    targets: Sequence[Any],
    scalars: Sequence[float] | None = None,
    order: Sequence[int] = (),
) -> tuple[list[bytearray], int]:
    """Return the arguments of a launch on every rank, and its blocks."""
    schedule, args = schedules.schedule_of(plan, asked, order), []
    for rank in range(machine.nranks):
        mine, comm_args = (
            replace(asked, scalar=scalars[rank]) if scalars else asked,
            machine.comm_args(rank, order),
        )
        in_at, out_at = (
            tuple(x.ctypes.data - arrays[rank].ctypes.data for x in arrays)
            for arrays in (sources, targets)
        )
        windows = schedules.WindowOffsets(
            in_offsets=in_at, out_offsets=out_at
        )  # all ranks are in one process
        args.append(schedules.lower_plan(schedule, plan, mine, comm_args, windows))
        struct.pack_into("<QQ", args[-1], 0, sources[rank].ctypes.data, targets[rank].ctypes.data)
    return args, schedules.grid_blocks(plan, schedule)


def _placed(array: Any, offset: int) -> Any:
    """Return a copy that starts ``offset`` elements after a multiple of 64 bytes."""
    size = array.dtype.itemsize
    room = np.zeros(array.size * size + 128 + offset * size, np.uint8)
    start = -room.ctypes.data % 64 + offset * size
    placed = room[start : start + array.size * size].view(array.dtype)
    placed[:] = array
    return placed
