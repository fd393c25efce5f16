"""Kernel source: descriptors in memory and bytes on sockets, for the links of the progress engine.

Payload goes between the kernel and its final place directly; headers and small payloads pass
through a staging buffer, so that many small frames cost one system call (``proxy.stream`` in
Python).
"""

from __future__ import annotations

import platform

from miraccl.native.intrinsics import (
    clock_gettime,
    errno_location,
    inline,
    load,
    load32,
    load_acquire,
    memcpy,
    store,
    syscall,
)
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.link import (
    advance,
    header_error,
    on_consumed,
    on_frame,
    on_receive_posted,
    on_stream_ended,
)
from miraccl.proxy.kernels.link_receive import in_of, on_placed
from miraccl.proxy.kernels.link_send import (
    ABORT,
    alive,
    contradict,
    drop_stream,
    fail,
    on_measured,
    on_posted,
    on_written,
    stream_of,
)
from miraccl.transport import fifo

# arch/*/entry/syscalls
SYS_SENDMSG, SYS_RECVMSG, SYS_SETSOCKOPT, SYS_GETSOCKOPT, SYS_NANOSLEEP, SYS_IOCTL = (
    (211, 212, 208, 209, 101, 29) if platform.machine() == "aarch64" else (46, 47, 54, 55, 35, 16)
)
#: Bytes of a socket that the peer has not acknowledged (linux/sockios.h).
SIOCOUTQ = 0x5411
#: ``tcpi_bytes_acked`` and ``tcpi_busy_time`` of struct tcp_info (linux/tcp.h): the time in us in
#: which the kernel had something to send.
IPPROTO_TCP, TCP_INFO, ACKED_OFFSET, BUSY_OFFSET = 6, 11, 120, 168
#: Time between two measurements of the streams of a link over several networks.
MEASURE_NS = 1_000_000
#: Busy time of a stream over which its rate is measured. The kernel's own rate is that of the last
#: round trip: after a pause, of a burst that a token bucket lets through. A stream of 25 Mbit/s was
#: taken for one of 3 Gbit/s, and the others waited for it for 150 ms.
RATE_WINDOW_US = 10_000
MSG_DONTWAIT, MSG_NOSIGNAL = 0x40, 0x4000
SOL_SOCKET, SO_RCVLOWAT = 1, 18
EINTR, EAGAIN, ENOMEM, ENOBUFS = 4, 11, 12, 105
#: Bytes per call: measured for ``proxy.stream``.
RECEIVE_BYTES = 1 << 20
SEND_BYTES = 1 << 19
#: Pause after ENOBUFS or ENOMEM: epoll keeps reporting such a socket as ready.
NO_MEMORY_PAUSE_NS = 10_000_000
#: System calls per stream, direction and round, so that other directions and peers are served.
CALLS_PER_ROUND = 4
MODE_SLOT, MODE_INLINE = int(fifo.Mode.SLOT), int(fifo.Mode.INLINE)
MODE_ADDRESS, INLINE_BYTES = int(fifo.Mode.ADDRESS), fifo.INLINE_BYTES
PAGE_BYTES = fifo.PAGE_BYTES
#: Payload that an executor with a single core posts at once, although others are on their way: a
#: Soft-RoCE queue pair that sent 7 MiB by one call ran into its timeout and repeated packets.
DEFER_BYTES = 1 << 19


# ---- memory


@inline
def source_of(link: int, message: int, line: int) -> int:
    """Address of a posted payload, 0 if there cannot be one (1 for an empty payload at address
    0).
    """
    nbytes, mode, address = load(line + 16), load(line + 24), load(line + 32)
    slot_bytes = load(link + layout.LINK_RECV_SLOT_BYTES)
    if nbytes < 0:
        return 0
    if mode == MODE_SLOT and nbytes <= slot_bytes:
        return load(link + layout.LINK_SEND_SLOTS) + (message & (layout.NSLOTS - 1)) * slot_bytes
    if mode == MODE_INLINE and nbytes <= INLINE_BYTES:
        return line + 32
    if mode == MODE_ADDRESS and nbytes == 0:
        return max(address, 1)
    if mode == MODE_ADDRESS and address >= PAGE_BYTES:
        return address
    return 0


