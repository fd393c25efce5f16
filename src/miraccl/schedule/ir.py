"""Intermediate representation of a collective: a schedule of primitives as data.

A ``Schedule`` lists, for every channel and rank, the primitives in program order and the chunks
they act on. It contains ranks, channels, chunks and buffers. Pointers, sizes, element types,
sockets and streams are arguments of a run and are not part of it. ``schedule.interpret`` defines
the meaning of each step; ``schedule.verify`` proves that a schedule implements its collective.

Blocks, parts and chunks: every buffer consists of blocks of ``count`` elements (uneven operations
give each block its own count). Each block is cut into ``parts`` chunks of nearly equal size. Chunk
``i`` of a buffer is part ``i % parts`` of block ``i // parts``. The input is read only; in place it
overlaps the output as defined in ``schedule.layout``.

Rows: a schedule with ``tables`` moves rows of a block instead of whole blocks. Its parts are lists
of rows, and a reference names those rows of its chunk that one table lists (``schedule.rows``).
Like the counts of uneven operations, the lists are arguments of a run. So are the extents of a
transfer between two ranks, whose sizes are arbitrary (``schedule.transfer_schedule``).

Shards: in a broadcast with ``shards`` each chunk has ranks of its own that hold it at the start,
and ranks that need it at the end: a re-sharding of an array (``schedule.reshard_schedule``).

=============== ============ =============
collective      input blocks output blocks
=============== ============ =============
all_reduce      1            1
broadcast       1 (root)     1
reduce          1            1 (root)
all_gather      1            nranks
gather          1            nranks (root)
reduce_scatter  nranks       1
scatter         nranks(root) 1
all_to_all      nranks       nranks
barrier         0            0
=============== ============ =============

The primitives are those of NCCL (``src/device/prims_simple.h``) for memory reached through a FIFO,
and those of MSCCL++ for memory that peers can address.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from miraccl.types import Collective


class Buffer(enum.IntEnum):
    """Buffers of a rank. In place, INPUT and OUTPUT overlap as the collective defines."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Op(enum.IntEnum):
    """Primitives. ``msg`` is the next message in the FIFO from ``recv_peer``; (+) is the reduction.

    Through a FIFO:

    ====================== =============================================
    SEND                   msg to send_peer = src
    RECV                   dst = msg
    COPY                   dst = src
    RECV_REDUCE            dst = dst (+) msg
    RECV_COPY_SEND         dst = msg, forwarded to send_peer
    RECV_REDUCE_SEND       msg to send_peer = src (+) msg
    RECV_REDUCE_COPY       dst = src (+) msg
    RECV_REDUCE_COPY_SEND  dst = src (+) msg, forwarded to send_peer
    RECV_REDUCE_ALL        dst = left fold of one msg from each of ``peers``
                           in the order listed; the rank itself in that
                           list stands for its src (no src: the rank is
                           not in the list). 16- and 8-bit floats are
                           rounded once, at the end.
    ====================== =============================================

    On memory that peers can address:

    ====================== =============================================
    PUT                    dst on send_peer = src here
    GET                    dst here = src on recv_peer
    REDUCE_FROM_PEERS      dst here = left fold of src on each of
                           ``peers``, in the order listed
    SIGNAL                 notify each of ``peers`` that all earlier steps
                           of this rank on this channel are complete
    WAIT                   consume one signal from each of ``peers``
    BARRIER                block until all ranks have reached this step
    ====================== =============================================

    There is one FIFO per (sender, receiver, channel); each sending step adds one message of
    ``step.chunks`` chunks. Signals are counted per (sender, receiver, channel); a barrier belongs
    to its channel.
    """

    SEND = 0
    RECV = 1
    COPY = 2
    RECV_REDUCE = 3
    RECV_COPY_SEND = 4
    RECV_REDUCE_SEND = 5
    RECV_REDUCE_COPY = 6
    RECV_REDUCE_COPY_SEND = 7
    RECV_REDUCE_ALL = 8
    PUT = 9
    GET = 10
    REDUCE_FROM_PEERS = 11
    SIGNAL = 12
    WAIT = 13
    BARRIER = 14

    @property
    def receives(self) -> bool:
        return Op.RECV <= self <= Op.RECV_REDUCE_ALL and self is not Op.COPY

    @property
    def sends(self) -> bool:
        return self in (Op.SEND, Op.RECV_COPY_SEND, Op.RECV_REDUCE_SEND, Op.RECV_REDUCE_COPY_SEND)

    @property
    def reduces(self) -> bool:
        return self in _REDUCES

    @property
    def needs_addressable_memory(self) -> bool:
        """True for PUT, GET and REDUCE_FROM_PEERS."""
        # SIGNAL, WAIT and BARRIER carry no data: any connection can transmit them (empty messages).
        return Op.PUT <= self <= Op.REDUCE_FROM_PEERS


