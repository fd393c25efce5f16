"""Kernel source: the send half of a link (``wire.proxy_sender``), decision by decision."""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, memcpy, store, store_release
from miraccl.proxy.kernels import link_layout as layout
from miraccl.wire.proxy_sender import FRAME_COST, MAX_LEFT_BYTES, RAIL_MARGIN, RAIL_SEGMENTS
from miraccl.wire.stream import MAGIC, MAX_MESSAGE_BYTES, MIN_SEGMENT_BYTES, FrameType
from miraccl.wire.verbs.policy import SHARES, piece_bytes, stream_of_piece

DATA, ANNOUNCE, CTS = int(FrameType.DATA), int(FrameType.ANNOUNCE), int(FrameType.CTS)
CREDIT, CLOSE, ABORT = int(FrameType.CREDIT), int(FrameType.CLOSE), int(FrameType.ABORT)


@inline
def log(link: int, kind: int, a: int, b: int, c: int, d: int, e: int) -> None:
    """Append an instruction to the log of a test."""
    entries = load(link + layout.LINK_LOG)
    if entries != 0:
        count = load(entries)
        entry = entries + layout.LOG_FIRST + count * layout.LOG_ENTRY_BYTES
        store(entry, kind)
        store(entry + 8, a)
        store(entry + 16, b)
        store(entry + 24, c)
        store(entry + 32, d)
        store(entry + 40, e)
        store(entries, count + 1)


@inline
def mark_dirty(link: int) -> None:
    """Note that the executor may sleep for something that was published."""
    store(load(link + layout.LINK_ENGINE) + layout.ENGINE_DIRTY, 1)


@inline
def fail(link: int, kind: int, code: int, a: int, b: int, c: int) -> None:
    """End the link; the first fault counts."""
    if load(link + layout.LINK_STATE) > layout.STATE_CLOSING:
        return
    store(link + layout.LINK_STATE, layout.STATE_LOST)
    store(link + layout.LINK_FAULT, kind)
    store(link + layout.LINK_FAULT_CODE, code)
    store(link + layout.LINK_FAULT_A, a)
    store(link + layout.LINK_FAULT_B, b)
    store(link + layout.LINK_FAULT_C, c)
    if kind == layout.FAULT_PROTOCOL or kind == layout.FAULT_INTERNAL:
        log(link, layout.LOG_ABORT, 0, 0, 0, 0, 0)
    log(link, layout.LOG_LOST, kind, code, 0, 0, 0)


@inline
def contradict(link: int, code: int, a: int, b: int, c: int) -> None:
    """End the link because of a frame that cannot be true."""
    fail(link, layout.FAULT_PROTOCOL, code, a, b, c)


@inline
def alive(link: int) -> bool:
    """Return True while streams and memory of the link are in use."""
    return load(link + layout.LINK_STATE) <= layout.STATE_CLOSING


@inline
def stream_of(link: int, index: int) -> int:
    """Address of a stream."""
    return link + layout.LINK_STREAMS + index * layout.STREAM_BYTES


@inline
def out_of(link: int, message: int) -> int:
    """Address of the record of an outgoing message."""
    return link + layout.LINK_OUT + (message & (layout.NSLOTS - 1)) * layout.OUT_BYTES


@inline
def has_record(link: int, message: int) -> bool:
    """Return True if an outgoing message was posted and not released."""
    return load(link + layout.LINK_RELEASED) <= message < load(link + layout.LINK_NEXT_POST)


@inline
def enqueue(
    link: int,
    index: int,
    kind: int,
    message: int,
    signature: int,
    nbytes: int,
    offset: int,
    length: int,
    ack: int,
    payload: int,
    entry_message: int,
) -> None:
    """Append a frame to the queue of a stream."""
    stream = stream_of(link, index)
    slot = (load(stream + layout.STREAM_HEAD) + load(stream + layout.STREAM_COUNT)) & (
        layout.NQUEUE - 1
    )
    entry = stream + layout.STREAM_QUEUE + slot * layout.ENTRY_BYTES
    store(entry + layout.ENTRY_MESSAGE, entry_message)
    store(entry + layout.ENTRY_LENGTH, length)
    store(entry + layout.ENTRY_PAYLOAD, payload)
    header = entry + layout.ENTRY_HEADER  # ``<HBBIQqQQQ`` of wire.stream
    store(header, MAGIC | (kind << 16) | (index << 24) | (length << 32))
    store(header + 8, message)
    store(header + 16, signature)
    store(header + 24, nbytes)
    store(header + 32, offset)
    store(header + 40, ack)
    store(stream + layout.STREAM_COUNT, load(stream + layout.STREAM_COUNT) + 1)
    store(stream + layout.STREAM_QUEUED_BYTES, load(stream + layout.STREAM_QUEUED_BYTES) + length)
    store(link + layout.LINK_LAST_ACK, ack)
    log(link, layout.LOG_SEND, kind, message, offset, length, index)
    entries = load(link + layout.LINK_LOG)
    if entries != 0:
        logged = entries + layout.LOG_FIRST + (load(entries) - 1) * layout.LOG_ENTRY_BYTES
        memcpy(logged + 48, header, layout.FRAME_BYTES)


