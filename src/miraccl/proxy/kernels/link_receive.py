"""Kernel source: the receive half of a link (``wire.proxy_receiver``), decision by decision."""

from __future__ import annotations

from miraccl.native.intrinsics import inline, load, store, store_release
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.link_send import contradict, fail, log, mark_dirty, stream_of
from miraccl.transport import fifo

INLINE_BYTES = fifo.INLINE_BYTES
_FLAG, _SIGNATURE, _NBYTES, _MODE, _ADDRESS = 0, 8, 16, 24, 32
MODE_SLOT, MODE_INLINE = int(fifo.Mode.SLOT), int(fifo.Mode.INLINE)
MODE_LANDED, MODE_OVERSIZE = int(fifo.Mode.LANDED), int(fifo.Mode.OVERSIZE)


@inline
def in_of(link: int, message: int) -> int:
    """Address of the record of an incoming message."""
    return link + layout.LINK_IN + (message & (layout.NSLOTS - 1)) * layout.IN_BYTES


@inline
def receive_line(link: int, message: int) -> int:
    """Address of the descriptor line of an incoming message."""
    line = (message & (layout.NSLOTS - 1)) * layout.LINE_BYTES
    return load(link + layout.LINK_RECV_DESCRIPTORS) + line


@inline
def create(link: int, message: int, signature: int, nbytes: int) -> int:
    """Start the record of an incoming message."""
    record = in_of(link, message)
    store(record + layout.IN_STATE, layout.IN_FRESH)
    store(record + layout.IN_SIGNATURE, signature)
    store(record + layout.IN_NBYTES, nbytes)
    store(record + layout.IN_PLACEMENT, layout.PLACE_NONE)
    store(record + layout.IN_MISSING, nbytes)
    store(record + layout.IN_NRANGES, 0)
    return record


@inline
def deliver(link: int) -> None:
    """Publish the descriptors of messages that are complete, in order."""
    going = True
    while going:
        message = load(link + layout.LINK_DELIVERED)
        record = in_of(link, message)
        going = (
            message < load(link + layout.LINK_TAIL) + layout.NSLOTS
            and load(record + layout.IN_STATE) == layout.IN_COMPLETE
        )
        if going:
            store(record + layout.IN_STATE, layout.IN_DELIVERED)
            placement = load(record + layout.IN_PLACEMENT)
            nbytes, signature = load(record + layout.IN_NBYTES), load(record + layout.IN_SIGNATURE)
            log(link, layout.LOG_DELIVER, message, signature, nbytes, placement, 0)
            line = receive_line(link, message)
            store(line + _SIGNATURE, signature)
            store(line + _NBYTES, nbytes)
            mode = MODE_SLOT
            if placement == layout.PLACE_INLINE:
                mode = MODE_INLINE
            elif placement == layout.PLACE_OVERSIZE:
                mode = MODE_OVERSIZE
            elif placement == layout.PLACE_POSTED:
                mode = MODE_LANDED
                store(line + _ADDRESS, load(record + layout.IN_ADDRESS))
            store(line + _MODE, mode)
            store(record + layout.IN_ADDRESS_FOR, 0)
            store_release(line + _FLAG, message + 1)
            mark_dirty(link)
            store(link + layout.LINK_DELIVERED, message + 1)


@inline
def reject(link: int, record: int) -> None:
    """Complete a message without payload: the posted receive is too small for it."""
    store(record + layout.IN_PLACEMENT, layout.PLACE_OVERSIZE)
    store(record + layout.IN_STATE, layout.IN_COMPLETE)
    deliver(link)


