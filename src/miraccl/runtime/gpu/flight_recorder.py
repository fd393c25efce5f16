"""Flight recorder of the GPUs of a host: the last operations of every rank, read from GPU memory.

A kernel that all ranks take part in writes number and signature of its launch into the memory of
all peers when it starts (executor/cuda/source/packets.cuh). A collective made of messages does
the same, with a number of its own and the number of launches before it (source/p2p.cuh). Kernels
compare the entries while they wait; the host does after a missed deadline and once the GPU has
finished its work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.message_collectives import op_tag

_STATE_WORDS = struct.Struct(f"<{layout.STATE_COPIES + 1}Q")
ENTRY = struct.Struct("<IIII")
ENTRY_BYTES = ENTRY.size * layout.OP_LOG_ENTRIES
_HEADER_BYTES = layout.OP_LOG_OFFSET + layout.MAX_RANKS * ENTRY_BYTES
_MESSAGE_RECORD = struct.Struct(layout.MESSAGE_OP)
_MESSAGE_RECORD_BYTES = _MESSAGE_RECORD.size * layout.MESSAGE_OP_ENTRIES
WAIT_FAILED_OFFSET = layout.STATE_OFFSET + 8 * layout.STATE_WAIT_FAILED
NUMBER_RANGE, _HALF_RANGE = 1 << 32, 1 << 31  # operation numbers wrap around


def is_after(number: int, other: int) -> bool:
    return 0 < (number - other) % NUMBER_RANGE < _HALF_RANGE


@dataclass(frozen=True)
class MessageRecord:
    """Record of a collective made of messages; ``launches_before``: other collectives before it."""

    tag: int
    signature: int
    launches_before: int


@dataclass(frozen=True)
class OpLog:
    """Last operations of a rank: signatures of launches and message collectives, by number.

    ``last_launch`` and ``last_message_op`` are the latest numbers, 0 before the first.
    """

    launches: Mapping[int, int]
    message_ops: Mapping[int, MessageRecord]
    last_launch: int = 0
    last_message_op: int = 0

    @property
    def last(self) -> tuple[int, int] | None:
        """Number (0: messages) and signature of the last operation; None before the first."""
        if self.last_message_op and not is_after(
            self.last_launch, self.message_ops[self.last_message_op].launches_before
        ):
            return 0, self.message_ops[self.last_message_op].signature
        return (
            (self.last_launch, self.launches[self.last_launch])
            if self.last_launch in self.launches
            else None
        )

    def truncated_at(self, number: int) -> OpLog:
        """Return the log without operations enqueued after the one whose wait failed.

        ``number``: that of the launch, or 0 for the last message collective, after which no further
        one begins.
        """
        launch = (
            number or self.message_ops[self.last_message_op].launches_before
            if number or self.last_message_op
            else self.last_launch
        )
        launches = {
            other: signature
            for other, signature in self.launches.items()
            if not is_after(other, launch)
        }
        return OpLog(launches, self.message_ops, latest(launches), self.last_message_op)


def _parse_op_log(launches: Mapping[int, int], moves: bytes) -> OpLog:
    entries = _MESSAGE_RECORD.iter_unpack(moves)
    found = {
        n: MessageRecord(tag, what, before)
        for n, tag, what, before in entries
        if n and tag == op_tag(n, before, what)
    }  # only completely written records
    return OpLog(launches, found, latest(launches), latest(found))


def latest(numbers: Mapping[int, object]) -> int:
    """Return the latest of some numbers that are close modulo 2**32; 0 if empty."""
    return next(
        (number for number in numbers if not any(is_after(other, number) for other in numbers)), 0
    )


def _differing_op(own: OpLog, other: OpLog) -> tuple[int, int] | None:
    """Return (number, signature) of an own operation that differs from the other's, or None."""
    for number, signature in own.launches.items():
        if other.launches.get(number, signature) != signature:
            return number, signature
    for number, record in own.message_ops.items():
        if number in other.message_ops and other.message_ops[number].tag != record.tag:
            return 0, record.signature
    return None


