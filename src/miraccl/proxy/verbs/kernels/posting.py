"""Kernel source: work requests for the frames of a connection, and registrations of messages."""

from __future__ import annotations

from miraccl.native import verbs_abi as abi
from miraccl.native.intrinsics import call4, inline, load, load32, memcpy, store
from miraccl.proxy.kernels import link_layout
from miraccl.proxy.kernels.link_receive import in_of
from miraccl.proxy.kernels.link_send import CTS, DATA, fail, out_of, stream_of
from miraccl.proxy.verbs.kernels import verbs_layout as layout
from miraccl.wire.verbs import rows
from miraccl.wire.verbs.rows import encode_immediate, may_post, row_flags

WR_WRITE, WR_WRITE_WITH_IMM = abi.WR_RDMA_WRITE, abi.WR_RDMA_WRITE_WITH_IMM
SIGNALED, SOLICITED = abi.SEND_SIGNALED, abi.SEND_SOLICITED
ACCESS_LOCAL = abi.ACCESS_LOCAL_WRITE
ACCESS_REMOTE = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE
MR_LKEY, MR_RKEY = abi.MR_LKEY, abi.MR_RKEY
INLINE_BYTES = 32
WR_REMOTE, WR_RKEY = 40, 48  # in ibv_send_wr


@inline
def qp_of(conn: int, index: int) -> int:
    """Address of a queue pair."""
    return conn + layout.CONN_QPS + index * layout.QP_BYTES


@inline
def route_of(conn: int, index: int) -> int:
    """Address of the verbs half of a stream; ``stream_of`` gives the queue of its frames."""
    return conn + layout.CONN_STREAMS + index * layout.STREAM_BYTES


@inline
def out_extra(conn: int, message: int) -> int:
    """Address of what verbs adds to an outgoing message."""
    return conn + layout.CONN_OUT + (message & (layout.NSLOTS - 1)) * layout.OUT_BYTES


@inline
def in_extra(conn: int, message: int) -> int:
    """Address of what verbs adds to an incoming message."""
    return conn + layout.CONN_IN + (message & (layout.NSLOTS - 1)) * layout.IN_BYTES


@inline
def device_of(conn: int, index: int) -> int:
    """Address of a device of the engine."""
    return load(conn + layout.CONN_ENGINE) + layout.ENGINE_DEVICES + index * layout.DEVICE_BYTES


@inline
def swap32(value: int) -> int:
    """Return the 32 bits in the other byte order."""
    return (
        ((value & 0xFF) << 24)
        | ((value & 0xFF00) << 8)
        | ((value >> 8) & 0xFF00)
        | ((value >> 24) & 0xFF)
    )


@inline
def as_int(value: int) -> int:
    """Return the C int in the low half of a word."""
    return (value << 32) >> 32


# ---- registrations


@inline
def find_keys(conn: int, device: int, address: int, nbytes: int) -> int:
    """Return lkey | rkey << 32 of a region that stays registered, -1 if none has the bytes."""
    engine = load(conn + layout.CONN_ENGINE)
    for i in range(load(engine + layout.ENGINE_NREGIONS)):
        region = engine + layout.ENGINE_REGIONS + i * layout.REGION_BYTES
        inside = load(region + layout.REGION_START) <= address
        if inside and address + nbytes <= load(region + layout.REGION_END):
            return load(region + layout.REGION_KEYS + 8 * device)
    return -1


@inline
def register(conn: int, device: int, address: int, nbytes: int, access: int) -> int:
    """Register memory for one message; return the ibv_mr, 0 on failure."""
    engine = load(conn + layout.CONN_ENGINE)
    record = device_of(conn, device)
    pd, access = load(record + layout.DEVICE_PD), access | load(record + layout.DEVICE_ACCESS)
    made = call4(load(engine + layout.FUNCTION_REG_MR), pd, address, nbytes, access)
    window, end = load(engine + layout.ENGINE_WINDOW), load(engine + layout.ENGINE_WINDOW_END)
    if window <= address and address + nbytes <= end and load(engine + layout.ENGINE_WANTED) == 0:
        store(engine + layout.ENGINE_WANTED, address)
        store(engine + layout.ENGINE_WANTED_BYTES, nbytes)
        store(conn + layout.CONN_ATTENTION, 1)
    if made != 0:
        store(conn + layout.CONN_REGISTERED, load(conn + layout.CONN_REGISTERED) + 1)
        store(engine + layout.ENGINE_REGISTERED, load(engine + layout.ENGINE_REGISTERED) + 1)
    return made


