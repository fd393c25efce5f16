"""Kernel source: the launch for messages whose sizes no call before had, from one of the same shape: what ``executor.cuda.messages`` makes
of sizes, written into its argument."""

from __future__ import annotations

from miraccl.executor.cuda import warp_queues
from miraccl.fastpath.cuda import layout as at
from miraccl.fastpath.cuda.arrays import item_size
from miraccl.native import hashing
from miraccl.native.intrinsics import inline, load, store

lanes_of = inline(warp_queues.warp_queues_for)
copy_lanes_of = inline(warp_queues.copy_warp_queues_for)
fills_gpu = inline(warp_queues.saturates_gpu)
slot_of = inline(at.slot_of)
mix = inline(hashing.mix)


@inline
def count_of(messages: int, number: int) -> int:
    return load(messages + number * at.MESSAGE_BYTES + at.MESSAGE_COUNT)


@inline
def bytes_of(messages: int, number: int) -> int:
    message = messages + number * at.MESSAGE_BYTES
    return load(message + at.MESSAGE_COUNT) * item_size(load(message + at.MESSAGE_WHAT) >> 32)


@inline
def has_shape(messages: int, count: int, signature: int, shape: int) -> bool:
    if (load(shape + at.SHAPE_SIGNATURE) != 0) != (signature != 0):
        return False
    for number in range(count):
        what = load(messages + number * at.MESSAGE_BYTES + at.MESSAGE_WHAT)
        if load(shape + at.SHAPE_BYTES + number * at.SHAPED_BYTES + at.SHAPED_WHAT) != what:
            return False
    return True


@inline
def give_lanes(messages: int, count: int, shape: int) -> int:
    """Note how many lanes each queue has; bytes of all messages, -1 for what is left to Python."""
    rows = shape + at.SHAPE_BYTES
    queues, total = rows + count * at.SHAPED_BYTES, 0
    for number in range(load(shape + at.SHAPE_QUEUES)):
        store(queues + number * at.QUEUE_BYTES + at.QUEUE_LANES, 0)
    for number in range(count):
        row, nbytes = rows + number * at.SHAPED_BYTES, bytes_of(messages, number)
        partner = load(row + at.SHAPED_PARTNER)
        if partner >= 0:
            if count_of(messages, partner) != count_of(messages, number):
                return -1
            warp_queues = copy_lanes_of(nbytes, load(shape + at.SHAPE_COPY_LANES))
        elif nbytes >= load(shape + at.SHAPE_BULK_FROM):
            return -1
        else:
            warp_queues = lanes_of(
                nbytes,
                load(shape + at.SHAPE_GROUP),
                load(shape + at.SHAPE_FIRST),
                load(shape + at.SHAPE_LANES),
            )
        place = queues + load(row + at.SHAPED_QUEUE) * at.QUEUE_BYTES + at.QUEUE_LANES
        store(place, max(load(place), warp_queues))
        total += nbytes
    return total


@inline
def write_launch(messages: int, count: int, signature: int, shape: int, config: int) -> None:
    """Lanes into the records of queues, sizes and addresses into those of messages, the grid into the configuration."""
    if signature != 0:
        store(load(shape + at.SHAPE_SIGNATURE), signature)
    rows = shape + at.SHAPE_BYTES
    queues, warps = rows + count * at.SHAPED_BYTES, 0
    for number in range(load(shape + at.SHAPE_QUEUES)):
        queue = queues + number * at.QUEUE_BYTES
        warp_queues = load(queue + at.QUEUE_LANES)
        store(
            load(queue + at.QUEUE_RECORD),
            load(queue + at.QUEUE_HEAD) | warp_queues << 16 | warps << 32,
        )
        warps += warp_queues
    for number in range(count):
        row = rows + number * at.SHAPED_BYTES
        record = load(row + at.SHAPED_RECORD)
        store(record, load(messages + number * at.MESSAGE_BYTES + at.MESSAGE_ADDRESS))
        store(record + 8, bytes_of(messages, number) | load(row + at.SHAPED_TYPE))
    blocks = max(1, min(warps, load(shape + at.SHAPE_BLOCKS)))
    threads = 32 * max(1, (warps + blocks - 1) // blocks)
    store(config + at.CONFIG_BLOCKS, load(config + at.CONFIG_BLOCKS) >> 32 << 32 | blocks)
    store(
        config + at.CONFIG_THREADS, (load(config + at.CONFIG_THREADS) & 0xFFFFFFFF) | threads << 32
    )


@inline
def find_shape(state: int, messages: int, count: int, signature: int) -> int:
    """The block for messages of a shape that has been launched before; 0 where Python is to do it."""
    hashed = 1 if signature != 0 else 0
    for number in range(count):
        hashed = mix(hashed, load(messages + number * at.MESSAGE_BYTES + at.MESSAGE_WHAT))
    key = at.KEY_OF_SHAPE | hashed
    hashed = mix(mix(0, key), count)
    for probe in range(at.PROBES):
        row = state + at.STATE_TABLE + slot_of(hashed, probe) * at.ROW_BYTES
        shape = load(row + at.ROW_MESSAGES)
        if (
            load(row + at.ROW_KEY) == key
            and load(row + at.ROW_COUNT) == count
            and has_shape(messages, count, signature, shape)
        ):
            total = give_lanes(messages, count, shape)
            if total < 0 or (
                fills_gpu(total, count)
                and load(load(state + at.STATE_ORDER)) != load(state + at.STATE_SELF)
            ):
                return 0
            block = load(row + at.ROW_BLOCK)
            config = load(block + 8 * at.CONFIG)
            write_launch(messages, count, signature, shape, config)
            store(config + at.CONFIG_STREAM, load(state + at.STATE_STREAM))
            return block
    return 0
