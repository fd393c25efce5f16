"""Kernel source: launch record for messages of new sizes, from a template with the same kinds.

Computes from the sizes the same values as ``executor.cuda.messages`` and writes them into the
argument.
"""

from __future__ import annotations

from miraccl.executor.cuda import fast_call_layout, warp_queues
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.native import hashing
from miraccl.native.intrinsics import inline, load, store

warp_queues_for = inline(warp_queues.warp_queues_for)
copy_warp_queues_for = inline(warp_queues.copy_warp_queues_for)
saturates_gpu = inline(warp_queues.saturates_gpu)
table_index = inline(fast_call_layout.table_index)
mix = inline(hashing.mix)


@inline
def message_count(messages: int, number: int) -> int:
    return load(messages + number * fast_call_layout.MESSAGE_BYTES + fast_call_layout.MESSAGE_COUNT)


@inline
def message_bytes(messages: int, number: int) -> int:
    message = messages + number * fast_call_layout.MESSAGE_BYTES
    return load(message + fast_call_layout.MESSAGE_COUNT) * item_size(
        load(message + fast_call_layout.MESSAGE_KIND) >> 32
    )


@inline
def matches_template(messages: int, count: int, signature: int, template: int) -> bool:
    if (load(template + fast_call_layout.TEMPLATE_SIGNATURE) != 0) != (signature != 0):
        return False
    for number in range(count):
        kind = load(
            messages + number * fast_call_layout.MESSAGE_BYTES + fast_call_layout.MESSAGE_KIND
        )
        if (
            load(
                template
                + fast_call_layout.TEMPLATE_BYTES
                + number * fast_call_layout.TEMPLATE_MESSAGE_BYTES
                + fast_call_layout.TEMPLATE_MESSAGE_KIND
            )
            != kind
        ):
            return False
    return True


@inline
def assign_warp_queues(messages: int, count: int, template: int) -> int:
    """Write the warp queues of each peer queue; return the bytes of all messages, -1 for Python."""
    rows = template + fast_call_layout.TEMPLATE_BYTES
    queues, total = rows + count * fast_call_layout.TEMPLATE_MESSAGE_BYTES, 0
    for number in range(load(template + fast_call_layout.TEMPLATE_QUEUES)):
        store(
            queues + number * fast_call_layout.QUEUE_BYTES + fast_call_layout.QUEUE_WARP_QUEUES, 0
        )
    for number in range(count):
        row, nbytes = (
            rows + number * fast_call_layout.TEMPLATE_MESSAGE_BYTES,
            message_bytes(messages, number),
        )
        partner = load(row + fast_call_layout.TEMPLATE_MESSAGE_PARTNER)
        if partner >= 0:
            if message_count(messages, partner) != message_count(messages, number):
                return -1
            nqueues = copy_warp_queues_for(
                nbytes, load(template + fast_call_layout.TEMPLATE_COPY_WARP_QUEUES)
            )
        elif nbytes >= load(template + fast_call_layout.TEMPLATE_BULK_MIN_BYTES):
            return -1
        else:
            nqueues = warp_queues_for(
                nbytes,
                load(template + fast_call_layout.TEMPLATE_GROUP_VECTORS),
                load(template + fast_call_layout.TEMPLATE_FIRST_VECTORS),
                load(template + fast_call_layout.TEMPLATE_WARP_QUEUES),
            )
        location = (
            queues
            + load(row + fast_call_layout.TEMPLATE_MESSAGE_QUEUE) * fast_call_layout.QUEUE_BYTES
            + fast_call_layout.QUEUE_WARP_QUEUES
        )
        store(location, max(load(location), nqueues))
        total += nbytes
    return total


@inline
def write_launch(messages: int, count: int, signature: int, template: int, config: int) -> None:
    """Write warp queues, sizes and addresses into the argument, and the grid into the
    configuration.
    """
    if signature != 0:
        store(load(template + fast_call_layout.TEMPLATE_SIGNATURE), signature)
    rows = template + fast_call_layout.TEMPLATE_BYTES
    queues, warps = rows + count * fast_call_layout.TEMPLATE_MESSAGE_BYTES, 0
    for number in range(load(template + fast_call_layout.TEMPLATE_QUEUES)):
        queue = queues + number * fast_call_layout.QUEUE_BYTES
        nqueues = load(queue + fast_call_layout.QUEUE_WARP_QUEUES)
        store(
            load(queue + fast_call_layout.QUEUE_RECORD),
            load(queue + fast_call_layout.QUEUE_HEAD) | nqueues << 16 | warps << 32,
        )
        warps += nqueues
    for number in range(count):
        row = rows + number * fast_call_layout.TEMPLATE_MESSAGE_BYTES
        record = load(row + fast_call_layout.TEMPLATE_MESSAGE_RECORD)
        store(
            record,
            load(
                messages
                + number * fast_call_layout.MESSAGE_BYTES
                + fast_call_layout.MESSAGE_ADDRESS
            ),
        )
        store(
            record + 8,
            message_bytes(messages, number) | load(row + fast_call_layout.TEMPLATE_MESSAGE_TYPE),
        )
    blocks = max(1, min(warps, load(template + fast_call_layout.TEMPLATE_BLOCKS)))
    threads = 32 * max(1, (warps + blocks - 1) // blocks)
    store(
        config + fast_call_layout.CONFIG_BLOCKS,
        load(config + fast_call_layout.CONFIG_BLOCKS) >> 32 << 32 | blocks,
    )
    store(
        config + fast_call_layout.CONFIG_THREADS,
        (load(config + fast_call_layout.CONFIG_THREADS) & 0xFFFFFFFF) | threads << 32,
    )


@inline
def find_template(state: int, messages: int, count: int, signature: int) -> int:
    """Return the record for messages of these kinds and any size; 0 if Python must handle them."""
    hashed = 1 if signature != 0 else 0
    for number in range(count):
        hashed = mix(
            hashed,
            load(
                messages + number * fast_call_layout.MESSAGE_BYTES + fast_call_layout.MESSAGE_KIND
            ),
        )
    key = fast_call_layout.TEMPLATE_KEY | hashed
    hashed = mix(mix(0, key), count)
    for probe in range(fast_call_layout.PROBES):
        row = (
            state
            + fast_call_layout.STATE_TABLE
            + table_index(hashed, probe) * fast_call_layout.LAUNCH_BYTES
        )
        template = load(row + fast_call_layout.LAUNCH_MESSAGES)
        if (
            load(row + fast_call_layout.LAUNCH_KEY) == key
            and load(row + fast_call_layout.LAUNCH_COUNT) == count
            and matches_template(messages, count, signature, template)
        ):
            total = assign_warp_queues(messages, count, template)
            if total < 0 or (
                saturates_gpu(total, count)
                and load(load(state + fast_call_layout.STATE_ORDER))
                != load(state + fast_call_layout.STATE_OWN)
            ):
                return 0
            record = load(row + fast_call_layout.LAUNCH_RECORD)
            config = load(record + 8 * fast_call_layout.RECORD_CONFIG)
            write_launch(messages, count, signature, template, config)
            store(
                config + fast_call_layout.CONFIG_STREAM, load(state + fast_call_layout.STATE_STREAM)
            )
            return record
    return 0
