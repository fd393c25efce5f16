"""Kernel source: what a flow receives, and its timers (``wire.datagram.flow``)."""

from __future__ import annotations

from miraccl.native.intrinsics import (
    call6,
    inline,
    load,
    load8,
    load_unaligned,
    memcpy,
    store,
)
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import link_layout, ranges
from miraccl.proxy.kernels.flow_path import (
    BLACK_HOLE_AFTER,
    DEAD_AFTER,
    MIN_LOSS_DELAY_NS,
    PROBE_FIRST_NS,
    PROBE_LAST_NS,
    REMEMBERED,
    add_number,
    after_acknowledgement,
    count_lost,
    count_marks,
    first_position,
    is_new,
    leave_flight,
    lost_group,
    on_duplicate,
    on_spurious,
    path_of,
    path_timer,
    report_lost,
    sent_at,
    shrink,
    timeout_at,
    usable,
)
from miraccl.proxy.kernels.flow_send import (
    ACK_BYTES,
    CAPACITY,
    FRAME_BYTES,
    GRANT_BYTES,
    KIND_ACK,
    KIND_GRANT,
    KIND_PROBE,
    RANGE_BYTES,
    fstream_of,
    head_of,
    link_stream,
    requeue_packet,
)
from miraccl.proxy.kernels.link import advance, header_error, on_frame
from miraccl.proxy.kernels.link_receive import on_placed
from miraccl.proxy.kernels.link_send import alive, contradict, fail, on_written
from miraccl.wire.datagram.packets import (
    ABORT_BYTES,
    DATA_BYTES,
    FLAG_KEY_PHASE,
    HEADER_BYTES,
    MAX_NUMBER,
    MAX_PATHS,
    MAX_STREAMS,
    PROBE_BYTES,
    VERSION,
)
from miraccl.wire.stream import MAX_SEGMENT_BYTES, MAX_TEXT_BYTES

KIND_DATA, KIND_HEADED, KIND_ABORT = 1, 2, 6


# ---- events


@inline
def log(flow: int, kind: int, a: int, b: int, c: int) -> bool:
    """Append an event to the log of a test; return False if there is no log."""
    entries = load(flow + layout.FLOW_LOG)
    if entries == 0:
        return False
    count = load(entries)
    entry = entries + layout.LOG_FIRST + count * layout.LOG_ENTRY_BYTES
    store(entry, kind)
    store(entry + 8, a)
    store(entry + 16, b)
    store(entry + 24, c)
    store(entries, count + 1)
    return True


@inline
def reject(flow: int, code: int, a: int, b: int) -> None:
    """End the link: the peer sends what no peer would send."""
    if not log(flow, layout.LOG_ERROR, code, a, b):
        contradict(load(flow + layout.FLOW_LINK), code, a, b, 0)


@inline
def note_change(flow: int, path: int, before: int) -> None:
    """Report a change of a path's state."""
    after = load(path + layout.PATH_STATE)
    if after == before:
        return
    if after == layout.OPEN:
        store(flow + layout.FLOW_REACHED, 1)
    if after == layout.DEAD or (after == layout.OPEN and before >= layout.DEAD):
        store(flow + layout.FLOW_CHANGED, 1)
    log(flow, layout.LOG_CHANGED, load(path + layout.PATH_INDEX), before, after)


# ---- acknowledgements


@inline
def frame_acknowledged(flow: int, index: int) -> None:
    """Return the memory of the frame in flight; the next one of the stream follows."""
    fstream = fstream_of(flow, index)
    store(fstream + layout.FSTREAM_FRAME, load(fstream + layout.FSTREAM_FRAME) + 1)
    store(fstream + layout.FSTREAM_SENT, 0)
    store(fstream + layout.FSTREAM_HEADER_SENT, 0)
    store(fstream + layout.FSTREAM_HEADED, 0)
    store(fstream + layout.FSTREAM_HEADER_ACKED, 0)
    store(fstream + layout.FSTREAM_RESEND_HEADER, 0)
    store(fstream + layout.FSTREAM_ACKED, 0)
    store(fstream + layout.FSTREAM_RESEND, 0)
    link = load(flow + layout.FLOW_LINK)
    logged = log(flow, layout.LOG_ACKED, index, 0, 0)
    on_written(link, index, 1)
    if not logged:
        advance(link)


