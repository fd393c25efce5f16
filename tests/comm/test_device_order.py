"""Which communicators are ordered among each other on a GPU: those of a rank, be it a process or a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import miraccl
from miraccl.comm.communicator import Communicator
from miraccl.comm.device.order import Orders
from tests.comm.test_life import in_threads

T = TypeVar("T")


def beside(call: Callable[[], T]) -> T:
    """What ``call`` gives in another thread."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]


def alone() -> Communicator:
    return Communicator(1, miraccl.get_unique_id(), 0, timeout=20)


def orders_of(make: Callable[[], Communicator | None]) -> Orders:
    made = make()
    assert made is not None
    with made:
        return made._orders


def test_all_communicators_of_a_process_are_in_one_order_per_gpu() -> None:
    here = orders_of(alone)
    assert beside(lambda: orders_of(alone)) is here
    assert here.on(0) is here.on(0)
    assert here.on(0) is not here.on(1)


def test_ranks_that_are_threads_have_orders_of_their_own() -> None:
    gate = threading.Barrier(2)

    def work(comm: Communicator) -> list[Orders]:
        makes = [lambda: comm.split(0), lambda: beside(lambda: comm.split(0)), alone]
        found = [comm._orders, *map(orders_of, makes)]
        gate.wait(20)
        return found

    first, second = in_threads(2, work)
    assert {*map(id, first)} == {id(first[0])}
    assert {*map(id, second)} == {id(second[0])}
    assert len({first[0], second[0], orders_of(alone)}) == 3
