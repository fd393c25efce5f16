"""Kernel source: from the arguments of a call to the block of its launch in the table of ``doors.table``, with addresses and stream in it.

A launch is there only if a call like this one has been checked before; what differs from call to call is looked at here.
"""

from __future__ import annotations

from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.shapes import find_shape
from miraccl.fastpath.cuda.streams import is_plain
from miraccl.fastpath.cuda.tensors import address, data_type, rank_of
from miraccl.fastpath.cuda.views import elements, is_known
from miraccl.native import hashing
from miraccl.native.intrinsics import inline, load, load32, store

key_of = inline(at.key_of)
both_of = inline(at.both_of)
slot_of = inline(at.slot_of)
what_of = inline(at.what_of)
mix = inline(hashing.mix)


@inline
def block_in(state: int, row: int) -> int:
    """The block of a row, for the stream of the operation before; 0 if the launch fills the GPU and is not next in the order of
    communicators."""
    if load(row + at.ROW_FILLS) != 0 and load(load(state + at.STATE_ORDER)) != load(
        state + at.STATE_SELF
    ):
        return 0
    block = load(row + at.ROW_BLOCK)
    store(load(block + 8 * at.CONFIG) + at.CONFIG_STREAM, load(state + at.STATE_STREAM))
    return block


# ---- collectives


@inline
def find_launch(state: int, key: int, count: int, source: int, target: int) -> int:
    """The block for a collective on blocks of ``count`` elements; 0 where Python is to do it."""
    hashed = mix(mix(0, key), count)
    for probe in range(at.PROBES):
        row = state + at.STATE_TABLE + slot_of(hashed, probe) * at.ROW_BYTES
        if load(row + at.ROW_KEY) == key and load(row + at.ROW_COUNT) == count:
            block = block_in(state, row)
            if block != 0:
                store(load(block + 8 * at.ARGUMENT), source)
                store(load(block + 8 * at.ARGUMENT) + 8, target)
            return block
    return 0


@inline
def operator_of(state: int, given: int) -> int:
    """The number of an operator, -1 for anything else."""
    for op in range(at.NOPS):
        if load(state + at.STATE_OPS + 8 * op) == given:
            return op
    return -1


@inline
def third_of(state: int, kind: int, args: int) -> int:
    """The number of an operator, a root, both; -1 for anything else."""
    if kind == at.THIRD_ROOT:
        return rank_of(state, load(args + 16))
    if kind == at.THIRD_NOTHING:
        return 0
    op = operator_of(state, load(args + 16))
    if kind == at.THIRD_OPERATOR or op < 0:
        return op
    root = rank_of(state, load(args + 40))
    return both_of(op, root) if root >= 0 else -1


@inline
def find_collective(door: int, args: int) -> int:
    """``args`` are (x, out, operator or root, async_op, stream), for some a root follows. 0 where Python is to do it."""
    state = load(door + at.DOOR_STATE)
    if (
        not is_known(state, load(args))
        or load32(load(state + at.STATE_GROUPS)) != 0
        or not is_plain(state, args + 24, load(args))
    ):
        return 0
    kind, rank = load(door + at.DOOR_THIRD), load(state + at.STATE_RANK)
    third = third_of(state, kind, args)
    if third < 0:
        return 0
    view, other = state + at.STATE_VIEWS, state + at.STATE_VIEWS + at.VIEW_BYTES
    count, blocks = elements(state, load(args), view), load(door + at.DOOR_IN_BLOCKS)
    if count <= 0 or count % blocks != 0:
        return 0
    count //= blocks
    source, dtype, read_only = address(view), data_type(view), load(view + at.VIEW_READ_ONLY)
    target, out = source, load(args + 8)
    if kind == at.THIRD_BOTH and third // at.NOPS != rank:
        out = load(state + at.STATE_NONE)  # only the root looks at it, and writes
        read_only = 0
    elif kind == at.THIRD_ROOT and third == rank:
        read_only = 0  # a broadcast leaves that of the root as it is
    if out != load(state + at.STATE_NONE):
        blocks_out = load(door + at.DOOR_OUT_BLOCKS)
        if elements(state, out, other) != count * blocks_out or data_type(other) != dtype:
            return 0
        target, read_only = address(other), load(other + at.VIEW_READ_ONLY)
        block = count * item_size(dtype)
        if target < source + blocks * block and source < target + blocks_out * block:
            if blocks != 1 and blocks_out != 1:
                return 0
            first = rank * block  # where this rank's block lies in all of them
            if target - source != (first if blocks != 1 else 0) - (first if blocks_out != 1 else 0):
                return 0  # not as the form in place has them
    elif load(door + at.DOOR_IN_PLACE) == 0:
        return 0
    if read_only != 0:
        return 0
    return find_launch(
        state, key_of(load(door + at.DOOR_COLLECTIVE), third, dtype), count, source, target
    )


