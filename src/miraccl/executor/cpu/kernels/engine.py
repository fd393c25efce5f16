"""The entries of the executor: run a program, and the doors through which Python calls it.

A *door* is a Python builtin for one collective of one communicator.  It is handed the user's arrays themselves, reads their
headers, looks the plan up and runs it, all in compiled code; whatever is not an everyday call (another kind of array, a size never
seen, asynchronous work pending) makes it return ``NEED_PLAN`` or ``BUSY`` before anything was sent, and Python takes the long way.
"""

from __future__ import annotations

from typing import Any

from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.arguments import READABLE, WRITABLE, dtype_code, elements, small_int, usable
from miraccl.executor.cpu.kernels.board import begin_operation
from miraccl.executor.cpu.kernels.counts import set_counts, size_class
from miraccl.executor.cpu.kernels.messages import connection, drain
from miraccl.executor.cpu.kernels.p2p import exchange_all, item_size
from miraccl.executor.cpu.kernels.peer_memory import all_in_windows
from miraccl.executor.cpu.kernels.steps import do_step
from miraccl.executor.cpu.kernels.tagged import put_message, take_message
from miraccl.executor.cpu.kernels.transfers import send_and_receive, send_or_receive
from miraccl.executor.cpu.kernels.uneven import elements_before, read_call_counts
from miraccl.executor.cpu.kernels.waiting import LONG_BYTES, fail, release_gil, restore_gil
from miraccl.executor.cpu.sizes import UNKNOWN_BYTES
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
from miraccl.types import Collective

DOOR_CTX, DOOR_COLL, DOOR_ARG, DOOR_RUN = 0, 8, 16, 24
ALL_GATHER, REDUCE_SCATTER = int(Collective.ALL_GATHER), int(Collective.REDUCE_SCATTER)
GATHER, SCATTER = int(Collective.GATHER), int(Collective.SCATTER)
ALL_REDUCE, BROADCAST, REDUCE = int(Collective.ALL_REDUCE), int(Collective.BROADCAST), int(Collective.REDUCE)
ALL_TO_ALL = int(Collective.ALL_TO_ALL)
write_counts = inline(set_counts)


@inline
def run_program(ctx: int, run: int) -> int:
    """Execute a run whose addresses and signature are set; OK or an ERR_*."""
    store(ctx + at.CTX_DEADLINE, 0)
    if load(run + at.RUN_MEMORY) != 0:
        code = all_in_windows(ctx, run)
        if code == at.OK:
            memory = load(run + at.RUN_MEMORY)
            store(memory + at.RUN_IN, load(run + at.RUN_IN))
            store(memory + at.RUN_OUT, load(run + at.RUN_OUT))
            store(memory + at.RUN_SIG, load(run + at.RUN_SIG))
            store(ctx + at.CTX_LAST_PLAN, memory)
            run = memory
        elif code != at.NEED_PLAN:
            return code
    store(ctx + at.CTX_STREAM, load(run + at.RUN_STREAM))
    steps = load(run + at.RUN_PROGRAM)
    count = load(run + at.RUN_NSTEPS)
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


def operate(ctx: int, run: int, template: int, unused: int) -> int:
    """Run the next operation of the communicator: number it, sign it, put it on the board.

    The one copy of the executor: doors call it through the context, which keeps compilation to a few seconds.
    """
    store(run + at.RUN_SIG, begin_operation(ctx, template, load(run + at.RUN_COUNT)))
    ctrl = load(ctx + at.CTX_CTRL)
    if load_acquire(ctrl + at.CTRL_ABORT) != 0:
        return fail(ctx, at.ERR_ABORTED, -1, 0, load(ctrl + at.CTRL_ABORT))
    code = run_program(ctx, run)
    if code == at.OK:
        store_release(ctrl + at.BOARD_STATE, at.STATE_IDLE)
    return code


# ---- plans


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


