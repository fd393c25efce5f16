"""Kernel source: the loop of the progress engine, which runs without the interpreter's lock.

It returns to Python for commands of other threads and for links that have ended, and sleeps in
epoll when nothing moves.

An executor that waits may advance the links itself (``drive``), which saves two switches between
threads per message.  ``ENGINE_LOCK`` belongs to whoever advances links; the engine's thread has it
outside ``run`` too, so commands find the links at rest.  While an executor drives, the thread dozes
on its doorbell and not in epoll, so that sockets do not wake it.

Before the thread sleeps it sets ``asleep`` (sequentially consistent) and scans all FIFOs once more;
an executor that published something reads ``asleep`` after a full fence and rings the doorbell if
it is set, so a busy engine costs the executor no system call.
"""

from __future__ import annotations

import platform
from typing import Any

from miraccl.native.intrinsics import (
    clock_gettime,
    exchange,
    fence,
    inline,
    load,
    load32,
    load_acquire,
    pause,
    sched_yield,
    store,
    store_release,
    syscall,
)
from miraccl.native.sleeper import SLEEP, ring_doorbell
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.link import (
    advance,
    on_close_requested,
    on_consumed,
    on_frame,
    on_receive_posted,
    on_stream_ended,
)
from miraccl.proxy.kernels.link_io import advance_streams, measured_rate, scan
from miraccl.proxy.kernels.link_receive import on_placed
from miraccl.proxy.kernels.link_send import (
    alive,
    contradict,
    fail,
    on_measured,
    on_posted,
    on_written,
    stream_of,
)

SYS_READ, SYS_WRITE, SYS_EPOLL_PWAIT, SYS_PPOLL = (
    (63, 64, 22, 73) if platform.machine() == "aarch64" else (0, 1, 281, 271)
)
POLLIN = 1
#: A doze of ``DOZE_NS`` is doubled, up to the longest, while the executor goes on: a timer costs a
#: virtual machine some 20 us.
LONGEST_DOZE_NS = 1_600_000
#: Bytes of a stream that the thread moves beside an executor, where it has a core of its own.
OVERLAP_BYTES = 1 << 17
#: An executor of at most so many links reads their first streams without a question to epoll, and
#: asks it in every ``EPOLL_EVERY``-th round only.
DIRECT_LINKS, EPOLL_EVERY = 2, 8
#: Modes of ``drive``; only engines with ``sleep_driving`` have the last one.
DRIVE_POSTED, DRIVE_POLL, DRIVE_HAND_OVER, DRIVE_SLEEP = 0, 1, 2, 3
EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP = 1, 4, 8, 16, 0x2000
#: epoll data of the doorbell; streams have (link << 8 | stream).
DOORBELL_DATA = 0xFFFFFFFF
#: x86-64 packs struct epoll_event to 12 bytes; others align it to 16.
EVENT_BYTES = 12 if platform.machine() == "x86_64" else 16
EVENT_DATA = EVENT_BYTES - 8


@inline
def now_ns(engine: int) -> int:
    """CLOCK_MONOTONIC in ns."""
    clock_gettime(1, engine + layout.ENGINE_CLOCK)
    return load(engine + layout.ENGINE_CLOCK) * 1000000000 + load(engine + layout.ENGINE_CLOCK + 8)


@inline
def link_at(engine: int, i: int) -> int:
    """Address of a link, 0 for a free entry."""
    return load(load(engine + layout.ENGINE_LINKS) + 8 * i)


@inline
def write_event(engine: int, descriptor: int) -> None:
    """Add 1 to an eventfd."""
    word = engine + layout.ENGINE_WORD + 8
    store(word, 1)
    syscall(SYS_WRITE, descriptor, word, 8, 0, 0, 0)


