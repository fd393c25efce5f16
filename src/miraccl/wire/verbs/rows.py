"""Rows and immediates: the unit in which everything but payload travels over queue pairs.

A row is 128 bytes that the sender writes by RDMA into a ring in the receiver's memory, with an
immediate that names it and those before it in the same request. Rows belong to a *stream*; stream
s starts on queue pair s and moves to another one when that fails. The rows of a stream are numbered
from 1, and row ``n`` has place ``(n - 1) % NROWS`` of the stream's ring. The receiver marks the
rows that an immediate names and processes rows in the order of their numbers, so it does not depend
on the order of completions.

| byte | field |
|---|---|
| 0 | header of a frame (``wire.stream``), for rows of kind FRAME |
| 48 | number of the row |
| 56 | kind u8, placement u8, stream u8, 0 u8, rows of the other direction processed (low 32 bits) |
| 64 | payload of at most 32 bytes; of a CTS: address, and the keys of 8 devices (u32 each) |

A row is a clear-to-send line of NCCL's ``net_ib`` (``ncclIbSendFifo``) with the flow control of its
ring inside: ``done`` lets the peer reuse places, and rows of kind CREDIT carry nothing else.

Every function here is integer arithmetic, which ``native.frontend`` compiles.
"""

from __future__ import annotations

from typing import Final

ROW_BYTES: Final = 128
#: Rows of a stream that may be unprocessed; a power of two, at most the bits of a word.
NROWS: Final = 64
#: Rows kept for credit: a full ring of frames in both directions could not report progress.
RESERVED_ROWS: Final = 8
#: Processed rows after which a side without frames to send reports them.
REPORT_ROWS: Final = 16
MAX_STREAMS: Final = 32
MAX_DEVICES: Final = 8

ROW_SEQUENCE: Final = 48
ROW_FLAGS: Final = 56
ROW_PAYLOAD: Final = 64
ROW_ADDRESS: Final = 64
ROW_KEYS: Final = 72

KIND_FRAME, KIND_CREDIT, KIND_DOWN, KIND_REOPEN, KIND_REOPENED, KIND_HELLO = 1, 2, 3, 4, 5, 6
KIND_GONE: Final = 7
#: Places of a payload. The sender decides, by the CTS that it has seen.
IN_ROW, IN_SLOT, IN_POSTED = 1, 2, 3

SEQUENCE_BITS: Final = 18
SEQUENCE_MASK: Final = (1 << SEQUENCE_BITS) - 1
COUNT_BITS: Final = 6
#: Rows of one request, which lie side by side in the ring.
BATCH_ROWS: Final = 8
#: Payload bytes after which the rows of a request are posted: the first message is complete on the
#: wire and not announced meanwhile, for 2.6 us at 400 Gbit/s.
BATCH_BYTES: Final = 1 << 17


def encode_immediate(stream: int, sequence: int, count: int) -> int:
    """Return the 32 bits that name ``count`` rows, the last of them ``sequence``: 8 bits of the
    stream, 6 of the count less one, 18 of the number.
    """
    return (
        (stream << (COUNT_BITS + SEQUENCE_BITS))
        | ((count - 1) << SEQUENCE_BITS)
        | (sequence & SEQUENCE_MASK)
    )


def immediate_stream(immediate: int) -> int:
    """Return the stream of an immediate."""
    return (immediate >> (COUNT_BITS + SEQUENCE_BITS)) & 0xFF


def immediate_count(immediate: int) -> int:
    """Return the number of rows that an immediate names."""
    return ((immediate >> SEQUENCE_BITS) & ((1 << COUNT_BITS) - 1)) + 1


def expand_sequence(low: int, mask: int, processed: int) -> int:
    """Return the number above ``processed`` with these low bits.

    Unambiguous, because at most ``NROWS`` numbers above ``processed`` are in flight.
    """
    return processed + 1 + ((low - processed - 1) & mask)


def row_flags(kind: int, placement: int, stream: int, done: int) -> int:
    """Return the word at ``ROW_FLAGS``."""
    return kind | (placement << 8) | (stream << 16) | ((done & 0xFFFFFFFF) << 32)


def expand_done(low: int, known: int) -> int:
    """Return the count at or above ``known`` with these low 32 bits."""
    return known + ((low - known) & 0xFFFFFFFF)


def may_post(posted: int, done: int, reserved: int) -> bool:
    """Return True if another row fits into the peer's ring.

    Args:
        posted: Rows of the stream that were posted.
        done: Rows of them that the peer has processed.
        reserved: Rows to leave free: ``RESERVED_ROWS`` for frames, 0 for credit.
    """
    return posted - done < NROWS - reserved
