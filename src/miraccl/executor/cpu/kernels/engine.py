"""The entries of the executor: run a program, and the doors through which Python calls it.

A *door* is a Python builtin for one collective of one communicator.  It is handed the user's arrays themselves, reads their
headers, looks the plan up and runs it, all in compiled code; whatever is not an everyday call (another kind of array, a size never
seen, asynchronous work pending) makes it return ``NEED_PLAN`` or ``BUSY`` before anything was sent, and Python takes the long way.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.messages import (
    acquire,
    can_post_address,
    connection,
    consume,
    drain,
    post,
    post_address,
    post_line,
    receive,
    slot,
    take,
    want,
)
from miraccl.executor.cpu.kernels.steps import do_step
from miraccl.executor.cpu.kernels.waiting import fail, release_gil, restore_gil
from miraccl.native.intrinsics import (
    PyLong_AsLong,
    PyLong_FromLong,
    call4,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    store,
    store_release,
)
from miraccl.types import Collective

DOOR_CTX, DOOR_COLL, DOOR_ARG, DOOR_RUN = 0, 8, 16, 24
SEQ_MASK = 0xFFFF
ALL_GATHER, REDUCE_SCATTER = int(Collective.ALL_GATHER), int(Collective.REDUCE_SCATTER)
ALL_REDUCE, BROADCAST, REDUCE = int(Collective.ALL_REDUCE), int(Collective.BROADCAST), int(Collective.REDUCE)


@inline
def run_program(ctx: int, run: int) -> int:
    """Execute a run whose addresses and signature are set; OK or an ERR_*."""
    steps = load(run + at.RUN_PROGRAM)
    count = load(run + at.RUN_NSTEPS)
    store(ctx + at.CTX_DEADLINE, 0)
    for rnd in range(load(run + at.RUN_NROUNDS)):
        for i in range(count):
            step = steps + i * at.STEP_SIZE
            store(ctx + at.CTX_STEP, i)
            code = do_step(ctx, run, step, rnd)
            if code != at.OK:
                return code
    if load(run + at.RUN_DIRECT) >= 0:
        sends = load(run + at.RUN_SENDS)
        for i in range(load(run + at.RUN_NSENDS)):
            peer = load(sends + 8 * i)
            code = drain(ctx, connection(ctx, at.CTX_SEND, peer), peer)
            if code != at.OK:
                return code
    if load(run + at.RUN_POST) != 0:
        out = load(run + at.RUN_OUT)
        n = load(run + at.RUN_OUT_BYTES) // load(run + at.RUN_ITEMSIZE)
        call4(load(run + at.RUN_POST), out, out, load(run + at.RUN_POST_ARG), n)
    return at.OK


def _operate(ctx: int, run: int, template: int) -> int:
    """Run the next operation of the communicator: number it, sign it, put it on the board."""
    ctrl = load(ctx + at.CTX_CTRL)
    seq = load(ctx + at.CTX_SEQ) + 1
    store(ctx + at.CTX_SEQ, seq)
    sig = template | (seq & SEQ_MASK)
    store(run + at.RUN_SIG, sig)
    store(ctrl + at.BOARD_SIG, sig)
    store(ctrl + at.BOARD_COUNT, load(run + at.RUN_COUNT))
    store_release(ctrl + at.BOARD_SEQ, seq)
    store_release(ctrl + at.BOARD_STATE, at.STATE_RUNNING)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, -1, 0, load(ctrl + at.CTRL_ABORT))
    code = run_program(ctx, run)
    if code == at.OK:
        store_release(ctrl + at.BOARD_STATE, at.STATE_IDLE)
    return code


def operate(ctx: int, run: int, template: int) -> int:
    """For callers that do not hold the GIL (through ctypes): the worker of asynchronous operations."""
    store(ctx + at.CTX_TSTATE, -1)
    code = _run_operate(ctx, run, template)
    store(ctx + at.CTX_TSTATE, 0)
    return code


_run_operate = inline(_operate)


# ---- arrays


@inline
def usable(ctx: int, array: int, flags: int) -> bool:
    if load(array + at.OB_TYPE) != load(ctx + at.CTX_ARRAY_TYPE):
        return False
    return load32(array + at.ARRAY_FLAGS) & flags == flags


@inline
def elements(array: int) -> int:
    dims = load(array + at.ARRAY_DIMS)
    count = 1
    for i in range(load32(array + at.ARRAY_ND)):
        count *= load(dims + 8 * i)
    return count


@inline
def dtype_code(ctx: int, array: int) -> int:
    descr = load(array + at.ARRAY_DESCR)
    table = load(ctx + at.CTX_DTYPES)
    for code in range(12):
        if load(table + 8 * code) == descr:
            return code
    return -1


@inline
def find_plan(ctx: int, coll: int, count: int, out_count: int, dtype: int, arg: int, in_place: int) -> int:
    key = count * 0x9E3779B1 + out_count * 0x85EBCA6B + coll * 0x27D4EB2F + dtype * 0x165667B1 + arg * 0x2545F491 + in_place
    key ^= key >> 15
    mask = load(ctx + at.CTX_PLANS_MASK)
    for probe in range(4):
        entry = load(ctx + at.CTX_PLANS) + ((key + probe) & mask) * at.PLAN_SIZE
        if (
            load(entry + at.PLAN_COUNT) == count
            and load(entry + at.PLAN_COLL) == coll
            and load(entry + at.PLAN_DTYPE) == dtype
            and load(entry + at.PLAN_ARG) == arg
            and load(entry + at.PLAN_INPLACE) == in_place
            and load(entry + at.PLAN_OUT_COUNT) == out_count
        ):
            return load(entry + at.PLAN_RUN)
    return 0


READABLE = at.ARRAY_C_CONTIGUOUS | at.ARRAY_ALIGNED
WRITABLE = READABLE | at.ARRAY_WRITEABLE


@inline
def small_int(ctx: int, thing: int) -> int:
    kind = load(thing + at.OB_TYPE)
    if kind == load(ctx + at.CTX_INT_TYPE) or kind == load(ctx + at.CTX_REDOP_TYPE):
        return PyLong_AsLong(thing)
    return -1


@inline
def parse_and_run(door: int, ctx: int, args: int) -> int:
    """(input, output or None, operator or root) -> result."""
    coll = load(door + DOOR_COLL)
    x, out, third = load(args), load(args + 8), load(args + 16)
    if not usable(ctx, x, READABLE):
        return at.NEED_PLAN
    arg = small_int(ctx, third)
    dtype = dtype_code(ctx, x)
    if dtype < 0 or arg < 0:
        return at.NEED_PLAN
    count = elements(x)
    source = load(x + at.ARRAY_DATA)
    target, out_count, in_place = source, count, 1
    if out == load(ctx + at.CTX_NONE):
        if coll != ALL_REDUCE and coll != BROADCAST:
            return at.NEED_PLAN
        if load32(x + at.ARRAY_FLAGS) & WRITABLE != WRITABLE:
            return at.NEED_PLAN
    else:
        if not usable(ctx, out, WRITABLE) or dtype_code(ctx, out) != dtype:
            return at.NEED_PLAN
        target, out_count = load(out + at.ARRAY_DATA), elements(out)
        in_place = 0
    run = find_plan(ctx, coll, count, out_count, dtype, arg, in_place)
    if run == 0:
        return at.NEED_PLAN
    if in_place == 0 and source < target + load(run + at.RUN_OUT_BYTES) and target < source + load(run + at.RUN_IN_BYTES):
        return at.NEED_PLAN  # overlapping: in place by addresses, or an error; Python decides
    store(run + at.RUN_IN, source)
    store(run + at.RUN_OUT, target)
    if load(ctx + at.CTX_THREADED) != 0:
        release_gil(ctx)
    store(ctx + at.CTX_LAST_PLAN, run)
    return _run_operate(ctx, run, load(run + at.RUN_TEMPLATE))


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op_or_root)``."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    if load(ctx + at.CTX_BUSY) != 0:
        return PyLong_FromLong(at.BUSY)
    store(ctx + at.CTX_BUSY, 1)
    code = parse_and_run(door, ctx, args)
    restore_gil(ctx)
    store(ctx + at.CTX_BUSY, 0)
    return PyLong_FromLong(code)


def prepared(self: int, args: int, nargs: int) -> int:
    """Builtin ``door()`` of a persistent operation: everything is in the run already."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    if load(ctx + at.CTX_BUSY) != 0:
        return PyLong_FromLong(at.BUSY)
    store(ctx + at.CTX_BUSY, 1)
    run = load(door + DOOR_RUN)
    if load(ctx + at.CTX_THREADED) != 0:
        release_gil(ctx)
    code = _run_operate(ctx, run, load(run + at.RUN_TEMPLATE))
    restore_gil(ctx)
    store(ctx + at.CTX_BUSY, 0)
    return PyLong_FromLong(code)