@inline
def wake_executor(engine: int) -> None:
    """Wake the executor if it sleeps for something that was published."""
    if load(engine + layout.ENGINE_DIRTY) == 0:
        return
    store(engine + layout.ENGINE_PUBLISHED, 1)
    if load_acquire(engine + layout.ENGINE_WAITING) != 0:
        store(engine + layout.ENGINE_DIRTY, 0)
        write_event(engine, load32(engine + layout.ENGINE_SLEEP_FDS))
        return
    ctrl = load(engine + layout.ENGINE_CTRL)
    if ctrl == 0:  # Python wakes it
        return
    store(engine + layout.ENGINE_DIRTY, 0)
    fence()
    if load_acquire(ctrl + SLEEP) != 0:
        store(engine + layout.ENGINE_WAKES, load(engine + layout.ENGINE_WAKES) + 1)
        ring_doorbell(ctrl)


@inline
def poll(engine: int, milliseconds: int, events: int) -> int:
    """Read the events of sockets and of the doorbell into ``events``; return how many there
    are.
    """
    most = layout.MAX_EVENTS * 12 // EVENT_BYTES
    return syscall(
        SYS_EPOLL_PWAIT, load(engine + layout.ENGINE_EPOLL), events, most, milliseconds, 0, 8
    )


@inline
def note_events(engine: int, events: int, count: int) -> None:
    """Apply what ``poll`` has read, except for the doorbell, which the thread drains."""
    for i in range(count):
        event = events + i * EVENT_BYTES
        flags = load32(event) & 0xFFFFFFFF
        data = load32(event + EVENT_DATA) & 0xFFFFFFFF
        link = link_at(engine, data >> 8) if data != DOORBELL_DATA else 0
        if link != 0:
            note_edge(stream_of(link, data & 0xFF), flags)


@inline
def poll_now(engine: int) -> int:
    """Read and apply the events that there are; return how many."""
    events = engine + layout.ENGINE_EVENTS
    count = poll(engine, 0, events)
    note_events(engine, events, count)
    return count


@inline
def poll_directly(engine: int) -> None:
    """Have the first stream of each link read, or apply the events of all streams.

    Small messages come over the first stream.  With few links, a receive that finds nothing costs
    as much as epoll does, and one that finds a message saves the call.
    """
    polls = load(engine + layout.ENGINE_POLLS) + 1
    store(engine + layout.ENGINE_POLLS, polls)
    nlinks = load(engine + layout.ENGINE_NLINKS)
    asks = nlinks > DIRECT_LINKS or polls & (EPOLL_EVERY - 1) == 0
    for i in range(nlinks):
        link = link_at(engine, i)
        if link != 0 and not asks:
            stream = stream_of(link, 0)
            # of a large payload, the kernel reports much at a time (``set_low_water``); over
            # several networks, small messages use any stream
            if (
                load(stream + layout.STREAM_REMAINING) >= layout.LOW_WATER_MIN
                or load(link + layout.LINK_RAILS) > 1
            ):
                asks = True
            else:
                store(stream + layout.STREAM_READABLE, 1)
    if asks:
        poll_now(engine)


@inline
def drain_doorbell(engine: int) -> None:
    """Reset the doorbell. The thread alone does: a ring must not be lost to an executor."""
    word = engine + layout.ENGINE_DRAINED
    syscall(SYS_READ, load(engine + layout.ENGINE_DOORBELL), word, 8, 0, 0, 0)


@inline
def ring(engine: int) -> None:
    """Wake the engine's thread."""
    write_event(engine, load(engine + layout.ENGINE_DOORBELL))


@inline
def note_edge(stream: int, flags: int) -> None:
    """Update a stream from edge-triggered events."""
    if flags & (EPOLLRDHUP | EPOLLHUP | EPOLLERR) != 0:
        store(stream + layout.STREAM_ENDING, 1)
    if flags & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR) != 0:
        store(stream + layout.STREAM_READABLE, 1)
    if flags & (EPOLLOUT | EPOLLRDHUP | EPOLLHUP | EPOLLERR) != 0:
        store(stream + layout.STREAM_WRITABLE, 1)