@inline
def on_span_acked(flow: int, name: int, bounds: int) -> None:
    """Process that the peer has bytes of a frame."""
    index = name & 0xFF
    fstream, head = fstream_of(flow, index), head_of(flow, index)
    if head == 0 or load(fstream + layout.FSTREAM_FRAME) != name >> 16:
        return
    start, stop = bounds & 0xFFFFFFFF, bounds >> 32
    acked, resend = fstream + layout.FSTREAM_ACKED, fstream + layout.FSTREAM_RESEND
    if ranges.add(acked, start, stop, CAPACITY) < 0:
        ranges.add_loosely(resend, start, stop, CAPACITY)  # cannot be noted: sent again
        store(flow + layout.FLOW_MAY_RESEND, 1)
    else:
        ranges.remove(resend, start, stop, CAPACITY)
    if name >> 8 & 1 != 0:
        store(fstream + layout.FSTREAM_HEADER_ACKED, 1)
        store(fstream + layout.FSTREAM_RESEND_HEADER, 0)
    if load(fstream + layout.FSTREAM_HEADER_ACKED) != 0 and ranges.covers(
        acked, load(head + link_layout.ENTRY_LENGTH)
    ):
        frame_acknowledged(flow, index)


@inline
def packet_acked(flow: int, record: int) -> int:
    """Process that the peer has a packet; return its bytes."""
    for i in range(load(record + layout.SENT_NSPANS)):
        span = record + layout.SENT_SPANS + i * layout.SPAN_BYTES
        on_span_acked(flow, load(span), load(span + 8))
    return load(record + layout.SENT_SIZE)


