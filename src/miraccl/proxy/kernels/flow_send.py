"""Kernel source: what a flow sends (``wire.datagram.flow``), decision by decision."""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, store, store8, store32, store_unaligned
from miraccl.proxy.kernels import flow_layout as layout
from miraccl.proxy.kernels import link_layout, ranges
from miraccl.proxy.kernels.flow_path import (
    MTU_PROBE_LAST_NS,
    REMEMBERED,
    expected_finish,
    has_room,
    is_shrunk,
    on_sent,
    path_of,
    path_timer,
    release_time,
    take_number,
    usable,
)
from miraccl.wire.datagram.flow import HEADED_PACKETS
from miraccl.wire.datagram.packets import DATA_BYTES, HEADER_BYTES, PROBE_BYTES, TAG_BYTES

FRAME_BYTES = link_layout.FRAME_BYTES
ACK_BYTES, RANGE_BYTES, GRANT_BYTES = 23, 8, 9
KIND_ACK, KIND_GRANT, KIND_PROBE = 3, 4, 5
SHORT_ACK_RANGES = 4
CAPACITY = layout.FRAME_RANGES


@inline
def fstream_of(flow: int, index: int) -> int:
    """Address of a stream of the flow."""
    return load(flow + layout.FLOW_STREAMS) + index * layout.FSTREAM_BYTES


@inline
def link_stream(flow: int, index: int) -> int:
    """Address of a stream of the link, whose queue has the frames."""
    streams = load(flow + layout.FLOW_LINK) + link_layout.LINK_STREAMS
    return streams + index * link_layout.STREAM_BYTES


@inline
def head_of(flow: int, index: int) -> int:
    """Entry of the frame in flight on a stream, 0 if there is none."""
    stream = link_stream(flow, index)
    if load(stream + link_layout.STREAM_COUNT) == 0:
        return 0
    slot = load(stream + link_layout.STREAM_HEAD) * link_layout.ENTRY_BYTES
    return stream + link_layout.STREAM_QUEUE + slot


@inline
def has_resend(fstream: int) -> bool:
    """Return True if some of the frame in flight was lost."""
    if load(fstream + layout.FSTREAM_RESEND_HEADER) != 0:
        return True
    return load(fstream + layout.FSTREAM_RESEND) != 0


@inline
def has_new(fstream: int, length: int) -> bool:
    """Return True if some of the frame in flight was never sent."""
    if load(fstream + layout.FSTREAM_HEADER_SENT) == 0:
        return True
    return load(fstream + layout.FSTREAM_SENT) < length


@inline
def may_start(flow: int, fstream: int, length: int) -> bool:
    """Return True if the frame has something new that the receiver admits."""
    if not has_new(fstream, length):
        return False
    granted = load(flow + layout.FLOW_GRANTED)
    if granted < 0 or load(fstream + layout.FSTREAM_HEADER_SENT) == 0:
        return True
    return load(flow + layout.FLOW_NEW_BYTES) < granted


@inline
def has_data(flow: int) -> bool:
    """Return True if a stream has bytes to send; the one whose turn it is has most often."""
    n, index = load(flow + layout.FLOW_NSTREAMS), load(flow + layout.FLOW_TURN) - 1
    for _ in range(n):
        index = index + 1 if index + 1 < n else 0
        head = head_of(flow, index)
        if head != 0:
            fstream = fstream_of(flow, index)
            if has_resend(fstream):
                return True
            if may_start(flow, fstream, load(head + link_layout.ENTRY_LENGTH)):
                return True
    return False