@inline
def scan_descriptors(link: int) -> bool:
    """Process the messages that the executor has posted; return True if there were any."""
    found = False
    going = True
    while going and alive(link):
        message = load(link + layout.LINK_NEXT_POST)
        line = (
            load(link + layout.LINK_SEND_DESCRIPTORS)
            + (message & (layout.NSLOTS - 1)) * layout.LINE_BYTES
        )
        going = load_acquire(line) == message + 1
        if going:
            found = True
            source = source_of(link, message, line)
            if source == 0:
                fail(
                    link,
                    layout.FAULT_INTERNAL,
                    layout.BAD_DESCRIPTOR,
                    load(line + 16),
                    load(line + 24),
                    load(line + 32),
                )
            else:
                on_posted(link, message, load(line + 8), load(line + 16), source)
                advance(link)
    return found


@inline
def scan_cts(link: int) -> bool:
    """Process the receives that the executor has posted; return True if there were any."""
    found = False
    message = load(link + layout.LINK_DELIVERED)
    last = load(link + layout.LINK_TAIL) + layout.NSLOTS
    while message < last and alive(link):
        line = (
            load(link + layout.LINK_RECV_CTS) + (message & (layout.NSLOTS - 1)) * layout.LINE_BYTES
        )
        record = in_of(link, message)
        if (
            load_acquire(line) == message + 1
            and load(record + layout.IN_ADDRESS_FOR) != message + 1
        ):
            found = True
            address, nbytes = load(line + 8), load(line + 16)
            if nbytes < 0 or (nbytes != 0 and address < PAGE_BYTES):
                fail(link, layout.FAULT_INTERNAL, layout.BAD_CTS, nbytes, address, 0)
            else:
                store(record + layout.IN_ADDRESS_FOR, message + 1)
                store(record + layout.IN_ADDRESS, address)
                on_receive_posted(link, message, nbytes)
                advance(link)
        message += 1
    return found


@inline
def scan(link: int) -> bool:
    """Process what the executor has published; return True if there was anything."""
    if not alive(link):
        return False
    found = False
    tail = load_acquire(load(link + layout.LINK_RECV_TAIL))
    if tail != load(link + layout.LINK_TAIL):
        found = True
        on_consumed(link, tail)
        advance(link)
    if scan_descriptors(link):
        found = True
    if scan_cts(link):
        found = True
    return found


@inline
def may_defer_link(link: int, busy: bool) -> bool:
    """Return True if what the executor has published may wait until it sleeps.

    Messages may while earlier ones are under way (``busy``), up to ``DEFER_BYTES`` of them;
    consumption and CTS may until half of the slots are free again.
    """
    lines, number = load(link + layout.LINK_SEND_DESCRIPTORS), load(link + layout.LINK_NEXT_POST)
    count, nbytes, going = 0, 0, True
    while going:
        line = lines + ((number + count) & (layout.NSLOTS - 1)) * layout.LINE_BYTES
        going = load_acquire(line) == number + count + 1
        if going:
            nbytes += load(line + 16)
            count += 1
    consumed = load_acquire(load(link + layout.LINK_RECV_TAIL)) - load(link + layout.LINK_TAIL)
    if consumed >= layout.NSLOTS // 2 or nbytes >= DEFER_BYTES:
        return False
    return busy or count == 0


# ---- sockets


@inline
def last_errno() -> int:
    """Return errno of this thread."""
    return load32(errno_location())


@inline
def is_transient(engine: int, errno: int) -> bool:
    """Return True if the call may be repeated; pauses first if the kernel has no memory."""
    if errno == ENOMEM or errno == ENOBUFS:
        store(engine + layout.ENGINE_TIME, 0)
        store(engine + layout.ENGINE_TIME + 8, NO_MEMORY_PAUSE_NS)
        syscall(SYS_NANOSLEEP, engine + layout.ENGINE_TIME, 0, 0, 0, 0, 0)
        return True
    return errno == EINTR


@inline
def add_vector(engine: int, count: int, address: int, nbytes: int) -> int:
    """Append an iovec; return how many there are."""
    vector = engine + layout.ENGINE_VECTORS + 16 * count
    store(vector, address)
    store(vector + 8, nbytes)
    return count + 1


