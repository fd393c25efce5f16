"""Distribution of messages over the streams of a connection, as pure functions over integers.

| policy | a message of more than 64 KiB | NCCL, CTRAN |
|---|---|---|
| SPLIT | one piece per stream, each on its own stream | ``IB_SPLIT_DATA_ON_QPS=1`` |
| ROTATE | whole on stream ``message % nstreams`` | ``IB_SPLIT_DATA_ON_QPS=0`` |
| PIECES | pieces of at most ``piece_bytes`` on whichever stream has the least queued | ``dqplb`` |

Pieces are multiples of ``ALIGN`` bytes, except the last of a message, so that LL128 lines are never
cut (NCCL's ``ncclIbMultiSend`` has the same 128). Smaller messages travel whole.
"""

from __future__ import annotations

from typing import Final

SPLIT, ROTATE, PIECES = 0, 1, 2
NAMES: Final = ("split", "rotate", "pieces")
#: The distribution of streams over TCP: an equal share per stream, for the shortest queue.
SHARES: Final = -1
ALIGN: Final = 128


def piece_bytes(policy: int, nbytes: int, nstreams: int, smallest: int, largest: int) -> int:
    """Return the size of the pieces of a message; the last one may be shorter.

    Args:
        smallest, largest: Limits of a piece; a message of at most ``smallest`` is not cut.
    """
    if nbytes <= smallest:
        return max(nbytes, 1)
    if policy == ROTATE:
        return largest
    share = nbytes
    if policy == SPLIT:
        share = (nbytes + nstreams - 1) // nstreams
        share = (share + ALIGN - 1) // ALIGN * ALIGN
    return min(largest, max(smallest, share))


def stream_of_piece(policy: int, message: int, offset: int, piece: int, nstreams: int) -> int:
    """Return the stream of the piece at ``offset``, -1 for the one with the least queued."""
    if policy == ROTATE:
        return message % nstreams
    if policy == SPLIT:
        # Started at another stream per message: small rests do not all end on the last one.
        return (message + offset // piece) % nstreams
    return -1
