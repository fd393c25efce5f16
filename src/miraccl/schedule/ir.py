"""The schedule: a collective as data.

A ``Schedule`` says, for every channel and every rank, in which order which primitive acts on which chunks.  It knows ranks,
channels, chunks and buffers; it knows no pointers, sizes, element types, sockets or streams: those are arguments of a run.
What a step means is defined by ``schedule.interpret``; that a schedule is right is proved by ``schedule.verify``.

Blocks, parts and chunks.  Every buffer consists of blocks of ``count`` elements (uneven operations give each block its own
count); each block is cut into ``parts`` chunks of nearly equal size.  Chunk ``i`` of a buffer is part ``i % parts`` of block
``i // parts``.  The input is read only; in place it overlaps the output as ``schedule.layout`` says.

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

The primitives are those of NCCL (``src/device/prims_simple.h``) for memory that is reached through a FIFO, and those of
MSCCL++ for memory that peers can address.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from miraccl.types import Collective


class Buffer(enum.IntEnum):
    """A rank's memory as a schedule sees it. In place, INPUT and OUTPUT overlap as the collective defines it."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Op(enum.IntEnum):
    """Primitives. ``msg`` is the next message on the FIFO from ``recv_peer``; (+) is the reduction.

    Through a FIFO:

    ====================== =============================================
    SEND                   msg to send_peer = src
    RECV                   dst = msg
    COPY                   dst = src
    RECV_REDUCE            dst = dst (+) msg
    RECV_COPY_SEND         dst = msg, and on to send_peer
    RECV_REDUCE_SEND       msg to send_peer = src (+) msg
    RECV_REDUCE_COPY       dst = src (+) msg
    RECV_REDUCE_COPY_SEND  dst = src (+) msg, and on to send_peer
    RECV_REDUCE_ALL        dst = fold of one msg from each of ``peers`` in the order listed; the rank itself in that list
                           stands for its src. 16- and 8-bit floats are rounded once, at the end.
    ====================== =============================================

    On memory that peers can address:

    ====================== =============================================
    PUT                    dst on send_peer = src here
    GET                    dst here = src on recv_peer
    REDUCE_FROM_PEERS      dst here = fold of src on each of ``peers``, in the order listed
    SIGNAL                 tells each of ``peers`` that everything before it is done
    WAIT                   takes one signal from each of ``peers``
    BARRIER                no rank leaves before all ranks have come
    ====================== =============================================

    There is one FIFO per (sender, receiver, channel); each sending step puts one message of ``step.chunks`` chunks into it.
    Signals are counted per (sender, receiver, channel), and a barrier is one of its channel.
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
        """SIGNAL, WAIT and BARRIER carry no data: a connection of any kind can do them (an empty message)."""
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

#: op -> (src, dst, recv_peer, send_peer, peers): which fields it has
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


@dataclass(frozen=True, slots=True)
class Ref:
    """``chunks`` consecutive chunks of a buffer, from chunk ``index`` on."""

    buffer: Buffer
    index: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.index < 0 or self.chunks < 1:
            raise ValueError(
                f"a reference needs index >= 0 and chunks >= 1, got {self.index} and {self.chunks}"
            )

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.index, self.index + self.chunks))

    def __str__(self) -> str:
        tail = f"+{self.chunks}" if self.chunks != 1 else ""
        return f"{self.buffer.name.lower()}[{self.index}{tail}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One primitive of one rank on one channel; see ``Op`` for the meaning of the operands."""

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
        if (
            given != OPERANDS[self.op]
        ):  # one comparison: large schedules have tens of thousands of steps
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
        """How many chunks the step moves."""
        ref = self.dst or self.src
        return ref.chunks if ref is not None else 0

    @property
    def remote(self) -> Ref | None:
        """What the step reads or writes in the memory of peers."""
        if not self.op.needs_addressable_memory:
            return None
        return self.dst if self.op is Op.PUT else self.src

    def senders(self, rank: int) -> list[int]:
        """The ranks from each of which ``rank`` takes one message in this step."""
        if self.op is Op.RECV_REDUCE_ALL:
            return [peer for peer in self.peers if peer != rank]
        return [self.recv_peer] if self.op.receives and self.recv_peer is not None else []


#: the buffer that only the root of a rooted collective has
ROOT_ONLY: dict[Collective, Buffer] = {
    Collective.BROADCAST: Buffer.INPUT,
    Collective.SCATTER: Buffer.INPUT,
    Collective.REDUCE: Buffer.OUTPUT,
    Collective.GATHER: Buffer.OUTPUT,
}


def input_blocks(collective: Collective, nranks: int) -> int:
    """Blocks in a rank's input (for scatter: in the root's)."""
    if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER, Collective.ALL_TO_ALL):
        return nranks
    return 0 if collective is Collective.BARRIER else 1


def output_blocks(collective: Collective, nranks: int) -> int:
    """Blocks in a rank's output (for gather: in the root's)."""
    if collective in (Collective.ALL_GATHER, Collective.GATHER, Collective.ALL_TO_ALL):
        return nranks
    return 0 if collective is Collective.BARRIER else 1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """``channels[c][r]`` is the ordered list of steps of rank ``r`` on channel ``c``.

    ``parts`` is the number of chunks of a block, over all channels; ``scratch_chunks`` the chunks of scratch each rank has
    (scratch, too, is cut into blocks of ``parts`` chunks, so its chunk ``i`` has the size of part ``i % parts``).
    Channels are independent: no order is kept between steps of different channels.
    """

    name: str
    collective: Collective
    nranks: int
    parts: int
    channels: tuple[tuple[tuple[Step, ...], ...], ...]
    root: int = 0
    scratch_chunks: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.nranks < 1 or self.parts < 1 or not self.channels:
            raise ValueError(
                f"schedule {self.name!r}: nranks, parts and channels must be at least 1"
            )
        if not 0 <= self.root < self.nranks:
            raise ValueError(
                f"schedule {self.name!r}: root {self.root} is not in 0..{self.nranks - 1}"
            )
        for number, channel in enumerate(self.channels):
            if len(channel) != self.nranks:
                raise ValueError(
                    f"schedule {self.name!r}: channel {number} has {len(channel)} ranks, not {self.nranks}"
                )

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
        """Chunks of ``buffer`` that ``rank`` has: only the root has the input of a broadcast or scatter, the output of a reduce
        or gather."""
        if rank != self.root and buffer is ROOT_ONLY.get(self.collective):
            return 0
        return self.buffer_chunks(buffer)

    @cached_property
    def widest(self) -> int:
        """Chunks in the largest step of any rank: all ranks cut messages alike, so one rank's own steps do not decide."""
        return (
            max(
                (step.chunks for channel in self.channels for steps in channel for step in steps),
                default=1,
            )
            or 1
        )

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The primitives that there are in it."""
        return frozenset(
            step.op for channel in self.channels for steps in channel for step in steps
        )

    @property
    def needs_addressable_memory(self) -> bool:
        return any(op.needs_addressable_memory for op in self.ops)

    @cached_property
    def addressed(self) -> frozenset[Buffer]:
        """The buffers that ranks read or write in each other's memory."""
        steps = (step for channel in self.channels for steps in channel for step in steps)
        return frozenset(step.remote.buffer for step in steps if step.remote is not None)
