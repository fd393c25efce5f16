"""Kernel source: random histories of a network between two compiled flows.

The adversary of ``histories``, compiled together with the flows, their tags and their grants: it
runs a thousand times as many histories in the same time.  Everything is checked after each event.
"""

from __future__ import annotations

from typing import Any

from miraccl.native.intrinsics import inline, load, load8, memcpy, store, store8
from miraccl.proxy.kernels import flow_layout as fl
from miraccl.proxy.kernels import link_layout, ranges
from miraccl.proxy.kernels.aegis_vectors import aegis_compiled
from miraccl.proxy.kernels.credit import credit_timer, issue_grants
from miraccl.proxy.kernels.datagram_io import (
    build,
    group_of,
    on_datagram,
    vectors_of,
)
from miraccl.proxy.kernels.flow_path import path_of, sent_at
from miraccl.proxy.kernels.flow_receive import flow_on_timer
from miraccl.proxy.kernels.flow_send import CAPACITY, flow_timer, fstream_of, head_of, next_packet
from miraccl.proxy.kernels.link_send import enqueue
from miraccl.wire.datagram.control import CONTROLLERS
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES
from miraccl.wire.datagram.path import PROBE_FIRST_NS, REMEMBERED
from tests.wire.datagram import history_layout as layout

US, MS, SECOND = 1_000, 1_000_000, 1_000_000_000
LIMIT_NS = 24 * 3600 * SECOND
MAX_EVENTS, MAX_CALLS = 5_000_000, 100_000
IP_UDP_BYTES = 28
GUARD_BYTE = 0xA5
#: Kinds of events; a packet's has its buffer, others have their arguments, from bit 8 on.
ARRIVE, SUBMIT, JUMP, SWITCH = 0, 1, 2, 3


# ---- random numbers


