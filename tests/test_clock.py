"""Clocks: the functions of the system, and time that moves only when every thread is blocked."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from miraccl import clock
from miraccl.clock import VirtualClock
from miraccl.deadline import Deadline

HOUR = 3600.0


@pytest.fixture
def virtual() -> Iterator[VirtualClock]:
    with clock.use(VirtualClock(start=100.0)) as virtual:
        yield virtual


def test_the_system_clock_is_the_default() -> None:
    assert clock.current() is clock.SYSTEM
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()
    assert len(clock.random_bytes(16)) == 16
    assert len(clock.random_hex(8)) == 16
    assert isinstance(clock.thread(lambda: None), threading.Thread)
    assert isinstance(clock.timer(1.0, lambda: None), clock.Timer)
    assert clock.wait_io(lambda timeout: timeout, 0.5) == 0.5
    with clock.external_wait():
        pass


def test_sleep_takes_no_real_time(virtual: VirtualClock) -> None:
    start = time.monotonic()
    clock.sleep(HOUR)
    assert clock.monotonic() == 100.0 + HOUR
    assert clock.perf_counter() == clock.monotonic()
    assert time.monotonic() - start < 5


def test_threads_sleep_in_the_order_of_their_instants(virtual: VirtualClock) -> None:
    order: list[tuple[float, int]] = []

    def sleeper(number: int) -> None:
        clock.sleep(HOUR * (5 - number))
        order.append((clock.monotonic(), number))

    threads = [clock.thread(sleeper, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == [(100.0 + HOUR * (5 - n), n) for n in reversed(range(5))]


def test_an_event_ends_a_wait_before_its_timeout(virtual: VirtualClock) -> None:
    event = clock.event()

    def setter() -> None:
        clock.sleep(10.0)
        event.set()

    clock.thread(setter).start()
    assert event.wait(HOUR)
    assert clock.monotonic() == 110.0
    event.clear()
    assert not event.wait(HOUR)
    assert clock.monotonic() == 110.0 + HOUR


def test_join_times_out_and_ends_with_its_thread(virtual: VirtualClock) -> None:
    thread = clock.thread(lambda: clock.sleep(30.0))
    thread.start()
    thread.join(10.0)
    assert thread.is_alive()
    assert clock.monotonic() == 110.0
    thread.join()
    assert not thread.is_alive()
    assert clock.monotonic() == 130.0


def test_conditions_release_their_lock_while_they_wait(virtual: VirtualClock) -> None:
    condition, ready = clock.condition(), []

    def producer() -> None:
        clock.sleep(5.0)
        with condition:
            ready.append(1)
            condition.notify_all()

    clock.thread(producer).start()
    with condition:
        assert condition.wait_for(lambda: ready, HOUR)
        assert clock.monotonic() == 105.0
        assert not condition.wait_for(lambda: False, 7.0)
        assert clock.monotonic() == 112.0
        assert not condition.wait(1.0)


def test_queues_wait_for_items(virtual: VirtualClock) -> None:
    items = clock.simple_queue()

    def producer() -> None:
        clock.sleep(3.0)
        items.put("x")

    clock.thread(producer).start()
    assert items.get() == "x"
    assert clock.monotonic() == 103.0
    assert items.empty()
    with pytest.raises(queue.Empty):
        items.get_nowait()
    with pytest.raises(queue.Empty):
        items.get(timeout=4.0)
    assert clock.monotonic() == 107.0


def test_timers_fire_and_can_be_cancelled(virtual: VirtualClock) -> None:
    fired: list[float] = []
    first = clock.timer(60.0, lambda: fired.append(clock.monotonic()))
    second = clock.timer(30.0, lambda: fired.append(-1.0))
    first.start()
    second.start()
    second.cancel()
    first.join()
    second.join()
    assert fired == [160.0]


def test_a_running_thread_holds_time(virtual: VirtualClock) -> None:
    gate, done = threading.Event(), clock.event()

    def busy() -> None:
        gate.wait()  # outside the clock: this thread counts as running
        done.set()

    clock.thread(busy).start()
    threading.Timer(0.1, gate.set).start()
    assert done.wait(1e-3)
    assert clock.monotonic() == 100.0


def test_external_waits_do_not_hold_time(virtual: VirtualClock) -> None:
    gate = threading.Event()

    def waiter() -> None:
        with clock.external_wait():
            gate.wait()

    thread = clock.thread(waiter)
    thread.start()
    clock.sleep(HOUR)
    assert clock.monotonic() == 100.0 + HOUR
    gate.set()
    thread.join()


def test_waits_for_descriptors_end_with_data_or_in_virtual_time(virtual: VirtualClock) -> None:
    here, there = socket.socketpair()
    with here, there, selectors.DefaultSelector() as selector:
        selector.register(here, selectors.EVENT_READ)
        assert not clock.wait_io(selector.select, HOUR)
        assert clock.monotonic() == 100.0 + HOUR
        assert not clock.wait_io(selector.select, 0)
        there.send(b"x")
        assert clock.wait_io(selector.select, None)
        assert clock.monotonic() == 100.0 + HOUR


def test_time_can_be_moved_by_hand() -> None:
    virtual, woken = VirtualClock(start=0.0, autojump_s=None), []

    def sleeper() -> None:
        for _ in range(3):
            clock.sleep(1.0)
            woken.append(clock.monotonic())

    with clock.use(virtual):
        thread = clock.thread(sleeper)
        thread.start()
        while not virtual._blocked:
            time.sleep(0.001)
        virtual.advance(0.5)
        assert woken == []
        virtual.advance(2.0)
        assert woken == [1.0, 2.0]
        virtual.advance(1.0)
        thread.join()
    assert woken == [1.0, 2.0, 3.0]


def test_a_seed_gives_the_same_draws() -> None:
    def draws(seed: int) -> list[bytes]:
        with clock.use(VirtualClock(seed=seed)) as virtual:
            assert clock.random_bytes(8) != clock.random_bytes(8)
            assert len(clock.random_hex(4)) == 8
            return virtual.draws

    assert draws(1) == draws(1) != draws(2)


def test_threads_inherit_the_clock_and_others_do_not(virtual: VirtualClock) -> None:
    seen: list[clock.Clock] = []
    inside = clock.thread(lambda: seen.append(clock.current()))
    outside = threading.Thread(target=lambda: seen.append(clock.current()))
    for thread in (inside, outside):
        thread.start()
        thread.join()
    assert seen == [virtual, clock.SYSTEM]


def test_deadlines_are_of_the_clock(virtual: VirtualClock) -> None:
    deadline = Deadline.after(20.0)
    clock.sleep(15.0)
    assert deadline.left == 5.0
    clock.sleep(15.0)
    assert deadline.left == 0.0


def test_two_threads_with_one_instant_both_wake(virtual: VirtualClock) -> None:
    woken: list[float] = []

    def sleeper() -> None:
        clock.sleep(9.0)
        woken.append(clock.monotonic())

    threads = [clock.thread(sleeper) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert woken == [109.0] * 8
