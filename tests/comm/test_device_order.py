"""Which communicators are ordered among each other on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from miraccl.bootstrap.session import solo
from miraccl.comm.communicator import Communicator
from miraccl.comm.device.order import Orders, of_process, of_thread
from miraccl.comm.member import Options
from tests.comm.test_life import in_threads

T = TypeVar("T")


def beside(call: Callable[[], T]) -> T:
    """What ``call`` gives in another thread."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]


def test_threads_have_orders_of_their_own_and_a_process_has_one() -> None:
    session = solo(20.0)
    assert of_thread() is of_thread()
    assert beside(of_thread) is not of_thread()
    assert beside(lambda: of_process(session)) is of_process(session)
    assert of_process(session).on(0) is of_process(session).on(0)
    assert of_process(session).on(0) is not of_process(session).on(1)


def test_ranks_that_are_threads_of_one_process_do_not_share_an_order() -> None:
    gate = threading.Barrier(2)

    def work(comm: Communicator) -> Orders:
        found = of_process(comm._member.session)
        gate.wait(20)
        return found

    first, second = in_threads(2, work)
    assert first is not second


def test_parts_have_the_orders_of_the_whole() -> None:
    orders = Orders()
    with Communicator.from_session(solo(20.0), Options.create(), orders=orders) as whole:
        part = beside(lambda: whole.split(0))
        assert part is not None
        with part:
            assert part._orders is orders
