"""Sizes that Python and compiled code compute alike (``kernels.counts`` compiles these
functions).
"""

from __future__ import annotations

from typing import Final

ALIGN: Final = 64  # bytes; chunks of at least MIN_ALIGNED bytes begin on a cache line
MIN_ALIGNED: Final = 512
#: Block size assumed by plans of operations whose ranks do not know each other's sizes.
UNKNOWN_BYTES: Final = 1 << 20
#: Largest segment of a send between hosts, where connections deliver in place.
NET_SEGMENT_BYTES: Final = 8 << 20
#: There a send of more than ``NET_LEAD_FROM`` bytes (the largest slot) starts with a segment that
#: fits into a slot: it leaves at once, and the CTS of the rest arrives during that time.
NET_LEAD_FROM: Final = 1 << 20
#: Bytes of the first segment: this binary fraction of the message in whole pages, at least these.
NET_LEAD_SHIFT: Final = 4
NET_LEAD_BYTES: Final = 1 << 18
NET_LEAD_ALIGN: Final = 4096


def chunk_bytes(nbytes: int, parts: int, itemsize: int) -> int:
    """Return the bytes of every chunk of a block but the last: whole elements, and from 512 bytes
    on
    whole cache lines.
    """
    size = -(-(nbytes // itemsize) // parts) * itemsize
    return -(-size // ALIGN) * ALIGN if size >= MIN_ALIGNED else max(size, itemsize)


def lead_bytes(nbytes: int, segment: int, in_place: bool) -> int:
    """Return the largest size of the first segment of a message, ``segment`` being that of others.

    ``in_place``: the connection delivers in place.
    """
    if in_place and nbytes > NET_LEAD_FROM:
        share = (nbytes >> NET_LEAD_SHIFT) & -NET_LEAD_ALIGN
        return min(NET_LEAD_FROM, max(NET_LEAD_BYTES, share))
    return segment


def count_segments(nbytes: int, lead: int, segment: int) -> int:
    """Return the number of segments of a message whose first one has at most ``lead`` bytes."""
    return 1 if nbytes <= lead else 1 + -(-(nbytes - lead) // segment)


def size_class(nbytes: int) -> int:
    """Return the size class, named by its smallest size, in which uneven operations share a plan.

    There are four classes to a doubling.
    """
    shift = 0
    while nbytes >> shift >= 8:
        shift += 1
    return nbytes >> shift << shift


def count_hash(count: int) -> int:
    """Return 23 bits of a count, for signatures."""
    return (count * 0x9E3779B1) & 0x7FFFFF
