"""Offsets of the words that compiled code and Python share: bytes; every word is an int64.

Private records of a rank: context, connection, run, program. Shared records: control page and
FIFO. The FIFO is that of ``transport.fifo``, the capabilities are those of ``transport.base``; a
test compares both with this file.
"""

from __future__ import annotations

from miraccl.native import sleep_words  # not sleeper, which imports Numba: 0.4 s of each start

WORD = 8
LINE = 64
PAGE = 4096
NSLOTS = 8  # FIFO depth, as NCCL_STEPS
NFANOUT = NSLOTS + 1  # slots of a rank for payloads with several receivers
# bytes from which these are used: below, a second copy costs less than the rows
FANOUT_FROM = 1024
FOLD_BLOCK = 1024  # accumulators of a fold

# ---- descriptor line of a message (transport.fifo)
DESC_FLAG, DESC_SIG, DESC_BYTES, DESC_MODE, DESC_ADDR, DESC_ADDR2 = 0, 8, 16, 24, 32, 40
DESC_INLINE = 32
INLINE_BYTES = 32
MODE_SLOT, MODE_INLINE, MODE_WINDOW, MODE_ADDRESS = 0, 1, 2, 3
MODE_LANDED, MODE_OVERSIZE, MODE_SIGNAL = 4, 5, 6
MODE_MOVED = 7  # in the slot whose number is in DESC_ADDR (kernels.slots)
TAIL_RETURNED = 8  # word after the tail: slots returned for the last messages, a byte each

# ---- control page, one per rank, mapped by all ranks of the host
CTRL_SLEEP = sleep_words.SLEEP  # 1 while the rank sleeps on its doorbell
CTRL_DOORBELL = sleep_words.DOORBELL
CTRL_ABORT = 64  # not 0: every wait ends; the value is an ERR_*
# progress page: this rank's current operation, for ranks that wait for it
PROGRESS_SEQ, PROGRESS_SIG, PROGRESS_COUNT, PROGRESS_STEP = 128, 136, 144, 152
PROGRESS_PEER, PROGRESS_STATE = 160, 168
PROGRESS_P2P_SIG, PROGRESS_P2P_COUNT = 176, 184
PROGRESS_CPU = 192  # 1 + the core on which the rank last waited, 0 unknown
STATE_IDLE, STATE_RUNNING, STATE_WAITING = 0, 1, 2
ANY_PEER = -1  # in PROGRESS_PEER: any of several peers
# (signature, count) of the last HISTORY operations, indexed by sequence number, with which late
# ranks are compared
CTRL_HISTORY = 1024
HISTORY = 32
SEQ_MASK = 0xFFFF  # bits of a signature that hold the sequence number
SIG_COUNT_SHIFT = 40  # above: 23 bits of a hash of the count

