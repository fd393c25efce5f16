"""From the arguments of a call to its run: read and check them, find the plan, start its run.

Each ``parse_*`` returns the result of the run, or ``NOT_HANDLED`` for an uncommon call, which the
slow path checks and explains.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.arguments import (
    READABLE,
    WRITABLE,
    common_dtype,
    dtype_code,
    element_count,
    is_usable,
    small_int,
)
from miraccl.executor.cpu.kernels.counts import set_counts, size_class
from miraccl.executor.cpu.kernels.p2p import item_size
from miraccl.executor.cpu.kernels.uneven import elements_before, read_call_counts
from miraccl.executor.cpu.kernels.waiting import RELEASE_GIL_BYTES, release_gil
from miraccl.executor.cpu.sizes import UNKNOWN_BYTES
from miraccl.native.intrinsics import call4, inline, load, load32, store
from miraccl.types import Collective

FAST_CTX, FAST_COLL, FAST_ARG, FAST_RUN = 0, 8, 16, 24
ALL_GATHER, REDUCE_SCATTER = int(Collective.ALL_GATHER), int(Collective.REDUCE_SCATTER)
GATHER, SCATTER = int(Collective.GATHER), int(Collective.SCATTER)
ALL_REDUCE, BROADCAST, REDUCE = (
    int(Collective.ALL_REDUCE),
    int(Collective.BROADCAST),
    int(Collective.REDUCE),
)
ALL_TO_ALL = int(Collective.ALL_TO_ALL)
write_counts = inline(set_counts)


@inline
def start_run(ctx: int, run: int) -> int:
    """Run ``run``, whose addresses are set, as the communicator's next operation."""
    if (
        load(ctx + layout.CTX_THREADED) != 0
        or load(run + layout.RUN_IN_BYTES) + load(run + layout.RUN_OUT_BYTES) > RELEASE_GIL_BYTES
    ):
        release_gil(ctx)
    store(ctx + layout.CTX_LAST_RUN, run)
    return call4(load(ctx + layout.CTX_OPERATE), ctx, run, load(run + layout.RUN_TEMPLATE), 0)


@inline
def start_run_at(ctx: int, run: int, source: int, target: int) -> int:
    """Start a run on these addresses; NOT_HANDLED if ``run`` is 0."""
    if run == 0:
        return layout.NOT_HANDLED
    store(run + layout.RUN_IN, source)
    store(run + layout.RUN_OUT, target)
    return start_run(ctx, run)


@inline
def find_plan(
    ctx: int, coll: int, count: int, out_count: int, dtype: int, arg: int, in_place: int
) -> int:
    """Return the cached run for these properties, 0 if there is none."""
    key = (
        count * 0x9E3779B1
        + out_count * 0x85EBCA6B
        + coll * 0x27D4EB2F
        + dtype * 0x165667B1
        + arg * 0x2545F491
        + in_place
    )
    key ^= key >> 15
    mask = load(ctx + layout.CTX_PLANS_MASK)
    for probe in range(4):
        entry = load(ctx + layout.CTX_PLANS) + ((key + probe) & mask) * layout.PLAN_SIZE
        if (
            load(entry + layout.PLAN_COUNT) == count
            and load(entry + layout.PLAN_COLL) == coll
            and load(entry + layout.PLAN_DTYPE) == dtype
            and load(entry + layout.PLAN_ARG) == arg
            and load(entry + layout.PLAN_INPLACE) == in_place
            and load(entry + layout.PLAN_OUT_COUNT) == out_count
        ):
            return load(entry + layout.PLAN_RUN)
    return 0


@inline
def overlap(coll: int, source: int, nbytes: int, target: int, out_bytes: int, before: int) -> int:
    """Compare the ranges of input and output.

    Returns 0 if they are disjoint, 1 if they overlap in the collective's in-place form, else -1.
    ``before``: bytes of the blocks before this rank's, if input or output has a block for each
    rank.
    """
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
def parse_and_run(call: int, ctx: int, args: int) -> int:
    """Run a collective with arguments (input, output or None, operator or root)."""
    coll = load(call + FAST_COLL)
    x, out, third = load(args), load(args + 8), load(args + 16)
    if not is_usable(ctx, x, READABLE):
        return layout.NOT_HANDLED
    arg = small_int(
        ctx,
        third,
        layout.CTX_REDOP_TYPE
        if coll == ALL_REDUCE or coll == REDUCE_SCATTER
        else layout.CTX_INT_TYPE,
    )
    dtype = dtype_code(ctx, x)
    if dtype < 0 or arg < 0:
        return layout.NOT_HANDLED
    count = element_count(x)
    source = load(x + layout.ARRAY_DATA)
    target, out_count, in_place = source, count, 1
    if out == load(ctx + layout.CTX_NONE):
        if coll != ALL_REDUCE and coll != BROADCAST:
            return layout.NOT_HANDLED
        if load32(x + layout.ARRAY_FLAGS) & WRITABLE != WRITABLE:
            return layout.NOT_HANDLED
    else:
        if not is_usable(ctx, out, WRITABLE) or dtype_code(ctx, out) != dtype:
            return layout.NOT_HANDLED
        target, out_count = load(out + layout.ARRAY_DATA), element_count(out)
        nbytes, out_bytes = count * item_size(dtype), out_count * item_size(dtype)
        in_place = overlap(
            coll,
            source,
            nbytes,
            target,
            out_bytes,
            load(ctx + layout.CTX_RANK) * min(nbytes, out_bytes),
        )
        if in_place < 0:
            return layout.NOT_HANDLED  # the slow path raises the error
    run = find_plan(ctx, coll, count, out_count, dtype, arg, in_place)
    return start_run_at(ctx, run, source, target)