@inline
def requeue_packet(flow: int, record: int) -> None:
    """Queue the unacknowledged bytes of a lost or suspect packet again."""
    flags = load(record + layout.SENT_FLAGS)
    if flags & layout.FLAG_GRANT != 0:
        store(flow + layout.FLOW_GRANT_DUE, 1)
    if flags & layout.FLAG_REQUEUED != 0:
        return
    store(record + layout.SENT_FLAGS, flags | layout.FLAG_REQUEUED)
    store(flow + layout.FLOW_MAY_RESEND, 1)
    for i in range(load(record + layout.SENT_NSPANS)):
        span = record + layout.SENT_SPANS + i * layout.SPAN_BYTES
        name, bounds = load(span), load(span + 8)
        index = name & 0xFF
        fstream = fstream_of(flow, index)
        if head_of(flow, index) != 0 and load(fstream + layout.FSTREAM_FRAME) == name >> 16:
            at, stop = bounds & 0xFFFFFFFF, bounds >> 32
            while at < stop:
                low, high = ranges.next_missing(fstream + layout.FSTREAM_ACKED, at, stop)
                ranges.add_loosely(fstream + layout.FSTREAM_RESEND, low, high, CAPACITY)
                at = high
            headed = name >> 8 & 1
            if headed != 0 and load(fstream + layout.FSTREAM_HEADER_ACKED) == 0:
                store(fstream + layout.FSTREAM_RESEND_HEADER, 1)


@inline
def choose_path(flow: int, now: int) -> int:
    """Return the open path with room and the least expected finish time, 0 for none."""
    best, least = 0, 0
    for index in range(load(flow + layout.FLOW_NPATHS)):
        path = path_of(flow, index)
        mtu = load(path + layout.PATH_MTU)
        if usable(path) and has_room(path, mtu) and release_time(path, now) <= now:
            finish = 0
            if load(flow + layout.FLOW_NPATHS) > 1:
                finish = expected_finish(path, mtu)
            if best == 0 or finish < least:
                best, least = path, finish
    return best


@inline
def write_ack(path: int, now: int, target: int, most: int) -> int:
    """Encode the acknowledgement of a path; return its bytes."""
    numbers = path + layout.PATH_NUMBERS
    count = load(numbers)
    shown = min(count, most, layout.MAX_ACK_RANGES)
    highest = ranges.stop_of(numbers, count - 1) - 1
    store8(target, KIND_ACK)
    store8(target + 1, load(path + layout.PATH_INDEX))
    store_unaligned(target + 2, highest)
    delay = max(0, now - load(path + layout.PATH_LARGEST_AT)) // 1000
    store32(target + 10, min(delay, 0xFFFFFFFF))
    store32(target + 14, load(path + layout.PATH_MARKED))
    store32(target + 18, load(path + layout.PATH_DUPLICATES))
    store8(target + 22, shown)
    above = highest + 1
    for i in range(shown):
        start, stop = (
            ranges.start_of(numbers, count - 1 - i),
            ranges.stop_of(numbers, count - 1 - i),
        )
        store32(target + ACK_BYTES + RANGE_BYTES * i, above - stop)
        store32(target + ACK_BYTES + RANGE_BYTES * i + 4, stop - start)
        above = start
    return ACK_BYTES + RANGE_BYTES * shown


@inline
def control_records(flow: int, now: int, on: int, most: int, out: int) -> int:
    """Encode acknowledgements that are due or repeated, and a grant; return the bytes."""
    target, used = out + layout.OUT_CONTROL, 0
    for index in range(load(flow + layout.FLOW_NPATHS)):
        path = path_of(flow, index)
        repeats = load(path + layout.PATH_REPEATS)
        if load(path + layout.PATH_PENDING) != 0 or (path != on and repeats != 0):
            used += write_ack(path, now, target + used, most)
            store(path + layout.PATH_PENDING, 0)
            if path != on:
                store(path + layout.PATH_REPEATS, max(0, repeats - 1))
    if load(flow + layout.FLOW_GRANT_DUE) != 0:
        store8(target + used, KIND_GRANT)
        store_unaligned(target + used + 1, load(flow + layout.FLOW_GRANT_TOTAL))
        used += GRANT_BYTES
    store(out + layout.OUT_NCONTROL, used)
    store(out + layout.OUT_NSEGMENTS, 0)
    return used


@inline
def header_for(fstream: int, path: int, again: int) -> int:
    """Bytes of the frame header that a packet on a path is to carry, 0 for none."""
    if load(fstream + layout.FSTREAM_HEADER_ACKED) != 0:
        return 0
    shift = 4 * load(path + layout.PATH_INDEX)
    if again == 0 and load(fstream + layout.FSTREAM_HEADED) >> shift & 15 >= HEADED_PACKETS:
        return 0
    return FRAME_BYTES


