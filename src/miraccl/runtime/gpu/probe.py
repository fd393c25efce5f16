"""What the host reads from the memory of a host's GPUs once waits have failed or work has ended, and what operations are called there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miraccl.errors import MiracclError
from miraccl.executor.cuda import moves
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.executor.cuda.source import Framing
from miraccl.ops.arguments import resolve_operator
from miraccl.runtime.gpu.flight_recorder import (
    MemoryRegions,
    MessageCounts,
    PendingLaunch,
    PendingMessageWait,
    RecorderSnapshot,
    read_message_counts,
    read_pending_launch,
    read_pending_waits,
    read_progress_header,
    read_snapshot,
)
from miraccl.runtime.gpu.messages import read_rejected_size
from miraccl.runtime.gpu.unmatched import find_unmatched

if TYPE_CHECKING:
    from miraccl.runtime.gpu.faults import DeviceFaults

Reading = TypeVar("Reading")


class LaunchRecord(Protocol):
    """A launch that was made."""

    @property
    def signatures(self) -> tuple[int, ...]: ...
    @property
    def plan(self) -> DevicePlan: ...


class DeviceProbe:
    """Looks at the regions ``regions`` of a communicator; ``launches()`` are those that it has made, by (collective, dtype, count, operator,
    root)."""

    def __init__(
        self,
        gpu: Gpu,
        regions: MemoryRegions,
        launches: Callable[[], Iterable[tuple[tuple[Any, ...], LaunchRecord]]],
    ) -> None:
        self._gpu, self._regions, self._launches = gpu, regions, launches
        self._compared_counts = 0, 0  # how far operations were compared with those of others

    def _read(self, read: Callable[..., Reading], *what: Any) -> Reading | None:
        with (
            contextlib.suppress(MiracclError),
            self._gpu.device_guard(),
        ):  # the GPU may be what is broken
            return read(self._gpu, self._regions, *what)
        return None

    def snapshot(self) -> RecorderSnapshot | None:
        """What all ranks run."""
        return self._read(read_snapshot)

    def rejected_size(self, peer: int) -> int | None:
        """The size of this rank's message that ``peer`` has refused."""
        return self._read(read_rejected_size, peer)

    def stopped(self) -> bool:
        """Whether a wait on this rank's GPU has ended without what it waited for, regions that can be read."""
        head = self._read(read_progress_header)
        return head is not None and head.stopped

    def pending_launch(self) -> PendingLaunch | None:
        """The launch that this rank is in now."""
        return self._read(read_pending_launch)

    def pending_waits(self) -> list[PendingMessageWait]:
        """What this rank waits for in messages now."""
        return self._read(read_pending_waits) or []

    def message_counts(self) -> MessageCounts | None:
        """How far the kernels of this rank have come, regions that can be read."""
        return self._read(read_message_counts)

    def pending_copies(self) -> tuple[int, int] | None:
        """Number and signature of the operation whose copies wait for peers now."""
        head = self._read(read_progress_header)
        return head.pending_copies if head is not None else None

    def describe_launch(self, number: int, signature: int) -> str:
        """As of CPU operations, with the number of the launch: ``all_reduce #17 (1024 x float32, sum; ring, simple)``; ``number`` 0: a
        collective that is messages."""
        if not number:
            return moves.describe_signature(signature)
        for (collective, dtype, count, op, root), launch in self._launches():
            if signature in launch.signatures:
                what = [f"{count} x {dtype.label}"]
                what += (
                    [resolve_operator(op, dtype, collective.label)[0].name.lower()]
                    if collective.reduces
                    else []
                )
                what += [f"root {root}"] if collective.rooted else []
                return f"{collective.label} #{number} ({', '.join(what)}; {launch.plan.algo}, {launch.plan.proto})"
        return f"launch #{number}"

    def compare_ops(self, faults: DeviceFaults) -> None:
        """Find a mismatch in the last operations that left nobody waiting: the next ones would tell of it. The GPU has ended its work."""
        head = self._read(read_progress_header)
        snapshot = (
            self._read(read_snapshot, head)
            if head is not None and head.op_counts != self._compared_counts
            else None
        )
        if snapshot is not None and head is not None:
            found = snapshot.find_mismatch()
            if found is not None:
                faults.record_mismatch(*found)
            elif snapshot.all_caught_up:
                self._compared_counts = head.op_counts

    def compare_final_ops(self, faults: DeviceFaults, frame: Framing) -> None:
        """The same once all ranks have come to the end and their GPUs have ended their work: equally many operations, and no messages of
        collectives that nobody has taken."""
        snapshot = self._read(read_snapshot)
        if snapshot is None:
            return
        snapshot = dataclasses.replace(
            snapshot, stopped=lambda _: False
        )  # or not all had come; their memory may be going already
        if (mismatch := snapshot.find_mismatch()) is not None:
            faults.record_mismatch(*mismatch)
        elif (straggler := snapshot.find_straggler()) is not None:
            faults.record_straggler(straggler)
        elif (unmatched := self._read(find_unmatched, frame, snapshot)) is not None:
            faults.record_unmatched(*unmatched)
