"""Sessions over real sockets, ranks as threads."""

from __future__ import annotations

import os
import select
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from miraccl.bootstrap import (
    Notice,
    PeerLeft,
    StatusRequest,
    UniqueId,
    connect,
    control_link,
    create_hub,
    dial,
    get_unique_id,
    join,
    single_rank_session,
)
from miraccl.bootstrap.link import SocketLink
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import (
    AuthenticationError,
    BootstrapError,
    CollectiveTimeout,
    CommunicatorClosed,
    InvalidUsage,
    PeerDied,
    SystemFailure,
)
from miraccl.host import host_fingerprint, network_fingerprint
from miraccl.wire.bootstrap import Received
from tests.bootstrap.kit import (
    PATIENCE,
    Inbox,
    free_port,
    in_threads,
    job,
    needs_ipv6,
    raises_at_the_deadline,
    until,
)


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(("127.0.0.1",), id="v4"),
        pytest.param(("::1",), id="v6", marks=needs_ipv6),
        pytest.param(("127.0.0.1", "::1"), id="both"),
        pytest.param(None, id="default"),
    ],
)
def test_ranks_meet_and_gather(hosts):
    with job(4, hosts) as sessions:
        assert [(s.rank, s.nranks) for s in sessions] == [(r, 4) for r in range(4)]
        results = in_threads(
            [lambda s=s: s.all_gather(bytes([s.rank]) * s.rank, "x") for s in sessions]
        )
        assert results == [[b"", b"\1", b"\2\2", b"\3\3\3"]] * 4
        assert all(len(set(s.hosts)) == 1 for s in sessions)
        assert all(s.addresses in (["127.0.0.1"] * 4, ["::1"] * 4) for s in sessions)


def test_ranks_join_in_any_order():
    port = free_port()
    unique_id = UniqueId(addresses=(("127.0.0.1", port),), secret=b"s" * 32)
    tried = threading.Event()

    def root_later():
        assert tried.wait(PATIENCE)
        return create_hub(hosts=["127.0.0.1"], port=port, secret=b"s" * 32)[1]

    def rank(number):
        if number == 2:
            tried.set()
        return connect(unique_id, number, 3, PATIENCE)

    root, *sessions = in_threads(
        [root_later, *(lambda number=number: rank(number) for number in (2, 0, 1))]
    )
    assert [s.rank for s in sessions] == [2, 0, 1]
    for session in sessions:
        session.close()
    assert root.join(PATIENCE)


@pytest.mark.parametrize("moment", ["before the link", "as soon as the link has it"])
def test_hub_that_hangs_up_at_once_is_retried(monkeypatch, moment):
    """The hub of the port's last job does so; the watcher may have closed the socket before the
    first
    message is sent.
    """
    hung_up: list[socket.socket] = []

    class Fleeting(SocketLink):
        def __init__(self, sock, machine, **kwargs):
            if not hung_up:
                hung_up.append(sock)
                sock.shutdown(socket.SHUT_RDWR)
            super().__init__(sock, machine, **kwargs)
            if hung_up == [sock]:
                until(lambda: sock.fileno() < 0)

    def read(sock, *args):
        if not hung_up:
            hung_up.append(sock)
            sock.shutdown(socket.SHUT_RDWR)
        return original(sock, *args)

    original = join._join
    if moment == "before the link":
        monkeypatch.setattr(join, "_join", read)
    else:
        monkeypatch.setattr(join, "SocketLink", Fleeting)
    with job(2) as sessions:
        assert sorted(session.rank for session in sessions) == [0, 1]
    assert hung_up


def test_connection_reset_at_once_is_retried(monkeypatch):
    """A process closes its port with the connection still queued: the kernel reports it as
    connected,
    then without a peer.
    """
    taken = socket.create_server(("127.0.0.1", 0))
    address = taken.getsockname()

    class Reset(socket.socket):
        def getsockopt(self, *args):
            problem = super().getsockopt(*args)
            if (
                args == (socket.SOL_SOCKET, socket.SO_ERROR)
                and taken.fileno() >= 0
                and self.getpeername() == address
            ):
                taken.close()
                poll = select.poll()
                poll.register(self, select.POLLHUP)
                assert poll.poll(PATIENCE * 1000)
            return problem

    monkeypatch.setattr(dial, "socket", SimpleNamespace(**{**vars(socket), "socket": Reset}))
    ids = [create_hub(hosts=["127.0.0.1"], nranks=2)[0]]
    ids.append(replace(ids[0], addresses=(address, *ids[0].addresses)))
    for session in in_threads(
        [lambda rank=rank: connect(ids[rank], rank, 2, PATIENCE) for rank in range(2)]
    ):
        session.close()
    assert taken.fileno() < 0