@inline
def deregister_all(conn: int, record: int, mrs: int) -> None:
    """End the registrations of one message."""
    engine = load(conn + layout.CONN_ENGINE)
    for device in range(load(engine + layout.ENGINE_NDEVICES)):
        made = load(record + mrs + 8 * device)
        if made != 0:
            call4(load(engine + layout.FUNCTION_DEREG_MR), made, 0, 0, 0)
            store(record + mrs + 8 * device, 0)
            store(conn + layout.CONN_REGISTERED, load(conn + layout.CONN_REGISTERED) - 1)


@inline
def deregister_finished(conn: int) -> None:
    """End the registrations of messages that are released or delivered."""
    if load(conn + layout.CONN_REGISTERED) == 0:
        return
    link = load(conn + layout.CONN_LINK)
    released, delivered = (
        load(link + link_layout.LINK_RELEASED),
        load(link + link_layout.LINK_DELIVERED),
    )
    for slot in range(layout.NSLOTS):
        extra = out_extra(conn, slot)
        number = load(extra + layout.OUT_MR_FOR)
        if number != 0 and number <= released:
            deregister_all(conn, extra, layout.OUT_MR)
            store(extra + layout.OUT_MR_FOR, 0)
        extra = in_extra(conn, slot)
        number = load(extra + layout.IN_MR_FOR)
        if number != 0 and number <= delivered:
            deregister_all(conn, extra, layout.IN_MR)
            store(extra + layout.IN_MR_FOR, 0)


def deregister_everything(conn: int, unused: int) -> int:
    """End all registrations of single messages, when the queue pairs are gone."""
    for slot in range(layout.NSLOTS):
        deregister_all(conn, out_extra(conn, slot), layout.OUT_MR)
        deregister_all(conn, in_extra(conn, slot), layout.IN_MR)
    return 0


@inline
def source_key(conn: int, qp: int, message: int, address: int, nbytes: int) -> int:
    """Return the lkey of a payload, -1 if it cannot be registered."""
    inside = load(conn + layout.CONN_SLOTS_OUT) <= address
    if inside and address + nbytes <= load(conn + layout.CONN_SLOTS_OUT_END):
        return load(qp + layout.QP_LOCAL_KEY)
    device = load(qp + layout.QP_DEVICE)
    keys = find_keys(conn, device, address, nbytes)
    if keys != -1:
        return keys & 0xFFFFFFFF
    link, extra = load(conn + layout.CONN_LINK), out_extra(conn, message)
    made = load(extra + layout.OUT_MR + 8 * device)
    if made == 0:
        record = out_of(link, message)
        start, total = (
            load(record + link_layout.OUT_SOURCE),
            load(record + link_layout.OUT_NBYTES),
        )
        made = register(conn, device, start, total, ACCESS_LOCAL)
        if made == 0:
            fail(link, link_layout.FAULT_INTERNAL, layout.REGISTER_FAILED, total, start, 0)
            return -1
        store(extra + layout.OUT_MR + 8 * device, made)
        store(extra + layout.OUT_MR_FOR, message + 1)
    return load32(made + MR_LKEY) & 0xFFFFFFFF


@inline
def write_grant(conn: int, message: int, room: int, row: int) -> bool:
    """Write address and keys of a posted receive into a CTS row; False if it cannot be
    registered.
    """
    link, extra = load(conn + layout.CONN_LINK), in_extra(conn, message)
    engine = load(conn + layout.CONN_ENGINE)
    address = load(in_of(link, message) + link_layout.IN_ADDRESS)
    store(row + rows.ROW_ADDRESS, address)
    for device in range(load(engine + layout.ENGINE_NDEVICES)):
        keys = find_keys(conn, device, address, room)
        key = keys >> 32 & 0xFFFFFFFF
        if keys == -1:
            made = load(extra + layout.IN_MR + 8 * device)
            if made == 0:
                made = register(conn, device, address, room, ACCESS_REMOTE)
                if made == 0:
                    fail(link, link_layout.FAULT_INTERNAL, layout.REGISTER_FAILED, room, address, 0)
                    return False
                store(extra + layout.IN_MR + 8 * device, made)
                store(extra + layout.IN_MR_FOR, message + 1)
            key = load32(made + MR_RKEY) & 0xFFFFFFFF
        place = row + rows.ROW_KEYS + 8 * (device >> 1)
        if device & 1 == 0:
            store(place, key)
        else:
            store(place, load(place) | key << 32)
    return True