# ---- messages


@inline
def write_message(state: int, number: int, x: int, peer: int, receives: int) -> bool:
    """Describe a message of this call, the first (0) or the second; False for what is not an everyday one."""
    message, view = (
        state + at.STATE_CALL + number * at.MESSAGE_BYTES,
        state + at.STATE_VIEWS + number * at.VIEW_BYTES,
    )
    other = rank_of(state, peer)
    if other < 0:
        return False
    count = elements(state, x, view)
    if count < 0 or (receives != 0 and load(view + at.VIEW_READ_ONLY) != 0):
        return False
    store(message + at.MESSAGE_WHAT, what_of(receives, other, data_type(view)))
    store(message + at.MESSAGE_COUNT, count)
    store(message + at.MESSAGE_ADDRESS, address(view))
    return True


@inline
def overlap(one: int, two: int) -> bool:
    """Whether two messages do."""
    first, second = load(one + at.MESSAGE_ADDRESS), load(two + at.MESSAGE_ADDRESS)
    first_bytes = load(one + at.MESSAGE_COUNT) * item_size(load(one + at.MESSAGE_WHAT) >> 32)
    second_bytes = load(two + at.MESSAGE_COUNT) * item_size(load(two + at.MESSAGE_WHAT) >> 32)
    return first < second + second_bytes and second < first + first_bytes


@inline
def type_is_known(state: int, message: int) -> bool:
    """Whether elements of this type can be sent."""
    dtype, known = load(message + at.MESSAGE_WHAT) >> 32, False
    for place in range(at.NDTYPES):
        known = known or load(state + at.STATE_DTYPES + 8 * place) == dtype
    return known


@inline
def same_messages(messages: int, launch: int, count: int) -> bool:
    """Whether messages are those of a launch, but for their addresses."""
    for offset in range(0, count * at.MESSAGE_BYTES, at.MESSAGE_BYTES):
        mine, theirs = messages + offset, launch + offset
        if load(mine + at.MESSAGE_WHAT) != load(theirs + at.MESSAGE_WHAT):
            return False
        if load(mine + at.MESSAGE_COUNT) != load(theirs + at.MESSAGE_COUNT):
            return False
    return True


@inline
def find_messages(state: int, messages: int, count: int, signature: int) -> int:
    """The block for ``count`` messages, which are a collective if ``signature`` is not 0; 0 where Python is to do it."""
    hashed = signature
    for offset in range(0, count * at.MESSAGE_BYTES, at.MESSAGE_BYTES):
        hashed = mix(
            mix(hashed, load(messages + offset + at.MESSAGE_WHAT)),
            load(messages + offset + at.MESSAGE_COUNT),
        )
    key = at.KEY_OF_MESSAGES | hashed
    hashed = mix(mix(0, key), count)
    for probe in range(at.PROBES):
        row = state + at.STATE_TABLE + slot_of(hashed, probe) * at.ROW_BYTES
        if load(row + at.ROW_KEY) == key and load(row + at.ROW_COUNT) == count:
            launch = load(row + at.ROW_MESSAGES)
            if load(row + at.ROW_SIGNATURE) == signature and same_messages(messages, launch, count):
                block = block_in(state, row)
                if block != 0:
                    for offset in range(
                        at.MESSAGE_ADDRESS, count * at.MESSAGE_BYTES, at.MESSAGE_BYTES
                    ):
                        store(load(launch + offset), load(messages + offset))
                return block
    return find_shape(state, messages, count, signature)