def test_largest_gather():
    data = bytes(300_000)
    with job(3) as sessions:
        assert (
            in_threads([lambda s=s: s.all_gather(data, "big") for s in sessions])
            == [[data] * 3] * 3
        )
        with pytest.raises(InvalidUsage, match="at most"):
            sessions[0].all_gather(bytes(30 << 20), "too big")


def test_gathers_of_several_threads_do_not_mix():
    with job(2) as sessions:
        calls = [
            lambda s=s, t=t: [s.all_gather(f"{t}{i}".encode(), t) for i in range(5)]
            for s in sessions
            for t in "abc"
        ]
        results = in_threads(calls)
        assert results == [
            [[f"{t}{i}".encode()] * 2 for i in range(5)] for _ in sessions for t in "abc"
        ]


def test_barrier_waits_for_the_last_rank():
    with job(2) as sessions:
        passed = threading.Event()

        def first():
            sessions[0].barrier("b")
            passed.set()

        threading.Thread(target=first, daemon=True).start()
        assert not passed.is_set()
        sessions[1].barrier("b")
        assert passed.wait(PATIENCE)


# --- errors of the meeting ---


def test_missing_ranks_are_named(patience_of_the_hub):
    unique_id, root = create_hub(hosts=["127.0.0.1"])

    def impatient():
        until(lambda: len(root._machine._ranks) == 5)
        return connect(unique_id, 7, 8, patience_of_the_hub(0.2))

    with root:
        errors = in_threads(
            [impatient, *(lambda r=r: connect(unique_id, r, 8, PATIENCE) for r in (0, 1, 3, 4, 6))]
        )
    for error in errors:
        assert isinstance(error, BootstrapError)
        assert "ranks 2 and 5 of 8 did not join within the 0.2 s timeout of rank 7" in str(error)


def test_unreachable_address_is_named_with_the_reason():
    port = free_port()
    unique_id = UniqueId(addresses=(("127.0.0.1", port),), secret=b"s" * 32)
    raises_at_the_deadline(
        rf"127\.0\.0\.1:{port}: Connection refused",
        lambda seconds: connect(unique_id, 1, 2, seconds),
    )


def test_survivor_that_joins_again_is_not_blamed() -> None:
    """The job at the address still runs: that is the reason, not the process that joins."""
    unique_id, hub = create_hub(nranks=2, hosts=["127.0.0.1"])
    first: list[LinkSession] = in_threads(
        [lambda r=r: connect(unique_id, r, 2, PATIENCE, session_timeout=PATIENCE) for r in range(2)]
    )
    first[1].close("in order to join again")
    with pytest.raises(BootstrapError) as caught:
        connect(unique_id, 1, 2, 2.0)
    text = str(caught.value)
    assert "the job at this control plane has formed already and still runs" in text
    assert "its rank 1 has left (in order to join again)" in text
    assert "shrink()" in text
    assert "is taken" not in text
    with pytest.raises(BootstrapError, match="joined twice"):
        connect(unique_id, 0, 2, 2.0)
    first[0].close()
    assert hub.join(PATIENCE)


def test_unknown_host_name_is_reported():
    unique_id = UniqueId(addresses=(("no-such-host.invalid", 1),), secret=b"s" * 32)
    raises_at_the_deadline(
        r"no-such-host\.invalid: the name cannot be resolved",
        lambda seconds: connect(unique_id, 1, 2, seconds),
    )


def test_a_rank_number_used_twice():
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    refused = threading.Event()

    def rank_1():
        try:
            return connect(unique_id, 1, 2, PATIENCE)
        except BootstrapError:
            refused.set()
            raise

    def rank_0():
        assert refused.wait(PATIENCE)
        return connect(unique_id, 0, 2, PATIENCE)

    first, *twins = in_threads([rank_0, rank_1, rank_1])
    (error,) = [twin for twin in twins if isinstance(twin, BootstrapError)]
    assert f"rank 1 is taken: process {os.getpid()} joined twice, as if two of its threads" in str(
        error
    )
    assert "each process needs its own rank" in str(error)
    for session in (first, *twins):
        if session is not error:
            session.close()