# ---- context, one per communicator and rank, private
CTX_RANK, CTX_NRANKS = 0, 8
CTX_SEQ = 16
CTX_CTRL = 24
CTX_CTRLS = 32  # table of the peers' control pages (0: not mapped here)
CTX_SEND, CTX_RECV = 40, 48  # tables of connections, CONN_SIZE bytes each
CTX_SPIN, CTX_YIELDS, CTX_TIMEOUT_NS, CTX_MAX_SLEEP_NS = 56, 64, 72, 80
CTX_TSTATE = 88  # PyThreadState while the GIL is released, else 0
CTX_SCRATCH = 96  # temporary words, see SCRATCH_*
CTX_STAGE, CTX_STAGE_BYTES = 104, 112  # memory that stays in cache, for single-copy reductions
CTX_ACCUMULATORS = 120  # accumulators of a fold (8 * FOLD_BLOCK bytes)
CTX_PLANS, CTX_PLANS_MASK = 128, 136  # the table of plans
CTX_DTYPES = 144  # table of descriptor addresses, one per DType
CTX_ARRAY_TYPE, CTX_NONE, CTX_INT_TYPE, CTX_REDOP_TYPE = 152, 160, 168, 176  # Python objects
CTX_BUSY = 184  # not 0: Python must handle the call (asynchronous operations, closed)
CTX_ERR, CTX_ERR_PEER, CTX_ERR_STEP, CTX_ERR_EXPECTED, CTX_ERR_ACTUAL = 192, 200, 208, 216, 224
CTX_WINDOW, CTX_WINDOW_END = 232, 240  # this rank's window memory
CTX_DEADLINE = 248  # of the current operation; 0: not yet computed
CTX_STEP = 256
CTX_PID = 264
CTX_THREADED = 272  # 1: peers are threads of this process; the GIL is released before waiting
CTX_DRIVE = 280  # function that advances network connections (``waiting.drive``), or 0
CTX_LAST_RUN = 288
CTX_WAIT_COUNT = 296
CTX_P2P_DIRECT = 304  # bytes from which a send is single-copy (p2p); -1: never
CTX_MEMBARRIER = 312
CTX_INSIDE = 320  # 1 while a thread is in the engine
CTX_GONE = 328  # table: not 0 for a rank that has left in an orderly way
CTX_CPU_MASKS = 336  # two sets of CPUs, CPU_SET_BYTES each
CTX_MIGRATE = 344  # 1: a rank that shares a core with a peer moves to a free one
CTX_OPERATE = 352  # address of ``engine.operate``, which all fast calls run
CTX_STREAM = 360  # 1: the current operation writes more than the caches hold
CTX_STREAM_FROM = 368  # bytes from which a send or receive does
CTX_SENDRECV_OPS = 376  # memory of the two OP_* entries of a sendrecv
CTX_FALSE = 384  # address of the object, as CTX_NONE
CTX_SKIP_YIELDS = 392  # number of waits that sleep without yielding first
# address of a 32-bit word that is not 0 while a thread has a group open: Python handles the call
CTX_GROUPS = 400
CTX_SWAP = 408  # 1: a receiver may keep a slot and return another one (kernels.slots)
CTX_CONTROL_WAITS = 416  # table of waits on the control plane, CONTROL_WAIT_SIZE bytes per rank
# not 0: operations run in a background thread, while the application may run control operations
CTX_BACKGROUND = 424
CTX_LIST_TYPE, CTX_TUPLE_TYPE = 432, 440  # as CTX_INT_TYPE
CTX_COUNTS = 448  # memory of the counts of a call
CTX_DETECTOR = 456  # eventfd of the deadlock detector, written when a wait gets long; -1: none
# tail that this rank waits for: messages the peer must consume; 0: it waits for a message of it
CTX_AWAITED_TAIL = 464
CTX_DRIVEN = 472  # argument of CTX_DRIVE
CTX_EXCEPTION = 480  # type, value and traceback that a signal handler raised (3 words)
# virtual ranks: address of a word with the time in ns, and of a function that sleeps; 0: the kernel
CTX_TIME, CTX_SLEEPER = 504, 512
# slots in window memory for one payload with several receivers (kernels.fanout); 0: none
CTX_FANOUT = 520
CTX_FANOUT_TAILS = 528  # table of NFANOUT rows with a word per rank
CTX_FANOUT_NEXT = 536  # number of the next slot
CTX_FANOUT_SLOT = 544  # 1 + the slot of the payload that is being sent; 0: none
CTX_LOOP_COPY = 552  # 1: copy with vectors instead of glibc's memcpy (kernels.copies)
CTX_NEXT_SKIP = 560  # what CTX_SKIP_YIELDS becomes after a long yield
CTX_DRIVE_SLEEPS = 568  # 1: waits for messages of the network sleep in CTX_DRIVE
CTX_SIZE = 576
BUSY_PENDING = 1  # bit of CTX_BUSY for asynchronous operations
# SEQ: the rank's last operation; SENT: messages it has sent to this rank, -1 unknown
CONTROL_WAIT_SET, CONTROL_WAIT_SEQ, CONTROL_WAIT_SENT, CONTROL_WAIT_SIZE = 0, 8, 16, 24
CPU_SET_BYTES = 128  # glibc's cpu_set_t: 1024 CPUs

# ---- temporary words, at CTX_SCRATCH
SCRATCH_NOW = 0  # struct timespec: result of clock_gettime
SCRATCH_SLEEP = 16  # struct timespec: timeout of a futex wait
SCRATCH_EVENTFD = 48  # value written to an eventfd
SCRATCH_VECTORS = 64  # two struct iovec: local memory, and memory of another process
SCRATCH_SOURCES = 128  # sources of a fold (kernels.operands), as many as there are ranks

