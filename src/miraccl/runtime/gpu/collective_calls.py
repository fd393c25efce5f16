"""Collectives on GPU memory of one host: choice, preparation and start of their launches.

A call finds its launch by (collective, dtype, count, operator, root); the first call of a kind
plans it and possibly compiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miraccl.executor.cuda.copies import CopyLaunch, WindowPosition
from miraccl.executor.cuda.launch import KernelLaunch, Kernels
from miraccl.executor.cuda.one_sided import OneSidedLaunch, make_launch
from miraccl.executor.cuda.staged_copies import StagedLaunch
from miraccl.ops.arguments import resolve_operator
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.ops.spec import FastForm
from miraccl.planning.device_candidates import DeviceCandidate, candidates
from miraccl.runtime.gpu.engines import MAX_LAUNCHES, CopyEngines
from miraccl.runtime.gpu.launch_order import SMALL_THREADS
from miraccl.runtime.gpu.operations import SUM, CheckedDeviceCall, DeviceOperations
from miraccl.types import Collective, DType, Operator, RedOp

if TYPE_CHECKING:
    from miraccl.executor.cuda.lower import CommArgs
    from miraccl.executor.cuda.plan import DevicePlan, Request
    from miraccl.fastpath.cuda.table import CudaFastPath
    from miraccl.planning.cta_limits import CtaLimits
    from miraccl.planning.device_planner import DevicePlanner
    from miraccl.planning.ring_order import RingOrder
    from miraccl.planning.sparse_planner import SparseCandidate
    from miraccl.runtime.gpu.row_sums import RowSums
    from miraccl.runtime.gpu.windows import DeviceWindows
    from miraccl.transport.cuda_p2p import Explanation, SymmetricMemory, WindowMemory

AnyLaunch = KernelLaunch | OneSidedLaunch | CopyLaunch | StagedLaunch


class CollectiveCalls(DeviceOperations):
    """Collectives of ``DeviceCommunicator``.

    The mixin owns the launches; everything else belongs to the communicator.
    """

    last_plan: DevicePlan | None
    planner: DevicePlanner
    ring: RingOrder
    ctas: CtaLimits
    symmetric: SymmetricMemory
    _comm_args: CommArgs
    _kernels: Kernels
    _launches: dict[tuple[Any, ...], KernelLaunch | OneSidedLaunch]
    _engines: CopyEngines
    _windows: DeviceWindows | None
    _same_window_offset: bool
    _fast_path: CudaFastPath
    _row_sums: RowSums | None = None

    if TYPE_CHECKING:

        def enter_operation(self, name: str, stream: Any, fills: bool = True) -> int: ...
        def retain(self, views: Sequence[DeviceMemory], number: int) -> None: ...
        def connections(self) -> Explanation: ...
        def _run_blocks(self, call: CheckedDeviceCall, stream: Any) -> None: ...
        def set_last_plan(self, read: Callable[[], DevicePlan]) -> None: ...
        def stream_handle(self, stream: Any) -> int: ...
        def _open_workspace(self, nbytes: int) -> WindowMemory: ...

    def _execute(self, call: CheckedDeviceCall, stream: Any) -> None:
        if call.spec.uneven or call.spec.fast_form is FastForm.ROOTED:
            self._run_blocks(call, stream)
            return
        self._run(
            call.spec.collective,
            call.source,
            call.target,
            call.count,
            call.operator,
            call.root,
            stream,
        )

    def _run(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Operator,
        root: int,
        stream: Any,
    ) -> None:
        if self.closed:  # raises
            self.check(collective.label)
        if self.nranks == 1 or count == 0:
            enqueued = self._run_alone(collective, source, target, op, stream)
        else:
            key: tuple[Any, ...] = (collective, source.dtype, count, op, root)
            launch: AnyLaunch | None = None
            if self._engines.may_handle(
                collective, self._windows is not None, count * source.dtype.itemsize
            ):
                place = (
                    self._windows.locate(target)
                    if self._windows is not None and self._same_window_offset
                    else None
                )
                launch = self._engines.find_launch(
                    collective,
                    source.dtype,
                    count,
                    root,
                    place,
                    lambda: self.request(collective, source.dtype, count, SUM, root),
                )
            if launch is None:
                launch = self._launches.get(key) or self._prepare(key)
            self._start(launch, source.address, target.address, stream, collective)
            enqueued = True
        if enqueued and (source.keep is not None or target.keep is not None):
            self.retain([source, target], self._fast_path.stream)

    def _reduce_rows(
        self, call: CheckedDeviceCall, block: int | None, density: float | None, stream: Any
    ) -> None:
        name, source, target = call.spec.name, call.source, call.target
        self.check(name)
        if self.nranks == 1 or call.count == 0 or self.ctas.copy_engines_only:
            self._run(Collective.ALL_REDUCE, source, target, call.count, call.operator, 0, stream)
            return
        request = self.request(Collective.ALL_REDUCE, source.dtype, call.count, call.operator)
        with self.gpu.device_guard():
            launch = self._find_row_sums().find_launch(
                request, call.operator, block or 0, density, self.stream_handle(stream)
            )
        number = self.enter_operation(name, stream, launch.threads > SMALL_THREADS)
        launch.run(source.address, target.address, number)
        self.set_last_plan(launch.last_plan)
        self.retain([source, target], number)

    def _find_row_sums(self) -> RowSums:
        if self._row_sums is None:
            from miraccl.runtime.gpu.row_sums import RowSums  # late: few programs need it

            self._row_sums = RowSums(
                self._kernels, self._comm_args, self._open_workspace, self.symmetric.all_direct
            )
        return self._row_sums

    def explain_rows(self, nbytes: int, dtype: DType, density: float) -> list[SparseCandidate]:
        """Return rows and the dense sum for a sparse all-reduce, the chosen one first."""
        from miraccl.planning import device_rows  # late: few programs need it

        request = self.request(Collective.ALL_REDUCE, dtype, nbytes // dtype.itemsize)
        return device_rows.explain(request, density, self.symmetric.all_direct)

    @contextlib.contextmanager
    def any_window_offset(self) -> Iterator[None]:
        """Allow outputs at different window offsets, or outside windows, on the ranks in the block.

        Copy engines then treat no output as window memory.
        """
        self._same_window_offset = False
        try:
            yield
        finally:
            self._same_window_offset = True

    def _start(
        self, launch: AnyLaunch, source: int, target: int, stream: Any, collective: Collective
    ) -> None:
        number = self.enter_operation(collective.label, stream, launch.threads > SMALL_THREADS)
        launch.run(source, target, number)
        self.last_plan = launch.plan

    def _run_alone(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        op: Operator,
        stream: Any,
    ) -> bool:
        """Run an operation of a single rank, or of no elements; return True if work was enqueued.

        The result is the input, or its product with the operator's scalar.
        """
        kind, _ = resolve_operator(op, source.dtype, collective.label)
        self.check(collective.label)
        if kind is RedOp.PREMUL_SUM and source.count:
            key = (collective, source.dtype, source.count, op, 0)
            self._start(
                self._launches.get(key) or self._prepare(key),
                source.address,
                target.address,
                stream,
                collective,
            )
        elif source.nbytes and source.address != target.address:
            self.gpu.copy(
                target.address,
                source.address,
                source.nbytes,
                self.enter_operation(collective.label, stream, False),
            )
        else:
            return False
        return True

    def _prepare(self, key: tuple[Any, ...]) -> KernelLaunch | OneSidedLaunch:
        collective, dtype, count, op, root = key
        request = self.request(collective, dtype, count, op, root)
        launch: KernelLaunch | OneSidedLaunch
        with self.gpu.device_guard():
            if self.nranks == 1:
                launch = self._kernels.prepare_scale(request, self._comm_args)
            else:
                launch = make_launch(
                    self._kernels,
                    self.planner.plan(request),
                    request,
                    self._comm_args,
                    self._in_window,
                )
        if len(self._launches) >= MAX_LAUNCHES:
            self._drop_launches()
        self._launches[key] = launch
        engines = self._engines.may_handle(
            collective, self._windows is not None, request.block_bytes
        )
        if isinstance(launch, KernelLaunch) and not engines:
            # With copy engines the launch depends on the addresses, so each call selects it.
            self._fast_path.add_collective(
                collective,
                dtype,
                count,
                op,
                root,
                launch,
                saturates_gpu=launch.threads > SMALL_THREADS,
            )
        return launch

    def _in_window(self, address: int, nbytes: int) -> WindowPosition | None:
        return (
            self._windows.locate(DeviceMemory(address, nbytes, DType.UINT8))
            if self._windows is not None
            else None
        )

    def _drop_launches(self) -> None:
        """Discard all prepared collectives."""
        self._launches.clear()
        self._fast_path.remove_collectives()

    def request(
        self, collective: Collective, dtype: DType, count: int, op: Operator = SUM, root: int = 0
    ) -> Request:
        """Return the planner's input for an operation; ``count``: elements per block."""
        return self.ctas.apply(self.planner.request(collective, dtype, count, op, root))

    def explain(
        self, collective: Collective, block_bytes: int, dtype: DType, op: Operator = SUM
    ) -> list[DeviceCandidate]:
        """Return all candidates for ``collective`` on blocks of this size, the chosen one first.

        Nothing is communicated.
        """
        request = self.request(
            collective, dtype, block_bytes // dtype.itemsize, op if collective.reduces else SUM
        )
        return candidates(
            request,
            order=self.ring.order,
            order_reason=self.ring.reason,
            connections=self.connections(),
            given=self.planner.user_plan(request),
            no_multiprocessors=self.ctas.copy_engines_only,
            all_direct=self.symmetric.all_direct,
        )

    def use_plan(
        self, collective: Collective, dtype: DType, count: int, plan: DevicePlan, op: RedOp = SUM
    ) -> None:
        """Run operations of this kind with ``plan`` from now on; all ranks must pass the same."""
        self.planner.use(collective, dtype, count, plan, op)
        self._drop_launches()
