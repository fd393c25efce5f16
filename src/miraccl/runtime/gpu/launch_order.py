"""Kernels of several communicators on one GPU: those that fill it run one after another.

A kernel that waits for peers keeps its multiprocessors until they come.  Two such kernels of two communicators, of which each GPU holds
another one, would wait for ever.  So a launch that fills the GPU waits, on the GPU, for the last such launch of another communicator of
this rank; if ranks call communicators in the same order, every GPU runs them in the same order (NCCL_LAUNCH_ORDER_IMPLICIT does the same).
Small kernels need no order: they fit beside a large one on the multiprocessors that it leaves free, those of two communicators, each with
the next one set up already (``wait_previous_grid`` of executor/cuda/source/machine.cuh).

Only what ranks call in the same order can be ordered: the calls of a thread, in general, so an order belongs to the thread in which a
communicator's first operation on a GPU is called.  Threads that go their own ways are not ordered among each other, nor are ranks that are
threads of one process.  Of PyTorch the groups of a process have one order where their first operations are called in the thread that made
them, or in one that Python did not start: backward passes run in threads of autograd, one after another with the rest.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from miraccl.bootstrap import Session

if TYPE_CHECKING:
    from miraccl.executor.cuda.gpu import Gpu  # programs without a GPU need none of it

#: threads of a launch that fits beside others: a quarter of what the multiprocessors hold that large launches leave free
SMALL_THREADS = 2048


class Launcher(Protocol):
    """A communicator."""

    def last_stream(self, capture: int) -> int:
        """The stream of its last operation that a capture took in, of the last one that ran for 0; -1 where none is to be waited for."""
        ...


class LaunchOrder:
    """Which communicator filled this rank's GPU last."""

    def __init__(self) -> None:
        self.last: Launcher | None = None
        self._word = ctypes.c_int64(0)  # the identity of the last, for compiled code
        self.address = ctypes.addressof(self._word)

    def enter(self, gpu: Gpu, launcher: Launcher, stream: int) -> None:
        """``who`` enqueues in ``stream`` next; it waits for the one before."""
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
    """Those of one rank, one for each GPU."""

    def __init__(self) -> None:
        self._of_gpu: dict[int, LaunchOrder] = {}

    def on(self, ordinal: int) -> LaunchOrder:
        return self._of_gpu.setdefault(ordinal, LaunchOrder())


_process_orders = LaunchOrders()
_thread_state = threading.local()


def thread_launch_orders() -> LaunchOrders:
    """Those of the calling thread."""
    if not hasattr(_thread_state, "orders"):
        _thread_state.orders = LaunchOrders()
    orders: LaunchOrders = _thread_state.orders
    return orders


def program_launch_orders(session: Session) -> Callable[[], LaunchOrders]:
    """A function for the first operation of a communicator that the calling thread makes over ``session``: it gives the orders of the
    process in this thread, and in those that Python did not start; a thread that the program has started has its own."""
    maker, shared = threading.get_ident(), session.tokens.count(session.tokens[session.rank]) > 1

    def orders() -> LaunchOrders:
        foreign = isinstance(threading.current_thread(), threading._DummyThread)
        return (
            _process_orders
            if not shared and (foreign or threading.get_ident() == maker)
            else thread_launch_orders()
        )

    return orders
