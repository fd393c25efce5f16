"""Operations on GPU memory that go through pinned memory and CPU communicators between hosts: kinds of operation, and their jobs.

A kind of operation (collective, counts, type, operator) is cut into pieces, planned and registered with the lanes once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from miraccl import params
from miraccl.bootstrap import Session
from miraccl.diagnosis import blocked_ops
from miraccl.errors import MiracclError
from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.control import GPU_SETUP
from miraccl.runtime.gpu.memory import DeviceMemory
from miraccl.runtime.gpu.transfer import DeviceTransfer
from miraccl.runtime.multinode.direct import DirectStreams
from miraccl.runtime.multinode.layout import HostsLayout
from miraccl.runtime.multinode.messages import Kind, MessageNetwork, MessageStreams
from miraccl.runtime.multinode.network import CpuCommunicator, InPython, StagedCollective, agreeing
from miraccl.runtime.multinode.segments import Piece, Shape, cut
from miraccl.runtime.multinode.staging import LANES, Network, StagedJob, Staging
from miraccl.runtime.multinode.stream_monitor import Watch
from miraccl.runtime.multinode.transfers import EMPTY, cut_transfers, transfers_on
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.types import Collective, DType, RedOp

LEAST_SLOT = 64 << 10
MOST_JOBS = 1024
AnyStreams = TypeVar("AnyStreams", DirectStreams, MessageStreams)
OpenCpu = Callable[[Session, SetupPhases], CpuCommunicator]
"""A CPU communicator of a session, made in stages of that session."""
ON_GPU = tuple(
    dtype for dtype in DType if dtype not in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
)  # types that kernels add up


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostsPlan:
    """How an operation runs; ``pieces`` of at most ``piece_bytes`` go over the network one after another."""

    algo: str
    reason: str
    pieces: int
    piece_bytes: int
    proto: str = "staging"


class HostsJobs:
    """The jobs of one communicator, with its slots, lanes and CPU communicators; made collectively."""

    def __init__(
        self,
        stages: SetupPhases,
        layout: HostsLayout,
        gpu: Gpu,
        open_cpu: OpenCpu,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.layout, self.gpu = layout, gpu
        self.last_plan: HostsPlan | None = None
        self._cpus: list[CpuCommunicator] = []
        self._streams: list[DirectStreams | MessageStreams] = []
        self._watch = Watch(stages)
        self._jobs: dict[tuple[Any, ...], StagedJob] = {}
        self._plans: dict[int, HostsPlan] = {}
        try:
            self.slot_bytes = max(
                LEAST_SLOT, min(stages.exchange("gpu staging", params.GPU_STAGING.read()))
            )
            self._connect(stages, open_cpu)
            self.staging = Staging(
                gpu, self.slot_bytes, on_fault=on_fault, name=f"miraccl-staging-{layout.rank}"
            )
        except BaseException as error:
            stages.give_up(error)  # first of all, as the rest takes time
            self.abort(str(error))
            self.finalize()
            raise

    def _connect(self, stages: SetupPhases, open_cpu: OpenCpu) -> None:
        layout, session = self.layout, stages.session
        self.world = self._open(range(layout.nranks), "gpu world", stages, open_cpu)
        #: between hosts of equal numbers of ranks, those of one index: a communicator per lane
        self.crosses: tuple[CpuCommunicator, ...] = ()
        if layout.even:
            alone = layout.width == 1
            names = [f"gpu cross {layout.index}.{lane}" for lane in range(alone, LANES)]
            lanes = [self._open(layout.across(), name, stages, open_cpu) for name in names]
            self.crosses = (self.world, *lanes) if alone else tuple(lanes)
        #: the same ranks' own streams, where they are few
        self.direct: tuple[DirectStreams, ...] = ()
        if self.crosses and DirectStreams.useful(self.crosses[0]._core):
            name = f"{session.name}/gpu direct {layout.index}"
            subs = [
                session.sub(layout.across(), f"{name}.{lane}") for lane in range(len(self.crosses))
            ]
            self.direct = tuple(
                self._keep(DirectStreams(stages.child(sub, GPU_SETUP), cpu._core), layout.across())
                for sub, cpu in zip(subs, self.crosses, strict=True)
            )
        #: streams of the messages between hosts, where there are few ranks
        self.messages: MessageStreams | None = None
        if MessageStreams.useful(self.world._core, layout):
            self.messages = self._keep(
                MessageStreams(stages, self.world._core, layout), range(layout.nranks)
            )

    def _open(
        self, ranks: Sequence[int], name: str, stages: SetupPhases, open_cpu: OpenCpu
    ) -> CpuCommunicator:
        session = stages.session.sub(ranks, f"{stages.session.name}/{name}")
        cpu = open_cpu(session, stages.child(session))
        blocked_ops.providers.remove(cpu._core.seat)  # the threads of ``staging`` wait in there
        cpu._core.faults.called = ranks
        self._cpus.append(cpu)
        return cpu

    def _keep(self, streams: AnyStreams, ranks: Sequence[int]) -> AnyStreams:
        """``ranks``: those that the streams number from 0 on."""
        self._streams.append(streams)
        self._watch.add({ranks[peer]: stream for peer, stream in streams.sockets.items()})
        return streams

    def begin(self) -> None:
        """All ranks are ready: lanes find out themselves what happens to their streams."""
        self._watch.close()

    def staged(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Any,
        root: int,
        number: int,
        captured: bool,
    ) -> None:
        """The whole operation through CPU communicators of all ranks."""
        called = self.in_words(collective.label, count, source.dtype)
        shape = Shape.even(
            collective, source.dtype.itemsize, self.layout.rank, self.layout.nranks, root, count
        )
        cpus = self.crosses if self.layout.even and self.layout.width == 1 else (self.world,)
        self.enqueue(
            cpus,
            shape,
            source.dtype,
            op,
            (source.address, target.address),
            number,
            captured,
            called=called,
        )

    def in_words(self, name: str, count: int, dtype: DType) -> str:
        """What the program has called, for errors of its parts. ``count`` are the elements of a block, as in errors on CPU memory."""
        return f"{name} of {count} x {dtype.label} on rank {self.layout.rank}"

    def enqueue(
        self,
        cpus: tuple[CpuCommunicator, ...],
        shape: Shape,
        dtype: DType,
        op: Any,
        buffers: tuple[int, int],
        number: int,
        captured: bool,
        *,
        called: str = "",
        takes_part: bool = True,
        before: Callable[[int, int], None] | None = None,
        after: Callable[[int, int], None] | None = None,
    ) -> None:
        """Enqueue a collective of ``cpus``, one a lane, which is a part of what the program ``called``; with ``before`` a kernel writes the
        slots, and nothing is copied down."""
        unknown = shape.uneven and shape.collective is Collective.ALL_TO_ALL

        def make() -> tuple[tuple[Piece, ...], Network]:
            pieces = cut(shape, self.slot_bytes)
            network = StagedCollective(
                cpus,
                shape,
                dtype,
                op,
                self.staging.slots,
                self.direct if cpus == self.crosses else (),
            )
            if before is not None:
                pieces = tuple(dataclasses.replace(piece, down=()) for piece in pieces)
            return agreeing(self.world, pieces, network) if unknown else (pieces, network)

        two_steps = cpus == self.crosses and self.layout.width > 1
        job = self._job(
            (shape, dtype, op, cpus == self.crosses, called), captured, make, stride=len(cpus)
        )
        job.called = called if two_steps or job.npieces > 1 else ""
        if job.number not in self._plans:
            self._plan(
                job,
                "hierarchical" if two_steps else "staged",
                self.why(two_steps, shape, dtype, op),
            )
        self.last_plan = self._plans[job.number]
        self.staging.enqueue(
            job, buffers, number, takes_part=takes_part, before=before, after=after
        )

    def _job(
        self,
        key: tuple[Any, ...],
        captured: bool,
        make: Callable[[], tuple[tuple[Piece, ...], Network]],
        *,
        need: int = 0,
        stride: int = 1,
    ) -> StagedJob:
        """The job of a kind of operation; captured ones apart, because a graph may bring them at any time."""
        job = self._jobs.pop((key, captured), None)
        if job is None:
            self._forget_some()
            pieces, network = make()
            job = self.staging.job(pieces, self.staging.slots_for(need), network, captured, stride)
        self._jobs[key, captured] = job  # the one used last comes last
        return job

    def _forget_some(self) -> None:
        """Keep no more than ``MOST_JOBS`` that can be made again: programs whose counts change with every call have ever new ones."""
        for kind in list(self._jobs)[: max(0, len(self._jobs) + 1 - MOST_JOBS)]:
            job = self._jobs[kind]
            if self.staging.forget(job):
                del self._jobs[kind]
                self._plans.pop(job.number, None)

    def why(self, two_steps: bool, shape: Shape, dtype: DType, op: Any) -> str:
        """Why an operation runs in two steps, or is staged."""
        if two_steps:
            return f"{len(self.layout.groups)} hosts of {self.layout.width} ranks"
        if self.layout.width == 1 and self.layout.even:
            return "one rank per host"
        if not self.layout.even:
            return "hosts have different numbers of ranks"
        if shape.collective.reduces and dtype not in ON_GPU:
            return f"{dtype.label} is not added up on GPUs"
        if shape.collective.reduces and not isinstance(op, RedOp):
            return f"{type(op).__name__} is for the CPU"
        if shape.collective.reduces and dtype.is_float:
            return "added up in the order of the ranks (deterministic)"
        return "no algorithm of two steps"

    def _plan(self, job: StagedJob, algo: str, reason: str) -> None:
        self._plans[job.number] = HostsPlan(
            algo=algo, reason=reason, pieces=job.npieces, piece_bytes=job.piece_bytes
        )

    def barrier(self, number: int, captured: bool) -> None:
        """Of all ranks, in the stream ``number``."""
        job = self._job(
            ("barrier",), captured, lambda: ((Piece(),), InPython(lambda *_: self.world.barrier()))
        )
        self.staging.enqueue(job, (), number)

    def exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        number: int,
        captured: bool,
        kind: Kind | None = None,
        beside: bool = False,
    ) -> None:
        """Sends and receives with ranks of other hosts, in the stream ``number``; ``kind``: of the collective that they are, if any, which
        is counted also where there are none. Only streams of messages can do that. ``beside``: kernels of the host run beside."""
        rounds, need = (
            cut_transfers(transfers, self.slot_bytes, self.layout.most_far)
            if transfers
            else ([EMPTY], 0)
        )
        key = (
            "exchange",
            kind,
            tuple((t.receives, t.peer, t.memory.count, t.memory.dtype) for t in transfers),
        )
        slots = self.staging.slots_for(need)

        def make() -> tuple[tuple[Piece, ...], Network]:
            pieces = tuple(round.piece for round in rounds)
            if self.messages:
                return pieces, MessageNetwork(self.messages, rounds, slots, kind)
            assert kind is None
            return pieces, transfers_on(self.world, rounds, slots)

        job = self._job(key, captured, make, need=need)
        job.beside |= beside
        if job.number not in self._plans:
            self._plan(job, "staged", "sends and receives")
        self.last_plan = self._plans[job.number]
        self.staging.enqueue(job, [t.memory.address for t in transfers], number)

    def tally(self) -> bytes:
        """What this rank has sent and taken in collectives that are messages, once all has ended; nothing where there are no such."""
        return self.messages.tally().to_bytes() if self.messages is not None else b""

    def come_too_late(self) -> MiracclError | None:
        """The error of a message that nobody will take, once all has ended."""
        lane = self.staging.proxies[0]  # messages are its alone
        return (
            self.messages.come_too_late(lambda: lane.between_jobs)
            if self.messages is not None
            else None
        )

    def in_slot(self, slot: int, first: int, count: int, dtype: DType) -> DeviceMemory:
        """Elements of a slot, as kernels see them."""
        slots = self.staging.slots
        return DeviceMemory(slots.on_gpu + slot * slots.nbytes, first + count, dtype).slice(
            first, count
        )

    def bytes_pinned(self) -> int:
        return self.staging.bytes_pinned()

    def abort(self, reason: str) -> None:
        """End what the lanes wait for."""
        for cpu in self._cpus:
            cpu.abort(reason)

    def leave(self) -> None:
        """Leave the CPU communicators, once all has ended: the lanes of others that wait for this rank do so in vain, and end. What they
        need has been sent."""
        for cpu in self._cpus:
            cpu.finalize()
        for streams in self._streams:
            streams.leave()

    def finalize(self) -> None:
        """Free everything, after ``staging`` was closed; whether ``leave`` came before or not."""
        self._watch.close()
        for streams in self._streams:
            streams.close()
        for cpu in self._cpus:
            cpu.finalize()
