"""Where everything lies: the words that compiled code and Python share.  All offsets are in bytes, all words are int64.

Three private records of a rank (context, connection, run), two shared ones (control page, FIFO), and the program.  A FIFO is laid
out as ``transport.fifo`` says; that file and this one must agree, and a test checks it.
"""

from __future__ import annotations

WORD = 8
LINE = 64
PAGE = 4096
NSLOTS = 8  # FIFO depth, as NCCL_STEPS
BLOCK = 1024  # accumulators of a fold

# ---- post line of a message (transport.fifo)
DESC_FLAG, DESC_SIG, DESC_BYTES, DESC_MODE, DESC_ADDR, DESC_ADDR2 = 0, 8, 16, 24, 32, 40
DESC_INLINE = 32
INLINE_BYTES = 32
MODE_SLOT, MODE_INLINE, MODE_WINDOW, MODE_ADDRESS, MODE_LANDED, MODE_OVERSIZE, MODE_SIGNAL = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
)
MODE_MOVED = 7  # in the slot whose number is in DESC_ADDR (kernels.slots)
TAIL_RETURNED = 8  # after the tail: which slots came back for the last messages, a byte each

# ---- control page, one a rank, mapped by all ranks of the host
CTRL_SLEEP = 0  # 1 while the rank sleeps on its doorbell
CTRL_DOORBELL = 8  # futex word (32 bits)
CTRL_ABORT = 64  # not 0: every wait ends; the value is an ERR_*
# the board: what the rank is doing, for those who wait for it
PROGRESS_SEQ, PROGRESS_SIG, PROGRESS_COUNT, PROGRESS_STEP, PROGRESS_PEER, PROGRESS_STATE = (
    128,
    136,
    144,
    152,
    160,
    168,
)
PROGRESS_P2P_SIG, PROGRESS_P2P_COUNT, PROGRESS_CPU = (
    176,
    184,
    192,
)  # CPU: 1 + where the rank last waited, 0 unknown
STATE_IDLE, STATE_RUNNING, STATE_WAITING = 0, 1, 2
ANY_PEER = -1  # in PROGRESS_PEER: whoever comes first
CTRL_HISTORY = 1024  # (signature, count) of the last HISTORY operations, by sequence number: late ranks are compared with what was
HISTORY = 32
SEQ_MASK = 0xFFFF  # the bits of a signature that hold the sequence number
SIG_COUNT_SHIFT = 40  # above are 23 bits of a hash of the count

# ---- context, one a communicator and rank, private
CTX_RANK, CTX_NRANKS = 0, 8
CTX_SEQ = 16
CTX_CTRL = 24
CTX_CTRLS = 32  # table of peers' control pages (0: not mapped here)
CTX_SEND, CTX_RECV = 40, 48  # tables of connections, CONN_SIZE bytes each
CTX_SPIN, CTX_YIELDS, CTX_TIMEOUT_NS, CTX_MAX_SLEEP_NS = 56, 64, 72, 80
CTX_TSTATE = 88  # PyThreadState while the GIL is released, else 0
CTX_SCRATCH = 96  # words for the moment, see SCRATCH_*
CTX_STAGE, CTX_STAGE_BYTES = 104, 112  # memory that stays in cache, for single-copy reductions
CTX_ACCUMULATORS = 120  # accumulators of a fold (8 * BLOCK bytes)
CTX_PLANS, CTX_PLANS_MASK = 128, 136  # the table of plans
CTX_DTYPES = 144  # table of descriptor addresses, one a DType
CTX_ARRAY_TYPE, CTX_NONE, CTX_INT_TYPE, CTX_REDOP_TYPE = (
    152,
    160,
    168,
    176,
)  # addresses of Python's objects
CTX_BUSY = 184  # not 0: Python must look (pending asynchronous work, closed)
CTX_ERR, CTX_ERR_PEER, CTX_ERR_STEP, CTX_ERR_EXPECTED, CTX_ERR_ACTUAL = 192, 200, 208, 216, 224
CTX_WINDOW, CTX_WINDOW_END = 232, 240  # this rank's window memory
CTX_DEADLINE = 248  # of the operation under way; 0: not yet computed
CTX_STEP = 256
CTX_PID = 264
CTX_THREADED = 272  # 1: peers are threads of this process; the GIL is given up before waiting
CTX_LAST_RUN = 288
CTX_WAIT_COUNT = 296
CTX_P2P_DIRECT = 304  # a send of at least this many bytes is single-copy (p2p)
CTX_MEMBARRIER = 312
CTX_INSIDE = 320  # 1 while a thread is in the engine
CTX_GONE = 328  # table: not 0 for a rank that has left in an orderly way
CTX_CPU_MASKS = 336  # two sets of CPUs, CPU_SET_BYTES each
CTX_MIGRATE = 344  # 1: a rank that finds itself on a peer's core moves to a free one
CTX_OPERATE = 352  # address of ``engine.operate``, which all doors call
CTX_STREAM = 360  # 1: the operation under way writes more than the caches hold
CTX_STREAM_FROM = 368  # bytes from which a send or receive does
CTX_SENDRECV_OPS = (
    376  # memory of two entries of an exchange: the send and the receive of a sendrecv
)
CTX_FALSE = 384  # address of the object, as CTX_NONE
CTX_SKIP_YIELDS = 392  # how many waits sleep without a yield before
CTX_GROUPS = (
    400  # address of a 32-bit word that is not 0 while a thread has a group open: Python must look
)
CTX_SWAP = 408  # 1: a slot that was read may be kept and another one given back (kernels.slots)
CTX_CONTROL_WAITS = 416  # table of what ranks have told that wait on the control plane, CONTROL_WAIT_SIZE bytes each
CTX_BACKGROUND = 424  # not 0: operations run beside this rank's program, which may meanwhile come to the control plane
CTX_LIST_TYPE, CTX_TUPLE_TYPE = 432, 440  # as CTX_INT_TYPE
CTX_COUNTS = 448  # memory of the counts of a call
CTX_DETECTOR = 456  # descriptor that is written to when a wait gets long; -1: none
CTX_AWAITED_TAIL = 464  # how many messages the peer must have taken for this rank to go on; 0: it waits for one of the peer's
CTX_EXCEPTION = 480  # type, value and traceback that a signal handler raised (3 words)
CTX_SIZE = 512
BUSY_PENDING = 1  # the bit of CTX_BUSY for asynchronous work
CONTROL_WAIT_SET, CONTROL_WAIT_SEQ, CONTROL_WAIT_SENT, CONTROL_WAIT_SIZE = (
    0,
    8,
    16,
    24,
)  # SEQ: the rank's last operation; SENT: messages to this rank, -1 unknown
CPU_SET_BYTES = 128  # glibc's cpu_set_t: 1024 CPUs