@inline
def message_header(engine: int, count: int) -> int:
    """Return the struct msghdr over the first ``count`` iovecs."""
    message = engine + layout.ENGINE_MESSAGE
    store(message + 16, engine + layout.ENGINE_VECTORS)
    store(message + 24, count)
    return message


@inline
def write_stream(engine: int, link: int, index: int) -> None:
    """Give the kernel queued frames in one call."""
    stream = stream_of(link, index)
    head, queued = load(stream + layout.STREAM_HEAD), load(stream + layout.STREAM_COUNT)
    skip, room, count, total = load(stream + layout.STREAM_WRITTEN), SEND_BYTES, 0, 0
    i = 0
    while i < queued and room > 0 and count + 2 <= layout.MAX_VECTOR:
        slot = (head + i) & (layout.NQUEUE - 1)
        entry = stream + layout.STREAM_QUEUE + slot * layout.ENTRY_BYTES
        length = load(entry + layout.ENTRY_LENGTH)
        if skip < layout.FRAME_BYTES:
            part = layout.FRAME_BYTES - skip
            count = add_vector(engine, count, entry + layout.ENTRY_HEADER + skip, part)
            total += part
            room -= part
            skip = layout.FRAME_BYTES
        part = length - (skip - layout.FRAME_BYTES)
        if part > 0:
            if part > room + room // 2:  # what would be left is never a small rest
                part = max(room, 1)
            address = load(entry + layout.ENTRY_PAYLOAD) + (skip - layout.FRAME_BYTES)
            count = add_vector(engine, count, address, part)
            total += part
            room -= part
        skip = 0
        i += 1
    sent = syscall(
        SYS_SENDMSG,
        load(stream + layout.STREAM_FD),
        message_header(engine, count),
        MSG_DONTWAIT | MSG_NOSIGNAL,
        0,
        0,
        0,
    )
    if sent < 0:
        write_failed(engine, link, index, last_errno())
        return
    if sent < total:
        store(stream + layout.STREAM_WRITABLE, 0)
    count_frames(link, index, sent)


@inline
def count_frames(link: int, index: int, sent: int) -> None:
    """Account for bytes that the kernel has taken."""
    stream = stream_of(link, index)
    head, queued = load(stream + layout.STREAM_HEAD), load(stream + layout.STREAM_COUNT)
    written, frames, going = load(stream + layout.STREAM_WRITTEN) + sent, 0, True
    while going and frames < queued:
        slot = (head + frames) & (layout.NQUEUE - 1)
        entry = stream + layout.STREAM_QUEUE + slot * layout.ENTRY_BYTES
        size = layout.FRAME_BYTES + load(entry + layout.ENTRY_LENGTH)
        going = size <= written
        if going:
            written -= size
            frames += 1
    store(stream + layout.STREAM_WRITTEN, written)
    if frames > 0:
        on_written(link, index, frames)
        advance(link)


@inline
def write_failed(engine: int, link: int, index: int, errno: int) -> None:
    """Process an error of a send: a dead peer may still have sent something, so that is read
    first.
    """
    stream = stream_of(link, index)
    if errno == EAGAIN:
        store(stream + layout.STREAM_WRITABLE, 0)
        return
    if is_transient(engine, errno):
        return
    store(link + layout.LINK_WRITE_ERRNO, errno)
    drop_stream(link, index)
    for other in range(load(link + layout.LINK_NSTREAMS)):
        target = stream_of(link, other)
        store(target + layout.STREAM_READABLE, 1)
        while alive(link) and load(target + layout.STREAM_READABLE) != 0:
            read_stream(engine, link, other)
    if alive(link):
        on_stream_ended(link, index, errno)
        advance(link)


@inline
def set_low_water(engine: int, stream: int, nbytes: int) -> None:
    """Have the kernel report the stream as readable only with ``nbytes``, or at its end."""
    if load(stream + layout.STREAM_LOW_WATER) != nbytes:
        store(stream + layout.STREAM_LOW_WATER, nbytes)
        word = engine + layout.ENGINE_WORD
        store(word, nbytes)
        syscall(
            SYS_SETSOCKOPT, load(stream + layout.STREAM_FD), SOL_SOCKET, SO_RCVLOWAT, word, 4, 0
        )


