"""Every kind of session fulfils the contract: over TCP, after a failover, and in one process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from miraccl import clock
from miraccl.bootstrap import InMemoryJob, Session, connect, create_hub, lifetime
from miraccl.bootstrap.link import SocketLink
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import CollectiveTimeout
from tests.bootstrap.conformance import SessionConformance
from tests.bootstrap.kit import PATIENCE, in_threads


class SocketWorld:
    """Ranks as threads; the hub belongs to no rank."""

    def __init__(self, nranks: int, *, failover: bool = False) -> None:
        unique_id, self._hub = create_hub(nranks=nranks, hosts=["127.0.0.1"])
        self.sessions: list[Session] = in_threads(
            [
                lambda r=r: connect(unique_id, r, nranks, PATIENCE, session_timeout=PATIENCE)
                for r in range(nranks)
            ]
        )
        if failover:
            self._hub.close("for a test")
            in_threads([lambda s=s: s.barrier("failover") for s in self.sessions])

    def kill(self, rank: int) -> None:
        session = self.sessions[rank]
        assert isinstance(session, LinkSession)
        assert isinstance(session._link, SocketLink)
        session._link._closed = True  # it does not look for another hub
        session._link._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for session in self.sessions:
            session.close()
            assert isinstance(session, LinkSession)
            assert session._link is not None
            session._link.close("the test ends")  # sessions split from it may be open
        for hub in list(lifetime.hubs):
            assert hub.join(PATIENCE)


World = SocketWorld | InMemoryJob


def _opened(make: Callable[[int], World]) -> Iterator[Callable[[int], World]]:
    worlds: list[World] = []

    def open_world(nranks: int) -> World:
        worlds.append(make(nranks))
        return worlds[-1]

    yield open_world
    for world in worlds:
        world.close()


class TestSocketSession(SessionConformance):
    @pytest.fixture
    def open(self) -> Iterator[Callable[[int], World]]:
        yield from _opened(SocketWorld)


class TestSessionAfterFailover(SessionConformance):
    @pytest.fixture
    def open(self) -> Iterator[Callable[[int], World]]:
        yield from _opened(lambda nranks: SocketWorld(nranks, failover=True))


class TestInMemorySession(SessionConformance):
    @pytest.fixture
    def open(self) -> Iterator[Callable[[int], World]]:
        yield from _opened(lambda nranks: InMemoryJob(nranks, timeout=PATIENCE))


def test_deadlines_of_virtual_ranks_pass_without_waiting() -> None:
    with clock.use(clock.VirtualClock()):
        job = InMemoryJob(2, timeout=3600.0)
        with pytest.raises(CollectiveTimeout, match=r"did not arrive within 3\.6e\+03 s"):
            job.sessions[0].all_gather(b"", "x")
        job.close()


def test_many_virtual_ranks() -> None:
    with InMemoryJob(64) as job:
        sums = in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in job.sessions])
        assert sums == [[bytes([rank]) for rank in range(64)]] * 64
