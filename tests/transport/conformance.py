"""Conformance tests of transports: a class fed by a factory.

    class TestMine(TransportConformance):
        spec = MINE

        def build(self, nranks): return World(...)

All ranks live in this process, which plays their executors with ``transport.ends``; these never
wait, ``World.wait`` does for a bounded time. Where kinds of transports differ (messages in flight,
in-place delivery), the capabilities in ``spec`` decide.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from miraccl.errors import ProtocolError
from miraccl.transport.base import Capability, Endpoint, FifoPair, Transport
from miraccl.transport.ends import ReceivedMessage, RecvEnd, SendEnd
from miraccl.transport.fifo import (
    INLINE_BYTES,
    NSLOTS,
    Atomics,
    Mode,
    PrivateMemory,
    memory_at,
    native_atomics,
)
from miraccl.transport.registry import TransportSpec
from miraccl.wire.proxy_records import Loss

WAIT_S = 20.0
"""Far more than anything here takes; only a failing test waits that long."""


POSTS_ADDRESSES = Capability.NEEDS_PROGRESS | Capability.IN_PLACE
"""Transports with progress but without in-place delivery cannot carry a posted address."""


@dataclass
class World:
    """Connected ranks.  ``cleanup`` closes everything; ``news`` is set by the transports' wake-
    ups.
    """

    transports: dict[int, Transport]
    pairs: dict[int, dict[int, FifoPair]] = field(default_factory=dict)
    atomics: Atomics = field(default_factory=native_atomics)
    news: threading.Event = field(default_factory=threading.Event)
    losses: dict[int, list[tuple[int, Loss]]] = field(default_factory=dict)
    cleanup: ExitStack = field(default_factory=ExitStack)

    def connect(self) -> None:
        """All ranks at once, each in a thread, as real ranks would."""
        infos = {rank: transport.setup() for rank, transport in self.transports.items()}
        self.in_parallel(
            lambda rank: self.connect_rank(rank, {r: i for r, i in infos.items() if r != rank})
        )

    def connect_rank(self, rank: int, infos: Mapping[int, bytes]) -> None:
        self.pairs.setdefault(rank, {}).update(self.transports[rank].connect(infos))

    def in_parallel(self, action: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                action(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in self.transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]

    def wait(self, condition: Callable[[], object], what: str = "nothing happened") -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.news.wait(0.02)
            self.news.clear()

    def way(self, source: int, destination: int) -> Way:
        return Way(self, source, destination)

    def close(self) -> None:
        self.cleanup.close()


class Way:
    """Messages from one rank to another, played by hand."""

    def __init__(self, world: World, source: int, destination: int) -> None:
        self.world = world
        self.send = SendEnd(world.pairs[source][destination].send, world.atomics)
        self.recv = RecvEnd(world.pairs[destination][source].recv, world.atomics)

    @property
    def slot_bytes(self) -> int:
        return self.recv.end.slot_bytes

    @property
    def limit(self) -> int:
        """Messages that can be posted while the receiver consumes none: a proxy has a ring on each
        side.
        """
        return NSLOTS * (2 if Capability.NEEDS_PROGRESS in self.send.end.capabilities else 1)

    def post(self, payload: bytes, signature: int = 0) -> None:
        self.world.wait(lambda: self.send.post(payload, signature=signature), "no slot became free")

    def next(self) -> ReceivedMessage:
        self.world.wait(lambda: self.recv.peek() is not None, "no message came")
        message = self.recv.peek()
        assert message is not None
        return message

    def take(self) -> tuple[bytes, ReceivedMessage]:
        message = self.next()
        assert message.payload is not None
        data = bytes(message.payload)
        self.recv.consume()
        return data, message


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes in which no two stretches look the same."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(nbytes)


class TransportConformance:
    """The tests; see the head of this file."""

    spec: TransportSpec
    buffered = 0  # messages that the medium holds at most, beside the rings of both sides

    def build(self, nranks: int) -> World:
        raise NotImplementedError

    @pytest.fixture
    def make(self):
        with ExitStack() as stack:

            def make(nranks: int = 2) -> World:
                world = self.build(nranks)
                stack.callback(world.close)
                world.connect()
                return world

            yield make

    # --- one message

    @pytest.mark.parametrize("mode", [Mode.INLINE, Mode.SLOT])
    def test_sizes_around_every_limit(self, make, mode):
        world = make()
        there, back = world.way(0, 1), world.way(1, 0)
        largest = INLINE_BYTES if mode is Mode.INLINE else there.slot_bytes
        sizes = {0, 1, 31, INLINE_BYTES, INLINE_BYTES + 1, 4095, 4096, 4097, largest - 1, largest}
        for way in (there, back):
            for nbytes in sorted(n for n in sizes if n <= largest):
                payload = pattern(nbytes, nbytes)
                world.wait(
                    lambda way=way, payload=payload, n=nbytes: way.send.post(
                        payload, signature=-n - 1, mode=mode
                    )
                )
                data, message = way.take()
                assert data == payload
                assert message.signature == -nbytes - 1
                assert message.mode in (Mode.INLINE, Mode.SLOT)

    def test_signature_keeps_all_64_bits(self, make):
        way = make().way(0, 1)
        for signature in (-(1 << 63), (1 << 63) - 1, 0, -1, 0x0123456789ABCDEF):
            way.post(b"x", signature)
            assert way.take()[1].signature == signature

    @pytest.mark.parametrize("extra", [-1, 0, 1, "several slots"])
    def test_memory_posted_by_address_arrives_and_is_given_back(self, make, extra):
        if self.spec.capabilities & POSTS_ADDRESSES == Capability.NEEDS_PROGRESS:
            pytest.skip("the transport moves slots only")
        world = make()
        way = world.way(0, 1)
        nbytes = way.slot_bytes * 5 + 13 if extra == "several slots" else way.slot_bytes + extra
        source, target = PrivateMemory(nbytes), PrivateMemory(nbytes + 1)
        memory_at(source.address, nbytes)[:] = pattern(nbytes)
        for early in (True, False):
            memory_at(target.address, nbytes)[:] = bytes(nbytes)
            if early:
                way.recv.clear_to_send(target.address, nbytes)
            assert way.send.post_address(source.address, nbytes, signature=9)
            if not early:
                way.recv.clear_to_send(target.address, nbytes)
            data, message = way.take()
            assert data == pattern(nbytes)
            assert message.signature == 9
            if message.mode is Mode.LANDED:
                assert memory_at(target.address, nbytes) == pattern(nbytes)
            world.wait(
                lambda: way.send.released == way.send.posted, "the sender never got its memory back"
            )

    # --- many messages

    def test_messages_come_in_order_whatever_their_sizes(self, make):
        way = make().way(0, 1)
        sizes = [(7919 * i) % (way.slot_bytes + 1) if i % 3 else i % 40 for i in range(120)]
        sent = 0
        for i, nbytes in enumerate(sizes):
            if sent == i:  # nothing is under way: this one must come through
                way.post(pattern(nbytes, i), i)
                sent += 1
            while sent < len(sizes) and way.send.post(pattern(sizes[sent], sent), signature=sent):
                sent += 1
            data, message = way.take()
            assert (message.number, message.signature) == (i, i)
            assert data == pattern(nbytes, i)

    def test_sender_never_overruns_a_receiver_that_does_not_consume(self, make):
        world = make()
        way = world.way(0, 1)
        posted = 0
        while posted < NSLOTS:
            assert way.send.post(pattern(100, posted))
            posted += 1
        world.wait(lambda: way.recv.peek())
        # Give a transport that would overrun every chance: post as much as it lets us, and wait
        # until it lets us.
        while posted < way.limit:
            world.wait(
                lambda p=posted: way.send.post(pattern(100, p)),
                "the transport holds less than it says",
            )
            posted += 1
        while way.send.post(pattern(100, posted)):
            posted += 1
            assert posted <= way.limit + self.buffered, "the transport posts without limit"
        for i in range(posted):
            assert way.take()[0] == pattern(100, i)
        way.post(b"goes on")
        assert way.take()[0] == b"goes on"

    def test_nslots_messages_are_always_in_flight(self, make):
        """The depth that schedules are verified with: post succeeds whenever fewer than NSLOTS
        messages are not consumed.
        """
        way = make().way(0, 1)
        for i in range(NSLOTS):
            way.post(pattern(200, i))
        for i in range(NSLOTS, NSLOTS + 30):
            assert way.take()[0] == pattern(200, i - NSLOTS)
            way.post(pattern(200, i))

    def test_both_directions_at_once(self, make):
        world = make()
        ways = [world.way(0, 1), world.way(1, 0)]
        total, sent, got = 150, [0, 0], [0, 0]
        sizes = [5, ways[0].slot_bytes, 33, 1000]

        def step() -> bool:
            for i, way in enumerate(ways):
                if sent[i] < total and way.send.post(
                    pattern(sizes[sent[i] % 4], sent[i] + i), signature=i
                ):
                    sent[i] += 1
                if way.recv.peek():
                    data, message = way.take()
                    assert data == pattern(sizes[got[i] % 4], got[i] + i)
                    assert message.signature == i
                    got[i] += 1
            return got == [total, total]

        deadline = time.monotonic() + WAIT_S
        while not step():
            assert time.monotonic() < deadline, f"stuck after {got} messages"
            world.news.wait(0.001)
            world.news.clear()

    def test_two_peers_at_once_are_kept_apart(self, make):
        world = make(3)
        routes = [(a, b) for a in range(3) for b in range(3) if a != b]
        ways = {route: world.way(*route) for route in routes}
        for i in range(20):
            for number, route in enumerate(routes):
                ways[route].post(pattern(50 + 100 * number, i), signature=number)
            for number, route in reversed(list(enumerate(routes))):
                data, message = ways[route].take()
                assert data == pattern(50 + 100 * number, i)
                assert message.signature == number

    # --- life

    def test_setup_is_repeatable_and_a_bad_description_is_refused(self, make):
        world = make()
        transport = world.transports[0]
        assert transport.setup() == transport.setup()
        for bad in (b"", b"{}", b"[1,2,3]", b"\xff" * 40, transport.setup()[:-3]):
            with pytest.raises(ProtocolError):
                transport.connect({7: bad})

    def test_score_is_symmetric(self):
        score = self.spec.score
        here = Endpoint(rank=0, hostid="a", pid=1, addresses=("10.0.0.1", "fd00::1"))
        others = [
            Endpoint(rank=1, hostid="a", pid=2, addresses=("10.0.0.2",)),
            Endpoint(rank=2, hostid="b", pid=2, addresses=("fd00::2",)),
            Endpoint(rank=3, hostid="c", pid=2),
        ]
        for other in others:
            assert score(here, other) == score(other, here)
            assert score(here, here)[0] == 0

    def test_pairs_have_the_capabilities_of_the_transport(self, make):
        world = make()
        for pairs in world.pairs.values():
            for pair in pairs.values():
                assert pair.capabilities == self.spec.capabilities
                assert pair.recv.capabilities == self.spec.capabilities
                progressed = Capability.NEEDS_PROGRESS in pair.capabilities
                assert progressed == (pair.send.doorbell >= 0) == (pair.send.asleep != 0)
                assert progressed or pair.control
                assert Capability.ONE_SIDED not in pair.capabilities or pair.window

    def test_close_twice(self, make):
        world = make()
        way = world.way(0, 1)
        way.post(b"last word")
        assert way.take()[0] == b"last word"
        world.in_parallel(lambda rank: world.transports[rank].close())
        world.in_parallel(lambda rank: world.transports[rank].close())

    def test_close_while_messages_are_under_way(self, make):
        world = make()
        there, back = world.way(0, 1), world.way(1, 0)
        for i in range(NSLOTS):
            there.post(pattern(there.slot_bytes, i))
            back.post(pattern(10, i))
        world.in_parallel(lambda rank: world.transports[rank].close())