def _reordered_op(own: OpLog, other: OpLog) -> tuple[int, int] | None:
    """Return (number, signature) of an operation that one of the two ranks has skipped, or None."""
    if (
        own.last_message_op
        and is_after(own.last_message_op, other.last_message_op)
        and is_after(other.last_launch, own.message_ops[own.last_message_op].launches_before)
    ):
        return 0, own.message_ops[own.last_message_op].signature  # the peer has launched past it
    if (
        other.last_message_op
        and is_after(other.last_message_op, own.last_message_op)
        and is_after(
            own.last_launch, before := other.message_ops[other.last_message_op].launches_before
        )
    ):
        number = (before + 1) % NUMBER_RANGE
        return (number, own.launches[number]) if number in own.launches else own.last
    return None


@dataclass(frozen=True)
class Straggler:
    """Operation that rank ``ahead`` has started and rank ``behind`` has not; None is this rank."""

    ahead: int | None
    behind: int | None
    number: int
    signature: int


@dataclass(frozen=True)
class RecorderSnapshot:
    """Op logs of this rank and of its peers.

    ``stopped(rank)`` returns True if a peer's wait has failed; launches that it enqueued before
    still begin after that.
    """

    own: OpLog
    peers: Mapping[int, OpLog]
    stopped: Callable[[int], bool] = lambda _: False

    def has_begun(self, rank: int, number: int) -> bool:
        """Return True if a peer has started launch ``number`` (0: our last message collective)."""
        log = self.peers.get(rank, OpLog({}, {}))
        if number:
            return log.last_launch != 0 and not is_after(number, log.last_launch)
        return log.last_message_op != 0 and not is_after(
            self.own.last_message_op, log.last_message_op
        )

    def describe(self, rank: int, number: int, name: Callable[[int, int], str]) -> str:
        """Describe a peer's progress in an operation; ``name(number, signature)``: its name."""
        return (
            "has started it"
            if self.has_begun(rank, number)
            else f"never arrived at it; {self.describe_last(rank, name)}"
        )

    def describe_last(self, rank: int, name: Callable[[int, int], str]) -> str:
        """Describe a peer's last operation."""
        log = self.peers[rank].last if rank in self.peers else None
        return f"its last was {name(*log)}" if log is not None else "it has not run any operation"

    @property
    def all_caught_up(self) -> bool:
        """True if all peers have started every operation that this rank has."""
        own = self.own
        return not any(
            is_after(own.last_launch, log.last_launch)
            or is_after(own.last_message_op, log.last_message_op)
            for log in self.peers.values()
        )

    def find_straggler(self) -> Straggler | None:
        """Return the first pair of ranks that have not started equally many operations, or None."""
        for peer, log in self.peers.items():
            if log.last_launch != self.own.last_launch:
                own_is_ahead = is_after(self.own.last_launch, log.last_launch)
                ahead_log = self.own if own_is_ahead else log
                number = ahead_log.last_launch
                signature = ahead_log.launches.get(number, 0)
            elif log.last_message_op != self.own.last_message_op:
                own_is_ahead = is_after(self.own.last_message_op, log.last_message_op)
                ahead_log = self.own if own_is_ahead else log
                number, signature = 0, ahead_log.message_ops[ahead_log.last_message_op].signature
            else:
                continue
            return Straggler(
                None if own_is_ahead else peer, peer if own_is_ahead else None, number, signature
            )
        return None

    def find_mismatch(self, failed: int | None = None) -> tuple[int, int, int] | None:
        """Return (peer, number, signature) of an own operation that a peer replaced, or None.

        ``failed``: operation in which this rank's wait failed, as for ``OpLog.truncated_at``.
        """
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


