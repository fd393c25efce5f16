"""Slow path of a call: to the GPU side, into an open group, or to a plan for CPU memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from miraccl.errors import InvalidUsage
from miraccl.ops.arguments import reject_stream
from miraccl.ops.check import check_transfers
from miraccl.ops.device_arrays import current_ordinal, device_ordinal, is_gpu_array
from miraccl.ops.prepare import PreparedOp, barrier, prepare
from miraccl.ops.spec import BARRIER, OpSpec
from miraccl.ops.stream_handles import library_stream_getter
from miraccl.runtime import group as groups
from miraccl.runtime.control import GPU_SETUP
from miraccl.runtime.gpu.call_context import CallContext
from miraccl.runtime.persistent import Persistent

_DEVICE = re.compile(r"cuda(?::([0-9]{1,4}))?")

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.fastpath.fast_calls import FastCalls
    from miraccl.runtime.aggregation import Aggregation
    from miraccl.runtime.core import CommunicatorCore
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.runtime.gpu.launch_order import LaunchOrders
    from miraccl.runtime.gpu.persistent import DevicePersistent
    from miraccl.runtime.gpu.work import BackgroundStream
    from miraccl.runtime.multinode.communicator import MultiNodeCommunicator
    from miraccl.runtime.setup_phases import SetupPhases

    GpuSide = DeviceCommunicator | MultiNodeCommunicator


class Dispatcher:
    """Base class of ``Operations``: selects the executor of a call after the fast path."""

    rank: int
    nranks: int
    _core: CommunicatorCore
    _device: GpuSide | None
    _background: BackgroundStream | None
    _aggregation: Aggregation | None = None
    #: Compiled entry points; the GPU side puts its own before those for CPU memory.
    _fast: FastCalls
    #: Held while the GPU side is created; reentrant, for signal handlers.
    _gpu_lock: AbstractContextManager[bool]
    _launch_orders: Callable[[], LaunchOrders]  # called by the first operation on a GPU
    _cpu_plan: Any  # one word; 0: the last operation was on GPU memory
    _cpu_plan_address: int

    def _create_child(self, session: Session, setup: SetupPhases) -> Any:
        """Create a communicator with the same options over another session."""
        raise NotImplementedError

    # ---- GPU memory

    def _run_on_gpu(
        self,
        op: OpSpec,
        args: tuple[Any, ...],
        async_op: bool,
        stream: Any,
        array: Any = None,
    ) -> Any:
        """Run a call on the GPU of ``array``, by default the current one."""
        gpu = self._device
        if gpu is None:
            gpu = self._require_gpu(current_ordinal() if array is None else device_ordinal(array))
        self._cpu_plan[0] = 0
        group = groups.current()
        if async_op and group is not None:
            raise InvalidUsage(
                "async_op is not allowed inside a group; the group is one operation",
                rank=self.rank,
            )
        background = self._background_stream(gpu) if async_op else None
        own_stream = library_stream_getter(array)
        return gpu.run(op, args, CallContext(stream, own_stream, group, background))

    def _background_stream(self, gpu: GpuSide) -> BackgroundStream:
        """Return the stream for ``async_op`` calls, created on first use."""
        if self._background is None:
            from miraccl.runtime.gpu.work import BackgroundStream

            with self._gpu_lock:
                wait = functools.partial(
                    self._core.wait_state.wait_for_stream,
                    gpu.stream_name,
                    op="work.synchronize()",
                )
                self._background = self._background or BackgroundStream(gpu, wait)
        return self._background

    def _gpu_by_name(self, device: Any, name: str) -> GpuSide:
        """Return the GPU side for a device such as ``cuda``, ``cuda:1`` or a ``torch.device``."""
        match = _DEVICE.fullmatch(str(device))
        if match is None:
            raise InvalidUsage(
                f"{name}: device is {device!r}; allowed are cpu, cuda and cuda:<number>",
                rank=self.rank,
            )
        side = self._require_gpu(int(match[1]) if match[1] else current_ordinal())
        if match[1] and int(match[1]) != side.gpu.ordinal:
            text = (
                f"{name}: device is {device!r}, but this communicator uses GPU {side.gpu.ordinal}"
            )
            raise InvalidUsage(
                text,
                rank=self.rank,
                hint="a rank uses one GPU: that of the first array it passed",
            )
        return side

    def _require_gpu(self, ordinal: int) -> GpuSide:
        """Return the GPU side; the first call creates it, collectively, and can be repeated if it
        fails.
        """
        if self._device is None:
            # Checked before the lock, which a thread of the parent may have held at the fork.
            self._core.check(0, GPU_SETUP)
            with self._gpu_lock:
                if self._device is None:
                    self._create_gpu(ordinal)
        return self._device  # type: ignore[return-value]

    def _create_gpu(self, ordinal: int) -> None:
        # Imported late: most applications have no GPU.
        from miraccl.executor.cuda.contexts import preserve_context
        from miraccl.runtime.multinode.communicator import make_device_communicator

        self._core.check(0, GPU_SETUP)
        with preserve_context():
            self._device = make_device_communicator(
                self._core.session,
                ordinal,
                self._core.options,
                open_cpu=self._create_child,
                plane=self._core,
                launch_orders=self._launch_orders(),
            )
        self._fast = self._device.fast_calls_before(self._fast, self._cpu_plan_address)

    # ---- CPU memory

    @staticmethod
    def _open_group(name: str, async_op: bool) -> Any:
        """Return the open group of this thread, or None.

        Raises:
            InvalidUsage: A group is open and the call has ``async_op``.
        """
        group = groups.current()
        if group is not None and async_op:
            raise InvalidUsage(
                f"{name}: async_op is not allowed inside a group; the group is one operation"
            )
        return group

    def _slow_path(
        self, spec: OpSpec, args: tuple[Any, ...], async_op: bool, stream: Any, code: int
    ) -> Any:
        """Run a call that the fast path did not handle.

        Args:
            args: Arguments in the order of ``spec.arguments``.
            code: Result of the fast path, 0 if it was not called.
        """
        name = spec.name
        for position in spec.array_positions:
            if is_gpu_array(array := args[position]):
                return self._run_on_gpu(spec, args, async_op, stream, array)
        reject_stream(stream, self.rank)
        self._core.check(code, name)
        if spec.is_message:
            return self._exchange(spec, args, async_op)
        call = barrier() if spec is BARRIER else prepare(spec, self._core.reader, args)
        group = self._open_group(name, async_op)
        if self._aggregation is not None and self._aggregation.handles(spec) and group is None:
            return self._core.execute(lambda: self._run_or_aggregate(spec, call), name, async_op)
        if group is not None:
            group.run(lambda: self._core.run(call, name))
            return call.result
        return self._core.submit(call, name) if async_op else self._core.run(call, name)

    def _run_or_aggregate(self, spec: OpSpec, call: PreparedOp) -> Any:
        """Run an operation through the aggregators if that is predicted to be faster."""
        assert self._aggregation is not None
        if self._aggregation.accepts(spec, call):
            return self._aggregation.run(call, spec.name)
        return self._core.run_now(call, self._core.plan(call), spec.name)

    def _exchange(self, spec: OpSpec, args: tuple[Any, ...], async_op: bool) -> Any:
        """Run a send, a receive or both on CPU memory."""
        transfers = check_transfers(spec, self._core.reader, args)
        result = spec.result(args, self.rank)
        group = self._open_group(spec.name, async_op)
        if group is not None:
            for transfer in transfers:
                group.transfer(self._core, transfer)
            return result
        return self._core.exchange(transfers, result, spec.name, async_op)

    def _make_persistent(
        self, spec: OpSpec, args: tuple[Any, ...]
    ) -> Persistent | DevicePersistent:
        self._core.check(0, spec.name)
        on_gpu = next((x for x in args if is_gpu_array(x)), None)
        if on_gpu is not None:
            from miraccl.runtime.gpu.persistent import DevicePersistent

            return DevicePersistent(
                self._require_gpu(device_ordinal(on_gpu)), spec, args, self._cpu_plan
            )
        return Persistent(self._core, prepare(spec, self._core.reader, args), spec.name)
