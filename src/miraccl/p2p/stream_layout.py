"""Frames of a TCP stream between agents, and the words of its two sides.

Frames are words of 64 bits, little-endian. A request has eight::

    0  magic (16 bits) | kind (8) | flags (8) | number of extents (16)
    1  number of the operation
    2  slot of the region; NOTIFY: bytes of a block (32) | bytes of payload (32)
    3  generation; NOTIFY: 1 if the state of the operation decides about its error
    4  key, 5  key
    6  offset of a single extent; NOTIFY: status
    7  bytes of the operation before this frame; NOTIFY: position of the failure

With more than one extent a table of (offset, bytes) follows, then the payload. A reply has four::

    0  magic | kind        1  number of the operation
    2  status (32) | bytes of payload (32)
    3  position at which it failed

The payload of DATA is followed by a word: its status, for a region that ended meanwhile.
"""

from __future__ import annotations

MAGIC = 0x5052
PUT, GET, NOTIFY, END = 1, 2, 3, 4
ACK, DATA = 16, 17
#: Flags: the last frame of its operation; the target expects a notification about it.
LAST, NOTIFIES = 1, 2
REQUEST_BYTES, REPLY_BYTES, TRAILER_BYTES = 64, 32, 8
MAX_FRAME_EXTENTS = 1024
#: Payload of a frame: bounds what is still written after a cancel.
MAX_PAYLOAD = 1 << 20
MAX_NOTIFY = 1 << 15

(
    OK,
    STALE,
    WRONG_KEY,
    NO_RIGHT,
    OUTSIDE,
    CANCELLED,
    FAILED,
    TIMED_OUT,
) = range(8)
STATUS_NAMES = ("ok", "stale", "key", "rights", "range", "cancelled", "failed", "deadline")

# ---- the target's side

(
    SERVE_FD,
    SERVE_ENTRIES,
    SERVE_KEYS,
    SERVE_ACCESS,
    SERVE_STAGING,
    SERVE_START,
    SERVE_END,
    SERVE_VECTORS,
    SERVE_SCRATCH,
    SERVE_DISCARD,
    SERVE_SPIN_NS,
    #: operation under way: its number, first failure and position, whether it notifies
    SERVE_OP,
    SERVE_STATUS,
    SERVE_POSITION,
    SERVE_NOTIFIES,
    #: result of the last operation that ended
    SERVE_LAST_OP,
    SERVE_LAST_STATUS,
    SERVE_LAST_POSITION,
    #: notification for Python
    SERVE_EVENT_NUMBER,
    SERVE_EVENT_STATUS,
    SERVE_EVENT_POSITION,
    SERVE_EVENT_DATA,
    SERVE_EVENT_BYTES,
    SERVE_ERRNO,
    SERVE_FRAMES,
    SERVE_EVENT_BLOCK,
    #: ring of notifications, and the words that wake their receiver
    SERVE_RING,
    SERVE_DOORBELL,
    #: who receives: 0 nobody, 1 a thread for a moment, 2 the stream's thread until its next call
    SERVE_TURN,
    #: time until which a thread that waits for notifications receives them itself
    SERVE_POLLED,
    #: how often such a thread has given the stream back; the stream's thread sleeps on it
    SERVE_RETURNED,
) = range(0, 31 * 8, 8)
SERVE_BYTES = 256
STAGING_BYTES = 1 << 16
#: Bytes per receive into the staging buffer: a request of 16 KiB arrives at once, and of a large
#: payload only so much is copied twice.
STAGED_RECEIVE = 20 << 10
DISCARD_BYTES = 1 << 18
#: Bytes per receive or send with the memory announced as accessed.
PIECE_BYTES = 1 << 20
NVECTORS = MAX_FRAME_EXTENTS + 4
SCRATCH_BYTES = 512
#: Results of ``serve``.
SERVE_NOTIFICATION, SERVE_CLOSED, SERVE_BROKEN, SERVE_PROTOCOL = 1, 2, 3, 4

#: A receiver of notifications keeps a stream for so long after it has polled it.
LEASE_NS = 100_000
#: With more streams a receiver leaves them to their threads.
MAX_POLLED = 4

# ---- the initiator's side

(
    OP_FD,
    OP_KIND,
    OP_NUMBER,
    OP_SLOT,
    OP_GENERATION,
    OP_KEY,
    OP_KEY2,
    OP_EXTENTS,
    OP_COUNT,
    #: next extent to request, and the offset in it
    OP_INDEX,
    OP_OFFSET,
    OP_DONE,
    OP_TOTAL,
    OP_FLAGS,
    OP_CANCEL,
    OP_STATUS,
    OP_POSITION,
    OP_ERRNO,
    OP_PHASE,
    #: frame under way: its extents from this one, bytes of payload, bytes that the kernel has taken
    OP_FRAME_EXTENTS,
    OP_FRAME_PAYLOAD,
    OP_FRAME_SENT,
    OP_FRAME_INDEX,
    OP_FRAME_OFFSET,
    #: receiving: next extent, offset, requests that were answered, payload left, header bytes
    OP_IN_INDEX,
    OP_IN_OFFSET,
    OP_IN_LEFT,
    OP_IN_HEADER,
    OP_ASKED,
    OP_ANSWERED,
    OP_NOTIFY_DATA,
    OP_NOTIFY_BYTES,
    OP_SPIN_NS,
    OP_WORK,
    OP_IN_STATE,
    OP_IN_BYTES,
    #: payload of the requests under way, by the parity of their number: two words
    OP_SIZES,
    OP_SIZES_ODD,
    #: bytes of a block, for the notification
    OP_BLOCK,
) = range(0, 39 * 8, 8)
OP_BYTES = 320
#: Work memory of a stream, used by one operation at a time.
WORK_HEADER, WORK_REPLY, WORK_SCRATCH = 0, 128, 256
WORK_TABLE = 1024
WORK_VECTORS = WORK_TABLE + 16 * MAX_FRAME_EXTENTS
WORK_DISCARD = WORK_VECTORS + 16 * NVECTORS
WORK_BYTES = WORK_DISCARD + DISCARD_BYTES
PHASE_START, PHASE_SEND, PHASE_NOTIFY, PHASE_RECEIVE, PHASE_DONE = range(5)
#: Requests of a GET that are under way at a time.
MAX_ASKED = 2
#: Results of ``run_op``: again after a time slice, done (``OP_STATUS``), broken (``OP_ERRNO``),
#: the answer violates the protocol, done with a status other than OK.
RUN_MORE, RUN_DONE, RUN_BROKEN, RUN_PROTOCOL, RUN_FAILED = range(5)
