"""Kernel source: the loop of the verbs engine, which runs without the interpreter's lock.

An idle engine polls for a while, then asks the completion queues for an event, polls once more and
sleeps in epoll on the completion channels and its doorbell. It returns to Python for commands of
other threads, failed queue pairs, rows that Python handles, and links that have ended.

An executor that waits advances the connections itself (``drive``), as with TCP
(``proxy.kernels.progress_engine``, which says who has the lock): posting and polling need no system
call on most devices, so a message costs no switch between threads. With a single core it sleeps in
``drive`` as well, on the completion channels, and what it publishes is posted when it waits.
"""

from __future__ import annotations

import platform
from typing import Any

from miraccl.native.intrinsics import (
    call4,
    exchange,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    pause,
    sched_yield,
    store,
    syscall,
)
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.kernels.link import advance, on_close_requested, on_consumed
from miraccl.proxy.kernels.link_io import may_defer_link, scan_cts, source_of
from miraccl.proxy.kernels.link_send import alive, fail, on_posted
from miraccl.proxy.kernels.progress_engine import (
    DOORBELL_DATA,
    DRIVE_HAND_OVER,
    DRIVE_POSTED,
    DRIVE_SLEEP,
    EVENT_BYTES,
    EVENT_DATA,
    acquire,
    acquire_after_doze,
    begin_round,
    doze_if_driven,
    hand_over,
    has_event,
    is_watched,
    now_ns,
    release,
    ring,
    sleep_driving,
    take_published,
    wake_executor,
)
from miraccl.proxy.kernels.progress_engine import link_at as connection_at
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.proxy.verbs.kernels.completions import drain, end_streams, poll_all, resolve
from miraccl.proxy.verbs.kernels.posting import (
    deregister_everything,
    post_abort,
    post_all,
    post_receives,
    post_special,
    qp_of,
)
from miraccl.transport import fifo

SYS_READ, SYS_EPOLL_PWAIT = (63, 22) if platform.machine() == "aarch64" else (0, 281)
MODE_ADDRESS, PAGE_BYTES = int(fifo.Mode.ADDRESS), fifo.PAGE_BYTES
#: epoll data of the asynchronous events of devices; channels have their device's number.
ASYNC_DATA = 0xFFFFFFFE


# ---- FIFOs


@inline
def staged_source(conn: int, message: int, line: int, source: int) -> int:
    """Copy a small payload from the caller's memory to its slot, and return where it is."""
    link = load(conn + layout.CONN_LINK)
    nbytes = load(line + 16)
    if load(line + 24) != MODE_ADDRESS or nbytes == 0:
        return source
    slot_bytes = load(link + link_layout.LINK_RECV_SLOT_BYTES)
    if nbytes > load(conn + layout.CONN_COPY_BYTES) or nbytes > slot_bytes:
        return source
    slot = load(link + link_layout.LINK_SEND_SLOTS) + (message & (layout.NSLOTS - 1)) * slot_bytes
    memcpy(slot, source, nbytes)
    return slot


@inline
def scan_posts(conn: int) -> bool:
    """Process the messages that the executor has posted; return True if there were any."""
    link, found, going = load(conn + layout.CONN_LINK), False, True
    while going and alive(link):
        message = load(link + link_layout.LINK_NEXT_POST)
        line = (
            load(link + link_layout.LINK_SEND_DESCRIPTORS)
            + (message & (layout.NSLOTS - 1)) * link_layout.LINE_BYTES
        )
        going = load_acquire(line) == message + 1
        if going:
            found = True
            source = source_of(link, message, line)
            if source == 0:
                fail(
                    link,
                    link_layout.FAULT_INTERNAL,
                    link_layout.BAD_DESCRIPTOR,
                    load(line + 16),
                    load(line + 24),
                    load(line + 32),
                )
            else:
                source = staged_source(conn, message, line, source)
                on_posted(link, message, load(line + 8), load(line + 16), source)
                advance(link)
    return found


@inline
def scan(conn: int) -> bool:
    """Process what the executor has published; return True if there was anything."""
    link = load(conn + layout.CONN_LINK)
    if not alive(link):
        return False
    found = False
    tail = load_acquire(load(link + link_layout.LINK_RECV_TAIL))
    if tail != load(link + link_layout.LINK_TAIL):
        found = True
        on_consumed(link, tail)
        advance(link)
    if scan_posts(conn):
        found = True
    if scan_cts(link):
        found = True
    return found


# ---- events


