"""Entry points of the engine: the executor of a program, and the fast path from Python to it.

A fast call is a Python builtin for one collective of one communicator. It receives the user's
arrays, reads their headers, finds the cached plan and runs it, all in compiled code. For anything
uncommon (another kind of array, a new size, pending asynchronous operations) it returns
``NOT_HANDLED`` or ``BUSY`` before anything was sent, and Python takes the slow path.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.calls import (
    FAST_ARG,
    FAST_CTX,
    FAST_RUN,
    parse_and_run,
    parse_reduce,
    parse_rooted,
    parse_uneven,
    start_run,
    start_run_at,
    write_counts,
)
from miraccl.executor.cpu.kernels.counts import set_counts
from miraccl.executor.cpu.kernels.fifo_messages import connection, drain
from miraccl.executor.cpu.kernels.message_calls import send_and_receive, send_or_receive
from miraccl.executor.cpu.kernels.p2p import exchange_all
from miraccl.executor.cpu.kernels.peer_memory import negotiate_window
from miraccl.executor.cpu.kernels.progress_page import begin_operation
from miraccl.executor.cpu.kernels.steps import do_step
from miraccl.executor.cpu.kernels.tagged import recv_tagged_message, send_tagged_message
from miraccl.executor.cpu.kernels.waiting import fail, release_gil, restore_gil
from miraccl.native.intrinsics import (
    PyLong_AsLong,
    PyLong_FromLong,
    call4,
    inline,
    load,
    load32,
    load_acquire,
    store,
    store_release,
)


@inline
def run_program(ctx: int, run: int) -> int:
    """Execute a run whose addresses and signature are set; return OK or an ERR_*."""
    store(ctx + layout.CTX_DEADLINE, 0)
    if load(run + layout.RUN_WINDOW_PATH) != 0:
        code = negotiate_window(ctx, run)
        if code == layout.OK:
            window_run = load(run + layout.RUN_WINDOW_PATH)
            store(window_run + layout.RUN_IN, load(run + layout.RUN_IN))
            store(window_run + layout.RUN_OUT, load(run + layout.RUN_OUT))
            store(window_run + layout.RUN_SIG, load(run + layout.RUN_SIG))
            store(ctx + layout.CTX_LAST_RUN, window_run)
            run = window_run
        elif code != layout.NOT_HANDLED:
            return code
    store(ctx + layout.CTX_STREAM, load(run + layout.RUN_STREAM))
    steps = load(run + layout.RUN_PROGRAM)
    count = load(run + layout.RUN_NSTEPS)
    for rnd in range(load(run + layout.RUN_NROUNDS)):
        for i in range(count):
            step = steps + i * layout.STEP_SIZE
            store(ctx + layout.CTX_STEP, i)
            code = do_step(ctx, run, step, rnd)
            if code != layout.OK:
                return code
    if load(run + layout.RUN_DIRECT) >= 0:
        sends = load(run + layout.RUN_SENDS)
        for i in range(load(run + layout.RUN_NSENDS)):
            peer = load(sends + 8 * i)
            code = drain(ctx, connection(ctx, layout.CTX_SEND, peer), peer)
            if code != layout.OK:
                return code
    if load(run + layout.RUN_EPILOGUE) != 0:
        out = load(run + layout.RUN_OUT)
        n = load(run + layout.RUN_OUT_BYTES) // load(run + layout.RUN_ITEMSIZE)
        call4(load(run + layout.RUN_EPILOGUE), out, out, load(run + layout.RUN_EPILOGUE_ARG), n)
    return layout.OK


def operate(ctx: int, run: int, template: int, unused: int) -> int:
    """Run the next operation of the communicator: number, sign and publish it, then execute.

    This is the only compiled copy of the executor: fast calls run it through the context, which
    keeps compilation short.
    """
    store(run + layout.RUN_SIG, begin_operation(ctx, template, load(run + layout.RUN_COUNT)))
    ctrl = load(ctx + layout.CTX_CTRL)
    if load_acquire(ctrl + layout.CTRL_ABORT) != 0:
        return fail(ctx, layout.ERR_ABORTED, -1, 0, load(ctrl + layout.CTRL_ABORT))
    code = run_program(ctx, run)
    if code == layout.OK:
        store_release(ctrl + layout.PROGRESS_STATE, layout.STATE_IDLE)
    return code


@inline
def enter(ctx: int) -> bool:
    """Enter the engine if it may run now; the GIL makes test and set atomic."""
    if (
        load(ctx + layout.CTX_BUSY) != 0
        or load32(load(ctx + layout.CTX_GROUPS)) != 0
        or load(ctx + layout.CTX_INSIDE) != 0
    ):
        return False
    store(ctx + layout.CTX_INSIDE, 1)
    return True


@inline
def enter_unconditionally(ctx: int) -> bool:
    """Enter the engine unless a thread is inside, whatever reasons Python has to be busy."""
    if load(ctx + layout.CTX_INSIDE) != 0:
        return False
    store(ctx + layout.CTX_INSIDE, 1)
    return True


@inline
def leave(ctx: int, code: int) -> int:
    """Leave the engine with the GIL held; return ``code`` as a Python integer."""
    restore_gil(ctx)
    store(ctx + layout.CTX_INSIDE, 0)
    return PyLong_FromLong(code)


@inline
def try_enter(ctx: int, options: int) -> int:
    """Enter the engine for a call whose last two arguments are ``async_op`` and ``stream``.

    Returns OK; NOT_HANDLED unless these are False and None; BUSY if the engine may not run now.
    """
    if load(options) != load(ctx + layout.CTX_FALSE) or load(options + 8) != load(
        ctx + layout.CTX_NONE
    ):
        return layout.NOT_HANDLED
    return layout.OK if enter(ctx) else layout.BUSY


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, out, op_or_root, async_op, stream)``."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    rejected = try_enter(ctx, args + 24)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, parse_and_run(call, ctx, args))
    )


def rooted(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, out, root, None, None, async_op, stream)``; with counts, not handled."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    rejected = try_enter(ctx, args + 40)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, parse_rooted(call, ctx, args))
    )


def reduce(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, out, op, async_op, stream, root)``."""
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    rejected = try_enter(ctx, args + 24)
    return (
        PyLong_FromLong(rejected) if rejected != layout.OK else leave(ctx, parse_reduce(ctx, args))
    )


