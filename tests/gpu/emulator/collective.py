"""One collective on emulated GPUs: planned and lowered as for real ones, compared with its definition."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from miraccl.executor.cuda import lower
from miraccl.executor.cuda.plan import DevicePlan, Request, choose, kernel_spec
from miraccl.schedule.interpret import expected
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective
from tests.gpu.emulator import Machine
from tests.gpu.worker import compare, make_input

_SHARED_IN = (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
_GATHERED_OUT = (Collective.ALL_GATHER, Collective.ALL_TO_ALL)


def run(
    machine: Machine,
    asked: Request,
    plan: DevicePlan | None = None,
    *,
    repeat: int = 1,
    offset: int = 0,
    close: bool = False,
    scalars: Sequence[float] | None = None,
    inputs: Sequence[Any] | None = None,
    order: Sequence[int] = (),
) -> list[str]:
    """What was wrong, per rank; arrays begin ``offset`` elements after an aligned address. Launched ``repeat`` times.

    ``order`` is that of the ring, where it is not that of the ranks."""
    plan = plan or choose(asked)
    spec, nranks = kernel_spec(plan, asked), asked.nranks
    width = nranks if asked.collective in _SHARED_IN else 1
    inputs = inputs or [make_input(r, asked.count * width, asked.dtype, 1) for r in range(nranks)]
    whole = [x if asked.collective is not Collective.BROADCAST or r == asked.root else None for r, x in enumerate(inputs)]
    wants = expected(asked.collective, whole, op=asked.op, root=asked.root, scalars=scalars)
    rooted = asked.collective in (Collective.BROADCAST, Collective.REDUCE)
    answers = [""] * nranks
    for _ in range(repeat):
        sources = [_placed(x, offset) for x in inputs]
        size = asked.count * (nranks if asked.collective in _GATHERED_OUT else 1)
        targets = sources if rooted else [_placed(np.zeros(size, NUMPY_DTYPE[asked.dtype]), offset) for _ in range(nranks)]
        args, blocks = [], 0
        for rank in range(nranks):
            mine = replace(asked, scalar=scalars[rank]) if scalars else asked
            schedule, fixed = lower.schedule_of(plan, asked, order), machine.fixed(rank, order)
            block = lower.lower_steps(schedule, plan, mine, fixed) if schedule else lower.lower_packets(plan, mine, fixed)
            blocks = lower.grid_of(plan, schedule)
            struct.pack_into("<QQ", block, 0, sources[rank].ctypes.data, targets[rank].ctypes.data)
            args.append(block)
        machine.launch(spec, args, blocks)
        for rank in range(nranks):
            defined = wants[rank]
            want = inputs[rank] if defined is None else defined
            scale = None
            if close:
                scale = sum(np.abs(x.astype(np.float64)) for x in inputs) if asked.reduces else np.abs(want.astype(np.float64))
                if asked.collective is Collective.REDUCE_SCATTER:
                    scale = scale[rank * asked.count : (rank + 1) * asked.count]
            answers[rank] = answers[rank] or compare(targets[rank], want, asked.dtype, scale)
    for rank, error in enumerate(machine.errors()):
        answers[rank] = answers[rank] or (f"error word {error}" if error else "")
    if not machine.packets_are_cleared():
        answers[0] = answers[0] or "packets were left behind"
    return answers


def _placed(array: Any, offset: int) -> Any:
    """A copy ``offset`` elements after a multiple of 64 bytes."""
    size = array.dtype.itemsize
    room = np.zeros(array.size * size + 128 + offset * size, np.uint8)
    start = -room.ctypes.data % 64 + offset * size
    placed = room[start : start + array.size * size].view(array.dtype)
    placed[:] = array
    return placed
