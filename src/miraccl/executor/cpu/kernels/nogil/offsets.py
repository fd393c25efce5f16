"""Offsets of the words of an exchange over TCP streams (``operations``): bytes; words of 8 bytes.

A message is a header (signature, bytes) and a payload. An exchange of a collective is one message
to and one from each peer; then ``FOLD`` reduces ``NSOURCES`` arrays of ``FOLD_BYTES``, which begin
at ``BASES``, to ``FOLD_TO``, as they arrive. Part of a source is overwritten once it has been sent.

An exchange of sends and receives is any number of messages to and from each peer, one after
another. Their headers carry the number of the message of that pair and direction in place of the
operation's sequence number. If they implement a collective, headers name it in place of
``SEND_RECV`` and carry, above the bytes, the number of the collective (``MARK_SHIFT``). Every rank
counts all of these, also those in which it has no messages, so that an unmatched message is not
taken for one of the next collective. Their messages are counted as well: at finalize all that were
sent must have been received.
"""

from __future__ import annotations

from typing import Final

# ---- the exchange

TEMPLATE: Final = 0  # signature without the sequence number
COUNT: Final = 8  # elements, for the progress page
NPEERS: Final = 16
ROWS: Final = 24
FOLD: Final = 32
FOLD_TO: Final = 40
FOLD_BYTES: Final = 48  # 0: nothing to reduce
FOLDED: Final = 56
SOURCES: Final = 64  # as fold kernels take them: a block of accumulators, then the sources
NSOURCES: Final = 72
BASES: Final = 80
ITEMSIZE: Final = 88
POLLS: Final = 96  # struct pollfd, one per peer
TIME: Final = 104  # struct timespec
VECTOR: Final = 120  # two struct iovec
MESSAGE: Final = 152  # struct msghdr
COPY_FROM: Final = 208  # the rank's message to itself
COPY_TO: Final = 216
COPY_BYTES: Final = 224
# address of the counters of collectives made of sends and receives (below); 0: plain messages
COLLECTIVES: Final = 232
# the collective that starts with this exchange, as in ``SEGMENT_SIGNATURE``; 0: it continues one
COLLECTIVE: Final = 240
REPORTED: Final = 248  # start of the last stall that the deadlock detector was notified of
EXCHANGE_BYTES: Final = 256

# ---- one direction of a peer's stream: its current message

BUFFER: Final = 0
BYTES: Final = 8  # of header and payload; 0: none
MOVED: Final = 16
HEADER: Final = 24  # the header that is sent, or expected
SEGMENTS: Final = 40  # sends and receives: address of their records, one after another
NSEGMENTS: Final = 48
SEGMENTS_BEGUN: Final = 56
NUMBER: Final = 64  # address of the counters of the stream (``MESSAGES_BEGUN``)
MARK: Final = 72  # bits above the bytes in headers: number of the collective
DIRECTION_BYTES: Final = 80
HEADER_BYTES: Final = 16

# ---- counters of one direction of a stream, over its whole life

MESSAGES_BEGUN: Final = 0
COLLECTIVE_MESSAGES: Final = 8  # those of them that belong to collectives
LAST_COLLECTIVE: Final = 16  # number of the last collective that had any
STREAM_BYTES: Final = 24

# ---- a peer

PEER: Final = 0
DESCRIPTOR: Final = 8
ENDED: Final = 16  # the peer has closed the stream
OUT: Final = 24
IN: Final = OUT + DIRECTION_BYTES
HEADER_IN: Final = IN + DIRECTION_BYTES  # the received header
ROW_BYTES: Final = HEADER_IN + HEADER_BYTES

# ---- a send or receive

SEGMENT_ADDRESS: Final = 0
SEGMENT_BYTES: Final = 8
SEGMENT_SIGNATURE: Final = 16  # without the number
SEGMENT_MESSAGE_BYTES: Final = 24  # bytes of the call's message that this is a segment of
SEGMENT_COUNT: Final = 32  # its elements, for the progress page
SEGMENT_SIZE: Final = 40

# ---- collectives made of sends and receives, of all streams of a rank

COUNTED: Final = 0  # number begun
RECENT: Final = 8  # their signatures, at the number modulo ``RECENT_SIZE``
RECENT_SIZE: Final = 64
COLLECTIVES_BYTES: Final = RECENT + 8 * RECENT_SIZE
MARK_SHIFT: Final = 48  # in the second word of a header: above are 15 bits of the number
MARK_MASK: Final = 0x7FFF

# ---- limits

MAX_SEND_BYTES: Final = 1 << 19  # per call; see ``proxy.stream.SEND_BYTES``
MAX_RECV_BYTES: Final = 1 << 20
FOLD_SEGMENT_BYTES: Final = 1 << 18  # folded while it is still in the caches
SPIN_NS: Final = 200_000
MAX_SLEEP_NS: Final = 5_000_000  # between checks for an abort
REPORT_AFTER_NS: Final = 60_000_000  # stall after which the deadlock detector is notified
STREAM_END_GRACE_NS: Final = 500_000_000  # time for the control plane to explain a stream's end
