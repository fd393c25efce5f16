"""Kernel source: both halves of a link together, and how it ends (``wire.proxy``)."""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, store
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.link_receive import (
    consume,
    on_announce,
    on_data,
    post_receive,
)
from miraccl.proxy.kernels.link_send import (
    ABORT,
    ANNOUNCE,
    CLOSE,
    CREDIT,
    CTS,
    DATA,
    alive,
    close_streams,
    contradict,
    drop_stream,
    fail,
    log,
    on_ack,
    on_cts,
    pump,
    queue_control,
    stream_of,
)
from miraccl.wire.stream import (
    MAGIC,
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_NUMBER,
    MAX_SEGMENT_BYTES,
    MAX_TEXT_BYTES,
    MIN_SEGMENT_BYTES,
)


@inline
def finish(link: int) -> None:
    """End the link in order."""
    store(link + layout.LINK_STATE, layout.STATE_FINISHED)
    log(link, layout.LOG_FINISHED, 0, 0, 0, 0, 0)


@inline
def all_closed(link: int) -> bool:
    """Return True if the peer has closed every stream."""
    for index in range(load(link + layout.LINK_NSTREAMS)):
        if load(stream_of(link, index) + layout.STREAM_CLOSED) == 0:
            return False
    return True


@inline
def advance(link: int) -> None:
    """Queue what can be queued after an event, and move on with the end of the link."""
    if not alive(link):
        return
    ack = load(link + layout.LINK_TAIL)
    if load(link + layout.LINK_STATE) == layout.STATE_DRAINING and load(
        link + layout.LINK_RELEASED
    ) == load(link + layout.LINK_NEXT_POST):
        store(link + layout.LINK_STATE, layout.STATE_CLOSING)
        close_streams(link, ack)
    if load(link + layout.LINK_STATE) == layout.STATE_CLOSING:
        # a stream closed while the peer still sends on it is reset, which destroys what the peer
        # has not read: wait for its end
        if load(link + layout.LINK_CLOSING) == 0 and all_closed(link):
            finish(link)
        return
    pump(link, ack)


@inline
def on_consumed(link: int, tail: int) -> None:
    """Process consumption by the executor; half a window of it is worth a frame of its own."""
    consume(link, tail)
    if (
        alive(link)
        and tail - load(link + layout.LINK_LAST_ACK) >= layout.NSLOTS // 2
        and load(link + layout.LINK_CONTROL_COUNT) == 0
    ):
        queue_control(link, CREDIT, 0, 0, 0)


@inline
def on_receive_posted(link: int, message: int, room: int) -> None:
    """Process a posted receive of the executor."""
    if post_receive(link, message, room):
        queue_control(link, CTS, message, 0, room)


@inline
def on_close_requested(link: int) -> None:
    """Send what is posted, then close."""
    if load(link + layout.LINK_STATE) == layout.STATE_OPEN:
        store(link + layout.LINK_STATE, layout.STATE_DRAINING)


@inline
def peer_closes(link: int, index: int, total: int) -> None:
    """Process the last frame of a stream."""
    known = load(link + layout.LINK_PEER_TOTAL)
    if known != -1 and known != total:
        contradict(link, layout.DIFFERENT_TOTALS, known, total, 0)
        return
    store(link + layout.LINK_PEER_TOTAL, total)
    store(stream_of(link, index) + layout.STREAM_CLOSED, 1)
    if not all_closed(link):
        return
    if load(link + layout.LINK_DELIVERED) != total:
        contradict(link, layout.CLOSED_EARLY, total, load(link + layout.LINK_DELIVERED), 0)
    elif load(link + layout.LINK_STATE) == layout.STATE_OPEN:
        fail(link, layout.FAULT_CLOSED, 0, 0, 0, 0)
    elif load(link + layout.LINK_STATE) == layout.STATE_DRAINING:
        finish(link)


@inline
def on_stream_ended(link: int, index: int, errno: int) -> None:
    """Process that a stream is closed or broken; ``errno`` 0 means an end of file."""
    stream = stream_of(link, index)
    if load(stream + layout.STREAM_CLOSED) != 0:
        return
    store(stream + layout.STREAM_CLOSED, 1)
    if load(link + layout.LINK_STATE) == layout.STATE_OPEN:
        fail(link, layout.FAULT_RESET, 0, errno, 0, 0)
    elif load(link + layout.LINK_STATE) == layout.STATE_DRAINING:
        finish(link)
    else:
        drop_stream(link, index)


@inline
def header_error(kind: int, length: int, header: int) -> int:
    """Code of the field that no peer would send, or 0 (``wire.stream.decode_frame``)."""
    message, nbytes = load(header + 8), load(header + 24)
    offset, ack = load(header + 32), load(header + 40)
    if load(header) & 0xFFFF != MAGIC:
        return layout.BAD_MAGIC
    if kind < DATA or kind > ABORT:
        return layout.BAD_TYPE
    if message < 0 or message > MAX_MESSAGE_NUMBER or ack < 0 or ack > MAX_MESSAGE_NUMBER:
        return layout.BAD_HEADER
    if nbytes < 0 or nbytes > MAX_MESSAGE_BYTES or offset < 0:
        return layout.BAD_HEADER
    if kind == DATA:
        end = offset + length
        if length > MAX_SEGMENT_BYTES or offset > MAX_MESSAGE_BYTES or end > nbytes:
            return layout.BAD_HEADER
        if length < MIN_SEGMENT_BYTES and end != nbytes:
            return layout.BAD_HEADER
        if length == 0 and nbytes != 0:
            return layout.BAD_HEADER
        return 0
    limit = MAX_TEXT_BYTES if kind == ABORT else 0
    if length > limit or offset != 0:
        return layout.BAD_HEADER
    uses_message = kind == ANNOUNCE or kind == CTS or kind == CLOSE
    if message != 0 and not uses_message:
        return layout.BAD_HEADER
    if load(header + 16) != 0 and kind != ANNOUNCE:
        return layout.BAD_HEADER
    if nbytes != 0 and kind != ANNOUNCE and kind != CTS:
        return layout.BAD_HEADER
    return 0


@inline
def on_frame(link: int, index: int, header: int) -> None:
    """Process a frame whose header was received; the payload of DATA still follows."""
    first = load(header)
    kind, named, length = first >> 16 & 0xFF, first >> 24 & 0xFF, first >> 32 & 0xFFFFFFFF
    message, signature, nbytes = load(header + 8), load(header + 16), load(header + 24)
    if named != index:
        contradict(link, layout.WRONG_STREAM, named, index, 0)
        return
    if load(stream_of(link, index) + layout.STREAM_CLOSED) != 0:
        contradict(link, layout.AFTER_CLOSE, kind, 0, 0)
        return
    if kind == ABORT:
        fail(link, layout.FAULT_ABORTED, 0, length, 0, 0)
        return
    on_ack(link, load(header + 40))
    if not alive(link):
        return
    if kind == DATA:
        on_data(link, index, message, signature, nbytes, load(header + 32), length)
    elif kind == ANNOUNCE:
        on_announce(link, message, signature, nbytes)
    elif kind == CTS:
        on_cts(link, message, nbytes)
    elif kind == CLOSE:
        peer_closes(link, index, message)
