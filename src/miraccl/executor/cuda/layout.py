"""Layout of a rank's symmetric memory and of launch arguments, shared by Python and CUDA.

The symmetric memory is one allocation per rank, mapped by every other rank:

======== ============================================================ ======================
part     contents                                                     written by
======== ============================================================ ======================
state    number of the launch, ticket of its blocks, signatures,      its rank
         number of message collectives, whether a wait has failed
op log   op records: operations that peers run, per (peer, launch     the peer
         modulo 4)
waits    wait words of long waits for messages, per (rank, peer)      the rank
flags    of staged copies: chunk ready, slot free                     peers; cleared by its rank
counters rows sent, rows received, per (peer, warp queue)             its rank
credit   rows that the peer has received, per (peer, warp queue)      the peer
msg ops  message collectives that peers run                           the peer
packets  two halves of the packet buffer, ones where empty;           peers; cleared by its rank
         FIFOs of protocol Simple during a launch of it; staging
         memory of copies between two device barriers
rows     row FIFOs of messages to this rank, per (peer, warp queue)   peers
bulk     chunks of large messages to this rank; their words           peers
======== ============================================================ ======================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from miraccl.schedule.ir import Buffer, Op

MAX_RANKS = 8
#: Maximum blocks of protocol Simple: a multiple of every number of channels in use, below the 132
#: multiprocessors of a Hopper GPU.
BLOCKS = 128
WORD_STRIDE = 64  # bytes from one counter to the next
MAX_CHANNELS = 32
#: Steps of one rank in the arguments: as many as fit into 4 KiB, and more for drivers of CUDA 12.1.
STEP_CAPACITIES = (120, 480, 1280)
SMALL_ARGUMENT_BYTES, LARGE_ARGUMENT_BYTES, LARGE_ARGUMENTS_DRIVER = 4096, 32764, 12010

KIB, MIB = 1 << 10, 1 << 20
STATE_OFFSET = 0
#: Words (of 8 bytes) from STATE_OFFSET, on cache lines of their own.
STATE_LAUNCH, STATE_TICKET, STATE_SIGNATURES, STATE_MESSAGE_OPS = 0, 8, 16, 24
STATE_WAIT_FAILED = 25  # not 0: a wait on this GPU has ended by an error
#: Launch after which copies whose streams wait for peers are in progress, 0: none.
STATE_COPIES = 26
STATE_GATE = 27  # not 0: gated launches of this rank run
OP_LOG_OFFSET = 1 * KIB
OP_LOG_ENTRIES = 4  # launches that are recorded; blocks 0 of peers are at most one launch apart
#: Needed ranks in the last word of an op record: one bit each, or this one for all. The launch
#: number is above it, because the halves of a record may arrive separately.
NEEDS_ALL_SHIFT = 16
NEEDS_ALL = 1 << NEEDS_ALL_SHIFT
COPY_FLAGS_OFFSET = 2 * KIB  # 4-byte words of staged copies: ready[src][slot], free[dst][slot]
COPY_SLOTS = 4  # maximum of a pair
COPY_FLAGS_BYTES = 2 * MAX_RANKS * COPY_SLOTS * 4
#: By peer: size of this rank's message that the peer has rejected, as in MESSAGE, with the highest
#: bit set.
REJECTED_OFFSET = 3 * KIB
#: Wait words by (rank, awaited rank), source/p2p.cuh.
WAITS_OFFSET = REJECTED_OFFSET + MAX_RANKS * WORD_STRIDE
MAX_WARP_QUEUES = 512  # of a pair of ranks in one direction, source/p2p.cuh
_COUNTER_BYTES = 128 * KIB
ROWS_SENT_OFFSET = 4 * KIB
ROWS_RECEIVED_OFFSET = ROWS_SENT_OFFSET + _COUNTER_BYTES
CREDIT_OFFSET = ROWS_RECEIVED_OFFSET + _COUNTER_BYTES
#: By rank, this one included: its last MESSAGE_OP_ENTRIES message collectives, as MESSAGE_OP.
MESSAGE_OPS_OFFSET = CREDIT_OFFSET + _COUNTER_BYTES
MESSAGE_OP_ENTRIES = 8
PACKETS_OFFSET = 1 * MIB
HALF_BYTES = 23 * MIB  # one half of the packet buffer
ROW_FIFOS_OFFSET = PACKETS_OFFSET + 2 * HALF_BYTES
ROW_FIFOS_BYTES = 5 * MIB
ROW_BYTES = 512  # a store of 16 bytes by each thread of a warp
FIFO_ROWS = 16  # of a warp queue; more warp queues gain more than longer FIFOs
# Large messages, source/bulk.cuh: a pool of slots shared by all senders to a rank.
BULK_MIN_BYTES = 64 * MIB  # of a large message
CHUNK_BYTES = 64 * KIB
BULK_OFFSET = ROW_FIFOS_OFFSET + ROW_FIFOS_BYTES
BULK_BYTES = 8 * MIB
BULK_STRIDE = 16  # bytes from one word to the next
#: Messages sent to and received from each peer; blocks that have finished (sends, then receives).
BULK_COUNTS_OFFSET = 512 * KIB
BULK_GRANTS_OFFSET = 514 * KIB  # per peer
BULK_ARRIVED_OFFSET = 516 * KIB  # per slot
BULK_FREED_OFFSET = 520 * KIB  # per (peer, slot)
TOTAL_BYTES = BULK_OFFSET + BULK_BYTES
FIFO_WORD_BYTES = 16  # tails, heads and signals of protocol Simple, at the end of a half
FIFO_SLOTS = 2
MAX_SLOT_BYTES = 128 * KIB
#: Initial contents other than zeros: (offset, bytes, word). Empty packets are ones.
INITIAL_FILL = ((PACKETS_OFFSET, 2 * HALF_BYTES, 0xFFFFFFFF),)
assert COPY_FLAGS_OFFSET + COPY_FLAGS_BYTES <= REJECTED_OFFSET
assert WAITS_OFFSET + 8 * MAX_RANKS**2 <= ROWS_SENT_OFFSET
assert MESSAGE_OPS_OFFSET + MAX_RANKS * MESSAGE_OP_ENTRIES * 16 <= BULK_COUNTS_OFFSET
assert BULK_FREED_OFFSET + MAX_RANKS * (BULK_BYTES // CHUNK_BYTES) * BULK_STRIDE <= PACKETS_OFFSET

# Words (of 4 bytes) in host memory that waiting kernels read and write.
HOST_ABORT, HOST_EXITED = 0, 1  # loaded together; EXITED: a bit per peer whose GPU work has ended
HOST_ERROR, HOST_PEER, HOST_AWAITED = 2, 3, 4
HOST_CLAIM, HOST_SIZES = 5, 6  # ERROR_SIZES: this rank's and the peer's size, as in MESSAGE
#: ERROR_CYCLE: 4 bits per rank, the rank it waits for; then a bit per rank that waits for credit.
HOST_CYCLE = HOST_SIZES
#: Launch of the error, as this rank or the peer ran it; 0 for messages.
HOST_LAUNCH, HOST_SIGNATURE = 10, 11
HOST_BYTES = 64
ERROR_TIMEOUT, ERROR_SIZES, ERROR_MISMATCH, ERROR_EXITED = 1, 2, 3, 4
ERROR_CROSSED = 5  # this rank waits for a message, the peer's launch HOST_LAUNCH for this rank
ERROR_CYCLE = 6  # ranks wait for each other in messages
AWAIT_PACKET, AWAIT_RESULT, AWAIT_MESSAGE, AWAIT_CREDIT = 0, 1, 2, 3
AWAIT_SEND, AWAIT_RECV, AWAIT_ARRIVAL, AWAIT_SIGNAL, AWAIT_COPY = 4, 5, 6, 7, 8
#: Continues "rank 0 waited for ... from rank 1".
AWAIT_TEXT = {
    AWAIT_PACKET: "a packet",
    AWAIT_RESULT: "a packet of the result",  # second shot, or from a tree's parent
    AWAIT_MESSAGE: "a message",
    AWAIT_CREDIT: "space in its FIFO",
    AWAIT_ARRIVAL: "its arrival",
    AWAIT_SIGNAL: "a signal",
    AWAIT_COPY: "a copy, or space for one,",
}


def slot_bytes(slots: int, blocks: int) -> int:
    """Return the bytes of a slot if each of ``blocks`` blocks has ``slots`` of them in a half."""
    capacity = HALF_BYTES - 3 * MAX_RANKS * BLOCKS * FIFO_WORD_BYTES
    return min(MAX_SLOT_BYTES, capacity // (slots * blocks) // 1024 * 1024)


def message_warp_queues(nranks: int) -> int:
    """Return the warp queues between two ranks in one direction; all row FIFOs share
    ``ROW_FIFOS_BYTES``.
    """
    return min(MAX_WARP_QUEUES, ROW_FIFOS_BYTES // (max(1, nranks - 1) * FIFO_ROWS * ROW_BYTES))


@dataclass(frozen=True, slots=True)
class Field:
    """Field of a struct: ``struct`` format code and offset in bytes."""

    code: str
    offset: int


#: struct Args of source/common.cuh; two arrays of nranks pointers follow ``own``: inbox, outbox.
ARGS = {
    "in": Field("Q", 0),
    "out": Field("Q", 8),
    "count": Field("Q", 16),
    "rank": Field("I", 24),
    "root": Field("I", 28),
    "nslots": Field("I", 32),
    "lookahead": Field("I", 36),
    "timeout_ns": Field("Q", 40),
    "scalar": Field("Q", 48),
    "signature": Field("Q", 56),
    "prev": Field("I", 64),
    "next": Field("I", 68),
    "position": Field("I", 72),
    "trees": Field("8s", 76),  # two TREE_LINKS
    "host": Field("Q", 88),
    "own": Field("Q", 96),
}
#: struct TreeLinks: parent, two children, index among the parent's children; NO_RANK if none.
TREE_LINKS = "<BBBB"
NO_RANK = 255


def args_bytes(nranks: int) -> int:
    return ARGS["own"].offset + 8 + 16 * nranks


#: struct Step of source/steps.cuh: op, src_buf, dst_buf, npeers, recv_peer, send_peer, chunks,
#: complete, src, dst, -, peers.
STEP = "<BBBBbbB?HHxxxxQ"
#: Primitives of the kernel; a BARRIER is lowered to two of them.
STEP_OPS = tuple(op for op in Op if op is not Op.BARRIER)
#: struct Program after Args: part, tile, parts, channels, first[MAX_CHANNELS + 1], slot, scratch,
#: scratch chunks, in_offsets, out_offsets, recv_fifo, send_fifo; the steps follow.
PROGRAM_HEAD = f"<QQII{MAX_CHANNELS + 1}IIII{MAX_RANKS}q{MAX_RANKS}q{MAX_RANKS}s{MAX_RANKS}s"


#: struct MessageDesc of source/p2p.cuh: address, bytes and type.
MESSAGE = "<QQ"
TYPE_SHIFT = 56
#: struct PeerQueue: kind, peer, warp queues or blocks, the first of them, first message, messages,
#: first slot, slots, -.
QUEUE = "<BBHIIIHHxxxx"
TO_PEER, FROM_PEER, TO_SELF, TO_BULK, FROM_BULK = 0, 1, 2, 3, 4
MAX_QUEUES = 4 * MAX_RANKS - 3  # up to four per peer
MAX_MESSAGES = 192  # in the arguments of a launch, which have 4 KiB
#: struct P2pArgs after Args: table, queues, warp queues, blocks of large messages, warps that draw
#: the number of a message collective (0: plain messages); then queues and messages.
P2P_HEAD = "<QIIII"
#: Entry of a message collective: number, tag (``op_tag`` of source/p2p.cuh), signature, launches
#: before it.
MESSAGE_OP = "<IIII"


def small_capacity(nranks: int) -> int:
    """Return the argument bytes for the queues and messages of most launches.

    Enough for one message to and from every rank, and eight more. The driver copies all of it at
    every launch.
    """
    return (2 * nranks - 1) * struct.calcsize(QUEUE) + (2 * nranks + 8) * struct.calcsize(MESSAGE)


LARGE_CAPACITY = MAX_QUEUES * struct.calcsize(QUEUE) + MAX_MESSAGES * struct.calcsize(MESSAGE)
#: Framing -> (vectors of a group, vectors of the first group of a message).
GROUP_SIZES = {"line": (124, 112), "pair": (64, 63)}


# ---- macros of this file for CUDA sources; the compiler compares the sizes of structs


def common_defines(nranks: int) -> dict[str, int]:
    """Return the macros of every kernel."""
    names = (
        "WORD_STRIDE MAX_RANKS STATE_OFFSET STATE_LAUNCH STATE_TICKET STATE_SIGNATURES "
        "STATE_WAIT_FAILED STATE_COPIES STATE_GATE OP_LOG_OFFSET "
        "OP_LOG_ENTRIES NEEDS_ALL_SHIFT PACKETS_OFFSET HALF_BYTES NO_RANK "
        "HOST_ABORT HOST_EXITED HOST_ERROR HOST_PEER HOST_AWAITED HOST_CLAIM HOST_LAUNCH "
        "HOST_SIGNATURE ERROR_TIMEOUT ERROR_MISMATCH ERROR_EXITED AWAIT_PACKET AWAIT_RESULT "
        "AWAIT_MESSAGE AWAIT_CREDIT AWAIT_ARRIVAL"
    )
    return _named(names) | {"RANKS": nranks, "ARGS_BYTES": args_bytes(nranks)}


def step_defines(nranks: int, capacity: int) -> dict[str, int]:
    """Return the macros of source/steps.cuh for ``capacity`` steps, and the numbers of its
    primitives.
    """
    sizes = {
        "MAX_STEPS": capacity,
        "STEP_BYTES": struct.calcsize(STEP),
        "PROGRAM_BYTES": args_bytes(nranks)
        + struct.calcsize(PROGRAM_HEAD)
        + capacity * struct.calcsize(STEP),
    }
    return (
        _named("BLOCKS MAX_CHANNELS AWAIT_SIGNAL")
        | sizes
        | {name.name: int(name) for name in (*STEP_OPS, *Buffer)}
    )


def message_defines(nranks: int, frame: str) -> dict[str, int]:
    """Return the macros of source/p2p.cuh and bulk.cuh."""
    names = (
        "TO_PEER FROM_PEER TO_SELF TO_BULK FROM_BULK ROWS_SENT_OFFSET ROWS_RECEIVED_OFFSET "
        "CREDIT_OFFSET "
        "STATE_MESSAGE_OPS MESSAGE_OPS_OFFSET MESSAGE_OP_ENTRIES "
        "REJECTED_OFFSET WAITS_OFFSET ROW_FIFOS_OFFSET FIFO_ROWS ROW_BYTES HOST_SIZES "
        "HOST_CYCLE ERROR_SIZES ERROR_CROSSED ERROR_CYCLE "
        "AWAIT_SEND AWAIT_RECV BULK_MIN_BYTES CHUNK_BYTES "
        "BULK_OFFSET BULK_STRIDE BULK_COUNTS_OFFSET BULK_GRANTS_OFFSET "
        "BULK_ARRIVED_OFFSET BULK_FREED_OFFSET"
    )
    sizes = {
        "QUEUE_BYTES": struct.calcsize(QUEUE),
        "HEAD_BYTES": args_bytes(nranks) + struct.calcsize(P2P_HEAD),
    }
    group, first = GROUP_SIZES[frame]
    macros = {
        "WARP_QUEUES": message_warp_queues(nranks),
        "GROUP_VECTORS": group,
        "FIRST_VECTORS": first,
        "BULK_SLOTS": BULK_BYTES // CHUNK_BYTES,
    }
    return _named(names) | sizes | macros


def _named(names: str) -> dict[str, int]:
    return {name: int(globals()[name]) for name in names.split()}


#: Words of ``RowArgs`` (source/rows.cuh) before its arrays of a word per rank, and those arrays.
ROW_ARGS_WORDS, ROW_ARGS_ARRAYS = 10, 3


def row_args_bytes(nranks: int) -> int:
    """Return the size of the argument of kernels on rows."""
    return 8 * (ROW_ARGS_WORDS + ROW_ARGS_ARRAYS * nranks)


# ---- exchange of rows (source/row_exchange.cuh): a workspace per rank, a window of all ranks

#: Bytes of a row, and of a chunk, the rows that a warp scans at a time. Half a warp's vectors are
#: the smallest row that one store instruction sends as whole 128-byte lines.
SPARSE_ROW_BYTES, SPARSE_CHUNK_BYTES = 256, 4096
#: Head of the workspace: words that its rank writes, and per peer the operations that it has
#: finished. Its own: operations finished; rows sent, summed and sampled in this one; ticket.
SPARSE_FINISHED_OFFSET, SPARSE_SENT_OFFSET, SPARSE_SUMMED_OFFSET = 0, WORD_STRIDE, 2 * WORD_STRIDE
SPARSE_SAMPLED_OFFSET, SPARSE_TICKET_OFFSET = 3 * WORD_STRIDE, 4 * WORD_STRIDE
#: Result of the last operation: its number, whether rows were summed, rows summed, then the rows
#: of each rank.
SPARSE_RESULT_OFFSET = 512
SPARSE_RESULT = f"<QQQ{MAX_RANKS}Q"
SPARSE_PEERS_OFFSET = 1024
SPARSE_HEAD_BYTES = 4096
#: Words of ``RowExchange`` after ``Args``, and one word per rank.
SPARSE_WORDS = 4


def row_exchange_bytes(nranks: int) -> int:
    """Return the size of the argument of the kernels ``row_send`` and ``row_reduce``."""
    return args_bytes(nranks) + 8 * (SPARSE_WORDS + nranks)


def row_exchange_defines(nranks: int) -> dict[str, int]:
    """Return the macros of source/row_exchange.cuh."""
    names = (
        "SPARSE_ROW_BYTES SPARSE_CHUNK_BYTES SPARSE_FINISHED_OFFSET SPARSE_SENT_OFFSET "
        "SPARSE_SUMMED_OFFSET SPARSE_SAMPLED_OFFSET SPARSE_TICKET_OFFSET SPARSE_RESULT_OFFSET "
        "SPARSE_PEERS_OFFSET SPARSE_HEAD_BYTES"
    )
    return _named(names) | {"ROW_EXCHANGE_BYTES": row_exchange_bytes(nranks)}
