"""Kernel source: completions of a connection, and the rows that they announce."""

from __future__ import annotations

from miraccl.native.intrinsics import call4, inline, load, load32, memcpy, store
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.kernels.link import advance, header_error, on_frame, on_stream_ended
from miraccl.proxy.kernels.link_receive import in_of, on_placed
from miraccl.proxy.kernels.link_send import (
    ABORT,
    CTS,
    DATA,
    alive,
    contradict,
    on_written,
    stream_of,
)
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.proxy.verbs.kernels.posting import (
    as_int,
    deregister_finished,
    device_of,
    mark_failed,
    out_extra,
    post_receives,
    qp_of,
    route_of,
    swap32,
)
from miraccl.wire.verbs import rows
from miraccl.wire.verbs.rows import (
    expand_done,
    expand_sequence,
    immediate_count,
    immediate_stream,
)

#: Value of STREAM_PAUSED while the queue pair of a stream is replaced.
PAUSED = 1
_STATUS, _VENDOR, _IMMEDIATE = 8, 16, 24  # in ibv_wc


# ---- sends


@inline
def complete_sends(conn: int, index: int, number: int) -> None:
    """Account for all work requests up to ``number`` of a queue pair."""
    link, qp = load(conn + layout.CONN_LINK), qp_of(conn, index)
    if number > load(qp + layout.QP_DONE):
        store(qp + layout.QP_DONE, number)
    for stream_index in range(load(conn + layout.CONN_NSTREAMS)):
        route = route_of(conn, stream_index)
        if load(route + layout.STREAM_QP) == index and load(route + layout.STREAM_PAUSED) != PAUSED:
            stream, frames, going = stream_of(link, stream_index), 0, True
            posted = load(route + layout.STREAM_POSTED_ENTRIES)
            while going and frames < posted:
                slot = (load(stream + link_layout.STREAM_HEAD) + frames) & (layout.NQUEUE - 1)
                going = load(route + layout.STREAM_ENTRY_WR + 8 * slot) <= number
                if going:
                    frames += 1
            finish_entries(conn, stream_index, frames)


@inline
def finish_entries(conn: int, index: int, frames: int) -> None:
    """Process that the peer has the oldest ``frames`` frames of a stream."""
    if frames == 0:
        return
    link, route = load(conn + layout.CONN_LINK), route_of(conn, index)
    store(route + layout.STREAM_POSTED_ENTRIES, load(route + layout.STREAM_POSTED_ENTRIES) - frames)
    if alive(link):
        on_written(link, index, frames)
        advance(link)


# ---- rows


@inline
def keep_row(conn: int, row: int) -> None:
    """Keep a row for Python; the peer sends few of these, and repeats them if they are lost."""
    count = load(conn + layout.CONN_INBOX_COUNT)
    if count < layout.NINBOX:
        memcpy(conn + layout.CONN_INBOX + count * rows.ROW_BYTES, row, rows.ROW_BYTES)
        store(conn + layout.CONN_INBOX_COUNT, count + 1)
    store(conn + layout.CONN_ATTENTION, 1)


@inline
def accept_placement(conn: int, index: int, row: int, placement: int) -> bool:
    """Check the place that the sender has chosen, and make the link choose the same one."""
    link = load(conn + layout.CONN_LINK)
    message, nbytes = load(row + 8), load(row + 24)
    record = in_of(link, message)
    posted = load(record + link_layout.IN_POSTED_FOR) == message + 1
    if nbytes <= 32:
        if placement == rows.IN_ROW:
            return True
    elif placement == rows.IN_POSTED:
        if posted and nbytes <= load(record + link_layout.IN_POSTED_ROOM):
            return True
    elif placement == rows.IN_SLOT and nbytes <= load(link + link_layout.LINK_RECV_SLOT_BYTES):
        # The sender had not seen the CTS, so the message is in its slot.
        if posted:
            store(record + link_layout.IN_POSTED_FOR, 0)
        return True
    contradict(link, layout.BAD_PLACEMENT, message, nbytes, placement)
    return False