@inline
def needs_python(engine: int) -> bool:
    """Return True if a command waits, or a link has ended and Python has not seen that."""
    if load_acquire(engine + layout.ENGINE_ATTENTION) != 0:
        return True
    if load(engine + layout.ENGINE_DIRTY) != 0 and load(engine + layout.ENGINE_CTRL) == 0:
        return True
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and not alive(link) and load(link + layout.LINK_REPORTED) == 0:
            return True
    return False


@inline
def advance_links(engine: int) -> bool:
    """Advance all links once; return True if something moved."""
    found, unfinished = False, False
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and alive(link):
            if scan(link):
                found = True
            if advance_streams(engine, link):
                unfinished = True
    store(engine + layout.ENGINE_UNFINISHED, 1 if unfinished else 0)
    return found or unfinished


@inline
def acquire(engine: int) -> None:
    """Wait for the links; an executor has them for one round at a time."""
    while exchange(engine + layout.ENGINE_LOCK, 1) != 0:
        sched_yield()


@inline
def release(engine: int) -> None:
    """Leave the links to executors."""
    store_release(engine + layout.ENGINE_LOCK, 0)


def run(engine: int, unused: int) -> int:
    """Advance all links until Python is needed; called and left with the lock held."""
    idle_since = 0
    driven = load_acquire(engine + layout.ENGINE_DRIVEN)
    while True:
        store(engine + layout.ENGINE_ROUNDS, load(engine + layout.ENGINE_ROUNDS) + 1)
        busy = advance_links(engine)
        wake_executor(engine)
        if needs_python(engine):
            return 0
        if poll_now(engine) > 0:
            busy = True
            drain_doorbell(engine)
        release(engine)
        rounds = doze_while_driven(engine, driven)
        if busy or rounds != driven:
            driven = rounds
            acquire(engine)
            idle_since = 0
        else:
            now = now_ns(engine)
            if idle_since == 0:
                idle_since = now
            if now - idle_since < load(engine + layout.ENGINE_SPIN_NS):
                pause()
                sched_yield()
                acquire(engine)
            else:
                sleep(engine)
                idle_since = 0


@inline
def sleep(engine: int) -> None:
    """Sleep until a socket or the doorbell has an event, unless a last scan finds something.

    Takes the lock for the scan, and returns with it.
    """
    asleep = load(engine + layout.ENGINE_ASLEEP)
    acquire(engine)
    exchange(asleep, 1)
    # an executor may have advanced the links since, and left, before it could see ``asleep``
    found = needs_python(engine) or load(engine + layout.ENGINE_UNFINISHED) != 0
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and scan(link):
            found = True
    events, count = engine + layout.ENGINE_WAIT_EVENTS, 0
    if not found:
        release(engine)
        count = poll(engine, -1, events)
        drain_doorbell(engine)
        acquire(engine)
    exchange(asleep, 0)
    note_events(engine, events, count)


@inline
def doze(engine: int, nanoseconds: int) -> bool:
    """Leave the links to the executor that drives them for that time; return True if it has handed
    them over or a command waits.
    """
    asleep = load(engine + layout.ENGINE_ASLEEP)
    exchange(engine + layout.ENGINE_DOZING, 1)
    exchange(asleep, 1)
    if (
        load_acquire(engine + layout.ENGINE_HANDOVER) == 0
        and load_acquire(engine + layout.ENGINE_ATTENTION) == 0
    ):
        polled, limit = engine + layout.ENGINE_POLLED, engine + layout.ENGINE_DOZE
        store(polled, load(engine + layout.ENGINE_DOORBELL) | (POLLIN << 32))
        store(limit, 0)
        store(limit + 8, nanoseconds)
        if syscall(SYS_PPOLL, polled, 1, limit, 0, 8, 0) > 0:
            drain_doorbell(engine)
    exchange(asleep, 0)
    exchange(engine + layout.ENGINE_DOZING, 0)
    return exchange(engine + layout.ENGINE_HANDOVER, 0) != 0 or (
        load_acquire(engine + layout.ENGINE_ATTENTION) != 0
    )


