"""Kernel source: the loop of the progress engine, which runs without the interpreter's lock.

It returns to Python for commands of other threads and for links that have ended, and sleeps in
epoll when nothing moves.  Before it sleeps it sets ``asleep`` (sequentially consistent) and scans
all FIFOs once more; an executor that published something reads ``asleep`` after a full fence and
rings the doorbell if it is set, so a busy engine costs the executor no system call.
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
from miraccl.proxy.kernels.link_io import advance_streams, scan
from miraccl.proxy.kernels.link_receive import on_placed
from miraccl.proxy.kernels.link_send import (
    alive,
    contradict,
    fail,
    on_posted,
    on_written,
    stream_of,
)

SYS_READ, SYS_EPOLL_PWAIT = (63, 22) if platform.machine() == "aarch64" else (0, 281)
EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP, EPOLLRDHUP = 1, 4, 8, 16, 0x2000
#: epoll data of the doorbell; streams have (link << 8 | stream).
DOORBELL_DATA = 0xFFFFFFFF
#: x86-64 packs struct epoll_event to 12 bytes; others align it to 16.
EVENT_BYTES = 12 if platform.machine() == "x86_64" else 16
EVENT_DATA = EVENT_BYTES - 8


@inline
def now_ns(engine: int) -> int:
    """CLOCK_MONOTONIC in ns."""
    clock_gettime(1, engine + layout.ENGINE_TIME)
    return load(engine + layout.ENGINE_TIME) * 1000000000 + load(engine + layout.ENGINE_TIME + 8)


@inline
def link_at(engine: int, i: int) -> int:
    """Address of a link, 0 for a free entry."""
    return load(load(engine + layout.ENGINE_LINKS) + 8 * i)


@inline
def wake_executor(engine: int) -> None:
    """Wake the executor if it sleeps for something that was published."""
    if load(engine + layout.ENGINE_DIRTY) == 0:
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
def poll(engine: int, milliseconds: int) -> int:
    """Read the events of sockets and of the doorbell; return how many there were."""
    events = engine + layout.ENGINE_EVENTS
    most = layout.MAX_EVENTS * 12 // EVENT_BYTES
    count = syscall(
        SYS_EPOLL_PWAIT, load(engine + layout.ENGINE_EPOLL), events, most, milliseconds, 0, 8
    )
    for i in range(count):
        event = events + i * EVENT_BYTES
        flags = load32(event) & 0xFFFFFFFF
        data = load32(event + EVENT_DATA) & 0xFFFFFFFF
        if data == DOORBELL_DATA:
            word = engine + layout.ENGINE_WORD
            syscall(SYS_READ, load(engine + layout.ENGINE_DOORBELL), word, 8, 0, 0, 0)
        else:
            link = link_at(engine, data >> 8)
            if link != 0:
                note_edge(stream_of(link, data & 0xFF), flags)
    return count


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


def run(engine: int, unused: int) -> int:
    """Advance all links until Python is needed."""
    idle_since = 0
    while True:
        store(engine + layout.ENGINE_ROUNDS, load(engine + layout.ENGINE_ROUNDS) + 1)
        busy = False
        for i in range(load(engine + layout.ENGINE_NLINKS)):
            link = link_at(engine, i)
            if link != 0 and alive(link):
                if scan(link):
                    busy = True
                if advance_streams(engine, link):
                    busy = True
        wake_executor(engine)
        if needs_python(engine):
            return 0
        if busy:
            idle_since = 0
            poll(engine, 0)
        elif poll(engine, 0) > 0:
            idle_since = 0
        else:
            now = now_ns(engine)
            if idle_since == 0:
                idle_since = now
            if now - idle_since < load(engine + layout.ENGINE_SPIN_NS):
                pause()
                sched_yield()
            else:
                sleep(engine)
                idle_since = 0


@inline
def sleep(engine: int) -> None:
    """Sleep until a socket or the doorbell has an event, unless a last scan finds something."""
    asleep = load(engine + layout.ENGINE_ASLEEP)
    exchange(asleep, 1)
    found = needs_python(engine)
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and scan(link):
            found = True
    if not found:
        poll(engine, -1)
    exchange(asleep, 0)


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
    advance(link)
    return 0


EXPORTS: dict[str, Any] = {"run": run, "close_link": close_link, "event": event}