def test_duplicate_after_the_rendezvous():
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    a, b = in_threads([lambda r=r: connect(unique_id, r, 2, PATIENCE) for r in range(2)])
    with a, b, pytest.raises(BootstrapError, match="rank 1 is taken"):
        connect(unique_id, 1, 2, PATIENCE)


def test_different_nranks():
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    with root:
        results = in_threads(
            [lambda: connect(unique_id, 0, 2, PATIENCE), lambda: connect(unique_id, 1, 3, PATIENCE)]
        )
    for error in results:
        assert isinstance(error, BootstrapError)
        assert "nranks=2" in str(error)
        assert "nranks=3" in str(error)


@pytest.mark.parametrize(("rank", "nranks"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_out_of_range(rank, nranks):
    unique_id = UniqueId(addresses=(("127.0.0.1", 1),), secret=b"s" * 32)
    with pytest.raises(BootstrapError, match="out of range"):
        connect(unique_id, rank, nranks, 1.0)


def test_wrong_secret_is_detected_at_once():
    unique_id, root = create_hub(hosts=["127.0.0.1"])
    wrong = UniqueId(addresses=unique_id.addresses, secret=b"?" * 32)
    with root, pytest.raises(AuthenticationError, match="same unique id"):
        connect(wrong, 0, 2, PATIENCE)


def test_another_version_is_named():
    unique_id = UniqueId(addresses=(("127.0.0.1", 1),), secret=b"s" * 32, version=9)
    with pytest.raises(BootstrapError, match=r"version 9, this is version"):
        connect(unique_id, 0, 2, PATIENCE)


def test_a_port_that_cannot_be_listened_on():
    with pytest.raises(SystemFailure, match=r"cannot listen .* on 192\.0\.2\.77"):
        create_hub(hosts=["192.0.2.77"])


def test_hub_closed_during_rendezvous():
    joined = threading.Event()

    class Log(list[object]):
        def append(self, event: object) -> None:
            super().append(event)
            if len([e for e in self if isinstance(e, Received)]) == 2:  # Hello; Proof and Join
                joined.set()

    unique_id, root = create_hub(hosts=["127.0.0.1"], log=Log())

    def close():
        assert joined.wait(PATIENCE)
        root.close("not today")

    error, _ = in_threads([lambda: connect(unique_id, 0, 2, PATIENCE), close])
    assert isinstance(error, BootstrapError)
    assert "the control plane closed before all ranks had joined: not today" in str(error)


# --- the job ---


def test_late_ranks_are_named_by_those_who_wait(monkeypatch):
    monkeypatch.setattr(
        control_link, "GRACE_SECONDS", PATIENCE
    )  # for the hub, which tells who is late
    with job(3) as sessions:
        with pytest.raises(
            CollectiveTimeout,
            match=r"all_gather 'plan' of world: ranks 1 and 2 of 3 did not arrive within 0\.1 s",
        ):
            sessions[0].all_gather(b"", "plan", timeout=0.1)
        with pytest.raises(CollectiveTimeout):
            sessions[0].barrier("b", timeout=0.0)


@pytest.mark.parametrize(
    "timeout", [3e6, float("inf")]
)  # a month is more milliseconds than epoll can count
def test_a_rank_may_wait_for_months(timeout):
    log: list[object] = []
    unique_id, root = create_hub(hosts=["127.0.0.1"], log=log)
    with root:
        sessions = in_threads(
            [lambda rank=rank: connect(unique_id, rank, 2, timeout) for rank in range(2)]
        )
        met = len(log)

        def late():
            until(lambda: len(log) > met)  # the hub knows of the other one's deadline and sleeps
            return sessions[1].all_gather(b"1", "x")

        assert (
            in_threads([lambda: sessions[0].all_gather(b"0", "x", timeout=timeout), late])
            == [[b"0", b"1"]] * 2
        )
        for session in sessions:
            session.close()


def test_gather_with_a_rank_that_left_ends_at_once():
    with job(3) as sessions:
        inbox = Inbox(sessions[0])
        waiting = threading.Thread(target=sessions[2].close, args=("its part is done",))
        waiting.start()
        with pytest.raises(BootstrapError, match="rank 2 of 3 left: its part is done") as caught:
            sessions[0].all_gather(b"", "x")
        assert not isinstance(caught.value, PeerDied)
        assert inbox.next() == PeerLeft(rank=2, reason="its part is done")
        waiting.join(PATIENCE)


def test_notices_reach_the_others_in_order():
    with job(3) as sessions:
        inboxes = [Inbox(s) for s in sessions]
        for number in range(20):
            sessions[1].notify({"abort": number})
        for rank in (0, 2):
            assert [inboxes[rank].next() for _ in range(20)] == [
                Notice(from_rank=1, payload={"abort": n}) for n in range(20)
            ]
        assert inboxes[1].empty()
        with pytest.raises(InvalidUsage, match="plain JSON"):
            sessions[1].notify({"x": object()})


def test_events_before_the_first_callback_are_delivered():
    with job(2) as sessions:
        sessions[0].notify({"n": 1})
        in_threads(
            [lambda s=s: s.barrier("after") for s in sessions]
        )  # the notice is there when the barrier is through
        assert Inbox(sessions[1]).next() == Notice(from_rank=0, payload={"n": 1})


def test_drain_handles_everything_received():
    """Also what has come while the watcher was busy, and lies in its socket."""
    with job(3) as sessions:
        busy, go, told = threading.Event(), threading.Event(), []

        def hear(event):
            busy.set()
            assert go.wait(PATIENCE)
            told.append(event.payload)

        sessions[1].on_event(hear)
        last = Inbox(sessions[2])
        sessions[0].notify({"number": 1})
        assert busy.wait(PATIENCE)
        sessions[0].notify({"number": 2})
        while last.next_of(Notice).payload != {"number": 2}:  # the hub has sent it to rank 1 before
            pass
        thread, link = (
            threading.Thread(target=sessions[1].drain, args=(PATIENCE,)),
            sessions[1]._link,
        )
        thread.start()
        until(lambda: bool(link and link._callbacks))
        go.set()
        thread.join(PATIENCE)
        assert told == [{"number": 1}, {"number": 2}]
        sessions[1].close()
        sessions[1].drain(PATIENCE)  # there is nothing to come


def test_failing_and_waiting_callbacks_are_harmless(caplog):
    with job(2) as sessions:
        caught: list[BaseException] = []
        done = threading.Event()

        def careless(event):
            try:
                sessions[1].all_gather(b"", "from a callback")
            except InvalidUsage as error:
                caught.append(error)
                done.set()
            raise RuntimeError("oops")

        sessions[1].on_event(careless)
        inbox = Inbox(sessions[1])
        sessions[0].notify({})
        assert done.wait(PATIENCE)
        assert isinstance(inbox.next(), Notice)
        assert "hand the event to another thread" in str(caught[0])


def test_close_twice_and_calls_after_it():
    with job(2) as sessions:
        sessions[0].close()
        sessions[0].close()
        for call in (
            lambda: sessions[0].all_gather(b"", "x"),
            lambda: sessions[0].notify({}),
            lambda: sessions[0].request_status(),
            lambda: sessions[0].subgroup([0], "s"),
        ):
            with pytest.raises(CommunicatorClosed):
                call()
        assert "closed" in repr(sessions[0])


def test_close_ends_a_wait_of_another_thread():
    with job(2) as sessions:
        results = in_threads([lambda: sessions[0].all_gather(b"", "x"), sessions[0].close])
        assert isinstance(results[0], CommunicatorClosed)


def test_the_hub_ends_when_all_have_left_and_its_port_is_free():
    unique_id = get_unique_id()
    a, b = in_threads([lambda r=r: connect(unique_id, r, 2, PATIENCE) for r in range(2)])
    inbox = Inbox(a)
    b.close()
    assert isinstance(inbox.next(), PeerLeft)
    a.close()
    raises_at_the_deadline("refused", lambda seconds: connect(unique_id, 0, 2, seconds))


def test_reusable_hub_serves_overlapping_jobs():
    unique_id, root = create_hub(nranks=2, hosts=["127.0.0.1"], reusable=True)

    def meet() -> list[LinkSession]:
        sessions = in_threads(
            [
                lambda r=r: connect(unique_id, r, 2, PATIENCE, session_timeout=PATIENCE)
                for r in range(2)
            ]
        )
        assert all(isinstance(session, LinkSession) for session in sessions), sessions
        return sessions

    first, second = meet(), meet()
    first[1].close()
    inbox = Inbox(second[0])
    third = meet()
    for name, sessions in ((b"second", second), (b"third", third)):
        assert (
            in_threads([lambda s=s, n=name: s.all_gather(n, "x") for s in sessions])
            == [[name] * 2] * 2
        )
    assert inbox.empty()  # rank 1 has left the first job only
    for session in (first[0], *second, *third):
        session.close()
    assert isinstance(
        in_threads([lambda: connect(unique_id, 0, 2, 0.1)])[0], BootstrapError
    )  # the next job fails alone
    last = meet()
    root.close()
    assert root.join(PATIENCE)
    # A rank has taken over.
    assert in_threads([lambda s=s: s.all_gather(b"l", "x") for s in last]) == [[b"l"] * 2] * 2


def test_wait_until_delivered():
    with job(3) as sessions:
        may_go, heard = threading.Event(), []

        def slowly(event):
            if isinstance(event, Notice):
                may_go.wait(PATIENCE)
                heard.append(event.from_rank)

        for session in sessions[1:]:
            session.on_event(slowly)
        sessions[0].notify({})
        sessions[0].wait_until_delivered(0.01)
        assert heard == []  # it does not wait for ever
        sessions[0].wait_until_delivered(PATIENCE, without=[1, 2])
        assert heard == []
        may_go.set()
        sessions[0].wait_until_delivered(PATIENCE)
        assert heard == [0, 0]
        sessions[2].close()
        sessions[0].notify({})
        sessions[0].wait_until_delivered(PATIENCE)
        assert heard == [0, 0, 0]


# --- status ---


def _waits_here(session, event, seen):
    event.wait(PATIENCE)  # the line that the status names
    seen.append(session.rank)


def test_status_says_where_every_rank_is():
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    go, ready = threading.Event(), threading.Barrier(3)
    seen: list[int] = []
    sessions: dict[int, LinkSession] = {}

    def rank(number):
        session = sessions[number] = connect(unique_id, number, 3, PATIENCE)
        session.status_provider = lambda: {"operation": 17 + number}
        ready.wait(PATIENCE)
        if number == 1:
            _waits_here(session, go, seen)
        elif number == 2:
            session.all_gather(b"", "never", timeout=PATIENCE)
        else:
            while True:
                status = session.request_status(PATIENCE)
                stuck = [status[1]["threads"][0]["where"], status[2]["threads"][0]["call"]]
                if stuck[0].endswith("_waits_here") and stuck[1] == "all_gather":
                    break
            go.set()
            session.close()
            return status

    status, _, left = in_threads([lambda n=n: rank(n) for n in range(3)])
    assert isinstance(left, BootstrapError)  # rank 0 left while rank 2 waited
    for number in range(3):
        assert status[number]["answered"]
        assert status[number]["status"] == {"operation": 17 + number}
        assert status[number]["pid"] > 0
    assert "test_session.py" in status[1]["threads"][0]["where"]
    assert "test_session.py" in status[2]["threads"][0]["where"]
    assert "rank" in status[2]["threads"][0]["where"]
    for number in (1, 2):
        sessions[number].close()


def test_a_provider_that_fails_or_returns_odd_things_is_reported():
    with job(3) as sessions:
        inbox = Inbox(sessions[1])
        sessions[1].status_provider = lambda: {"x": 1 / 0}
        sessions[2].status_provider = lambda: {"x": object()}
        status = sessions[0].request_status(PATIENCE)
        assert status[1]["status"]["error"].startswith("ZeroDivisionError")
        assert "not plain JSON" in status[2]["status"]["error"]
        assert isinstance(inbox.next(), StatusRequest)
        assert inbox.empty()


def test_status_of_a_rank_that_left():
    with job(2) as sessions:
        inbox = Inbox(sessions[0])
        sessions[1].close("done early")
        assert isinstance(inbox.next(), PeerLeft)
        assert sessions[0].request_status(PATIENCE)[1] == {
            "answered": False,
            "reason": "left: done early",
        }


# --- sub ---


def test_subgroup_is_renumbered_and_separate():
    with job(4) as sessions:
        evens = [sessions[r].subgroup([2, 0], "evens") for r in (2, 0)]
        odds = [sessions[r].subgroup([1, 3], "odds") for r in (1, 3)]
        assert [(s.rank, s.nranks) for s in evens] == [(0, 2), (1, 2)]
        calls = [
            lambda s=s: s.all_gather(bytes([s.rank]) + s.name.encode(), "same tag")
            for s in [*evens, *odds]
        ]
        results = in_threads(calls)
        assert results[:2] == [[b"\0evens", b"\1evens"]] * 2
        assert results[2:] == [[b"\0odds", b"\1odds"]] * 2
        inboxes = [Inbox(s) for s in (*sessions, *odds)]
        evens[0].notify({"to": "evens"})
        inbox = Inbox(evens[1])
        assert inbox.next() == Notice(from_rank=0, payload={"to": "evens"})
        assert all(other.empty() for other in inboxes)
        assert sorted(evens[1].request_status(PATIENCE)) == [0, 1]
        in_threads([lambda s=s: s.barrier("all") for s in sessions])
        evens[0].close("evens end")
        assert inbox.next_of(PeerLeft) == PeerLeft(rank=0, reason="evens end")
        assert evens[1].request_status(PATIENCE)[0] == {
            "answered": False,
            "reason": "left: evens end",
        }
        in_threads([lambda s=s: s.barrier("still there") for s in sessions])
        for session in (*evens, *odds):
            session.close()


def test_subgroup_closed_while_a_thread_uses_it():
    """The hub is told nothing of it any more: it would take that for a breach and the rank for
    lost, in all its sessions.
    """
    with job(2) as sessions:
        subs = [s.subgroup([0, 1], "pair") for s in sessions]

        def close() -> dict[str, object]:
            subs[0].close()
            return {}

        subs[0].status_provider = close  # which is asked first, and takes a while
        with pytest.raises(CommunicatorClosed):
            subs[0].request_status(PATIENCE)
        subs[1].close()
        assert (
            in_threads([lambda s=s: s.all_gather(b"", "x") for s in sessions]) == [[b"", b""]] * 2
        )


def test_subgroup_outlives_its_parent():
    with job(3) as sessions:
        subs = [sessions[r].subgroup([0, 2], "pair") for r in (0, 2)]
        again = [sub.subgroup([1, 0], "swapped") for sub in subs]
        for session in sessions:
            session.close()
        assert (
            in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in subs])
            == [[b"\0", b"\1"]] * 2
        )
        assert (
            in_threads([lambda s=s: s.all_gather(bytes([s.rank]), "x") for s in again])
            == [[b"\0", b"\1"]] * 2
        )
        inbox = Inbox(again[1])
        again[0].close()
        subs[0].close()
        assert inbox.next() == PeerLeft(rank=1, reason="finalized")
        with pytest.raises(BootstrapError, match="rank 1 of 2 left"):
            again[1].barrier("b")
        for session in (again[1], subs[1]):
            session.close()


