"""Schedules with steps on memory that peers address (``schedule.ir.Op``: PUT, GET,
REDUCE_FROM_PEERS),
on windows.

A peer's buffer has the same position in the same window as this rank's, and the window is mapped
here. A launch therefore belongs to a window position; all ranks must pass the same one, and a
mismatch is reported like any other.
"""

from __future__ import annotations

from collections.abc import Callable

from miraccl.executor.cuda import lower, schedules
from miraccl.executor.cuda.copies import WindowPosition
from miraccl.executor.cuda.launch import KernelLaunch, Kernels
from miraccl.executor.cuda.plan import DevicePlan, Request
from miraccl.schedule.ir import Buffer, Schedule, input_blocks, output_blocks

MAX_POSITIONS = 256  # cached launches of an operation
FindPosition = Callable[[int, int], WindowPosition | None]
"""(address, bytes) -> position in a window of all ranks, or None."""


def make_launch(
    kernels: Kernels,
    plan: DevicePlan,
    request: Request,
    comm_args: lower.CommArgs,
    find: FindPosition,
) -> KernelLaunch | OneSidedLaunch:
    """Return the launch of a plan, by window position if peers address input or output."""
    schedule = schedules.schedule_of(plan, request, comm_args.order)
    if schedule is None or not schedule.addressed - {Buffer.SCRATCH}:
        return kernels.prepare(plan, request, comm_args)
    return OneSidedLaunch(kernels, schedule, plan, request, comm_args, find)


class OneSidedLaunch:
    """Launch of one collective of one size at any window position; like ``launch.KernelLaunch`` it
    neither
    waits nor allocates once a position is known.
    """

    def __init__(
        self,
        kernels: Kernels,
        schedule: Schedule,
        plan: DevicePlan,
        request: Request,
        comm_args: lower.CommArgs,
        find: FindPosition,
    ) -> None:
        self.plan, self.threads = plan, schedules.grid_blocks(plan, schedule) * plan.threads
        self._kernels, self._request, self._comm_args, self._find = (
            kernels,
            request,
            comm_args,
            find,
        )
        blocks = (
            input_blocks(request.collective, request.nranks),
            output_blocks(request.collective, request.nranks),
        )
        self._bytes = [
            count * request.block_bytes if Buffer(buffer) in schedule.addressed else 0
            for buffer, count in enumerate(blocks)
        ]
        self._launches: dict[
            tuple[int, ...], KernelLaunch
        ] = {}  # by the addresses that peers access

    @property
    def signatures(self) -> tuple[int, ...]:
        """Signatures in op records, one per window position."""
        return tuple(
            signature for launch in list(self._launches.values()) for signature in launch.signatures
        )

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream``, reading at ``source`` and writing at ``target``.

        Raises:
            InvalidUsage: Memory that peers address is not in a window.
        """
        key = tuple(
            [address if size else 0 for address, size in zip((source, target), self._bytes)]
        )
        launch = self._launches.get(key) or self._prepare(key)
        launch.run(source, target, stream)

    def _prepare(self, key: tuple[int, ...]) -> KernelLaunch:
        positions = [
            self._find(address, size) if size else None
            for address, size in zip(key, self._bytes, strict=True)
        ]
        rank = self._comm_args.rank
        apart = [
            tuple(there - position.bases[rank] for there in position.bases) if position else ()
            for position in positions
        ]
        where = tuple(
            number
            for position in positions
            if position
            for number in (position.window, position.offset)
        )
        windows = schedules.WindowOffsets(in_offsets=apart[0], out_offsets=apart[1], position=where)
        launch = self._kernels.prepare(self.plan, self._request, self._comm_args, windows)
        if len(self._launches) >= MAX_POSITIONS:
            self._launches.clear()
        self._launches[key] = launch
        return launch
