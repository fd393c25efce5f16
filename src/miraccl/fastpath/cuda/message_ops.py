"""Kernel source: message collectives (gather, scatter, those with counts), from arguments to
record.

The messages are those of ``runtime.gpu.operations.sends_and_receives``, in its order.
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout, message_collectives
from miraccl.executor.cuda.message_collectives import NO_ROOT
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.lookup import find_messages, message_kind, mix
from miraccl.fastpath.cuda.streams import has_default_options
from miraccl.fastpath.cuda.tensors import address, data_type, int_value, rank_value
from miraccl.fastpath.cuda.views import element_count
from miraccl.native.intrinsics import (
    PyList_GetItem,
    PyList_Size,
    PyTuple_GetItem,
    PyTuple_Size,
    inline,
    load,
    load32,
    store,
)

signature_of = inline(message_collectives.pack_signature)


@inline
def count_at(state: int, counts: int, index: int) -> int:
    """Return an element of a list or tuple of counts; -1 if it is not a plain non-negative int."""
    if load(counts + fast_call_layout.OB_TYPE) == load(state + fast_call_layout.STATE_LIST_TYPE):
        return int_value(state, PyList_GetItem(counts, index))
    return int_value(state, PyTuple_GetItem(counts, index))


@inline
def length_of(state: int, counts: int) -> int:
    """Return the length of a list or tuple; -1 for other objects."""
    kind = load(counts + fast_call_layout.OB_TYPE)
    if kind == load(state + fast_call_layout.STATE_LIST_TYPE):
        return PyList_Size(counts)
    return PyTuple_Size(counts) if kind == load(state + fast_call_layout.STATE_TUPLE_TYPE) else -1


@inline
def read_shares(state: int, even: int, counts: int, whole: int, shares: int) -> int:
    """Write each rank's share of ``whole`` elements: equal ones, or ``counts``. Return the sum, -1
    if
    invalid.
    """
    nranks, total = load(state + fast_call_layout.STATE_NRANKS), 0
    if even != 0 and whole % nranks != 0:
        return -1
    if even == 0 and length_of(state, counts) != nranks:
        return -1
    for rank in range(nranks):
        count = whole // nranks if even != 0 else count_at(state, counts, rank)
        if count < 0:
            return -1
        store(shares + 8 * rank, count)
        total += count
    return total


@inline
def put_message(
    state: int, number: int, receives: int, peer: int, view: int, first: int, count: int
) -> int:
    """Append a message of ``count`` elements from ``first`` on unless it is empty; return the new
    number.
    """
    if count == 0:
        return number
    message = state + fast_call_layout.STATE_CALL_MESSAGES + number * fast_call_layout.MESSAGE_BYTES
    store(message + fast_call_layout.MESSAGE_KIND, message_kind(receives, peer, data_type(view)))
    store(message + fast_call_layout.MESSAGE_COUNT, count)
    store(
        message + fast_call_layout.MESSAGE_ADDRESS,
        address(view) + first * item_size(data_type(view)),
    )
    return number + 1


@inline
def is_disjoint(view: int, count: int, other: int, other_count: int) -> bool:
    """Return True if two arrays of one type do not overlap; empty ones never do."""
    size = item_size(data_type(view))
    if count == 0 or other_count == 0:
        return True
    return (
        address(other) >= address(view) + count * size
        or address(view) >= address(other) + other_count * size
    )


@inline
def is_own_block(state: int, whole: int, shares: int, part: int) -> bool:
    """Return True if ``part`` is this rank's block of ``whole``."""
    first = 0
    for rank in range(load(state + fast_call_layout.STATE_RANK)):
        first += load(shares + 8 * rank)
    return address(part) == address(whole) + first * item_size(data_type(whole))