# ---- connection, one per direction and peer, private
CONN_CAPS = 0  # CAP_* bits; 0: no connection
CONN_DESCS, CONN_SLOTS, CONN_SLOT_BYTES = 8, 16, 24
CONN_COUNT = 32  # messages posted / consumed so far
CONN_TAIL_ADDR, CONN_TAIL = 40, 48
CONN_CTRL, CONN_PID = 56, 64
CONN_WINDOW = 72  # receive: where the peer's window memory is mapped here
CONN_CTS, CONN_DOORBELL, CONN_ASLEEP = 80, 88, 96
CONN_LAST_DIRECT = 104
CONN_PEER_IN, CONN_PEER_OUT = 112, 120  # start of the peer's buffers, from its last SIGNAL
CONN_PEER_MODES = 128  # PRIVATE_*: buffers in the private memory of another process
CONN_DIRECT = 136  # send: 1 if the peer can read this process's private memory
# as PEER_MODES, but also for a peer in the same process, whose private memory is addressable
CONN_PEER_PRIVATE = 144
CONN_REVERSE_SLOTS = 152  # slots of the FIFO in the other direction
CONN_FREE, CONN_NFREE, CONN_WARM, CONN_SENT = 160, 168, 176, 184  # see kernels.slots
CONN_RETURNED = 192
CONN_SIZE = 256
# transport.base.Capability
CAP_ORDERED, CAP_IN_PLACE, CAP_NEEDS_PROGRESS, CAP_ONE_SIDED = 1, 2, 4, 8
PRIVATE_IN, PRIVATE_OUT = 1, 2
MIN_DIRECT_BYTES = 4096  # a smaller slice is cheaper to copy than to be read by the peer

# ---- entry of the table of plans
PLAN_COUNT, PLAN_DTYPE, PLAN_ARG, PLAN_INPLACE, PLAN_COLL, PLAN_RUN = 0, 8, 16, 24, 32, 40
PLAN_OUT_COUNT = 48
PLAN_SIZE = 64
# bit of PLAN_COLL for a plan of uneven blocks, whose PLAN_COUNT is ``sizes.size_class``
UNEVEN = 32

# ---- run
RUN_IN, RUN_OUT, RUN_SCRATCH = 0, 8, 16
RUN_SIG = 24
RUN_ITEMSIZE, RUN_FOLD = 32, 40
RUN_PROGRAM, RUN_NSTEPS = 48, 56
RUN_ROUND_BYTES, RUN_NROUNDS = 64, 72
RUN_DIRECT = 80  # payloads of at least this many bytes are posted by address where possible
RUN_COUNT = 88
RUN_IN_BLOCKS, RUN_OUT_BLOCKS = 96, 104  # tables of (first byte, bytes, chunk bytes) per block
RUN_PARTS = 112
RUN_SCRATCH_CHUNK = 120
RUN_LL = 128
RUN_IN_BYTES, RUN_OUT_BYTES = 136, 144
RUN_SENDS, RUN_NSENDS = 152, 160
RUN_EPILOGUE, RUN_EPILOGUE_ARG = 168, 176  # kernel applied to the output at the end (avg)
RUN_STRIDE = 184  # bytes between the slices of a message (kernels.chunks)
RUN_TEMPLATE = 192  # signature without the sequence number
RUN_STREAM = 200  # as CTX_STREAM
RUN_WINDOW_PATH = 208  # run used if all ranks' buffers are window memory; 0: do not negotiate
RUN_NEGOTIATE_PEERS, RUN_NEGOTIATE_NPEERS = 216, 224  # ranks to negotiate with
RUN_SCRATCH_BLOCK = 232  # bytes of a block, which the chunks of scratch are parts of
RUN_NIN, RUN_NOUT = 240, 248  # number of blocks in RUN_IN_BLOCKS and RUN_OUT_BLOCKS
RUN_STREAM_FROM = 256  # bytes of both buffers from which RUN_STREAM is set
RUN_ROWS = 264  # rows that a run with tables moves, a ROWS_* record; 0: whole chunks
RUN_SIZE = 272
BLOCK_SIZE = 24
# counts of a call: the value that ranks compare, elements for the progress page, then elements of
# each block of the input, of the output
COUNTS_AGREED, COUNTS_REPORTED, COUNTS_BLOCKS = 0, 8, 16