@inline
def post_receive(link: int, message: int, room: int) -> bool:
    """Note where a message may land; return True if the peer must learn it."""
    record = in_of(link, message)
    state = load(record + layout.IN_STATE)
    if (
        load(record + layout.IN_POSTED_FOR) == message + 1
        or message < load(link + layout.LINK_DELIVERED)
        or message >= load(link + layout.LINK_TAIL) + layout.NSLOTS
    ):
        return False
    if state != layout.IN_ABSENT and state != layout.IN_ANNOUNCED:
        return False
    store(record + layout.IN_POSTED_FOR, message + 1)
    store(record + layout.IN_POSTED_ROOM, room)
    if state == layout.IN_ANNOUNCED and room < load(record + layout.IN_NBYTES):
        reject(link, record)
        return False
    return room > load(link + layout.LINK_RECV_SLOT_BYTES)


@inline
def consume(link: int, tail: int) -> None:
    """Process how many messages the executor has consumed."""
    before, delivered = load(link + layout.LINK_TAIL), load(link + layout.LINK_DELIVERED)
    if tail < before or tail > delivered:
        fail(link, layout.FAULT_INTERNAL, layout.CONSUMED_UNKNOWN, tail, delivered, 0)
        return
    for message in range(before, tail):
        record = in_of(link, message)
        store(record + layout.IN_STATE, layout.IN_ABSENT)
        store(record + layout.IN_POSTED_FOR, 0)
    store(link + layout.LINK_TAIL, tail)


@inline
def on_placed(link: int, index: int) -> None:
    """Process that the payload of the frame on a stream is in place."""
    stream = stream_of(link, index)
    record = in_of(link, load(stream + layout.STREAM_ARRIVING))
    missing = load(record + layout.IN_MISSING) - load(stream + layout.STREAM_ARRIVING_BYTES)
    store(record + layout.IN_MISSING, missing)
    if missing == 0:
        store(record + layout.IN_STATE, layout.IN_COMPLETE)
        deliver(link)


@inline
def outside_window(link: int, message: int) -> bool:
    """End the link if a message lies outside the window of slots; return True then."""
    tail = load(link + layout.LINK_TAIL)
    if tail <= message < tail + layout.NSLOTS:
        return False
    contradict(link, layout.OUTSIDE_WINDOW, message, tail, tail + layout.NSLOTS - 1)
    return True


@inline
def on_announce(link: int, message: int, signature: int, nbytes: int) -> None:
    """Process that the peer has a message which needs a posted receive."""
    if nbytes <= load(link + layout.LINK_RECV_SLOT_BYTES):
        contradict(link, layout.ANNOUNCE_SMALL, nbytes, 0, 0)
        return
    tail = load(link + layout.LINK_TAIL)
    inside = tail <= message < tail + layout.NSLOTS
    record = in_of(link, message)
    known = inside and load(record + layout.IN_STATE) != layout.IN_ABSENT
    if known and (
        load(record + layout.IN_STATE) == layout.IN_ANNOUNCED
        or load(record + layout.IN_NBYTES) != nbytes
    ):
        contradict(link, layout.ANNOUNCED_TWICE, message, 0, 0)
        return
    if known or message < tail:
        return  # it crossed with a CTS, and the data on another stream have overtaken it
    if outside_window(link, message):
        return
    create(link, message, signature, nbytes)
    posted = load(record + layout.IN_POSTED_FOR) == message + 1
    if posted and load(record + layout.IN_POSTED_ROOM) < nbytes:
        reject(link, record)
        return
    store(record + layout.IN_STATE, layout.IN_ANNOUNCED)
    if not posted:
        log(link, layout.LOG_ANNOUNCE, message, signature, nbytes, 0, 0)
        line = receive_line(link, message)
        store(line + _SIGNATURE, signature)
        store(line + _NBYTES, nbytes)
        store_release(line + _FLAG, -(message + 1))
        mark_dirty(link)