@inline
def queue_control(link: int, kind: int, message: int, signature: int, nbytes: int) -> None:
    """Queue a frame without payload; it goes before all data."""
    count = load(link + layout.LINK_CONTROL_COUNT)
    slot = (load(link + layout.LINK_CONTROL_HEAD) + count) & (layout.NCONTROL - 1)
    entry = link + layout.LINK_CONTROL + slot * layout.CONTROL_BYTES
    store(entry + layout.CONTROL_KIND, kind)
    store(entry + layout.CONTROL_MESSAGE, message)
    store(entry + layout.CONTROL_SIGNATURE, signature)
    store(entry + layout.CONTROL_NBYTES, nbytes)
    store(link + layout.LINK_CONTROL_COUNT, count + 1)


@inline
def insert_to_send(link: int, message: int) -> None:
    """Insert a message into the ascending list of messages to send."""
    count = load(link + layout.LINK_NTO_SEND)
    at = count
    while at > 0 and load(link + layout.LINK_TO_SEND + 8 * (at - 1)) > message:
        store(link + layout.LINK_TO_SEND + 8 * at, load(link + layout.LINK_TO_SEND + 8 * (at - 1)))
        at -= 1
    store(link + layout.LINK_TO_SEND + 8 * at, message)
    store(link + layout.LINK_NTO_SEND, count + 1)


@inline
def use_credit(link: int) -> None:
    """Start the messages that the peer has slots for; announce those that need a posted receive."""
    limit = min(load(link + layout.LINK_NEXT_POST), load(link + layout.LINK_CREDIT) + layout.NSLOTS)
    while load(link + layout.LINK_SENDABLE) < limit:
        message = load(link + layout.LINK_SENDABLE)
        store(link + layout.LINK_SENDABLE, message + 1)
        record = out_of(link, message)
        nbytes = load(record + layout.OUT_NBYTES)
        room = 0
        if load(record + layout.OUT_GRANT_FOR) == message + 1:
            room = load(record + layout.OUT_GRANT)
            store(record + layout.OUT_GRANT_FOR, 0)
        if nbytes <= load(link + layout.LINK_SEND_SLOT_BYTES) or nbytes <= room:
            store(record + layout.OUT_STATE, layout.OUT_SENDING)
            insert_to_send(link, message)
        else:
            store(record + layout.OUT_STATE, layout.OUT_WAIT_CTS)
            queue_control(link, ANNOUNCE, message, load(record + layout.OUT_SIGNATURE), nbytes)


@inline
def release(link: int) -> None:
    """Publish the tail of the send FIFO once the kernel has all bytes of a message."""
    before = load(link + layout.LINK_RELEASED)
    released = before
    while (
        released < load(link + layout.LINK_NEXT_POST)
        and load(out_of(link, released) + layout.OUT_STATE) == layout.OUT_WRITTEN
    ):
        store(out_of(link, released) + layout.OUT_STATE, 0)
        released += 1
    if released != before:
        store(link + layout.LINK_RELEASED, released)
        log(link, layout.LOG_TAIL, released, 0, 0, 0, 0)
        store_release(load(link + layout.LINK_SEND_TAIL), released)
        mark_dirty(link)


@inline
def on_posted(link: int, message: int, signature: int, nbytes: int, source: int) -> None:
    """Process a descriptor that the executor posted."""
    if (
        message != load(link + layout.LINK_NEXT_POST)
        or message - load(link + layout.LINK_RELEASED) >= layout.NSLOTS
    ):
        expected = load(link + layout.LINK_NEXT_POST)
        fail(link, layout.FAULT_INTERNAL, layout.POSTED_ORDER, message, expected, 0)
        return
    if nbytes < 0 or nbytes > MAX_MESSAGE_BYTES:
        fail(link, layout.FAULT_INTERNAL, layout.POSTED_BYTES, nbytes, 0, 0)
        return
    record = out_of(link, message)
    store(record + layout.OUT_STATE, layout.OUT_WAIT_CREDIT)
    store(record + layout.OUT_SIGNATURE, signature)
    store(record + layout.OUT_NBYTES, nbytes)
    store(record + layout.OUT_QUEUED, 0)
    store(record + layout.OUT_UNWRITTEN, 0)
    store(record + layout.OUT_SOURCE, source)
    store(link + layout.LINK_NEXT_POST, message + 1)
    use_credit(link)


