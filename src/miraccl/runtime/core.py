"""One rank's half of a communicator: it owns the parts and decides which operation runs when.

``run`` runs a collective now, ``submit`` in the background; ``exchange`` runs a group of sends and
receives. While background work is pending, every operation queues behind it. The context word
``CTX_BUSY`` disables the fast path; its bits are the ``REASON_*`` constants.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from miraccl import clock
from miraccl.errors import CommunicatorClosed, InvalidUsage, MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.ops.host_arrays import HostReader
from miraccl.runtime import forks, summary
from miraccl.runtime.core_fast_calls import open_fast_calls
from miraccl.runtime.core_planner import agreed_config, open_planner
from miraccl.runtime.core_transfers import CoreTransfers
from miraccl.runtime.engine_faults import CpuFaults
from miraccl.runtime.explain_request import parse_explain_request
from miraccl.runtime.fabric import ProcessFabric
from miraccl.runtime.forks import closed_reason
from miraccl.runtime.setup_phases import PendingSetup, SetupPhases
from miraccl.runtime.wait_state import CoreWaitState
from miraccl.runtime.work import BackgroundWorker, Work

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.deadline import Deadline
    from miraccl.executor.cpu.lower import Run
    from miraccl.fastpath.fast_calls import FastCalls
    from miraccl.ops.prepare import PreparedOp
    from miraccl.ops.request import PlanRequest
    from miraccl.planning.cost_model import CpuConstants
    from miraccl.planning.planner import Candidate
    from miraccl.runtime.fabric_contract import FabricFactory
    from miraccl.runtime.options import Options
    from miraccl.types import Collective, DType
    from miraccl.wire.proxy_records import Loss

REASON_PENDING, REASON_CLOSED, REASON_OPEN = layout.BUSY_PENDING, 2, 4
MAX_RUNS = 2048
CLOSE_WAIT_S = 10.0
POLL_S = 0.001


class CommunicatorCore(CoreTransfers):
    """Implementation of a ``Communicator`` on one rank.

    Construction is collective over the ranks of ``session``; ``finalize`` is local.

    Args:
        session: Control plane of the ranks; owned by this object and closed by ``finalize``.
        options: Settings of the communicator; the ranks must agree on them (``AgreedConfig``).
        constants: Cost model of the machine; None loads or measures it.
        setup: Phases that this construction is a part of, for a common deadline; None starts new
            ones.
        open_fabric: Makes the connections between the ranks; None: those of processes.

    Raises:
        PlanMismatch: The ranks have different settings.
        BootstrapError, PeerDied, CollectiveTimeout: A rank is missing or ended during setup.
    """

    def __init__(
        self,
        session: Session,
        options: Options,
        *,
        constants: CpuConstants | None = None,
        setup: SetupPhases | None = None,
        open_fabric: FabricFactory | None = None,
    ) -> None:
        self.session, self.options = session, options
        self.open_fabric: FabricFactory = open_fabric or ProcessFabric
        self.rank, self.nranks = session.rank, session.nranks
        self.reader = HostReader(self.rank, self.nranks)
        self.closed = False
        self.in_forked_child = False
        # Reentrant: a signal handler may finalize inside ``finalize``.
        self._lifecycle_lock = threading.RLock()
        self._finalizing = False
        self._losses: dict[int, Loss] = {}
        self.pending_setup = PendingSetup()
        try:
            self.fabric = self.open_fabric(
                setup or SetupPhases(session),
                agreed_config(options, constants),
                timeout=options.timeout,
                on_lost=self._lost,
            )
        except BaseException as error:
            session.close(f"could not connect: {error}"[:500])
            raise
        self.context = self.fabric.context
        self.faults = CpuFaults(session, self.fabric, self.has_no_background_work)
        for rank, loss in list(self._losses.items()):
            self._lost(rank, loss)
        self.planner = open_planner(self.fabric, options)
        self.constants = self.planner.constants
        self.context.set(layout.CTX_P2P_DIRECT, self.planner.single_copy)
        self.context.set(layout.CTX_SWAP, int(self.constants.swap_slots))
        self.context.set(layout.CTX_LOOP_COPY, int(self.constants.loop_copy))
        self.wait_state = CoreWaitState(self)
        self._worker = BackgroundWorker(
            f"miraccl-work-{session.name}", self.update_busy, self.wait_state.wait_inside
        )
        self._runs: dict[PlanRequest, Run] = {}
        self._open_transfers()
        self.wait_state.register()
        session.on_event(self.pending_setup.on_event)
        forks.register(self)
        summary.log_rank(session.name, self.describe)

    def describe(self) -> str:
        """Return one line on the connections of this rank."""
        return summary.describe_rank(
            self.rank, self.fabric.choices, self.session.addresses[self.rank]
        )

    def describe_transports(self) -> str:
        """Return one line on the transports of this rank."""
        return summary.describe_transports(self.fabric.choices)

    def connection_summary(self) -> str:
        """Describe the connections of this rank, with the reason for each and what is wrong."""
        reasons = summary.explain_transports(self.fabric.choices)
        paths = self.fabric.paths()
        states = [*summary.explain_dead_paths(paths), *summary.explain_losses(paths)]
        return "\n".join([self.describe(), *reasons, *states])

    def _lost(self, rank: int, loss: Loss) -> None:
        """Handle the loss of the connection to ``rank``; called by transports on any thread."""
        self._losses[rank] = loss
        faults: CpuFaults | None = getattr(self, "faults", None)
        if faults is not None:
            faults.connection_lost(rank, loss)

    # ---- admission of operations

    def update_busy(self) -> None:
        """Set the context's busy word from the current state; called after every change of it."""
        # Lock-free because ``finalize`` may run in a signal handler at any point: the writer reads
        # the state again until it matches the word.
        while (word := self._busy_reasons()) != self.context.get(layout.CTX_BUSY):
            self.context.set(layout.CTX_BUSY, word)

    def _busy_reasons(self) -> int:
        """Return the ``REASON_*`` bits that hold now."""
        pending = REASON_PENDING if self._worker.pending else 0
        return (
            pending
            | (REASON_CLOSED if self.closed else 0)
            | (REASON_OPEN if self._exchange.has_in_flight else 0)
        )

    def check(self, code: int, name: str) -> None:
        """Raise if the communicator cannot run ``name``.

        Args:
            code: Result of the fast path, 0 if it was not called.
            name: Operation, for the error.
        """
        if code >= layout.ERR_ABORTED:
            self._raise_fault(code, name)
        if not self.closed:
            self.faults.check(name)
        self.check_open(name)

    def check_open(self, name: str) -> None:
        if self.closed:
            raise CommunicatorClosed(closed_reason(self.in_forked_child), rank=self.rank, op=name)

    def check_result(self, code: int, name: str) -> None:
        if code == layout.BUSY:
            raise InvalidUsage(
                f"cannot run {name}: another thread is inside this communicator",
                hint="give each thread its own communicator with split()",
            )
        if code != layout.OK:
            self._raise_fault(code, name)

    def _raise_fault(self, code: int, name: str) -> NoReturn:
        if code == layout.ERR_INTERRUPTED:
            # The interrupted operation cannot be resumed, so the other ranks are notified first.
            self.abort(f"a signal handler raised an exception in {name}")
            self.context.reraise_deferred()
        raise self.faults.explain(code, name)

    # ---- collectives

    def plan(self, call: PreparedOp) -> Run:
        """Return the run for an operation from the cache and register it for the fast path."""
        run = self._runs.get(call.request)
        if run is None:
            if len(self._runs) >= MAX_RUNS:
                self._runs.clear()
                self.context.clear_runs()
            run = self._runs[call.request] = self.planner.make_run(call.request)
        if call.cacheable:
            request = call.request
            sizes = (
                (request.block_bytes, 0)
                if request.uneven
                else (sum(request.in_counts), sum(request.out_counts))
            )
            self.context.cache_run(
                run,
                request.collective,
                *sizes,
                request.dtype,
                call.plan_arg,
                request.in_place,
                uneven=request.uneven,
            )
        return run

    def run(self, call: PreparedOp, name: str) -> Any:
        """Run an operation now, after pending background work, and return its result."""
        if self._worker.pending:
            return self.submit(call, name).wait()
        self.flush()
        return self._run(call, self.plan(call), name)

    def _run(self, call: PreparedOp, run: Run, name: str) -> Any:
        if call.prologue is not None:
            call.prologue()
        counts = 0 if call.counts is None else call.counts.address
        self.check_result(self.context.launch(run.address, call.source, call.target, counts), name)
        return call.result

    def run_persistent(self, run: Run, call: PreparedOp, name: str, code: int) -> Any:
        """Run a persistent operation that its fast path did not handle (result ``code``)."""
        self.check(code, name)
        if self._worker.pending:
            self.flush()
            return self._worker.submit(name, lambda: self._run(call, run, name)).wait()
        self.flush()
        return self._run(call, run, name)

    def execute(self, function: Callable[[], Any], name: str, async_op: bool = False) -> Any:
        """Run an operation made of several runs, in the background or after what is there.

        ``function`` runs them with ``run_now`` and returns the result of the operation.
        """
        if async_op or self._worker.pending:
            self.flush(background=True)
            work = self._worker.submit(name, function)
            return work if async_op else work.wait()
        self.flush()
        return function()

    def run_now(self, call: PreparedOp, run: Run, name: str) -> Any:
        """Run one part of an operation inside the function given to ``execute``."""
        return self._run(call, run, name)

    def note_plan(self, run: Run, plan: Candidate) -> None:
        """Make ``plan`` that of the last operation; ``run`` may be of another communicator."""
        self.planner.record_plan(run, plan)
        self.context.set(layout.CTX_LAST_RUN, run.address)

    def submit(self, call: PreparedOp, name: str) -> Work:
        """Queue an operation for the background thread."""
        self.flush(background=True)
        run = self.plan(call)
        return self._worker.submit(name, lambda: self._run(call, run, name))

    def fast_calls(self) -> FastCalls:
        """Return the compiled entry points of operations on CPU memory."""
        self._barrier_run, calls = open_fast_calls(self.context, self.planner)
        return calls

    # ---- memory and plans

    def empty(self, shape: Any, dtype: Any) -> Any:
        self.check_open("empty")
        return self.fabric.window.empty(shape, dtype)

    def memory(self) -> dict[str, int]:
        self.check_open("memory")
        parts = self.fabric.memory()
        return {"total": parts["fifo"] + parts["network"] + parts["private"], **parts}

    def parse_explain_request(
        self, collective: str | Collective, nbytes: int, dtype: Any
    ) -> tuple[Collective, int, DType]:
        """Validate the arguments of ``explain`` and return (collective, bytes per block, element
        type).
        """
        return parse_explain_request(collective, nbytes, dtype, self.nranks)

    # ---- other communicators

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        """Gather the ``data`` of all ranks in rank order, as the control operation ``name``."""
        with self.wait_state.blocked_in_control_op():
            return self.faults.run_control_op(name, tag, data, deadline)

    def cancel_on_fault(self, setup: SetupPhases) -> contextlib.AbstractContextManager[None]:
        """Cancel ``setup`` when a fault of this communicator occurs inside the block."""
        return self.faults.cancel_on_fault(setup)

    @property
    def pending(self) -> int:
        """Number of pending background operations."""
        return self._worker.pending

    def has_no_background_work(self) -> bool:
        """Return True if this rank runs nothing besides the call of its application thread."""
        return (
            not self._worker.pending
            and not self._exchange.in_flight
            and not self.context.get(layout.CTX_BACKGROUND)
        )

    def split(self, color: int | None, key: int, number: int, deadline: Deadline) -> Session | None:
        """Return the session of this rank's color, or None if ``color`` is None."""
        self.check(0, "split")
        if color is not None and (
            isinstance(color, bool) or not isinstance(color, int | np.integer)
        ):
            raise InvalidUsage(
                f"split: color is {color!r}; it must be a whole number, or None to take no part"
            )
        if isinstance(key, bool) or not isinstance(key, int | np.integer):
            raise InvalidUsage(f"split: key is {key!r}; it must be a whole number")
        color_and_key = f"{'' if color is None else int(color)},{int(key)}".encode()
        colors_and_keys = [
            tuple(blob.decode().split(","))
            for blob in self.run_control_op("split", f"split {number}", color_and_key, deadline)
        ]
        if color is None:
            return None
        chosen = sorted(
            (int(k), r) for r, (c, k) in enumerate(colors_and_keys) if c == str(int(color))
        )
        return self.session.subgroup(
            [r for _, r in chosen], f"{self.session.name}/{number}:{color}"
        )

    # ---- end

    def abort(self, reason: str) -> None:
        if self.closed:
            return
        self.faults.abort(reason)

    def cancel_pending_setup(self) -> None:
        """Cancel communicators that are being created from this one; their other ranks go on
        without
        us.
        """
        text = "the communicator was finalized while its surviving ranks were creating a new one"
        self.pending_setup.cancel(CommunicatorClosed(text, rank=self.rank, op="shrink"))

    def finalize(self) -> None:
        with self._lifecycle_lock:
            if self.closed or self._finalizing:
                return
            self._finalizing = True
            try:
                self._finalize()
            finally:
                self._finalizing = False

    def _finalize(self) -> None:
        self.faults.closing = True
        if self.faults.fault is None:
            with contextlib.suppress(MiracclError):  # reported by the Work of the failed operation
                self.flush(background=True)
        if not self._worker.close(CLOSE_WAIT_S):
            self._fail_running_op("an operation was pending")
            self._worker.close(CLOSE_WAIT_S)
        self.closed = True
        self.wait_state.remove()
        self.update_busy()
        self._interrupt_running_op()
        broken = str(self.faults.fault) if self.faults.fault is not None else ""
        self.fabric.close(abort=broken)
        self.session.close(broken or "finalized")

    def _interrupt_running_op(self) -> None:
        """End the operation that is inside the engine: its memory is about to be unmapped.

        It belongs to another thread, or to this one if a signal handler finalizes; the latter
        cannot continue. An operation of another thread gets ``CLOSE_WAIT_S`` to end by itself.
        """
        if not self.context.interrupted and self._wait_until_idle():
            return
        self._fail_running_op("a thread was inside")
        if not self.context.interrupted:
            self._wait_until_idle()

    def _fail_running_op(self, what: str) -> None:
        self.faults.set_fault(
            CommunicatorClosed(f"the communicator was finalized while {what}", rank=self.rank)
        )

    def _wait_until_idle(self) -> bool:
        """Wait up to ``CLOSE_WAIT_S`` for the engine to be free; return True if it is."""
        deadline = clock.monotonic() + CLOSE_WAIT_S
        while (
            self.context.in_engine or self._in_background_advance
        ) and clock.monotonic() < deadline:
            clock.sleep(POLL_S)
        return not self.context.in_engine

    def forked(self) -> None:
        """Detach in a forked child: the communicator belongs to the parent process."""
        self.closed = self.in_forked_child = True
        self._lifecycle_lock = threading.RLock()
        self.update_busy()