@inline
def count_header(fstream: int, path: int) -> None:
    """Count a packet with the frame header."""
    store(fstream + layout.FSTREAM_HEADER_SENT, 1)
    store(fstream + layout.FSTREAM_RESEND_HEADER, 0)
    headed, shift = load(fstream + layout.FSTREAM_HEADED), 4 * load(path + layout.PATH_INDEX)
    if headed >> shift & 15 < HEADED_PACKETS:
        store(fstream + layout.FSTREAM_HEADED, headed + (1 << shift))


@inline
def add_segment(
    flow: int, path: int, index: int, head: int, room: int, again: int, out: int
) -> int:
    """Append bytes of a stream to the packet; return the room that they take, 0 for none."""
    fstream, length = fstream_of(flow, index), load(head + link_layout.ENTRY_LENGTH)
    if again != 0:
        if not has_resend(fstream):
            return 0
    elif not may_start(flow, fstream, length):
        return 0
    header = header_for(fstream, path, again)
    space = room - DATA_BYTES - header
    if space < 0 or (length != 0 and space < min(64, length)):
        return 0
    start, stop = 0, 0
    resend = fstream + layout.FSTREAM_RESEND
    if again != 0:
        if load(resend) != 0:
            start = ranges.start_of(resend, 0)
            stop = min(ranges.stop_of(resend, 0), start + space)
            ranges.remove(resend, start, stop, CAPACITY)
    else:
        start = load(fstream + layout.FSTREAM_SENT)
        stop = min(length, start + space)
        granted, new_bytes = load(flow + layout.FLOW_GRANTED), load(flow + layout.FLOW_NEW_BYTES)
        if granted >= 0:
            stop = min(stop, start + max(0, granted - new_bytes))
        store(flow + layout.FLOW_NEW_BYTES, new_bytes + stop - start)
        store(fstream + layout.FSTREAM_SENT, stop)
    if header != 0:
        count_header(fstream, path)
    count = load(out + layout.OUT_NSEGMENTS)
    segment = out + layout.OUT_SEGMENTS + count * layout.SEGMENT_BYTES
    store(segment, index)
    store(segment + 8, load(fstream + layout.FSTREAM_FRAME))
    store(segment + 16, start)
    store(segment + 24, stop - start)
    store(segment + 32, header)
    store(out + layout.OUT_NSEGMENTS, count + 1)
    turn = index
    if not has_new(fstream, length):
        turn = (index + 1) % load(flow + layout.FLOW_NSTREAMS)
    store(flow + layout.FLOW_TURN, turn)
    return DATA_BYTES + header + stop - start


@inline
def any_resend(flow: int) -> bool:
    """Return True if a stream has lost bytes to send."""
    for index in range(load(flow + layout.FLOW_NSTREAMS)):
        if head_of(flow, index) != 0 and has_resend(fstream_of(flow, index)):
            return True
    return False


@inline
def fill(flow: int, path: int, room: int, out: int) -> int:
    """Choose data for a packet: lost bytes first, then new ones; return their bytes."""
    n, first, left = load(flow + layout.FLOW_NSTREAMS), load(flow + layout.FLOW_TURN), room
    for again in range(load(flow + layout.FLOW_MAY_RESEND), -1, -1):
        index, visits = first - 1, 0
        # Nothing fits into less than a record: the streams need not be visited.
        while visits < n and left >= DATA_BYTES:
            visits += 1
            index = index + 1 if index + 1 < n else 0
            head = head_of(flow, index)
            going = head != 0
            while going:
                used = 0
                if load(out + layout.OUT_NSEGMENTS) < layout.MAX_SEGMENTS:
                    used = add_segment(flow, path, index, head, left, again, out)
                left -= used
                going = used != 0
        if again != 0 and not any_resend(flow):
            store(flow + layout.FLOW_MAY_RESEND, 0)
    return room - left


