"""Memory layout of the compiled progress engine: engine, links, messages and streams.

Everything is an int64; offsets are in bytes.  The machine itself is ``wire.proxy``; the names of
the words are those of its attributes.
"""

from __future__ import annotations

NSLOTS = 8
LINE_BYTES = 64
FRAME_BYTES = 48
MAX_STREAMS = 64
#: Disjoint byte ranges of one incoming message: one per stream, and the one they grow into.
MAX_RANGES = 128
MAX_TEXT_BYTES = 240
#: Low-water marks of a stream's socket: the largest, and the least payload that sets one.
LOW_WATER_BYTES, LOW_WATER_MIN = 1 << 19, 1 << 16
#: The largest where streams use several networks.
RAIL_LOW_WATER_BYTES = 1 << 16

# ---- engine

ENGINE_NLINKS = 0
ENGINE_LINKS = 8  # table of addresses of links, 0 for a free entry
ENGINE_EPOLL = 16
ENGINE_DOORBELL = 24
ENGINE_ASLEEP = 32  # address of the word that is 1 while the engine sleeps
ENGINE_ATTENTION = 40  # set by other threads: return to Python
ENGINE_CTRL = 48  # address of the executor's control page, 0 if there is none to wake
ENGINE_WAKES = 56  # times the executor had to be woken
ENGINE_ROUNDS = 64
ENGINE_DIRTY = 72  # 1: flags or tails were published since the last wake
ENGINE_LOG = 80  # address of the instruction log, 0 for none
ENGINE_SPIN_NS = 88
ENGINE_TIME = 96  # struct timespec
ENGINE_MESSAGE = 112  # struct msghdr, 56 bytes
ENGINE_VECTORS = 168  # MAX_VECTOR iovecs
MAX_VECTOR = 32
ENGINE_EVENTS = ENGINE_VECTORS + 16 * MAX_VECTOR  # MAX_EVENTS struct epoll_event of 12 bytes
MAX_EVENTS = 64
ENGINE_WORD = ENGINE_EVENTS + 12 * MAX_EVENTS  # scratch word (8-byte aligned: 12 * 64 = 768)
ENGINE_PORT = 2048  # address of the sockets and buffers of datagrams
ENGINE_WAIT_EVENTS = ENGINE_PORT + 16  # as ENGINE_EVENTS, of the thread that sleeps
#: 1 while a thread advances links: the engine's own, or an executor in ``drive``.
ENGINE_LOCK = ENGINE_WAIT_EVENTS + 12 * MAX_EVENTS
ENGINE_DRIVEN = ENGINE_LOCK + 8  # rounds made by executors
ENGINE_HANDOVER = ENGINE_LOCK + 16  # set by an executor that stops driving
ENGINE_DOZING = ENGINE_LOCK + 24  # 1 while the engine's thread leaves the links to an executor
ENGINE_POLLED = ENGINE_LOCK + 32  # struct pollfd of the doorbell
ENGINE_DOZE = ENGINE_LOCK + 40  # struct timespec
ENGINE_CLOCK = ENGINE_LOCK + 56  # struct timespec, of the thread outside the lock
ENGINE_DRAINED = ENGINE_LOCK + 72  # value read from the doorbell
#: 1 if there are cores for the thread beside the executors: it moves large messages then.
ENGINE_OVERLAP = ENGINE_LOCK + 80
#: 1 if whoever advanced the links last left some stream with more to do.
ENGINE_UNFINISHED = ENGINE_LOCK + 88
ENGINE_POLLS = ENGINE_LOCK + 96  # polls of executors
TCP_INFO_BYTES = 176  # struct tcp_info up to tcpi_busy_time
ENGINE_TCP_INFO = ENGINE_LOCK + 104
ENGINE_DOZE_NS = ENGINE_TCP_INFO + TCP_INFO_BYTES  # duration of a doze of the thread
#: Time for which the thread leaves the links to an executor that may stop driving without saying
#: so; the second one if they share a single core, where each look is two switches.
DOZE_NS, ONE_CORE_DOZE_NS = 200_000, 2_000_000
#: 1 if executors and thread share a single core: an executor that waits sleeps in ``drive``.
ENGINE_ONE_CORE = ENGINE_DOZE_NS + 8
ENGINE_WAITING = ENGINE_DOZE_NS + 16  # 1 while an executor sleeps in ``drive``
ENGINE_SLEEP_LIMIT = ENGINE_DOZE_NS + 24  # struct timespec, of that executor
ENGINE_SLEEP_WORD = ENGINE_DOZE_NS + 40  # value read from the eventfd that wakes it
#: Its descriptors, struct pollfd: that eventfd, then the completion channel of each device.
ENGINE_NSLEEP_FDS = ENGINE_DOZE_NS + 48
ENGINE_SLEEP_FDS = ENGINE_DOZE_NS + 56
MAX_SLEEP_FDS = 9
#: 1 if the thread has published something that an executor on its way to sleep may not have seen.
ENGINE_PUBLISHED = ENGINE_SLEEP_FDS + 8 * MAX_SLEEP_FDS
ENGINE_BYTES = 4096