@inline
def on_written(link: int, index: int, frames: int) -> None:
    """Process that the kernel has the oldest ``frames`` frames of a stream."""
    stream = stream_of(link, index)
    if load(stream + layout.STREAM_DROPPED) != 0:
        return
    for _ in range(frames):
        head = load(stream + layout.STREAM_HEAD)
        entry = stream + layout.STREAM_QUEUE + head * layout.ENTRY_BYTES
        message = load(entry + layout.ENTRY_MESSAGE)
        store(stream + layout.STREAM_HEAD, (head + 1) & (layout.NQUEUE - 1))
        store(stream + layout.STREAM_COUNT, load(stream + layout.STREAM_COUNT) - 1)
        store(
            stream + layout.STREAM_QUEUED_BYTES,
            load(stream + layout.STREAM_QUEUED_BYTES) - load(entry + layout.ENTRY_LENGTH),
        )
        store(
            stream + layout.STREAM_BACKLOG,
            load(stream + layout.STREAM_BACKLOG) + load(entry + layout.ENTRY_LENGTH),
        )
        if message < 0:
            if message == layout.CLOSE_ENTRY:
                store(link + layout.LINK_CLOSING, load(link + layout.LINK_CLOSING) - 1)
        else:
            record = out_of(link, message)
            unwritten = load(record + layout.OUT_UNWRITTEN) - 1
            store(record + layout.OUT_UNWRITTEN, unwritten)
            if load(record + layout.OUT_STATE) == layout.OUT_QUEUED_STATE and unwritten == 0:
                store(record + layout.OUT_STATE, layout.OUT_WRITTEN)
    release(link)


@inline
def on_measured(link: int, index: int, backlog: int, rate: int) -> None:
    """Replace the estimate of what the kernel holds of a stream, and of its rate."""
    stream = stream_of(link, index)
    store(stream + layout.STREAM_BACKLOG, backlog)
    store(stream + layout.STREAM_RATE, rate)


@inline
def close_streams(link: int, ack: int) -> None:
    """Queue the last frame of every stream."""
    nstreams = load(link + layout.LINK_NSTREAMS)
    store(link + layout.LINK_CLOSING, nstreams)
    total = load(link + layout.LINK_NEXT_POST)
    for index in range(nstreams):
        enqueue(link, index, CLOSE, total, 0, 0, 0, 0, ack, 0, layout.CLOSE_ENTRY)


@inline
def drop_stream(link: int, index: int) -> None:
    """Forget what is queued on a stream that takes no more bytes."""
    stream = stream_of(link, index)
    head, count = load(stream + layout.STREAM_HEAD), load(stream + layout.STREAM_COUNT)
    for i in range(count):
        slot = (head + i) & (layout.NQUEUE - 1)
        entry = stream + layout.STREAM_QUEUE + slot * layout.ENTRY_BYTES
        if load(entry + layout.ENTRY_MESSAGE) == layout.CLOSE_ENTRY:
            store(link + layout.LINK_CLOSING, load(link + layout.LINK_CLOSING) - 1)
    store(stream + layout.STREAM_DROPPED, 1)
    store(stream + layout.STREAM_COUNT, 0)
    store(stream + layout.STREAM_QUEUED_BYTES, 0)
    store(stream + layout.STREAM_WRITTEN, 0)


@inline
def on_ack(link: int, ack: int) -> None:
    """Process how many messages the peer's executor has consumed."""
    credit = load(link + layout.LINK_CREDIT)
    if ack <= credit:
        return
    next_post = load(link + layout.LINK_NEXT_POST)
    message = credit
    while message < ack:
        if not has_record(link, message):
            if message >= next_post:
                contradict(link, layout.CONSUMED_UNSENT, ack, next_post, 0)
                return
        else:
            record = out_of(link, message)
            state = load(record + layout.OUT_STATE)
            if state == layout.OUT_WAIT_CTS:
                store(record + layout.OUT_STATE, layout.OUT_WRITTEN)
            elif state != layout.OUT_QUEUED_STATE and state != layout.OUT_WRITTEN:
                contradict(link, layout.CONSUMED_EARLY, message, 0, 0)
                return
        message += 1
    store(link + layout.LINK_CREDIT, ack)
    release(link)
    use_credit(link)