@inline
def emit(flow: int, now: int, path: int, out: int, data: int, limited: bool, probe: int) -> int:
    """Finish a packet that must be acknowledged; returns 1."""
    control, flags = load(out + layout.OUT_NCONTROL), 0
    size = HEADER_BYTES + TAG_BYTES + control + data
    if limited:
        flags = layout.FLAG_LIMITED
    if probe != 0:
        flags |= layout.FLAG_PROBE
    if load(flow + layout.FLOW_GRANT_DUE) != 0:
        flags |= layout.FLAG_GRANT
        store(flow + layout.FLOW_GRANT_DUE, 0)
    record = on_sent(path, now, size, flags)
    count = load(out + layout.OUT_NSEGMENTS)
    store(record + layout.SENT_NSPANS, count)
    for i in range(count):
        segment = out + layout.OUT_SEGMENTS + i * layout.SEGMENT_BYTES
        span, headed = record + layout.SENT_SPANS + i * layout.SPAN_BYTES, 0
        if load(segment + 32) != 0:
            headed = 256
        start = load(segment + 16)
        store(span, load(segment) | headed | load(segment + 8) << 16)
        store(span + 8, start | (start + load(segment + 24)) << 32)
    return finish(path, size, out)


@inline
def finish(path: int, size: int, out: int) -> int:
    """Give the packet its number; returns 1."""
    store(out + layout.OUT_PATH, load(path + layout.PATH_INDEX))
    store(out + layout.OUT_SIZE, size)
    store(out + layout.OUT_NUMBER, take_number(path))
    return 1


@inline
def data_packet(flow: int, now: int, path: int, out: int) -> int:
    """Build a packet with data."""
    control = control_records(flow, now, path, SHORT_ACK_RANGES, out)
    data = fill(flow, path, load(path + layout.PATH_MTU) - HEADER_BYTES - TAG_BYTES - control, out)
    limited = not has_data(flow)
    return emit(flow, now, path, out, data, limited, 0)


@inline
def probe_packet(flow: int, now: int, path: int, out: int) -> int:
    """Build a packet that must be acknowledged whatever the window: oldest data, or a probe."""
    store(path + layout.PATH_PROBES, max(0, load(path + layout.PATH_PROBES) - 1))
    living = load(path + layout.PATH_STATE) <= layout.SUSPECT
    for index in range(load(flow + layout.FLOW_NPATHS)):
        other = path_of(flow, index)
        if other != path and usable(other):
            living = False  # it carries the data
    if living and not any_resend(flow):
        position, order = load(path + layout.PATH_OLDEST), load(path + layout.PATH_ORDER)
        while position < order:
            record = sent_record(path, position)
            waits = load(record + layout.SENT_STATE) == layout.IN_FLIGHT
            if waits and load(record + layout.SENT_FLAGS) & layout.FLAG_REQUEUED == 0:
                requeue_packet(flow, record)
                break
            position += 1
    control = control_records(flow, now, path, SHORT_ACK_RANGES, out)
    data = 0
    if living:
        data = fill(
            flow, path, load(path + layout.PATH_MTU) - HEADER_BYTES - TAG_BYTES - control, out
        )
    if load(out + layout.OUT_NSEGMENTS) == 0:
        add_probe(path, control, out)
    return emit(flow, now, path, out, data, True, 1)


@inline
def add_probe(path: int, control: int, out: int) -> None:
    """Append an empty probe to ``control`` bytes of records."""
    target = out + layout.OUT_CONTROL + control
    store8(target, KIND_PROBE)
    store32(target + 1, load(path + layout.PATH_INDEX) << 16)
    store(out + layout.OUT_NCONTROL, control + PROBE_BYTES)


@inline
def grant_packet(flow: int, now: int, path: int, out: int) -> int:
    """Build a packet for a grant alone; the probe in it asks for an acknowledgement."""
    add_probe(path, control_records(flow, now, path, SHORT_ACK_RANGES, out), out)
    return emit(flow, now, path, out, 0, True, 1)


@inline
def sent_record(path: int, position: int) -> int:
    """Address of a remembered packet."""
    from_start = (position & (REMEMBERED - 1)) * layout.SENT_BYTES
    return path + layout.PATH_SENT + from_start


