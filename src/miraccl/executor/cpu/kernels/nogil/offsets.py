"""Where the words lie of what compiled code does on TCP streams of its own (``operations``); words of 8 bytes, offsets in bytes.

A message is a header (signature, bytes) and a payload.  An exchange of a collective is one message to and one from each peer.  Then
``FOLD`` reduces ``NSOURCES`` arrays of ``FOLD_BYTES``, which begin at ``BASES``, to ``FOLD_TO``, part by part as they come; part of a
source is overwritten once it has been sent.  An exchange of sends and receives is any number of messages to and from each peer, one after
another; headers carry the number of the message of that pair and direction in place of the operation's.  Where they are a collective,
headers say which one in place of ``SEND_RECV``, and above the bytes the number of the collective (``MARK_SHIFT``): every rank counts all of
them, also those in which it has no messages, so that a message nobody took is not taken for one of the next.  Their messages are counted,
too: in the end all that were sent have been taken.
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
COLLECTIVES: Final = 232  # sends and receives that are a collective: address of the words that count those (below); 0: they are plain
COLLECTIVE: Final = 240  # which begins with this exchange, as in ``SEGMENT_SIGNATURE``; 0: it goes on with the one before
REPORTED: Final = 248  # since when nothing has moved, as the lookout was told last
EXCHANGE_BYTES: Final = 256

# ---- one way of a peer's stream: the message that goes or comes

BUFFER: Final = 0
BYTES: Final = 8  # of header and payload; 0: there is none
MOVED: Final = 16
HEADER: Final = 24  # the one that goes, or that is to come
SEGMENTS: Final = 40  # sends and receives: address of the words of all, one after another, how many there are, and how many have begun
NSEGMENTS: Final = 48
SEGMENTS_BEGUN: Final = 56
NUMBER: Final = 64  # address of words that belong to the stream (``MESSAGES_BEGUN``)
MARK: Final = (
    72  # bits above the bytes in headers: of sends and receives that are a collective, its number
)
DIRECTION_BYTES: Final = 80
HEADER_BYTES: Final = 16

# ---- one way of a stream, since there is the stream

MESSAGES_BEGUN: Final = 0  # messages that have begun
COLLECTIVE_MESSAGES: Final = 8  # those of them that belong to collectives
LAST_COLLECTIVE: Final = 16  # the number of the last collective that had some
STREAM_BYTES: Final = 24

# ---- a peer

PEER: Final = 0
DESCRIPTOR: Final = 8
ENDED: Final = 16  # the peer has closed the stream
OUT: Final = 24
IN: Final = OUT + DIRECTION_BYTES
HEADER_IN: Final = IN + DIRECTION_BYTES  # the one that has come
ROW_BYTES: Final = HEADER_IN + HEADER_BYTES

# ---- a send or receive

SEGMENT_ADDRESS: Final = 0  # address
SEGMENT_BYTES: Final = 8
SEGMENT_SIGNATURE: Final = 16  # without the number
SEGMENT_MESSAGE_BYTES: Final = 24  # bytes of the call's message, of which this is a part
SEGMENT_COUNT: Final = 32  # its elements, for the board
SEGMENT_SIZE: Final = 40

# ---- the collectives that are sends and receives, of all streams of a rank

COUNTED: Final = 0  # how many have begun
RECENT: Final = 8  # which they were, the number modulo ``RECENT_SIZE``
RECENT_SIZE: Final = 64
COLLECTIVES_BYTES: Final = RECENT + 8 * RECENT_SIZE
MARK_SHIFT: Final = 48  # in the second word of a header: above are 15 bits of the number
MARK_MASK: Final = 0x7FFF

# ---- how it goes on

MAX_SEND_BYTES: Final = 1 << 19  # bytes a call; see ``proxy.stream.SEND_BYTES``
MAX_RECV_BYTES: Final = 1 << 20
FOLD_SEGMENT_BYTES: Final = 1 << 18  # bytes: what has come is still in the caches
SPIN_NS: Final = 200_000
MAX_SLEEP_NS: Final = 5_000_000  # at most between looks for an abort
REPORT_AFTER_NS: Final = 60_000_000  # after so long without anything that moves the lookout is told
STREAM_END_GRACE_NS: Final = (
    500_000_000  # in which the control plane tells why a stream has ended, if it knows
)