# ---- link

LINK_STATE = 0
STATE_OPEN, STATE_DRAINING, STATE_CLOSING, STATE_FINISHED, STATE_LOST = 0, 1, 2, 3, 4
LINK_PEER = 8
LINK_NSTREAMS = 16
LINK_SEND_SLOT_BYTES, LINK_RECV_SLOT_BYTES = 24, 32
LINK_SEGMENT_BYTES, LINK_QUEUE_BYTES, LINK_QUEUE_FRAMES = 40, 48, 56
LINK_SEND_DESCRIPTORS, LINK_SEND_TAIL, LINK_SEND_SLOTS = 64, 72, 80
LINK_RECV_DESCRIPTORS, LINK_RECV_TAIL, LINK_RECV_CTS, LINK_RECV_SLOTS = 88, 96, 104, 112
LINK_NEXT_POST, LINK_RELEASED, LINK_CREDIT, LINK_LAST_ACK = 120, 128, 136, 144
LINK_CLOSING, LINK_SENDABLE, LINK_PEER_TOTAL = 152, 160, 168
LINK_TAIL, LINK_DELIVERED = 176, 184
LINK_NTO_SEND = 192
LINK_TO_SEND = 200  # NSLOTS message numbers, ascending
LINK_CONTROL_HEAD, LINK_CONTROL_COUNT = 264, 272
LINK_WRITE_ERRNO = 280  # of a stream that takes no more bytes
LINK_REPORTED = 288  # the end of the link has been returned to Python
LINK_READING = 296  # reading what a dying peer had sent
LINK_FAULT, LINK_FAULT_CODE = 304, 312
LINK_FAULT_A, LINK_FAULT_B, LINK_FAULT_C = 320, 328, 336
LINK_LOG = 344  # address of the instruction log of a test, 0 for none
LINK_ENGINE = 352
LINK_TEXT_BYTES = 360
LINK_TEXT = 368  # MAX_TEXT_BYTES of a peer's ABORT
LINK_SPREAD = 608  # small frames go to the least loaded stream
LINK_FLOW = 616  # address of the datagram flow that carries the frames
LINK_POLICY = 624  # wire.verbs.policy
LINK_RAILS = 632  # networks that the streams use
LINK_LOW_WATER = 640  # largest low-water mark of its sockets
LINK_MEASURED = 648  # time of the last measurement of its streams in ns
#: Streams that carry payload, and the first one for control frames: 0 if all carry both.
LINK_DATA_STREAMS, LINK_CONTROL_STREAM = 656, 664
LINK_CONTROL = 672  # ring of control frames to send
CONTROL_BYTES, NCONTROL = 32, 64
CONTROL_KIND, CONTROL_MESSAGE, CONTROL_SIGNATURE, CONTROL_NBYTES = 0, 8, 16, 24
LINK_OUT = LINK_CONTROL + CONTROL_BYTES * NCONTROL
OUT_BYTES = 64
OUT_STATE, OUT_SIGNATURE, OUT_NBYTES, OUT_QUEUED = 0, 8, 16, 24
OUT_UNWRITTEN, OUT_SOURCE, OUT_GRANT_FOR, OUT_GRANT = 32, 40, 48, 56
OUT_WAIT_CREDIT, OUT_WAIT_CTS, OUT_SENDING, OUT_QUEUED_STATE, OUT_WRITTEN = 1, 2, 3, 4, 5
LINK_IN = LINK_OUT + OUT_BYTES * NSLOTS
IN_STATE, IN_SIGNATURE, IN_NBYTES, IN_PLACEMENT, IN_MISSING, IN_NRANGES = 0, 8, 16, 24, 32, 40
IN_POSTED_FOR, IN_POSTED_ROOM, IN_ADDRESS_FOR, IN_ADDRESS = 48, 56, 64, 72
IN_RANGES = 80
IN_BYTES = IN_RANGES + 16 * MAX_RANGES
IN_ABSENT, IN_FRESH, IN_ANNOUNCED, IN_LANDING, IN_COMPLETE, IN_DELIVERED = 0, 1, 2, 3, 4, 5
PLACE_NONE, PLACE_INLINE, PLACE_SLOT, PLACE_POSTED, PLACE_OVERSIZE = 0, 1, 2, 3, 4
LINK_STREAMS = LINK_IN + IN_BYTES * NSLOTS

