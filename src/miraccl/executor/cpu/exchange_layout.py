"""Where the words of an exchange lie (``unlocked.exchange_unlocked``); words of 8 bytes, offsets in bytes.

To and from each peer goes a header (signature, bytes of payload) and the payload.  Then ``FOLD`` reduces ``NSOURCES`` arrays of
``FOLD_BYTES``, which begin at ``BASES``, to ``FOLD_TO``, part by part as they come; part of a source is overwritten once it has been sent.
"""

from __future__ import annotations

from typing import Final

# ---- the exchange

TEMPLATE: Final = 0  # signature without the sequence number
COUNT: Final = 8  # elements, for the board
NPEERS: Final = 16
ROWS: Final = 24
FOLD: Final = 32
FOLD_TO: Final = 40
FOLD_BYTES: Final = 48  # 0: there is nothing to reduce
FOLDED: Final = 56
SOURCES: Final = 64  # as fold kernels take them: a block of accumulators, then the sources
NSOURCES: Final = 72
BASES: Final = 80
ITEMSIZE: Final = 88
POLLS: Final = 96  # struct pollfd, one a peer
TIME: Final = 104  # struct timespec
VECTOR: Final = 120  # two struct iovec
MESSAGE: Final = 152  # struct msghdr
COPY_FROM: Final = 208  # the rank's message to itself
COPY_TO: Final = 216
COPY_BYTES: Final = 224
EXCHANGE_BYTES: Final = 256

# ---- a peer

PEER: Final = 0
DESCRIPTOR: Final = 8
SEND: Final = 16
SEND_BYTES: Final = 24
RECV: Final = 32
RECV_BYTES: Final = 40
SENT: Final = 48  # bytes of header and payload
GOT: Final = 56
HEADER_OUT: Final = 64
HEADER_IN: Final = 80
ENDED: Final = 96  # the peer has closed the stream
ROW_BYTES: Final = 104
HEADER_BYTES: Final = 16

# ---- how it goes on

SEND_MOST: Final = 1 << 19  # bytes a call; see ``proxy.stream.SEND_BYTES``
RECV_MOST: Final = 1 << 20
FOLD_PART: Final = 1 << 18  # bytes: what has come is still in the caches
SPIN_NS: Final = 200_000
NAP_NS: Final = 5_000_000  # at most between looks for an abort