# ---- words for the moment, at CTX_SCRATCH
SCRATCH_NOW = 0  # struct timespec: what the clock says
SCRATCH_SLEEP = 16  # struct timespec: how long to sleep
SCRATCH_EVENTFD = 48  # what is written to a descriptor
SCRATCH_VECTORS = 64  # two struct iovec, the one here and the one of another process
SCRATCH_SOURCES = 128  # the sources of a fold (kernels.operands), as many as there are ranks

# ---- connection, one a direction and peer, private
CONN_CAPS = 0  # CAP_* of the connection; 0: there is none
CONN_DESCS, CONN_SLOTS, CONN_SLOT_BYTES = 8, 16, 24
CONN_COUNT = 32  # messages posted / consumed so far
CONN_TAIL_ADDR, CONN_TAIL = 40, 48
CONN_CTRL, CONN_PID = 56, 64
CONN_WINDOW = 72  # receive: where the peer's window memory is mapped here
CONN_CTS, CONN_DOORBELL, CONN_ASLEEP = 80, 88, 96
CONN_LAST_DIRECT = 104
CONN_PEER_IN, CONN_PEER_OUT = 112, 120  # where the peer's buffers begin, from its last SIGNAL
CONN_PEER_MODES = 128  # which of them are in the private memory of another process: PRIVATE_*
CONN_DIRECT = 136  # send: 1 if the peer can read this process's private memory
CONN_PEER_PRIVATE = (
    144  # as PEER_MODES, also for a peer in the same process, whose private memory can be addressed
)
CONN_REVERSE_SLOTS = 152  # slots of the FIFO the other way
CONN_FREE, CONN_NFREE, CONN_WARM, CONN_SENT, CONN_RETURNED = (
    160,
    168,
    176,
    184,
    192,
)  # see kernels.slots
CONN_SIZE = 256
# transport.base.Capability
CAP_ORDERED, CAP_IN_PLACE, CAP_NEEDS_PROGRESS, CAP_ONE_SIDED = 1, 2, 4, 8
PRIVATE_IN, PRIVATE_OUT = 1, 2
MIN_DIRECT_BYTES = (
    4096  # bytes of a piece below which a copy is always cheaper than having it read by the peer
)
NET_SEGMENT_BYTES = (
    8 << 20
)  # bytes of a message of send/recv between hosts; longer ones are several messages

# ---- entry of the table of plans
PLAN_COUNT, PLAN_DTYPE, PLAN_ARG, PLAN_INPLACE, PLAN_COLL, PLAN_RUN, PLAN_OUT_COUNT = (
    0,
    8,
    16,
    24,
    32,
    40,
    48,
)
PLAN_SIZE = 64
UNEVEN = 32  # the bit of PLAN_COLL for a plan of uneven blocks; PLAN_COUNT is the class of their sizes then (``sizes.size_class``)

