"""Probe of the state in a host's GPU memory: op logs, waits and progress, read by the host.

Used after a wait has failed, or once the GPUs have finished their work.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miraccl.errors import MiracclError
from miraccl.executor.cuda import message_collectives
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.plan import DevicePlan
from miraccl.executor.cuda.source import Framing
from miraccl.ops.arguments import resolve_operator
from miraccl.runtime.gpu.flight_recorder import (
    RecorderSnapshot,
    RegionAddresses,
    read_progress_header,
    read_snapshot,
)
from miraccl.runtime.gpu.messages import read_rejected_size
from miraccl.runtime.gpu.unmatched import find_unmatched

if TYPE_CHECKING:
    from miraccl.runtime.gpu.kernel_faults import DeviceFaults

Reading = TypeVar("Reading")


class LaunchRecord(Protocol):
    """Prepared launch with its signatures."""

    @property
    def signatures(self) -> tuple[int, ...]: ...
    @property
    def plan(self) -> DevicePlan: ...


class DeviceProbe:
    """Probe of one communicator's memory ``regions``.

    ``launches()`` gives the prepared launches by (collective, dtype, count, operator, root).
    """

    def __init__(
        self,
        gpu: Gpu,
        regions: RegionAddresses,
        launches: Callable[[], Iterable[tuple[tuple[Any, ...], LaunchRecord]]],
    ) -> None:
        self._gpu, self._regions, self._launches = gpu, regions, launches
        self._compared_counts = 0, 0  # op counts up to which logs were compared

    def read(self, read: Callable[..., Reading], *what: Any) -> Reading | None:
        """Return ``read(gpu, regions, *what)``; None if the GPU has failed."""
        with (
            contextlib.suppress(MiracclError),
            self._gpu.device_guard(),
        ):
            return read(self._gpu, self._regions, *what)
        return None

    def snapshot(self) -> RecorderSnapshot | None:
        """Read the op logs of all ranks."""
        return self.read(read_snapshot)

    def rejected_size(self, peer: int) -> int | None:
        """Read the size of this rank's message that ``peer`` has rejected."""
        return self.read(read_rejected_size, peer)

    def stopped(self) -> bool:
        """Return True if a wait on this rank's GPU is known to have ended unfulfilled."""
        head = self.read(read_progress_header)
        return head is not None and head.stopped

    def pending_copies(self) -> tuple[int, int] | None:
        """Return number and signature of the operation whose copies wait for peers, or None."""
        head = self.read(read_progress_header)
        return head.pending_copies if head is not None else None

    def describe_launch(self, number: int, signature: int) -> str:
        """Return the name of a launch: ``all_reduce #17 (1024 x float32, sum; ring, simple)``.

        ``number`` 0 is a collective made of messages.
        """
        if not number:
            return message_collectives.describe_signature(signature)
        for (collective, dtype, count, op, root), launch in self._launches():
            if signature in launch.signatures:
                what = [f"{count} x {dtype.label}"]
                what += (
                    [resolve_operator(op, dtype, collective.label)[0].name.lower()]
                    if collective.reduces
                    else []
                )
                what += [f"root {root}"] if collective.rooted else []
                plan = f"{launch.plan.algo}, {launch.plan.proto}"
                return f"{collective.label} #{number} ({', '.join(what)}; {plan})"
        return f"launch #{number}"

    def compare_ops(self, faults: DeviceFaults) -> None:
        """Record a mismatch in operations that left no rank waiting.

        The next operation would detect it, too. The GPU has finished its work.
        """
        head = self.read(read_progress_header)
        snapshot = (
            self.read(read_snapshot, head)
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
        """Record a mismatch at finalize: unequal operation counts or unmatched messages.

        All ranks have arrived and their GPUs have finished their work.
        """
        snapshot = self.read(read_snapshot)
        if snapshot is None:
            return
        snapshot = dataclasses.replace(
            snapshot, stopped=lambda _: False
        )  # a peer that had stopped would not be here, and its memory may already be unmapped
        if (mismatch := snapshot.find_mismatch()) is not None:
            faults.record_mismatch(*mismatch)
        elif (straggler := snapshot.find_straggler()) is not None:
            faults.record_straggler(straggler)
        elif (unmatched := self.read(find_unmatched, frame, snapshot)) is not None:
            faults.record_unmatched(*unmatched)