@inline
def process_frame(conn: int, index: int, row: int) -> None:
    """Process a frame; its payload, if any, is in place."""
    link = load(conn + layout.CONN_LINK)
    stream = stream_of(link, index)
    kind, length = load(row) >> 16 & 0xFF, load(row) >> 32 & 0xFFFFFFFF
    message = load(row + 8)
    code = header_error(kind, length, row)
    if code != 0:
        memcpy(link + link_layout.LINK_TEXT, row, link_layout.FRAME_BYTES)
        contradict(link, code, 0, 0, 0)
        return
    if kind == DATA:
        placement = load(row + rows.ROW_FLAGS) >> 8 & 0xFF
        if not accept_placement(conn, index, row, placement):
            return
    elif kind == ABORT:
        memcpy(link + link_layout.LINK_TEXT, load(conn + layout.CONN_TEXT_IN), length)
        store(link + link_layout.LINK_TEXT_BYTES, length)
    elif kind == CTS and message >= 0:
        extra = out_extra(conn, message)
        store(extra + layout.OUT_FOR, message + 1)
        store(extra + layout.OUT_ADDRESS, load(row + rows.ROW_ADDRESS))
        store(extra + layout.OUT_ROOM, load(row + 24))
        memcpy(extra + layout.OUT_KEYS, row + rows.ROW_KEYS, 4 * rows.MAX_DEVICES)
    on_frame(link, index, row)
    if alive(link) and load(stream + link_layout.STREAM_PLACING) != 0:
        if load(row + rows.ROW_FLAGS) >> 8 & 0xFF == rows.IN_ROW:
            memcpy(load(stream + link_layout.STREAM_TARGET), row + rows.ROW_PAYLOAD, length)
        store(stream + link_layout.STREAM_PLACING, 0)
        store(stream + link_layout.STREAM_REMAINING, 0)
        on_placed(link, index)
    advance(link)


@inline
def process_row(conn: int, index: int, row: int) -> None:
    """Process one row, a copy that the peer cannot change."""
    link, route = load(conn + layout.CONN_LINK), route_of(conn, index)
    flags = load(row + rows.ROW_FLAGS)
    kind = flags & 0xFF
    done = expand_done(flags >> 32 & 0xFFFFFFFF, load(route + layout.STREAM_DONE_ROWS))
    if done > load(route + layout.STREAM_POSTED_ROWS) or flags >> 16 & 0xFF != index:
        contradict(link, layout.BAD_ROW, kind, index, load(row + rows.ROW_SEQUENCE))
        return
    store(route + layout.STREAM_DONE_ROWS, done)
    if kind == rows.KIND_FRAME:
        process_frame(conn, index, row)
    elif kind == rows.KIND_HELLO:
        store(conn + layout.CONN_HELLOS, load(conn + layout.CONN_HELLOS) | 1 << index)
        store(conn + layout.CONN_ATTENTION, 1)
    elif kind != rows.KIND_CREDIT:
        keep_row(conn, row)


@inline
def process_rows(conn: int, index: int) -> None:
    """Process the rows of a stream that have arrived, in the order of their numbers."""
    engine, link = load(conn + layout.CONN_ENGINE), load(conn + layout.CONN_LINK)
    route, row = route_of(conn, index), engine + layout.ENGINE_ROW
    going = True
    while going and alive(link):
        number = load(route + layout.STREAM_PROCESSED)
        bit = 1 << (number & (rows.NROWS - 1))
        going = load(route + layout.STREAM_ARRIVED) & bit != 0
        if going:
            place = index * rows.NROWS + (number & (rows.NROWS - 1))
            memcpy(row, load(conn + layout.CONN_ROWS_IN) + place * rows.ROW_BYTES, rows.ROW_BYTES)
            store(route + layout.STREAM_ARRIVED, load(route + layout.STREAM_ARRIVED) & ~bit)
            store(route + layout.STREAM_PROCESSED, number + 1)
            if load(row + rows.ROW_SEQUENCE) != number + 1:
                contradict(link, layout.BAD_ROW, 0, index, load(row + rows.ROW_SEQUENCE))
            else:
                process_row(conn, index, row)


@inline
def on_immediate(conn: int, immediate: int) -> None:
    """Mark the rows that an immediate names."""
    link, index = load(conn + layout.CONN_LINK), immediate_stream(immediate)
    if index >= load(conn + layout.CONN_NSTREAMS):
        contradict(link, layout.BAD_ROW, 0, index, immediate)
        return
    route = route_of(conn, index)
    processed = load(route + layout.STREAM_PROCESSED)
    sequence = expand_sequence(immediate & rows.SEQUENCE_MASK, rows.SEQUENCE_MASK, processed)
    first, bits = sequence - immediate_count(immediate), 0
    for number in range(first, sequence):
        bits = bits | 1 << (number & (rows.NROWS - 1))
    arrived = load(route + layout.STREAM_ARRIVED)
    if first < processed or sequence > processed + rows.NROWS or arrived & bits != 0:
        contradict(link, layout.BAD_ROW, 0, index, sequence)
    else:
        store(route + layout.STREAM_ARRIVED, arrived | bits)


