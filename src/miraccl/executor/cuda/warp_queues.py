"""Mapping of messages to warp queues, computed by Python and by compiled code alike.

``fastpath.cuda.templates`` compiles these functions.
"""

from __future__ import annotations

from typing import Final

WARPS: Final = 16  # of a block, at most; one block per multiprocessor is always resident
COPY_BYTES: Final = 16 << 10  # per warp, of a message of a rank to itself
#: Messages of a launch that needs at most 128 warps: total bytes and number.
SMALL_BYTES: Final = 128 << 10
SMALL_COUNT: Final = 32
#: Maximum threads of a launch set up while the previous one runs: registers of less than two
#: multiprocessors.
OVERLAP_THREADS: Final = 768


def warp_queues_for(nbytes: int, group: int, first: int, most: int) -> int:
    """Return the warp queues of a message, whose first group has ``first`` vectors, all others
    ``group``.
    """
    vectors = (nbytes + 15) // 16
    return min(most, 1 if vectors <= first else 1 + (vectors - first + group - 1) // group)


def copy_warp_queues_for(nbytes: int, most: int) -> int:
    """Return the warps for a message of a rank to itself."""
    return max(1, min(most, nbytes // COPY_BYTES))


def saturates_gpu(nbytes: int, count: int) -> bool:
    """Return True if a launch of ``count`` messages, ``nbytes`` in total, may use the whole GPU."""
    return nbytes > SMALL_BYTES or count > SMALL_COUNT
