"""Sends and receives of GPU memory by a staging thread over a TCP stream to each remote rank.

A round is one call of compiled code (``executor.cpu.kernels.nogil``): all its messages progress
concurrently, those of a pair and direction in sequence. Only the two ends take part in a message,
so it is numbered per stream, not with the operations of the CPU communicator; that communicator's
progress page shows it and its faults explain it. Messages of a collective carry its kind and
number, which all ranks count, so that an unmatched message is not mistaken for one of the next
collective.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miraccl.errors import MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.lower import describe_signature, signature
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.engine_errors import SEND_RECV
from miraccl.runtime.multinode.node_layout import NodeLayout
from miraccl.runtime.multinode.segments import StagedSegment
from miraccl.runtime.multinode.staging import PinnedSlots, PreparedSegment
from miraccl.runtime.multinode.streams import (
    StagingStreams,
    StreamOperation,
    remaining_bytes,
    streams_possible,
    write_words,
)
from miraccl.runtime.multinode.unmatched import (
    MessageCounters,
    UnmatchedDetector,
    describe_collective,
    describe_unmatched,
    full_number,
    signature_of,
)
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.multinode.message_rounds import MessageRound, StagedMessage

_BEGUN_EVER = offsets.MESSAGES_BEGUN // 8
CollectiveKind = tuple[Collective, int]
"""A collective and its root, as in message headers."""
#: remote ranks with a stream each: a thread polls all streams of a round, and their socket buffers
#: take kernel memory
MAX_REMOTE_RANKS = 16


class MessageStreams:
    """Stream to each remote rank, with its message counters; created collectively."""

    def __init__(self, stages: SetupPhases, core: CoreAccess, layout: NodeLayout) -> None:
        self.core = core
        self._streams = StagingStreams(stages, core, layout.remote_ranks, "gpu messages")
        self._counters = {
            peer: np.zeros((2, offsets.STREAM_BYTES // 8), np.int64) for peer in layout.remote_ranks
        }
        self._collectives = np.zeros(offsets.COLLECTIVES_BYTES // 8, np.int64)
        self._unmatched_detector = UnmatchedDetector(core.rank, self._streams.sockets)

    @staticmethod
    def applicable(core: CoreAccess, layout: NodeLayout) -> bool:
        """Return True if the ranks create such streams; all ranks agree."""
        hosts = [{core.hosts[rank] for rank in ranks} for ranks in layout.nodes]
        apart = sum(map(len, hosts)) == len(set(core.hosts))
        return apart and layout.max_remote_ranks <= MAX_REMOTE_RANKS and streams_possible(core)

    @property
    def sockets(self) -> Mapping[int, socket.socket]:
        """Streams by peer."""
        return self._streams.sockets

    def descriptor(self, peer: int) -> int:
        return self._streams.descriptor(peer)

    def counter_address(self, peer: int, receives: bool) -> int:
        """Return the address of the message counters of one direction."""
        return int(self._counters[peer].ctypes.data) + offsets.STREAM_BYTES * receives

    @property
    def collectives_address(self) -> int:
        """Address of the collective counters of all streams."""
        return int(self._collectives.ctypes.data)

    def signature_of(self, mark: int) -> int:
        """Return the signature of the collective with this number in headers; 0 if unknown."""
        return signature_of(self._collectives, full_number(self._collectives, mark))

    def begun(self) -> dict[int, tuple[int, int]]:
        """Return by peer the numbers of messages begun (to it, from it)."""
        return {
            peer: (int(out[_BEGUN_EVER]), int(into[_BEGUN_EVER]))
            for peer, (out, into) in self._counters.items()
        }

    def message_counters(self) -> MessageCounters:
        """Return the counters of messages in collectives; all operations have ended."""
        return MessageCounters.of(self.core.nranks, self._collectives, self._counters)

    def find_unmatched(self, between: Callable[[], bool]) -> MiracclError | None:
        """Return the error of a message of a collective that this rank has ended, or None.

        ``between()``: the staging thread is between operations.
        """
        return self._unmatched_detector.poll(self._collectives, self._counters, between)

    def shutdown_writes(self) -> None:
        self._streams.shutdown_writes()

    def close(self) -> None:
        """Close the streams. May be called twice."""
        self._streams.close()


class MessageOperation(StreamOperation):
    """Messages of a round, in one slot.

    ``kind``: collective that they form, if any; ``begins``: this round is its first.
    """

    kernel = "messages_nogil"

    def __init__(
        self,
        streams: MessageStreams,
        messages: Sequence[StagedMessage],
        base: int,
        kind: CollectiveKind | None = None,
        begins: bool = True,
    ) -> None:
        self._peers = list(dict.fromkeys(message.peer for message in messages))
        self.streams, self._kind = streams, kind or (Collective.SEND_RECV, 0)
        super().__init__(streams.core, f"{kind[0].label}_v" if kind else "send/recv")
        if kind is not None:
            which = _template(kind, DType.UINT8, 0) if begins else 0
            write_words(
                self._words,
                (offsets.COLLECTIVES, streams.collectives_address),
                (offsets.COLLECTIVE, which),
            )
        self._set_rows(np.zeros((len(self._peers), offsets.ROW_BYTES // 8), np.int64))
        self._parts: list[np.ndarray] = []
        for row, peer in zip(self.rows, self._peers, strict=True):
            write_words(row, (offsets.PEER, peer), (offsets.DESCRIPTOR, streams.descriptor(peer)))
            for direction, receives in ((offsets.OUT, False), (offsets.IN, True)):
                parts = self._table(
                    [m for m in messages if m.peer == peer and m.receives == receives], base
                )
                write_words(
                    row,
                    (direction + offsets.SEGMENTS, parts.ctypes.data),
                    (direction + offsets.NSEGMENTS, len(parts)),
                )
                write_words(
                    row, (direction + offsets.NUMBER, streams.counter_address(peer, receives))
                )

    def _table(self, messages: Sequence[StagedMessage], base: int) -> np.ndarray:
        """Return the words of messages whose slot begins at ``base``."""
        table = np.zeros((len(messages), offsets.SEGMENT_SIZE // 8), np.int64)
        for part, message in zip(table, messages, strict=True):
            size = message.dtype.itemsize
            template = _template(self._kind, message.dtype, message.transfer_count)
            write_words(
                part,
                (offsets.SEGMENT_ADDRESS, base + message.host),
                (offsets.SEGMENT_BYTES, message.count * size),
                (offsets.SEGMENT_SIGNATURE, template),
            )
            write_words(
                part,
                (offsets.SEGMENT_MESSAGE_BYTES, message.transfer_count * size),
                (offsets.SEGMENT_COUNT, message.transfer_count),
            )
        self._parts.append(table)
        return table

    def active_messages(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (peer, direction, words) of one begun and unfinished message per peer.

        An incoming message (``IN``) takes precedence over an outgoing one (``OUT``).
        """
        for number, (peer, row) in enumerate(zip(self._peers, self.rows, strict=True)):
            for direction in (offsets.IN, offsets.OUT):
                begun = int(row[(direction + offsets.SEGMENTS_BEGUN) // 8])
                if remaining_bytes(row, direction) and begun:
                    yield (
                        peer,
                        direction,
                        self._parts[2 * number + (direction == offsets.IN)][begun - 1],
                    )
                    break

    def peers_to_begin(self) -> tuple[list[int], list[int]]:
        """Return the peers with messages not begun yet, (sends, receives).

        They begin as the messages before them progress, independently of other ranks.
        """
        peers = list(zip(self._peers, self.rows, strict=True))
        sends, receives = (
            [
                p
                for p, row in peers
                if row[(direction + offsets.SEGMENTS_BEGUN) // 8]
                < row[(direction + offsets.NSEGMENTS) // 8]
            ]
            for direction in (offsets.OUT, offsets.IN)
        )
        return sends, receives

    def check_result(self, code: int) -> None:
        """Raise the error of a code; for mismatched messages it describes both."""
        if code in (layout.ERR_MISMATCH, layout.ERR_SIZE):
            peer = self.core.failed_peer
            row = self.rows[self._peers.index(peer)]
            mine, theirs = (
                _MessageHeader.of(row[place // 8], row[place // 8 + 1])
                for place in (offsets.IN + offsets.HEADER, offsets.HEADER_IN)
            )
            raise self.core.message_mismatch(
                peer, mine[:2], theirs[:2], self._describe_divergence(peer, mine, theirs)
            )
        super().check_result(code)

    def _describe_divergence(self, peer: int, mine: _MessageHeader, theirs: _MessageHeader) -> str:
        """Describe a message of ``peer`` that belongs to another collective; else empty."""
        rank, first, second = (
            self.core.rank,
            describe_signature(mine.sig),
            describe_signature(theirs.sig),
        )
        if mine.mark == theirs.mark or SEND_RECV in (first["collective"], second["collective"]):
            return ""
        if (theirs.mark - mine.mark) & offsets.MARK_MASK <= offsets.MARK_MASK // 2:
            here, there = (
                describe_collective(mine.sig, mine.mark),
                describe_collective(theirs.sig, theirs.mark),
            )
            return (
                f"message count mismatch: rank {rank} waits in {here} for rank {peer}, "
                f"but rank {peer} has continued to {there}"
            )
        return describe_unmatched(
            peer, theirs.sig, rank, self.streams.signature_of(theirs.mark), theirs.mark
        )


class _MessageHeader(NamedTuple):
    """Header of a message: signature, elements, number of the collective."""

    sig: int
    elements: int
    mark: int

    @classmethod
    def of(cls, sig: Any, second: Any) -> _MessageHeader:
        nbytes, mark = (
            int(second) & (1 << offsets.MARK_SHIFT) - 1,
            int(second) >> offsets.MARK_SHIFT,
        )
        return cls(int(sig), nbytes // DType(int(sig) >> 21 & 15).itemsize, mark)


def _template(kind: CollectiveKind, dtype: DType, count: int) -> int:
    """Return the signature of a message without its number."""
    return signature(kind[0], dtype, RedOp.SUM, kind[1], count)


class MessageNetwork:
    """Runs rounds on the streams (``staging.SegmentNetwork``).

    Rounds of equal messages share one operation per slot, except the first round of a collective.
    """

    def __init__(
        self,
        streams: MessageStreams,
        rounds: Sequence[MessageRound],
        slots: PinnedSlots,
        kind: CollectiveKind | None = None,
    ) -> None:
        self._streams, self._rounds, self._slots, self._kind = streams, rounds, slots, kind
        self._prepared: dict[tuple[int, bool, tuple[StagedMessage, ...]], MessageOperation] = {}

    def prepare(self, segment: StagedSegment, number: int, slot: int) -> PreparedSegment:
        key = slot, self._kind is not None and number == 0, self._rounds[number].messages
        if key not in self._prepared:
            base = self._slots.address + slot * self._slots.nbytes
            self._prepared[key] = MessageOperation(self._streams, key[2], base, self._kind, key[1])
        return self._prepared[key]

    def run(self, segment: StagedSegment, number: int, slot: int) -> None:
        self.prepare(segment, number, slot)()
