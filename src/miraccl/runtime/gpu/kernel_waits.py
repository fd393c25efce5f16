"""Waits and progress of a rank's kernels, read from GPU memory for the deadlock detector.

Nothing but the wait-state providers uses this module: without them, deadlocks of kernels with other
waits end at the deadline.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miraccl.diagnosis.waits import RankProgress, Wait, WaitForOperation, WaitForPackets
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.engine_errors import SEND_RECV
from miraccl.runtime.gpu.flight_recorder import (
    ENTRY,
    ENTRY_BYTES,
    NUMBER_RANGE,
    WAIT_FAILED_OFFSET,
    RegionAddresses,
    is_after,
    latest,
    read_progress_header,
    read_word,
)
from miraccl.runtime.gpu.probe import DeviceProbe

FailFn = Callable[[str, str], None]
"""``end(op, text)`` makes ``CollectiveMismatch`` the communicator's fault."""

_WAIT_NEED, _WAIT_HOLDS, _NEED_SENT, _NEED_BULK = (
    56,
    48,
    0,
    2,
)  # bit positions in the wait words of source/p2p.cuh
_COUNTER_NAMES = ("sent", "received", "large")  # fields of RankProgress, by NEED_*


@dataclass(frozen=True)
class PendingLaunch:
    """Launch that cannot end before ranks ``awaited``, which have not started it."""

    number: int
    signature: int
    awaited: tuple[int, ...]


def read_pending_launch(gpu: Gpu, regions: RegionAddresses) -> PendingLaunch | None:
    """Return the launch that waits for ranks which have not started it, or None."""
    head = read_progress_header(gpu, regions)
    number, signature = head.last_begun
    peers = [rank for rank in range(len(regions.outboxes)) if rank != regions.rank]
    if not peers or not number or head.stopped:
        return None
    recorded, _, _, word = ENTRY.unpack(
        gpu.read(regions.outboxes[peers[0]] + _entry_offset(regions.rank, number), ENTRY.size)
    )
    above = layout.NEEDS_ALL_SHIFT + 1
    if recorded != number or word >> above != number % (NUMBER_RANGE >> above):
        return None
    needed = peers if word & layout.NEEDS_ALL else [rank for rank in peers if word >> rank & 1]
    awaited = [
        rank
        for rank in needed
        if is_after(number, _last_recorded_launch(gpu, regions.inboxes[rank], rank))
    ]
    return PendingLaunch(number, signature, tuple(awaited)) if awaited else None


def _entry_offset(rank: int, number: int) -> int:
    """Return the offset in a rank's memory of the entry of ``rank`` for a launch."""
    return (
        layout.OP_LOG_OFFSET
        + (rank * layout.OP_LOG_ENTRIES + number % layout.OP_LOG_ENTRIES) * ENTRY.size
    )


def _last_recorded_launch(gpu: Gpu, base: int, rank: int) -> int:
    """Return the number of the last launch that ``rank`` recorded at ``base``; 0 if none."""
    entries = ENTRY.iter_unpack(gpu.read(base + _entry_offset(rank, 0), ENTRY_BYTES))
    return latest({number: signature for number, signature, *_ in entries if number or signature})


@dataclass(frozen=True)
class PendingMessageWait:
    """Wait of a message launch until the peer's ``counter`` of ``MessageCounts`` reaches ``count``.

    ``holds``: bit mask of the ranks that the launch suspends (source/p2p.cuh).
    """

    peer: int
    counter: str
    count: int
    holds: int


def read_pending_waits(gpu: Gpu, regions: RegionAddresses) -> list[PendingMessageWait]:
    """Return the long waits of this rank's current message launch."""
    nranks = len(regions.inboxes)
    if read_word(gpu, regions.own + WAIT_FAILED_OFFSET):
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


