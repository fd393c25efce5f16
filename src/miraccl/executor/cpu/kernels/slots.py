"""Which slot a message lies in, and slots that change hands.

A receiver gives a slot back for every message, but not always the one it came in: it may keep the slot it has just read, for a message the
other way, and give one of its own that it has not used for longest (``swap``).  Why: where cores have large caches of their own, a line
that a core reads from another one's cache moves there.  To write it again where it came from costs as much as reading it did; to write
it where it was read costs nothing.  So an exchange fetches each line once per message instead of twice.

Slots are numbered as the sender sees them: below NSLOTS those of its FIFO's memory, above those of the FIFO the other way.  A send
connection has its free slots in ``CONN_FREE``, a byte each, the next one lowest; from ``CONN_WARM`` on none of them has been read.
``CONN_SENT`` says which slots are under way, a byte for each place in the ring of messages: 1 + number, 0 for a message without a slot.
In the same way the word behind the tail says which slots came back, where it is not the message's own; ``CONN_RETURNED`` is what the
receiver wrote there.  Of NSLOTS slots as many are free as the ring has free places, or more, so whoever has a place has a slot.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load, load_acquire, store, store_release

#: Slots that are used before one that has just been read: an exchange of 128 KiB takes 13.6 us through slots of 64 KiB that were read just
#: before, and 10.7 through those read one slot earlier, which have left the first-level cache (Intel Emerald Rapids).
COOLING_SLOTS = 2
#: Swapping uses so many of the free slots, and leaves out messages of more pieces that come alone: ping-pong of 1 MiB was a fifth slower
#: with all eight (second-level cache of 2 MiB), and with four that of 384 KiB to 2 MiB up to a quarter in one run of two.
MAX_SWAP_SLOTS = 4


@inline
def post_line(conn: int) -> int:
    return (
        load(conn + layout.CONN_DESCS)
        + (load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)) * layout.LINE
    )


@inline
def byte_shift(message: int) -> int:
    """Where the byte of a message is in a word of NSLOTS bytes."""
    return (message & (layout.NSLOTS - 1)) * 8


@inline
def with_byte(word: int, bits: int, value: int) -> int:
    return (word & ~(0xFF << bits)) | (value << bits)


@inline
def slot_address(conn: int, number: int) -> int:
    start = (
        load(conn + layout.CONN_SLOTS)
        if number < layout.NSLOTS
        else load(conn + layout.CONN_REVERSE_SLOTS)
    )
    return start + (number & (layout.NSLOTS - 1)) * load(conn + layout.CONN_SLOT_BYTES)


@inline
def next_slot(conn: int) -> int:
    """Number of the slot for the next message of a send connection that has a place for it. The proxy takes them in turn."""
    if load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS != 0:
        return load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)
    return load(conn + layout.CONN_FREE) & 0xFF


@inline
def next_slot_address(conn: int) -> int:
    """Its address."""
    return slot_address(conn, next_slot(conn))


@inline
def claim_slot(conn: int) -> int:
    """``next_slot`` goes with the message that is about to be posted; the mode that tells where it is."""
    number, message = next_slot(conn), load(conn + layout.CONN_COUNT)
    if load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS == 0:
        store(conn + layout.CONN_FREE, load(conn + layout.CONN_FREE) >> 8)
        store(conn + layout.CONN_NFREE, load(conn + layout.CONN_NFREE) - 1)
        store(conn + layout.CONN_WARM, max(0, load(conn + layout.CONN_WARM) - 1))
        store(
            conn + layout.CONN_SENT,
            with_byte(load(conn + layout.CONN_SENT), byte_shift(message), number + 1),
        )
    if number == message & (layout.NSLOTS - 1):
        return layout.MODE_SLOT
    store(post_line(conn) + layout.DESC_ADDR, number)
    return layout.MODE_MOVED


@inline
def received_slot(conn: int) -> int:
    """Number of the slot that the message just received lies in (of modes SLOT and MOVED)."""
    line = post_line(conn)
    if load(line + layout.DESC_MODE) == layout.MODE_MOVED:
        return load(line + layout.DESC_ADDR)
    return load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)


@inline
def poll_tail(conn: int) -> int:
    """How many messages the receiver has taken by now; slots that came back for them are free, to be used after all others."""
    address = load(conn + layout.CONN_TAIL_ADDR)
    tail = load_acquire(address)
    sent = load(conn + layout.CONN_SENT)
    if sent != 0:
        returned, free, nfree = (
            load_acquire(address + layout.TAIL_RETURNED),
            load(conn + layout.CONN_FREE),
            load(conn + layout.CONN_NFREE),
        )
        for message in range(load(conn + layout.CONN_TAIL), tail):
            bits = byte_shift(message)
            used, other = sent >> bits & 0xFF, returned >> bits & 0xFF
            if used != 0:
                free |= ((used if other == 0 else other) - 1) << 8 * nfree
                nfree += 1
                sent = with_byte(sent, bits, 0)
        store(conn + layout.CONN_SENT, sent)
        store(conn + layout.CONN_FREE, free)
        store(conn + layout.CONN_NFREE, nfree)
    store(conn + layout.CONN_TAIL, tail)
    return tail


@inline
def required_tail(conn: int) -> int:
    """How many messages of a send connection the peer must have taken for the next one to have a place."""
    return load(conn + layout.CONN_COUNT) - (layout.NSLOTS - 1)


@inline
def has_free_slot(conn: int) -> bool:
    """Whether the next message has a place."""
    need = required_tail(conn)
    return load(conn + layout.CONN_TAIL) >= need or poll_tail(conn) >= need


@inline
def swap_slot(ctx: int, conn: int) -> int:
    """Keep the slot of the message just received and give another one: 1 + its number. 0 if there is none to give."""
    out = load(ctx + layout.CTX_SEND) + conn - load(ctx + layout.CTX_RECV)
    nfree = load(out + layout.CONN_NFREE)
    if load(out + layout.CONN_WARM) >= nfree and nfree < layout.NSLOTS:
        poll_tail(out)
        nfree = load(out + layout.CONN_NFREE)
    place = max(load(out + layout.CONN_WARM), min(COOLING_SLOTS, nfree - 1))
    if place >= min(nfree, MAX_SWAP_SLOTS):
        return 0
    free, bits = load(out + layout.CONN_FREE), 8 * place
    store(out + layout.CONN_FREE, with_byte(free, bits, received_slot(conn) ^ layout.NSLOTS))
    store(out + layout.CONN_WARM, place + 1)
    return ((free >> bits & 0xFF) ^ layout.NSLOTS) + 1


@inline
def return_slot(ctx: int, conn: int, swaps: bool) -> None:
    """Say which slot comes back for the message just received, another one only if ``swaps``; its sender looks once the tail has moved."""
    mode, returned, number = (
        load(post_line(conn) + layout.DESC_MODE),
        load(conn + layout.CONN_RETURNED),
        0,
    )
    if mode == layout.MODE_SLOT or mode == layout.MODE_MOVED:
        if swaps and load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS == 0:
            number = swap_slot(ctx, conn)
    elif returned == 0:
        return
    news = with_byte(returned, byte_shift(load(conn + layout.CONN_COUNT)), number)
    if news != returned:
        store(conn + layout.CONN_RETURNED, news)
        store_release(load(conn + layout.CONN_TAIL_ADDR) + layout.TAIL_RETURNED, news)