# ---- work requests


@inline
def mark_failed(conn: int, qp: int, status: int, vendor: int, errno: int) -> None:
    """Record the first failure of a queue pair, for Python."""
    if load(qp + layout.QP_STATE) <= layout.QP_ACTIVE:
        store(qp + layout.QP_STATE, layout.QP_FAILED)
        store(qp + layout.QP_STATUS, status)
        store(qp + layout.QP_VENDOR, vendor)
        store(qp + layout.QP_ERRNO, errno)
    store(conn + layout.CONN_ATTENTION, 1)


@inline
def append_write(
    conn: int,
    index: int,
    address: int,
    length: int,
    key: int,
    target: int,
    target_key: int,
    opcode: int,
    flags: int,
) -> None:
    """Append an ibv_send_wr to the requests that ``post_requests`` posts on a queue pair.

    Args:
        key, target_key: lkey of ``address`` and rkey of ``target``.
        flags: Flags, and the immediate in the high half.
    """
    engine, qp = load(conn + layout.CONN_ENGINE), qp_of(conn, index)
    count, number = load(engine + layout.ENGINE_CHAIN), load(qp + layout.QP_POSTED) + 1
    wr = engine + layout.ENGINE_SEND_WR + count * layout.SEND_WR_BYTES
    sge = engine + layout.ENGINE_SGES + count * layout.SGE_BYTES
    if count > 0:
        store(wr - layout.SEND_WR_BYTES + 8, wr)
    store(sge, address)
    store(sge + 8, length | key << 32)
    # A request without SIGNALED completes too if it fails, and its queue pair must be known then.
    store(wr, index << layout.WR_QP_SHIFT | number)
    store(wr + 8, 0)
    store(wr + 16, sge)
    store(wr + 24, (0 if length == 0 else 1) | opcode << 32)
    store(wr + 32, flags)
    store(wr + WR_REMOTE, target)
    store(wr + WR_RKEY, target_key)
    store(qp + layout.QP_POSTED, number)
    store(engine + layout.ENGINE_CHAIN, count + 1)


@inline
def post_requests(conn: int, index: int) -> bool:
    """Post the appended requests by one call, which is a system call with Soft-RoCE; return False
    if that fails, which ends the queue pair.
    """
    engine, qp = load(conn + layout.CONN_ENGINE), qp_of(conn, index)
    count = load(engine + layout.ENGINE_CHAIN)
    if count == 0:
        return True
    store(engine + layout.ENGINE_CHAIN, 0)
    store(engine + layout.ENGINE_POSTS, load(engine + layout.ENGINE_POSTS) + 1)
    store(engine + layout.ENGINE_REQUESTS, load(engine + layout.ENGINE_REQUESTS) + count)
    first, bad = engine + layout.ENGINE_SEND_WR, engine + layout.ENGINE_BAD_WR
    post = load(device_of(conn, load(qp + layout.QP_DEVICE)) + layout.DEVICE_POST_SEND)
    store(bad, first)
    errno = as_int(call4(post, load(qp + layout.QP_POINTER), first, bad, 0))
    if errno != 0:
        # Those before the bad one are posted. Frames that are counted as posted and were not are
        # posted again on another pair, as the peer says that it has not received them.
        store(qp + layout.QP_POSTED, (load(load(bad)) & layout.WR_NUMBER_MASK) - 1)
        mark_failed(conn, qp, 0, 0, errno)
    return errno == 0


@inline
def has_room(conn: int, index: int, reserved: int) -> bool:
    """Return True if a row of a stream, with payload, can be posted now."""
    route = route_of(conn, index)
    qp = qp_of(conn, load(route + layout.STREAM_QP))
    if load(route + layout.STREAM_PAUSED) != 0:
        return False
    if load(qp + layout.QP_STATE) != layout.QP_ACTIVE:
        return False
    outstanding = load(qp + layout.QP_POSTED) - load(qp + layout.QP_DONE)
    if outstanding + layout.MAX_FRAME_WRS > load(qp + layout.QP_SIZE):
        return False
    posted, done = load(route + layout.STREAM_POSTED_ROWS), load(route + layout.STREAM_DONE_ROWS)
    if not may_post(posted, done, reserved):
        return False
    if load(qp + layout.QP_NSTREAMS) <= 2:
        return True
    # The peer has posted RECV_DEPTH receives for all streams of the queue pair.
    outstanding = 0
    for other in range(load(conn + layout.CONN_NSTREAMS)):
        peer = route_of(conn, other)
        if load(peer + layout.STREAM_QP) == load(route + layout.STREAM_QP):
            outstanding += load(peer + layout.STREAM_POSTED_ROWS)
            outstanding -= load(peer + layout.STREAM_DONE_ROWS)
    return outstanding < load(qp + layout.QP_RECV_DEPTH)


