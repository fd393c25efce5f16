"""What the ranks of a host say that they run on GPU memory: who has come to an operation, what others ran last, who ran another one.

A kernel that all ranks take part in writes the number and the signature of its launch to the boards of all peers when it begins
(executor/cuda/source/packets.cuh); so does a collective that is messages, with a number of its own and with how many launches there were
before it (source/p2p.cuh).  Kernels compare what is there while they wait.  The host does once a wait has passed its deadline, and when the
GPU has ended its work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.moves import op_tag

_STATE_WORDS = struct.Struct(f"<{layout.STATE_COPIES + 1}Q")
_ENTRY = struct.Struct("<IIII")
_ENTRY_BYTES = _ENTRY.size * layout.OP_LOG_ENTRIES
_HEADER_BYTES = layout.OP_LOG_OFFSET + layout.MAX_RANKS * _ENTRY_BYTES
_MESSAGE_RECORD = struct.Struct(layout.MESSAGE_OP)
_MESSAGE_RECORD_BYTES = _MESSAGE_RECORD.size * layout.MESSAGE_OP_ENTRIES
_STOPPED = layout.STATE_OFFSET + 8 * layout.STATE_WAIT_FAILED
_WAIT_NEED, _WAIT_HOLDS, _NEED_SENT, _NEED_BULK = (
    56,
    48,
    0,
    2,
)  # of the words of waits in source/p2p.cuh
_COUNTER_NAMES = ("sent", "received", "large")  # fields of RankProgress, by NEED_*
_NUMBER_RANGE, _HALF_RANGE = 1 << 32, 1 << 31  # numbers wrap


def _is_after(number: int, other: int) -> bool:
    return 0 < (number - other) % _NUMBER_RANGE < _HALF_RANGE


@dataclass(frozen=True)
class MessageRecord:
    """A collective that is messages, as a rank says: ``launches`` are those of other collectives before it."""

    tag: int
    signature: int
    launches_before: int


@dataclass(frozen=True)
class OpLog:
    """What a rank says of its last operations: by number the signatures of launches, and collectives that are messages. ``launch`` and
    ``record`` are the numbers of the last ones, 0 before the first."""

    launches: Mapping[int, int]
    message_ops: Mapping[int, MessageRecord]
    last_launch: int = 0
    last_message_op: int = 0

    @property
    def last(self) -> tuple[int, int] | None:
        """Number and signature of the last operation, the number 0 for messages; None before the first."""
        if self.last_message_op and not _is_after(
            self.last_launch, self.message_ops[self.last_message_op].launches_before
        ):
            return 0, self.message_ops[self.last_message_op].signature
        return (
            (self.last_launch, self.launches[self.last_launch])
            if self.last_launch in self.launches
            else None
        )

    def truncated_at(self, number: int) -> OpLog:
        """Without what this rank enqueued after the operation in which its wait failed: a launch, or (0) its last collective that is
        messages, for no more of these begin then."""
        launch = (
            number or self.message_ops[self.last_message_op].launches_before
            if number or self.last_message_op
            else self.last_launch
        )
        launches = {
            other: signature
            for other, signature in self.launches.items()
            if not _is_after(other, launch)
        }
        return OpLog(launches, self.message_ops, _latest(launches), self.last_message_op)


def _parse_op_log(launches: Mapping[int, int], moves: bytes) -> OpLog:
    entries = _MESSAGE_RECORD.iter_unpack(moves)
    found = {
        n: MessageRecord(tag, what, before)
        for n, tag, what, before in entries
        if n and tag == op_tag(n, before, what)
    }  # whole ones
    return OpLog(launches, found, _latest(launches), _latest(found))


def _latest(numbers: Mapping[int, object]) -> int:
    """The one after all others; they are close to one another."""
    return next(
        (number for number in numbers if not any(_is_after(other, number) for other in numbers)), 0
    )


def _differing_op(own: OpLog, other: OpLog) -> tuple[int, int] | None:
    """Number and signature, as ``Said.last`` has them, of an operation of ``own`` in whose place the other rank says another."""
    for number, signature in own.launches.items():
        if other.launches.get(number, signature) != signature:
            return number, signature
    for number, record in own.message_ops.items():
        if number in other.message_ops and other.message_ops[number].tag != record.tag:
            return 0, record.signature
    return None


def _reordered_op(own: OpLog, other: OpLog) -> tuple[int, int] | None:
    """The same of one that the other rank has left out, regions it has gone on, or that this rank has gone on to without one of the other."""
    if (
        own.last_message_op
        and _is_after(own.last_message_op, other.last_message_op)
        and _is_after(other.last_launch, own.message_ops[own.last_message_op].launches_before)
    ):
        return 0, own.message_ops[
            own.last_message_op
        ].signature  # it is past the launches before this one without it
    if (
        other.last_message_op
        and _is_after(other.last_message_op, own.last_message_op)
        and _is_after(
            own.last_launch, before := other.message_ops[other.last_message_op].launches_before
        )
    ):
        number = (before + 1) % _NUMBER_RANGE
        return (number, own.launches[number]) if number in own.launches else own.last
    return None


@dataclass(frozen=True)
class Straggler:
    """An operation, named as ``Said.last`` names one, that ``rank`` has begun and ``behind`` has not; one of them is this rank (None)."""

    ahead: int | None
    behind: int | None
    number: int
    signature: int


@dataclass(frozen=True)
class RecorderSnapshot:
    """What this rank has run, and what its peers say. ``stopped(rank)``: whether a peer's wait has failed, after which launches that it had
    enqueued still begin."""

    own: OpLog
    peers: Mapping[int, OpLog]
    stopped: Callable[[int], bool] = lambda _: False

    def has_begun(self, rank: int, number: int) -> bool:
        """Whether a peer has begun launch ``number``, 0: the last collective of this rank that is messages."""
        log = self.peers.get(rank, OpLog({}, {}))
        if number:
            return log.last_launch != 0 and not _is_after(number, log.last_launch)
        return log.last_message_op != 0 and not _is_after(
            self.own.last_message_op, log.last_message_op
        )

    def describe(self, rank: int, number: int, name: Callable[[int, int], str]) -> str:
        """What a peer does about an operation; ``name(number, signature)`` is what one is called."""
        return (
            "has started it"
            if self.has_begun(rank, number)
            else f"never arrived at it; {self.describe_last(rank, name)}"
        )

    def describe_last(self, rank: int, name: Callable[[int, int], str]) -> str:
        """What a peer ran last."""
        log = self.peers[rank].last if rank in self.peers else None
        return f"its last was {name(*log)}" if log is not None else "it has not run any operation"

    @property
    def all_caught_up(self) -> bool:
        """Whether all peers have begun what this rank has."""
        own = self.own
        return not any(
            _is_after(own.last_launch, log.last_launch)
            or _is_after(own.last_message_op, log.last_message_op)
            for log in self.peers.values()
        )

    def find_straggler(self) -> Straggler | None:
        """Where this rank and a peer have not begun equally many operations."""
        for peer, log in self.peers.items():
            if log.last_launch != self.own.last_launch:
                own_is_ahead = _is_after(self.own.last_launch, log.last_launch)
                ahead_log = self.own if own_is_ahead else log
                number = ahead_log.last_launch
                signature = ahead_log.launches.get(number, 0)
            elif log.last_message_op != self.own.last_message_op:
                own_is_ahead = _is_after(self.own.last_message_op, log.last_message_op)
                ahead_log = self.own if own_is_ahead else log
                number, signature = 0, ahead_log.message_ops[ahead_log.last_message_op].signature
            else:
                continue
            return Straggler(
                None if own_is_ahead else peer, peer if own_is_ahead else None, number, signature
            )
        return None

    def find_mismatch(self, failed: int | None = None) -> tuple[int, int, int] | None:
        """A peer that ran another operation in the place of one of this rank's, and number and signature of that one. ``failed``: in which
        a wait of this rank did, as in ``Said.upto``."""
        own = self.own if failed is None else self.own.truncated_at(failed)
        for peer, log in self.peers.items():
            found = _differing_op(own, log)
            if (
                found is None
                and (found := _reordered_op(own, log)) is not None
                and self.stopped(peer)
            ):
                found = None
            if found is not None:
                return peer, *found
        return None


class MemoryRegions(Protocol):
    """Where the memory of a rank and of its peers lies: ``transport.cuda_p2p.SymmetricMemory``, ``executor.cuda.lower.CommArgs``."""

    @property
    def rank(self) -> int: ...
    @property
    def own(self) -> int: ...
    @property
    def inboxes(self) -> Sequence[int]: ...
    @property
    def outboxes(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class ProgressHeader:
    """The beginning of this rank's memory: its state and, regions peers share this memory, the boards. One copy."""

    state: tuple[int, ...]
    content: bytes

    @property
    def op_counts(self) -> tuple[int, int]:
        """How many launches, and collectives that are messages, there were on this rank's GPU."""
        return self.state[layout.STATE_LAUNCH] % _NUMBER_RANGE, self.state[
            layout.STATE_MESSAGE_OPS
        ] >> 32

    @property
    def last_begun(self) -> tuple[int, int]:
        """Number and signature of the last launch that has begun, 0 before the first."""
        recorded = {
            word >> 32: word % _NUMBER_RANGE
            for word in self.state[layout.STATE_SIGNATURES :][: layout.OP_LOG_ENTRIES]
            if word
        }
        return (number := _latest(recorded)), recorded.get(number, 0)

    @property
    def stopped(self) -> bool:
        """Whether a wait of this rank has failed."""
        return self.state[layout.STATE_WAIT_FAILED] != 0

    @property
    def pending_copies(self) -> tuple[int, int] | None:
        """Number and signature of the launch after which copies go on that wait for peers; None: none do."""
        number = self.state[layout.STATE_COPIES] % _NUMBER_RANGE
        return (
            (
                number,
                self.state[layout.STATE_SIGNATURES + number % layout.OP_LOG_ENTRIES]
                % _NUMBER_RANGE,
            )
            if number
            else None
        )


