"""Kernel source: the event queue, ordered by time and, within one instant, order of scheduling.

Near events are in a wheel with one list per nanosecond (Varghese and Lauck, SOSP 1987): links take
about a microsecond, so all insertions go to a few kilobytes ahead of the present. Events beyond the
wheel's horizon wait in a heap and enter the wheel as soon as the horizon reaches them, before
anything else can be scheduled for their instant; so lists need no sorting.
"""

from __future__ import annotations

from miraccl.native.intrinsics import load, store
from miraccl.sim.fabric.kernels.fabric_layout import (
    BITS,
    EVENT_ORDER,
    EVENT_SIZE,
    EVENT_TIME,
    EVENT_WHAT,
    FAILED,
    HEAP,
    HEAP_CAPACITY,
    HEAP_SIZE,
    NODE_FREE,
    NODE_NEXT,
    NODE_SIZE,
    NODE_WHAT,
    NODES,
    NOW,
    OCCUPIED,
    ORDER,
    SLOT_FIRST,
    SLOT_LAST,
    SLOT_SIZE,
    SLOTS,
    TYPES,
    WHEEL,
    WHEEL_COUNT,
)


def schedule(world: int, time: int, kind: int, argument: int) -> int:
    """Schedule an event at ``time``, or now if that has passed."""
    now = load(world + NOW)
    time = max(time, now)
    if time - now < SLOTS:
        _insert(world, time, argument * TYPES + kind)
    else:
        _push(world, time, argument * TYPES + kind)
    return 0


def _insert(world: int, time: int, what: int) -> int:
    """Append an event to the list of its instant."""
    number = load(world + NODE_FREE)
    node = load(world + NODES) + number * NODE_SIZE
    after = load(node + NODE_NEXT)
    if after < 0:  # the last one stays, so that the list never ends
        store(world + FAILED, 1)
        return 0
    store(world + NODE_FREE, after)
    store(node + NODE_NEXT, -1)
    store(node + NODE_WHAT, what)
    index = time % SLOTS
    slot = load(world + WHEEL) + index * SLOT_SIZE
    if load(slot + SLOT_FIRST) < 0:
        store(slot + SLOT_FIRST, number)
        word = load(world + OCCUPIED) + index // BITS * 8
        store(word, load(word) | (1 << (index % BITS)))
    else:
        store(load(world + NODES) + load(slot + SLOT_LAST) * NODE_SIZE + NODE_NEXT, number)
    store(slot + SLOT_LAST, number)
    store(world + WHEEL_COUNT, load(world + WHEEL_COUNT) + 1)
    return 0


def next_time(world: int) -> int:
    """Time of the next event, -1 if there is none."""
    if load(world + WHEEL_COUNT) == 0:
        if load(world + HEAP_SIZE) == 0:
            return -1
        return load(load(world + HEAP) + EVENT_TIME)
    now = load(world + NOW)
    index = now % SLOTS
    occupied = load(world + OCCUPIED)
    word = load(occupied + index // BITS * 8) >> (index % BITS)
    at = index
    while word == 0:
        at = at - at % BITS + BITS
        word = load(occupied + at % SLOTS // BITS * 8)
    while word % 2 == 0:
        word = word // 2
        at += 1
    return now + at - index


def pop(world: int, time: int) -> int:
    """Move to ``time``, that of the next event, remove that event and return what it is."""
    if time != load(world + NOW):
        store(world + NOW, time)
        while load(world + HEAP_SIZE) > 0:
            first = load(world + HEAP)
            due = load(first + EVENT_TIME)
            if due - time >= SLOTS:
                break
            what = load(first + EVENT_WHAT)
            _pop_heap(world)
            _insert(world, due, what)
    index = time % SLOTS
    slot = load(world + WHEEL) + index * SLOT_SIZE
    number = load(slot + SLOT_FIRST)
    node = load(world + NODES) + number * NODE_SIZE
    after = load(node + NODE_NEXT)
    store(slot + SLOT_FIRST, after)
    if after < 0:
        word = load(world + OCCUPIED) + index // BITS * 8
        store(word, load(word) & ~(1 << (index % BITS)))
    store(node + NODE_NEXT, load(world + NODE_FREE))
    store(world + NODE_FREE, number)
    store(world + WHEEL_COUNT, load(world + WHEEL_COUNT) - 1)
    return load(node + NODE_WHAT)


# ---- heap of two children per node, ordered by (time, order)


def _push(world: int, time: int, what: int) -> int:
    order = load(world + ORDER) + 1
    store(world + ORDER, order)
    size = load(world + HEAP_SIZE)
    if size == load(world + HEAP_CAPACITY):
        store(world + FAILED, 1)
        return 0
    store(world + HEAP_SIZE, size + 1)
    heap = load(world + HEAP)
    i = size
    while i > 0:
        above = heap + (i - 1) // 2 * EVENT_SIZE
        if load(above + EVENT_TIME) <= time:  # the new one has the larger order
            break
        _move(above, heap + i * EVENT_SIZE)
        i = (i - 1) // 2
    entry = heap + i * EVENT_SIZE
    store(entry + EVENT_TIME, time)
    store(entry + EVENT_ORDER, order)
    store(entry + EVENT_WHAT, what)
    return 0


def _move(source: int, target: int) -> int:
    store(target + EVENT_TIME, load(source + EVENT_TIME))
    store(target + EVENT_ORDER, load(source + EVENT_ORDER))
    store(target + EVENT_WHAT, load(source + EVENT_WHAT))
    return 0


def _before(a: int, b: int) -> int:
    """Return 1 if the event at ``a`` is due before the one at ``b``."""
    time, other = load(a + EVENT_TIME), load(b + EVENT_TIME)
    if time != other:
        return 1 if time < other else 0
    return 1 if load(a + EVENT_ORDER) < load(b + EVENT_ORDER) else 0


def _pop_heap(world: int) -> int:
    heap = load(world + HEAP)
    size = load(world + HEAP_SIZE) - 1
    store(world + HEAP_SIZE, size)
    last = heap + size * EVENT_SIZE
    i = 0
    while 2 * i + 1 < size:
        child = 2 * i + 1
        right = child + 1
        if right < size and _before(heap + right * EVENT_SIZE, heap + child * EVENT_SIZE) != 0:
            child = right
        if _before(heap + child * EVENT_SIZE, last) == 0:
            break
        _move(heap + child * EVENT_SIZE, heap + i * EVENT_SIZE)
        i = child
    _move(last, heap + i * EVENT_SIZE)
    return 0