def uneven(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, out, root or None, counts of x, counts of out, async_op, stream)``."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    rejected = try_enter(ctx, args + 40)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, parse_uneven(call, ctx, args, args + 24))
    )


def uneven_reduce(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, out, op, async_op, stream, counts)`` of reduce_scatter."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    rejected = try_enter(ctx, args + 24)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, parse_uneven(call, ctx, args, args + 40))
    )


def prepared(self: int, args: int, nargs: int) -> int:
    """Builtin ``call()`` of a persistent operation: the run has all arguments."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    if not enter(ctx):
        return PyLong_FromLong(layout.BUSY)
    return leave(ctx, start_run(ctx, load(call + FAST_RUN)))


def launch(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(run, input address, output address, counts address)`` for the slow path.

    ``counts address`` 0: the run has its counts already.
    """
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    if not enter_unconditionally(ctx):
        return PyLong_FromLong(layout.BUSY)
    run = PyLong_AsLong(load(args))
    counts = PyLong_AsLong(load(args + 24))
    if counts != 0:
        write_counts(run, counts, 0, 0)
    return leave(
        ctx, start_run_at(ctx, run, PyLong_AsLong(load(args + 8)), PyLong_AsLong(load(args + 16)))
    )


# ---- point to point


def send_recv(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(array, peer, async_op, stream)``."""
    call = PyLong_AsLong(self)
    ctx = load(call + FAST_CTX)
    rejected = try_enter(ctx, args + 16)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, send_or_receive(ctx, args, load(call + FAST_ARG) != 0))
    )


def sendrecv(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(x, dst, out, src, async_op, stream)``."""
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    rejected = try_enter(ctx, args + 32)
    return (
        PyLong_FromLong(rejected)
        if rejected != layout.OK
        else leave(ctx, send_and_receive(ctx, args))
    )


def exchange(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(table, count)``: a group of sends and receives; see ``kernels.p2p``."""
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    if not enter_unconditionally(ctx):
        return PyLong_FromLong(layout.BUSY)
    release_gil(ctx)
    return leave(ctx, exchange_all(ctx, PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


def send_tagged(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(peer, tag, address, bytes, row)``; see ``kernels.tagged``."""
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    if not enter_unconditionally(ctx):
        return PyLong_FromLong(layout.BUSY)
    peer, tag, address = (
        PyLong_AsLong(load(args)),
        PyLong_AsLong(load(args + 8)),
        PyLong_AsLong(load(args + 16)),
    )
    return leave(
        ctx,
        send_tagged_message(
            ctx, peer, tag, address, PyLong_AsLong(load(args + 24)), PyLong_AsLong(load(args + 32))
        ),
    )


def recv_tagged(self: int, args: int, nargs: int) -> int:
    """Builtin ``call(table, count, first, tag, address, bytes, row, nanoseconds)``; see
    ``kernels.tagged``.

    Returns the source, or another result negated.
    """
    ctx = load(PyLong_AsLong(self) + FAST_CTX)
    if not enter_unconditionally(ctx):
        return PyLong_FromLong(-layout.BUSY)
    table, count, first = (
        PyLong_AsLong(load(args)),
        PyLong_AsLong(load(args + 8)),
        PyLong_AsLong(load(args + 16)),
    )
    tag, address, nbytes = (
        PyLong_AsLong(load(args + 24)),
        PyLong_AsLong(load(args + 32)),
        PyLong_AsLong(load(args + 40)),
    )
    store(ctx + layout.CTX_TIMEOUT_NS, PyLong_AsLong(load(args + 56)))
    return leave(
        ctx,
        recv_tagged_message(
            ctx, table, count, first, tag, address, nbytes, PyLong_AsLong(load(args + 48))
        ),
    )


EXPORTS: dict[str, Any] = {
    "operate": operate,
    "set_counts": set_counts,
    "collective": collective,
    "rooted": rooted,
    "reduce": reduce,
    "uneven": uneven,
    "uneven_reduce": uneven_reduce,
    "prepared": prepared,
    "launch": launch,
    "send_recv": send_recv,
    "sendrecv": sendrecv,
    "exchange": exchange,
    "send_tagged": send_tagged,
    "recv_tagged": recv_tagged,
}
