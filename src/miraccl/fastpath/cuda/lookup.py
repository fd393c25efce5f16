"""Kernel source: from the arguments of a call to its launch record, completed with addresses and
stream.

The table (``table``) contains a launch only if a call like this one has been checked before;
everything that may differ between calls is checked here.
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.fastpath.cuda.streams import has_default_options
from miraccl.fastpath.cuda.templates import find_template
from miraccl.fastpath.cuda.tensors import address, data_type, rank_value
from miraccl.fastpath.cuda.views import element_count, is_known_type
from miraccl.native import hashing
from miraccl.native.intrinsics import inline, load, load32, store

launch_key = inline(fast_call_layout.launch_key)
pack_op_root = inline(fast_call_layout.pack_op_root)
table_index = inline(fast_call_layout.table_index)
message_kind = inline(fast_call_layout.message_kind)
mix = inline(hashing.mix)


@inline
def usable_record(state: int, entry: int) -> int:
    """Return a table entry's record with the current stream.

    0 if the launch uses the whole GPU and another communicator is next in launch order.
    """
    if load(entry + fast_call_layout.LAUNCH_SATURATES) != 0 and load(
        load(state + fast_call_layout.STATE_ORDER)
    ) != load(state + fast_call_layout.STATE_OWN):
        return 0
    block = load(entry + fast_call_layout.LAUNCH_RECORD)
    store(
        load(block + 8 * fast_call_layout.RECORD_CONFIG) + fast_call_layout.CONFIG_STREAM,
        load(state + fast_call_layout.STATE_STREAM),
    )
    return block


# ---- collectives


@inline
def find_launch(state: int, key: int, count: int, source: int, target: int) -> int:
    """Return the record of a collective on blocks of ``count`` elements; 0 if Python must handle
    it.
    """
    hashed = mix(mix(0, key), count)
    for probe in range(fast_call_layout.PROBES):
        entry = (
            state
            + fast_call_layout.STATE_TABLE
            + table_index(hashed, probe) * fast_call_layout.LAUNCH_BYTES
        )
        if (
            load(entry + fast_call_layout.LAUNCH_KEY) == key
            and load(entry + fast_call_layout.LAUNCH_COUNT) == count
        ):
            block = usable_record(state, entry)
            if block != 0:
                store(load(block + 8 * fast_call_layout.RECORD_ARGUMENT), source)
                store(load(block + 8 * fast_call_layout.RECORD_ARGUMENT) + 8, target)
            return block
    return 0


@inline
def operator_number(state: int, given: int) -> int:
    """Return the number of an operator object; -1 for other objects."""
    for op in range(fast_call_layout.NOPS):
        if load(state + fast_call_layout.STATE_OPS + 8 * op) == given:
            return op
    return -1


@inline
def third_argument(state: int, kind: int, args: int) -> int:
    """Return the operator number, the root, or both packed; -1 for other objects."""
    if kind == fast_call_layout.THIRD_ROOT:
        return rank_value(state, load(args + 16))
    if kind == fast_call_layout.THIRD_NOTHING:
        return 0
    op = operator_number(state, load(args + 16))
    if kind == fast_call_layout.THIRD_OPERATOR or op < 0:
        return op
    root = rank_value(state, load(args + 40))
    return pack_op_root(op, root) if root >= 0 else -1


@inline
def find_collective(call_record: int, args: int) -> int:
    """Return the record for (x, out, operator or root, async_op, stream[, root]); 0 for Python."""
    state = load(call_record + fast_call_layout.FAST_STATE)
    if (
        not is_known_type(state, load(args))
        or load32(load(state + fast_call_layout.STATE_GROUPS)) != 0
        or not has_default_options(state, args + 24, load(args))
    ):
        return 0
    kind, rank = (
        load(call_record + fast_call_layout.FAST_THIRD),
        load(state + fast_call_layout.STATE_RANK),
    )
    third = third_argument(state, kind, args)
    if third < 0:
        return 0
    view, other = (
        state + fast_call_layout.STATE_VIEWS,
        state + fast_call_layout.STATE_VIEWS + fast_call_layout.VIEW_BYTES,
    )
    count, blocks = (
        element_count(state, load(args), view),
        load(call_record + fast_call_layout.FAST_IN_BLOCKS),
    )
    if count <= 0 or count % blocks != 0:
        return 0
    count //= blocks
    source, dtype, read_only = (
        address(view),
        data_type(view),
        load(view + fast_call_layout.VIEW_READ_ONLY),
    )
    target, out = source, load(args + 8)
    if kind == fast_call_layout.THIRD_BOTH and third // fast_call_layout.NOPS != rank:
        out = load(state + fast_call_layout.STATE_NONE)  # only the root reads it and writes
        read_only = 0
    elif kind == fast_call_layout.THIRD_ROOT and third == rank:
        read_only = 0  # a broadcast does not write the root's array
    if out != load(state + fast_call_layout.STATE_NONE):
        blocks_out = load(call_record + fast_call_layout.FAST_OUT_BLOCKS)
        if element_count(state, out, other) != count * blocks_out or data_type(other) != dtype:
            return 0
        target, read_only = address(other), load(other + fast_call_layout.VIEW_READ_ONLY)
        block = count * item_size(dtype)
        if target < source + blocks * block and source < target + blocks_out * block:
            if blocks != 1 and blocks_out != 1:
                return 0
            first = rank * block  # offset of this rank's block
            if target - source != (first if blocks != 1 else 0) - (first if blocks_out != 1 else 0):
                return 0  # not the in-place form
    elif load(call_record + fast_call_layout.FAST_IN_PLACE) == 0:
        return 0
    if read_only != 0:
        return 0
    return find_launch(
        state,
        launch_key(load(call_record + fast_call_layout.FAST_COLLECTIVE), third, dtype),
        count,
        source,
        target,
    )


# ---- messages


@inline
def write_message(state: int, number: int, x: int, peer: int, receives: int) -> bool:
    """Write message 0 or 1 of this call; False if Python must handle it."""
    message, view = (
        state + fast_call_layout.STATE_CALL_MESSAGES + number * fast_call_layout.MESSAGE_BYTES,
        state + fast_call_layout.STATE_VIEWS + number * fast_call_layout.VIEW_BYTES,
    )
    other = rank_value(state, peer)
    if other < 0:
        return False
    count = element_count(state, x, view)
    if count < 0 or (receives != 0 and load(view + fast_call_layout.VIEW_READ_ONLY) != 0):
        return False
    store(message + fast_call_layout.MESSAGE_KIND, message_kind(receives, other, data_type(view)))
    store(message + fast_call_layout.MESSAGE_COUNT, count)
    store(message + fast_call_layout.MESSAGE_ADDRESS, address(view))
    return True


@inline
def overlaps(one: int, two: int) -> bool:
    """Return True if the memory of two messages overlaps."""
    first, second = (
        load(one + fast_call_layout.MESSAGE_ADDRESS),
        load(two + fast_call_layout.MESSAGE_ADDRESS),
    )
    first_bytes = load(one + fast_call_layout.MESSAGE_COUNT) * item_size(
        load(one + fast_call_layout.MESSAGE_KIND) >> 32
    )
    second_bytes = load(two + fast_call_layout.MESSAGE_COUNT) * item_size(
        load(two + fast_call_layout.MESSAGE_KIND) >> 32
    )
    return first < second + second_bytes and second < first + first_bytes


@inline
def is_known_dtype(state: int, message: int) -> bool:
    """Return True if elements of this type can be sent."""
    dtype, known = load(message + fast_call_layout.MESSAGE_KIND) >> 32, False
    for index in range(fast_call_layout.NDTYPES):
        known = known or load(state + fast_call_layout.STATE_DTYPES + 8 * index) == dtype
    return known


@inline
def same_messages(messages: int, launch: int, count: int) -> bool:
    """Return True if messages equal those of a launch but for their addresses."""
    for offset in range(0, count * fast_call_layout.MESSAGE_BYTES, fast_call_layout.MESSAGE_BYTES):
        given, stored = messages + offset, launch + offset
        if load(given + fast_call_layout.MESSAGE_KIND) != load(
            stored + fast_call_layout.MESSAGE_KIND
        ):
            return False
        if load(given + fast_call_layout.MESSAGE_COUNT) != load(
            stored + fast_call_layout.MESSAGE_COUNT
        ):
            return False
    return True


@inline
def find_messages(state: int, messages: int, count: int, signature: int) -> int:
    """Return the record for ``count`` messages; 0 if Python must handle them.

    ``signature``: of the message collective, 0 for plain messages.
    """
    hashed = signature
    for offset in range(0, count * fast_call_layout.MESSAGE_BYTES, fast_call_layout.MESSAGE_BYTES):
        hashed = mix(
            mix(hashed, load(messages + offset + fast_call_layout.MESSAGE_KIND)),
            load(messages + offset + fast_call_layout.MESSAGE_COUNT),
        )
    key = fast_call_layout.MESSAGES_KEY | hashed
    hashed = mix(mix(0, key), count)
    for probe in range(fast_call_layout.PROBES):
        entry = (
            state
            + fast_call_layout.STATE_TABLE
            + table_index(hashed, probe) * fast_call_layout.LAUNCH_BYTES
        )
        if (
            load(entry + fast_call_layout.LAUNCH_KEY) == key
            and load(entry + fast_call_layout.LAUNCH_COUNT) == count
        ):
            launch = load(entry + fast_call_layout.LAUNCH_MESSAGES)
            if load(entry + fast_call_layout.LAUNCH_SIGNATURE) == signature and same_messages(
                messages, launch, count
            ):
                block = usable_record(state, entry)
                if block != 0:
                    for offset in range(
                        fast_call_layout.MESSAGE_ADDRESS,
                        count * fast_call_layout.MESSAGE_BYTES,
                        fast_call_layout.MESSAGE_BYTES,
                    ):
                        store(load(launch + offset), load(messages + offset))
                return block
    return find_template(state, messages, count, signature)