@inline
def next_row(conn: int, index: int) -> int:
    """Address of the memory from which the next row of a stream is sent."""
    number = load(route_of(conn, index) + layout.STREAM_POSTED_ROWS)
    place = index * rows.NROWS + (number & (rows.NROWS - 1))
    return load(conn + layout.CONN_ROWS_OUT) + place * rows.ROW_BYTES


@inline
def append_row(conn: int, index: int, kind: int, placement: int, signal: bool, apart: bool) -> None:
    """Add the row at ``next_row`` to the batch, behind its payload if it has one.

    ``signal``: its completion is awaited. ``apart``: its immediate has a request without bytes, as
    adaptive routing may reorder all other packets.
    """
    engine, route = load(conn + layout.CONN_ENGINE), route_of(conn, index)
    row = next_row(conn, index)
    sequence = load(route + layout.STREAM_POSTED_ROWS) + 1
    processed = load(route + layout.STREAM_PROCESSED)
    store(row + rows.ROW_SEQUENCE, sequence)
    store(row + rows.ROW_FLAGS, row_flags(kind, placement, index, processed))
    store(route + layout.STREAM_POSTED_ROWS, sequence)
    store(route + layout.STREAM_REPORTED, processed)
    count = load(engine + layout.ENGINE_BATCH) + 1
    store(engine + layout.ENGINE_BATCH, count)
    if signal:
        store(engine + layout.ENGINE_BATCH_SIGNAL, 1)
    if apart:
        store(engine + layout.ENGINE_BATCH_APART, 1)
    if (
        count == rows.BATCH_ROWS
        or sequence & (rows.NROWS - 1) == 0  # the end of the ring
        or load(engine + layout.ENGINE_BATCH_BYTES) >= rows.BATCH_BYTES
    ):
        append_batch(conn, index)


@inline
def append_batch(conn: int, index: int) -> None:
    """Append one request for the rows of the batch."""
    engine, route = load(conn + layout.CONN_ENGINE), route_of(conn, index)
    count = load(engine + layout.ENGINE_BATCH)
    if count == 0:
        return
    number, sequence = load(route + layout.STREAM_QP), load(route + layout.STREAM_POSTED_ROWS)
    qp = qp_of(conn, number)
    place = index * rows.NROWS + ((sequence - count) & (rows.NROWS - 1))
    row = load(conn + layout.CONN_ROWS_OUT) + place * rows.ROW_BYTES
    target = load(conn + layout.CONN_PEER_ROWS) + place * rows.ROW_BYTES
    nbytes = count * rows.ROW_BYTES
    key, rkey = load(qp + layout.QP_KEY), load(qp + layout.QP_PEER_KEY)
    unsignaled, flags = load(qp + layout.QP_UNSIGNALED) + count, SOLICITED
    if load(engine + layout.ENGINE_BATCH_SIGNAL) != 0 or unsignaled >= layout.SIGNAL_ROWS:
        flags = flags | SIGNALED
        unsignaled = 0
    store(qp + layout.QP_UNSIGNALED, unsignaled)
    flags = flags | swap32(encode_immediate(index, sequence, count)) << 32
    inline_flag = load(conn + layout.CONN_INLINE) if count == 1 else 0
    if load(engine + layout.ENGINE_BATCH_APART) != 0:
        append_write(conn, number, row, nbytes, key, target, rkey, WR_WRITE, inline_flag)
        append_write(conn, number, row, 0, key, target, rkey, WR_WRITE_WITH_IMM, flags)
    else:
        flags = flags | inline_flag
        append_write(conn, number, row, nbytes, key, target, rkey, WR_WRITE_WITH_IMM, flags)
    store(engine + layout.ENGINE_BATCH, 0)
    store(engine + layout.ENGINE_BATCH_BYTES, 0)
    store(engine + layout.ENGINE_BATCH_SIGNAL, 0)
    store(engine + layout.ENGINE_BATCH_APART, 0)


