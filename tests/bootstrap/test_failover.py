"""Failover of the control plane between real processes: deaths of the hub, one after another."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from miraccl.bootstrap import (
    Notice,
    PeerLeft,
    PeerLost,
    UniqueId,
    connect,
    create_hub,
    failover,
    lifetime,
)
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.bootstrap.link import SocketLink
from miraccl.bootstrap.session import LinkSession
from miraccl.wire import bootstrap_hub
from tests.bootstrap.kit import (
    PATIENCE,
    Child,
    Inbox,
    child_rank,
    free_port,
    in_threads,
    job,
    until,
)

pytestmark = pytest.mark.multiprocess

Join = Callable[[int], LinkSession]


def survivor(join: Join, rank: int) -> Callable[[Connection], None]:
    """A rank that serves (call, arguments) from its pipe: gather, status, notices."""

    def main(pipe: Connection) -> None:
        session = join(rank)
        notices: list[int] = []
        session.on_event(
            lambda event: notices.append(event.payload["n"]) if hasattr(event, "payload") else None
        )
        pipe.send("met")
        part: LinkSession | None = None
        while True:
            call, argument = pipe.recv()
            if call == "shrink":
                part = session.subgroup(argument, f"part {argument}")
                pipe.send(part.all_gather(bytes([rank]), "x", PATIENCE))
            elif call == "status":
                assert part is not None
                pipe.send([a["answered"] for a in part.request_status(PATIENCE).values()])
            elif call == "notify":
                session.notify({"n": argument})
                session.wait_until_delivered(PATIENCE)
                pipe.send("notified")
            elif call == "notices":
                until(lambda n=argument: n in notices)  # type: ignore[misc]
                pipe.send(notices)
            else:
                session.close()
                return

    return main


def ask(children: dict[int, Child], call: str, argument: Any = None) -> list[Any]:
    for child in children.values():
        child.pipe.send((call, argument))
    return [child.recv() for child in children.values()]


def outlive(children: dict[int, Child], order: list[int]) -> None:
    """Kill the ranks of ``order`` in turn; each time the others go on together."""
    for step, victim in enumerate(order):
        children.pop(victim).kill()
        ranks = sorted(children)
        assert ask(children, "shrink", ranks) == [[bytes([r]) for r in ranks]] * len(ranks)
        assert ask(children, "status") == [[True] * len(ranks)] * len(ranks)
        first, *others = ranks
        assert ask({first: children[first]}, "notify", step) == ["notified"]
        rest = {rank: children[rank] for rank in others}
        assert [got.count(step) for got in ask(rest, "notices", step)] == [1] * len(others)


def by_unique_id(unique_id: UniqueId) -> Join:
    return lambda rank: connect(unique_id, rank, 8, PATIENCE, session_timeout=PATIENCE)


def by_port(port: int) -> Join:
    def join(rank: int) -> LinkSession:
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": "8",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        return join_launch(detect_launch(environ), PATIENCE, PATIENCE)

    return join


def hub_in_rank_0(unique_id: UniqueId) -> Join:
    """Return the join function for a hub in rank 0, like that of ``get_unique_id``."""

    def join(rank: int) -> LinkSession:
        host, port = unique_id.addresses[0]
        hub = None
        if rank == 0:
            hub = create_hub(hosts=[host], port=port, secret=unique_id.secret)[1]
        return connect(unique_id, rank, 8, PATIENCE, session_timeout=PATIENCE, hub=hub)

    return join


@pytest.mark.parametrize("start", ["unique id in rank 0", "port"])
@pytest.mark.parametrize("order", [list(range(7)), [3, 0, 7, 1, 6, 2, 5], [7, 6, 5, 4, 3, 2, 0]])
def test_eight_ranks_survive_the_death_of_seven(start: str, order: list[int], spawn: Any) -> None:
    port = free_port()
    join = by_port(port)
    if start != "port":
        join = hub_in_rank_0(UniqueId(addresses=(("127.0.0.1", port),), secret=b"s" * 32))
    children = {rank: spawn(survivor(join, rank)) for rank in range(8)}
    assert [child.recv() for child in children.values()] == ["met"] * 8
    outlive(children, order)


def test_hub_in_a_launcher_that_ends(spawn: Any) -> None:
    unique_id, hub = create_hub(nranks=8, hosts=["127.0.0.1"])
    children = {rank: spawn(survivor(by_unique_id(unique_id), rank)) for rank in range(8)}
    assert [child.recv() for child in children.values()] == ["met"] * 8
    hub.close("the launcher ends")
    ranks = list(range(8))
    assert ask(children, "shrink", ranks) == [[bytes([r]) for r in ranks]] * 8
    outlive(children, [0, 1])


def test_several_deaths_at_once(spawn: Any) -> None:
    """The new hub waits for no rank that died together with the old one."""
    join = hub_in_rank_0(UniqueId(addresses=(("127.0.0.1", free_port()),), secret=b"s" * 32))
    children = {rank: spawn(survivor(join, rank)) for rank in range(8)}
    assert [child.recv() for child in children.values()] == ["met"] * 8
    begun = time.monotonic()
    for rank in (0, 1, 4):
        os.kill(children[rank].pid, signal.SIGKILL)
    for rank in (0, 1, 4):
        children.pop(rank).wait()
    ranks = sorted(children)
    assert ask(children, "shrink", ranks) == [[bytes([r]) for r in ranks]] * len(ranks)
    assert time.monotonic() - begun < bootstrap_hub.REJOIN_SECONDS


def test_calls_in_progress_complete_at_the_new_hub() -> None:
    """A gather, a status query and a notice that the lost hub did not complete."""
    unique_id, hub = create_hub(nranks=3, hosts=["127.0.0.1"])
    sessions: list[LinkSession] = in_threads(
        [lambda r=r: connect(unique_id, r, 3, PATIENCE, session_timeout=PATIENCE) for r in range(3)]
    )
    inbox = Inbox(sessions[1])
    results: list[Any] = []
    early = threading.Thread(target=lambda: results.append(sessions[0].all_gather(b"0", "x")))
    early.start()
    link = sessions[0]._link
    assert isinstance(link, SocketLink)
    until(lambda: bool(link._waiters))
    hub.close("for a test")
    sessions[0].notify({"n": 1})
    late = in_threads([lambda s=s: s.all_gather(b"1", "x") for s in sessions[1:]])
    early.join(PATIENCE)
    assert [*results, *late] == [[b"0", b"1", b"1"]] * 3
    assert inbox.next_of(Notice).payload == {"n": 1}
    for session in sessions:
        session.close()
    for server in list(lifetime.hubs):
        assert server.join(PATIENCE)


def test_no_rank_counts_as_lost_when_a_launcher_ends(spawn: Any) -> None:
    unique_id, hub = create_hub(nranks=2, hosts=["127.0.0.1"])
    child = spawn(child_rank(unique_id, 1, 2))
    session = connect(unique_id, 0, 2, PATIENCE, session_timeout=PATIENCE)
    assert child.recv() == "met"
    inbox = Inbox(session)
    hub.close("the launcher ends")
    assert session.request_status(PATIENCE)[1]["answered"]
    assert [e for e in _drained(inbox) if isinstance(e, PeerLost | PeerLeft)] == []
    child.pipe.send("end")
    assert isinstance(inbox.next_of(PeerLeft), PeerLeft)
    session.close()


def _drained(inbox: Inbox) -> list[Any]:
    found = []
    while not inbox.empty():
        found.append(inbox.next())
    return found


def test_stopped_candidate_is_passed_over(spawn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "PROOF_SECONDS", 0.5)
    monkeypatch.setattr(bootstrap_hub, "REJOIN_SECONDS", 0.5)
    join = hub_in_rank_0(UniqueId(addresses=(("127.0.0.1", free_port()),), secret=b"s" * 32))
    children = {rank: spawn(survivor(join, rank)) for rank in range(8)}
    assert [child.recv() for child in children.values()] == ["met"] * 8
    children[1].signal(signal.SIGSTOP)
    children.pop(0).kill()
    stopped = children.pop(1)
    ranks = sorted(children)
    assert ask(children, "shrink", ranks) == [[bytes([r]) for r in ranks]] * len(ranks)
    stopped.signal(signal.SIGCONT)
    stopped.pipe.send(("shrink", [1]))
    with pytest.raises((EOFError, AssertionError)):  # the job has gone on without it
        assert stopped.recv() != [b"\1"]


def test_without_a_standby_port_the_control_plane_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptor(*args: Any, **kwargs: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(failover, "listen", no_descriptor)
    unique_id, hub = create_hub(nranks=2, hosts=["127.0.0.1"])
    sessions: list[LinkSession] = in_threads(
        [lambda r=r: connect(unique_id, r, 2, PATIENCE, session_timeout=PATIENCE) for r in range(2)]
    )
    inbox = Inbox(sessions[0])
    hub.close("for a test")
    lost = inbox.next()
    assert isinstance(lost, PeerLeft)
    assert lost.rank == -1
    assert "no living rank has a standby port" in lost.reason
    for session in sessions:
        session.close()


def test_link_may_be_closed_in_a_failover(monkeypatch: pytest.MonkeyPatch) -> None:
    with job(2) as sessions:
        hub = next(h for h in lifetime.hubs if not h.join(0))
        for session in random.sample(sessions, 2):
            threading.Thread(target=session.close).start()
        hub.close("at the same time")