@inline
def overlap(coll: int, source: int, nbytes: int, target: int, out_bytes: int, before: int) -> int:
    """0 if input and output are apart, 1 if they lie as the collective's in-place form has them, -1 otherwise. ``before``: bytes of the
    blocks before this rank's, where one of them has a block for each rank."""
    if nbytes == 0 or out_bytes == 0 or source >= target + out_bytes or target >= source + nbytes:
        return 0
    if coll == ALL_GATHER and source == target + before:
        return 1
    if coll == REDUCE_SCATTER and target == source + before:
        return 1
    if coll == ALL_REDUCE and source == target:
        return 1
    return -1


@inline
def parse_and_run(door: int, ctx: int, args: int) -> int:
    """(input, output or None, operator or root) -> result."""
    coll = load(door + DOOR_COLL)
    x, out, third = load(args), load(args + 8), load(args + 16)
    if not usable(ctx, x, READABLE):
        return at.NEED_PLAN
    arg = small_int(ctx, third, at.CTX_REDOP_TYPE if coll == ALL_REDUCE or coll == REDUCE_SCATTER else at.CTX_INT_TYPE)
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
        nbytes, out_bytes = count * item_size(dtype), out_count * item_size(dtype)
        in_place = overlap(coll, source, nbytes, target, out_bytes, load(ctx + at.CTX_RANK) * min(nbytes, out_bytes))
        if in_place < 0:
            return at.NEED_PLAN  # Python says what is wrong
    run = find_plan(ctx, coll, count, out_count, dtype, arg, in_place)
    return start_on(ctx, run, source, target)


@inline
def parse_rooted(door: int, ctx: int, args: int) -> int:
    """(input, output, root, None, None) -> result of gather or scatter, whose one side only the root has; the others' is not looked at."""
    coll = load(door + DOOR_COLL)
    none = load(ctx + at.CTX_NONE)
    root = small_int(ctx, load(args + 16), at.CTX_INT_TYPE)
    if root < 0 or load(args + 24) != none or load(args + 32) != none:
        return at.NEED_PLAN
    is_root = root == load(ctx + at.CTX_RANK)
    has_input, has_output = is_root or coll == GATHER, is_root or coll == SCATTER
    x, out = load(args if has_input else args + 8), load(args + 8 if has_output else args)
    if not usable(ctx, x, READABLE) or not usable(ctx, out, WRITABLE if has_output else READABLE):
        return at.NEED_PLAN
    dtype = dtype_code(ctx, x)
    if dtype < 0 or dtype_code(ctx, out) != dtype:
        return at.NEED_PLAN
    count, out_count = elements(x) if has_input else 0, elements(out) if has_output else 0
    source, target = load(x + at.ARRAY_DATA), load(out + at.ARRAY_DATA)
    if is_root and overlap(coll, source, count * item_size(dtype), target, out_count * item_size(dtype), 0) != 0:
        return at.NEED_PLAN
    run = find_plan(ctx, coll, count, out_count, dtype, root, 0)
    return start_on(ctx, run, source, target)


@inline
def parse_reduce(ctx: int, args: int) -> int:
    """(input, output or None, operator, False, None, root) -> result of reduce, whose output is the root's alone; the others' is not looked
    at."""
    x, out = load(args), load(args + 8)
    op, root = small_int(ctx, load(args + 16), at.CTX_REDOP_TYPE), small_int(ctx, load(args + 40), at.CTX_INT_TYPE)
    if op < 0 or root < 0 or not usable(ctx, x, READABLE):
        return at.NEED_PLAN
    dtype, count, source = dtype_code(ctx, x), elements(x), load(x + at.ARRAY_DATA)
    if dtype < 0:
        return at.NEED_PLAN
    target, in_place = source, 1
    if root == load(ctx + at.CTX_RANK):
        if out == load(ctx + at.CTX_NONE):
            out = x
        if not usable(ctx, out, WRITABLE) or dtype_code(ctx, out) != dtype or elements(out) != count:
            return at.NEED_PLAN
        target = load(out + at.ARRAY_DATA)
        in_place = overlap(ALL_REDUCE, source, count * item_size(dtype), target, count * item_size(dtype), 0)
        if in_place < 0:
            return at.NEED_PLAN
    run = find_plan(ctx, REDUCE, count, count, dtype, root << 3 | op, in_place)
    return start_on(ctx, run, source, target)


