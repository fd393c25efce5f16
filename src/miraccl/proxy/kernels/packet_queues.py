"""Kernel source: packets on unreliable queue pairs.

Every packet is copied into a registered buffer of the transport and posted as a SEND; it arrives in
a receive buffer of the peer's transport. So no memory of the application is registered, and a copy
of a packet that arrives late can only fill a receive buffer that waits for packets
(docs/design/verbs.md, Unreliable queue pairs).
"""

from __future__ import annotations

from miraccl.native import verbs_abi as abi
from miraccl.native.intrinsics import call4, inline, load, load32, memcpy, store, store32
from miraccl.proxy.kernels import queue_layout as layout

EIO, EAGAIN, EMSGSIZE = 5, 11, 90
WR_SEND, SIGNALED, SOLICITED = abi.WR_SEND, abi.SEND_SIGNALED, abi.SEND_SOLICITED
#: Bytes of packets that are posted by one call: the copies of the first ones are on their way while
#: the next ones are made.
CHAIN_BYTES = 1 << 17
_STATUS, _BYTES = 8, 20  # in ibv_wc
#: Polls of a full ring of send buffers before a packet counts as lost.
FULL_POLLS = 10_000


@inline
def device_at(table: int, index: int) -> int:
    """Address of a device's record."""
    return table + layout.TABLE_FIRST + index * layout.DEVICE_BYTES


@inline
def note_failure(pair: int, status: int) -> None:
    """Record an error of a queue pair, for Python."""
    device = load(pair + layout.PAIR_DEVICE)
    if load(pair + layout.PAIR_STATUS) == 0:
        store(pair + layout.PAIR_STATUS, status)
    store(device + layout.DEVICE_FAILED, load(device + layout.DEVICE_FAILED) + 1)


@inline
def poll_cq(device: int, queue: int) -> int:
    """Poll a completion queue into the device's records; return how many came."""
    wc = device + layout.DEVICE_WC
    got = call4(load(device + layout.DEVICE_POLL), queue, layout.MAX_WC, wc, 0)
    return max(0, (got << 32) >> 32)


@inline
def reap_sends(device: int) -> None:
    """Account for completed sends of all queue pairs of a device."""
    going = True
    while going:
        count = poll_cq(device, load(device + layout.DEVICE_SEND_CQ))
        for i in range(count):
            wc = device + layout.DEVICE_WC + i * layout.WC_BYTES
            number = load(wc)
            pair, slot = number & layout.PAIR_MASK, number >> layout.SLOT_SHIFT
            slots, done = load(pair + layout.PAIR_SEND_SLOTS), load(pair + layout.PAIR_DONE)
            store(pair + layout.PAIR_DONE, done + ((slot - done) & (slots - 1)) + 1)
            status = load32(wc + _STATUS)
            if status != 0:
                note_failure(pair, status)
        going = count == layout.MAX_WC


@inline
def has_send_buffer(pair: int) -> bool:
    """Wait a moment for a free send buffer; return False if there is none."""
    polls, slots = 0, load(pair + layout.PAIR_SEND_SLOTS)
    while load(pair + layout.PAIR_SENT) - load(pair + layout.PAIR_DONE) >= slots:
        if polls >= FULL_POLLS or load(pair + layout.PAIR_STATUS) != 0:
            return False
        reap_sends(load(pair + layout.PAIR_DEVICE))
        polls += 1
    return True


@inline
def gather(vectors: int, first: int, stop: int, target: int, most: int) -> int:
    """Copy iovecs to a buffer; return their bytes, ``most + 1`` if there are more."""
    at = 0
    for i in range(first, stop):
        size = load(vectors + 16 * i + 8)
        if at + size > most:
            return most + 1
        memcpy(target + at, load(vectors + 16 * i), size)
        at += size
    return at


@inline
def append_packet(pair: int, address: int, vectors: int, first: int, stop: int) -> int:
    """Append iovecs, as one packet to ``address`` (16 bytes), to the requests that
    ``post_packets`` posts; return 0 or an errno.
    """
    if load(pair + layout.PAIR_STATUS) != 0:
        return EIO
    slots, count = load(pair + layout.PAIR_SEND_SLOTS), load(pair + layout.PAIR_CHAIN)
    full = load(pair + layout.PAIR_SENT) - load(pair + layout.PAIR_DONE) >= slots
    most = load(pair + layout.PAIR_SLOT_BYTES)
    if full or count == layout.NCHAIN or count * most >= CHAIN_BYTES:
        code = post_packets(pair, 0)
        if code != 0:
            return code
        count = 0
    if full and not has_send_buffer(pair):
        return EAGAIN
    sent = load(pair + layout.PAIR_SENT)
    slot = sent & (slots - 1)
    buffer = load(pair + layout.PAIR_SEND_BUFFER) + slot * most
    size = gather(vectors, first, stop, buffer, most)
    if size > most:
        return EMSGSIZE
    wr = pair + layout.PAIR_SEND_WR + count * layout.SEND_WR_BYTES
    sge = pair + layout.PAIR_SEND_SGE + count * layout.SGE_BYTES
    if count > 0:
        store(wr - layout.SEND_WR_BYTES + 8, wr)
    store(sge, buffer)
    store32(sge + 8, size)
    store32(sge + 12, load(pair + layout.PAIR_KEY))
    flags = 0
    if slot & (layout.SIGNAL_EVERY - 1) == layout.SIGNAL_EVERY - 1:
        flags = SIGNALED
    store(wr, pair | slot << layout.SLOT_SHIFT)
    store(wr + 8, 0)
    store(wr + 16, sge)
    store(wr + 24, 1 | WR_SEND << 32)
    store(wr + 32, flags)
    memcpy(wr + layout.WR_ADDRESS, address, layout.ADDRESS_BYTES)
    store(pair + layout.PAIR_CHAIN, count + 1)
    store(pair + layout.PAIR_SENT, sent + 1)
    return 0