def read_progress_header(gpu: Gpu, regions: MemoryRegions) -> ProgressHeader:
    """What ``read_boards`` begins with."""
    content = gpu.read(regions.own, _HEADER_BYTES)
    return ProgressHeader(_STATE_WORDS.unpack_from(content, layout.STATE_OFFSET), content)


@dataclass(frozen=True)
class PendingLaunch:
    """A launch that a rank is in, and ranks without which it does not end, and which have not begun it."""

    number: int
    signature: int
    awaited: tuple[int, ...]


def read_pending_launch(gpu: Gpu, regions: MemoryRegions) -> PendingLaunch | None:
    """The launch that this rank is in and cannot end yet, as others have not come. (The count of launches does not tell: one thread adds to
    it, which may have waited for nobody.)"""
    head = read_progress_header(gpu, regions)
    number, signature = head.last_begun
    peers = [rank for rank in range(len(regions.outboxes)) if rank != regions.rank]
    if not peers or not number or head.stopped:
        return None
    recorded, _, _, word = _ENTRY.unpack(
        gpu.read(regions.outboxes[peers[0]] + _entry_offset(regions.rank, number), _ENTRY.size)
    )
    above = layout.NEEDS_ALL_SHIFT + 1
    if recorded != number or word >> above != number % (_NUMBER_RANGE >> above):
        return None
    needed = peers if word & layout.NEEDS_ALL else [rank for rank in peers if word >> rank & 1]
    awaited = [
        rank
        for rank in needed
        if _is_after(number, _last_recorded_launch(gpu, regions.inboxes[rank], rank))
    ]
    return PendingLaunch(number, signature, tuple(awaited)) if awaited else None


