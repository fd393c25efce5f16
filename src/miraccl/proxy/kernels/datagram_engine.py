"""Kernel source: the loop of the datagram engine, which runs without the interpreter's lock.

Like ``progress_engine``, with flows over shared UDP sockets instead of TCP streams: it receives,
scans the FIFOs, handles timers and sends, and sleeps until a socket, the doorbell or a timer.

Over queue pairs an executor that waits advances the flows itself (``drive``), as with TCP, and with
a single core it sleeps there; with sockets it would need epoll as well.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import (
    exchange,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    pause,
    sched_yield,
    store,
    store8,
    syscall,
)
from miraccl.proxy.kernels import flow_layout, queue_layout
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.aegis_vectors import aegis_compiled
from miraccl.proxy.kernels.credit import credit_timer, issue_grants
from miraccl.proxy.kernels.datagram_io import (
    build,
    flush,
    now_ns,
    post_paths,
    receive_queues,
    receive_sockets,
    send_flow,
)
from miraccl.proxy.kernels.flow_path import path_of
from miraccl.proxy.kernels.flow_receive import KIND_ABORT, flow_on_timer
from miraccl.proxy.kernels.flow_send import finish as finish_packet
from miraccl.proxy.kernels.flow_send import flow_timer
from miraccl.proxy.kernels.link import advance, all_closed, on_stream_ended
from miraccl.proxy.kernels.link_io import scan
from miraccl.proxy.kernels.link_send import alive, drop_stream, on_written, stream_of
from miraccl.proxy.kernels.packet_queues import (
    arm,
    device_at,
    failures,
    post_receive,
    reap_sends,
    take_event,
)
from miraccl.proxy.kernels.progress_engine import (
    DOORBELL_DATA,
    DRIVE_HAND_OVER,
    DRIVE_SLEEP,
    EVENT_BYTES,
    EVENT_DATA,
    SYS_READ,
    acquire,
    acquire_after_doze,
    begin_round,
    close_link,
    doze_if_driven,
    hand_over,
    has_event,
    link_at,
    moves_much,
    needs_python,
    release,
    ring,
    sleep_driving,
    take_published,
    wake_executor,
)
from miraccl.wire.datagram.control import CONTROLLERS
from miraccl.wire.datagram.packets import ABORT_BYTES, HEADER_BYTES, TAG_BYTES

SYS_EPOLL_PWAIT2 = 441
#: Probe timeouts after which a CLOSE counts as received by a peer that has closed as well.
CLOSE_TIMEOUTS = 3
#: Copies of the last acknowledgements, which nothing can ask for again.
LAST_COPIES = 3


@inline
def poll(engine: int, port: int, nanoseconds: int) -> int:
    """Read the events of sockets and of the doorbell; wait for at most ``nanoseconds``, or
    without limit if that is negative.
    """
    events = engine + layout.ENGINE_EVENTS
    most = layout.MAX_EVENTS * 12 // EVENT_BYTES
    timeout = 0
    if nanoseconds >= 0:
        timeout = engine + layout.ENGINE_DOZE  # of the thread, also without the lock
        store(timeout, nanoseconds // 1000000000)
        store(timeout + 8, nanoseconds % 1000000000)
    count = syscall(
        SYS_EPOLL_PWAIT2, load(engine + layout.ENGINE_EPOLL), events, most, timeout, 0, 8
    )
    for i in range(count):
        event = events + i * EVENT_BYTES
        data = load32(event + EVENT_DATA) & 0xFFFFFFFF
        if data == DOORBELL_DATA:
            word = engine + layout.ENGINE_WORD
            syscall(SYS_READ, load(engine + layout.ENGINE_DOORBELL), word, 8, 0, 0, 0)
        elif data >= flow_layout.QUEUE_DATA:
            index = data - flow_layout.QUEUE_DATA
            device = device_at(load(port + flow_layout.PORT_QUEUES), index)
            while take_event(device, device + queue_layout.DEVICE_WORDS):
                pass
        else:
            socket = port + flow_layout.PORT_SOCKETS + data * flow_layout.SOCKET_BYTES
            store(socket + flow_layout.SOCKET_READABLE, 1)
    return count


@inline
def end_close(flow: int, link: int) -> None:
    """End a link whose CLOSE frames the peer has, or that has those of a peer that answers no
    longer.
    """
    if load(link + layout.LINK_STATE) != layout.STATE_CLOSING:
        return
    if load(link + layout.LINK_CLOSING) == 0:
        # A peer that was open when it received them sends none of its own.
        for index in range(load(link + layout.LINK_NSTREAMS)):
            on_stream_ended(link, index, 0)
        advance(link)
        return
    if not all_closed(link):
        return
    timeouts = 0
    for index in range(load(flow + flow_layout.FLOW_NPATHS)):
        timeouts = max(timeouts, load(path_of(flow, index) + flow_layout.PATH_TIMEOUTS))
    if timeouts >= CLOSE_TIMEOUTS:
        for index in range(load(link + layout.LINK_NSTREAMS)):
            on_written(link, index, load(stream_of(link, index) + layout.STREAM_COUNT))
        advance(link)


@inline
def closed_by_peer(link: int) -> bool:
    """Return True if the peer has closed in order a link that was open here."""
    return load(link + layout.LINK_FAULT) == layout.FAULT_CLOSED


@inline
def drop_streams(link: int) -> None:
    """Send nothing more of what is queued."""
    for index in range(load(link + layout.LINK_NSTREAMS)):
        drop_stream(link, index)


@inline
def say_goodbye(port: int, flow: int) -> None:
    """Repeat the acknowledgements of a link that has ended."""
    store(flow + flow_layout.FLOW_GOODBYE, 1)
    for _ in range(LAST_COPIES):
        for index in range(load(flow + flow_layout.FLOW_NPATHS)):
            path = path_of(flow, index)
            if load(path + flow_layout.PATH_NUMBERS) != 0:
                store(path + flow_layout.PATH_PENDING, 1)
                store(path + flow_layout.PATH_DUE, 0)
        send_flow(port, flow, now_ns(port))


@inline
def advance_flow(port: int, flow: int, link: int) -> bool:
    """Handle timers and send; return True if there may be more to send at once."""
    now = now_ns(port)
    due = flow_timer(flow, now)
    if due != 0 and due <= now:
        flow_on_timer(flow, now)
    more = send_flow(port, flow, now)
    end_close(flow, link)
    return more


@inline
def next_timer(engine: int, port: int, now: int) -> int:
    """Return the nanoseconds until the next timer, -1 without one."""
    soonest = credit_timer(engine, port, now)
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and alive(link):
            at = flow_timer(load(link + layout.LINK_FLOW), now)
            if at != 0 and (soonest == 0 or at < soonest):
                soonest = at
    return -1 if soonest == 0 else max(0, soonest - now)


@inline
def advance_links(engine: int, port: int) -> bool:
    """Advance every link; return True if one was busy."""
    busy = False
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0:
            flow = load(link + layout.LINK_FLOW)
            if alive(link):
                if scan(link):
                    busy = True
                if advance_flow(port, flow, link):
                    busy = True
                if load(flow + flow_layout.FLOW_CHANGED) != 0:
                    store(flow + flow_layout.FLOW_CHANGED, 0)
                    store(engine + layout.ENGINE_ATTENTION, 1)
            if load(flow + flow_layout.FLOW_GOODBYE) == 0:
                state = load(link + layout.LINK_STATE)
                if state == layout.STATE_LOST and closed_by_peer(link):
                    drop_streams(link)
                    say_goodbye(port, flow)
                if state == layout.STATE_FINISHED:
                    say_goodbye(port, flow)
    return busy


@inline
def queues_failed(port: int) -> bool:
    """Return True if a queue pair has failed since Python has looked."""
    table = load(port + flow_layout.PORT_QUEUES)
    return table != 0 and failures(table) != 0


def post_receives(pair: int, count: int) -> int:
    """Post the first ``count`` receive buffers of a queue pair; return 0 or an errno."""
    code = 0
    for slot in range(count):
        if code == 0:
            code = post_receive(pair, slot)
    return code


def drain_queues(port: int, unused: int) -> int:
    """Process all completions that wait."""
    while receive_queues(port):
        pause()
    table = load(port + flow_layout.PORT_QUEUES)
    for index in range(load(table)):
        reap_sends(device_at(table, index))
    return 0


@inline
def advance_port(engine: int, port: int) -> bool:
    """Receive, and advance every link; return True if anything moved."""
    busy = receive_sockets(port)
    if receive_queues(port):
        busy = True
    if load(port + flow_layout.PORT_BUDGET) != 0:
        issue_grants(engine, port, now_ns(port))
    if advance_links(engine, port):
        busy = True
    return busy


def run(engine: int, unused: int) -> int:
    """Advance all links until Python is needed; called and left with the lock held."""
    port, idle_since = load(engine + layout.ENGINE_PORT), 0
    driven = load_acquire(engine + layout.ENGINE_DRIVEN)
    while True:
        store(engine + layout.ENGINE_ROUNDS, load(engine + layout.ENGINE_ROUNDS) + 1)
        busy = advance_port(engine, port)
        wake_executor(engine)
        if needs_python(engine) or queues_failed(port):
            return 0
        # Completion queues are polled themselves.
        if load(port + flow_layout.PORT_NSOCKETS) != 0 and poll(engine, port, 0) > 0:
            busy = True
        release(engine)
        rounds = doze_if_driven(engine, driven)
        if busy or rounds != driven:
            driven = rounds
            acquire_after_doze(engine)
            idle_since = 0
        else:
            acquire(engine)
            now = now_ns(port)
            if idle_since == 0:
                idle_since = now
            if now - idle_since < load(engine + layout.ENGINE_SPIN_NS):
                release(engine)
                pause()
                sched_yield()
                acquire(engine)
            else:
                sleep(engine, port)
                idle_since = 0


@inline
def sleep(engine: int, port: int) -> None:
    """Sleep until a socket, the doorbell or a timer, unless a last scan finds something; called and
    left with the lock held.
    """
    asleep = load(engine + layout.ENGINE_ASLEEP)
    exchange(asleep, 1)
    found = needs_python(engine)
    for i in range(load(engine + layout.ENGINE_NLINKS)):
        link = link_at(engine, i)
        if link != 0 and scan(link):
            found = True
    if load(port + flow_layout.PORT_QUEUES) != 0:
        arm(load(port + flow_layout.PORT_QUEUES))
        if receive_queues(port):  # what came before they were armed
            found = True
    if not found:
        timeout = next_timer(engine, port, now_ns(port))
        if timeout != 0:
            release(engine)
            poll(engine, port, timeout)
            acquire(engine)
    exchange(asleep, 0)


@inline
def advance_driving(engine: int, port: int) -> bool:
    """Receive and advance every link for an executor, which has the lock; return True if anything
    moved.
    """
    more = advance_port(engine, port)
    store(engine + layout.ENGINE_DIRTY, 0)  # the executor is awake
    return more


@inline
def sleep_in_drive(engine: int, port: int, nanoseconds: int) -> None:
    """Sleep until a device, a timer or the engine's thread has something for an executor; called
    with the lock, and left without it.
    """
    timer = next_timer(engine, port, now_ns(port))
    if timer >= 0:
        nanoseconds = min(nanoseconds, timer)
    exchange(engine + layout.ENGINE_WAITING, 1)
    release(engine)
    sleep_driving(engine, nanoseconds)
    table = load(port + flow_layout.PORT_QUEUES)
    for index in range(load(table + queue_layout.TABLE_COUNT)):
        if has_event(engine, index + 1):
            device = device_at(table, index)
            take_event(device, device + queue_layout.DEVICE_DRIVEN_WORDS)


def drive(engine: int, mode: int, nanoseconds: int, unused: int) -> int:
    """Advance the links in an executor's thread; return 1 unless another thread has them.

    ``mode``: as of ``progress_engine.drive``, or DRIVE_SLEEP: sleep here for at most
    ``nanoseconds`` if nothing moves; 0 if the executor must sleep elsewhere.
    """
    if mode == DRIVE_HAND_OVER:
        hand_over(engine)
        return 1
    if load(engine + layout.ENGINE_OVERLAP) != 0 and moves_much(engine):
        return 0
    if not begin_round(engine):
        return 0
    port, sleeps = load(engine + layout.ENGINE_PORT), mode == DRIVE_SLEEP
    more = advance_driving(engine, port)
    if sleeps and not take_published(engine) and not more:
        arm(load(port + flow_layout.PORT_QUEUES))
        more = advance_driving(engine, port)
        if not more and not needs_python(engine) and not queues_failed(port):
            sleep_in_drive(engine, port, nanoseconds)
            if not begin_round(engine):
                return 1
            more = advance_driving(engine, port)
    calls_python = needs_python(engine) or queues_failed(port)
    asleep = load_acquire(load(engine + layout.ENGINE_ASLEEP)) != 0
    dozing = load_acquire(engine + layout.ENGINE_DOZING) != 0
    # A thread that sleeps in epoll does not know of timers that this round has set.
    if asleep and not dozing and not more:
        more = next_timer(engine, port, now_ns(port)) >= 0
    release(engine)
    if asleep and (calls_python or (more and not dozing)):
        ring(engine)
    return 0 if sleeps and calls_python else 1


def abort_flow(flow: int, text: int, length: int) -> int:
    """Send the reason for the end on every path."""
    port = load(flow + flow_layout.FLOW_PORT)
    out = load(port + flow_layout.PORT_OUT)
    for index in range(load(flow + flow_layout.FLOW_NPATHS)):
        control = out + flow_layout.OUT_CONTROL
        store8(control, KIND_ABORT)
        store8(control + 1, length)
        memcpy(control + ABORT_BYTES, text, length)
        store(out + flow_layout.OUT_NCONTROL, ABORT_BYTES + length)
        store(out + flow_layout.OUT_NSEGMENTS, 0)
        size = HEADER_BYTES + ABORT_BYTES + length + TAG_BYTES
        finish_packet(path_of(flow, index), size, out)
        build(port, flow)
        flush(port, flow, index)
    post_paths(flow)
    return 0


def has_aegis(unused: int, unused2: int) -> int:
    """Return 1 if this code computes AEGIS-128X2."""
    return aegis_compiled()


EXPORTS: dict[str, Any] = {
    "run": run,
    "drive": drive,
    "close_link": close_link,
    "abort_flow": abort_flow,
    "has_aegis": has_aegis,
    "post_receives": post_receives,
    "drain_queues": drain_queues,
}
for _name, _controller in CONTROLLERS.items():
    EXPORTS[f"{_name}_acked"] = _controller.acked
    EXPORTS[f"{_name}_lost"] = _controller.lost
    EXPORTS[f"{_name}_timeout"] = _controller.timeout
    EXPORTS[f"{_name}_undo"] = _controller.undo