_REDUCES = frozenset(
    (
        Op.RECV_REDUCE,
        Op.RECV_REDUCE_SEND,
        Op.RECV_REDUCE_COPY,
        Op.RECV_REDUCE_COPY_SEND,
        Op.RECV_REDUCE_ALL,
        Op.REDUCE_FROM_PEERS,
    )
)

#: operands of each primitive: (src, dst, recv_peer, send_peer, peers)
OPERANDS: dict[Op, tuple[bool, bool, bool, bool, bool]] = {
    Op.SEND: (True, False, False, True, False),
    Op.RECV: (False, True, True, False, False),
    Op.COPY: (True, True, False, False, False),
    Op.RECV_REDUCE: (False, True, True, False, False),
    Op.RECV_COPY_SEND: (False, True, True, True, False),
    Op.RECV_REDUCE_SEND: (True, False, True, True, False),
    Op.RECV_REDUCE_COPY: (True, True, True, False, False),
    Op.RECV_REDUCE_COPY_SEND: (True, True, True, True, False),
    Op.RECV_REDUCE_ALL: (True, True, False, False, True),
    Op.PUT: (True, True, False, True, False),
    Op.GET: (True, True, True, False, False),
    Op.REDUCE_FROM_PEERS: (True, True, False, False, True),
    Op.SIGNAL: (False, False, False, False, True),
    Op.WAIT: (False, False, False, False, True),
    Op.BARRIER: (False, False, False, False, False),
}
#: an aggregator folds messages only
_WITHOUT_SOURCE = (Op.RECV_REDUCE_ALL, (False, True, False, False, True))


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to ``chunks`` consecutive chunks of a buffer, starting at chunk ``index``.

    ``table``: number of the table whose rows of these chunks are meant; None for whole chunks.
    """

    buffer: Buffer
    index: int
    chunks: int = 1
    table: int | None = None

    def __post_init__(self) -> None:
        if self.index < 0 or self.chunks < 1:
            raise ValueError(
                f"cannot make a reference with index {self.index} and {self.chunks} chunks: index"
                " >= 0 and chunks >= 1 are required"
            )

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.index, self.index + self.chunks))

    def __str__(self) -> str:
        tail = f"+{self.chunks}" if self.chunks != 1 else ""
        rows = "" if self.table is None else f"@{self.table}"
        return f"{self.buffer.name.lower()}[{self.index}{tail}]{rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One primitive of one rank on one channel; ``Op`` defines the operands."""

    op: Op
    src: Ref | None = None
    dst: Ref | None = None
    recv_peer: int | None = None
    send_peer: int | None = None
    peers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        given = (
            self.src is not None,
            self.dst is not None,
            self.recv_peer is not None,
            self.send_peer is not None,
            bool(self.peers),
        )
        # One tuple comparison: large schedules have tens of thousands of steps.
        if given != OPERANDS[self.op] and (self.op, given) != _WITHOUT_SOURCE:
            for name, want, has in zip(
                ("src", "dst", "recv_peer", "send_peer", "peers"),
                OPERANDS[self.op],
                given,
                strict=True,
            ):
                if want and not has:
                    raise ValueError(f"{self.op.name} needs {name}")
                if has and not want:
                    raise ValueError(f"{self.op.name} has no {name}")
        if self.src is not None and self.dst is not None and self.src.chunks != self.dst.chunks:
            raise ValueError(
                f"{self.op.name}: src has {self.src.chunks} chunks, dst {self.dst.chunks}"
            )

    @property
    def chunks(self) -> int:
        """Number of chunks in the step's operands; 0 for SIGNAL, WAIT and BARRIER."""
        ref = self.dst or self.src
        return ref.chunks if ref is not None else 0

    @property
    def remote(self) -> Ref | None:
        """Chunks that the step reads or writes in the memory of peers, or None."""
        if not self.op.needs_addressable_memory:
            return None
        return self.dst if self.op is Op.PUT else self.src

    def senders(self, rank: int) -> list[int]:
        """Return the peers from each of which ``rank`` receives one message in this step."""
        if self.op is Op.RECV_REDUCE_ALL:
            return [peer for peer in self.peers if peer != rank]
        return [self.recv_peer] if self.op.receives and self.recv_peer is not None else []


class ChunkRanks(NamedTuple):
    """Ranks of one chunk of a re-sharding, as bits.

    Attributes:
        holders: Ranks whose input has the chunk at the start.
        targets: Ranks whose output must have it at the end.
    """

    holders: int
    targets: int


#: buffer that only the root of a rooted collective has
ROOT_ONLY: dict[Collective, Buffer] = {
    Collective.BROADCAST: Buffer.INPUT,
    Collective.SCATTER: Buffer.INPUT,
    Collective.REDUCE: Buffer.OUTPUT,
    Collective.GATHER: Buffer.OUTPUT,
}


