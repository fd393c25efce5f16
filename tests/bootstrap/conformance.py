"""Conformance kit of ``bootstrap.contract.Session``: what communicators rely on.

A world is made by a factory: ``open(nranks)`` gives the sessions of a job, ``kill(rank)`` ends a
rank without a goodbye. The tests of this file run for every kind of session (``test_conformance``).
"""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import pytest

from miraccl.bootstrap import Notice, PeerLeft, PeerLost, Session
from miraccl.errors import (
    BootstrapError,
    CollectiveTimeout,
    CommunicatorAborted,
    CommunicatorClosed,
    InvalidUsage,
    PeerDied,
)
from tests.bootstrap.kit import PATIENCE, Inbox, in_threads, until


class World(Protocol):
    """One job of virtual ranks whose sessions are in this process."""

    sessions: list[Session]

    def kill(self, rank: int) -> None: ...

    def close(self) -> None: ...


class SessionConformance:
    """Tests; ``world`` is a fixture that gives ``open(nranks) -> World``."""

    @pytest.fixture
    def open(self) -> Any:
        raise NotImplementedError

    def test_numbers(self, open: Any) -> None:
        sessions = open(3).sessions
        assert [s.rank for s in sessions] == [0, 1, 2]
        assert {s.nranks for s in sessions} == {3}
        assert len({s.key for s in sessions}) == 1
        for session in sessions:
            assert isinstance(session, Session)
            assert session.tokens == sessions[0].tokens
            assert len(session.addresses) == len(session.hosts) == len(session.pids) == 3
            assert not session.closed

    def test_gathers_of_one_tag_match_in_order(self, open: Any) -> None:
        sessions = open(3).sessions

        def gather(session: Session) -> list[list[bytes]]:
            return [session.all_gather(bytes([10 * i + session.rank]), "x") for i in range(5)]

        expected = [[bytes([10 * i + rank]) for rank in range(3)] for i in range(5)]
        assert in_threads([lambda s=s: gather(s) for s in sessions]) == [expected] * 3

    def test_gathers_of_different_tags_overlap(self, open: Any) -> None:
        sessions = open(2).sessions
        calls = [
            lambda s=s, tag=tag: s.all_gather(f"{tag}{s.rank}".encode(), tag)
            for tag in "abc"
            for s in sessions
        ]
        results = in_threads(calls)
        assert results[::2] == results[1::2]
        assert results[0] == [b"a0", b"a1"]

    def test_late_ranks_are_named(self, open: Any) -> None:
        sessions = open(3).sessions
        with pytest.raises(
            CollectiveTimeout, match=r"ranks 1 and 2 of 3 did not arrive within 0\.1"
        ):
            sessions[0].all_gather(b"", "x", 0.1)

    def test_a_gather_can_be_ended(self, open: Any) -> None:
        sessions = open(2).sessions
        threading.Timer(0.05, lambda: sessions[0].end_gather("x", "for a test")).start()
        with pytest.raises(CommunicatorAborted, match="for a test"):
            sessions[0].all_gather(b"", "x")
        with pytest.raises(CommunicatorAborted):
            sessions[0].all_gather(b"", "x")

    def test_a_barrier_waits_for_all(self, open: Any) -> None:
        sessions, arrived = open(3).sessions, []

        def arrive(session: Session) -> int:
            arrived.append(session.rank)
            session.barrier("b")
            return len(arrived)

        assert in_threads([lambda s=s: arrive(s) for s in sessions]) == [3, 3, 3]

    def test_notices_reach_all_others_in_order(self, open: Any) -> None:
        sessions = open(3).sessions
        inboxes = [Inbox(session) for session in sessions]
        for n in range(10):
            sessions[1].notify({"n": n})
        for rank in (0, 2):
            got = [inboxes[rank].next_of(Notice) for _ in range(10)]
            assert got == [Notice(from_rank=1, payload={"n": n}) for n in range(10)]
        sessions[1].wait_until_delivered(PATIENCE)
        assert inboxes[1].empty()
        with pytest.raises(InvalidUsage):
            sessions[1].notify({"n": object()})

    def test_events_before_the_first_callback_are_kept(self, open: Any) -> None:
        sessions = open(2).sessions
        sessions[0].notify({"n": 1})
        sessions[0].wait_until_delivered(PATIENCE)
        assert Inbox(sessions[1]).next_of(Notice).payload == {"n": 1}

    def test_drain_waits_for_what_has_arrived(self, open: Any) -> None:
        sessions, seen = open(2).sessions, list[Any]()

        def slowly(event: Any) -> None:
            time.sleep(0.05)
            seen.append(event)

        sessions[1].on_event(slowly)
        sessions[0].notify({})
        until(lambda: sessions[1].drain(PATIENCE) is None and len(seen) == 1)

    def test_a_callback_may_be_removed(self, open: Any) -> None:
        sessions, seen = open(2).sessions, list[Any]()
        callback = seen.append
        sessions[1].on_event(callback)
        sessions[1].off_event(callback)
        sessions[0].notify({})
        sessions[0].wait_until_delivered(PATIENCE)
        assert not [event for event in seen if isinstance(event, Notice)]

    def test_a_callback_cannot_wait_for_other_ranks(self, open: Any) -> None:
        sessions, caught = open(2).sessions, []

        def callback(event: Any) -> None:
            try:
                sessions[1].all_gather(b"", "x")
            except InvalidUsage as error:
                caught.append(error)

        sessions[1].on_event(callback)
        sessions[0].notify({})
        until(lambda: bool(caught))

    def test_status_of_all_ranks(self, open: Any) -> None:
        sessions = open(3).sessions
        for session in sessions:
            session.status_provider = lambda rank=session.rank: {"is": rank}
        answers = sessions[1].request_status(PATIENCE)
        assert [answers[rank]["status"] for rank in range(3)] == [{"is": 0}, {"is": 1}, {"is": 2}]
        assert all(answer["answered"] and answer["threads"] for answer in answers.values())

    def test_a_death_is_an_event_and_ends_gathers(self, open: Any) -> None:
        world = open(3)
        sessions = world.sessions
        inbox, waits = Inbox(sessions[2]), []
        waiting = threading.Thread(
            target=lambda: waits.extend(in_threads([lambda: sessions[0].all_gather(b"", "x")]))
        )
        waiting.start()
        world.kill(1)
        lost = inbox.next_of(PeerLost)
        assert lost.rank == 1
        waiting.join(PATIENCE)
        assert isinstance(waits[0], PeerDied)
        assert waits[0].peer == 1
        assert sessions[2].gone() == {1}
        with pytest.raises(PeerDied, match="rank 1 of 3 died"):
            sessions[2].all_gather(b"", "x")
        assert not sessions[2].request_status(PATIENCE)[1]["answered"]

    def test_the_others_go_on_after_a_death(self, open: Any) -> None:
        world = open(4)
        inboxes = {rank: Inbox(world.sessions[rank]) for rank in (1, 2, 3)}
        world.kill(0)
        for inbox in inboxes.values():
            assert inbox.next_of(PeerLost).rank == 0
        parts = [world.sessions[rank].subgroup([3, 1, 2], "part") for rank in (1, 2, 3)]
        assert [part.rank for part in parts] == [1, 2, 0]
        gathered = in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in parts])
        assert gathered == [[b"\0", b"\1", b"\2"]] * 3
        assert all(a["answered"] for a in parts[0].request_status(PATIENCE).values())

    def test_a_goodbye_is_not_a_death(self, open: Any) -> None:
        sessions = open(3).sessions
        inbox = Inbox(sessions[0])
        sessions[1].close("done")
        assert inbox.next_of(PeerLeft) == PeerLeft(rank=1, reason="done")
        with pytest.raises(BootstrapError, match="rank 1 of 3 left: done") as caught:
            sessions[2].all_gather(b"", "x")
        assert not isinstance(caught.value, PeerDied)

    def test_subgroups_are_sessions_of_their_own(self, open: Any) -> None:
        sessions = open(4).sessions
        evens = [sessions[rank].subgroup([2, 0], "even") for rank in (2, 0)]
        odds = [sessions[rank].subgroup([1, 3], "odd") for rank in (1, 3)]
        assert [s.rank for s in evens] == [0, 1]
        assert evens[0].key != odds[0].key != sessions[0].key
        assert evens[0].data_key != evens[0].subgroup([0], "x").data_key
        results = in_threads(
            [lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in [*evens, *odds]]
        )
        assert results == [[b"\0", b"\1"]] * 4
        inbox = Inbox(odds[1])
        odds[0].notify({})
        assert inbox.next_of(Notice).from_rank == 0
        sessions[1].close()
        assert in_threads([lambda s=s: s.all_gather(b"", "y") for s in odds]) == [[b"", b""]] * 2
        with pytest.raises(InvalidUsage):
            sessions[0].subgroup([1, 2], "not mine")
        with pytest.raises(InvalidUsage):
            sessions[0].subgroup([0, 0], "twice")

    def test_leaving_a_subgroup_is_seen_there_only(self, open: Any) -> None:
        sessions = open(2).sessions
        parts = [s.subgroup([0, 1], "part") for s in sessions]
        world, part = Inbox(sessions[0]), Inbox(parts[0])
        parts[1].close("enough")
        assert part.next_of(PeerLeft) == PeerLeft(rank=1, reason="enough")
        sessions[1].notify({})
        assert isinstance(world.next(), Notice)

    def test_a_closed_session_refuses_calls(self, open: Any) -> None:
        sessions = open(2).sessions
        sessions[0].close()
        sessions[0].close()
        assert sessions[0].closed
        for call in (
            lambda: sessions[0].all_gather(b"", "x"),
            lambda: sessions[0].notify({}),
            lambda: sessions[0].request_status(),
            lambda: sessions[0].subgroup([0], "x"),
        ):
            with pytest.raises(CommunicatorClosed):
                call()

    def test_closing_ends_the_calls_of_other_threads(self, open: Any) -> None:
        sessions, results = open(2).sessions, []
        waiting = threading.Thread(
            target=lambda: results.extend(in_threads([lambda: sessions[0].all_gather(b"", "x")]))
        )
        waiting.start()
        time.sleep(0.05)
        sessions[0].close()
        waiting.join(PATIENCE)
        assert isinstance(results[0], CommunicatorClosed)