# ---- run
RUN_IN, RUN_OUT, RUN_SCRATCH = 0, 8, 16
RUN_SIG = 24
RUN_ITEMSIZE, RUN_FOLD = 32, 40
RUN_PROGRAM, RUN_NSTEPS = 48, 56
RUN_ROUND_BYTES, RUN_NROUNDS = 64, 72
RUN_DIRECT = 80  # payloads of at least this many bytes are posted by address, if they can be
RUN_COUNT = 88
RUN_IN_BLOCKS, RUN_OUT_BLOCKS = 96, 104  # tables of (first byte, bytes, chunk bytes) per block
RUN_PARTS = 112
RUN_SCRATCH_CHUNK = 120
RUN_LL = 128
RUN_IN_BYTES, RUN_OUT_BYTES = 136, 144
RUN_SENDS, RUN_NSENDS = 152, 160
RUN_EPILOGUE, RUN_EPILOGUE_ARG = (
    168,
    176,
)  # kernel applied to the output at the end (avg), and its argument
RUN_TEMPLATE = 192  # signature without the sequence number
RUN_STREAM = 200  # as CTX_STREAM
RUN_WINDOW_PATH = (
    208  # the run to take instead if all ranks' buffers are window memory; 0: do not ask
)
RUN_NEGOTIATE_PEERS, RUN_NEGOTIATE_NPEERS = 216, 224  # the ranks to ask
RUN_SCRATCH_BLOCK = 232  # bytes of a block, which the chunks of scratch are parts of
RUN_NIN, RUN_NOUT = 240, 248  # how many blocks there are in RUN_IN_BLOCKS and RUN_OUT_BLOCKS
RUN_STREAM_FROM = 256  # bytes of both buffers from which RUN_STREAM is set
RUN_SIZE = 264
BLOCK_SIZE = 24
# counts of a call: what ranks compare, elements for the board, then elements of each block of the input, of the output
COUNTS_AGREED, COUNTS_REPORTED, COUNTS_BLOCKS = 0, 8, 16

# ---- step of a program
STEP_OP, STEP_SRC_BUF, STEP_SRC, STEP_DST_BUF, STEP_DST, STEP_CHUNKS = 0, 8, 16, 24, 32, 40
STEP_RECV, STEP_SEND, STEP_PEERS, STEP_NPEERS, STEP_ROUNDS = 48, 56, 64, 72, 80
EVERY_ROUND, FIRST_ROUND, LAST_ROUND, NEVER = 0, 1, 2, 3
STEP_SIZE = 96

# ---- one send or receive of an exchange
OP_RECEIVES, OP_PEER, OP_ADDR, OP_BYTES, OP_SIG, OP_PREDECESSOR, OP_SEGMENTS, OP_COUNT = (
    0,
    8,
    16,
    24,
    32,
    40,
    48,
    56,
)
OP_DONE, OP_MARK, OP_WAIT = (
    64,
    72,
    80,
)  # DONE: pieces that are; MARK: see kernels.p2p; MUST: whether the call waits for it
WAIT_ALL, WAIT_ANY = (
    1,
    2,
)  # of OP_WAIT: the call returns when all of these have ended; when one of these has
OP_SIZE = 96

# ---- header of a message with a tag, which has the payload in it if that fits (kernels.tagged)
HEADER_TAG, HEADER_COUNT, HEADER_PAYLOAD, HEADER_BYTES = (
    0,
    8,
    16,
    1024,
)  # COUNT: bytes of the payload
SHORT_BYTES = HEADER_BYTES - HEADER_PAYLOAD

# ---- results of a kernel
OK, NOT_HANDLED, BUSY = 0, 1, 2
IN_PROGRESS = 3  # it has begun, and somebody has to go on with it
ERR_ABORTED, ERR_TIMEOUT, ERR_MISMATCH, ERR_SIZE, ERR_LEFT, ERR_CMA, ERR_INTERRUPTED = (
    10,
    11,
    12,
    13,
    14,
    15,
    16,
)
ERR_DIVERGED = 17  # the peer waits for this rank on the control plane
ERR_ENDED = 18  # the peer has ended the operation in which this rank waits for it
ERR_STREAM_ENDED = 19  # the peer's stream has ended

# ---- what compiled code reads of a NumPy array: PyArrayObject_fields of numpy/core/include/numpy/ndarraytypes.h, part of NumPy's
# ABI since 1.7; ``executor.cpu.arrays`` checks it on a probe before it is used
OB_TYPE = 8
ARRAY_DATA, ARRAY_ND, ARRAY_DIMS, ARRAY_DESCR, ARRAY_FLAGS = 16, 24, 32, 56, 64
ARRAY_C_CONTIGUOUS, ARRAY_ALIGNED, ARRAY_WRITEABLE = 0x0001, 0x0100, 0x0400