def _is_satisfied(gpu: Gpu, regions: RegionAddresses, peer: int, kind: int, count: int) -> bool:
    """Return True if a wait for ``peer`` has got what it waits for."""
    if kind == _NEED_BULK:
        granted = (
            read_word(
                gpu, regions.inboxes[peer] + layout.BULK_GRANTS_OFFSET + peer * layout.BULK_STRIDE
            )
            >> 32
        )
        return not is_after(count % NUMBER_RANGE, granted)
    has = (
        regions.own + layout.ROWS_RECEIVED_OFFSET
        if kind == _NEED_SENT
        else regions.inboxes[peer] + layout.CREDIT_OFFSET
    )
    return (
        read_word(
            gpu, has + peer * layout.message_warp_queues(len(regions.inboxes)) * layout.WORD_STRIDE
        )
        >= count
    )


@dataclass(frozen=True)
class MessageCounts:
    """Progress of a rank's kernels, by peer.

    ``last_launch``: number of the last started launch. ``sent`` and ``received``: packets of the
    first warp queue. ``large_received``: large messages received.
    """

    last_launch: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    large_received: tuple[int, ...]


def read_message_counts(gpu: Gpu, regions: RegionAddresses) -> MessageCounts:
    """Read this rank's message counts."""
    nqueues = layout.message_warp_queues(len(regions.inboxes))
    sent, received, large = [], [], []
    for peer, outbox in enumerate(regions.outboxes):
        is_self = peer == regions.rank
        sent.append(
            0
            if is_self
            else read_word(
                gpu, regions.own + layout.ROWS_SENT_OFFSET + peer * nqueues * layout.WORD_STRIDE
            )
        )
        received.append(
            0
            if is_self
            else read_word(
                gpu, outbox + layout.CREDIT_OFFSET + regions.rank * nqueues * layout.WORD_STRIDE
            )
        )
        counted = (
            regions.own + layout.BULK_COUNTS_OFFSET + (layout.MAX_RANKS + peer) * layout.BULK_STRIDE
        )
        large.append(0 if is_self else read_word(gpu, counted))
    return MessageCounts(
        read_progress_header(gpu, regions).last_begun[0], tuple(sent), tuple(received), tuple(large)
    )


class KernelWaits:
    """Waits and progress of one rank's kernels.

    ``key``: that of the session of the host's ranks; ``named(rank)``: stream name of such a rank.
    """

    def __init__(
        self, probe: DeviceProbe, key: str, rank: int, named: Callable[[int], str], end: FailFn
    ) -> None:
        self._probe, self._key, self._rank, self._stream_name, self._fail = (
            probe,
            key,
            rank,
            named,
            end,
        )

    def waits(self) -> list[Wait]:
        """Return the wait of the current launch, or those of its messages."""
        found = self._probe.read(read_pending_launch)
        if found is not None:
            op = self._probe.describe_launch(found.number, found.signature)
            return [WaitForOperation(number=found.number, **self._wait_fields(found.awaited, op))]
        messages = self._probe.read(read_pending_waits) or []
        rows = (
            self._wait_fields((m.peer,), "send/recv") | {"collective": SEND_RECV, "number": m.count}
            for m in messages
        )
        return [
            WaitForPackets(counter=m.counter, suspended=m.holds, **row)
            for m, row in zip(messages, rows, strict=True)
        ]

    def _wait_fields(self, ranks: tuple[int, ...], op: str) -> dict[str, Any]:
        awaited, end = tuple(map(self._stream_name, ranks)), functools.partial(self._fail, op)
        return {
            "key": self._key,
            "awaited": awaited,
            "op": f"{op} on GPU memory",
            "fail": end,
            "rank": self._rank,
        }

    def progress(self) -> dict[str, RankProgress]:
        """Return the progress of the kernels."""
        counts = self._probe.read(read_message_counts)
        return (
            {}
            if counts is None
            else {
                self._key: RankProgress(
                    operations=counts.last_launch,
                    sent=counts.sent,
                    received=counts.received,
                    large=counts.large_received,
                )
            }
        )