@inline
def read_stream(engine: int, link: int, index: int) -> None:
    """Receive in one call, first the current payload, then headers, and process what came."""
    stream = stream_of(link, index)
    staging = load(stream + layout.STREAM_STAGING)
    remaining, count, room = load(stream + layout.STREAM_REMAINING), 0, 0
    if remaining > RECEIVE_BYTES:
        room = RECEIVE_BYTES
        count = add_vector(engine, count, load(stream + layout.STREAM_TARGET), room)
    else:
        if remaining > 0:
            count = add_vector(engine, count, load(stream + layout.STREAM_TARGET), remaining)
        start, end = load(stream + layout.STREAM_START), load(stream + layout.STREAM_END)
        if (
            start > 0
        ):  # at most one incomplete frame is moved; memcpy of overlapping bytes is not used
            for i in range(end - start):
                move_byte(staging + i, staging + start + i)
            end -= start
            store(stream + layout.STREAM_START, 0)
            store(stream + layout.STREAM_END, end)
        count = add_vector(engine, count, staging + end, layout.STAGING_BYTES - end)
        room = remaining + layout.STAGING_BYTES - end
    got = syscall(
        SYS_RECVMSG,
        load(stream + layout.STREAM_FD),
        message_header(engine, count),
        MSG_DONTWAIT,
        0,
        0,
        0,
    )
    if got < 0:
        errno = last_errno()
        if errno == EAGAIN:
            store(stream + layout.STREAM_READABLE, 0)
        elif not is_transient(engine, errno):
            store(stream + layout.STREAM_READABLE, 0)
            on_stream_ended(link, index, errno)
            advance(link)
        return
    # after a hang-up a short read says nothing: the end is behind it, and no edge will follow
    if got < room and load(stream + layout.STREAM_ENDING) == 0:
        store(stream + layout.STREAM_READABLE, 0)
    if got == 0:
        store(stream + layout.STREAM_READABLE, 0)
        on_stream_ended(link, index, load(link + layout.LINK_WRITE_ERRNO))
        advance(link)
        return
    placed = min(got, remaining)
    if placed > 0:
        remaining -= placed
        store(stream + layout.STREAM_REMAINING, remaining)
        store(stream + layout.STREAM_TARGET, load(stream + layout.STREAM_TARGET) + placed)
        least = min(remaining, load(link + layout.LINK_LOW_WATER))
        set_low_water(engine, stream, least if remaining >= layout.LOW_WATER_MIN else 1)
    store(stream + layout.STREAM_END, load(stream + layout.STREAM_END) + got - placed)
    parse_frames(link, index)


@inline
def move_byte(target: int, source: int) -> None:
    """Copy one byte."""
    memcpy(target, source, 1)


@inline
def parse_frames(link: int, index: int) -> None:
    """Process complete frames and staged payload."""
    stream = stream_of(link, index)
    going = True
    while going and alive(link):
        start, end = load(stream + layout.STREAM_START), load(stream + layout.STREAM_END)
        if load(stream + layout.STREAM_PLACING) != 0:
            going = place_staged(link, index, start, end)
        elif end - start >= layout.FRAME_BYTES:
            going = parse_frame(link, index, start, end)
        else:
            going = False


@inline
def place_staged(link: int, index: int, start: int, end: int) -> bool:
    """Copy staged payload to its place; return True if the payload is complete."""
    stream = stream_of(link, index)
    remaining = load(stream + layout.STREAM_REMAINING)
    count = min(remaining, end - start)
    if count > 0:
        target = load(stream + layout.STREAM_TARGET)
        memcpy(target, load(stream + layout.STREAM_STAGING) + start, count)
        store(stream + layout.STREAM_TARGET, target + count)
        remaining -= count
        store(stream + layout.STREAM_REMAINING, remaining)
        start += count
    if start == end:
        start = end = 0
    store(stream + layout.STREAM_START, start)
    store(stream + layout.STREAM_END, end)
    if remaining > 0:
        return False
    store(stream + layout.STREAM_PLACING, 0)
    on_placed(link, index)
    advance(link)
    return True


