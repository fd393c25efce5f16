"""Slots of messages, and slots that change hands.

A receiver returns one slot for every message, but not always the message's own: it may keep the
slot it has just read, for a message in the other direction, and return the one of its own that was
unused for longest (``swap_slot``). Where cores have large private caches, a line that a core reads
from another one's cache moves there; writing it where it came from costs as much as reading it did,
writing it where it was read costs nothing. So an exchange fetches each line once per message
instead of twice.

Slots are numbered as the sender sees them: below NSLOTS those of its FIFO's memory, from NSLOTS on
those of the FIFO in the other direction. ``CONN_FREE`` of a send connection lists its free slots, a
byte each, the next one lowest; from position ``CONN_WARM`` on none of them has been read.
``CONN_SENT`` has a byte for each message in the ring: 1 + its slot, 0 for a message without a slot.
In the same way the word after the tail names returned slots that are not the message's own;
``CONN_RETURNED`` is the receiver's copy of it. At least as many of the NSLOTS slots are free as the
ring has free lines, so a free line implies a free slot.
"""

from __future__ import annotations

from miraccl.executor.cpu.kernels import layout
from miraccl.native.intrinsics import inline, load, load_acquire, store, store_release

#: Number of slots used before one that was read last. An exchange of 128 KiB takes 13.6 us through
#: slots of 64 KiB that were read immediately before, and 10.7 us through those read one slot
#: earlier, which have left the first-level cache (Intel Emerald Rapids).
COOLING_SLOTS = 2
#: Number of free slots that swapping uses; messages of more segments that progress alone do not
#: swap. Ping-pong of 1 MiB was a fifth slower with all eight (second-level cache of 2 MiB), and
#: with
#: four that of 384 KiB to 2 MiB was up to a quarter slower in one run of two.
MAX_SWAP_SLOTS = 4


@inline
def descriptor_line(conn: int) -> int:
    """Return the descriptor line of a connection's current message."""
    return (
        load(conn + layout.CONN_DESCS)
        + (load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)) * layout.LINE
    )


@inline
def byte_shift(message: int) -> int:
    """Return the bit position of a message's byte in a word of NSLOTS bytes."""
    return (message & (layout.NSLOTS - 1)) * 8


@inline
def with_byte(word: int, bits: int, value: int) -> int:
    """Return ``word`` with the byte at bit position ``bits`` replaced."""
    return (word & ~(0xFF << bits)) | (value << bits)


@inline
def slot_address(conn: int, number: int) -> int:
    """Return the address of a slot."""
    start = (
        load(conn + layout.CONN_SLOTS)
        if number < layout.NSLOTS
        else load(conn + layout.CONN_REVERSE_SLOTS)
    )
    return start + (number & (layout.NSLOTS - 1)) * load(conn + layout.CONN_SLOT_BYTES)


@inline
def next_slot(conn: int) -> int:
    """Return the number of the slot for the next message of a send connection with a free line.

    A proxy takes the slots in turn.
    """
    if load(conn + layout.CONN_CAPS) & layout.CAP_NEEDS_PROGRESS != 0:
        return load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)
    return load(conn + layout.CONN_FREE) & 0xFF


@inline
def next_slot_address(conn: int) -> int:
    """Return the address of the slot for the next message."""
    return slot_address(conn, next_slot(conn))


@inline
def claim_slot(conn: int) -> int:
    """Use ``next_slot`` for the message that is being posted; return the mode that names it."""
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
    store(descriptor_line(conn) + layout.DESC_ADDR, number)
    return layout.MODE_MOVED


@inline
def received_slot(conn: int) -> int:
    """Return the slot number of the received message (modes SLOT and MOVED)."""
    line = descriptor_line(conn)
    if load(line + layout.DESC_MODE) == layout.MODE_MOVED:
        return load(line + layout.DESC_ADDR)
    return load(conn + layout.CONN_COUNT) & (layout.NSLOTS - 1)


@inline
def poll_tail(conn: int) -> int:
    """Return the number of messages that the receiver has consumed, and reclaim the returned slots.

    These are used after all other free ones.
    """
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
    """Return the number of messages the peer must have consumed for the next one to have a line."""
    return load(conn + layout.CONN_COUNT) - (layout.NSLOTS - 1)


@inline
def has_free_slot(conn: int) -> bool:
    """Return True if the next message has a free line and slot."""
    need = required_tail(conn)
    return load(conn + layout.CONN_TAIL) >= need or poll_tail(conn) >= need


@inline
def swap_slot(ctx: int, conn: int) -> int:
    """Keep the slot of the received message; return 1 + the slot to give back, 0 for none."""
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
    """Return a slot for the received message, another one than its own only if ``swaps``.

    The sender reads it after the tail has moved.
    """
    mode, returned, number = (
        load(descriptor_line(conn) + layout.DESC_MODE),
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
