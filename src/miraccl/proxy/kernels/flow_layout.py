"""Memory layout of a compiled datagram flow: the flow, its paths and its streams.

Everything is an int64; offsets are in bytes.  The machine itself is ``wire.datagram.flow``; the
names of the words are those of its attributes.
"""

from __future__ import annotations

from miraccl.wire.datagram.packets import MAX_PATHS
from miraccl.wire.datagram.path import REMEMBERED
from miraccl.wire.datagram.path_states import PathState

MAX_SEGMENTS = 8
MAX_ACK_RANGES = 32

# ---- set of ranges: count, then pairs [start, stop)

RANGES_COUNT, RANGES_FIRST = 0, 8


def ranges_bytes(capacity: int) -> int:
    """Size of a set of ``capacity`` ranges, and one more while it is changed."""
    return RANGES_FIRST + 16 * (capacity + 1)


#: Ranges of acknowledged, lost and received bytes of one frame.
FRAME_RANGES = 510
FRAME_RANGES_BYTES = ranges_bytes(FRAME_RANGES)
NUMBER_RANGES_BYTES = ranges_bytes(MAX_ACK_RANGES + 1)

# ---- flow

FLOW_LINK = 0
FLOW_PORT = 8
FLOW_NPATHS, FLOW_NSTREAMS = 16, 24
FLOW_CONNECTION, FLOW_PEER_CONNECTION = 32, 40
FLOW_GRANTED = 48  # -1: no grants are needed
FLOW_NEW_BYTES, FLOW_REJECTED = 56, 64
FLOW_TURN, FLOW_GRANT_TOTAL, FLOW_GRANT_DUE, FLOW_ARRIVED_ON = 72, 80, 88, 96
FLOW_LOG = 104  # address of the event log of a test, 0: events go to the link
FLOW_REACHED = 112  # a path has become OPEN
FLOW_SEAL, FLOW_OPEN = 120, 128  # cipher contexts; of AEGIS the keys
FLOW_ABORTED = 136  # 1: the peer has sent its reason, which is in the link's text
FLOW_GOODBYE = 144  # 1: the last acknowledgements are sent
#: Admission of the peer (``wire.datagram.credit.SenderCredit``), used if FLOW_ADMITS is 1.
FLOW_WANTED, FLOW_ADMITTED, FLOW_RECEIVED, FLOW_CREDIT_TURN, FLOW_ADMITS = 152, 160, 168, 192, 200
FLOW_PATHS, FLOW_STREAMS = 176, 184  # addresses
#: Of a test with a log: memory where frames land, ``LANDING_BYTES`` per stream, 0: nowhere.
FLOW_LANDING, LANDING_BYTES = 208, 1 << 17
FLOW_PROTECTION = 216
FLOW_MAY_RESEND = 224  # 0: no stream has lost bytes to send
FLOW_CHANGED = 232  # 1: a path has died or is used again, which Python has not seen
#: MAC and AEAD by PORT_CRYPTO (AES-128-GCM), and by AEGIS-128X2.
PROTECT_NONE, PROTECT_MAC, PROTECT_AEAD, PROTECT_AEGIS_MAC, PROTECT_AEGIS = 0, 1, 2, 3, 4
FLOW_BYTES = 256

# ---- path

