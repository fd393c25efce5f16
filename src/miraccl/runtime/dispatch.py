"""Slow path of a call: to the GPU side, into an open group, or to a plan for CPU memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from miraccl.bootstrap import Session
from miraccl.errors import InvalidUsage
from miraccl.ops.arguments import peer_rank, reject_stream, view
from miraccl.ops.calls import CallSite, PreparedOp
from miraccl.runtime import group as groups
from miraccl.runtime.control import GPU_SETUP
from miraccl.runtime.core import CommunicatorCore
from miraccl.runtime.exchange import Transfer
from miraccl.runtime.gpu.device_guard import guarded
from miraccl.runtime.gpu.launch_order import LaunchOrders
from miraccl.runtime.gpu.memory import current_ordinal, device_ordinal, is_gpu_array
from miraccl.runtime.gpu.stream import library_stream_getter
from miraccl.runtime.persistent import Persistent
from miraccl.runtime.setup_phases import SetupPhases

_DEVICE = re.compile(r"cuda(?::([0-9]{1,4}))?")

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator
    from miraccl.runtime.gpu.communicator import DeviceCommunicator
    from miraccl.runtime.gpu.persistent import DevicePersistent
    from miraccl.runtime.gpu.work import BackgroundCalls
    from miraccl.runtime.multinode.communicator import MultiNodeCommunicator


class Dispatcher:
    """Base class of ``Operations``: selects the executor of a call after the fast path."""

    rank: int
    nranks: int
    _core: CommunicatorCore
    _device: DeviceCommunicator | MultiNodeCommunicator | None
    _background: BackgroundCalls | None
    #: Held while the GPU side is created; reentrant, for signal handlers.
    _gpu_lock: AbstractContextManager[bool]
    _launch_orders: Callable[[], LaunchOrders]  # called by the first operation on a GPU
    _cpu_plan: Any  # one word; 0: the last operation was on GPU memory
    _cpu_plan_address: int

    def _create_child(self, session: Session, setup: SetupPhases) -> Communicator:
        """Create a communicator with the same options over another session."""
        raise NotImplementedError

    # ---- GPU memory

    def _gpu_target(self, async_op: bool, stream: Any, *arrays: Any) -> Any:
        """Return the object that executes the call if one of ``arrays`` is on a GPU, else None.

        Raises:
            InvalidUsage: ``stream`` is given and all arrays are in CPU memory.
        """
        for x in arrays:
            if is_gpu_array(x):
                if self._device is not None and not async_op:
                    self._cpu_plan[0] = 0
                    group = groups.current()
                    calls = guarded(self._device) if group is None else self._device.grouped(group)
                else:
                    calls = self._gpu_receiver(async_op, device_ordinal(x))
                if (current := library_stream_getter(x)) is None:
                    return calls
                from miraccl.runtime.gpu.work import StreamBound

                return StreamBound(calls, current)
        reject_stream(stream, self.rank)
        return None

    def _gpu_by_name(self, device: Any, name: str) -> Any:
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
        return guarded(side)

    def _gpu_receiver(self, async_op: bool, ordinal: int) -> Any:
        """Return the GPU side, or its recorder for an open group, or its background runner."""
        device = self._require_gpu(ordinal)
        self._cpu_plan[0] = 0
        group = groups.current()
        if group is not None:
            if async_op:
                raise InvalidUsage(
                    "async_op is not allowed inside a group; the group is one operation",
                    rank=self.rank,
                )
            return device.grouped(group)
        if not async_op:
            return guarded(device)
        if self._background is None:
            from miraccl.runtime.gpu.work import BackgroundCalls

            with self._gpu_lock:
                wait = functools.partial(
                    self._core.wait_state.wait_for_stream,
                    device.stream_name,
                    op="work.synchronize()",
                )
                self._background = self._background or BackgroundCalls(device, wait)
        return self._background

    def _require_gpu(self, ordinal: int) -> DeviceCommunicator | MultiNodeCommunicator:
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
        doors = self._device.install_before(
            lambda name: vars(self).get(f"_{name}"), self._cpu_plan_address
        )
        vars(self).update({f"_{name}": door for name, door in doors.items()})

    # ---- CPU memory

    def _call_site(self, name: str) -> CallSite:
        return CallSite(self.rank, self.nranks, name)

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
        self,
        make: Callable[..., PreparedOp],
        args: tuple[Any, ...],
        name: str,
        async_op: bool,
        code: int = 0,
    ) -> Any:
        """Run ``make(site, *args)``, a function of ``ops.calls``, without the fast path.

        Args:
            code: Result of the fast path, 0 if it was not called.
        """
        # ``make`` and ``args`` instead of a closure: a lambda over the arguments of a public
        # operation would turn these into cells, which costs time in every call, fast path included.
        self._core.check(code, name)
        call = make(self._call_site(name), *args)
        group = self._open_group(name, async_op)
        if group is not None:
            group.run(lambda: self._core.run(call, name))
            return call.result
        return self._core.submit(call, name) if async_op else self._core.run(call, name)

    def _make_persistent(
        self, make: Callable[..., PreparedOp], name: str, *args: Any
    ) -> Persistent | DevicePersistent:
        self._core.check(0, name)
        on_gpu = next((x for x in args if is_gpu_array(x)), None)
        if on_gpu is not None:
            from miraccl.runtime.gpu.persistent import DevicePersistent

            return DevicePersistent(
                self._require_gpu(device_ordinal(on_gpu)), name, args, self._cpu_plan
            )
        return Persistent(self._core, make(self._call_site(name), *args), name)

    def _checked_transfer(
        self, x: Any, peer: Any, receives: bool, name: str, argument: str = "x"
    ) -> Transfer:
        self._core.check(0, name)
        other = peer_rank(peer, "src" if receives else "dst", self.nranks, name)
        return Transfer(
            receives=receives, peer=other, memory=view(x, argument, writes=receives, where=name)
        )

    def _transfer(
        self, x: Any, peer: Any, receives: bool, name: str, async_op: bool, code: int
    ) -> Any:
        self._core.check(code, name)
        transfer = self._checked_transfer(x, peer, receives, name)
        result = x if receives else None
        group = self._open_group(name, async_op)
        if group is not None:
            group.transfer(self._core, transfer)
            return result
        return self._core.exchange([transfer], result, name, async_op)
