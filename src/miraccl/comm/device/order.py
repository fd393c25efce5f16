"""Kernels of several communicators on one GPU: those that fill it run one after another.

A kernel that waits for peers keeps its multiprocessors until they come.  Two such kernels of two communicators, of which each GPU holds
another one, would wait for ever.  So a launch that fills the GPU waits, on the GPU, for the last such launch of another communicator of
this rank; if ranks call communicators in the same order, every GPU runs them in the same order (NCCL_LAUNCH_ORDER_IMPLICIT does the same).
Small kernels need no order: they fit beside a large one on the multiprocessors that it leaves free, those of two communicators, each with
the next one set up already (``after_grid_before`` of executor/cuda/source/machine.cuh).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Protocol

from miraccl.executor.cuda.driver import Gpu

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


_orders: dict[tuple[int, int], Order] = {}


def order_of(ordinal: int) -> Order:
    """The order of the calling thread's rank on a GPU; ranks that are threads and share a GPU must not wait for one another."""
    return _orders.setdefault((ordinal, threading.get_ident()), Order())