@inline
def draw(world: int) -> int:
    """Return 62 random bits (splitmix64)."""
    state = load(world + layout.DRAW) + -7046029254386353131
    store(world + layout.DRAW, state)
    z = (state ^ (state >> 30 & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ (z >> 31 & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF


@inline
def below(world: int, n: int) -> int:
    """Return a random integer below ``n``."""
    return draw(world) % n


@inline
def happens(world: int, millionths: int) -> bool:
    """Return True with a probability."""
    return millionths != 0 and draw(world) % 1_000_000 < millionths


@inline
def probability(world: int) -> int:
    """Draw a probability, in millionths."""
    which = below(world, 5)
    if which < 2:
        return 0
    if which == 2:
        return 20_000
    return 200_000 if which == 3 else 500_000


# ---- the world


@inline
def side_of(world: int, number: int) -> int:
    """Address of a side."""
    return world + layout.SIDES + number * layout.SIDE_BYTES


@inline
def link_of(world: int, number: int, path: int) -> int:
    """Address of the link that carries a path away from a side."""
    return side_of(world, number) + layout.SIDE_LINKS + path * layout.LINK_BYTES


@inline
def frame_of(world: int, index: int) -> int:
    """Address of the description of a frame."""
    return world + layout.WORLD_FRAMES + index * layout.FRAME_ENTRY


@inline
def fault(world: int, code: int, argument: int) -> None:
    """Note the first violation."""
    if load(world + layout.FAULT) == 0:
        store(world + layout.FAULT, code)
        store(world + layout.FAULT_ARGUMENT, argument)


@inline
def count(world: int, what: int) -> None:
    """Count something."""
    store(world + what, load(world + what) + 1)


# ---- events: a heap of (time, what)


@inline
def push(world: int, time: int, what: int) -> None:
    """Schedule an event."""
    heap, i = load(world + layout.HEAP), load(world + layout.HEAP_COUNT)
    store(world + layout.HEAP_COUNT, i + 1)
    while i > 0 and load(heap + 16 * ((i - 1) // 2)) > time:
        parent = (i - 1) // 2
        store(heap + 16 * i, load(heap + 16 * parent))
        store(heap + 16 * i + 8, load(heap + 16 * parent + 8))
        i = parent
    store(heap + 16 * i, time)
    store(heap + 16 * i + 8, what)


@inline
def pop(world: int) -> int:
    """Remove the first event and return what happens."""
    heap, n = load(world + layout.HEAP), load(world + layout.HEAP_COUNT) - 1
    store(world + layout.HEAP_COUNT, n)
    what = load(heap + 8)
    time, last = load(heap + 16 * n), load(heap + 16 * n + 8)
    i, going = 0, True
    while going:
        child = 2 * i + 1
        if child + 1 < n and load(heap + 16 * (child + 1)) < load(heap + 16 * child):
            child += 1
        going = child < n and load(heap + 16 * child) < time
        if going:
            store(heap + 16 * i, load(heap + 16 * child))
            store(heap + 16 * i + 8, load(heap + 16 * child + 8))
            i = child
    store(heap + 16 * i, time)
    store(heap + 16 * i + 8, last)
    return what


# ---- the network


@inline
def buffer_of(world: int, slot: int) -> int:
    """Address of a packet under way: size * 4 + corrupted * 2 + receiving side, then its bytes."""
    return load(world + layout.BUFFERS) + slot * layout.PACKET_BYTES


@inline
def transmit(world: int, number: int, path: int) -> None:
    """Hand the packet that was built for a path to the network."""
    link, port = link_of(world, number, path), load(side_of(world, number) + layout.PORT)
    group, vectors = group_of(port, path), vectors_of(port, path)
    size = load(group + fl.GROUP_TOTAL)
    time = load(world + layout.TIME)
    count(world, layout.PACKETS)
    rate, free_at = load(link + layout.RATE), max(time, load(link + layout.FREE_AT))
    queued = (free_at - time) * rate // 8000
    lost = load(link + layout.UP) == 0 or queued > load(link + layout.QUEUE)
    if not lost:
        free_at += (size + IP_UDP_BYTES) * 8000 // rate
        store(link + layout.FREE_AT, free_at)
        lost = happens(world, load(link + layout.LOSS))
    if size > load(link + layout.MTU) and time < 200 * MS:
        lost = True
    copies = 1
    if lost:
        copies = 0
    elif happens(world, load(link + layout.DUPLICATE)):
        copies = 2
    for _ in range(copies):
        nfree = load(world + layout.NFREE)
        if nfree == 0:
            lost = True
        else:
            store(world + layout.NFREE, nfree - 1)
            slot = load(load(world + layout.FREE) + 8 * (nfree - 1))
            copy = buffer_of(world, slot)
            at, corrupted = copy + 8, 0
            for i in range(load(group + fl.GROUP_VECTORS)):
                vector = vectors + 16 * i
                memcpy(at, load(vector), load(vector + 8))
                at += load(vector + 8)
            if happens(world, load(link + layout.CORRUPT)):
                where = copy + 8 + below(world, size)
                store8(where, load8(where) ^ 1 << below(world, 8))
                corrupted = 1
            store(copy, size * 4 + corrupted * 2 + 1 - number)
            arrival = free_at + load(link + layout.LATENCY)
            if load(link + layout.JITTER) != 0:
                arrival += below(world, load(link + layout.JITTER))
            push(world, arrival, ARRIVE | slot << 8)
    if lost:
        count(world, layout.LOST)
    for offset in range(0, fl.GROUP_FIRST, 8):
        store(group + offset, 0)


# ---- checks


@inline
def check_packet(world: int, number: int, out: int) -> None:
    """Check that a packet names bytes of frames in flight, and no more than was granted."""
    side = side_of(world, number)
    flow = load(side + layout.FLOW)
    for i in range(load(out + fl.OUT_NSEGMENTS)):
        segment = out + fl.OUT_SEGMENTS + i * fl.SEGMENT_BYTES
        index, frame = load(segment), load(segment + 8)
        head = head_of(flow, index)
        if head == 0 or frame != load(side + layout.ACKED + 8 * index):
            fault(world, layout.RELEASED, index)
        elif load(segment + 16) + load(segment + 24) > load(head + link_layout.ENTRY_LENGTH):
            fault(world, layout.RELEASED, frame)
    granted = load(flow + fl.FLOW_GRANTED)
    if granted >= 0 and load(flow + fl.FLOW_NEW_BYTES) > granted:
        fault(world, layout.UNGRANTED, granted)


@inline
def check_ranges(world: int, address: int, most: int, limit: int) -> None:
    """Check that a set of ranges is sorted, disjoint, bounded, and below ``limit``."""
    n, stop = load(address), -1
    if n > most:
        fault(world, layout.RANGES, n)
        return
    for i in range(n):
        start = ranges.start_of(address, i)
        if start <= stop or ranges.stop_of(address, i) <= start:
            fault(world, layout.RANGES, start)
        stop = ranges.stop_of(address, i)
    if stop > limit:
        fault(world, layout.RANGES, stop)


@inline
def check_side(world: int, number: int) -> None:
    """Check the accounts and bounds of a side."""
    side = side_of(world, number)
    flow = load(side + layout.FLOW)
    for index in range(load(flow + fl.FLOW_NPATHS)):
        path = path_of(flow, index)
        order, position = load(path + fl.PATH_ORDER), load(path + fl.PATH_OLDEST)
        nbytes, packets = 0, 0
        if load(path + fl.PATH_NSENT) == 0:
            position = order
        if order - position > REMEMBERED:
            fault(world, layout.REMEMBERED_TOO_MANY, order - position)
            position = order
        while position < order:
            record = sent_at(path, position)
            if load(record + fl.SENT_STATE) == fl.IN_FLIGHT:
                packets += 1
                nbytes += load(record + fl.SENT_SIZE)
            position += 1
        if nbytes != load(path + fl.PATH_IN_FLIGHT) or packets != load(path + fl.PATH_NSENT):
            fault(world, layout.ACCOUNT, index)
        check_ranges(world, path + fl.PATH_NUMBERS, fl.MAX_ACK_RANGES, 1 << 62)
    for index in range(layout.NSTREAMS):
        fstream, head = fstream_of(flow, index), head_of(flow, index)
        length = 0
        if head != 0:
            length = load(head + link_layout.ENTRY_LENGTH)
        check_ranges(world, fstream + fl.FSTREAM_ACKED, CAPACITY, length)
        check_ranges(world, fstream + fl.FSTREAM_RESEND, CAPACITY, length)
        total = max(0, load(fstream + fl.FSTREAM_LENGTH))
        check_ranges(world, fstream + fl.FSTREAM_RECEIVED, CAPACITY, total)
    if load(flow + fl.FLOW_ADMITS) != 0:
        admitted = max(load(flow + fl.FLOW_ADMITTED), UNSOLICITED_BYTES)
        if load(flow + fl.FLOW_RECEIVED) > admitted:
            fault(world, layout.BEYOND_GRANT, admitted)


@inline
def differs(a: int, b: int, nbytes: int) -> bool:
    """Return True if bytes at two addresses differ."""
    for i in range(nbytes // 8):
        if load(a + 8 * i) != load(b + 8 * i):
            return True
    different = 0
    for i in range(nbytes // 8 * 8, nbytes):
        different |= load8(a + i) ^ load8(b + i)
    return different != 0


@inline
def guards_changed(address: int, length: int) -> bool:
    """Return True if bytes before or after a frame in memory were written; clear the frame."""
    for i in range(layout.GUARD_BYTES):
        if load8(address - layout.GUARD_BYTES + i) != GUARD_BYTE:
            return True
        if load8(address + length + i) != GUARD_BYTE:
            return True
    for i in range(length):
        store8(address + i, GUARD_BYTE)
    return False


@inline
def on_complete(world: int, number: int, stream: int) -> None:
    """Compare a frame that has arrived with the one that was sent."""
    side, peer = side_of(world, number), side_of(world, 1 - number)
    done = load(side + layout.COMPLETED + 8 * stream)
    store(side + layout.COMPLETED + 8 * stream, done + 1)
    if done >= load(peer + layout.SUBMITTED + 8 * stream):
        fault(world, layout.UNSENT, stream)
        return
    index = load(peer + layout.STREAM_FRAMES + 8 * (stream * layout.MAX_FRAMES + done))
    length = load(frame_of(world, index) + layout.FRAME_LENGTH)
    sent = load(peer + layout.SOURCE) + index * layout.FRAME_STRIDE
    landed = load(side + layout.LANDING) + stream * fl.LANDING_BYTES
    arrived = side + layout.ARRIVED + 8 * stream
    if load(arrived) != length or differs(sent, landed, length):
        fault(world, layout.CHANGED, index)
    store(arrived, 0)
    if guards_changed(landed, length):
        fault(world, layout.OUTSIDE, stream)


@inline
def read_log(world: int, number: int) -> None:
    """Process what a flow has reported."""
    side, peer = side_of(world, number), side_of(world, 1 - number)
    log = load(side + layout.LOG)
    for i in range(load(log)):
        entry = log + fl.LOG_FIRST + i * fl.LOG_ENTRY_BYTES
        kind, stream = load(entry), load(entry + 8)
        if kind == fl.LOG_PAYLOAD:
            arrived = side + layout.ARRIVED + 8 * stream
            store(arrived, load(arrived) + load(entry + 24) - load(entry + 16))
        elif kind == fl.LOG_COMPLETED:
            on_complete(world, number, stream)
        elif kind == fl.LOG_ACKED:
            acked = load(side + layout.ACKED + 8 * stream)
            store(side + layout.ACKED + 8 * stream, acked + 1)
            if acked >= load(peer + layout.COMPLETED + 8 * stream):
                fault(world, layout.ACKED_EARLY, stream)
        elif kind == fl.LOG_ERROR or kind == fl.LOG_ABORTED:
            fault(world, layout.PROTOCOL, stream)
    store(log, 0)


# ---- what a side does


@inline
def pump(world: int, number: int) -> None:
    """Let a side send what it wants to send, and set its timer."""
    side = side_of(world, number)
    flow, port = load(side + layout.FLOW), load(side + layout.PORT)
    now = load(world + layout.TIME) + load(side + layout.OFFSET)
    if load(port + fl.PORT_BUDGET) != 0:
        issue_grants(load(side + layout.ENGINE), port, now)
    out, calls = load(port + fl.PORT_OUT), 0
    while load(world + layout.FAULT) == 0 and next_packet(flow, now, out) != 0:
        check_packet(world, number, out)
        build(port, flow)
        transmit(world, number, load(out + fl.OUT_PATH))
        calls += 1
        if calls > MAX_CALLS:
            fault(world, layout.ENDLESS_SENDING, number)
    check_side(world, number)
    due, grants = flow_timer(flow, now), credit_timer(load(side + layout.ENGINE), port, now)
    if due == 0 or (grants != 0 and grants < due):
        due = grants
    wake = 0
    if due != 0:
        wake = max(due, now + 1) - load(side + layout.OFFSET)
    store(side + layout.WAKE_AT, wake)


@inline
def wake(world: int, number: int, forced: bool) -> None:
    """Let a side look at its clock."""
    side = side_of(world, number)
    flow, now = load(side + layout.FLOW), load(world + layout.TIME) + load(side + layout.OFFSET)
    due = flow_timer(flow, now)
    if forced or (due != 0 and due <= now):
        flow_on_timer(flow, now)
        read_log(world, number)
    pump(world, number)


@inline
def arrive(world: int, slot: int) -> None:
    """Give a packet to the side that it was sent to."""
    copy, nfree = buffer_of(world, slot), load(world + layout.NFREE)
    word = load(copy)
    number = word & 1
    side = side_of(world, number)
    port = load(side + layout.PORT)
    before = load(port + fl.PORT_STRANGERS)
    now = load(world + layout.TIME) + load(side + layout.OFFSET)
    on_datagram(port, copy + 8, word >> 2, 0, now)
    refused = load(port + fl.PORT_STRANGERS) - before
    if word & 2 != 0 and refused == 0:
        fault(world, layout.ACCEPTED, slot)
    elif word & 2 == 0 and refused != 0:
        fault(world, layout.REFUSED, slot)
    if refused != 0:
        count(world, layout.REJECTED)
    store(load(world + layout.FREE) + 8 * nfree, slot)
    store(world + layout.NFREE, nfree + 1)
    read_log(world, number)
    pump(world, number)


@inline
def submit(world: int, index: int) -> None:
    """Queue a frame on its stream."""
    frame = frame_of(world, index)
    number, stream = load(frame + layout.FRAME_SIDE), load(frame + layout.FRAME_STREAM)
    side, length = side_of(world, number), load(frame + layout.FRAME_LENGTH)
    submitted = load(side + layout.SUBMITTED + 8 * stream)
    row = stream * layout.MAX_FRAMES + submitted
    store(side + layout.STREAM_FRAMES + 8 * row, index)
    store(side + layout.SUBMITTED + 8 * stream, submitted + 1)
    payload = load(side + layout.SOURCE) + index * layout.FRAME_STRIDE
    entry = link_layout.CONTROL_ENTRY
    enqueue(load(side + layout.LINK), stream, 1, 0, 0, length, 0, length, 0, payload, entry)
    pump(world, number)


# ---- one history


@inline
def draw_link(world: int, link: int) -> None:
    """Draw a link's rate, latency, queue and faults."""
    rate, latency, jitter = below(world, 3), below(world, 3), below(world, 3)
    store(link + layout.RATE, 20 if rate == 0 else (500 if rate == 1 else 10_000))  # Mbit/s
    store(link + layout.LATENCY, 0 if latency == 0 else (50 * US if latency == 1 else 5 * MS))
    store(link + layout.JITTER, 0 if jitter == 0 else (200 * US if jitter == 1 else 20 * MS))
    store(link + layout.QUEUE, 20_000 if below(world, 2) == 0 else 300_000)
    store(link + layout.LOSS, 800_000 if below(world, 6) == 0 else probability(world))
    store(link + layout.DUPLICATE, probability(world))
    store(link + layout.CORRUPT, probability(world))
    store(link + layout.UP, 1)
    store(link + layout.FREE_AT, 0)
    store(link + layout.MTU, 1300 if below(world, 8) == 0 else 1 << 16)


@inline
def start_side(world: int, number: int, controller: int, validates: bool) -> None:
    """Reset a side to its beginning."""
    side = side_of(world, number)
    flow, link = load(side + layout.FLOW), load(side + layout.LINK)
    template = load(load(side + layout.FLOW_TEMPLATES) + 8 * controller)
    mtu = 9000 if below(world, 4) == 0 else 1472  # links that lose large packets: ``draw_link``
    for index in range(layout.MAX_NPATHS):
        path = flow + fl.FLOW_BYTES + index * fl.PATH_BYTES
        for position in range(min(REMEMBERED, load(path + fl.PATH_ORDER))):
            store(sent_at(path, position) + fl.SENT_STATE, fl.FREE)
        memcpy(path, template + fl.FLOW_BYTES + index * fl.PATH_BYTES, fl.PATH_SENT)
        store(path + fl.PATH_MTU, mtu)
        store(path + fl.PATH_FULL_MTU, mtu)
        if validates:
            store(path + fl.PATH_STATE, fl.PROBING)
            store(path + fl.PATH_PROBES, 1)
            store(path + fl.PATH_PROBE_AT, load(world + layout.TIME) + PROBE_FIRST_NS)
    memcpy(flow, template, fl.FLOW_BYTES)
    streams = fl.FLOW_BYTES + layout.MAX_NPATHS * fl.PATH_BYTES
    memcpy(flow + streams, template + streams, layout.NSTREAMS * fl.FSTREAM_BYTES)
    memcpy(link, load(side + layout.LINK_TEMPLATE), link_layout.LINK_STREAMS)
    for index in range(layout.NSTREAMS):
        stream = link + link_layout.LINK_STREAMS + index * link_layout.STREAM_BYTES
        store(stream + link_layout.STREAM_HEAD, 0)
        store(stream + link_layout.STREAM_COUNT, 0)
        store(stream + link_layout.STREAM_QUEUED_BYTES, 0)
    store(flow + fl.FLOW_PATHS, flow + fl.FLOW_BYTES)
    store(flow + fl.FLOW_STREAMS, flow + streams)
    store(flow + fl.FLOW_NPATHS, load(world + layout.NPATHS))
    store(flow + fl.FLOW_LOG, load(side + layout.LOG))
    store(flow + fl.FLOW_LANDING, load(side + layout.LANDING))
    store(flow + fl.FLOW_ADMITTED, UNSOLICITED_BYTES)
    store(load(side + layout.LOG), 0)
    for offset in range(layout.SUBMITTED, layout.STREAM_FRAMES, 8):
        store(side + offset, 0)
    store(side + layout.OFFSET, 0)
    store(side + layout.WAKE_AT, 0)


@inline
def draw_admission(world: int, number: int) -> None:
    """Let a side grant what its peer sends, or not."""
    side, peer = side_of(world, number), side_of(world, 1 - number)
    flow, port, budget, rate = load(side + layout.FLOW), load(side + layout.PORT), 0, 0
    if below(world, 10) < 3:
        budget = 64 << 10 if below(world, 2) == 0 else 1 << 20
        rate = 0 if below(world, 2) == 0 else 50_000_000
        store(load(peer + layout.FLOW) + fl.FLOW_GRANTED, UNSOLICITED_BYTES)
        store(flow + fl.FLOW_ADMITS, 1)
    store(port + fl.PORT_BUDGET, budget)
    store(port + fl.PORT_ALLOWANCE, budget)
    store(port + fl.PORT_CREDIT_RATE, rate)
    store(port + fl.PORT_REFILLED, 0)


@inline
def draw_frame(world: int, index: int, longest: int) -> None:
    """Draw a frame with its bytes, and when it is sent."""
    frame, number = frame_of(world, index), below(world, 2)
    which, length = below(world, 4), 0
    if which == 1:
        length = 1
    elif which == 2:
        length = below(world, 1200)
    elif which == 3:
        length = below(world, longest)
    store(frame + layout.FRAME_SIDE, number)
    store(frame + layout.FRAME_STREAM, below(world, layout.NSTREAMS))
    store(frame + layout.FRAME_LENGTH, length)
    payload = load(side_of(world, number) + layout.SOURCE) + index * layout.FRAME_STRIDE
    for i in range((length + 7) // 8):
        store(payload + 8 * i, draw(world) * 5)
    at = load(world + layout.TIME)
    if below(world, 4) == 0:
        at += below(world, 300 * MS)
    push(world, at, SUBMIT | index << 8)


@inline
def draw_faults(world: int) -> None:
    """Draw cuts of links, each repaired later, and jumps of clocks."""
    npaths, start = load(world + layout.NPATHS), load(world + layout.TIME)
    which = below(world, 5)
    for _ in range(0 if which < 2 else (which - 1 if which < 4 else 4)):
        link, cut = below(world, 2 * npaths), start + below(world, 500 * MS)
        length = below(world, 4)
        span = MS if length == 0 else (30 * MS if length == 1 else 300 * MS)
        if length == 3:
            span = 3 * SECOND
        push(world, cut, SWITCH | link << 9)
        push(world, cut + span, SWITCH | 1 << 8 | link << 9)
    which = below(world, 4)
    for _ in range(0 if which < 2 else (1 if which == 2 else 3)):
        kind = below(world, 3)
        jump = MS if kind == 0 else (SECOND if kind == 1 else 3600 * SECOND)
        push(world, start + below(world, 300 * MS), JUMP | below(world, 2) << 8 | jump << 9)


@inline
def finished(world: int) -> bool:
    """Return True if the peer has acknowledged every frame."""
    done = 0
    for number in range(2):
        for stream in range(layout.NSTREAMS):
            done += load(side_of(world, number) + layout.ACKED + 8 * stream)
    return done == load(world + layout.NFRAMES)


@inline
def step(world: int) -> bool:
    """Let the next thing happen; return False if there is none."""
    a = load(side_of(world, 0) + layout.WAKE_AT)
    b = load(side_of(world, 1) + layout.WAKE_AT)
    number, at = 0, a
    if a == 0 or (b != 0 and b < a):
        number, at = 1, b
    if load(world + layout.HEAP_COUNT) != 0:
        first = load(load(world + layout.HEAP))
        if at == 0 or first <= at:
            store(world + layout.TIME, max(first, load(world + layout.TIME)))
            happen(world, pop(world))
            return True
    if at == 0:
        return False
    store(world + layout.TIME, max(at, load(world + layout.TIME)))
    wake(world, number, False)
    return True


@inline
def happen(world: int, what: int) -> None:
    """Carry out an event."""
    kind, argument = what & 255, what >> 8
    if kind == ARRIVE:
        arrive(world, argument)
    elif kind == SUBMIT:
        submit(world, argument)
    elif kind == JUMP:
        side = side_of(world, argument & 1)
        store(side + layout.OFFSET, load(side + layout.OFFSET) + (argument >> 1))
        wake(world, argument & 1, True)
    else:
        npaths = load(world + layout.NPATHS)
        link = argument >> 1
        store(link_of(world, link // npaths, link % npaths) + layout.UP, argument & 1)


@inline
def run_history(world: int, seed: int) -> None:
    """Run one history."""
    store(world + layout.DRAW, seed * 2 + 1)
    store(world + layout.TIME, SECOND)
    store(world + layout.HEAP_COUNT, 0)
    store(world + layout.NFREE, layout.NPACKETS)
    for slot in range(layout.NPACKETS):
        store(load(world + layout.FREE) + 8 * slot, slot)
    npaths = 1 + below(world, layout.MAX_NPATHS)
    store(world + layout.NPATHS, npaths)
    controller, validates = below(world, load(world + layout.CONTROLLERS)), below(world, 2) != 0
    # by libcrypto where the processor has no instructions for AES
    mode = 1 + below(world, 4 if aegis_compiled() != 0 else 2)
    if load(world + layout.PROTECTION) >= 0:
        mode = load(world + layout.PROTECTION)
    for number in range(2):
        start_side(world, number, controller, validates)
        side = side_of(world, number)
        flow, key = load(side + layout.FLOW), load(side + layout.AEGIS_KEY)
        has_key = mode >= fl.PROTECT_AEGIS_MAC
        store(flow + fl.FLOW_PROTECTION, mode)
        store(flow + fl.FLOW_SEAL, key if has_key else load(side + layout.SEAL))
        store(flow + fl.FLOW_OPEN, key if has_key else load(side + layout.OPEN))
        for path in range(npaths):
            draw_link(world, link_of(world, number, path))
    draw_admission(world, 0)
    draw_admission(world, 1)
    nframes, longest = 1 + below(world, layout.MAX_FRAMES), 4000
    if below(world, 20) == 0:
        longest = layout.FRAME_BYTES
    store(world + layout.NFRAMES, nframes)
    for index in range(nframes):
        draw_frame(world, index, longest)
    draw_faults(world)
    pump(world, 0)
    pump(world, 1)
    events, going = 0, True
    while going and load(world + layout.FAULT) == 0 and not finished(world):
        going = step(world)
        events += 1
        if events > MAX_EVENTS or load(world + layout.TIME) > LIMIT_NS:
            fault(world, layout.ENDLESS, events)
    if load(world + layout.FAULT) == 0 and not finished(world):
        fault(world, layout.MISSING, events)
    count(world, layout.HISTORIES)
    store(world + layout.FRAMES, load(world + layout.FRAMES) + nframes)
    store(world + layout.EVENTS, load(world + layout.EVENTS) + events)


def run_histories(world: int, first: int, number: int) -> int:
    """Run histories by seed; return the seed of the first with a violation, -1 for none."""
    for seed in range(first, first + number):
        run_history(world, seed)
        if load(world + layout.FAULT) != 0:
            return seed
    return -1


EXPORTS: dict[str, Any] = {"run_histories": run_histories}
for _name, _controller in CONTROLLERS.items():
    EXPORTS[f"{_name}_acked"] = _controller.acked
    EXPORTS[f"{_name}_lost"] = _controller.lost
    EXPORTS[f"{_name}_timeout"] = _controller.timeout
    EXPORTS[f"{_name}_undo"] = _controller.undo
