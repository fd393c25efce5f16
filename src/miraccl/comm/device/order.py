"""Kernels of several communicators on one GPU: those that fill it run one after another.

A kernel that waits for peers keeps its multiprocessors until they come.  Two such kernels of two communicators, of which each GPU holds
another one, would wait for ever.  So a launch that fills the GPU waits, on the GPU, for the last such launch of another communicator of
this rank; if ranks call communicators in the same order, every GPU runs them in the same order (NCCL_LAUNCH_ORDER_IMPLICIT does the same).
Small kernels need no order: they fit beside a large one on the multiprocessors that it leaves free, those of two communicators, each with
the next one set up already (``after_grid_before`` of executor/cuda/source/machine.cuh).

A rank is a process with all its threads (autograd has its own, actors have pools), so an order is the process's.  Where ranks are threads
of one process and share a GPU, they must not wait for one another: there an order belongs to the thread that makes a communicator, and is
kept in whichever threads the communicator is used.  Sessions know the processes of their ranks, and so which of the two it is.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Protocol

from miraccl.bootstrap import Session

if TYPE_CHECKING:
    from miraccl.executor.cuda.driver import Gpu  # programs without a GPU need none of it

#: threads of a launch that fits beside others: a quarter of what the multiprocessors hold that large launches leave free
SMALL_THREADS = 2048


class Launcher(Protocol):
    """A communicator: ``stream`` is where its last operation was enqueued."""

    @property
    def stream(self) -> int: ...


class Order:
    """Which communicator filled this rank's GPU last."""

    def __init__(self) -> None:
        self.last: Launcher | None = None
        self._word = ctypes.c_int64(0)  # the identity of the last, for compiled code
        self.address = ctypes.addressof(self._word)

    def take(self, gpu: Gpu, who: Launcher, stream: int) -> None:
        """``who`` enqueues in ``stream`` next; it waits for the one before."""
        before, self.last = self.last, who
        self._word.value = id(who)
        if before is None or before is who or before.stream in (-1, stream):
            return
        if gpu.capture_id(stream) == gpu.capture_id(before.stream):
            gpu.order_streams(before.stream, stream)

    def leave(self, who: Launcher) -> None:
        if self.last is who:
            self.last = None
            self._word.value = 0


class Orders:
    """Those of one rank, one for each GPU."""

    def __init__(self) -> None:
        self._of_gpu: dict[int, Order] = {}

    def on(self, ordinal: int) -> Order:
        return self._of_gpu.setdefault(ordinal, Order())


_of_process = Orders()
_of_thread = threading.local()


def orders_of(session: Session) -> Orders:
    """Those of the rank that makes a communicator over ``session`` in the calling thread.

    A thread that was a rank beside others of its process once is one in all communicators that it makes later, also where it is alone.
    """
    if session.tokens.count(session.tokens[session.rank]) > 1 and not hasattr(_of_thread, "orders"):
        _of_thread.orders = Orders()
    orders: Orders = getattr(_of_thread, "orders", _of_process)
    return orders
