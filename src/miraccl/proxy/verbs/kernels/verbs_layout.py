"""Memory layout of the compiled verbs engine: devices, connections, queue pairs, streams.

Everything is an int64; offsets are in bytes. The protocol state of a connection is a link of
``proxy.kernels.link_layout``, whose streams are those of ``wire.verbs.rows``; the words here say
how its frames travel. The engine's first page is the one of ``link_layout`` as well.
"""

from __future__ import annotations

from miraccl.proxy.kernels import link_layout
from miraccl.wire.verbs.rows import MAX_DEVICES, MAX_STREAMS, NROWS, ROW_BYTES

NSLOTS = link_layout.NSLOTS
NQUEUE = link_layout.NQUEUE

# ---- engine, behind the page of link_layout

ENGINE_FUNCTIONS = link_layout.ENGINE_BYTES
FUNCTION_REG_MR, FUNCTION_DEREG_MR = ENGINE_FUNCTIONS, ENGINE_FUNCTIONS + 8
FUNCTION_GET_EVENT, FUNCTION_ACK_EVENTS = ENGINE_FUNCTIONS + 16, ENGINE_FUNCTIONS + 24
ENGINE_TIMER_NS = ENGINE_FUNCTIONS + 32  # return to Python at this time; 0 for never
ENGINE_NDEVICES = ENGINE_FUNCTIONS + 40
ENGINE_NREGIONS = ENGINE_FUNCTIONS + 48
ENGINE_SLEEPS = ENGINE_FUNCTIONS + 56
ENGINE_REGISTERED = ENGINE_FUNCTIONS + 64  # registrations of single messages
ENGINE_ASYNC = ENGINE_FUNCTIONS + 72  # 1: a device has an asynchronous event
ENGINE_CQ = ENGINE_FUNCTIONS + 80  # queue and context that ibv_get_cq_event writes
ENGINE_BAD_WR = ENGINE_FUNCTIONS + 96
ENGINE_WINDOW, ENGINE_WINDOW_END = ENGINE_FUNCTIONS + 104, ENGINE_FUNCTIONS + 112
#: Payload in the window that was registered for one message: Python keeps the next ones registered.
ENGINE_WANTED, ENGINE_WANTED_BYTES = ENGINE_FUNCTIONS + 120, ENGINE_FUNCTIONS + 128
#: Calls of ibv_post_send, and work requests that they posted.
ENGINE_POSTS, ENGINE_REQUESTS = ENGINE_FUNCTIONS + 136, ENGINE_FUNCTIONS + 144
ENGINE_DRIVEN_CQ = ENGINE_FUNCTIONS + 152  # as ENGINE_CQ, of an executor
ENGINE_COMPLETIONS = ENGINE_FUNCTIONS + 192  # NCOMPLETIONS struct ibv_wc
NCOMPLETIONS = 16
WC_BYTES = 48
#: Work requests of one queue pair that are posted by one call, and how many there are.
ENGINE_SEND_WR = ENGINE_COMPLETIONS + WC_BYTES * NCOMPLETIONS
SEND_WR_BYTES = 128
NCHAIN = 32
ENGINE_SGES = ENGINE_SEND_WR + NCHAIN * SEND_WR_BYTES  # their ibv_sge
SGE_BYTES = 16
ENGINE_CHAIN = ENGINE_SGES + NCHAIN * SGE_BYTES
#: Rows that are written and have no request yet, the bytes of their payloads, 1 if one of them
#: wants a completion, 1 if the immediate has a request of its own.
ENGINE_BATCH, ENGINE_BATCH_BYTES = ENGINE_CHAIN + 8, ENGINE_CHAIN + 16
ENGINE_BATCH_SIGNAL, ENGINE_BATCH_APART = ENGINE_CHAIN + 24, ENGINE_CHAIN + 32
ENGINE_RECV_WR = ENGINE_CHAIN + 48
ENGINE_ROW = ENGINE_RECV_WR + 32  # copy of the row that is being processed
ENGINE_DEVICES = ENGINE_ROW + ROW_BYTES
DEVICE_PD, DEVICE_POLL_CQ, DEVICE_REQ_NOTIFY = 0, 8, 16
DEVICE_POST_SEND, DEVICE_POST_RECV, DEVICE_CHANNEL = 24, 32, 40
DEVICE_ACCESS = 48  # bits that every registration gets
DEVICE_BYTES = 64
ENGINE_REGIONS = ENGINE_DEVICES + DEVICE_BYTES * MAX_DEVICES
#: Memory that stays registered: FIFOs, windows. Keys per device: lkey | rkey << 32.
REGION_START, REGION_END, REGION_KEYS = 0, 8, 16
REGION_BYTES = REGION_KEYS + 8 * MAX_DEVICES
MAX_REGIONS = 64
VERBS_ENGINE_BYTES = ENGINE_REGIONS + REGION_BYTES * MAX_REGIONS

# ---- connection to a peer