@inline
def decide_placement(conn: int, message: int, nbytes: int) -> int:
    """Return the place of a message at the peer, decided once, before its first piece."""
    extra = out_extra(conn, message)
    if load(extra + layout.OUT_PLACED_FOR) != message + 1:
        placement = rows.IN_SLOT
        if nbytes <= INLINE_BYTES:
            placement = rows.IN_ROW
        elif load(extra + layout.OUT_FOR) == message + 1:
            if nbytes <= load(extra + layout.OUT_ROOM):
                placement = rows.IN_POSTED
        store(extra + layout.OUT_PLACED_FOR, message + 1)
        store(extra + layout.OUT_PLACEMENT, placement)
    return load(extra + layout.OUT_PLACEMENT)


@inline
def append_payload(conn: int, index: int, entry: int, placement: int) -> bool:
    """Append the payload of a frame to the requests; False if it cannot be sent."""
    link = load(conn + layout.CONN_LINK)
    qp = qp_of(conn, load(route_of(conn, index) + layout.STREAM_QP))
    header = entry + link_layout.ENTRY_HEADER
    message, offset = load(header + 8), load(header + 32)
    length = load(entry + link_layout.ENTRY_LENGTH)
    payload = load(entry + link_layout.ENTRY_PAYLOAD)
    lkey = source_key(conn, qp, message, payload, length)
    if lkey == -1:
        return False
    extra = out_extra(conn, message)
    slot = (message & (layout.NSLOTS - 1)) * load(link + link_layout.LINK_SEND_SLOT_BYTES)
    target, rkey = load(conn + layout.CONN_PEER_SLOTS) + slot, load(qp + layout.QP_PEER_KEY)
    if placement == rows.IN_POSTED:
        target = load(extra + layout.OUT_ADDRESS)
        rkey = load32(extra + layout.OUT_KEYS + 4 * load(qp + layout.QP_PEER_DEVICE)) & 0xFFFFFFFF
    number = load(route_of(conn, index) + layout.STREAM_QP)
    append_write(conn, number, payload, length, lkey, target + offset, rkey, WR_WRITE, 0)
    engine = load(conn + layout.CONN_ENGINE)
    batched = load(engine + layout.ENGINE_BATCH_BYTES) + length
    store(engine + layout.ENGINE_BATCH_BYTES, batched)
    return True


@inline
def append_entry(conn: int, index: int, entry: int) -> bool:
    """Append a frame of a queue to the requests; return False if its payload cannot be sent."""
    header = entry + link_layout.ENTRY_HEADER
    kind, message = load(header) >> 16 & 0xFF, load(header + 8)
    row = next_row(conn, index)
    memcpy(row, header, link_layout.FRAME_BYTES)
    placement, signal, apart = 0, False, False
    if kind == DATA:
        signal = True
        length = load(entry + link_layout.ENTRY_LENGTH)
        qp = qp_of(conn, load(route_of(conn, index) + layout.STREAM_QP))
        apart = length > load(qp + layout.QP_APART_BYTES)
        placement = decide_placement(conn, message, load(header + 24))
        if placement == rows.IN_ROW:
            memcpy(row + rows.ROW_PAYLOAD, load(entry + link_layout.ENTRY_PAYLOAD), length)
        elif length > 0 and not append_payload(conn, index, entry, placement):
            return False
    elif kind == CTS:
        if not write_grant(conn, message, load(header + 24), row):
            return False
    elif load(entry + link_layout.ENTRY_MESSAGE) == link_layout.CLOSE_ENTRY:
        signal = True
    append_row(conn, index, rows.KIND_FRAME, placement, signal, apart)
    return True