@inline
def parse_uneven(door: int, ctx: int, args: int, lists: int) -> int:
    """(input, output, operator or root or None) and the counts of input and output, of which some collectives have one -> result; of what
    is rooted, the side that only the root has is not looked at on the others."""
    coll, third, arg = load(door + DOOR_COLL), load(args + 16), 0
    if coll == REDUCE_SCATTER:
        arg = small_int(ctx, third, at.CTX_REDOP_TYPE)
    elif coll == GATHER or coll == SCATTER:
        arg = small_int(ctx, third, at.CTX_INT_TYPE)
    count, out_count, most = read_call_counts(ctx, coll, lists)
    if arg < 0 or count < 0:
        return at.NEED_PLAN
    is_root = arg == load(ctx + at.CTX_RANK)
    has_input, has_output = coll != SCATTER or is_root, coll != GATHER or is_root
    x, out = load(args if has_input else args + 8), load(args + 8 if has_output else args)
    if not usable(ctx, x, READABLE) or not usable(ctx, out, WRITABLE if has_output else READABLE):
        return at.NEED_PLAN
    dtype = dtype_code(ctx, x)
    if dtype < 0 or dtype_code(ctx, out) != dtype:
        return at.NEED_PLAN
    if (has_input and elements(x) != count) or (has_output and elements(out) != out_count):
        return at.NEED_PLAN
    source, target, itemsize = load(x + at.ARRAY_DATA), load(out + at.ARRAY_DATA), item_size(dtype)
    table, nranks = load(ctx + at.CTX_COUNTS), load(ctx + at.CTX_NRANKS)
    in_place = 0
    if has_input and has_output:
        in_place = overlap(coll, source, count * itemsize, target, out_count * itemsize, elements_before(ctx, coll) * itemsize)
        if in_place < 0:
            return at.NEED_PLAN
    else:
        blocks = table + at.COUNTS_BLOCKS + (8 if has_input else 0)
        for i in range(nranks):
            store(blocks + 8 * i, 0)
    nbytes = UNKNOWN_BYTES if coll == ALL_TO_ALL else most * itemsize
    run = find_plan(ctx, coll | at.UNEVEN, size_class(nbytes), 0, dtype, arg, in_place)
    if run != 0:
        write_counts(run, table, 0, 0)
    return start_on(ctx, run, source, target)


@inline
def enter(ctx: int) -> bool:
    """Whether the engine may run now; the GIL makes the test and the set one."""
    if load(ctx + at.CTX_BUSY) != 0 or load32(load(ctx + at.CTX_GROUPS)) != 0 or load(ctx + at.CTX_INSIDE) != 0:
        return False
    store(ctx + at.CTX_INSIDE, 1)
    return True


@inline
def enter_anyway(ctx: int) -> bool:
    """As ``enter``, whatever Python's reasons to be busy are."""
    if load(ctx + at.CTX_INSIDE) != 0:
        return False
    store(ctx + at.CTX_INSIDE, 1)
    return True


@inline
def leave(ctx: int, code: int) -> int:
    restore_gil(ctx)
    store(ctx + at.CTX_INSIDE, 0)
    return PyLong_FromLong(code)


@inline
def start(ctx: int, run: int) -> int:
    if load(ctx + at.CTX_THREADED) != 0 or load(run + at.RUN_IN_BYTES) + load(run + at.RUN_OUT_BYTES) > LONG_BYTES:
        release_gil(ctx)
    store(ctx + at.CTX_LAST_PLAN, run)
    return call4(load(ctx + at.CTX_OPERATE), ctx, run, load(run + at.RUN_TEMPLATE), 0)


@inline
def start_on(ctx: int, run: int, source: int, target: int) -> int:
    """Start a run on these addresses; without one (0), Python makes it."""
    if run == 0:
        return at.NEED_PLAN
    store(run + at.RUN_IN, source)
    store(run + at.RUN_OUT, target)
    return start(ctx, run)


@inline
def may_not_enter(ctx: int, options: int) -> int:
    """Enter, unless the last arguments, ``async_op`` and ``stream``, are something else than False and None, which Python looks at, or the
    engine is busy; ``OK``, or what the builtin answers."""
    if load(options) != load(ctx + at.CTX_FALSE) or load(options + 8) != load(ctx + at.CTX_NONE):
        return at.NEED_PLAN
    return at.OK if enter(ctx) else at.BUSY


