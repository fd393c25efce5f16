"""Launches of a communicator: fast path, kernels, copy engines, messages."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.launch import Kernels, driver_addresses
from miraccl.executor.cuda.message_launch import MessageLaunches
from miraccl.executor.cuda.message_lowering import WarpQueueRules
from miraccl.fastpath.cuda.table import CudaFastPath, group_builtins
from miraccl.runtime import group as groups
from miraccl.runtime.gpu.engines import CopyEngines
from miraccl.runtime.gpu.keep_alive import KeepAlive
from miraccl.runtime.gpu.launch_order import LaunchOrders, thread_launch_orders
from miraccl.runtime.gpu.messages import message_frame
from miraccl.runtime.gpu.stream_order import StreamOrder

if TYPE_CHECKING:
    from miraccl.runtime.gpu.resources import DeviceResources


class LaunchPaths:
    """Launches of one communicator, and the objects that they keep alive.

    Args:
        launch_orders: Order of its kernels with those of other communicators; default: that of the
            calling thread.
        own: Identity of the communicator in groups.
        hand_over: Called by compiled code for a call that it does not handle.
    """

    def __init__(
        self,
        resources: DeviceResources,
        launch_orders: LaunchOrders | None,
        *,
        own: int,
        hand_over: Callable[..., Any],
    ) -> None:
        gpu, comm_args, ctas = resources.gpu, resources.comm_args, resources.ctas
        self.launch_order = (launch_orders or thread_launch_orders()).on(gpu.ordinal)
        self.kernels = Kernels(gpu)
        self.keep_alive = KeepAlive(gpu)
        self.engines = CopyEngines(gpu, self.kernels, comm_args, resources.symmetric, ctas)
        address = groups.address()
        groups.install_fast_path(*group_builtins(address))
        self.fast_path = CudaFastPath(
            resources.rank,
            resources.nranks,
            gpu.ordinal,
            abort=ctypes.addressof(resources.host) + 4 * layout.HOST_ABORT,
            order=self.launch_order.address,
            own=own,
            groups=address,
            hand_over=hand_over,
            retain=self.keep_alive.retain,
        )
        self.fast_path.set_driver_functions(
            *driver_addresses(gpu, "cuPointerGetAttribute", "cuStreamIsCapturing")
        )
        self.streams = StreamOrder(gpu, self.fast_path)
        rules = WarpQueueRules(
            nranks=resources.nranks,
            multiprocessors=ctas.max_sms,
            frame=message_frame(resources.symmetric),
        )
        self.messages = MessageLaunches(gpu, self.kernels, comm_args, rules, self.fast_path)

    def close(self) -> None:
        """Free launches and retained objects; the GPU has finished with them."""
        self.engines.close()
        self.fast_path.retained.clear()
        self.keep_alive.close()
        self.streams.close()
        self.messages.close()