def test_subgroups_of_one_name_are_distinct():
    with job(2) as sessions:
        first = [s.subgroup([0, 1], "s") for s in sessions]
        second = [s.subgroup([0, 1], "s") for s in sessions]
        in_threads([lambda s=s: s.barrier("x") for s in (*first, *second)])
        for session in first:
            session.close()
        in_threads([lambda s=s: s.barrier("y") for s in second])
        for session in second:
            session.close()


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 2], [1], [-1, 0]])
def test_subgroup_of_the_wrong_ranks(ranks):
    with job(2) as sessions, pytest.raises(InvalidUsage):
        sessions[0].subgroup(ranks, "s")


# --- one rank ---


def test_a_job_of_one_needs_no_socket(monkeypatch):
    monkeypatch.setattr("socket.socket", None)
    unique_id = UniqueId(addresses=(("127.0.0.1", 1),), secret=b"s" * 32)
    for session in (single_rank_session(), connect(unique_id, 0, 1, 1.0)):
        assert (session.rank, session.nranks, session.addresses) == (0, 1, ["127.0.0.1"])
        assert session.all_gather(b"x", "t") == [b"x"]
        session.barrier("b")
        session.notify({"a": 1})
        session.on_event(lambda event: None)
        session.status_provider = lambda: {"n": 1}
        status = session.request_status()
        assert status[0]["status"] == {"n": 1}
        sub = session.subgroup([0], "s")
        session.close()
        assert sub.all_gather(b"y", "t") == [b"y"]
        sub.close()
        with pytest.raises(CommunicatorClosed):
            session.barrier("b")


def test_host_names_separate_hosts_with_one_loopback(monkeypatch):
    """One laptop can play several hosts."""
    names = iter(["a", "b"])
    monkeypatch.setattr("miraccl.bootstrap.join.host_fingerprint", lambda: next(names))
    with job(2) as sessions:
        assert sorted(sessions[0].hosts) == ["a", "b"]
        assert sessions[0].addresses == ["127.0.0.1"] * 2


def test_the_name_of_the_host_can_be_set(monkeypatch):
    plain = host_fingerprint()
    assert plain == network_fingerprint()
    monkeypatch.setenv("NCCL_HOSTID", "x")
    named = host_fingerprint()
    monkeypatch.setenv("MIRACCL_HOSTID", "y")
    assert len({plain, named, host_fingerprint()}) == 3
    assert network_fingerprint() == plain
