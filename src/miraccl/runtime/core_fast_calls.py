"""Compiled entry points of a communicator's operations on CPU memory."""

from __future__ import annotations

from miraccl.executor.cpu.context import Context
from miraccl.executor.cpu.lower import Run
from miraccl.fastpath.fast_calls import FastCalls
from miraccl.ops.prepare import barrier
from miraccl.ops.spec import BARRIER, OPS, RECV
from miraccl.planning.planner import Planner
from miraccl.types import Collective


def open_fast_calls(context: Context, planner: Planner) -> tuple[Run, FastCalls]:
    """Return the entry points, and the run of a barrier, which must stay alive."""
    run = planner.make_run(barrier().request)
    prepared = context.fast_call("prepared", Collective.BARRIER, run=run)
    others = {
        op.name: context.fast_call(op.fast_form.value, op.collective, arg=int(op is RECV))
        for op in OPS.values()
        if op is not BARRIER
    }
    return run, FastCalls(barrier=prepared, **others)
