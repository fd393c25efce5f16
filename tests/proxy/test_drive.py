"""An executor that advances the links of the progress engine itself (``drive``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from miraccl import clock
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.kernels.progress_engine import DRIVE_HAND_OVER, DRIVE_POLL, DRIVE_POSTED
from miraccl.proxy.stream_engine import ProgressEngine
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import PrivateMemory, native_atomics
from miraccl.wire.stream import MIN_SEGMENT_BYTES
from tests.transport.conformance import WAIT_S, World
from tests.transport.socket_world import build_world


class Rank:
    """One rank with its engine and its ends of the pair."""

    def __init__(self, world: World, rank: int) -> None:
        transport: Any = world.transports[rank]
        self.engine: ProgressEngine = transport._proxy
        function, self.argument = self.engine.driver(overlap=False)
        self._drive = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(function)
        pair = transport._connected[1 - rank]
        atomics = native_atomics()
        self.send, self.recv = SendEnd(pair.send, atomics), RecvEnd(pair.recv, atomics)

    def drive(self, mode: int = DRIVE_POLL) -> int:
        return int(self._drive(self.argument, mode, 0, 0))

    def post(self, data: bytes) -> None:
        while not self.send.post(data):
            self.drive()
        self.drive(DRIVE_POSTED)

    def receive(self, drives: bool) -> bytes:
        deadline = clock.monotonic() + WAIT_S
        while (message := self.recv.peek()) is None:
            assert clock.monotonic() < deadline, "no message came"
            if drives:
                self.drive()
        assert message.payload is not None
        data = bytes(message.payload)
        self.recv.consume()
        return data


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = clock.monotonic() + WAIT_S
    while not condition():
        assert clock.monotonic() < deadline, "nothing comes"


@pytest.fixture
def ranks():
    world = build_world(2)
    infos = {rank: t.setup() for rank, t in world.transports.items()}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda r: world.transports[r].connect({1 - r: infos[1 - r]}), range(2)))
    yield [Rank(world, rank) for rank in range(2)]
    world.close()


def test_messages_of_executors_that_drive(ranks):
    for turn in range(200):
        data = bytes([turn]) * (turn * 40)
        sender, receiver = ranks[turn % 2], ranks[1 - turn % 2]
        sender.post(data)
        assert receiver.receive(drives=True) == data
    assert ranks[0].engine._get(layout.ENGINE_DRIVEN) > 100


def test_the_thread_takes_over_from_an_executor_that_stops(ranks):
    for turn in range(20):
        for rank in ranks:  # the threads leave the links to us ...
            rank.drive()
        ranks[0].send.post(bytes([turn]))
        ranks[0].engine._request_attention()
        if turn % 2:  # ... until we say so, or for DOZE_NS
            for rank in ranks:
                rank.drive(DRIVE_HAND_OVER)
        assert ranks[1].receive(drives=False) == bytes([turn])


def test_the_thread_goes_on_with_a_message_that_an_executor_has_begun(ranks):
    """The executor drives once, which moves a bounded number of bytes, and never comes back."""
    nbytes = 3 << 20  # the kernel takes all of it, so that no event follows
    memory = PrivateMemory(nbytes), PrivateMemory(nbytes)
    link, asleep = ranks[0].engine._peers[1].memory, ranks[0].engine.asleep
    link.store(layout.LINK_RAILS, 2)
    link.store(layout.LINK_QUEUE_BYTES, MIN_SEGMENT_BYTES)
    credits = layout.LINK_OUT + layout.OUT_GRANT_FOR
    ranks[1].recv.clear_to_send(memory[1].address, nbytes)
    ranks[1].drive(DRIVE_POSTED)
    wait_for(lambda: link.word(credits) == 1 and native_atomics().load_acquire(asleep) == 1)
    ranks[0].send.end = replace(ranks[0].send.end, doorbell=-1)  # it drives instead
    ranks[0].send.post_address(memory[0].address, nbytes)
    ranks[0].drive(DRIVE_POSTED)
    wait_for(lambda: ranks[1].recv.peek() is not None)


def test_links_belong_to_one_thread_at_a_time(ranks):
    lock = ranks[0].argument + layout.ENGINE_LOCK
    atomics = native_atomics()
    results = set()

    def command() -> None:  # commands run with the lock
        results.add(ranks[0].drive())
        results.add(atomics.load_acquire(lock))

    ranks[0].engine._call(command)
    assert results == {0, 1}


def test_a_lost_peer_is_reported_while_an_executor_drives(ranks):
    seen: list[int] = []
    ranks[0].engine._on_lost = lambda peer, loss: seen.append(peer)
    ranks[1].engine.abort("the test ends it")
    deadline = clock.monotonic() + WAIT_S
    while not seen and clock.monotonic() < deadline:
        ranks[0].drive()
    assert seen == [1]