@inline
def doze_if_driven(engine: int, driven: int) -> int:
    """Doze if executors have begun other rounds than the ``driven`` ones that the thread knows of,
    or one sleeps in a round; return how many they had begun before, -1 if one slept. Called and
    left without the lock.
    """
    rounds = load_acquire(engine + layout.ENGINE_DRIVEN)
    waits = load_acquire(engine + layout.ENGINE_WAITING) != 0
    if rounds != driven or waits:
        doze(engine, load(engine + layout.ENGINE_DOZE_NS))
    return -1 if waits else rounds


@inline
def doze_while_driven(engine: int, driven: int) -> int:
    """Doze until the executor hands the links over, a command waits, or no round was begun in the
    last doze; as ``doze_if_driven``.
    """
    rounds, nanoseconds = load_acquire(engine + layout.ENGINE_DRIVEN), layout.DOZE_NS
    while rounds != driven:
        driven = rounds
        if doze(engine, nanoseconds):
            break
        rounds = load_acquire(engine + layout.ENGINE_DRIVEN)
        nanoseconds = min(2 * nanoseconds, LONGEST_DOZE_NS)
    return rounds


@inline
def hand_over(engine: int) -> None:
    """Have a thread that dozes advance the links, as the executor is about to sleep."""
    exchange(engine + layout.ENGINE_HANDOVER, 1)
    if load_acquire(engine + layout.ENGINE_DOZING) != 0:
        ring(engine)


@inline
def begin_round(engine: int) -> bool:
    """Take the lock for a round of an executor; return False if another thread has it."""
    if exchange(engine + layout.ENGINE_LOCK, 1) != 0:
        return False
    store_release(engine + layout.ENGINE_DRIVEN, load(engine + layout.ENGINE_DRIVEN) + 1)
    return True


@inline
def acquire_after_doze(engine: int) -> None:
    """Wait for the links; with a single core, as long as executors have them, by further dozes.

    The lock is held during calls that send, and a thread that yields for it takes its share of the
    only processor.
    """
    while exchange(engine + layout.ENGINE_LOCK, 1) != 0:
        sched_yield()
        if load(engine + layout.ENGINE_ONE_CORE) != 0:
            doze(engine, load(engine + layout.ENGINE_DOZE_NS))


@inline
def is_watched(engine: int) -> bool:
    """Return True if the thread looks at the links from time to time, as it dozes; else wake it if
    it sleeps until an event.
    """
    dozing = load_acquire(engine + layout.ENGINE_DOZING) != 0
    if not dozing and load_acquire(load(engine + layout.ENGINE_ASLEEP)) != 0:
        ring(engine)
    return dozing


