"""Kernel source: ``reduce_scatter_v``, from the arguments to its launch records.

One launch if all ranks get the same count, else one ``reduce`` per rank that gets anything, as in
``runtime.gpu.messages``.
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.lookup import find_launch, launch_key, operator_number, pack_op_root
from miraccl.fastpath.cuda.message_ops import is_disjoint, is_own_block, read_shares
from miraccl.fastpath.cuda.streams import has_default_options
from miraccl.fastpath.cuda.tensors import address, data_type
from miraccl.fastpath.cuda.views import element_count
from miraccl.native.intrinsics import inline, load, load32, store


@inline
def find_reductions(call_record: int, args: int) -> int:
    """Find the launches for (x, out, operator, async_op, stream, counts); return their number.

    The records are written to ``STATE_RECORDS``. 0 if Python must handle the call.
    """
    state = load(call_record + fast_call_layout.FAST_STATE)
    if load32(load(state + fast_call_layout.STATE_GROUPS)) != 0 or not has_default_options(
        state, args + 24, load(args)
    ):
        return 0
    rank, nranks, shares = (
        load(state + fast_call_layout.STATE_RANK),
        load(state + fast_call_layout.STATE_NRANKS),
        state + fast_call_layout.STATE_SHARES,
    )
    view, other = (
        state + fast_call_layout.STATE_VIEWS,
        state + fast_call_layout.STATE_VIEWS + fast_call_layout.VIEW_BYTES,
    )
    op, count = operator_number(state, load(args + 16)), element_count(state, load(args), view)
    if op < 0 or count <= 0:
        return 0
    out_count, dtype = element_count(state, load(args + 8), other), data_type(view)
    if out_count < 0 or read_shares(state, 0, load(args + 40), 0, shares) != count:
        return 0
    if (
        out_count != load(shares + 8 * rank)
        or data_type(other) != dtype
        or load(other + fast_call_layout.VIEW_READ_ONLY) != 0
    ):
        return 0
    if not is_disjoint(view, count, other, out_count) and not is_own_block(
        state, view, shares, other
    ):
        return 0
    equal = True
    for root in range(nranks):
        equal = equal and load(shares + 8 * root) == out_count
    if equal:
        record = find_launch(
            state,
            launch_key(load(call_record + fast_call_layout.FAST_EQUAL_OP), op, dtype),
            out_count,
            address(view),
            address(other),
        )
        store(state + fast_call_layout.STATE_RECORDS, record)
        return 1 if record != 0 else 0
    number, part = 0, address(view)
    for root in range(nranks):
        count = load(shares + 8 * root)
        if count == 0:
            continue
        target = address(other) if root == rank else part
        record = find_launch(
            state,
            launch_key(
                load(call_record + fast_call_layout.FAST_PER_RANK_OP), pack_op_root(op, root), dtype
            ),
            count,
            part,
            target,
        )
        if record == 0:
            return 0
        store(state + fast_call_layout.STATE_RECORDS + 8 * number, record)
        number += 1
        part += count * item_size(dtype)
    return number
