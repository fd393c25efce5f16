"""Communicator for GPU memory: one process per GPU, all GPUs on one host.

``DeviceCommunicator`` owns the symmetric memory, the kernels and the plans. A call looks its plan
up by (collective, dtype, count, operator), writes two pointers and launches one kernel in the
caller's stream. It neither synchronises the host nor allocates, so a CUDA graph may capture and
replay it. The first call of a kind plans and possibly compiles.

The calls of one communicator are ordered: all ranks make them in the same order, and a call in
another stream waits for the previous call. Waiting kernels poll an abort word and the deadline;
``check`` turns their reports into errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from miraccl.errors import CollectiveTimeout, CommunicatorClosed, InvalidUsage, MiracclError
from miraccl.executor.cuda import layout
from miraccl.ops.device_arrays import DeviceMemory, DeviceReader, array_kinds
from miraccl.ops.spec import OPS
from miraccl.runtime import forks
from miraccl.runtime.control import GPU_SETUP, ControlPlane, NullControlPlane
from miraccl.runtime.forks import closed_reason
from miraccl.runtime.gpu.closing import CLOSE_WAIT_S, exchange_findings
from miraccl.runtime.gpu.collective_calls import CollectiveCalls
from miraccl.runtime.gpu.grouped import FastPathGroupable
from miraccl.runtime.gpu.launch_paths import LaunchPaths
from miraccl.runtime.gpu.messages import MessageOperations, message_frame
from miraccl.runtime.gpu.resources import DeviceResources
from miraccl.runtime.gpu.wait_state import KernelWaitState, kernel_stream_name, monitor_kernels
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.executor.cuda.launch import KernelLaunch
    from miraccl.executor.cuda.one_sided import OneSidedLaunch
    from miraccl.executor.cuda.plan import DevicePlan
    from miraccl.fastpath.fast_calls import FastCalls
    from miraccl.runtime.gpu.launch_order import LaunchOrders
    from miraccl.runtime.gpu.windows import DeviceWindows
    from miraccl.transport.cuda_p2p import Explanation, WindowMemory

Result = TypeVar("Result")


class DeviceCommunicator(CollectiveCalls, MessageOperations, FastPathGroupable):
    """Communicator for GPU memory on one host.

    Created collectively by all ranks of ``session``, each with the ``ordinal`` of its GPU.
    """

    def __init__(
        self,
        session: Session,
        ordinal: int,
        options: Options | None = None,
        *,
        plane: ControlPlane | None = None,
        stages: SetupPhases | None = None,
        global_ranks: Sequence[int] = (),
        launch_orders: LaunchOrders | None = None,
    ) -> None:
        """``options``: default those of the environment. ``stages``: setup phases of a session that
        belongs to this communicator and is closed with it. ``global_ranks``: rank numbers for
        errors, by rank of the session. The other arguments as for ``make_device_communicator``.
        """
        self._owns_session, stages = (
            stages is not None,
            stages or SetupPhases(session, activity=GPU_SETUP),
        )
        options = Options.create() if options is None else options
        self.session, self.rank, self.nranks = session, session.rank, session.nranks
        if self.nranks > layout.MAX_RANKS or len(set(session.hosts)) > 1:
            raise InvalidUsage(
                f"GPU memory is communicated among 1 to {layout.MAX_RANKS} ranks of one host",
                rank=self.rank,
            )
        self._plane = plane or NullControlPlane(session)
        self._launches: dict[tuple[Any, ...], KernelLaunch | OneSidedLaunch] = {}
        self._windows: DeviceWindows | None = None
        self._same_window_offset = True
        owned = self._resources = DeviceResources(
            session,
            ordinal,
            options,
            stages,
            global_ranks=global_ranks,
            launches=self._all_launches,
        )
        self.gpu, self.symmetric, self.probe = owned.gpu, owned.symmetric, owned.probe
        self.planner = owned.planner
        self.faults, self.ring, self.ctas = owned.faults, owned.ring, owned.ctas
        self._host, self._comm_args = owned.host, owned.comm_args
        self.reader = DeviceReader(self.rank, self.nranks, self.gpu)
        paths = self._paths = LaunchPaths(
            owned, launch_orders, own=id(self), hand_over=self._hand_over
        )
        self._launch_order = paths.launch_order
        self._kernels, self._engines = paths.kernels, paths.engines
        self._messages, self._fast_path = paths.messages, paths.fast_path
        self.streams = paths.streams
        self.fast = self._fast_path.fast_calls(OPS.values())
        #: plan of the last operation on the slow path, or a function that reads it from the GPU
        self._plan: DevicePlan | Callable[[], DevicePlan] | None = None
        if self.ctas.copy_engines_only and self.nranks > 1:
            self.faults.monitor_copies(self._engines, self.probe.pending_copies)
        #: name of this rank's GPU work in the wait-for graph
        self.stream_name = kernel_stream_name(session)
        self.wait_state: KernelWaitState | None = None
        # A part of a multi-node communicator is monitored as part of that one.
        if not global_ranks and self.nranks > 1:
            self.wait_state = monitor_kernels(
                session, self.probe, self.faults.fail_deadlocked, self._is_drained
            )
        self._closed = self._foreign = False
        forks.register(self)
        owned.log_summary(session.name)

    def fast_calls_before(self, fallback: FastCalls, cpu_plan: int) -> FastCalls:
        self._fast_path.set_cpu_plan_word(cpu_plan)
        return self._fast_path.fast_calls(OPS.values(), fallback, collects=True)

    # ---- running

    def empty(self, shape: Any, dtype: Any = "float32") -> Any:
        """Allocate window memory on every rank; all ranks make the same calls in the same order."""
        self.check("empty")
        self.gpu.make_current()
        if self._windows is None:
            self._windows = self._resources.open_windows()
            self._drop_launches()  # operations into windows may run another algorithm
        windows = self._windows
        return self._run_setup(
            "empty on GPUs", lambda stages: windows.empty(shape, dtype, self._plane, stages)
        )

    def _open_workspace(self, nbytes: int) -> WindowMemory:
        """Allocate memory for sparse sums on every rank, collectively."""

        def open_together(stages: SetupPhases) -> WindowMemory:
            mine = str(nbytes).encode()
            every = self._plane.run_control_op(stages.activity, "gpu rows", mine, stages.deadline)
            for rank, theirs in enumerate(every):
                if theirs != mine:
                    raise InvalidUsage(
                        f"cannot make the workspaces of a sparse sum: rank {rank} needs"
                        f" {theirs.decode()} bytes, this rank {nbytes}",
                        rank=self.rank,
                        peer=rank,
                        hint="all ranks pass arrays of the same count and dtype",
                    )
            return self.symmetric.window(nbytes, stages)

        return self._run_setup("all_reduce_sparse on GPUs", open_together)

    def _run_setup(self, activity: str, run: Callable[[SetupPhases], Result]) -> Result:
        """Run a collective set-up of memory; abort if ranks do not arrive."""
        stages = SetupPhases(self.session, activity=activity)
        try:
            with self._plane.cancel_on_fault(stages), stages.cancel_on_loss():
                return run(stages)
        except CollectiveTimeout as error:
            # A rank that arrives later would wait for the ranks that have given up.
            self.abort(str(error))
            raise

    @property
    def closed(self) -> bool:
        """True after ``close``, and in a forked child."""
        return self._closed

    @property
    def last_plan(self) -> DevicePlan | None:
        """Plan of the last operation."""
        launch, plan = self._fast_path.last, self._plan
        if launch is not None:
            return launch.last_plan
        if not callable(plan):
            return plan
        with self.device_guard():
            return plan()

    @last_plan.setter
    def last_plan(self, plan: DevicePlan | None) -> None:
        self._plan = plan
        self._fast_path.clear_last()

    def set_last_plan(self, read: Callable[[], DevicePlan]) -> None:
        """Set a function that returns the plan of the last operation, which the GPU chooses."""
        self._plan = read
        self._fast_path.clear_last()

    def connections(self) -> Explanation:
        """Return the data path of each pair of ranks, with the reason."""
        return self.symmetric.explain()

    def stream_handle(self, stream: Any) -> int:
        return self.streams.handle(stream)

    def last_stream(self, capture: int) -> int:
        """Return the stream of the last operation (``launch_order.Launcher``)."""
        return self.streams.last_stream(capture)

    def enter_operation(self, name: str, stream: Any, fills: bool = True) -> int:
        """Begin an operation: raise a known fault, order the stream, return its handle.

        ``fills``: the launch may occupy the whole GPU (``launch_order``).
        """
        if self._closed or self._host[layout.HOST_ABORT]:
            self.check(name)
        self.gpu.ensure_current()
        self._fast_path.detect_array_types()
        self._fast_path.add_foreign_types(array_kinds)
        number = self.streams.follow(stream)
        if fills and self._launch_order.last is not self:
            self._launch_order.enter(self.gpu, self, number)
        return number

    @property
    def stream(self) -> int:
        """Driver handle of the last operation's stream; -1 before the first operation."""
        return self._fast_path.stream

    @stream.setter
    def stream(self, number: int) -> None:
        self._fast_path.stream = number

    def retain(self, views: Sequence[DeviceMemory], number: int) -> None:
        """Keep the objects behind these views alive until the GPU has finished with them."""
        objects = [view.keep for view in views if view.keep is not None]
        if objects:
            self._paths.keep_alive.retain(objects, number)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds: on its GPU, of these in windows, and pinned."""
        found = self._resources.memory()
        if self._row_sums is not None:
            found["device"] += self._row_sums.nbytes
        return found

    def _all_launches(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return the prepared launches by (collective, dtype, count, operator, root)."""
        rows = self._row_sums.launches() if self._row_sums is not None else []
        return [*self._launches.items(), *self._engines.launches(), *rows]

    # ---- failure and end

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or has a fault. Does not wait for kernels."""
        if self._closed:
            raise CommunicatorClosed(closed_reason(self._foreign), rank=self.rank, op=name or None)
        self.faults.check(name)

    def abort(self, reason: str = "abort() was called") -> None:
        """End the waits on all ranks' GPUs; later calls raise. Any thread may call it."""
        if not self._closed:
            self.faults.abort(reason)

    def set_fault(self, fault: MiracclError) -> None:
        """End the waits on this rank's GPU; later calls raise ``fault``. Any thread may call it.

        The caller notifies the other ranks.
        """
        if not self._closed:
            self.faults.set_fault(fault)

    def _is_drained(self) -> bool:
        """Return True if nothing is enqueued and no graph can enqueue anything."""
        with contextlib.suppress(MiracclError), self.gpu.device_guard():
            return self._fast_path.stream == -1 or (
                self._fast_path.only_default_stream and self.gpu.is_done(0)
            )
        return False

    def synchronize(self) -> None:
        """Wait for this rank's GPU, then ``check``."""
        if self._closed:
            self.check()
        self.gpu.make_current()
        self.gpu.synchronize()
        self.compare_ops()
        self.check()

    def compare_ops(self) -> None:
        """Compare the op logs of all ranks; ``check`` raises a mismatch that left no rank waiting.

        The GPU has finished its work.
        """
        if self.nranks > 1 and not self.faults.ended:
            self.probe.compare_ops(self.faults)

    def has_stopped(self) -> bool:
        """Return True if a wait on this rank's GPU has ended unfulfilled."""
        return self.nranks > 1 and not self.faults.ended and self.probe.stopped()

    def close(self, already_reported: bool = False) -> MiracclError | None:
        """Free all resources after all ranks have arrived and their kernels have ended.

        May be called twice. Returns a fault that no call has raised; peers' faults are left out if
        ``already_reported`` by other means. If a rank does not arrive within ``CLOSE_WAIT_S``, or
        after a fault, this rank's memory stays allocated until the process exits: a peer's kernel
        may still write to it.
        """
        if self._closed:
            return None
        self._closed = True
        self._fast_path.close()
        self._launch_order.leave(self)
        with contextlib.suppress(MiracclError):
            self.gpu.make_current()
            self.gpu.synchronize()
            self.streams.release_streams()
            self.compare_ops()
        all_closed = not self.faults.broken
        if all_closed:
            self.faults.announce_exit()
        try:
            if all_closed:
                self.session.barrier("gpu close", timeout=CLOSE_WAIT_S)
        except MiracclError:
            all_closed = False
        if all_closed and self.nranks > 1:
            self.probe.compare_final_ops(self.faults, message_frame(self.symmetric))
        if self.wait_state is not None:
            self.wait_state.close()
        unreported = self.faults.unreported(already_reported)  # includes peers' findings until now
        if all_closed and self.nranks > 1:
            unreported = exchange_findings(self.session, self.faults, unreported, already_reported)
        self.faults.close()
        self._launches.clear()
        if all_closed:
            if self._row_sums is not None:
                self._row_sums.close()
            self._resources.close_windows()
            self._paths.close()
            self._resources.close()
        if self._owns_session:
            self.session.close()
        return unreported

    def forked(self) -> None:
        """Close in a forked child, where CUDA does not work and pinned memory may be missing."""
        self._closed = self._foreign = True
        self._fast_path.close()