@inline
def on_cts(link: int, message: int, room: int) -> None:
    """Process a posted receive of the peer: clear to send."""
    credit = load(link + layout.LINK_CREDIT)
    if message >= credit + layout.NSLOTS:
        contradict(link, layout.CTS_BEYOND, message, credit, 0)
        return
    if room <= load(link + layout.LINK_SEND_SLOT_BYTES):
        contradict(link, layout.CTS_SMALL, message, room, 0)
        return
    record = out_of(link, message)
    if not has_record(link, message):
        if message < load(link + layout.LINK_NEXT_POST):
            return
        store(record + layout.OUT_GRANT_FOR, message + 1)
        store(record + layout.OUT_GRANT, room)
        return
    state = load(record + layout.OUT_STATE)
    if state == layout.OUT_WAIT_CREDIT:
        store(record + layout.OUT_GRANT_FOR, message + 1)
        store(record + layout.OUT_GRANT, room)
    elif state == layout.OUT_WAIT_CTS and load(record + layout.OUT_NBYTES) <= room:
        store(record + layout.OUT_STATE, layout.OUT_SENDING)
        insert_to_send(link, message)


@inline
def queued_load(stream: int, cost: int) -> int:
    """Queued payload bytes of a stream, plus ``cost`` for each frame."""
    return load(stream + layout.STREAM_QUEUED_BYTES) + cost * load(stream + layout.STREAM_COUNT)


@inline
def least_loaded(link: int, first: int, stop: int, spread: bool) -> int:
    """Index of the stream of [first, stop) with the fewest queued payload bytes."""
    cost = FRAME_COST if spread else 0
    best, least = first, queued_load(stream_of(link, first), cost)
    for index in range(first + 1, stop):
        queued = queued_load(stream_of(link, index), cost)
        if queued < least:
            best, least = index, queued
    return best


@inline
def has_capacity(link: int, index: int) -> bool:
    """Return True if a stream may queue another segment."""
    stream = stream_of(link, index)
    return load(stream + layout.STREAM_QUEUED_BYTES) < load(
        link + layout.LINK_QUEUE_BYTES
    ) and load(stream + layout.STREAM_COUNT) < load(link + layout.LINK_QUEUE_FRAMES)


@inline
def stream_load(link: int, index: int) -> int:
    """Payload bytes of a stream that are queued, or held by the kernel."""
    stream = stream_of(link, index)
    return load(stream + layout.STREAM_QUEUED_BYTES) + load(stream + layout.STREAM_BACKLOG)


@inline
def rate_of(link: int, index: int) -> int:
    """Bytes that a stream delivers per millisecond."""
    return load(stream_of(link, index) + layout.STREAM_RATE)


@inline
def rates_known(link: int) -> bool:
    """Return True if the rates of all streams are known."""
    slowest = rate_of(link, 0)
    for index in range(1, load(link + layout.LINK_DATA_STREAMS)):
        slowest = min(slowest, rate_of(link, index))
    return slowest != 0


@inline
def ends_before(link: int, length: int, a: int, b: int) -> bool:
    """Return True if stream ``a`` is expected to deliver ``length`` more bytes before ``b``."""
    end_a, end_b = stream_load(link, a) + length, stream_load(link, b) + length
    return end_a * rate_of(link, b) < end_b * rate_of(link, a)


@inline
def earliest(link: int, length: int) -> int:
    """Index of the stream with capacity that is expected to deliver ``length`` more bytes first,
    -1 to wait (``wire.proxy_sender.SendHalf``).
    """
    first, best, loads, rates = -1, -1, 0, 0
    for index in range(load(link + layout.LINK_DATA_STREAMS)):
        loads += stream_load(link, index)
        rates += rate_of(link, index)
        if first < 0 or ends_before(link, length, index, first):
            first = index
        if has_capacity(link, index) and (best < 0 or ends_before(link, length, index, best)):
            best = index
    if best < 0 or best == first:
        return best
    left = 0
    for i in range(load(link + layout.LINK_NTO_SEND)):
        record = out_of(link, load(link + layout.LINK_TO_SEND + 8 * i))
        left += load(record + layout.OUT_NBYTES) - load(record + layout.OUT_QUEUED)
    together = (min(left, MAX_LEFT_BYTES) + loads) * rate_of(link, best)
    if RAIL_MARGIN * (stream_load(link, best) + length) * rates <= together:
        return best
    return -1