@inline
def take_event(engine: int, index: int, result: int) -> bool:
    """Take one event of a completion channel, which does not block; return False if there is none.

    ``result``: two words, queue and context.
    """
    device = engine + layout.ENGINE_DEVICES + index * layout.DEVICE_BYTES
    take, channel = load(engine + layout.FUNCTION_GET_EVENT), load(device + layout.DEVICE_CHANNEL)
    if call4(take, channel, result, result + 8, 0) << 32 != 0:
        return False
    call4(load(engine + layout.FUNCTION_ACK_EVENTS), load(result), 1, 0, 0)
    return True


@inline
def wait_events(engine: int, milliseconds: int) -> int:
    """Wait for the doorbell, completion channels and asynchronous events; return how many."""
    events = engine + link_layout.ENGINE_EVENTS
    most = link_layout.MAX_EVENTS * 12 // EVENT_BYTES
    count = syscall(
        SYS_EPOLL_PWAIT, load(engine + link_layout.ENGINE_EPOLL), events, most, milliseconds, 0, 8
    )
    for i in range(count):
        data = load32(events + i * EVENT_BYTES + EVENT_DATA) & 0xFFFFFFFF
        if data == DOORBELL_DATA:
            word = engine + link_layout.ENGINE_WORD
            syscall(SYS_READ, load(engine + link_layout.ENGINE_DOORBELL), word, 8, 0, 0, 0)
        elif data == ASYNC_DATA:
            store(engine + layout.ENGINE_ASYNC, 1)
        else:
            while take_event(engine, data, engine + layout.ENGINE_CQ):
                pass
    return count


@inline
def arm(conn: int) -> None:
    """Ask all completion queues of a connection for an event."""
    engine = load(conn + layout.CONN_ENGINE)
    for device in range(load(conn + layout.CONN_NCQS)):
        queue = load(conn + layout.CONN_CQS + 8 * device)
        if queue != 0:
            record = engine + layout.ENGINE_DEVICES + device * layout.DEVICE_BYTES
            call4(load(record + layout.DEVICE_REQ_NOTIFY), queue, 0, 0, 0)


@inline
def arm_all(engine: int) -> None:
    """Ask the completion queues of all connections for an event."""
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        conn = connection_at(engine, i)
        if conn != 0:
            arm(conn)


# ---- the loop


@inline
def needs_python(engine: int) -> bool:
    """Return True if Python has something to do."""
    if load_acquire(engine + link_layout.ENGINE_ATTENTION) != 0:
        return True
    if load(engine + layout.ENGINE_ASYNC) != 0:
        return True
    if load(engine + link_layout.ENGINE_DIRTY) != 0 and load(engine + link_layout.ENGINE_CTRL) == 0:
        return True
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        conn = connection_at(engine, i)
        if conn != 0:
            if load(conn + layout.CONN_ATTENTION) != 0:
                return True
            link = load(conn + layout.CONN_LINK)
            if not alive(link) and load(link + link_layout.LINK_REPORTED) == 0:
                return True
    return False


@inline
def timer_due(engine: int) -> bool:
    """Return True if the time has come that Python asked for."""
    timer = load(engine + layout.ENGINE_TIMER_NS)
    return timer != 0 and now_ns(engine) >= timer


@inline
def advance_all(engine: int) -> bool:
    """Advance all connections once; return True if anything moved."""
    busy = False
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        conn = connection_at(engine, i)
        if conn != 0:
            if scan(conn):
                busy = True
            if poll_all(conn):
                busy = True
            if alive(load(conn + layout.CONN_LINK)) and post_all(conn):
                busy = True
    return busy