def _entry_offset(rank: int, number: int) -> int:
    """Where in a rank's memory the entry of ``rank`` for a launch is."""
    return (
        layout.OP_LOG_OFFSET
        + (rank * layout.OP_LOG_ENTRIES + number % layout.OP_LOG_ENTRIES) * _ENTRY.size
    )


def _last_recorded_launch(gpu: Gpu, base: int, rank: int) -> int:
    """The number of the last launch that ``rank`` has log there that it has begun, 0 before the first."""
    entries = _ENTRY.iter_unpack(gpu.read(base + _entry_offset(rank, 0), _ENTRY_BYTES))
    return _latest({number: signature for number, signature, *_ in entries if number or signature})


@dataclass(frozen=True)
class PendingMessageWait:
    """What a rank says of a wait in messages: how far the peer's count ``what`` of ``Come`` must have come. ``holds``: a bit for each rank
    that the launch holds meanwhile (source/p2p.cuh)."""

    peer: int
    counter: str
    count: int
    holds: int


def read_pending_waits(gpu: Gpu, regions: MemoryRegions) -> list[PendingMessageWait]:
    """The long waits of this rank in the launch of messages that it is in."""
    nranks = len(regions.inboxes)
    if _read_word(gpu, regions.own + _STOPPED):
        return []
    row = gpu.read(
        regions.own + layout.WAITS_OFFSET + 8 * layout.MAX_RANKS * regions.rank,
        8 * layout.MAX_RANKS,
    )
    found = []
    for peer, log in enumerate(struct.unpack(f"<{layout.MAX_RANKS}Q", row)[:nranks]):
        kind, count = log >> _WAIT_NEED & 3, log % (1 << _WAIT_HOLDS)
        if log >> 63 and not _is_satisfied(gpu, regions, peer, kind, count):
            found.append(
                PendingMessageWait(peer, _COUNTER_NAMES[kind], count, log >> _WAIT_HOLDS & 0xFF)
            )
    return found