def collective(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op_or_root, async_op, stream)``."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    refused = may_not_enter(ctx, args + 24)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, parse_and_run(door, ctx, args))


def rooted(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, root, None, None, async_op, stream)``; with counts of blocks in the place of None, Python looks."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    refused = may_not_enter(ctx, args + 40)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, parse_rooted(door, ctx, args))


def reduce(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op, async_op, stream, root)``."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    refused = may_not_enter(ctx, args + 24)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, parse_reduce(ctx, args))


def uneven(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, root or None, counts of x, counts of out, async_op, stream)``."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    refused = may_not_enter(ctx, args + 40)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, parse_uneven(door, ctx, args, args + 24))


def uneven_reduce(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, out, op, async_op, stream, counts)`` of reduce_scatter."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    refused = may_not_enter(ctx, args + 24)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, parse_uneven(door, ctx, args, args + 40))


def prepared(self: int, args: int, nargs: int) -> int:
    """Builtin ``door()`` of a persistent operation: everything is in the run already."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    if not enter(ctx):
        return PyLong_FromLong(at.BUSY)
    return leave(ctx, start(ctx, load(door + DOOR_RUN)))


def launch(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(run, input address, output address, counts address)``, whatever Python's reasons to be busy are; no counts (0) for
    a run that has them already."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    if not enter_anyway(ctx):
        return PyLong_FromLong(at.BUSY)
    run = PyLong_AsLong(load(args))
    counts = PyLong_AsLong(load(args + 24))
    if counts != 0:
        write_counts(run, counts, 0, 0)
    return leave(ctx, start_on(ctx, run, PyLong_AsLong(load(args + 8)), PyLong_AsLong(load(args + 16))))


# ---- point to point


def send_recv(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(array, peer, async_op, stream)``."""
    door = PyLong_AsLong(self)
    ctx = load(door + DOOR_CTX)
    refused = may_not_enter(ctx, args + 16)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, send_or_receive(ctx, args, load(door + DOOR_ARG) != 0))


def sendrecv(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(x, dst, out, src, async_op, stream)``."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    refused = may_not_enter(ctx, args + 32)
    return PyLong_FromLong(refused) if refused != at.OK else leave(ctx, send_and_receive(ctx, args))


def exchange(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(table, count)``: a group of sends and receives, see ``kernels.p2p``."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    if not enter_anyway(ctx):
        return PyLong_FromLong(at.BUSY)
    release_gil(ctx)
    return leave(ctx, exchange_all(ctx, PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8))))


def put_tagged(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(peer, tag, address, bytes, row)``, see ``kernels.tagged``."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    if not enter_anyway(ctx):
        return PyLong_FromLong(at.BUSY)
    peer, tag, address = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8)), PyLong_AsLong(load(args + 16))
    return leave(ctx, put_message(ctx, peer, tag, address, PyLong_AsLong(load(args + 24)), PyLong_AsLong(load(args + 32))))


def take_tagged(self: int, args: int, nargs: int) -> int:
    """Builtin ``door(table, count, first, tag, address, bytes, row, nanoseconds)``, see ``kernels.tagged``: the source, or another result,
    negative."""
    ctx = load(PyLong_AsLong(self) + DOOR_CTX)
    if not enter_anyway(ctx):
        return PyLong_FromLong(-at.BUSY)
    table, count, first = PyLong_AsLong(load(args)), PyLong_AsLong(load(args + 8)), PyLong_AsLong(load(args + 16))
    tag, address, nbytes = PyLong_AsLong(load(args + 24)), PyLong_AsLong(load(args + 32)), PyLong_AsLong(load(args + 40))
    store(ctx + at.CTX_TIMEOUT_NS, PyLong_AsLong(load(args + 56)))
    return leave(ctx, take_message(ctx, table, count, first, tag, address, nbytes, PyLong_AsLong(load(args + 48))))


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
    "put_tagged": put_tagged,
    "take_tagged": take_tagged,
}
