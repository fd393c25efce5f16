"""Conformance tests of ``proxy.driver.Driver``: a class fed by a factory.

    class TestMine(DriverConformance):
        def build(self): return connected(...)

Two drivers of one network are connected to each other in this process; the tests play both
executors, and the proxy that polls them.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from miraccl import clock
from miraccl.proxy.driver import NO_TIMER, Driver
from miraccl.transport.base import Fifo, FifoPair
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import FifoMemory, PlainAtomics
from miraccl.transport.registry import TCP
from miraccl.wire.proxy_records import AbortRequested, CloseRequested, Loss, LossKind
from tests.transport.conformance import pattern

SLOT = 8192
WAIT_S = 20.0


@dataclass
class Side:
    """One driver, both ends of its executor, and the losses it reported."""

    pair: FifoPair
    driver: Driver
    losses: list[tuple[int, Loss]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.send = SendEnd(self.pair.send, PlainAtomics())
        self.recv = RecvEnd(self.pair.recv, PlainAtomics())


def fifo_pair() -> FifoPair:
    memory = FifoMemory(SLOT), FifoMemory(SLOT)
    send, recv = (Fifo.from_address(m.address, SLOT, capabilities=TCP.capabilities) for m in memory)
    return FifoPair(send=send, recv=recv, memory=memory)


class DriverConformance:
    """The tests; see the head of this file."""

    def build(self) -> tuple[Side, Side]:
        """Return two sides whose drivers are connected, of ranks 0 and 1."""
        raise NotImplementedError

    @pytest.fixture
    def sides(self):
        sides = self.build()
        yield sides
        for side in sides:
            side.driver.close()

    def run_until(self, sides: tuple[Side, Side], condition: Callable[[], object]) -> None:
        """Poll as the proxy does: everything that is ready, then sleep until it is."""
        deadline = clock.monotonic() + WAIT_S
        while not condition():
            assert clock.monotonic() < deadline, "nothing happened"
            busy = [side.driver.poll() for side in sides if side.driver.alive]
            if any(busy):
                continue
            poll = select.poll()
            owners = {}
            for side in sides:
                for fd in side.driver.descriptors() if side.driver.alive else ():
                    owners[fd] = side.driver
                    poll.register(fd, select.POLLIN)
            for fd, events in poll.poll(5):
                owners[fd].ready(fd, events)

    def test_messages_of_all_sizes_arrive_in_both_directions(self, sides):
        for number, nbytes in enumerate((0, 1, 32, 33, 4096, SLOT)):
            for here, there in (sides, sides[::-1]):
                assert here.send.post(pattern(nbytes, number), signature=number)
                self.run_until(sides, there.recv.peek)
                message = there.recv.peek()
                assert message.signature == number
                assert bytes(message.payload) == pattern(nbytes, number)
                there.recv.consume()
        self.run_until(sides, lambda: sides[0].send.released == sides[0].send.posted)

    def test_idle_drivers_have_nothing_to_do(self, sides):
        for side in sides:
            while side.driver.poll():
                pass
            side.driver.dirty = False
            assert side.driver.arm() == NO_TIMER
            assert not side.driver.dirty

    def test_news_of_the_executor_prevents_a_sleep(self, sides):
        here, there = sides
        self.run_until(sides, lambda: not here.driver.poll())
        assert here.send.post(b"news")
        assert here.driver.arm() == 0
        self.run_until(sides, there.recv.peek)
        assert there.driver.dirty
        assert there.driver.arm() == 0, "the executor has not been woken"

    def test_both_sides_close_in_order(self, sides):
        here, there = sides
        assert here.send.post(b"last words")
        here.driver.arm()
        for side in sides:
            side.driver.handle(CloseRequested())
        self.run_until(sides, lambda: not (here.driver.alive or there.driver.alive))
        assert bytes(there.recv.peek().payload) == b"last words"
        assert here.losses == there.losses == []

    def test_an_abort_carries_its_reason(self, sides):
        here, there = sides
        here.driver.handle(AbortRequested("out of memory"))
        here.driver.close()
        assert not here.driver.alive
        self.run_until(sides, lambda: there.losses)
        ((peer, loss),) = there.losses
        assert (peer, loss.kind) == (0, LossKind.ABORTED)
        assert "out of memory" in loss.detail
        assert here.losses == []
        assert not there.driver.alive

    def test_close_is_idempotent_and_touches_no_memory(self, sides):
        here, _there = sides
        assert here.send.post(b"too late")
        here.driver.close()
        here.driver.close()
        here.driver.poll()
        assert here.send.released == 0