# ---- point to point


@inline
def send_bytes(ctx: int, peer: int, address: int, nbytes: int, sig: int) -> int:
    conn = connection(ctx, at.CTX_SEND, peer)
    code = acquire(ctx, conn, peer)
    if code != at.OK:
        return code
    if nbytes <= at.INLINE_BYTES:
        memcpy(post_line(conn) + at.POST_INLINE, address, nbytes)
        post(ctx, conn, sig, nbytes, at.MODE_INLINE)
        return at.OK
    if can_post_address(ctx, conn, address, nbytes, load(ctx + at.CTX_P2P_DIRECT)):
        post_address(ctx, conn, sig, address, nbytes)
        return drain(ctx, conn, peer)
    piece = load(conn + at.CONN_SLOT_BYTES)
    for start in range(0, nbytes, piece):
        size = min(piece, nbytes - start)
        code = acquire(ctx, conn, peer)
        if code != at.OK:
            return code
        memcpy(slot(conn), address + start, size)
        post(ctx, conn, sig, size, at.MODE_SLOT)
    return at.OK


@inline
def recv_bytes(ctx: int, peer: int, address: int, nbytes: int, sig: int) -> int:
    """Take messages until ``nbytes`` have come; the sender chose how to cut them."""
    conn = connection(ctx, at.CTX_RECV, peer)
    done = 0
    while True:
        if load(conn + at.CONN_KIND) == at.KIND_NET and nbytes - done > at.INLINE_BYTES:
            want(ctx, conn, address + done, nbytes - done)
        code = receive(ctx, conn, peer, sig)
        if code != at.OK:
            return code
        size = load(post_line(conn) + at.POST_BYTES)
        if size > nbytes - done:
            return fail(ctx, at.ERR_SIZE, peer, nbytes, done + size)
        code = take(ctx, conn, peer, address + done, size)
        if code != at.OK:
            return code
        consume(ctx, conn)
        done += size
        if done >= nbytes:
            return at.OK


