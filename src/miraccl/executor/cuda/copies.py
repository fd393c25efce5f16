"""Copy engines: collectives that only move data into windows, without multiprocessors.

A schedule whose sends read the input and whose receives write the output, each chunk once, is a set
of copies: a rank copies each chunk it sends to the address at which its peer would have received
it. Between two device barriers on the streams (source/device_barrier.cuh: one warp each, a few
microseconds) every rank's copy engines write to its peers, the next rank first, so no two ranks
write to the same peer at a time. The copy to this rank's own window runs concurrently in a side
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import lower
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch import KernelLaunch, Kernels
from miraccl.executor.cuda.plan import DevicePlan, Request
from miraccl.executor.cuda.source import KernelSpec
from miraccl.schedule import catalog
from miraccl.schedule.ir import Buffer, Op, Schedule
from miraccl.types import Collective, DType

#: Received bytes per rank from which copy engines are faster than kernels on windows: (2 ranks,
#: more). Measured on H200 (docs/measurements.md); the values for more than 2 ranks are older than
#: the side stream for own copies.
FASTER_MIN_BYTES = {
    Collective.ALL_GATHER: (32 << 20, 48 << 20),
    Collective.ALL_TO_ALL: (32 << 20, 48 << 20),
    Collective.BROADCAST: (96 << 20, 0),
}
BARRIER_THREADS = 32


def is_supported(collective: Collective, nranks: int) -> bool:
    """Return True if copy engines suit the collective."""
    # with more ranks a broadcast would send everything from the root to each of them
    return collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL) or (
        collective is Collective.BROADCAST and nranks == 2
    )


def faster_min_bytes(collective: Collective, nranks: int) -> int:
    """Return the received bytes per rank from which copies are chosen."""
    two, more = FASTER_MIN_BYTES[collective]
    return two if nranks == 2 else more


class SideStream:
    """Stream concurrent with a call's stream, and its event; shared by the launches of a
    communicator.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.stream, self.event = gpu, gpu.make_stream(), gpu.make_event()

    def close(self) -> None:
        """Destroy stream and event; the GPU must have finished with them."""
        self.gpu.destroy_event(self.event)
        self.gpu.destroy_stream(self.stream)


def find_side_stream(sides: list[SideStream], gpu: Gpu, stream: int) -> SideStream:
    """Return a side stream for a call in ``stream``, appended to ``sides`` if none is usable.

    A stream that has joined a capture belongs to the capture until it ends.
    """
    capture = gpu.capture_id(stream)
    for side in sides:
        if gpu.capture_id(side.stream) in (0, capture):
            return side
    with gpu.relaxed_capture():
        sides.append(SideStream(gpu))
    return sides[-1]


class BlockCopy(NamedTuple):
    """Copy of block ``source`` of this rank's input to block ``target`` of a peer's output."""

    peer: int
    source: int
    target: int


def block_copies(schedule: Schedule, rank: int) -> list[BlockCopy]:
    """Return the copies of ``rank``, the next peer first.

    Raises:
        InvalidUsage: The schedule does more than move blocks from inputs to outputs.
    """
    found: list[BlockCopy] = []
    for channel in schedule.channels:
        arrivals = {
            peer: [
                step.dst for step in channel[peer] if step.op is Op.RECV and step.recv_peer == rank
            ]
            for peer in range(schedule.nranks)
        }
        for step in channel[rank]:
            if step.op is Op.COPY and step.src and step.dst:
                found += [
                    BlockCopy(rank, step.src.index + i, step.dst.index + i)
                    for i in range(step.chunks)
                ]
            elif step.op is Op.SEND and step.src and step.send_peer is not None:
                target = arrivals[step.send_peer].pop(0)
                if (
                    step.src.buffer is not Buffer.INPUT
                    or target is None
                    or target.buffer is not Buffer.OUTPUT
                ):
                    raise InvalidUsage(
                        f"cannot run schedule {schedule.name!r} by copy engines: "
                        "it forwards received data"
                    )
                found += [
                    BlockCopy(step.send_peer, step.src.index + i, target.index + i)
                    for i in range(step.chunks)
                ]
            elif step.op is not Op.RECV:
                raise InvalidUsage(
                    f"cannot run schedule {schedule.name!r} by copy engines: "
                    f"it has the step {step.op.name}"
                )
    if schedule.parts != 1:
        raise InvalidUsage(
            f"cannot run schedule {schedule.name!r} by copy engines: "
            f"it cuts blocks into {schedule.parts} parts; allowed are whole blocks"
        )
    return sorted(found, key=lambda copy: (copy.peer - rank) % schedule.nranks)


def copy_plan(request: Request) -> DevicePlan:
    """Return the plan of an operation on windows by copy engines."""
    return DevicePlan(
        algo="one_shot",
        proto="copy",
        blocks=1,
        threads=BARRIER_THREADS,
        unroll=1,
        reason="copy engines",
    )


@dataclass(frozen=True, kw_only=True)
class WindowPosition:
    """Position of the output: window number, offset in it, and every rank's base address here."""

    window: int
    offset: int
    bases: Sequence[int]


def barrier_launch(
    gpu: Gpu,
    kernels: Kernels,
    plan: DevicePlan,
    request: Request,
    comm_args: lower.CommArgs,
    position: WindowPosition | None = None,
    stream_waits: bool = False,
) -> KernelLaunch:
    """Return the launch of the device barrier before or after copies.

    ``position``: window position that all ranks must share. ``stream_waits``: streams wait for
    words of peers afterwards.
    """
    number, offset = (position.window + 1, position.offset) if position else (0, 0)
    spec = KernelSpec(
        family="device_barrier",
        nranks=request.nranks,
        dtype=DType.UINT8,
        reduces=False,
        threads=plan.threads,
    )
    args = lower.pack_args(
        comm_args,
        count=offset,
        root=int(stream_waits),
        signature=lower.plan_signature(plan, request) ^ number,
    )
    return KernelLaunch(gpu, kernels.function(spec), plan, 1, args)


class CopyLaunch:
    """Launch of one collective of one size into a window position; neither waits nor allocates."""

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        request: Request,
        comm_args: lower.CommArgs,
        position: WindowPosition,
        sides: list[SideStream],
    ) -> None:
        self.plan, self.threads = copy_plan(request), BARRIER_THREADS
        schedule = catalog.build(self.plan.algo, request.collective, request.nranks, request.root)
        block, rank = request.block_bytes, comm_args.rank
        self._copies = [
            (
                position.bases[copy.peer] + position.offset + copy.target * block,
                copy.source * block,
                copy.peer == rank,
            )
            for copy in block_copies(schedule, rank)
        ]
        self._block, self._gpu = block, gpu
        self._sides = sides
        self._before, self._after = (
            barrier_launch(gpu, kernels, self.plan, request, comm_args, position) for _ in range(2)
        )

    @property
    def signatures(self) -> tuple[int, ...]:
        """Signatures of this launch in op records."""
        return self._before.signatures

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream``, reading at ``source``; ``target`` is this rank's own part of the
        window.
        """
        gpu, side = self._gpu, find_side_stream(self._sides, self._gpu, stream)
        self._before.run(source, target, stream)
        gpu.record(side.event, stream)
        gpu.wait_event(side.stream, side.event)
        for address, offset, own in self._copies:
            if not own or address != source + offset:
                gpu.copy(address, source + offset, self._block, side.stream if own else stream)
        gpu.record(side.event, side.stream)
        gpu.wait_event(stream, side.event)
        self._after.run(source, target, stream)
