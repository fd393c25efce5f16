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
from miraccl.proxy.kernels.progress_engine import (
    DRIVE_HAND_OVER,
    DRIVE_POLL,
    DRIVE_POSTED,
    DRIVE_SLEEP,
)
from miraccl.proxy.verbs.packet_engine import VerbsDatagramEngine
from miraccl.sim.verbs_wire import Wire
from miraccl.transport.base import FifoPair
from miraccl.transport.ends import RecvEnd, SendEnd
from miraccl.transport.fifo import PrivateMemory, native_atomics
from miraccl.transport.verbs_packets import PairKind
from miraccl.wire.stream import MIN_SEGMENT_BYTES
from tests.transport.conformance import WAIT_S, World
from tests.transport.socket_world import build_world
from tests.transport.verbs_world import build_verbs_world


class Rank:
    """One rank with its engine and its ends of the pair."""

    def __init__(self, engine: Any, pair: FifoPair) -> None:
        self.engine = engine
        driving = self.engine.driver(overlap=False)
        self.argument, self.sleeps = driving.argument, driving.sleeps
        self._drive = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(driving.function)
        atomics = native_atomics()
        self.send, self.recv = SendEnd(pair.send, atomics), RecvEnd(pair.recv, atomics)

    def drive(self, mode: int = DRIVE_POLL, nanoseconds: int = 0) -> int:
        return int(self._drive(self.argument, mode, nanoseconds, 0))

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


def connect(world: World) -> list[FifoPair]:
    """Connect two ranks; return their ends."""
    infos = {rank: t.setup() for rank, t in world.transports.items()}
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda r: world.transports[r].connect({1 - r: infos[1 - r]}), range(2))
        return [pairs[1 - rank] for rank, pairs in enumerate(made)]


@pytest.fixture
def tcp_ranks():
    world: Any = build_world(2)
    pairs = connect(world)
    yield [Rank(world.transports[rank]._proxy, pair) for rank, pair in enumerate(pairs)]
    world.close()


@pytest.fixture(params=["tcp", "rc", "ud"])
def ranks(request, monkeypatch):
    monkeypatch.setattr("miraccl.proxy.verbs.engine.has_one_core", lambda: False)
    monkeypatch.setattr(VerbsDatagramEngine, "can_be_driven", True)
    if request.param == "tcp":
        yield request.getfixturevalue("tcp_ranks")
        return
    kind = None if request.param == "rc" else PairKind.UD
    world = build_verbs_world(2, kind=kind)
    pairs = connect(world)
    engines: Any = world.packet_engines if kind else world.engines
    yield [Rank(engines[rank], pair) for rank, pair in enumerate(pairs)]
    world.close()


@pytest.fixture(params=[None, PairKind.UD, PairKind.UC])
def one_core_ranks(request, monkeypatch):
    for module in ("verbs.engine", "verbs.packet_engine", "compiled_thread"):
        monkeypatch.setattr(f"miraccl.proxy.{module}.has_one_core", lambda: True)
    world = build_verbs_world(2, kind=request.param)
    pairs = connect(world)
    engines: Any = world.packet_engines if request.param else world.engines
    yield [Rank(engines[rank], pair) for rank, pair in enumerate(pairs)]
    world.close()


def receive_asleep(rank: Rank) -> bytes:
    """Receive a message; a wake-up that is lost takes much longer than the test may."""
    while (message := rank.recv.peek()) is None:
        if not rank.drive(DRIVE_SLEEP, int(10 * WAIT_S * 1e9)):
            rank.drive(DRIVE_HAND_OVER)
    assert message.payload is not None
    data = bytes(message.payload)
    rank.recv.consume()
    return data


def test_executors_with_a_single_core_sleep_in_drive(one_core_ranks):
    turns = 100

    def answer() -> None:
        for turn in range(turns):
            one_core_ranks[1].post(receive_asleep(one_core_ranks[1]) + bytes([turn]))

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(answer)
        for turn in range(turns):
            data = bytes([turn]) * (turn * 40)
            one_core_ranks[0].post(data)
            assert receive_asleep(one_core_ranks[0]) == data + bytes([turn])
        done.result(WAIT_S)
    assert all(rank.sleeps for rank in one_core_ranks)


def test_the_thread_posts_what_an_executor_has_deferred(one_core_ranks):
    """The executor publishes messages while one is in flight, and never waits."""
    sender, receiver = one_core_ranks
    for turn in range(5):
        sender.drive()  # the thread dozes from now on
        for part in range(4):
            sender.post(bytes([turn, part]))
        for part in range(4):
            assert receiver.receive(drives=False) == bytes([turn, part])


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


def check_goes_on(ranks: list[Rank], nbytes: int) -> None:
    """An executor drives once, which moves a bounded number of bytes, and never comes back: the
    thread moves the rest. The kernel takes all of it, so that no event follows.
    """
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


def test_the_thread_goes_on_with_a_message_that_an_executor_has_begun(tcp_ranks):
    check_goes_on(tcp_ranks, 3 << 20)


def test_a_write_queues_a_segment_on_a_stream_that_had_its_turn(tcp_ranks):
    """Over networks of known rates, two segments of three go to stream 1; the write of the first
    one makes stream 0 the better one for the third, and stream 0 has been written in this round.
    """
    link = tcp_ranks[0].engine._peers[1].memory
    link.store(layout.LINK_MEASURED, 1 << 62)  # never again
    for stream, rate in enumerate((1000, 3000)):
        start = layout.LINK_STREAMS + stream * layout.STREAM_BYTES
        link.store(start + layout.STREAM_RATE, rate)
    check_goes_on(tcp_ranks, 3 * MIN_SEGMENT_BYTES)


def test_the_thread_repeats_a_packet_that_an_executor_has_sent(monkeypatch):
    """A packet is lost, and the executor that has sent it never comes back."""
    lost: list[object] = []

    def fate(pair, request):
        lose = lost == [] and request.nbytes > 2000
        lost.extend([request] * lose)
        return () if lose else (0,)

    monkeypatch.setattr(VerbsDatagramEngine, "can_be_driven", True)
    world = build_verbs_world(2, kind=PairKind.UD, wire=Wire(fate=fate))
    ranks = [Rank(world.packet_engines[r], pair) for r, pair in enumerate(connect(world))]
    asleep = ranks[0].engine.asleep
    wait_for(lambda: native_atomics().load_acquire(asleep) == 1)
    ranks[0].send.end = replace(ranks[0].send.end, doorbell=-1)  # it drives instead
    assert ranks[0].send.post(b"x" * 3000)
    while not ranks[0].drive(DRIVE_POSTED):
        pass
    assert ranks[1].receive(drives=False) == b"x" * 3000
    assert lost
    world.close()


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