# ---- completions


@inline
def on_completion(conn: int, wc: int) -> int:
    """Process one completion; return the stream whose rows can be processed, or -1."""
    wr_id, status = load(wc), load32(wc + _STATUS)
    index = wr_id >> layout.WR_QP_SHIFT & 0xFF
    qp = qp_of(conn, index)
    received = wr_id & layout.WR_RECEIVE != 0
    if received:
        store(qp + layout.QP_RECV_DONE, load(qp + layout.QP_RECV_DONE) + 1)
    if status != 0:
        mark_failed(conn, qp, status, load32(wc + _VENDOR) & 0xFFFFFFFF, 0)
        return -1
    if not received:
        complete_sends(conn, index, wr_id & layout.WR_NUMBER_MASK)
        return -1
    immediate = swap32(load(wc + _IMMEDIATE) & 0xFFFFFFFF)
    on_immediate(conn, immediate)
    if load(qp + layout.QP_STATE) <= layout.QP_ACTIVE and post_receives(conn, index) != 0:
        mark_failed(conn, qp, 0, 0, 12)
    return immediate_stream(immediate)


@inline
def poll_queue(conn: int, device: int) -> int:
    """Process up to NCOMPLETIONS completions of one queue; return how many there were."""
    engine = load(conn + layout.CONN_ENGINE)
    wcs = engine + layout.ENGINE_COMPLETIONS
    queue = load(conn + layout.CONN_CQS + 8 * device)
    if queue == 0:
        return 0
    poll = load(device_of(conn, device) + layout.DEVICE_POLL_CQ)
    count = as_int(call4(poll, queue, layout.NCOMPLETIONS, wcs, 0))
    for i in range(count):
        stream = on_completion(conn, wcs + i * layout.WC_BYTES)
        if stream >= 0 and stream < load(conn + layout.CONN_NSTREAMS):
            process_rows(conn, stream)
    return max(count, 0)


@inline
def poll_all(conn: int) -> bool:
    """Process completions of all devices; return True if there were any."""
    found = False
    for device in range(load(conn + layout.CONN_NCQS)):
        if poll_queue(conn, device) > 0:
            found = True
    if found:
        deregister_finished(conn)
    return found


# ---- for Python


def drain(conn: int, unused: int) -> int:
    """Process completions until there are none."""
    while poll_all(conn):
        pass
    return 0


def resolve(conn: int, arguments: int) -> int:
    """Resume a stream after its queue pair failed: words (stream, rows received by the peer, queue
    pair that carries it from now on).

    Frames that the peer has count as written; the others are posted again, once.
    """
    index, received, qp_index = load(arguments), load(arguments + 8), load(arguments + 16)
    link, route = load(conn + layout.CONN_LINK), route_of(conn, index)
    stream = stream_of(link, index)
    frames, posted = 0, load(route + layout.STREAM_POSTED_ENTRIES)
    while frames < posted and entry_sequence(conn, index, frames) <= received:
        frames += 1
    finish_entries(conn, index, frames)
    store(route + layout.STREAM_POSTED_ENTRIES, 0)
    store(route + layout.STREAM_POSTED_ROWS, received)
    if received > load(route + layout.STREAM_DONE_ROWS):
        store(route + layout.STREAM_DONE_ROWS, received)
    store(route + layout.STREAM_QP, qp_index)
    store(route + layout.STREAM_PAUSED, 0)
    return load(stream + link_layout.STREAM_COUNT)


def end_streams(conn: int, unused: int) -> int:
    """Process that the peer is gone: it sends and reads no more."""
    link = load(conn + layout.CONN_LINK)
    for index in range(load(conn + layout.CONN_NSTREAMS)):
        if alive(link):
            on_stream_ended(link, index, 0)
            advance(link)
    return 0


@inline
def entry_sequence(conn: int, index: int, frames: int) -> int:
    """Return the row number of a posted entry."""
    link, route = load(conn + layout.CONN_LINK), route_of(conn, index)
    stream = stream_of(link, index)
    slot = (load(stream + link_layout.STREAM_HEAD) + frames) & (layout.NQUEUE - 1)
    return load(route + layout.STREAM_ENTRY_ROW + 8 * slot)