@inline
def sleep_driving(engine: int, nanoseconds: int) -> None:
    """Sleep in an executor's thread until a device or the engine's thread has something for it.

    ``ENGINE_WAITING`` was set with the lock, which is released; ``has_event`` tells the devices.
    """
    limit, fds = engine + layout.ENGINE_SLEEP_LIMIT, engine + layout.ENGINE_SLEEP_FDS
    store(limit, nanoseconds // 1000000000)
    store(limit + 8, nanoseconds % 1000000000)
    syscall(SYS_PPOLL, fds, load(engine + layout.ENGINE_NSLEEP_FDS), limit, 0, 8, 0)
    store_release(engine + layout.ENGINE_WAITING, 0)
    if has_event(engine, 0):
        syscall(SYS_READ, load32(fds), engine + layout.ENGINE_SLEEP_WORD, 8, 0, 0, 0)


@inline
def take_published(engine: int) -> bool:
    """Return True if the thread has published something since the last call: an executor that has
    the lock, and looked for it before, must look again.
    """
    found = load(engine + layout.ENGINE_PUBLISHED) != 0
    store(engine + layout.ENGINE_PUBLISHED, 0)
    return found


@inline
def has_event(engine: int, index: int) -> bool:
    """Return True if a descriptor of ``sleep_driving`` has an event."""
    return load(engine + layout.ENGINE_SLEEP_FDS + 8 * index) >> 48 != 0


@inline
def moves_much(engine: int) -> bool:
    """Return True if a stream has much to send or to receive; may be called without the lock."""
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0:
            for index in range(load(link + layout.LINK_NSTREAMS)):
                stream = stream_of(link, index)
                if (
                    load(stream + layout.STREAM_QUEUED_BYTES) > OVERLAP_BYTES
                    or load(stream + layout.STREAM_REMAINING) > OVERLAP_BYTES
                ):
                    return True
    return False


def drive(engine: int, mode: int, unused: int, unused2: int) -> int:
    """Advance the links in an executor's thread; return 1 unless another thread has them.

    ``mode``: DRIVE_POSTED after something was posted, DRIVE_POLL in a wait, DRIVE_HAND_OVER before
    the executor sleeps elsewhere.
    """
    if mode == DRIVE_HAND_OVER:
        hand_over(engine)
        return 1
    # A thread that dozes moves nothing for ``DOZE_NS`` or more: longer than 1 MiB takes.
    dozes = load_acquire(engine + layout.ENGINE_DOZING) != 0
    if load(engine + layout.ENGINE_OVERLAP) != 0 and not dozes and moves_much(engine):
        return 0
    if not begin_round(engine):
        return 0
    if mode == DRIVE_POLL:
        poll_directly(engine)
    advance_links(engine)
    unfinished = load(engine + layout.ENGINE_UNFINISHED) != 0
    store(engine + layout.ENGINE_DIRTY, 0)  # the executor is awake
    calls_python = needs_python(engine)
    release(engine)
    if calls_python or unfinished:
        # A round is bounded, and this executor may not come back: the thread goes on if it sleeps
        # in epoll, for no event of a socket will follow.  A thread that dozes wakes by itself.
        asleep = load_acquire(load(engine + layout.ENGINE_ASLEEP)) != 0
        dozing = load_acquire(engine + layout.ENGINE_DOZING) != 0
        if asleep and (calls_python or not dozing):
            ring(engine)
    return 1


def close_link(link: int, unused: int) -> int:
    """Let a link send what is posted, then close."""
    if alive(link):
        scan(link)
        on_close_requested(link)
        advance(link)
    return 0


# ---- single events, for the comparison with ``wire.proxy``


def event(link: int, arguments: int) -> int:
    """Apply one event: words (kind, a, b, c, d), as ``tests.proxy.test_link_kernel`` writes
    them.
    """
    kind, a, b = load(arguments), load(arguments + 8), load(arguments + 16)
    c, d = load(arguments + 24), load(arguments + 32)
    if not alive(link):
        return 0
    if kind == 1:
        on_posted(link, a, b, c, d)
    elif kind == 2:
        on_receive_posted(link, a, b)
    elif kind == 3:
        on_consumed(link, a)
    elif kind == 4:
        on_frame(link, a, arguments + 40)
    elif kind == 5:
        store(stream_of(link, a) + layout.STREAM_PLACING, 0)
        on_placed(link, a)
    elif kind == 6:
        on_written(link, a, b)
    elif kind == 7:
        on_stream_ended(link, a, b)
    elif kind == 8:
        contradict(link, layout.BAD_MAGIC, 0, 0, 0)
    elif kind == 9:
        on_close_requested(link)
    elif kind == 10:
        fail(link, layout.FAULT_INTERNAL, 0, 0, 0, 0)
    elif kind == 11:
        on_measured(link, a, b, c)
    elif kind == 12:
        on_measured(link, a, 0, measured_rate(stream_of(link, a), b, c))
    advance(link)
    return 0


EXPORTS: dict[str, Any] = {"run": run, "drive": drive, "close_link": close_link, "event": event}