@inline
def sleep(engine: int) -> None:
    """Sleep until there is an event, unless a last look finds something.

    Takes the lock for the look, and returns with it.
    """
    asleep = load(engine + link_layout.ENGINE_ASLEEP)
    acquire(engine)
    exchange(asleep, 1)
    arm_all(engine)
    found = advance_all(engine)
    wake_executor(engine)
    if not found and not needs_python(engine):
        milliseconds = -1
        timer = load(engine + layout.ENGINE_TIMER_NS)
        if timer != 0:
            milliseconds = max(0, (timer - now_ns(engine) + 999999) // 1000000)
        store(engine + layout.ENGINE_SLEEPS, load(engine + layout.ENGINE_SLEEPS) + 1)
        release(engine)
        wait_events(engine, milliseconds)
        acquire(engine)
    exchange(asleep, 0)


def run(engine: int, unused: int) -> int:
    """Advance all connections until Python is needed; called and left with the lock held."""
    idle_since = 0
    driven = load_acquire(engine + link_layout.ENGINE_DRIVEN)
    while True:
        store(engine + link_layout.ENGINE_ROUNDS, load(engine + link_layout.ENGINE_ROUNDS) + 1)
        busy = advance_all(engine)
        wake_executor(engine)
        if needs_python(engine) or timer_due(engine):
            return 0
        release(engine)
        rounds = doze_if_driven(engine, driven)
        if busy or rounds != driven:
            driven = rounds
            acquire_after_doze(engine)
            idle_since = 0
        else:
            now = now_ns(engine)
            if idle_since == 0:
                idle_since = now
            if now - idle_since < load(engine + link_layout.ENGINE_SPIN_NS):
                pause()
                sched_yield()
                acquire(engine)
            else:
                sleep(engine)
                idle_since = 0


@inline
def may_defer(engine: int) -> bool:
    """Return True if what the executor has published may wait until it sleeps.

    With a single core a call of ``ibv_post_send`` per message hands each over alone. The thread
    posts what an executor leaves that does not wait.
    """
    if load(engine + link_layout.ENGINE_ONE_CORE) == 0:
        return False
    for i in range(load(engine + link_layout.ENGINE_NLINKS)):
        conn = connection_at(engine, i)
        if conn != 0:
            busy = False
            for index in range(load(conn + layout.CONN_NQPS)):
                qp = qp_of(conn, index)
                if load(qp + layout.QP_POSTED) != load(qp + layout.QP_DONE):
                    busy = True
            if not may_defer_link(load(conn + layout.CONN_LINK), busy):
                return False
    return is_watched(engine)


@inline
def advance_driving(engine: int) -> bool:
    """Advance all connections once for an executor, which has the lock; return True if anything
    moved.
    """
    found = advance_all(engine)
    store(engine + link_layout.ENGINE_DIRTY, 0)  # the executor is awake
    return found


def drive(engine: int, mode: int, nanoseconds: int, unused: int) -> int:
    """Advance the connections in an executor's thread; return 1 unless another thread has them.

    ``mode``: as of ``progress_engine.drive``, or DRIVE_SLEEP: sleep here for at most
    ``nanoseconds`` if nothing moves; 0 if the executor must sleep elsewhere.
    """
    if mode == DRIVE_HAND_OVER:
        hand_over(engine)
        return 1
    if mode == DRIVE_POSTED and may_defer(engine):
        return 1
    if not begin_round(engine):
        return 0
    found, sleeps = advance_driving(engine), mode == DRIVE_SLEEP
    if sleeps and not take_published(engine) and not found:
        arm_all(engine)
        if not advance_driving(engine) and not needs_python(engine):
            exchange(engine + link_layout.ENGINE_WAITING, 1)
            release(engine)
            sleep_driving(engine, nanoseconds)
            for index in range(load(engine + layout.ENGINE_NDEVICES)):
                if has_event(engine, index + 1):
                    take_event(engine, index, engine + layout.ENGINE_DRIVEN_CQ)
            if not begin_round(engine):
                return 1
            advance_driving(engine)
    calls_python = needs_python(engine)
    release(engine)
    # A thread that sleeps in epoll has armed the queues: a completion that this round has left
    # wakes it.
    if calls_python and load_acquire(load(engine + link_layout.ENGINE_ASLEEP)) != 0:
        ring(engine)
    return 0 if sleeps and calls_python else 1


def close_link(conn: int, unused: int) -> int:
    """Let a connection send what is posted, then close."""
    link = load(conn + layout.CONN_LINK)
    if alive(link):
        scan(conn)
        on_close_requested(link)
        advance(link)
    return 0


def fail_link(conn: int, arguments: int) -> int:
    """End a link: words (kind, code, a, b, c)."""
    fail(
        load(conn + layout.CONN_LINK),
        load(arguments),
        load(arguments + 8),
        load(arguments + 16),
        load(arguments + 24),
        load(arguments + 32),
    )
    return 0


EXPORTS: dict[str, Any] = {
    "run": run,
    "drive": drive,
    "close_link": close_link,
    "fail_link": fail_link,
    "post_receives": post_receives,
    "post_special": post_special,
    "post_abort": post_abort,
    "deregister_everything": deregister_everything,
    "drain": drain,
    "resolve": resolve,
    "end_streams": end_streams,
}
