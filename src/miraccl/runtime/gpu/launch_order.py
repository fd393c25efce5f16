"""Launch order of several communicators on one GPU: kernels that fill it run one after another.

A kernel that waits for peers occupies its SMs until they arrive. Two such kernels of two
communicators would deadlock if two GPUs ran them in opposite order. A launch that fills the GPU
therefore waits, on the GPU, for the last such launch of another communicator of this rank: ranks
that call communicators in the same order run their kernels in the same order, as with NCCL's
``NCCL_LAUNCH_ORDER_IMPLICIT``. Small kernels need no order: they fit on the SMs that a large one
leaves free, even those of two communicators whose next kernel is already launched
(``after_grid_before`` of executor/cuda/source/machine.cuh).

Only calls that all ranks make in the same order can be ordered, in general those of one thread, so
an order belongs to the thread of a communicator's first operation. Independent threads are not
ordered among themselves, nor are ranks that are threads of one process. The groups of PyTorch share
one order per process if their first operation is called in the thread that created them, or in one
not started by Python: autograd runs backward passes in such threads, in sequence with the rest.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from miraccl.bootstrap.contract import Session

if TYPE_CHECKING:
    from miraccl.executor.cuda.gpu import Gpu

#: most threads of a small launch: a quarter of what fits on the SMs that large launches leave
SMALL_THREADS = 2048


class Launcher(Protocol):
    """Communicator that launches kernels."""

    def last_stream(self, capture: int) -> int:
        """Return the stream of its last operation in ``capture`` (0: none); -1 if there is none."""
        ...


class LaunchOrder:
    """Record of the communicator that filled a GPU last."""

    def __init__(self) -> None:
        self.last: Launcher | None = None
        self._word = ctypes.c_int64(0)  # identity of `last`, read by compiled code
        self.address = ctypes.addressof(self._word)

    def enter(self, gpu: Gpu, launcher: Launcher, stream: int) -> None:
        """Order the next launch of ``launcher`` in ``stream`` after the previous launcher's."""
        before, self.last = self.last, launcher
        self._word.value = id(launcher)
        if before is None or before is launcher:
            return
        last = before.last_stream(gpu.capture_id(stream))
        if last not in (-1, stream):
            gpu.order_streams(last, stream)

    def leave(self, launcher: Launcher) -> None:
        if self.last is launcher:
            self.last = None
            self._word.value = 0


class LaunchOrders:
    """Launch orders of one rank, by GPU."""

    def __init__(self) -> None:
        self._of_gpu: dict[int, LaunchOrder] = {}

    def on(self, ordinal: int) -> LaunchOrder:
        return self._of_gpu.setdefault(ordinal, LaunchOrder())


_process_orders = LaunchOrders()
_thread_state = threading.local()


def thread_launch_orders() -> LaunchOrders:
    """Return the launch orders of the calling thread."""
    if not hasattr(_thread_state, "orders"):
        _thread_state.orders = LaunchOrders()
    orders: LaunchOrders = _thread_state.orders
    return orders


def program_launch_orders(session: Session) -> Callable[[], LaunchOrders]:
    """Return a function that gives the launch orders for a communicator of this process.

    The calling thread and threads not started by Python share one; a thread started by the
    application has its own, as do ranks that are threads of one process (several ranks with one
    token in ``session``). The function is called with a communicator's first operation.
    """
    maker, shared = threading.get_ident(), session.tokens.count(session.tokens[session.rank]) > 1

    def orders() -> LaunchOrders:
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return (
            _process_orders
            if not shared and (foreign or threading.get_ident() == maker)
            else thread_launch_orders()
        )

    return orders