@inline
def parse_rooted(call: int, ctx: int, args: int) -> int:
    """Run gather or scatter with arguments (input, output, root, None, None).

    On the other ranks the side that only the root has is ignored.
    """
    coll = load(call + FAST_COLL)
    none = load(ctx + layout.CTX_NONE)
    root = small_int(ctx, load(args + 16), layout.CTX_INT_TYPE)
    if root < 0 or load(args + 24) != none or load(args + 32) != none:
        return layout.NOT_HANDLED
    is_root = root == load(ctx + layout.CTX_RANK)
    has_input, has_output = is_root or coll == GATHER, is_root or coll == SCATTER
    x, out = load(args if has_input else args + 8), load(args + 8 if has_output else args)
    dtype = common_dtype(ctx, x, out, has_output)
    if dtype < 0:
        return layout.NOT_HANDLED
    count, out_count = element_count(x) if has_input else 0, element_count(out) if has_output else 0
    source, target = load(x + layout.ARRAY_DATA), load(out + layout.ARRAY_DATA)
    if (
        is_root
        and overlap(coll, source, count * item_size(dtype), target, out_count * item_size(dtype), 0)
        != 0
    ):
        return layout.NOT_HANDLED
    run = find_plan(ctx, coll, count, out_count, dtype, root, 0)
    return start_run_at(ctx, run, source, target)


@inline
def parse_reduce(ctx: int, args: int) -> int:
    """Run reduce with arguments (input, output or None, operator, False, None, root).

    The output of ranks other than the root is ignored.
    """
    x, out = load(args), load(args + 8)
    op, root = (
        small_int(ctx, load(args + 16), layout.CTX_REDOP_TYPE),
        small_int(ctx, load(args + 40), layout.CTX_INT_TYPE),
    )
    if op < 0 or root < 0 or not is_usable(ctx, x, READABLE):
        return layout.NOT_HANDLED
    dtype, count, source = dtype_code(ctx, x), element_count(x), load(x + layout.ARRAY_DATA)
    if dtype < 0:
        return layout.NOT_HANDLED
    target, in_place = source, 1
    if root == load(ctx + layout.CTX_RANK):
        if out == load(ctx + layout.CTX_NONE):
            out = x
        if (
            not is_usable(ctx, out, WRITABLE)
            or dtype_code(ctx, out) != dtype
            or element_count(out) != count
        ):
            return layout.NOT_HANDLED
        target = load(out + layout.ARRAY_DATA)
        in_place = overlap(
            ALL_REDUCE, source, count * item_size(dtype), target, count * item_size(dtype), 0
        )
        if in_place < 0:
            return layout.NOT_HANDLED
    run = find_plan(ctx, REDUCE, count, count, dtype, root << 3 | op, in_place)
    return start_run_at(ctx, run, source, target)


@inline
def parse_uneven(call: int, ctx: int, args: int, lists: int) -> int:
    """Run an uneven collective with arguments (input, output, operator or root or None) and counts.

    ``lists``: counts of input and output, of which some collectives have one. In rooted collectives
    the side that only the root has is ignored on the other ranks.
    """
    coll, third, arg = load(call + FAST_COLL), load(args + 16), 0
    if coll == REDUCE_SCATTER:
        arg = small_int(ctx, third, layout.CTX_REDOP_TYPE)
    elif coll == GATHER or coll == SCATTER:
        arg = small_int(ctx, third, layout.CTX_INT_TYPE)
    count, out_count, most = read_call_counts(ctx, coll, lists)
    if arg < 0 or count < 0:
        return layout.NOT_HANDLED
    is_root = arg == load(ctx + layout.CTX_RANK)
    has_input, has_output = coll != SCATTER or is_root, coll != GATHER or is_root
    x, out = load(args if has_input else args + 8), load(args + 8 if has_output else args)
    dtype = common_dtype(ctx, x, out, has_output)
    if dtype < 0:
        return layout.NOT_HANDLED
    if (has_input and element_count(x) != count) or (
        has_output and element_count(out) != out_count
    ):
        return layout.NOT_HANDLED
    source, target, itemsize = (
        load(x + layout.ARRAY_DATA),
        load(out + layout.ARRAY_DATA),
        item_size(dtype),
    )
    table, nranks = load(ctx + layout.CTX_COUNTS), load(ctx + layout.CTX_NRANKS)
    in_place = 0
    if has_input and has_output:
        in_place = overlap(
            coll,
            source,
            count * itemsize,
            target,
            out_count * itemsize,
            elements_before(ctx, coll) * itemsize,
        )
        if in_place < 0:
            return layout.NOT_HANDLED
    else:
        blocks = table + layout.COUNTS_BLOCKS + (8 if has_input else 0)
        for i in range(nranks):
            store(blocks + 8 * i, 0)
    nbytes = UNKNOWN_BYTES if coll == ALL_TO_ALL else most * itemsize
    run = find_plan(ctx, coll | layout.UNEVEN, size_class(nbytes), 0, dtype, arg, in_place)
    if run != 0:
        write_counts(run, table, 0, 0)
    return start_run_at(ctx, run, source, target)