def _is_satisfied(gpu: Gpu, regions: MemoryRegions, peer: int, kind: int, count: int) -> bool:
    """Whether a wait for ``peer`` has got what it was for: of a large message slots, which come before it is received and counted."""
    if kind == _NEED_BULK:
        granted = (
            _read_word(
                gpu, regions.inboxes[peer] + layout.BULK_GRANTS_OFFSET + peer * layout.BULK_STRIDE
            )
            >> 32
        )
        return not _is_after(count % _NUMBER_RANGE, granted)
    has = (
        regions.own + layout.ROWS_RECEIVED_OFFSET
        if kind == _NEED_SENT
        else regions.inboxes[peer] + layout.CREDIT_OFFSET
    )
    return (
        _read_word(
            gpu, has + peer * layout.message_warp_queues(len(regions.inboxes)) * layout.WORD_STRIDE
        )
        >= count
    )


@dataclass(frozen=True)
class MessageCounts:
    """How far a rank's kernels have come: the number of the last launch that has begun, and by peer rows of the first lane that they have
    sent to it, and told it that they have received, and ``large`` messages that they have received."""

    last_launch: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    large_received: tuple[int, ...]


def read_message_counts(gpu: Gpu, regions: MemoryRegions) -> MessageCounts:
    lanes = layout.message_warp_queues(len(regions.inboxes))
    sent, received, large = [], [], []
    for peer, outbox in enumerate(regions.outboxes):
        is_self = peer == regions.rank
        sent.append(
            0
            if is_self
            else _read_word(
                gpu, regions.own + layout.ROWS_SENT_OFFSET + peer * lanes * layout.WORD_STRIDE
            )
        )
        received.append(
            0
            if is_self
            else _read_word(
                gpu, outbox + layout.CREDIT_OFFSET + regions.rank * lanes * layout.WORD_STRIDE
            )
        )
        counted = (
            regions.own + layout.BULK_COUNTS_OFFSET + (layout.MAX_RANKS + peer) * layout.BULK_STRIDE
        )
        large.append(0 if is_self else _read_word(gpu, counted))
    return MessageCounts(
        read_progress_header(gpu, regions).last_begun[0], tuple(sent), tuple(received), tuple(large)
    )


def _read_word(gpu: Gpu, address: int) -> int:
    return int.from_bytes(gpu.read(address, 8), "little")


def read_snapshot(
    gpu: Gpu, regions: MemoryRegions, head: ProgressHeader | None = None
) -> RecorderSnapshot:
    """The boards of all peers, and what this rank has recorded of its own operations. Memory that peers share is read once; ``head`` if it
    was read before."""
    head = head or read_progress_header(gpu, regions)
    recorded = head.state[layout.STATE_SIGNATURES : layout.STATE_SIGNATURES + layout.OP_LOG_ENTRIES]
    peers = {peer: inbox for peer, inbox in enumerate(regions.inboxes) if peer != regions.rank}
    # launches first: what a peer did before it began one is there then
    headers = {
        base: head.content if base == regions.own else gpu.read(base, _HEADER_BYTES)
        for base in set(peers.values())
    }
    moves = {
        base: gpu.read(base + layout.MESSAGE_OPS_OFFSET, layout.MAX_RANKS * _MESSAGE_RECORD_BYTES)
        for base in {regions.own, *peers.values()}
    }
    own = _parse_op_log(
        {word >> 32: word % _NUMBER_RANGE for word in recorded if word},
        _rank_entries(moves[regions.own], regions.rank, _MESSAGE_RECORD_BYTES),
    )
    other = {}
    for peer, base in peers.items():
        entries = _ENTRY.iter_unpack(
            _rank_entries(headers[base][layout.OP_LOG_OFFSET :], peer, _ENTRY_BYTES)
        )
        launched = {number: signature for number, signature, *_ in entries if number or signature}
        other[peer] = _parse_op_log(
            launched, _rank_entries(moves[base], peer, _MESSAGE_RECORD_BYTES)
        )
    return RecorderSnapshot(
        own, other, lambda peer: any(gpu.read(regions.outboxes[peer] + _STOPPED, 8))
    )


def _rank_entries(entries: bytes, rank: int, nbytes: int) -> bytes:
    return entries[rank * nbytes : (rank + 1) * nbytes]