@inline
def post_packets(pair: int, flags: int) -> int:
    """Post the appended packets by one call, which is a system call with Soft-RoCE; return 0 or
    EIO, after which the queue pair is reset. ``flags``: more of the last one.
    """
    count = load(pair + layout.PAIR_CHAIN)
    if count == 0:
        return 0
    store(pair + layout.PAIR_CHAIN, 0)
    store(pair + layout.PAIR_POSTS, load(pair + layout.PAIR_POSTS) + 1)
    wr, bad = pair + layout.PAIR_SEND_WR, pair + layout.PAIR_BAD
    last = wr + (count - 1) * layout.SEND_WR_BYTES
    store(last + 32, load(last + 32) | flags)
    post, qp = load(pair + layout.PAIR_POST_SEND), load(pair + layout.PAIR_QP)
    code = (call4(post, qp, wr, bad, 0) << 32) >> 32
    if code != 0:
        note_failure(pair, code)
        return EIO
    return 0


@inline
def post_receive(pair: int, slot: int) -> int:
    """Post one receive buffer; return 0 or an errno."""
    size = load(pair + layout.PAIR_RECV_BYTES)
    wr, sge = pair + layout.PAIR_RECV_WR, pair + layout.PAIR_RECV_SGE
    store(sge, load(pair + layout.PAIR_RECV_BUFFER) + slot * size)
    store32(sge + 8, size)
    store32(sge + 12, load(pair + layout.PAIR_KEY))
    store(wr, pair | slot << layout.SLOT_SHIFT)
    store(wr + 8, 0)
    store(wr + 16, sge)
    store(wr + 24, 1)
    qp, bad = load(pair + layout.PAIR_QP), pair + layout.PAIR_BAD
    return (call4(load(pair + layout.PAIR_POST_RECV), qp, wr, bad, 0) << 32) >> 32


@inline
def received_packet(wc: int) -> int:
    """Return the address of a received packet, 0 for a receive that failed."""
    number = load(wc)
    pair, slot = number & layout.PAIR_MASK, number >> layout.SLOT_SHIFT
    status = load32(wc + _STATUS)
    if status != 0:
        note_failure(pair, status)
        return 0
    size = load(pair + layout.PAIR_RECV_BYTES)
    return load(pair + layout.PAIR_RECV_BUFFER) + slot * size + load(pair + layout.PAIR_HEADER)


@inline
def received_bytes(wc: int) -> int:
    """Return the size of a received packet."""
    pair = load(wc) & layout.PAIR_MASK
    return (load32(wc + _BYTES) & 0xFFFFFFFF) - load(pair + layout.PAIR_HEADER)


@inline
def repost(wc: int) -> None:
    """Post the buffer of a processed receive again, unless its queue pair has failed."""
    number = load(wc)
    pair = number & layout.PAIR_MASK
    if load(pair + layout.PAIR_STATUS) == 0:
        code = post_receive(pair, number >> layout.SLOT_SHIFT)
        if code != 0:
            note_failure(pair, code)


@inline
def take_event(device: int, result: int) -> bool:
    """Take one event of a completion channel, which does not block; return False if there is none.

    ``result``: two words, queue and context.
    """
    take, channel = load(device + layout.DEVICE_GET_EVENT), load(device + layout.DEVICE_CHANNEL)
    if call4(take, channel, result, result + 8, 0) << 32 != 0:
        return False
    call4(load(device + layout.DEVICE_ACK_EVENTS), load(result), 1, 0, 0)
    return True


@inline
def arm(table: int) -> None:
    """Ask all receive queues for an event at the end of what a peer sends together."""
    for index in range(load(table + layout.TABLE_COUNT)):
        device = device_at(table, index)
        queue = load(device + layout.DEVICE_RECV_CQ)
        call4(load(device + layout.DEVICE_NOTIFY), queue, 1, 0, 0)


@inline
def failures(table: int) -> int:
    """Return the number of errors of all devices."""
    total = 0
    for index in range(load(table + layout.TABLE_COUNT)):
        total += load(device_at(table, index) + layout.DEVICE_FAILED)
    return total