@inline
def claim(link: int, record: int, start: int, end: int) -> bool:
    """Add bytes to the claimed ranges, merged and in any order; False if some come twice."""
    count = load(record + layout.IN_NRANGES)
    ranges = record + layout.IN_RANGES
    low, high, kept = start, end, 0
    for i in range(count):
        first, last = load(ranges + 16 * i), load(ranges + 16 * i + 8)
        if start < last and first < end:
            contradict(link, layout.OVERLAP, start, end, 0)
            return False
        if last == start:
            low = first
        elif first == end:
            high = last
        else:
            store(ranges + 16 * kept, first)
            store(ranges + 16 * kept + 8, last)
            kept += 1
    if kept >= layout.MAX_RANGES:
        contradict(link, layout.TOO_MANY_RANGES, kept, 0, 0)
        return False
    store(ranges + 16 * kept, low)
    store(ranges + 16 * kept + 8, high)
    store(record + layout.IN_NRANGES, kept + 1)
    return True


@inline
def choose_place(link: int, record: int, message: int, nbytes: int) -> int:
    """Placement of a message by its first frame; PLACE_NONE ends the link."""
    room = -1
    if load(record + layout.IN_POSTED_FOR) == message + 1:
        room = load(record + layout.IN_POSTED_ROOM)
    if nbytes <= INLINE_BYTES:
        return layout.PLACE_INLINE
    if nbytes <= room:
        return layout.PLACE_POSTED
    if nbytes <= load(link + layout.LINK_RECV_SLOT_BYTES):
        return layout.PLACE_SLOT
    contradict(link, layout.UNREQUESTED, nbytes, message, 0)
    return layout.PLACE_NONE


@inline
def address_of(link: int, record: int, message: int) -> int:
    """Address of the first byte of a message's place."""
    placement = load(record + layout.IN_PLACEMENT)
    if placement == layout.PLACE_POSTED:
        return load(record + layout.IN_ADDRESS)
    if placement == layout.PLACE_SLOT:
        slot = (message & (layout.NSLOTS - 1)) * load(link + layout.LINK_RECV_SLOT_BYTES)
        return load(link + layout.LINK_RECV_SLOTS) + slot
    return receive_line(link, message) + _ADDRESS


@inline
def on_data(
    link: int, index: int, message: int, signature: int, nbytes: int, offset: int, length: int
) -> None:
    """Process a DATA frame: fix the place of its message and direct the payload there."""
    tail = load(link + layout.LINK_TAIL)
    record = in_of(link, message)
    inside = tail <= message < tail + layout.NSLOTS
    state = load(record + layout.IN_STATE)
    if not inside or state == layout.IN_ABSENT:
        if outside_window(link, message):
            return
        create(link, message, signature, nbytes)
    elif state == layout.IN_COMPLETE or state == layout.IN_DELIVERED:
        contradict(link, layout.SENT_TWICE, message, 0, 0)
        return
    elif (
        load(record + layout.IN_SIGNATURE) != signature or load(record + layout.IN_NBYTES) != nbytes
    ):
        contradict(link, layout.CHANGED, message, 0, 0)
        return
    if load(record + layout.IN_PLACEMENT) == layout.PLACE_NONE:
        placement = choose_place(link, record, message, nbytes)
        if placement == layout.PLACE_NONE:
            return
        store(record + layout.IN_PLACEMENT, placement)
    store(record + layout.IN_STATE, layout.IN_LANDING)
    if not claim(link, record, offset, offset + length):
        return
    if length != 0:
        stream = stream_of(link, index)
        store(stream + layout.STREAM_ARRIVING, message)
        store(stream + layout.STREAM_ARRIVING_BYTES, length)
        log(
            link,
            layout.LOG_RECEIVE,
            index,
            message,
            load(record + layout.IN_PLACEMENT),
            offset,
            length,
        )
        store(stream + layout.STREAM_TARGET, address_of(link, record, message) + offset)
        store(stream + layout.STREAM_REMAINING, length)
        store(stream + layout.STREAM_PLACING, 1)
    else:
        store(record + layout.IN_STATE, layout.IN_COMPLETE)
        deliver(link)
