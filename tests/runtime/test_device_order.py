"""Launch order of communicators on one GPU."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

from miraccl.api.communicator import Communicator
from miraccl.bootstrap.session import single_rank_session
from miraccl.runtime.gpu.launch_order import (
    LaunchOrders,
    program_launch_orders,
    thread_launch_orders,
)
from miraccl.runtime.options import Options
from tests.runtime.test_life import in_threads

T = TypeVar("T")


def in_other_thread(call: Callable[[], T]) -> T:
    """Return the result of ``call`` in another thread."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]


def call_in_foreign_thread(call: Callable[[], object]) -> None:
    """Call in a thread not started by Python, as PyTorch's autograd does."""
    function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: call() and None)
    thread, libc = ctypes.c_ulong(), ctypes.CDLL(None)
    assert libc.pthread_create(ctypes.byref(thread), None, function, None) == 0
    assert libc.pthread_join(thread, None) == 0


def test_each_thread_has_its_own_orders() -> None:
    assert thread_launch_orders() is thread_launch_orders()
    assert in_other_thread(thread_launch_orders) is not thread_launch_orders()
    assert thread_launch_orders().on(0) is thread_launch_orders().on(0)
    assert thread_launch_orders().on(0) is not thread_launch_orders().on(1)


def test_process_shares_one_order_except_own_threads() -> None:
    session = single_rank_session(20.0)
    here = program_launch_orders(session)
    found: list[LaunchOrders] = []
    call_in_foreign_thread(lambda: found.append(here()))
    assert found == [here()]
    assert program_launch_orders(session)() is here()
    assert in_other_thread(here) not in (here(), thread_launch_orders())
    assert in_other_thread(lambda: program_launch_orders(session)()) is here()


def test_ranks_in_one_process_have_separate_orders() -> None:
    gate = threading.Barrier(2)

    def work(comm: Communicator) -> LaunchOrders:
        found = program_launch_orders(comm._core.session)()
        gate.wait(20)
        return found

    first, second = in_threads(2, work)
    assert first is not second


def test_split_communicator_inherits_orders() -> None:
    shared = LaunchOrders()
    with Communicator.from_session(
        single_rank_session(20.0), Options.create(), launch_orders=lambda: shared
    ) as whole:
        part = in_other_thread(lambda: whole.split(0))
        assert part is not None
        with part:
            assert part._launch_orders() is shared