class RegionAddresses(Protocol):
    """Addresses of a rank's memory and its peers'.

    Implemented by ``transport.cuda_p2p.SymmetricMemory`` and ``executor.cuda.lower.CommArgs``.
    """

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
    """Start of this rank's memory: its state and, if peers write here, their op logs.

    Read with one copy.
    """

    state: tuple[int, ...]
    content: bytes

    @property
    def op_counts(self) -> tuple[int, int]:
        """Numbers of launches and of message collectives so far."""
        return self.state[layout.STATE_LAUNCH] % NUMBER_RANGE, self.state[
            layout.STATE_MESSAGE_OPS
        ] >> 32

    @property
    def last_begun(self) -> tuple[int, int]:
        """Number and signature of the last started launch; 0 before the first."""
        recorded = {
            word >> 32: word % NUMBER_RANGE
            for word in self.state[layout.STATE_SIGNATURES :][: layout.OP_LOG_ENTRIES]
            if word
        }
        return (number := latest(recorded)), recorded.get(number, 0)

    @property
    def stopped(self) -> bool:
        """True if a wait of this rank has failed."""
        return self.state[layout.STATE_WAIT_FAILED] != 0

    @property
    def pending_copies(self) -> tuple[int, int] | None:
        """Number and signature of the launch whose copies wait for peers, or None."""
        number = self.state[layout.STATE_COPIES] % NUMBER_RANGE
        return (
            (
                number,
                self.state[layout.STATE_SIGNATURES + number % layout.OP_LOG_ENTRIES] % NUMBER_RANGE,
            )
            if number
            else None
        )


def read_progress_header(gpu: Gpu, regions: RegionAddresses) -> ProgressHeader:
    """Read the header with which ``read_snapshot`` begins."""
    content = gpu.read(regions.own, _HEADER_BYTES)
    return ProgressHeader(_STATE_WORDS.unpack_from(content, layout.STATE_OFFSET), content)


def read_word(gpu: Gpu, address: int) -> int:
    return int.from_bytes(gpu.read(address, 8), "little")


def read_snapshot(
    gpu: Gpu, regions: RegionAddresses, head: ProgressHeader | None = None
) -> RecorderSnapshot:
    """Read the op logs of this rank and all peers; ``head`` if it was read before."""
    head = head or read_progress_header(gpu, regions)
    recorded = head.state[layout.STATE_SIGNATURES : layout.STATE_SIGNATURES + layout.OP_LOG_ENTRIES]
    peers = {peer: inbox for peer, inbox in enumerate(regions.inboxes) if peer != regions.rank}
    # Launches first: records that a peer wrote before starting a launch are then visible.
    headers = {
        base: head.content if base == regions.own else gpu.read(base, _HEADER_BYTES)
        for base in set(peers.values())
    }
    moves = {
        base: gpu.read(base + layout.MESSAGE_OPS_OFFSET, layout.MAX_RANKS * _MESSAGE_RECORD_BYTES)
        for base in {regions.own, *peers.values()}
    }
    own = _parse_op_log(
        {word >> 32: word % NUMBER_RANGE for word in recorded if word},
        _rank_entries(moves[regions.own], regions.rank, _MESSAGE_RECORD_BYTES),
    )
    other = {}
    for peer, base in peers.items():
        entries = ENTRY.iter_unpack(
            _rank_entries(headers[base][layout.OP_LOG_OFFSET :], peer, ENTRY_BYTES)
        )
        launched = {number: signature for number, signature, *_ in entries if number or signature}
        other[peer] = _parse_op_log(
            launched, _rank_entries(moves[base], peer, _MESSAGE_RECORD_BYTES)
        )
    return RecorderSnapshot(
        own, other, lambda peer: any(gpu.read(regions.outboxes[peer] + WAIT_FAILED_OFFSET, 8))
    )


def _rank_entries(entries: bytes, rank: int, nbytes: int) -> bytes:
    return entries[rank * nbytes : (rank + 1) * nbytes]