PATH_INDEX, PATH_MTU, PATH_MAX_IN_FLIGHT, PATH_STATE = 0, 8, 16, 24
OPEN, SUSPECT, DEAD, PROBING = 0, 1, 2, 3
STATES = (PathState.OPEN, PathState.SUSPECT, PathState.DEAD, PathState.PROBING)
PATH_SMOOTHED, PATH_VARIATION, PATH_MINIMUM, PATH_LATEST, PATH_SAMPLES = 32, 40, 48, 56, 64
PATH_ACKED_FN, PATH_LOST_FN, PATH_TIMEOUT_FN, PATH_UNDO_FN = 72, 80, 88, 96
PATH_CONTROL = 104  # eight words
PATH_NEXT_NUMBER, PATH_IN_FLIGHT, PATH_LARGEST_ACKED = 168, 176, 184
PATH_TIMEOUTS, PATH_PROBES = 192, 200
PATH_LOST_PACKETS, PATH_SPURIOUS, PATH_SENT_PACKETS = 208, 216, 224
PATH_LOST_BYTES, PATH_ACKED_BYTES = 232, 240
PATH_THRESHOLD, PATH_LOSS_TIME, PATH_LAST_ELICITING, PATH_RELEASE = 248, 256, 264, 272
PATH_DELIVERED, PATH_DELIVERED_AT, PATH_PEER_MARKED = 280, 288, 296
PATH_PROBE_AT, PATH_PROBE_INTERVAL = 304, 312
PATH_FLOOR, PATH_LARGEST, PATH_LARGEST_AT, PATH_MARKED = 320, 328, 336, 344
PATH_DUPLICATES, PATH_PENDING, PATH_DUE, PATH_REPEATS = 352, 360, 368, 376
PATH_ORDER = 384  # packets recorded so far; the next one's position
PATH_OLDEST = 392  # position of the oldest packet in flight, PATH_ORDER if there is none
PATH_NSENT = 400  # packets in flight
PATH_SAMPLE = 408  # struct AckSample: ten words
PATH_SOCKET = 488  # index of the socket
PATH_NO_GSO = 496  # 1: the interface refuses UDP_SEGMENT
PATH_ADDRESS, PATH_ADDRESS_BYTES = 504, 536  # struct sockaddr of the peer (32 bytes), its size
PATH_RECEIVED_PACKETS, PATH_RECEIVED_BYTES, PATH_SENT_BYTES = 544, 552, 560
PATH_SEND_ERRORS, PATH_LAST_ERRNO = 568, 576
PATH_ADJUSTED = 592
PATH_FULL_MTU, PATH_MTU_PROBE_AT, PATH_MTU_PROBE_INTERVAL = 584, 600, 608
PATH_PAIR = 616  # address of the queue pair that carries the path, 0: a socket
#: The last change to SUSPECT: ns since the last packet was sent, and ns after the timer was due.
PATH_SILENCE, PATH_LATE = 624, 632
PATH_NUMBERS = 640
#: Remembered packets that were declared lost: of all, and of each 32 positions.
PATH_NLOST = PATH_NUMBERS + NUMBER_RANGES_BYTES
PATH_STAMPED = PATH_NLOST + 8  # position of the first packet not given to the kernel yet
PATH_LOST_GROUPS, LOST_GROUP = PATH_NLOST + 16, 32
PATH_SENT = (PATH_LOST_GROUPS + 8 * (REMEMBERED // LOST_GROUP) + 63) // 64 * 64
SENT_STATE, SENT_NUMBER, SENT_TIME, SENT_SIZE = 0, 8, 16, 24
FREE, IN_FLIGHT, LOST = 0, 1, 2
SENT_DELIVERED, SENT_DELIVERED_AT, SENT_FLAGS, SENT_NSPANS = 32, 40, 48, 56
FLAG_LIMITED, FLAG_PROBE, FLAG_GRANT, FLAG_REQUEUED = 1, 2, 4, 8
#: Spans: stream | headed << 8 | frame << 16, start | stop << 32.
SENT_SPANS, SPAN_BYTES = 64, 16
SENT_BYTES = SENT_SPANS + SPAN_BYTES * MAX_SEGMENTS
PATH_BYTES = PATH_SENT + SENT_BYTES * REMEMBERED

# ---- stream of a flow: the head of the link's queue is the frame in flight

FSTREAM_FRAME = 0  # number of the frame in flight
FSTREAM_SENT, FSTREAM_HEADER_SENT, FSTREAM_HEADER_ACKED, FSTREAM_RESEND_HEADER = 8, 16, 24, 32
FSTREAM_NUMBER, FSTREAM_LENGTH = 40, 48  # incoming frame; length -1: not begun
FSTREAM_TARGET = 56  # address of its payload, 0: none
FSTREAM_HEADED = 64  # packets with the header by path, four bits each
FSTREAM_ACKED = 72
FSTREAM_RESEND = FSTREAM_ACKED + FRAME_RANGES_BYTES
FSTREAM_RECEIVED = FSTREAM_RESEND + FRAME_RANGES_BYTES
FSTREAM_BYTES = FSTREAM_RECEIVED + FRAME_RANGES_BYTES

# ---- packet that ``next_packet`` has built

OUT_PATH, OUT_NUMBER, OUT_SIZE, OUT_NCONTROL, OUT_NSEGMENTS = 0, 8, 16, 24, 32
OUT_SEGMENTS = 40  # stream, frame, offset, length, headed
SEGMENT_BYTES = 40
OUT_CONTROL = OUT_SEGMENTS + SEGMENT_BYTES * MAX_SEGMENTS  # encoded control records
OUT_BYTES = 1 << 16

# ---- port: sockets and buffers of an engine (``datagram_io``)

PORT_FRAME = 0  # 48 bytes: an aligned copy of a frame header
PORT_NSOCKETS = 48
PORT_HASH, PORT_HASH_MASK = 56, 64  # table of (connection, flow), entries - 1
PORT_STRANGERS = 80  # packets without a valid tag
PORT_QUEUES = 88  # table of devices with queue pairs (``queue_layout``), 0: none
#: epoll data of the completion channel of device 0; sockets have their index.
QUEUE_DATA = 1 << 16
PORT_SENDS, PORT_RECEIVES = 96, 104  # system calls
PORT_DROPPED = 112  # packets that the kernel did not take
#: Functions of libcrypto: encrypt init, update, final; decrypt init, update, final; ctrl.
PORT_CRYPTO = 120
PORT_OUT, PORT_BUFFER, PORT_VECTORS, PORT_SCRATCH = 176, 184, 192, 200  # addresses
PORT_TIMEOUT = 208  # struct timespec
PORT_NONCE, PORT_TAG, PORT_INT = 224, 240, 256  # the nonce ends with four zero bytes
PORT_SOCKETS = 264  # fd, readable
SOCKET_FD, SOCKET_READABLE, SOCKET_OVERFLOW, SOCKET_BYTES = 0, 8, 16, 24
PORT_MESSAGE = PORT_SOCKETS + SOCKET_BYTES * MAX_PATHS  # struct msghdr
PORT_NAME = PORT_MESSAGE + 56
NAME_BYTES = 128
PORT_VECTOR = PORT_NAME + NAME_BYTES
PORT_CONTROL = PORT_VECTOR + 16
CONTROL_BYTES = 256
PORT_GROUPS = PORT_CONTROL + CONTROL_BYTES
#: Packets of equal size for one system call: packets, bytes of each, bytes in total, iovecs, bytes
#: of scratch memory, 1 after a shorter packet, then the first iovec of each packet.
GROUP_COUNT, GROUP_SIZE, GROUP_TOTAL, GROUP_VECTORS, GROUP_SCRATCH, GROUP_CLOSED = (
    0,
    8,
    16,
    24,
    32,
    40,
)
GROUP_FIRST = 48
MAX_GROUP = 64
GROUP_BYTES = GROUP_FIRST + 8 * (MAX_GROUP + 1)
PORT_CREDIT = PORT_GROUPS + GROUP_BYTES * MAX_PATHS
#: Grants over all peers (``wire.datagram.credit.Grantor``); a budget of 0: none are needed.
PORT_BUDGET, PORT_CREDIT_RATE = PORT_CREDIT, PORT_CREDIT + 8
PORT_ALLOWANCE, PORT_REFILLED, PORT_TURN = PORT_CREDIT + 16, PORT_CREDIT + 24, PORT_CREDIT + 32
#: AEGIS: state, a block that is not full, a copy of the state; bytes in the block, and absorbed.
PORT_AEGIS = (PORT_CREDIT + 127) // 64 * 64
AEGIS_STATE_BYTES = 256
AEGIS_BLOCK, AEGIS_SAVED = AEGIS_STATE_BYTES, AEGIS_STATE_BYTES + 64
AEGIS_FILLED = AEGIS_SAVED + AEGIS_STATE_BYTES
AEGIS_SIZE = AEGIS_FILLED + 8
PORT_BYTES = PORT_AEGIS + AEGIS_SIZE + 8
#: Per path: iovecs of a group, and memory for headers, tags and ciphertext.
VECTORS_PER_PATH, SCRATCH_PER_PATH = 1024, 1 << 18
BUFFER_BYTES = 1 << 16

# ---- event log of tests

LOG_COUNT, LOG_FIRST, LOG_ENTRY_BYTES = 0, 8, 40
LOG_STARTED, LOG_PAYLOAD, LOG_COMPLETED, LOG_ACKED, LOG_CHANGED, LOG_ABORTED, LOG_ERROR = range(
    1, 8
)


def flow_bytes(npaths: int, nstreams: int) -> int:
    """Size of a flow with its paths and streams."""
    return FLOW_BYTES + PATH_BYTES * npaths + FSTREAM_BYTES * nstreams


assert MAX_PATHS <= 16