@inline
def post_stream(conn: int, index: int) -> bool:
    """Post the frames of a stream that the peer has room for; return True if there were any."""
    link, engine = load(conn + layout.CONN_LINK), load(conn + layout.CONN_ENGINE)
    stream, route = stream_of(link, index), route_of(conn, index)
    number = load(route + layout.STREAM_QP)
    qp, found, going = qp_of(conn, number), False, True
    while (
        going
        and load(route + layout.STREAM_POSTED_ENTRIES) < load(stream + link_layout.STREAM_COUNT)
        and has_room(conn, index, rows.RESERVED_ROWS)
    ):
        slot = load(stream + link_layout.STREAM_HEAD) + load(route + layout.STREAM_POSTED_ENTRIES)
        slot = slot & (layout.NQUEUE - 1)
        entry = stream + link_layout.STREAM_QUEUE + slot * link_layout.ENTRY_BYTES
        # The request of its row has this number or a later one, and earlier rows an earlier one.
        request = load(qp + layout.QP_POSTED) + 1
        going = append_entry(conn, index, entry)
        if going:
            store(route + layout.STREAM_ENTRY_WR + 8 * slot, request)
            posted = load(route + layout.STREAM_POSTED_ROWS)
            store(route + layout.STREAM_ENTRY_ROW + 8 * slot, posted)
            posted = load(route + layout.STREAM_POSTED_ENTRIES)
            store(route + layout.STREAM_POSTED_ENTRIES, posted + 1)
            found = True
            if load(engine + layout.ENGINE_CHAIN) + layout.MAX_FRAME_WRS > layout.NCHAIN:
                append_batch(conn, index)
                going = post_requests(conn, number)
    unreported = load(route + layout.STREAM_PROCESSED) - load(route + layout.STREAM_REPORTED)
    if unreported >= rows.REPORT_ROWS and has_room(conn, index, 0):
        append_row(conn, index, rows.KIND_CREDIT, 0, False, False)
    append_batch(conn, index)
    post_requests(conn, number)
    return found


@inline
def post_all(conn: int) -> bool:
    """Post what can be posted on all streams."""
    found = False
    for index in range(load(conn + layout.CONN_NSTREAMS)):
        if post_stream(conn, index):
            found = True
    return found


def post_receives(conn: int, index: int) -> int:
    """Post receives without memory on a queue pair up to its depth; return an errno."""
    engine = load(conn + layout.CONN_ENGINE)
    qp = qp_of(conn, index)
    wr = engine + layout.ENGINE_RECV_WR
    device = device_of(conn, load(qp + layout.QP_DEVICE))
    depth = load(qp + layout.QP_RECV_DEPTH)
    while load(qp + layout.QP_RECV_POSTED) - load(qp + layout.QP_RECV_DONE) < depth:
        number = load(qp + layout.QP_RECV_POSTED) + 1
        store(wr, layout.WR_RECEIVE | index << layout.WR_QP_SHIFT | number)
        store(wr + 8, 0)
        store(wr + 16, 0)
        store(wr + 24, 0)
        errno = as_int(
            call4(
                load(device + layout.DEVICE_POST_RECV),
                load(qp + layout.QP_POINTER),
                wr,
                engine + layout.ENGINE_BAD_WR,
                0,
            )
        )
        if errno != 0:
            return errno
        store(qp + layout.QP_RECV_POSTED, number)
    return 0


def post_special(conn: int, arguments: int) -> int:
    """Post a row that is not a frame: words (stream, kind) and the 128 bytes of the row.

    Returns 1 if the row was posted.
    """
    index, kind = load(arguments), load(arguments + 8)
    if not has_room(conn, index, 0):
        return 0
    memcpy(next_row(conn, index), arguments + 16, rows.ROW_BYTES)
    append_row(conn, index, kind, 0, True, False)
    append_batch(conn, index)
    return 1 if post_requests(conn, load(route_of(conn, index) + layout.STREAM_QP)) else 0


def post_abort(conn: int, arguments: int) -> int:
    """Post the text of an ABORT and its row: words (stream, bytes); the text is in place."""
    index, length = load(arguments), load(arguments + 8)
    if not has_room(conn, index, 0):
        return 0
    number = load(route_of(conn, index) + layout.STREAM_QP)
    qp = qp_of(conn, number)
    memcpy(next_row(conn, index), arguments + 16, rows.ROW_BYTES)
    if length > 0:
        text, target = load(conn + layout.CONN_TEXT_OUT), load(conn + layout.CONN_PEER_TEXT)
        key, rkey = load(qp + layout.QP_KEY), load(qp + layout.QP_PEER_KEY)
        append_write(conn, number, text, length, key, target, rkey, WR_WRITE, 0)
    append_row(conn, index, rows.KIND_FRAME, 0, True, False)
    append_batch(conn, index)
    return 1 if post_requests(conn, number) else 0