@inline
def control_stream(link: int) -> int:
    """Index of the stream for a control frame: over several networks the one that is expected to
    deliver it first, as it may wait behind data that the kernel holds.
    """
    spread, first = load(link + layout.LINK_SPREAD) != 0, load(link + layout.LINK_CONTROL_STREAM)
    nstreams = load(link + layout.LINK_NSTREAMS)
    if first > 0 or load(link + layout.LINK_RAILS) <= 1 or not rates_known(link):
        return least_loaded(link, first, nstreams, spread or first > 0)
    for index in range(1, nstreams):
        if ends_before(link, layout.FRAME_BYTES, index, first):
            first = index
    return first


@inline
def send_control(link: int, ack: int) -> bool:
    """Move the oldest control frame to a stream; False if there is no room."""
    index = control_stream(link)
    stream = stream_of(link, index)
    if load(stream + layout.STREAM_COUNT) >= 2 * load(link + layout.LINK_QUEUE_FRAMES):
        return False
    head = load(link + layout.LINK_CONTROL_HEAD)
    entry = link + layout.LINK_CONTROL + head * layout.CONTROL_BYTES
    store(link + layout.LINK_CONTROL_HEAD, (head + 1) & (layout.NCONTROL - 1))
    store(link + layout.LINK_CONTROL_COUNT, load(link + layout.LINK_CONTROL_COUNT) - 1)
    enqueue(
        link,
        index,
        load(entry + layout.CONTROL_KIND),
        load(entry + layout.CONTROL_MESSAGE),
        load(entry + layout.CONTROL_SIGNATURE),
        load(entry + layout.CONTROL_NBYTES),
        0,
        0,
        ack,
        0,
        layout.CONTROL_ENTRY,
    )
    return True


@inline
def segment_bytes(link: int, nbytes: int) -> int:
    """Share of one stream in a message, in whole pages, between the smallest and largest
    segment; smaller shares over several networks.
    """
    shares = load(link + layout.LINK_DATA_STREAMS)
    if load(link + layout.LINK_RAILS) > 1:
        shares = RAIL_SEGMENTS
    share = (nbytes + shares - 1) // shares
    share = (share + 4095) // 4096 * 4096
    return min(load(link + layout.LINK_SEGMENT_BYTES), max(MIN_SEGMENT_BYTES, share))


@inline
def send_segment(link: int, ack: int) -> bool:
    """Move the next segment of the lowest message to a stream; False if there is no room."""
    message = load(link + layout.LINK_TO_SEND)
    record = out_of(link, message)
    nbytes, queued = load(record + layout.OUT_NBYTES), load(record + layout.OUT_QUEUED)
    left = nbytes - queued
    small = nbytes <= MIN_SEGMENT_BYTES
    index = 0
    spread, nstreams = load(link + layout.LINK_SPREAD) != 0, load(link + layout.LINK_DATA_STREAMS)
    if (spread or not small) and nstreams > 1:
        index = least_loaded(link, 0, nstreams, spread)
    length = left if small else min(left, segment_bytes(link, nbytes))
    policy = load(link + layout.LINK_POLICY)
    if not small and policy != SHARES:
        largest = load(link + layout.LINK_SEGMENT_BYTES)
        piece = piece_bytes(policy, nbytes, nstreams, MIN_SEGMENT_BYTES, largest)
        chosen = stream_of_piece(policy, message, queued, piece, nstreams)
        index = chosen if chosen >= 0 else least_loaded(link, 0, nstreams, spread)
        length = min(left, piece)
    elif load(link + layout.LINK_RAILS) > 1 and rates_known(link):
        index = earliest(link, length)
    if index < 0 or not has_capacity(link, index):
        return False
    store(record + layout.OUT_QUEUED, queued + length)
    store(record + layout.OUT_UNWRITTEN, load(record + layout.OUT_UNWRITTEN) + 1)
    if queued + length == nbytes:
        store(record + layout.OUT_STATE, layout.OUT_QUEUED_STATE)
        count = load(link + layout.LINK_NTO_SEND) - 1
        store(link + layout.LINK_NTO_SEND, count)
        for i in range(count):
            store(
                link + layout.LINK_TO_SEND + 8 * i, load(link + layout.LINK_TO_SEND + 8 * (i + 1))
            )
    enqueue(
        link,
        index,
        DATA,
        message,
        load(record + layout.OUT_SIGNATURE),
        nbytes,
        queued,
        length,
        ack,
        load(record + layout.OUT_SOURCE) + queued,
        message,
    )
    return True


@inline
def pump(link: int, ack: int) -> None:
    """Fill the streams that have room."""
    more = True
    while more:
        if load(link + layout.LINK_CONTROL_COUNT) != 0:
            more = send_control(link, ack)
        elif load(link + layout.LINK_NTO_SEND) != 0:
            more = send_segment(link, ack)
        else:
            more = False