@inline
def lost_acked_in(flow: int, path: int, start: int, stop: int) -> tuple[int, int]:
    """Process the packets of one range that were declared lost and were only late."""
    nbytes, newest, oldest = 0, 0, max(0, load(path + layout.PATH_ORDER) - REMEMBERED)
    position, end = first_position(path, start, oldest), first_position(path, stop, oldest)
    while position < end:
        if load(lost_group(path, position)) == 0:
            position = (position // layout.LOST_GROUP + 1) * layout.LOST_GROUP
        else:
            record = sent_at(path, position)
            if load(record + layout.SENT_STATE) == layout.LOST:
                count_lost(path, position, -1)
                store(record + layout.SENT_STATE, layout.FREE)
                on_spurious(path)
                nbytes += packet_acked(flow, record)
                newest = record
            position += 1
    return nbytes, newest


@inline
def acked_in(flow: int, path: int, start: int, stop: int) -> tuple[int, int]:
    """Process the packets of one range; return their bytes, and the newest one's record or 0.

    Acknowledgements repeat what was acknowledged before, so packets that are neither in flight nor
    lost are not visited.
    """
    nbytes, newest = 0, 0
    if load(path + layout.PATH_NLOST) != 0:
        nbytes, newest = lost_acked_in(flow, path, start, stop)
    oldest = load(path + layout.PATH_OLDEST)
    if load(path + layout.PATH_NSENT) == 0:
        return nbytes, newest
    if load(sent_at(path, oldest) + layout.SENT_NUMBER) >= stop:
        return nbytes, newest
    late, going = newest, True
    position, order = first_position(path, start, oldest), load(path + layout.PATH_ORDER)
    while going and position < order:
        record = sent_at(path, position)
        going = load(record + layout.SENT_NUMBER) < stop
        if going and load(record + layout.SENT_STATE) == layout.IN_FLIGHT:
            leave_flight(path, record, layout.FREE)
            nbytes += packet_acked(flow, record)
            newest = record
        position += 1
    if late != 0 and load(late + layout.SENT_NUMBER) > load(newest + layout.SENT_NUMBER):
        newest = late
    return nbytes, newest


@inline
def on_ack(flow: int, now: int, record: int) -> None:
    """Process an acknowledgement record, which is well-formed."""
    index, highest = load8(record + 1), load_unaligned(record + 2)
    if index >= load(flow + layout.FLOW_NPATHS):
        reject(flow, link_layout.BAD_PACKET, index, 0)
        return
    path = path_of(flow, index)
    if highest >= load(path + layout.PATH_NEXT_NUMBER):
        reject(flow, link_layout.BAD_PACKET, index, highest)
        return
    before = load(path + layout.PATH_STATE)
    delay = (load_unaligned(record + 10) & 0xFFFFFFFF) * 1000
    marked = count_marks(path, load_unaligned(record + 14) & 0xFFFFFFFF)
    above, nbytes, newest = highest + 1, 0, 0
    for i in range(load8(record + 22)):
        pair = load_unaligned(record + ACK_BYTES + RANGE_BYTES * i)
        stop = above - (pair & 0xFFFFFFFF)
        above = stop - (pair >> 32 & 0xFFFFFFFF)
        found, last = acked_in(flow, path, above, stop)
        nbytes += found
        if newest == 0:
            newest = last  # the highest range comes first
    if newest == 0:
        return
    after_acknowledgement(path, now, delay, marked, nbytes, newest)
    detect_losses(flow, path, now)
    note_change(flow, path, before)


# ---- losses and timers


@inline
def detect_losses(flow: int, path: int, now: int) -> None:
    """Declare packets lost; set the timer for those that may be lost later."""
    rtt = max(load(path + layout.PATH_SMOOTHED), load(path + layout.PATH_LATEST))
    delay = max(MIN_LOSS_DELAY_NS, rtt * 9 // 8)
    largest, threshold = load(path + layout.PATH_LARGEST_ACKED), load(path + layout.PATH_THRESHOLD)
    position, order = load(path + layout.PATH_OLDEST), load(path + layout.PATH_ORDER)
    store(path + layout.PATH_LOSS_TIME, 0)
    count, nbytes, newest_time, going = 0, 0, 0, True
    while going and position < order:
        record = sent_at(path, position)
        if load(record + layout.SENT_STATE) == layout.IN_FLIGHT:
            number, time = load(record + layout.SENT_NUMBER), load(record + layout.SENT_TIME)
            going = number < largest
            if going:
                if now - time >= delay or largest - number >= threshold:
                    leave_flight(path, record, layout.LOST)
                    count_lost(path, position, 1)
                    requeue_packet(flow, record)
                    count += 1
                    nbytes += load(record + layout.SENT_SIZE)
                    newest_time = time
                elif load(path + layout.PATH_LOSS_TIME) == 0:
                    store(path + layout.PATH_LOSS_TIME, time + delay)
        position += 1
    if count != 0:
        report_lost(path, now, count, nbytes, newest_time)


@inline
def lose_all(flow: int, path: int, now: int) -> bool:
    """Declare everything in flight lost; return True if there was anything."""
    position, order = load(path + layout.PATH_OLDEST), load(path + layout.PATH_ORDER)
    count, nbytes, newest_time = 0, 0, 0
    while load(path + layout.PATH_NSENT) != 0 and position < order:
        record = sent_at(path, position)
        if load(record + layout.SENT_STATE) == layout.IN_FLIGHT:
            leave_flight(path, record, layout.LOST)
            count_lost(path, position, 1)
            requeue_packet(flow, record)
            count += 1
            nbytes += load(record + layout.SENT_SIZE)
            newest_time = load(record + layout.SENT_TIME)
        position += 1
    if count == 0:
        return False
    report_lost(path, now, count, nbytes, newest_time)
    return True


@inline
def probe_timer(flow: int, path: int, now: int) -> None:
    """Send the next probe of a dead path."""
    if now < load(path + layout.PATH_PROBE_AT):
        return
    lose_all(flow, path, now)
    store(path + layout.PATH_PROBES, 1)
    interval = load(path + layout.PATH_PROBE_INTERVAL)
    store(path + layout.PATH_PROBE_AT, now + interval)
    store(path + layout.PATH_PROBE_INTERVAL, min(2 * interval, PROBE_LAST_NS))
    store(path + layout.PATH_STATE, layout.PROBING)


@inline
def path_on_timer(flow: int, path: int, now: int) -> None:
    """Handle expired timers of a path."""
    if load(path + layout.PATH_STATE) >= layout.DEAD:
        probe_timer(flow, path, now)
        return
    loss = load(path + layout.PATH_LOSS_TIME)
    if loss != 0 and now >= loss:
        detect_losses(flow, path, now)
    due = timeout_at(path)
    if due == 0 or now < due:
        return
    if load(path + layout.PATH_STATE) == layout.OPEN:
        store(path + layout.PATH_SILENCE, now - load(path + layout.PATH_LAST_ELICITING))
        store(path + layout.PATH_LATE, now - due)
    timeouts = load(path + layout.PATH_TIMEOUTS) + 1
    store(path + layout.PATH_TIMEOUTS, timeouts)
    store(path + layout.PATH_PROBES, 2)
    store(path + layout.PATH_LAST_ELICITING, now)
    store(path + layout.PATH_STATE, layout.SUSPECT)
    if timeouts == BLACK_HOLE_AFTER:
        shrink(path, now)
    if timeouts >= DEAD_AFTER:
        lose_all(flow, path, now)
        control, mtu = path + layout.PATH_CONTROL, load(path + layout.PATH_MTU)
        call6(load(path + layout.PATH_TIMEOUT_FN), control, now, mtu, 0, 0, 0)
        store(path + layout.PATH_STATE, layout.DEAD)
        store(path + layout.PATH_PROBES, 0)
        store(path + layout.PATH_LOSS_TIME, 0)
        store(path + layout.PATH_PROBE_INTERVAL, PROBE_FIRST_NS)
        store(path + layout.PATH_PROBE_AT, now + PROBE_FIRST_NS)


@inline
def flow_on_timer(flow: int, now: int) -> None:
    """Handle expired timers of all paths."""
    npaths = load(flow + layout.FLOW_NPATHS)
    for index in range(npaths):
        path = path_of(flow, index)
        due, before = path_timer(path), load(path + layout.PATH_STATE)
        if due != 0 and now >= due:
            path_on_timer(flow, path, now)
            others = False
            for k in range(npaths):
                if usable(path_of(flow, k)):
                    others = True
            if others and load(path + layout.PATH_STATE) == layout.SUSPECT:
                requeue_all(flow, path)
            note_change(flow, path, before)


@inline
def requeue_all(flow: int, path: int) -> None:
    """Make the bytes in flight on a suspect path sendable on others."""
    position, order = load(path + layout.PATH_OLDEST), load(path + layout.PATH_ORDER)
    while position < order:
        record = sent_at(path, position)
        if load(record + layout.SENT_STATE) == layout.IN_FLIGHT:
            requeue_packet(flow, record)
        position += 1


# ---- packets


@inline
def record_bytes(at: int, left: int) -> int:
    """Bytes of a well-formed record with ``left`` bytes in the packet, 0 for any other."""
    kind = load8(at)
    if kind == KIND_DATA or kind == KIND_HEADED:
        if left < DATA_BYTES:
            return 0
        length = load_unaligned(at + 10) & 0xFFFF
        size = DATA_BYTES + length
        if kind == KIND_HEADED:
            size += FRAME_BYTES
        elif length == 0:
            return 0
        offset = load_unaligned(at + 6) & 0xFFFFFFFF
        if load8(at + 1) >= MAX_STREAMS or offset + length > MAX_SEGMENT_BYTES or size > left:
            return 0
        return size
    if kind == KIND_ACK:
        return ack_bytes(at, left)
    if kind == KIND_GRANT:
        if left < GRANT_BYTES:
            return 0
        total = load_unaligned(at + 1)
        return GRANT_BYTES if 0 <= total < MAX_NUMBER else 0
    if kind == KIND_PROBE and left >= PROBE_BYTES:
        padding = load_unaligned(at + 1) & 0xFFFF
        if PROBE_BYTES + padding > left:
            return 0
        for i in range(padding):
            if load8(at + PROBE_BYTES + i) != 0:
                return 0
        return PROBE_BYTES + padding
    if kind == KIND_ABORT and left >= ABORT_BYTES:
        length = load8(at + 1)
        if length > MAX_TEXT_BYTES or ABORT_BYTES + length > left:
            return 0
        return ABORT_BYTES + length
    return 0


@inline
def ack_bytes(at: int, left: int) -> int:
    """Bytes of a well-formed acknowledgement, 0 for any other."""
    if left < ACK_BYTES:
        return 0
    count, highest = load8(at + 22), load_unaligned(at + 2)
    if load8(at + 1) >= MAX_PATHS or highest < 0 or highest >= MAX_NUMBER:
        return 0
    if count < 1 or count > layout.MAX_ACK_RANGES or ACK_BYTES + RANGE_BYTES * count > left:
        return 0
    above = highest + 1
    for i in range(count):
        pair = load_unaligned(at + ACK_BYTES + RANGE_BYTES * i)
        gap, length = pair & 0xFFFFFFFF, pair >> 32 & 0xFFFFFFFF
        if (gap == 0) != (i == 0) or length == 0 or above - gap - length < 0:
            return 0
        above = above - gap - length
    return ACK_BYTES + RANGE_BYTES * count


@inline
def well_formed(packet: int, length: int) -> bool:
    """Return True for a packet that ``wire.datagram.packets.encode`` could have produced."""
    head, number = load_unaligned(packet), load_unaligned(packet + 8)
    if head & 0xFF != VERSION << 4 or head >> 8 & 0xFF >= MAX_PATHS:
        return False
    if number < 0 or number >= MAX_NUMBER or (head >> 16 & 0xFFFF) & ~FLAG_KEY_PHASE != 0:
        return False
    at, stop = packet + HEADER_BYTES, packet + length
    if at >= stop:
        return False
    while at < stop:
        size = record_bytes(at, stop - at)
        if size == 0:
            return False
        at += size
    return True


@inline
def placeable(flow: int, packet: int, length: int) -> int:
    """Return 1 if the data of a packet can be placed, 0 if a header is missing, -1 for an error."""
    at, stop, headed = packet + HEADER_BYTES, packet + length, 0
    while at < stop:
        kind = load8(at)
        if kind == KIND_DATA or kind == KIND_HEADED:
            index = load8(at + 1)
            if index >= load(flow + layout.FLOW_NSTREAMS):
                return -1
            fstream = fstream_of(flow, index)
            frame = load_unaligned(at + 2) & 0xFFFFFFFF
            ahead = (frame - load(fstream + layout.FSTREAM_NUMBER)) & 0xFFFFFFFF
            if ahead == 0 and kind == KIND_HEADED:
                headed |= 1 << index
            elif ahead == 0:
                if load(fstream + layout.FSTREAM_LENGTH) < 0 and headed >> index & 1 == 0:
                    return 0
            elif ahead < 1 << 31:
                return -1
        at += record_bytes(at, stop - at)
    return 1


@inline
def start_frame(flow: int, index: int, header: int) -> bool:
    """Process the header of a frame, which decides where its payload lands; False at the end."""
    fstream, link = fstream_of(flow, index), load(flow + layout.FLOW_LINK)
    first = load_unaligned(header)
    length = first >> 32 & 0xFFFFFFFF
    store(fstream + layout.FSTREAM_LENGTH, length)
    store(flow + layout.FLOW_WANTED, load(flow + layout.FLOW_WANTED) + length)
    store(fstream + layout.FSTREAM_RECEIVED, 0)
    store(fstream + layout.FSTREAM_TARGET, 0)
    if log(flow, layout.LOG_STARTED, index, 0, 0):
        landing = load(flow + layout.FLOW_LANDING)
        if landing != 0:
            store(fstream + layout.FSTREAM_TARGET, landing + index * layout.LANDING_BYTES)
        return True
    copy = load(flow + layout.FLOW_PORT) + layout.PORT_FRAME
    memcpy(copy, header, FRAME_BYTES)
    code = header_error(first >> 16 & 0xFF, length, copy)
    if code != 0:
        memcpy(link + link_layout.LINK_TEXT, copy, FRAME_BYTES)
        contradict(link, code, 0, 0, 0)
        return False
    on_frame(link, index, copy)
    advance(link)
    stream = link_stream(flow, index)
    if load(stream + link_layout.STREAM_PLACING) != 0:
        store(fstream + layout.FSTREAM_TARGET, load(stream + link_layout.STREAM_TARGET))
    return alive(link)


@inline
def complete_frame(flow: int, index: int) -> bool:
    """Process that all bytes of a frame have arrived; False if the link has ended."""
    fstream, link = fstream_of(flow, index), load(flow + layout.FLOW_LINK)
    store(fstream + layout.FSTREAM_NUMBER, load(fstream + layout.FSTREAM_NUMBER) + 1)
    store(fstream + layout.FSTREAM_LENGTH, -1)
    store(fstream + layout.FSTREAM_RECEIVED, 0)
    if log(flow, layout.LOG_COMPLETED, index, 0, 0):
        return True
    stream = link_stream(flow, index)
    if load(stream + link_layout.STREAM_PLACING) != 0:
        store(stream + link_layout.STREAM_PLACING, 0)
        store(stream + link_layout.STREAM_REMAINING, 0)
        on_placed(link, index)
        advance(link)
    return alive(link)


@inline
def on_data(flow: int, record: int) -> int:
    """Place a data record: 1 if its frame is complete, 0 if not, -1 if the link has ended."""
    index, frame = load8(record + 1), load_unaligned(record + 2) & 0xFFFFFFFF
    fstream = fstream_of(flow, index)
    if frame != load(fstream + layout.FSTREAM_NUMBER) & 0xFFFFFFFF:
        return 0  # an old frame, already complete
    offset, length = load_unaligned(record + 6) & 0xFFFFFFFF, load_unaligned(record + 10) & 0xFFFF
    payload = record + DATA_BYTES
    if load8(record) == KIND_HEADED:
        payload += FRAME_BYTES
    begins = load(fstream + layout.FSTREAM_LENGTH) < 0
    if begins and not start_frame(flow, index, record + DATA_BYTES):
        return -1
    total = load(fstream + layout.FSTREAM_LENGTH)
    if offset + length > total:
        reject(flow, link_layout.BAD_PACKET, offset + length, total)
        return -1
    received, target = fstream + layout.FSTREAM_RECEIVED, load(fstream + layout.FSTREAM_TARGET)
    at, stop = offset, offset + length
    while at < stop:
        low, high = ranges.next_missing(received, at, stop)
        if low < high:
            log(flow, layout.LOG_PAYLOAD, index, low, high)
            store(flow + layout.FLOW_RECEIVED, load(flow + layout.FLOW_RECEIVED) + high - low)
            if target != 0:
                memcpy(target + low, payload + low - offset, high - low)
        at = high
    ranges.add(received, offset, stop, CAPACITY)
    if not ranges.covers(received, total):
        return 0
    return 1 if complete_frame(flow, index) else -1


@inline
def full_ranges(flow: int, packet: int, length: int) -> bool:
    """Return True if bytes of a packet cannot be noted: it counts as lost."""
    at, stop = packet + HEADER_BYTES, packet + length
    while at < stop:
        kind = load8(at)
        if kind == KIND_DATA or kind == KIND_HEADED:
            received = fstream_of(flow, load8(at + 1)) + layout.FSTREAM_RECEIVED
            if load(received) >= CAPACITY:
                offset = load_unaligned(at + 6) & 0xFFFFFFFF
                if offset > ranges.stop_of(received, 0):
                    return True
        at += record_bytes(at, stop - at)
    return False


@inline
def on_abort(flow: int, record: int) -> None:
    """Process that the peer gives up."""
    length = load8(record + 1)
    if log(flow, layout.LOG_ABORTED, length, 0, 0):
        return
    link = load(flow + layout.FLOW_LINK)
    for index in range(load(link + link_layout.LINK_NSTREAMS)):
        if load(link_stream(flow, index) + link_layout.STREAM_CLOSED) == 0:
            memcpy(link + link_layout.LINK_TEXT, record + ABORT_BYTES, length)
            store(flow + layout.FLOW_ABORTED, 1)
            fail(link, link_layout.FAULT_ABORTED, 0, length, 0, 0)
            return


@inline
def receive(flow: int, now: int, packet: int, length: int, marked: int) -> None:
    """Process an authenticated packet of ``length`` bytes without its tag."""
    head, number = load_unaligned(packet), load_unaligned(packet + 8)
    index = head >> 8 & 0xFF
    if not well_formed(packet, length):
        reject(flow, link_layout.BAD_PACKET, 0, length)
        return
    if index >= load(flow + layout.FLOW_NPATHS):
        reject(flow, link_layout.BAD_PACKET, index, 0)
        return
    path = path_of(flow, index)
    store(flow + layout.FLOW_ARRIVED_ON, index)
    if not is_new(path, number):
        on_duplicate(path, now)
        return
    fits = placeable(flow, packet, length)
    if fits < 0:
        reject(flow, link_layout.BAD_PACKET, index, number)
        return
    if fits == 0 or full_ranges(flow, packet, length):
        store(flow + layout.FLOW_REJECTED, load(flow + layout.FLOW_REJECTED) + 1)
        return
    at, stop, eliciting, urgent = packet + HEADER_BYTES, packet + length, False, 0
    link, logged = load(flow + layout.FLOW_LINK), load(flow + layout.FLOW_LOG) != 0
    while at < stop and (logged or alive(link)):
        kind = load8(at)
        if kind == KIND_ACK:
            on_ack(flow, now, at)
        elif kind == KIND_GRANT:
            granted = load(flow + layout.FLOW_GRANTED)
            if granted >= 0:
                store(flow + layout.FLOW_GRANTED, max(granted, load_unaligned(at + 1)))
        elif kind == KIND_ABORT:
            on_abort(flow, at)
        at += record_bytes(at, stop - at)
    at = packet + HEADER_BYTES
    while at < stop and (logged or alive(link)):
        kind = load8(at)
        size = record_bytes(at, stop - at)
        if kind == KIND_DATA or kind == KIND_HEADED:
            eliciting = True
            if on_data(flow, at) > 0:
                urgent = 1
        elif kind == KIND_PROBE:
            eliciting, urgent = True, 1
        at += size
    add_number(path, now, number, eliciting, marked, urgent)
