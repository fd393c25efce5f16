"""Kernel source: ``reduce_scatter_v``, from the arguments of a call to the blocks of its launches: one where all ranks get as much, else a
``reduce`` for each rank that gets anything, as in ``comm.device.messages``."""

from __future__ import annotations

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.moves import apart, in_place, share
from miraccl.fastpath.cuda.rows import both_of, find_launch, key_of, operator_of
from miraccl.fastpath.cuda.streams import is_plain
from miraccl.fastpath.cuda.tensors import address, data_type
from miraccl.fastpath.cuda.views import elements
from miraccl.native.intrinsics import inline, load, load32, store


@inline
def find_reductions(door: int, args: int) -> int:
    """``args`` are (x, out, operator, async_op, stream, counts). The number of launches, whose blocks stand at ``STATE_BLOCKS``; 0 where
    Python is to do it."""
    state = load(door + at.DOOR_STATE)
    if load32(load(state + at.STATE_GROUPS)) != 0 or not is_plain(state, args + 24, load(args)):
        return 0
    rank, nranks, shares = (
        load(state + at.STATE_RANK),
        load(state + at.STATE_NRANKS),
        state + at.STATE_SHARES,
    )
    view, other = state + at.STATE_VIEWS, state + at.STATE_VIEWS + at.VIEW_BYTES
    op, count = operator_of(state, load(args + 16)), elements(state, load(args), view)
    if op < 0 or count <= 0:
        return 0
    out_count, dtype = elements(state, load(args + 8), other), data_type(view)
    if out_count < 0 or share(state, 0, load(args + 40), 0, shares) != count:
        return 0
    if (
        out_count != load(shares + 8 * rank)
        or data_type(other) != dtype
        or load(other + at.VIEW_READ_ONLY) != 0
    ):
        return 0
    if not apart(view, count, other, out_count) and not in_place(state, view, shares, other):
        return 0
    alike = True
    for root in range(nranks):
        alike = alike and load(shares + 8 * root) == out_count
    if alike:
        block = find_launch(
            state,
            key_of(load(door + at.DOOR_WHOLE), op, dtype),
            out_count,
            address(view),
            address(other),
        )
        store(state + at.STATE_BLOCKS, block)
        return 1 if block != 0 else 0
    number, part = 0, address(view)
    for root in range(nranks):
        count = load(shares + 8 * root)
        if count == 0:
            continue
        target = address(other) if root == rank else part
        block = find_launch(
            state, key_of(load(door + at.DOOR_PART), both_of(op, root), dtype), count, part, target
        )
        if block == 0:
            return 0
        store(state + at.STATE_BLOCKS + 8 * number, block)
        number += 1
        part += count * item_size(dtype)
    return number
