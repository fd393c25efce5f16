"""Sizes that Python and compiled code compute alike (``kernels.counts`` compiles these
functions).
"""

from __future__ import annotations

from typing import Final

ALIGN: Final = 64  # bytes; chunks of at least MIN_ALIGNED bytes begin on a cache line
MIN_ALIGNED: Final = 512
#: Block size assumed by plans of operations whose ranks do not know each other's sizes.
UNKNOWN_BYTES: Final = 1 << 20


def chunk_bytes(nbytes: int, parts: int, itemsize: int) -> int:
    """Return the bytes of every chunk of a block but the last: whole elements, and from 512 bytes
    on
    whole cache lines.
    """
    size = -(-(nbytes // itemsize) // parts) * itemsize
    return -(-size // ALIGN) * ALIGN if size >= MIN_ALIGNED else max(size, itemsize)


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