# ---- step of a program
STEP_OP, STEP_SRC_BUF, STEP_SRC, STEP_DST_BUF, STEP_DST, STEP_CHUNKS = 0, 8, 16, 24, 32, 40
STEP_RECV, STEP_SEND, STEP_PEERS, STEP_NPEERS, STEP_ROUNDS = 48, 56, 64, 72, 80
EVERY_ROUND, FIRST_ROUND, LAST_ROUND, NEVER = 0, 1, 2, 3  # STEP_ROUNDS
# tables of src and dst, and of what the step receives, one per peer in STEP_PEERS; -1: none
STEP_SRC_TABLE, STEP_DST_TABLE, STEP_TABLES = 88, 96, 104
STEP_FANOUT = 112
NO_FANOUT, FIRST_OF_FANOUT, REST_OF_FANOUT = 0, 1, 2  # STEP_FANOUT of sends
STEP_SIZE = 120

# ---- rows of one run (kernels.rows)
ROWS_BYTES, ROWS_TOTAL = 0, 8  # bytes of a row, of the block
ROWS_PARTS, ROWS_NROUNDS = 16, 24
ROWS_LISTS = 32  # rows of all tables and parts, ascending
ROWS_STARTS = 40  # position in the lists by (table, part, round), and the end of the last round
ROWS_ZERO = 48  # a row of zeros
ROWS_SIZE = 56

# ---- arguments of kernels.sparse.select
SELECT_BITMAPS, SELECT_NTABLES = 0, 8  # addresses of the tables' bitmaps
SELECT_UNION, SELECT_WORDS, SELECT_TOTAL = 16, 24, 32  # bitmap of the union, its words and bits
SELECT_PARTS, SELECT_PER_ROUND, SELECT_NROUNDS = 40, 48, 56
SELECT_LISTS, SELECT_STARTS = 64, 72
SELECT_SIZE = 80

# ---- arguments of kernels.sparse.merge: ascending lists of words
MERGE_FIRST, MERGE_FIRST_COUNT, MERGE_SECOND, MERGE_SECOND_COUNT, MERGE_UNION = 0, 8, 16, 24, 32
MERGE_SIZE = 40

# ---- one send or receive of an exchange
OP_RECEIVES, OP_PEER, OP_ADDR, OP_BYTES, OP_SIG, OP_PREDECESSOR = 0, 8, 16, 24, 32, 40
OP_SEGMENTS, OP_COUNT = 48, 56
OP_DONE = 64  # segments posted or consumed
OP_MARK = 72  # see kernels.p2p
OP_WAIT = 80  # WAIT_*, or 0: the call does not wait for it
WAIT_ALL, WAIT_ANY = 1, 2  # the call returns when all of these have ended; when one of these has
OP_SIZE = 96

# ---- header of a tagged message, with the payload if that fits (kernels.tagged)
HEADER_TAG, HEADER_COUNT, HEADER_PAYLOAD, HEADER_BYTES = 0, 8, 16, 1024  # COUNT: payload bytes
SHORT_BYTES = HEADER_BYTES - HEADER_PAYLOAD

# ---- results of a kernel
OK, NOT_HANDLED, BUSY = 0, 1, 2
IN_PROGRESS = 3  # begun; the caller must continue it
ERR_ABORTED, ERR_TIMEOUT, ERR_MISMATCH, ERR_SIZE, ERR_LEFT, ERR_CMA = 10, 11, 12, 13, 14, 15
ERR_INTERRUPTED = 16
ERR_DIVERGED = 17  # the peer waits for this rank on the control plane
ERR_ENDED = 18  # the peer has completed the operation in which this rank waits for it
ERR_STREAM_ENDED = 19  # the peer's stream has ended

# ---- fields of a NumPy array: PyArrayObject_fields of numpy/core/include/numpy/ndarraytypes.h,
# part
# of NumPy's ABI since 1.7; ``executor.cpu.arrays`` checks them on a probe before they are used
OB_TYPE = 8
ARRAY_DATA, ARRAY_ND, ARRAY_DIMS, ARRAY_DESCR, ARRAY_FLAGS = 16, 24, 32, 56, 64
ARRAY_C_CONTIGUOUS, ARRAY_ALIGNED, ARRAY_WRITEABLE = 0x0001, 0x0100, 0x0400
