"""Pieces of GPU data exchanged by the lane itself, over TCP streams of its own: the shortest way between hosts.

Every rank sends each other one what it needs and reduces what came, in the order of the ranks (``executor.cpu.unlocked``): one message
one way, and no other thread has a part in it.  Where that moves more bytes than another algorithm (all_reduce, broadcast and reduce of more
than two ranks) it is for small pieces only.  The operations belong to a CPU communicator: they are numbered, signed and put on the board
with its others, and its faults explain theirs.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from miraccl import params
from miraccl.bootstrap import Session
from miraccl.comm.device.hosts.pieces import Piece, Shape
from miraccl.comm.member import Member
from miraccl.executor.cpu import exchange_layout as ex
from miraccl.executor.cpu.context import call_kernel, fold_kernel, unlocked_kernel
from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.lower import signature
from miraccl.transport.base import NetConnection
from miraccl.transport.fifo import PAGE_BYTES
from miraccl.transport.socket import SocketOptions, SocketTransport
from miraccl.types import Collective, DType, RedOp

MOST_PEERS = 7  # messages that one after another go out no later than the rounds of a tree would take
SMALL_BYTES = 64 << 10
_NEVER_MORE = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)


class _Keeper:
    """Takes the streams of a transport as a proxy would, and leaves them alone (``transport.base.ProxyPort``)."""

    bell, asleep = -1, 0

    def __init__(self) -> None:
        self.streams: dict[int, socket.socket] = {}

    def attach(self, connections: Sequence[NetConnection]) -> None:
        self.streams |= {connection.peer: connection.streams[0] for connection in connections}

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        self.abort("")

    def abort(self, text: str) -> None:
        for stream in self.streams.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        self.streams.clear()


class DirectStreams:
    """One stream to each other rank of a CPU communicator, all on other hosts; made collectively. Used by one thread at a time."""

    def __init__(self, session: Session, member: Member) -> None:
        self.member, self._session = member, session
        self._keeper = _Keeper()
        self._transport = SocketTransport(
            member.fabric.endpoints[member.rank],
            proxy=self._keeper,
            secret=session.data_key,
            job=f"{session.name} direct".encode(),
            slot_bytes=PAGE_BYTES,
            options=SocketOptions(nstreams=1, buffer_bytes=params.SOCKET_BUFFER.read()),
            check=lambda: member.check(0, "connecting"),
        )
        infos = session.all_gather(self._transport.setup(), "direct")
        self._transport.connect({rank: info for rank, info in enumerate(infos) if rank != member.rank})
        self._landings: list[np.ndarray] = []
        self.peers = sorted(self._keeper.streams)

    @staticmethod
    def useful(member: Member) -> bool:
        """Whether all ranks of a communicator shall have such streams; all see it alike."""
        alone = len(set(member.fabric.hosts)) == member.nranks
        return alone and 1 < member.nranks <= MOST_PEERS + 1 and not member.options.algo

    def takes(self, shape: Shape, piece: Piece, op: Any) -> bool:
        """Whether a piece goes this way; all ranks decide alike."""
        if shape.uneven or (shape.collective.reduces and not isinstance(op, RedOp)):
            return False
        largest = max((*piece.source_counts, *piece.target_counts)) * shape.itemsize
        return shape.collective in _NEVER_MORE or shape.nranks == 2 or largest <= SMALL_BYTES

    def descriptor(self, peer: int) -> int:
        return self._keeper.streams[peer].fileno()

    def landing(self, nbytes: int, number: int) -> np.ndarray:
        """Memory for what the ``number``-th peer sends; all operations share it, for there is one at a time. It may move when it grows,
        so that operations keep theirs."""
        while len(self._landings) <= number:
            self._landings.append(np.empty(0, np.uint8))
        if self._landings[number].nbytes < nbytes:
            self._landings[number] = np.empty(nbytes, np.uint8)
        return self._landings[number]

    def close(self) -> None:
        """May be called twice."""
        self._transport.close()
        self._session.close()


class DirectOperation:
    """A collective of even blocks on one slot (``comm.device.hosts.staging.Prepared``), on whose memory ``x`` and ``out`` lie in place."""

    def __init__(self, streams: DirectStreams, shape: Shape, dtype: DType, op: Any, x: np.ndarray, out: np.ndarray) -> None:
        self.name = shape.collective.label
        self._streams, self._member = streams, streams.member
        self._keep: list[Any] = [x, out]
        source, target = int(x.ctypes.data), int(out.ctypes.data)
        block = _block_bytes(shape, x, out)
        folds = shape.collective.reduces and (shape.collective is not Collective.REDUCE or shape.rank == shape.root)
        own = source + (shape.rank * block if shape.collective is Collective.REDUCE_SCATTER else 0)
        sources = {shape.rank: own}
        rows = []
        for number, peer in enumerate(streams.peers):
            give, take = _blocks(shape, peer)
            if give is None and take is None:
                continue
            landing = target + (take or 0) * block
            if folds:
                self._keep.append(streams.landing(block, number))
                landing = sources[peer] = int(self._keep[-1].ctypes.data)
            row = np.zeros(ex.ROW_BYTES // 8, np.int64)
            _fill(row, (ex.PEER, peer), (ex.DESCRIPTOR, streams.descriptor(peer)))
            _fill(row, (ex.SEND, source + (give or 0) * block), (ex.SEND_BYTES, 0 if give is None else block))
            _fill(row, (ex.RECV, landing), (ex.RECV_BYTES, 0 if take is None else block))
            rows.append(row)
        self._rows, self._polls = np.array(rows), np.zeros(len(rows), np.int64)
        self._words = np.zeros(ex.EXCHANGE_BYTES // 8, np.int64)
        kind = op if shape.collective.reduces else RedOp.SUM
        template = signature(shape.collective, dtype, kind, shape.root, block // dtype.itemsize)
        _fill(self._words, (ex.TEMPLATE, template), (ex.COUNT, block // dtype.itemsize), (ex.ITEMSIZE, dtype.itemsize))
        _fill(self._words, (ex.NPEERS, len(rows)), (ex.ROWS, self._rows.ctypes.data), (ex.POLLS, self._polls.ctypes.data))
        if folds:
            self._fold([sources[rank] for rank in sorted(sources)], own, block, fold_kernel(dtype, op))
        if shape.collective is Collective.ALL_TO_ALL and not shape.own_stays:
            place = shape.rank * block
            _fill(self._words, (ex.COPY_FROM, source + place), (ex.COPY_TO, target + place), (ex.COPY_BYTES, block))

    def _fold(self, sources: Sequence[int], to: int, nbytes: int, kernel: int) -> None:
        self._accumulators = np.zeros(at.BLOCK, np.int64)
        self._bases = np.array(sources, np.int64)
        self._sources = np.array([self._accumulators.ctypes.data, *sources], np.int64)
        _fill(self._words, (ex.FOLD, kernel), (ex.FOLD_TO, to), (ex.FOLD_BYTES, nbytes), (ex.NSOURCES, len(sources)))
        _fill(self._words, (ex.SOURCES, self._sources.ctypes.data), (ex.BASES, self._bases.ctypes.data))

    def unlocked(self) -> tuple[int, int, int]:
        """(function, context, exchange), as ``comm.persistent`` has it."""
        return unlocked_kernel("exchange_unlocked"), self._member.context.address, int(self._words.ctypes.data)

    def conclude(self, code: int) -> None:
        """Raise what a code of that function means."""
        self._member._conclude(code, self.name)

    def __call__(self) -> None:
        self._member.check(0, self.name)
        function, context, exchange = self.unlocked()
        self.conclude(call_kernel(function, context, exchange, 0, 0))


def _fill(words: np.ndarray, *values: tuple[int, int]) -> None:
    for place, value in values:
        words[place // 8] = value


def _block_bytes(shape: Shape, x: np.ndarray, out: np.ndarray) -> int:
    """Bytes of a message."""
    match shape.collective:
        case Collective.REDUCE_SCATTER | Collective.SCATTER:
            return out.nbytes
        case Collective.ALL_TO_ALL:
            return x.nbytes // shape.nranks
    return x.nbytes


def _blocks(shape: Shape, peer: int) -> tuple[int | None, int | None]:
    """Which block of the input goes to a peer, and which of the output comes from it; None is none."""
    chief, root = shape.rank == shape.root, peer == shape.root
    match shape.collective:
        case Collective.ALL_REDUCE:
            return 0, 0
        case Collective.ALL_GATHER:
            return 0, peer
        case Collective.REDUCE_SCATTER:
            return peer, 0
        case Collective.ALL_TO_ALL:
            return peer, peer
        case Collective.BROADCAST:
            return 0 if chief else None, 0 if root else None
        case Collective.REDUCE:
            return 0 if root else None, 0 if chief else None
        case Collective.GATHER:
            return 0 if root else None, peer if chief else None
        case Collective.SCATTER:
            return peer if chief else None, 0 if root else None
    raise ValueError(f"{shape.collective.label} is not cut into pieces")