def input_blocks(collective: Collective, nranks: int) -> int:
    """Return the number of blocks in a rank's input (scatter: in the root's input)."""
    if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER, Collective.ALL_TO_ALL):
        return nranks
    return 0 if collective is Collective.BARRIER else 1


def output_blocks(collective: Collective, nranks: int) -> int:
    """Return the number of blocks in a rank's output (gather: in the root's output)."""
    if collective in (Collective.ALL_GATHER, Collective.GATHER, Collective.ALL_TO_ALL):
        return nranks
    return 0 if collective is Collective.BARRIER else 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of all ranks: ``channels[c][r]`` is the program of rank ``r`` on channel ``c``.

    ``parts`` is the number of chunks per block, over all channels. ``scratch_chunks`` is the number
    of scratch chunks of each rank; scratch is also cut into blocks of ``parts`` chunks, so scratch
    chunk ``i`` has the size of part ``i % parts``. Steps of different channels are unordered.

    ``tables``: for each table of rows the set of ranks, as bits, whose rows it lists. The rows of a
    set of ranks are those in which one of their inputs is not zero. Empty: whole chunks move.

    ``aggregators``: participants beyond the ranks, numbered from ``nranks``. They have neither
    input nor output, only scratch, and contribute nothing.

    ``shards``: for each chunk of a broadcast the ranks that hold it, and those that need it. Empty:
    the root holds all chunks, and every rank needs them.
    """

    name: str
    collective: Collective
    nranks: int
    parts: int
    channels: tuple[tuple[tuple[Step, ...], ...], ...]
    root: int = 0
    scratch_chunks: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)
    tables: tuple[int, ...] = ()
    aggregators: int = 0
    shards: tuple[ChunkRanks, ...] = ()

    def __post_init__(self) -> None:
        if self.nranks < 1 or self.parts < 1 or not self.channels:
            raise ValueError(
                f"schedule {self.name!r}: nranks, parts and the number of channels must be at"
                " least 1"
            )
        if not 0 <= self.root < self.nranks:
            raise ValueError(
                f"schedule {self.name!r}: root {self.root} is not in 0..{self.nranks - 1}"
            )
        for number, channel in enumerate(self.channels):
            if len(channel) != self.participants:
                raise ValueError(
                    f"schedule {self.name!r}: channel {number} has {len(channel)} ranks, not"
                    f" {self.participants}"
                )
        if self.shards:
            self._check_shards()

    def _check_shards(self) -> None:
        if self.collective is not Collective.BROADCAST or len(self.shards) != self.parts:
            raise ValueError(
                f"schedule {self.name!r}: {len(self.shards)} shards of a"
                f" {self.collective.label} of {self.parts} chunks; only a broadcast has shards, one"
                " for each chunk"
            )
        for chunk, ranks in enumerate(self.shards):
            if not 0 <= ranks.holders | ranks.targets < 1 << self.nranks:
                raise ValueError(
                    f"schedule {self.name!r}: shard {chunk} has a rank that is not in"
                    f" 0..{self.nranks - 1}"
                )

    @property
    def participants(self) -> int:
        """Number of ranks and aggregators."""
        return self.nranks + self.aggregators

    @property
    def nchannels(self) -> int:
        return len(self.channels)

    @property
    def input_chunks(self) -> int:
        return input_blocks(self.collective, self.nranks) * self.parts

    @property
    def output_chunks(self) -> int:
        return output_blocks(self.collective, self.nranks) * self.parts

    def buffer_chunks(self, buffer: Buffer) -> int:
        return (self.input_chunks, self.output_chunks, self.scratch_chunks)[buffer]

    def chunks_at(self, buffer: Buffer, rank: int) -> int:
        """Return the number of chunks of ``buffer`` on ``rank``.

        Only the root has the input of a broadcast or scatter and the output of a reduce or gather.
        With shards every rank has an input, of which it holds some chunks. Aggregators have scratch
        only.
        """
        if rank != self.root and buffer is ROOT_ONLY.get(self.collective) and not self.shards:
            return 0
        if rank >= self.nranks and buffer is not Buffer.SCRATCH:
            return 0
        return self.buffer_chunks(buffer)

    @cached_property
    def widest(self) -> int:
        """Number of chunks in the largest step of any rank."""
        # The maximum over all ranks, because all ranks cut messages alike.
        return (
            max(
                (step.chunks for channel in self.channels for steps in channel for step in steps),
                default=1,
            )
            or 1
        )

    @cached_property
    def ops(self) -> frozenset[Op]:
        """Primitives used by any rank."""
        return frozenset(
            step.op for channel in self.channels for steps in channel for step in steps
        )

    @property
    def needs_addressable_memory(self) -> bool:
        return any(op.needs_addressable_memory for op in self.ops)

    @cached_property
    def addressed(self) -> frozenset[Buffer]:
        """Buffers that ranks read or write in each other's memory."""
        steps = (step for channel in self.channels for steps in channel for step in steps)
        return frozenset(step.remote.buffer for step in steps if step.remote is not None)