@inline
def parse_frame(link: int, index: int, start: int, end: int) -> bool:
    """Process one header, with the text of an ABORT; return False if that is not complete."""
    stream = stream_of(link, index)
    header = load(stream + layout.STREAM_STAGING) + start
    kind, length = load(header) >> 16 & 0xFF, load(header) >> 32 & 0xFFFFFFFF
    code = header_error(kind, length, header)
    if code != 0:
        memcpy(link + layout.LINK_TEXT, header, layout.FRAME_BYTES)
        contradict(link, code, 0, 0, 0)
        return False
    taken = layout.FRAME_BYTES
    if kind == ABORT:
        taken += length
        if end - start < taken:
            return False
        memcpy(link + layout.LINK_TEXT, header + layout.FRAME_BYTES, length)
        store(link + layout.LINK_TEXT_BYTES, length)
    start += taken
    store(stream + layout.STREAM_START, start)
    on_frame(link, index, header)
    advance(link)
    return True


@inline
def measured_rate(stream: int, acked: int, busy_us: int) -> int:
    """Return the rate of a stream, the mean of the last one and of the last window's."""
    rate, passed = load(stream + layout.STREAM_RATE), busy_us - load(stream + layout.STREAM_BUSY_US)
    if passed < RATE_WINDOW_US:
        return rate
    last = max(1, (acked - load(stream + layout.STREAM_ACKED)) * 1000 // passed)
    store(stream + layout.STREAM_ACKED, acked)
    store(stream + layout.STREAM_BUSY_US, busy_us)
    return last if rate == 0 else (rate + last + 1) // 2


@inline
def measure_streams(engine: int, link: int) -> None:
    """Read from the kernel, now and then, what each stream holds and how fast it is."""
    clock = engine + layout.ENGINE_TIME
    clock_gettime(1, clock)
    now = load(clock) * 1000000000 + load(clock + 8)
    if now - load(link + layout.LINK_MEASURED) < MEASURE_NS:
        return
    store(link + layout.LINK_MEASURED, now)
    info, word = engine + layout.ENGINE_TCP_INFO, engine + layout.ENGINE_WORD
    for index in range(load(link + layout.LINK_NSTREAMS)):
        stream = stream_of(link, index)
        fd = load(stream + layout.STREAM_FD)
        store(word, 0)
        syscall(SYS_IOCTL, fd, SIOCOUTQ, word, 0, 0, 0)
        backlog = max(0, load32(word) - load(stream + layout.STREAM_WRITTEN))
        store(info + BUSY_OFFSET, 0)
        store(word, layout.TCP_INFO_BYTES)
        syscall(SYS_GETSOCKOPT, fd, IPPROTO_TCP, TCP_INFO, info, word, 0)
        rate = measured_rate(stream, load(info + ACKED_OFFSET), load(info + BUSY_OFFSET))
        on_measured(link, index, backlog, rate)
    advance(link)


@inline
def advance_streams(engine: int, link: int) -> bool:
    """Do a bounded number of calls per stream; return True if some stream is ready for more."""
    busy = False
    nstreams = load(link + layout.LINK_NSTREAMS)
    if load(link + layout.LINK_RAILS) > 1 and load(link + layout.LINK_NTO_SEND) != 0:
        measure_streams(engine, link)
    for index in range(nstreams):
        stream, calls = stream_of(link, index), 0
        while (
            alive(link) and load(stream + layout.STREAM_READABLE) != 0 and calls < CALLS_PER_ROUND
        ):
            read_stream(engine, link, index)
            calls += 1
    for index in range(nstreams):
        stream, calls = stream_of(link, index), 0
        while (
            alive(link)
            and load(stream + layout.STREAM_WRITABLE) != 0
            and load(stream + layout.STREAM_COUNT) != 0
            and calls < CALLS_PER_ROUND
        ):
            write_stream(engine, link, index)
            calls += 1
    # After all of them: a write of one stream may queue a segment on another one, which is writable
    # already, so that no event will follow.
    for index in range(nstreams):
        stream = stream_of(link, index)
        if load(stream + layout.STREAM_READABLE) != 0:
            busy = True
        if load(stream + layout.STREAM_WRITABLE) != 0 and load(stream + layout.STREAM_COUNT) != 0:
            busy = True
    return busy and alive(link)