@inline
def mtu_probe(flow: int, now: int, path: int, out: int) -> int:
    """Build a packet of the full size of a path whose packets have shrunk."""
    interval = load(path + layout.PATH_MTU_PROBE_INTERVAL)
    store(path + layout.PATH_MTU_PROBE_AT, now + interval)
    store(path + layout.PATH_MTU_PROBE_INTERVAL, min(2 * interval, MTU_PROBE_LAST_NS))
    target = out + layout.OUT_CONTROL
    padding = load(path + layout.PATH_FULL_MTU) - HEADER_BYTES - TAG_BYTES - PROBE_BYTES
    store8(target, KIND_PROBE)
    store32(target + 1, padding | load(path + layout.PATH_INDEX) << 16)
    for i in range(padding):
        store8(target + PROBE_BYTES + i, 0)
    store(out + layout.OUT_NCONTROL, PROBE_BYTES + padding)
    store(out + layout.OUT_NSEGMENTS, 0)
    due = load(flow + layout.FLOW_GRANT_DUE)  # this packet has no room for a grant
    store(flow + layout.FLOW_GRANT_DUE, 0)
    sent = emit(flow, now, path, out, 0, True, 1)
    store(flow + layout.FLOW_GRANT_DUE, due)
    return sent


@inline
def reply_path(flow: int) -> int:
    """Return the path on which the last packet arrived, unless it is known to fail."""
    path = path_of(flow, load(flow + layout.FLOW_ARRIVED_ON))
    state = load(path + layout.PATH_STATE)
    if state == layout.OPEN or state == layout.PROBING:
        return path
    for index in range(load(flow + layout.FLOW_NPATHS)):
        if usable(path_of(flow, index)):
            return path_of(flow, index)
    return path


@inline
def ack_packet(flow: int, now: int, out: int) -> int:
    """Build a packet of acknowledgements only."""
    path = reply_path(flow)
    room = load(path + layout.PATH_MTU) - HEADER_BYTES - TAG_BYTES
    most = room // (load(flow + layout.FLOW_NPATHS) * RANGE_BYTES) - 4
    control = control_records(flow, now, path, max(1, most), out)
    return finish(path, HEADER_BYTES + TAG_BYTES + control, out)


@inline
def next_packet(flow: int, now: int, out: int) -> int:
    """Build the next packet to send now; return 0 if there is none."""
    npaths, due = load(flow + layout.FLOW_NPATHS), False
    for index in range(npaths):
        path = path_of(flow, index)
        if load(path + layout.PATH_PROBES) != 0:
            return probe_packet(flow, now, path, out)
        if is_shrunk(path) and now >= load(path + layout.PATH_MTU_PROBE_AT):
            return mtu_probe(flow, now, path, out)
        if load(path + layout.PATH_PENDING) != 0 and load(path + layout.PATH_DUE) <= now:
            due = True
    if has_data(flow):
        chosen = choose_path(flow, now)
        if chosen != 0:
            return data_packet(flow, now, chosen, out)
    if load(flow + layout.FLOW_GRANT_DUE) != 0:
        chosen = choose_path(flow, now)
        if chosen != 0:
            return grant_packet(flow, now, chosen, out)
    if due:
        return ack_packet(flow, now, out)
    return 0


@inline
def flow_timer(flow: int, now: int) -> int:
    """Time at which there is something to do without a packet; 0 for none."""
    soonest = 0
    waits = has_data(flow) or load(flow + layout.FLOW_GRANT_DUE) != 0
    for index in range(load(flow + layout.FLOW_NPATHS)):
        path = path_of(flow, index)
        at = path_timer(path)
        if at != 0 and (soonest == 0 or at < soonest):
            soonest = at
        if load(path + layout.PATH_PENDING) != 0:
            at = load(path + layout.PATH_DUE)
            if soonest == 0 or at < soonest:
                soonest = at
        if is_shrunk(path):
            at = load(path + layout.PATH_MTU_PROBE_AT)
            if soonest == 0 or at < soonest:
                soonest = at
        if waits and usable(path) and has_room(path, load(path + layout.PATH_MTU)):
            at = release_time(path, now)
            if soonest == 0 or at < soonest:
                soonest = at
    return 0 if soonest == 0 else max(now, soonest)