CONN_LINK, CONN_ENGINE, CONN_NQPS, CONN_NSTREAMS, CONN_NCQS = 0, 8, 16, 24, 32
CONN_ROWS_IN, CONN_ROWS_OUT = 40, 48  # rings of all streams, one after the other
CONN_PEER_ROWS, CONN_PEER_SLOTS = 56, 64
CONN_SLOTS_OUT, CONN_SLOTS_OUT_END = 72, 80  # own send slots
CONN_INLINE = 88  # IBV_SEND_INLINE if rows fit into a work request, else 0
CONN_COPY_BYTES = 96  # payloads up to this size are copied to a slot instead of registered
CONN_ATTENTION = 104  # 1: Python must look at queue pairs or at the inbox
CONN_HELLOS = 112  # streams on which the peer's HELLO has arrived, a bit each
CONN_INBOX_COUNT = 120
CONN_TEXT_IN, CONN_TEXT_OUT, CONN_PEER_TEXT = 128, 136, 144  # text of an ABORT
CONN_REGISTERED = 152  # registrations of single messages that are held
CONN_CQS = 192  # one ibv_cq per device
CONN_INBOX = CONN_CQS + 8 * MAX_DEVICES  # rows for Python
NINBOX = 16
CONN_OUT = CONN_INBOX + ROW_BYTES * NINBOX
#: Outgoing message: the CTS for it, its placement, its registration.
OUT_FOR, OUT_ADDRESS, OUT_ROOM, OUT_PLACED_FOR, OUT_PLACEMENT, OUT_MR_FOR = 0, 8, 16, 24, 32, 40
OUT_KEYS = 48  # u32 per device of the peer
OUT_MR = OUT_KEYS + 4 * MAX_DEVICES  # ibv_mr per own device
OUT_BYTES = OUT_MR + 8 * MAX_DEVICES
CONN_IN = CONN_OUT + OUT_BYTES * NSLOTS
IN_MR_FOR, IN_MR = 0, 8
IN_BYTES = IN_MR + 8 * MAX_DEVICES
CONN_QPS = CONN_IN + IN_BYTES * NSLOTS

QP_POINTER, QP_DEVICE, QP_PEER_DEVICE, QP_STATE = 0, 8, 16, 24
QP_CONNECTING, QP_ACTIVE, QP_FAILED, QP_CLOSED = 0, 1, 2, 3
QP_POSTED, QP_DONE, QP_SIZE, QP_UNSIGNALED = 32, 40, 48, 56  # send work requests
QP_RECV_POSTED, QP_RECV_DONE = 64, 72
QP_KEY, QP_PEER_KEY, QP_LOCAL_KEY = 80, 88, 96  # of rows; of the peer's rows and slots; of slots
QP_STATUS, QP_VENDOR, QP_ERRNO = 104, 112, 120  # of the first failed work request
QP_NSTREAMS = 128  # streams that it carries
QP_RECV_DEPTH = 136
QP_APART_BYTES = 144  # larger payloads: row and immediate in requests of their own
QP_BYTES = 192
CONN_STREAMS = CONN_QPS + QP_BYTES * MAX_STREAMS

STREAM_QP, STREAM_POSTED_ROWS, STREAM_DONE_ROWS = 0, 8, 16
STREAM_POSTED_ENTRIES = 24  # entries at the head of the link's queue that are posted
STREAM_PROCESSED, STREAM_REPORTED, STREAM_ARRIVED = 32, 40, 48
STREAM_PAUSED = 56  # 1: post nothing, a queue pair is being replaced
STREAM_ENTRY_WR = 64  # number of the last work request of each entry
STREAM_ENTRY_ROW = STREAM_ENTRY_WR + 8 * NQUEUE  # number of its row
STREAM_BYTES = STREAM_ENTRY_ROW + 8 * NQUEUE
CONN_BYTES = CONN_STREAMS + STREAM_BYTES * MAX_STREAMS

# ---- registered memory of a connection

TEXT_BYTES = 256


def rows_bytes(nstreams: int) -> int:
    """Size of the rings of all streams of one direction, with the text of an ABORT behind them."""
    return nstreams * NROWS * ROW_BYTES + TEXT_BYTES


#: Work requests that may be outstanding on a queue pair: up to three per queued frame.
SEND_DEPTH = 256
#: Receives posted on a queue pair: it can carry two streams after a failure, more with less each.
RECV_DEPTH = 2 * NROWS
#: Work requests of one frame: payload, row, immediate.
MAX_FRAME_WRS = 3
#: Control rows after which one is signalled.
SIGNAL_ROWS = 16

# ---- faults beyond those of link_layout

(
    REGISTER_FAILED,
    BAD_ROW,
    BAD_PLACEMENT,
    ALL_PATHS_FAILED,
) = range(100, 104)

#: wr_id: queue pair in bits 40 to 47, bit 62 for receives, number of the work request below.
WR_QP_SHIFT = 40
WR_RECEIVE = 1 << 62
WR_NUMBER_MASK = (1 << 40) - 1
