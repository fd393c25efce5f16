"""Sends and receives of GPU memory that a lane makes itself, over a TCP stream to each rank of other hosts.

A round is one call of compiled code (``executor.cpu.kernels.unlocked``): all its messages go and come at the same time, those of a pair
in one direction one after another.  Only the two ends take part in a message, so it is numbered by their stream, not with the operations of
the CPU communicator; that one's board shows it and its faults explain it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from miraccl.comm.device.hosts.layout import HostsLayout
from miraccl.comm.device.hosts.pieces import Piece
from miraccl.comm.device.hosts.staging import Prepared, Slots
from miraccl.comm.device.hosts.streams import PeerStreams, StreamOperation, fill
from miraccl.comm.member import Member
from miraccl.comm.stages import Stages
from miraccl.executor.cpu.kernels import layout as at
from miraccl.executor.cpu.kernels.unlocked import layout as ex
from miraccl.executor.cpu.lower import signature
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.comm.device.hosts.transfers import Message, Round

MOST_FAR = 16  # ranks of other hosts: a lane looks at all streams that a round needs, and they take memory of the kernel


class MessageStreams:
    """A stream to each rank of other hosts, with the numbers of the messages that have gone and come; made collectively."""

    def __init__(self, stages: Stages, member: Member, layout: HostsLayout) -> None:
        self.member = member
        far = [rank for rank in range(layout.nranks) if rank not in layout.mine]
        self._streams = PeerStreams(stages, member, far, "gpu messages")
        self._numbers = {peer: np.zeros(2, np.int64) for peer in far}

    @staticmethod
    def useful(member: Member, layout: HostsLayout) -> bool:
        """Whether all ranks shall have such streams; all see it alike."""
        hosts = [{member.fabric.hosts[rank] for rank in ranks} for ranks in layout.groups]
        apart = sum(map(len, hosts)) == len(set(member.fabric.hosts))
        return apart and layout.most_far <= MOST_FAR

    @property
    def sockets(self) -> Mapping[int, socket.socket]:
        """By peer."""
        return self._streams.sockets

    def descriptor(self, peer: int) -> int:
        return self._streams.descriptor(peer)

    def number(self, peer: int, receives: bool) -> int:
        """Where the number of messages of one way lies."""
        return int(self._numbers[peer].ctypes.data) + 8 * receives

    def close(self) -> None:
        """May be called twice."""
        self._streams.close()


class MessageOperation(StreamOperation):
    """The messages of a round, on one slot."""

    kernel = "messages_unlocked"

    def __init__(self, streams: MessageStreams, messages: Sequence[Message], base: int) -> None:
        self._peers = list(dict.fromkeys(message.peer for message in messages))
        super().__init__(streams.member, "send/recv")
        self._use(np.zeros((len(self._peers), ex.ROW_BYTES // 8), np.int64))
        self._parts: list[np.ndarray] = []
        for row, peer in zip(self._rows, self._peers, strict=True):
            fill(row, (ex.PEER, peer), (ex.DESCRIPTOR, streams.descriptor(peer)))
            for way, receives in ((ex.OUT, False), (ex.IN, True)):
                parts = self._table([m for m in messages if m.peer == peer and m.receives == receives], base)
                fill(row, (way + ex.PARTS, parts.ctypes.data), (way + ex.NPARTS, len(parts)))
                fill(row, (way + ex.NUMBER, streams.number(peer, receives)))

    def _table(self, messages: Sequence[Message], base: int) -> np.ndarray:
        """The words of messages whose slot begins at ``base``."""
        table = np.zeros((len(messages), ex.PART_SIZE // 8), np.int64)
        for part, message in zip(table, messages, strict=True):
            size = message.dtype.itemsize
            template = signature(Collective.SEND_RECV, message.dtype, RedOp.SUM, 0, message.whole)
            fill(part, (ex.PART, base + message.host), (ex.PART_BYTES, message.count * size), (ex.PART_SIGNATURE, template))
            fill(part, (ex.PART_WHOLE, message.whole * size), (ex.PART_COUNT, message.whole))
        self._parts.append(table)
        return table

    def conclude(self, code: int) -> None:
        """Raise what a code means; both ends' messages are known where they do not belong together."""
        if code in (at.ERR_MISMATCH, at.ERR_SIZE):
            peer = self._member.context.get(at.CTX_ERR_PEER)
            row = self._rows[self._peers.index(peer)]
            mine, theirs = ((int(row[place // 8]), int(row[place // 8 + 1])) for place in (ex.IN + ex.HEADER, ex.HEADER_IN))
            raise self._member.faults.unlike_messages(peer, _counted(mine), _counted(theirs))
        super().conclude(code)


def _counted(header: tuple[int, int]) -> tuple[int, int]:
    """Signature and elements of a header."""
    sig, nbytes = header
    return sig, nbytes // DType(sig >> 21 & 15).itemsize


class MessageNetwork:
    """Runs rounds on the streams (``comm.device.hosts.staging.Network``). Rounds of equal messages share those of their slot."""

    def __init__(self, streams: MessageStreams, rounds: Sequence[Round], slots: Slots) -> None:
        self._streams, self._rounds, self._slots = streams, rounds, slots
        self._prepared: dict[tuple[int, tuple[Message, ...]], MessageOperation] = {}

    def prepare(self, piece: Piece, number: int, slot: int) -> Prepared:
        key = slot, self._rounds[number].messages
        if key not in self._prepared:
            base = self._slots.address + slot * self._slots.nbytes
            self._prepared[key] = MessageOperation(self._streams, key[1], base)
        return self._prepared[key]

    def run(self, piece: Piece, number: int, slot: int) -> None:
        self.prepare(piece, number, slot)()