@inline
def p2p_signature(coll: int, dtype: int, count: int) -> int:
    """As ``signature`` in lower.py makes it, without a sequence number: ranks have different numbers of these."""
    return coll << 16 | dtype << 21 | (count * 0x9E3779B1 & 0x7FFFFF) << 40


@inline
def point_to_point(door: int, ctx: int, args: int) -> int:
    """(array, peer) -> result; the door's argument is 1 for a receive."""
    x = load(args)
    receives = load(door + DOOR_ARG) != 0
    if not usable(ctx, x, WRITABLE if receives else READABLE):
        return at.NEED_PLAN
    peer = small_int(ctx, load(args + 8))
    dtype = dtype_code(ctx, x)
    if dtype < 0 or peer < 0 or peer >= load(ctx + at.CTX_NRANKS) or peer == load(ctx + at.CTX_RANK):
        return at.NEED_PLAN
    table = at.CTX_RECV if receives else at.CTX_SEND
    if load(connection(ctx, table, peer) + at.CONN_KIND) == at.KIND_NONE:
        return at.NEED_PLAN
    ctrl = load(ctx + at.CTX_CTRL)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, peer, 0, load(ctrl + at.CTRL_ABORT))
    count = elements(x)
    sig = p2p_signature(load(door + DOOR_COLL), dtype, count)
    store(ctrl + at.BOARD_P2P_SIG, sig)
    store(ctrl + at.BOARD_P2P_COUNT, count)
    store(ctx + at.CTX_DEADLINE, 0)
    store(ctx + at.CTX_STEP, -1)
    if load(ctx + at.CTX_THREADED) != 0:
        release_gil(ctx)
    nbytes = count * item_size(dtype)
    if receives:
        code = recv_bytes(ctx, peer, load(x + at.ARRAY_DATA), nbytes, sig)
    else:
        code = send_bytes(ctx, peer, load(x + at.ARRAY_DATA), nbytes, sig)
    if code == at.OK:
        store_release(ctrl + at.BOARD_P2P_SIG, 0)
    return code


@inline
def item_size(dtype: int) -> int:
    if dtype < 2 or dtype > 9:
        return 1
    if dtype == 6 or dtype == 9:
        return 2
    if dtype == 4 or dtype == 5 or dtype == 8:
        return 8
    return 4


def send_recv(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(array, peer)``."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    if load(ctx + at.CTX_BUSY) != 0:
        return PyLong_FromLong(at.BUSY)
    store(ctx + at.CTX_BUSY, 1)
    code = point_to_point(door, ctx, args)
    restore_gil(ctx)
    store(ctx + at.CTX_BUSY, 0)
    return PyLong_FromLong(code)


EXPORTS: dict[str, Any] = {
    "collective": collective,
    "prepared": prepared,
    "send_recv": send_recv,
    "operate": operate,
}
