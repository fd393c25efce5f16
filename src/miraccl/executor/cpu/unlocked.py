"""Kernel source: a prepared operation that is started by compiled code, on a thread that does not hold the interpreter's lock."""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout as at
from miraccl.native.intrinsics import call4, load, store

NOT_BEGUN = -1
NOT_FROM_PYTHON = -1  # of CTX_TSTATE: there is no lock to let go of, and signals are not this thread's


def run_unlocked(ctx: int, run: int, unused: int, unused2: int) -> int:
    """Run ``run``, whose addresses are set: OK, an ERR_*, or NOT_BEGUN where the doors are shut. One thread at a time may be in a
    context; the caller sees to that."""
    if load(ctx + at.CTX_BUSY) != 0 or load(ctx + at.CTX_INSIDE) != 0:
        return NOT_BEGUN
    store(ctx + at.CTX_INSIDE, 1)
    store(ctx + at.CTX_TSTATE, NOT_FROM_PYTHON)
    store(ctx + at.CTX_LAST_PLAN, run)
    code = call4(load(ctx + at.CTX_OPERATE), ctx, run, load(run + at.RUN_TEMPLATE), 0)
    store(ctx + at.CTX_TSTATE, 0)
    store(ctx + at.CTX_INSIDE, 0)
    return code


EXPORTS: dict[str, Any] = {"run_unlocked": run_unlocked}
