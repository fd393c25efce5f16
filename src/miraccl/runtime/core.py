"""One rank's half of a communicator: it owns the parts and decides which operation runs when.

``run`` runs a collective now, ``submit`` in the background; ``exchange`` runs a group of sends and
receives. While background work is pending, every operation queues behind it. The context word
``CTX_BUSY`` disables the fast path; its bits are the ``REASON_*`` constants.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from miraccl import clock, params, trace
from miraccl.bootstrap.contract import Session
from miraccl.deadline import Deadline
from miraccl.diagnosis import blocked_ops
from miraccl.diagnosis.detector import COUNTED_RANKS, deadlock_detector
from miraccl.diagnosis.error_codec import abort_error
from miraccl.errors import CollectiveTimeout, CommunicatorClosed, InvalidUsage, MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import Run
from miraccl.fastpath.fast_calls import FastCalls
from miraccl.ops.arguments import data_type
from miraccl.ops.array_errors import MAX_BYTES
from miraccl.ops.host_arrays import HostReader
from miraccl.ops.prepare import PreparedOp, barrier
from miraccl.ops.request import PlanRequest
from miraccl.ops.spec import BARRIER, OPS, RECV
from miraccl.planning.cost_model import CommunicatorShape, CpuConstants, default_block_bytes
from miraccl.planning.planner import Candidate, Overrides, Planner
from miraccl.planning.tuning import prepare
from miraccl.runtime import forks, summary
from miraccl.runtime.engine_faults import CpuFaults
from miraccl.runtime.exchange import Transfer, TransferEntry, TransferTable
from miraccl.runtime.fabric import ProcessFabric
from miraccl.runtime.fabric_contract import AgreedConfig, FabricFactory
from miraccl.runtime.forks import closed_reason
from miraccl.runtime.options import Options
from miraccl.runtime.progress import progress
from miraccl.runtime.setup_phases import PendingSetup, SetupPhases
from miraccl.runtime.wait_state import CoreWaitState
from miraccl.runtime.work import BackgroundWorker, Work, check_timeout
from miraccl.types import Collective, DType
from miraccl.version import __version__
from miraccl.wire.proxy_records import Loss

_log = trace.logger("init")
REASON_PENDING, REASON_CLOSED, REASON_OPEN = layout.BUSY_PENDING, 2, 4
MAX_RUNS = 2048
CLOSE_WAIT_S = 10.0
POLL_S = 0.001


class CommunicatorCore:
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
        self.watched = False
        self._in_background_advance = False  # the progress thread is inside
        # Reentrant: a signal handler may finalize inside ``finalize``.
        self._lifecycle_lock = threading.RLock()
        self._finalizing = False
        self._losses: dict[int, Loss] = {}
        self.pending_setup = PendingSetup()
        measured = constants or prepare()
        agreed_config = AgreedConfig(
            version=__version__,
            algo=options.algo
            or " ".join(f"{collective.label}:{name}" for collective, name in options.algo_hints),
            proto=" ".join(f"{collective.label}:{name}" for collective, name in options.proto_hints)
            or options.proto,
            deterministic=options.deterministic,
            buffsize=options.buffsize,
            single_copy=options.single_copy,
            constants=measured.to_json(),
        )
        overrides = Overrides(
            algo=options.algo,
            proto=options.proto,
            deterministic=options.deterministic,
            hints=dict(options.algo_hints),
        )
        try:
            self.fabric = self.open_fabric(
                setup or SetupPhases(session),
                agreed_config,
                timeout=options.timeout,
                on_lost=self._lost,
            )
        except BaseException as error:
            session.close(f"could not connect: {error}"[:500])
            raise
        self.context = self.fabric.context
        self.constants = CpuConstants.from_json(self.fabric.constants_text)
        self.faults = CpuFaults(session, self.fabric, self.has_no_background_work)
        for rank, loss in list(self._losses.items()):
            self._lost(rank, loss)
        hosts = self.fabric.hosts if len(set(self.fabric.hosts)) > 1 else ()
        self.planner = Planner(
            rank=self.rank,
            shape=CommunicatorShape(
                nranks=self.nranks,
                ranks_per_core=max(1.0, self.fabric.ranks_per_core),
                hosts=hosts,
                order=self.fabric.order,
            ),
            slot_bytes=self.fabric.slot_bytes,
            constants=self.constants,
            overrides=overrides,
            stream_from=self.fabric.stream_from,
            single_copy=self._single_copy_threshold(
                options.single_copy, self.constants.single_copy_from
            ),
            exchange_copy=self._single_copy_threshold(
                options.single_copy, self.constants.exchange_copy_from
            ),
            addressable=self.fabric.addressable,
        )
        self.context.set(layout.CTX_P2P_DIRECT, self.planner.single_copy)
        self.context.set(layout.CTX_SWAP, int(self.constants.swap_slots))
        self.wait_state = CoreWaitState(self)
        self._worker = BackgroundWorker(
            f"miraccl-work-{session.name}", self.update_busy, self.wait_state.wait_inside
        )
        self._runs: dict[PlanRequest, Run] = {}
        self._exchange = TransferTable(
            self.rank,
            self.context.connections,
            self.context.fast_call("exchange", Collective.SEND_RECV),
        )
        if 1 < self.nranks <= COUNTED_RANKS:  # beyond that, status queries take too long
            self.context.set(layout.CTX_DETECTOR, deadlock_detector.start())
            blocked_ops.providers.add(self.wait_state)
        session.on_event(self.pending_setup.on_event)
        forks.register(self)
        if _log.isEnabledFor(logging.INFO):  # formatting takes time with many ranks
            _log.info(
                "%s: %s",
                session.name,
                self.describe(),
            )

    def describe(self) -> str:
        """Return one line on the connections of this rank."""
        return summary.describe_rank(
            self.rank, self.fabric.choices, self.session.addresses[self.rank]
        )

    def _single_copy_threshold(self, asked: str, measured: int) -> int:
        """Return the bytes from which a peer reads private memory directly; -1 for never."""
        if not self.fabric.addressable or asked == "never":
            return -1
        return params.parse_size(asked) if asked else measured

    def _lost(self, rank: int, loss: Loss) -> None:
        """Handle the loss of the connection to ``rank``; called by transports on any thread."""
        self._losses[rank] = loss
        faults: CpuFaults | None = getattr(self, "faults", None)
        if faults is not None and rank not in faults.left:
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
            self.faults.check()
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
        raise self.faults.explain(code)

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

    # ---- sends and receives

    def exchange(
        self, transfers: Sequence[Transfer], result: Any, name: str, async_op: bool
    ) -> Any:
        """Run sends and receives as one group and return ``result``, or a ``Work`` with
        ``async_op``.

        Background transfers start at once as far as possible. They advance inside later calls of
        this communicator and on the progress thread, and complete before the next collective, which
        uses the same connections.
        """
        if not async_op:
            self._exchange.reject_unmatched_self(transfers)
        entries = self._exchange.add(transfers)
        self.update_busy()
        try:
            if not async_op:
                self.complete(entries, name)
                return result
            if not self._worker.pending:
                self._advance([], name)
            else:
                self._watch_open_transfers()
        except InvalidUsage:
            self._cancel(entries)
            raise
        return P2pWork(name, self, entries, result)

    def start_exchange(self, transfers: Sequence[Transfer], name: str) -> Work:
        """Run sends and receives as one group on the background thread."""
        self._exchange.reject_unmatched_self(transfers)
        entries = self._exchange.add(transfers)
        self.update_busy()

        def run() -> None:
            try:
                self._advance(entries, name)
            except InvalidUsage:
                self._cancel(entries)
                raise

        return self._worker.submit(name, run)

    def _cancel(self, entries: Sequence[TransferEntry]) -> None:
        """Remove transfers of a rejected call, so that they are not sent later."""
        self._exchange.cancel(entries)
        self.update_busy()

    def complete(self, entries: Sequence[TransferEntry], name: str) -> bool:
        """Block until ``entries`` have ended; returns True."""
        self.check(0, name)
        self._exchange.check_can_complete(entries)
        if self._worker.pending:
            self._worker.submit(name, lambda: self._advance(entries, name)).wait()
        elif not all(e.done for e in entries):
            self._advance(entries, name)
        return True

    def _advance(
        self, must: Sequence[TransferEntry], name: str, among: Sequence[TransferEntry] | None = None
    ) -> None:
        code = self._exchange.advance([e for e in must if not e.done], among)
        self._watch_open_transfers()
        self.update_busy()
        self.check_result(code, name)

    def progress(self, entries: Sequence[TransferEntry], name: str) -> bool:
        """Advance transfers without blocking; return True once ``entries`` have ended."""
        if not self._worker.pending and not all(e.done for e in entries):
            self.check(0, name)
            self._advance([], name)
        return all(e.done for e in entries)

    def _watch_open_transfers(self) -> None:
        # The application may make no further call for a while.
        if not self.watched and self._exchange.has_in_flight:
            progress.watch(self)

    def advance_in_background(self) -> bool | None:
        """Advance open transfers without blocking (``progress.Progressable``)."""
        # Set before ``closed`` is read: ``finalize`` sets ``closed``, then waits for this flag.
        self._in_background_advance = True
        try:
            if self.closed or self.faults.fault is not None or not self._exchange.has_in_flight:
                return None
            if self._worker.pending:  # the worker runs open transfers, or before them
                return False
            code, moved = self._exchange.try_advance()
            self.update_busy()
            if code not in (layout.OK, layout.BUSY):
                with contextlib.suppress(
                    MiracclError
                ):  # the next call of the application raises it
                    self._raise_fault(code, "send/recv")
            return moved
        finally:
            self._in_background_advance = False

    def flush(self, background: bool = False) -> None:
        """Complete all open sends and receives, now or (``background``) before the next queued
        operation.
        """
        if not self._exchange.in_flight:
            return
        entries = self._exchange.in_flight
        if background or self._worker.pending:
            # Transfers added until this runs come after the operation that is being queued.
            self._worker.submit("send/recv", lambda: self._advance(entries, "send/recv", entries))
        else:
            self._advance(entries, "send/recv")

    def fast_calls(self) -> FastCalls:
        """Return the compiled entry points of operations on CPU memory."""
        self._barrier_run = self.planner.make_run(barrier().request)
        prepared = self.context.fast_call("prepared", Collective.BARRIER, run=self._barrier_run)
        others = {
            op.name: self.context.fast_call(op.fast_form.value, op.collective, arg=int(op is RECV))
            for op in OPS.values()
            if op is not BARRIER
        }
        return FastCalls(barrier=prepared, **others)

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
        name = (
            collective.upper() if isinstance(collective, str) else getattr(collective, "name", "")
        )
        if name not in Collective.__members__ or name == "SEND_RECV":
            known = ", ".join(c.label for c in Collective if c is not Collective.SEND_RECV)
            raise InvalidUsage(f"unknown collective {collective!r}; known are {known}")
        if (
            isinstance(nbytes, bool)
            or not isinstance(nbytes, int | np.integer)
            or not 0 <= nbytes <= MAX_BYTES
        ):
            raise InvalidUsage(f"explain: nbytes is {nbytes!r}; allowed are 0 to {MAX_BYTES} bytes")
        kind = Collective[name]
        return kind, default_block_bytes(kind, int(nbytes), self.nranks), data_type(dtype)

    # ---- other communicators

    def run_control_op(
        self, name: str, tag: str, data: bytes, deadline: Deadline | None = None
    ) -> list[bytes]:
        """Gather the ``data`` of all ranks in rank order, as the control operation ``name``."""
        with blocked_ops.BlockedScope(self.wait_state.wait_for_control_op):
            return self.faults.run_control_op(name, tag, data, deadline)

    def cancel_on_fault(self, setup: SetupPhases) -> contextlib.AbstractContextManager[None]:
        """Cancel ``setup`` when a fault of this communicator occurs inside the block."""
        return self.faults.cancel_on_fault(setup)

    @property
    def pending(self) -> int:
        """Number of pending background operations."""
        return self._worker.pending

    @property
    def transfers(self) -> list[Transfer]:
        """Sends and receives that have started and not ended."""
        return [entry.transfer for entry in self._exchange.in_flight]

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
        self.faults.propagate(abort_error(self.rank, reason))

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
        blocked_ops.providers.remove(self.wait_state)
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


class P2pWork(Work):
    """A send or receive in the background.

    It advances inside calls of its communicator, ``wait`` and ``done`` included, and on the
    progress thread.
    """

    def __init__(
        self, name: str, core: CommunicatorCore, entries: Sequence[TransferEntry], result: Any
    ) -> None:
        super().__init__(name)
        self._core, self._entries = core, entries
        self._result = result

    def wait(self, timeout: float | None = None, *, stream: Any = None) -> Any:
        if (seconds := check_timeout(timeout)) is not None:
            self._poll_until(seconds)
        if not self.done():
            self._update(self._core.complete)
        return super().wait(0)

    def _poll_until(self, timeout: float) -> None:
        deadline = clock.monotonic() + timeout
        while not self.done():
            if clock.monotonic() >= deadline:
                raise CollectiveTimeout(
                    f"timed out after {timeout:g} s; the operation continues", op=self.name
                )
            clock.sleep(0.0005)

    def done(self) -> bool:
        if not super().done():
            self._update(self._core.progress)
        return super().done()

    is_completed = done

    def _update(self, advance: Callable[[Sequence[TransferEntry], str], bool]) -> None:
        try:
            if advance(self._entries, self.name):
                self._finish(self._result, None)
        except InvalidUsage:  # another thread is inside; the operation is unaffected
            raise
        except MiracclError as error:
            self._finish(None, error)
