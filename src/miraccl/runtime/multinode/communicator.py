"""Collectives on GPU memory over several nodes: kernels inside a node, the network between nodes.

``make_device_communicator`` returns the communicator of one host (``runtime.gpu``) or a
``MultiNodeCommunicator`` with the same methods. All work is enqueued in the caller's stream and can
be captured in CUDA graphs; staging threads do the network's part (``staging``).

There are two algorithms. ``hierarchical`` reduces and distributes inside each node on its GPUs and
sends every element once per node; it needs equally many ranks on all nodes. ``staged`` hands the
operation to the CPU communicator of all ranks, which has every collective, operator and type.
16-bit floats are rounded once inside a node and once between nodes. Averages of integers are
staged, because they must be truncated only once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
    SystemFailure,
)
from miraccl.fastpath.fast_calls import FastCalls
from miraccl.ops.device_arrays import DeviceMemory, DeviceReader
from miraccl.runtime.control import GPU_SETUP, ControlPlane, NullControlPlane
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.gpu.grouped import Groupable
from miraccl.runtime.multinode import unmatched
from miraccl.runtime.multinode.collective_calls import MultiNodeCollectiveCalls
from miraccl.runtime.multinode.faults import MultiNodeFaults
from miraccl.runtime.multinode.graph_cache import GraphCache
from miraccl.runtime.multinode.hierarchical import Hierarchical
from miraccl.runtime.multinode.node_layout import NodeLayout, node_name
from miraccl.runtime.multinode.runtime import MultiNodePlan, MultiNodeRuntime, OpenCpu
from miraccl.runtime.multinode.unmatched import MessageCounters
from miraccl.runtime.multinode.wait_state import monitor_node, stream_name_of
from miraccl.runtime.setup_phases import SetupPhases

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.runtime.gpu.launch_order import LaunchOrders
    from miraccl.runtime.gpu.probe import DeviceProbe
    from miraccl.runtime.options import Options
    from miraccl.transport.cuda_p2p import Explanation

CLOSE_WAIT_S = 10.0
OPERATION_FAULTS = (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    PeerDied,
    SystemFailure,
)
"""Errors of an operation that may be half enqueued, in contrast to rejected arguments."""


def make_device_communicator(
    session: Session,
    ordinal: int,
    options: Options | None = None,
    *,
    open_cpu: OpenCpu,
    plane: ControlPlane | None = None,
    launch_orders: LaunchOrders | None = None,
) -> DeviceCommunicator | MultiNodeCommunicator:
    """Create the GPU side of a communicator, collectively with all ranks of ``session``.

    ``ordinal``: this rank's GPU. ``options``: default those of the environment. ``open_cpu``:
    creates a CPU communicator of a session, needed with several nodes only. ``plane``: control
    plane for ranks that may still be in another operation, default ``session``. ``launch_orders``:
    order of its kernels with those of other communicators, default that of the calling thread.

    All setup phases share one deadline, the session's, and run in a session of their own: a rank
    whose setup fails leaves it, which notifies the others at once.
    """
    plane = plane or NullControlPlane(session)
    own = session.subgroup(range(session.nranks), f"{session.name}/gpu")
    stages = SetupPhases(own, activity=GPU_SETUP)
    try:
        with plane.cancel_on_fault(stages), stages.cancel_on_loss():
            names = [
                blob.decode()
                for blob in plane.run_control_op(
                    GPU_SETUP, "gpu hosts", node_name(session).encode(), stages.deadline
                )
            ]
            if len(set(names)) == 1:
                return DeviceCommunicator(
                    own, ordinal, options, plane=plane, stages=stages, launch_orders=launch_orders
                )
            return MultiNodeCommunicator(
                own,
                ordinal,
                names,
                options,
                open_cpu=open_cpu,
                stages=stages,
                launch_orders=launch_orders,
            )
    except BaseException as error:
        stages.give_up(error)
        raise


class MultiNodeCommunicator(MultiNodeCollectiveCalls, Groupable):
    """Communicator for GPU memory over several nodes, one GPU per rank.

    ``hosts[r]``: node name of rank r.
    """

    def __init__(
        self,
        session: Session,
        ordinal: int,
        hosts: Sequence[str],
        options: Options | None = None,
        *,
        open_cpu: OpenCpu,
        stages: SetupPhases | None = None,
        launch_orders: LaunchOrders | None = None,
    ) -> None:
        """``stages``: phases of a session that belongs to and is closed with this communicator."""
        self._owns_session, stages = (
            stages is not None,
            stages or SetupPhases(session, activity=GPU_SETUP),
        )
        self.session, self.rank, self.nranks = session, session.rank, session.nranks
        self.fast = FastCalls()  # there is no fast path between nodes
        self.layout = NodeLayout.of(session.rank, hosts)
        self.faults = MultiNodeFaults(
            session,
            release_waits=self._release_waits,
            abort_network=lambda reason: self.runtime.abort(reason),
        )
        self._side_stream: int | None = None
        self._used_other_streams = (
            False  # operations ran outside the default stream, which cannot be captured
        )
        self._interrupted = False  # a fault interrupted the staging threads at work
        self._end_lock = threading.RLock()  # reentrant: a signal handler may abort
        self._local_session = session.subgroup(
            self.layout.local_ranks, f"{session.name}/gpu host {self.layout.node}"
        )
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._local_session.close)
            part, local_ranks = (
                stages.child(self._local_session, GPU_SETUP),
                self.layout.local_ranks,
            )
            self.local = DeviceCommunicator(
                self._local_session,
                ordinal,
                options,
                stages=part,
                global_ranks=local_ranks,
                launch_orders=launch_orders,
            )
            self.local.faults.forward_findings(self.faults.fail)
            on_failure.callback(self.local.close)
            incomplete = CommunicatorAborted("cannot set up the GPU side", rank=self.rank)
            on_failure.callback(
                self.local.set_fault, incomplete
            )  # with a fault, ``close`` does not wait for peers
            self.gpu = self.local.gpu
            self.reader = DeviceReader(self.rank, self.nranks, self.gpu)
            self.runtime = MultiNodeRuntime(
                stages, self.layout, self.gpu, open_cpu, self.faults.fail_staging
            )
            on_failure.callback(self.runtime.finalize)
            on_failure.callback(self.runtime.close_staging)
            on_failure.callback(self.runtime.abort, incomplete.message)
            on_failure.push(
                lambda kind, error, trace: stages.give_up(error)
            )  # pushed last, so run first: peers learn of the failure before the slow cleanup
            self.hierarchical = Hierarchical(self.local, self.runtime)
            self.graph_cache = GraphCache(self.gpu, self.runtime)
            session.on_event(self.faults.on_event)  # ranks that are ready may send notices
            stages.gather("gpu staging ready")
            self.runtime.stop_monitoring()
            #: name of this rank's GPU work in the wait-for graph
            self.stream_name = stream_name_of(self.runtime)
            self.wait_state = monitor_node(
                self.runtime,
                self.layout,
                self._probed(),
                self.faults.fail_deadlocked,
                self._is_drained,
            )
            on_failure.pop_all()

    def _probed(self) -> tuple[DeviceProbe, Session] | None:
        """Return how to probe the kernels inside the node, None if there are none."""
        if self.layout.local_size > 1 and self.local.probe is not None:
            return self.local.probe, self._local_session
        return None

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node."""
        return self.layout.nodes

    @property
    def last_plan(self) -> MultiNodePlan | None:
        """Plan of the last operation between nodes."""
        return self.runtime.last_plan

    @property
    def closed(self) -> bool:
        return self.faults.closed or self.local.closed  # a forked child closes only the node's part

    @property
    def stream(self) -> int:
        """Driver handle of the last operation's stream; -1 before the first operation."""
        return self.local.stream

    def stream_handle(self, stream: Any) -> int:
        return self.local.stream_handle(stream)

    # ---- operations

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Allocate window memory of this node's ranks.

        Peers of the node address it in the part inside the node; between nodes it is ordinary GPU
        memory.
        """
        return self.local.empty(shape, dtype)

    def barrier(self, *, stream: Any = None) -> None:
        """Delay later work in the stream until every rank's stream has arrived here."""
        with self._operation("barrier", stream, []) as (handle, captured):
            self.runtime.barrier(handle, captured)

    @contextlib.contextmanager
    def _operation(
        self, name: str, stream: Any, views: Sequence[DeviceMemory]
    ) -> Iterator[tuple[int, bool]]:
        """Enclose an operation: check faults, yield (stream handle, captured), retain the views."""
        self.check(name)
        handle = self.local.enter_operation(name, stream)
        self._used_other_streams |= handle != 0
        self.runtime.staging.enqueuing = True
        try:
            yield handle, self.gpu.capture_id(handle) != 0
        except OPERATION_FAULTS as error:
            # Part of the operation may be enqueued, so later ones would not match those of peers.
            self.faults.fail(error)
            raise
        finally:
            self.runtime.staging.enqueuing = False
        self.local.retain(views, handle)

    # ---- explanation

    def connections(self) -> Explanation:
        """Return (pair, data path, reason) of the node's pairs and this rank's remote pairs."""
        local_ranks = self.layout.local_ranks
        local = [
            ((local_ranks[a], local_ranks[b]), kind, why)
            for (a, b), kind, why in self.local.connections()
        ]
        direct, reason = self.runtime.gpu_direct, self.runtime.gpu_direct_reason
        path = "another node: pinned memory and the network"
        if direct is not None:
            path = f"another node: {reason}; reductions: pinned memory and the network"
        elif reason:
            path = f"{path}; not from GPU memory, as {reason}"
        remote = [
            ((min(self.rank, p), max(self.rank, p)), "verbs" if direct else "staging", path)
            for p in self.layout.remote_ranks
        ]
        return sorted([*local, *remote])

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds: on its GPU, and pinned on the host."""
        local = self.local.memory()
        return local | {
            "pinned": local["pinned"] + self.runtime.bytes_pinned(),
            "device": local["device"] + self.runtime.bytes_on_gpu(),
        }

    # ---- failure and end

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or has a fault. Does not wait."""
        self.faults.check(name)
        self.local.check(name)

    def _release_waits(self, fault: MiracclError) -> None:
        """End the waits of streams because of ``fault``."""
        with self._end_lock:
            # After ``closed`` the flags of the staging threads are freed, while ``close`` still
            # compares the op logs of the node.
            if not self.faults.closed:
                self._interrupted |= not self.runtime.staging.between_jobs
                self.runtime.staging.drain()
        self.local.set_fault(fault)

    def abort(self, reason: str = "abort() was called") -> None:
        """End the waits on all ranks; later calls raise. Any thread may call it."""
        self.faults.abort(reason)

    def _is_drained(self) -> bool:
        """Return True if the kernels have done all enqueued work and no graph can enqueue more."""
        with contextlib.suppress(MiracclError), self.gpu.device_guard():
            return not self._used_other_streams and self.gpu.is_done(0)
        return False

    def synchronize(self) -> None:
        """Wait for this rank's GPU, then ``check``."""
        if self.closed:
            self.check()
        self.gpu.make_current()
        self.gpu.synchronize()
        if not self.closed and self.faults.fault is None:
            self.local.compare_ops()
            if (found := self.runtime.find_unmatched()) is not None:
                self.faults.fail(found)
        self.check()

    def _announce_exit(self) -> None:
        """Notify peers that this rank's GPU and staging threads have finished for good.

        Waits for this rank then end.
        """
        if not self.local.faults.broken:
            self.local.faults.announce_exit()
        self.runtime.leave()

    def close(self, already_reported: bool = False) -> MiracclError | None:
        """Free all resources after this rank's GPU has finished its work.

        May be called twice. Returns a fault that no call has raised; ``already_reported`` as for
        ``DeviceCommunicator.close``.
        """
        if self.closed:
            return None
        counters, mismatch = b"", None
        with contextlib.suppress(MiracclError):
            self.gpu.make_current()
            self.gpu.synchronize()
            counters = self.runtime.message_counters()
            if self.faults.fault is None:
                self._announce_exit()
        if self.faults.fault is None:
            with contextlib.suppress(
                MiracclError
            ):  # peers' faults until the end of this are included
                all_counters = self.session.all_gather(counters, "gpu hosts close", CLOSE_WAIT_S)
                mismatch = unmatched.find_unmatched(
                    [MessageCounters.from_bytes(data) if data else None for data in all_counters],
                    self.rank,
                )
        if self.wait_state is not None:
            self.wait_state.close()
        with self._end_lock:
            self.faults.closed = True
        with contextlib.suppress(MiracclError):
            self.runtime.close_staging()
            self.graph_cache.close()
            if self._side_stream is not None:
                self.gpu.destroy_stream(self._side_stream)
        own = self.faults.unreported(
            lambda: self._interrupted or self.local.has_stopped(), already_reported
        )  # before ``local.close`` frees the memory that this reads
        unreported = self.local.close(already_reported)
        self.runtime.finalize()
        if self._owns_session:
            self.session.close()
        return (
            None
            if self.faults.reported or self.local.faults.reported
            else own or unreported or mismatch
        )