# ---- stream

STREAM_FD, STREAM_READABLE, STREAM_WRITABLE, STREAM_ENDING = 0, 8, 16, 24
STREAM_CLOSED, STREAM_DROPPED = 32, 40
STREAM_HEAD, STREAM_COUNT, STREAM_QUEUED_BYTES = 48, 56, 64
STREAM_WRITTEN = 72  # bytes of the head frame that the kernel has
STREAM_START, STREAM_END = 80, 88  # of the staging buffer
STREAM_PLACING, STREAM_TARGET, STREAM_REMAINING, STREAM_LOW_WATER = 96, 104, 112, 120
STREAM_ARRIVING, STREAM_ARRIVING_BYTES = 128, 136
STREAM_STAGING = 144  # address of the staging buffer
STREAM_INDEX = 152
STREAM_BACKLOG = 160  # bytes that the kernel holds, where streams use several networks
STREAM_RATE = 168  # bytes per millisecond, 0: unknown
STREAM_ACKED, STREAM_BUSY_US = 176, 184  # of the kernel, where the rate was last measured
STREAM_QUEUE = 192
NQUEUE = 128
ENTRY_MESSAGE, ENTRY_LENGTH, ENTRY_PAYLOAD, ENTRY_HEADER = 0, 8, 16, 24
ENTRY_BYTES = ENTRY_HEADER + FRAME_BYTES
CONTROL_ENTRY, CLOSE_ENTRY = -1, -2
STREAM_BYTES = STREAM_QUEUE + ENTRY_BYTES * NQUEUE
STAGING_BYTES = 1 << 14


def link_bytes(nstreams: int) -> int:
    """Size of a link with ``nstreams`` streams, without their staging buffers."""
    return LINK_STREAMS + STREAM_BYTES * nstreams


# ---- faults: kinds and codes; the texts are in ``proxy.link_memory``

FAULT_CLOSED, FAULT_RESET, FAULT_PROTOCOL, FAULT_ABORTED, FAULT_INTERNAL = 1, 2, 3, 4, 5
(
    BAD_MAGIC,
    BAD_TYPE,
    BAD_HEADER,
    WRONG_STREAM,
    AFTER_CLOSE,
    DIFFERENT_TOTALS,
    CLOSED_EARLY,
    CONSUMED_UNSENT,
    CONSUMED_EARLY,
    CTS_BEYOND,
    CTS_SMALL,
    ANNOUNCE_SMALL,
    ANNOUNCED_TWICE,
    OUTSIDE_WINDOW,
    SENT_TWICE,
    CHANGED,
    OVERLAP,
    UNREQUESTED,
    POSTED_ORDER,
    POSTED_BYTES,
    CONSUMED_UNKNOWN,
    BAD_DESCRIPTOR,
    BAD_CTS,
    TOO_MANY_RANGES,
    BAD_PACKET,
) = range(1, 26)

# ---- instruction log of tests: words (kind, five arguments) after a count

LOG_COUNT = 0
LOG_FIRST = 8
LOG_ENTRY_BYTES = 96
(
    LOG_SEND,
    LOG_RECEIVE,
    LOG_ANNOUNCE,
    LOG_DELIVER,
    LOG_TAIL,
    LOG_LOST,
    LOG_ABORT,
    LOG_FINISHED,
) = range(1, 9)
