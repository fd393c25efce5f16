"""Runtime of multi-node GPU operations: segmented jobs through pinned memory and CPU communicators.

A kind of operation (collective, counts, dtype, operator) is segmented, planned and registered with
the staging threads once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from miraccl import params
from miraccl.bootstrap.contract import Session
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.control import GPU_SETUP
from miraccl.runtime.core_access import core_access
from miraccl.runtime.multinode.direct import DirectStreams
from miraccl.runtime.multinode.gpu_direct_setup import gpu_direct_possible, open_gpu_direct
from miraccl.runtime.multinode.message_rounds import (
    EMPTY_ROUND,
    run_on_communicator,
    split_transfers,
)
from miraccl.runtime.multinode.messages import CollectiveKind, MessageNetwork, MessageStreams
from miraccl.runtime.multinode.network import (
    CpuCommunicator,
    PythonStaging,
    StagedCollective,
    with_agreed_count,
)
from miraccl.runtime.multinode.segments import StagedSegment, StagedShape, split_segments
from miraccl.runtime.multinode.staging import (
    STAGING_THREADS,
    SegmentNetwork,
    Slots,
    StagedJob,
    Staging,
)
from miraccl.runtime.multinode.stream_monitor import StreamMonitor
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.types import Collective, DType, RedOp

if TYPE_CHECKING:
    from miraccl.errors import MiracclError
    from miraccl.executor.cuda.gpu import Gpu
    from miraccl.runtime.gpu.operations import DeviceTransfer
    from miraccl.runtime.multinode.gpu_direct import GpuDirect
    from miraccl.runtime.multinode.node_layout import NodeLayout

MIN_SLOT_BYTES = 64 << 10
MAX_JOBS = 1024
#: Smaller blocks of even collectives are staged in pinned memory, by compiled staging threads;
#: messages of GPU memory are posted in Python. Not measured, as no adapter was there.
DIRECT_FROM_BYTES = 64 << 10
AnyStreams = TypeVar("AnyStreams", DirectStreams, MessageStreams)
OpenCpu = Callable[[Session, SetupPhases], CpuCommunicator]
"""Creates a CPU communicator of a session in setup phases of that session."""
GPU_REDUCIBLE = tuple(
    dtype for dtype in DType if dtype not in (DType.FLOAT8_E4M3, DType.FLOAT8_E5M2)
)  # dtypes that kernels can reduce


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiNodePlan:
    """Plan of an operation in ``segments`` of at most ``segment_bytes``."""

    algo: str
    reason: str
    segments: int
    segment_bytes: int
    proto: str = "staging"


class MultiNodeRuntime:
    """Jobs of one communicator, with its slots, staging threads and CPU communicators.

    Created collectively.
    """

    def __init__(
        self,
        stages: SetupPhases,
        layout: NodeLayout,
        gpu: Gpu,
        open_cpu: OpenCpu,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.layout, self.gpu = layout, gpu
        self.last_plan: MultiNodePlan | None = None
        self._communicators: list[CpuCommunicator] = []
        self._streams: list[DirectStreams | MessageStreams] = []
        self._stream_monitor = StreamMonitor(stages)
        #: connections whose payloads lie in GPU memory, and the reason if there are none
        self.gpu_direct: GpuDirect | None = None
        self.gpu_direct_reason = ""
        self._jobs: dict[tuple[Any, ...], StagedJob] = {}
        self._plans: dict[int, MultiNodePlan] = {}
        try:
            self.slot_bytes = max(
                MIN_SLOT_BYTES, min(stages.exchange("gpu staging", params.GPU_STAGING.read()))
            )
            self._connect(stages, open_cpu)
            self.staging = Staging(
                gpu, self.slot_bytes, on_fault=on_fault, name=f"miraccl-staging-{layout.rank}"
            )
        except BaseException as error:
            stages.give_up(error)  # first: peers learn of the failure before the slow cleanup
            self.abort(str(error))
            if self.gpu_direct is not None:
                self.gpu_direct.close()
            self.finalize()
            raise

    def _connect(self, stages: SetupPhases, open_cpu: OpenCpu) -> None:
        layout, session = self.layout, stages.session
        self.world = self._open(range(layout.nranks), "gpu world", stages, open_cpu)
        #: with uniform nodes: communicators of the ranks of equal local rank, one per thread
        self.inter_node: tuple[CpuCommunicator, ...] = ()
        if layout.uniform:
            skip_first = layout.local_size == 1
            names = [
                f"gpu cross {layout.local_rank}.{thread}"
                for thread in range(skip_first, STAGING_THREADS)
            ]
            networks = [
                self._open(layout.inter_node_ranks(), name, stages, open_cpu) for name in names
            ]
            self.inter_node = (self.world, *networks) if skip_first else tuple(networks)
        #: streams of these ranks, if they are few
        self.direct: tuple[DirectStreams, ...] = ()
        if self.inter_node and DirectStreams.applicable(core_access(self.inter_node[0])):
            name = f"{session.name}/gpu direct {layout.local_rank}"
            subs = [
                session.subgroup(layout.inter_node_ranks(), f"{name}.{thread}")
                for thread in range(len(self.inter_node))
            ]
            self.direct = tuple(
                self._register_streams(
                    DirectStreams(stages.child(sub, GPU_SETUP), core_access(communicator)),
                    layout.inter_node_ranks(),
                )
                for sub, communicator in zip(subs, self.inter_node, strict=True)
            )
        #: streams of messages between nodes, if there are few ranks
        self.messages: MessageStreams | None = None
        if MessageStreams.applicable(core_access(self.world), layout):
            self.messages = self._register_streams(
                MessageStreams(stages, core_access(self.world), layout), range(layout.nranks)
            )
        if gpu_direct_possible(core_access(self.world)):
            self.gpu_direct, self.gpu_direct_reason = open_gpu_direct(
                stages, core_access(self.world), layout, self.gpu, self.slot_bytes
            )

    def _open(
        self, ranks: Sequence[int], name: str, stages: SetupPhases, open_cpu: OpenCpu
    ) -> CpuCommunicator:
        session = stages.session.subgroup(ranks, f"{stages.session.name}/{name}")
        communicator = open_cpu(session, stages.child(session))
        access = core_access(communicator)
        # Only staging threads wait in it; ``MultiNodeWaitState`` reports those.
        access.detach_wait_state()
        access.set_global_ranks(ranks)
        self._communicators.append(communicator)
        return communicator

    def _register_streams(self, streams: AnyStreams, ranks: Sequence[int]) -> AnyStreams:
        """Take ownership of streams and monitor them; ``ranks``: those that they number from 0."""
        self._streams.append(streams)
        self._stream_monitor.add({ranks[peer]: stream for peer, stream in streams.sockets.items()})
        return streams

    def stop_monitoring(self) -> None:
        """End the monitoring of streams; from now on operations detect broken ones."""
        self._stream_monitor.close()

    def enqueue_staged(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Any,
        root: int,
        stream: int,
        captured: bool,
    ) -> None:
        """Run the whole operation through CPU communicators of all ranks."""
        called = self.describe_call(collective.label, count, source.dtype)
        shape = StagedShape.even(
            collective, source.dtype.itemsize, self.layout.rank, self.layout.nranks, root, count
        )
        communicators = (
            self.inter_node
            if self.layout.uniform and self.layout.local_size == 1
            else (self.world,)
        )
        self.enqueue(
            communicators,
            shape,
            source.dtype,
            op,
            (source.address, target.address),
            stream,
            captured,
            call_text=called,
        )

    def enqueue_rows(
        self,
        source: DeviceMemory,
        target: DeviceMemory,
        op: Any,
        block: int | None,
        density: float | None,
        stream: int,
        captured: bool,
    ) -> None:
        """Run a sparse all-reduce of all ranks, each segment by the CPU communicator.

        ``block``, ``density``: as for ``Communicator.all_reduce_sparse``.
        """
        count, dtype = source.count, source.dtype
        shape = StagedShape.even(
            Collective.ALL_REDUCE, dtype.itemsize, self.layout.rank, self.layout.nranks, 0, count
        )

        def reduce_rows(segment: StagedSegment, number: int, slot: int) -> None:
            x = self.staging.slots.view(slot, segment.source, sum(segment.source_counts), dtype)
            self.world.all_reduce_sparse(x, op, block=block, density=density)

        job = self._job(
            ("rows", shape, dtype, op, block, density),
            captured,
            lambda: (split_segments(shape, self.slot_bytes), PythonStaging(reduce_rows)),
        )
        job.call_text = self.describe_call("all_reduce_sparse", count, dtype)
        self._set_plan(job, "staged", lambda: "rows are summed on the CPU over several hosts")
        self.staging.enqueue(job, (source.address, target.address), stream)

    def describe_call(self, name: str, count: int, dtype: DType) -> str:
        """Return the application's call for errors of its parts; ``count``: elements per block."""
        return f"{name} of {count} x {dtype.label} on rank {self.layout.rank}"

    def enqueue(
        self,
        communicators: tuple[CpuCommunicator, ...],
        shape: StagedShape,
        dtype: DType,
        op: Any,
        buffers: tuple[int, int],
        stream: int,
        captured: bool,
        *,
        call_text: str = "",
        participates: bool = True,
        before: Callable[[int, int], None] | None = None,
        after: Callable[[int, int], None] | None = None,
    ) -> None:
        """Enqueue a collective of ``communicators``, one per staging thread.

        ``call_text``: the application's call of which it is a part. With ``before`` a kernel writes
        the slots, and nothing is copied down.
        """
        unknown = shape.uneven and shape.collective is Collective.ALL_TO_ALL

        def make() -> tuple[tuple[StagedSegment, ...], SegmentNetwork]:
            segments = split_segments(shape, self.slot_bytes)
            network = StagedCollective(
                communicators,
                shape,
                dtype,
                op,
                self.staging.slots,
                self.direct if communicators == self.inter_node else (),
            )
            if before is not None:
                segments = tuple(dataclasses.replace(segment, down=()) for segment in segments)
            return (
                with_agreed_count(self.world, segments, network) if unknown else (segments, network)
            )

        hierarchical = communicators == self.inter_node and self.layout.local_size > 1
        job = self._job(
            (shape, dtype, op, communicators == self.inter_node, call_text),
            captured,
            make,
            stride=len(communicators),
        )
        job.call_text = call_text if hierarchical or job.nsegments > 1 else ""
        self._set_plan(
            job,
            "hierarchical" if hierarchical else "staged",
            lambda: self.explain_algorithm(hierarchical, shape, dtype, op),
        )
        self.staging.enqueue(
            job, buffers, stream, participates=participates, before=before, after=after
        )

    def _job(
        self,
        key: tuple[Any, ...],
        captured: bool,
        make: Callable[[], tuple[tuple[StagedSegment, ...], SegmentNetwork]],
        *,
        slots: Slots | None = None,
        stride: int = 1,
    ) -> StagedJob:
        """Return the job of a kind of operation, created on first use.

        Captured operations have jobs of their own, because a graph may bring them at any time.
        ``slots``: other ones than the smallest in pinned memory.
        """
        job = self._jobs.pop((key, captured), None)
        if job is None:
            self._evict_jobs()
            segments, network = make()
            job = self.staging.job(segments, slots or self.staging.slots, network, captured, stride)
        self._jobs[key, captured] = job  # least recently used first
        return job

    def _evict_jobs(self) -> None:
        """Keep at most ``MAX_JOBS`` jobs, evicting the least recently used."""
        for kind in list(self._jobs)[: max(0, len(self._jobs) + 1 - MAX_JOBS)]:
            job = self._jobs[kind]
            if self.staging.evict(job):
                del self._jobs[kind]
                self._plans.pop(job.number, None)

    def explain_algorithm(
        self, hierarchical: bool, shape: StagedShape, dtype: DType, op: Any
    ) -> str:
        """Return the reason for the hierarchical or the staged algorithm."""
        if hierarchical:
            return f"{len(self.layout.nodes)} nodes of {self.layout.local_size} ranks"
        if self.layout.local_size == 1 and self.layout.uniform:
            return "one rank per node"
        if not self.layout.uniform:
            return "nodes have different numbers of ranks"
        if shape.collective.reduces and dtype not in GPU_REDUCIBLE:
            return f"{dtype.label} is not reduced on GPUs"
        if shape.collective.reduces and not isinstance(op, RedOp):
            return f"{type(op).__name__} runs on the CPU"
        if shape.collective.reduces and dtype.is_float:
            return "reduced in rank order (deterministic)"
        return "no hierarchical algorithm"

    def _set_plan(
        self, job: StagedJob, algo: str, reason: Callable[[], str], proto: str = "staging"
    ) -> None:
        """Set ``last_plan``, made at the first call of a job."""
        if job.number not in self._plans:
            self._plans[job.number] = MultiNodePlan(
                algo=algo,
                reason=reason(),
                segments=job.nsegments,
                segment_bytes=job.segment_bytes,
                proto=proto,
            )
        self.last_plan = self._plans[job.number]

    def barrier(self, stream: int, captured: bool) -> None:
        """Enqueue a barrier of all ranks."""
        job = self._job(
            ("barrier",),
            captured,
            lambda: ((StagedSegment(),), PythonStaging(lambda *_: self.world.barrier())),
        )
        self.staging.enqueue(job, (), stream)

    def exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        stream: int,
        captured: bool,
        kind: CollectiveKind | None = None,
        concurrent: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Enqueue sends and receives with ranks of other nodes.

        ``kind``: collective that they form, if any, which is counted even without messages; the CPU
        communicator does not support it. ``concurrent``: kernels of the node run at the same time.
        ``ranks``: those of the collective, default all; others need ``gpu_direct``.
        """
        group = range(self.layout.nranks) if ranks is None else ranks
        rounds, need = (
            split_transfers(transfers, self.slot_bytes, self.layout.max_remote_ranks)
            if transfers
            else ([EMPTY_ROUND], 0)
        )
        key = (
            "exchange",
            kind,
            tuple(group),
            tuple((t.receives, t.peer, t.memory.count, t.memory.dtype) for t in transfers),
        )
        if (direct := self.gpu_direct) is not None:
            slots = direct.slots_for(need)

            def make() -> tuple[tuple[StagedSegment, ...], SegmentNetwork]:
                segments = tuple(item.segment for item in rounds)
                return segments, direct.network(rounds, slots, kind, group)

            job = self._job(key, captured, make, slots=slots)
        else:
            pinned = self.staging.slots_for(need)

            def make() -> tuple[tuple[StagedSegment, ...], SegmentNetwork]:
                segments = tuple(item.segment for item in rounds)
                if self.messages:
                    return segments, MessageNetwork(self.messages, rounds, pinned, kind)
                assert kind is None
                return segments, run_on_communicator(self.world, rounds, pinned)

            job = self._job(key, captured, make, slots=pinned)
        job.concurrent |= concurrent
        if direct is not None:
            self._set_plan(job, "direct", lambda: direct.description, "verbs")
        else:
            self._set_plan(job, "staged", lambda: "sends and receives")
        self.staging.enqueue(job, [t.memory.address for t in transfers], stream)

    def message_counters(self) -> bytes:
        """Return the encoded counters of messages in collectives; empty if there are none."""
        return self.messages.message_counters().to_bytes() if self.messages is not None else b""

    def find_unmatched(self) -> MiracclError | None:
        """Return the error of an unmatched message after all work has ended, or None."""
        first = self.staging.proxies[0]  # only the first thread runs messages
        return (
            self.messages.find_unmatched(lambda: first.between_jobs)
            if self.messages is not None
            else None
        )

    def slot_memory(self, slot: int, first: int, count: int, dtype: DType) -> DeviceMemory:
        """Return elements of a slot at their GPU address."""
        slots = self.staging.slots
        return DeviceMemory(slots.on_gpu + slot * slots.nbytes, first + count, dtype).slice(
            first, count
        )

    def moves_directly(self, block_bytes: int) -> bool:
        """Return True if blocks of even collectives go from and to GPU memory; all ranks agree."""
        return self.gpu_direct is not None and block_bytes >= DIRECT_FROM_BYTES

    @property
    def counts_collectives(self) -> bool:
        """True if messages can carry the number of the collective that they form."""
        return self.gpu_direct is not None or self.messages is not None

    def bytes_pinned(self) -> int:
        return self.staging.bytes_pinned()

    def bytes_on_gpu(self) -> int:
        return self.gpu_direct.nbytes if self.gpu_direct is not None else 0

    def close_staging(self) -> None:
        """Stop the staging threads and free their memory, after every stream has passed their work.

        May be called twice.
        """
        if self.staging.close() and self.gpu_direct is not None:
            self.gpu_direct.close()

    def abort(self, reason: str) -> None:
        """End the waits of the staging threads."""
        for communicator in self._communicators:
            communicator.abort(reason)

    def leave(self) -> None:
        """Leave the CPU communicators after all work, which ends peers' waits for this rank.

        Everything that the peers need has been sent.
        """
        for communicator in self._communicators:
            communicator.finalize()
        for streams in self._streams:
            streams.shutdown_writes()

    def finalize(self) -> None:
        """Free all resources after ``staging`` was closed, with or without ``leave`` before."""
        self._stream_monitor.close()
        for streams in self._streams:
            streams.close()
        if self.gpu_direct is not None:
            self.gpu_direct.disconnect()
        for communicator in self._communicators:
            communicator.finalize()