@inline
def put_messages(
    state: int, number: int, receives: int, view: int, count: int, shares: int, only: int, skip: int
) -> int:
    """Append the messages of an array and return the new number.

    ``shares``: block sizes by rank, 0: the whole array for every rank. ``only``: the only peer, or
    -1. ``skip``: peer without a message.
    """
    first = 0
    for peer in range(load(state + fast_call_layout.STATE_NRANKS)):
        own = load(shares + 8 * peer) if shares != 0 else count
        if peer != skip and (shares != 0 or only < 0 or only == peer):
            number = put_message(state, number, receives, peer, view, first, own)
        first += own if shares != 0 else 0
    return number


@inline
def find_message_collective(call_record: int, args: int) -> int:
    """Return the record for (x, out, root, x counts, out counts, async_op, stream); 0 for Python.

    Arguments that the operation does not use are ignored.
    """
    state, even = (
        load(call_record + fast_call_layout.FAST_STATE),
        load(call_record + fast_call_layout.FAST_EVEN),
    )
    if load32(load(state + fast_call_layout.STATE_GROUPS)) != 0:
        return 0
    rank, nranks, rooted = (
        load(state + fast_call_layout.STATE_RANK),
        load(state + fast_call_layout.STATE_NRANKS),
        load(call_record + fast_call_layout.FAST_ROOTED),
    )
    root = -1
    if rooted != fast_call_layout.NOT_ROOTED:
        root = rank_value(state, load(args + 16))
        if root < 0:
            return 0
    sends, receives = (
        rooted != fast_call_layout.ROOTED_IN or root == rank,
        rooted != fast_call_layout.ROOTED_OUT or root == rank,
    )
    if not has_default_options(state, args + 40, load(args) if sends else load(args + 8)):
        return 0
    view, other = (
        state + fast_call_layout.STATE_VIEWS,
        state + fast_call_layout.STATE_VIEWS + fast_call_layout.VIEW_BYTES,
    )
    count = element_count(state, load(args), view) if sends else 0
    if count < 0:
        return 0
    out_count = element_count(state, load(args + 8), other) if receives else 0
    if out_count < 0 or (receives and load(other + fast_call_layout.VIEW_READ_ONLY) != 0):
        return 0
    if sends and receives and data_type(view) != data_type(other):
        return 0
    shares, out_shares = 0, 0
    if load(call_record + fast_call_layout.FAST_SPLITS_IN) != 0:
        shares = state + fast_call_layout.STATE_SHARES
        total = read_shares(
            state, even, load(args + 24), count if sends else nranks * out_count, shares
        )
        if total < 0 or (sends and total != count):
            return 0
    if load(call_record + fast_call_layout.FAST_SPLITS_OUT) != 0:
        out_shares = state + fast_call_layout.STATE_SHARES + 8 * fast_call_layout.MAX_RANKS
        total = read_shares(
            state, even, load(args + 32), out_count if receives else nranks * count, out_shares
        )
        if total < 0 or (receives and total != out_count):
            return 0
    if (shares == 0 and load(out_shares + 8 * rank) != count) or (
        out_shares == 0 and load(shares + 8 * rank) != out_count
    ):
        return 0
    in_place_rank = -1  # rank whose block is in place
    if sends and receives and not is_disjoint(view, count, other, out_count):
        if shares != 0 and out_shares != 0:
            return 0
        if not (
            is_own_block(state, view, shares, other)
            if shares != 0
            else is_own_block(state, other, out_shares, view)
        ):
            return 0
        in_place_rank = rank
    number = put_messages(state, 0, 0, view, count, shares, root, in_place_rank) if sends else 0
    number = (
        put_messages(state, number, 1, other, out_count, out_shares, root, in_place_rank)
        if receives
        else number
    )
    if number == 0:
        return 0
    hashed, known = 0, shares if out_shares == 0 else out_shares if shares == 0 else 0
    if known != 0:
        for peer in range(nranks):
            hashed = mix(hashed, load(known + 8 * peer))
    signature = signature_of(
        load(call_record + fast_call_layout.FAST_OP), root if root >= 0 else NO_ROOT, hashed
    )
    return find_messages(state, state + fast_call_layout.STATE_CALL_MESSAGES, number, signature)
