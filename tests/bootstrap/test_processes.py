"""Processes that die, exit, stop or fork, at the rendezvous and later."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from miraccl.bootstrap import PeerLeft, PeerLost, Session, UniqueId, connect, create_hub
from miraccl.bootstrap.dial import Dialer
from miraccl.bootstrap.join import _join
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, PeerDied
from miraccl.wire.bootstrap import MessageArrived, Received, Send, SendMessage
from tests.bootstrap.kit import PATIENCE, Child, Inbox, child_rank, free_port, in_threads

Spawn = Callable[[Callable[[Connection], None]], Child]
pytestmark = pytest.mark.multiprocess


def _session(unique_id: UniqueId, rank: int, nranks: int) -> Session:
    (session,) = in_threads([lambda: connect(unique_id, rank, nranks, PATIENCE)])
    assert isinstance(session, Session), session
    return session


def _from_children(
    unique_id: UniqueId, nranks: int, ranks: list[int], spawn: Spawn
) -> dict[int, Child]:
    return {rank: spawn(child_rank(unique_id, rank, nranks)) for rank in ranks}


def _hub_in_child(nranks: int) -> Callable[[Connection], None]:
    """Return a child that starts a hub, sends its id and is rank 0."""

    def main(pipe: Connection) -> None:
        unique_id, _root = create_hub(hosts=["127.0.0.1"])
        pipe.send(unique_id)
        child_rank(unique_id, 0, nranks)(pipe)

    return main


def test_a_killed_rank_is_seen_by_all_others(spawn):
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    children = _from_children(unique_id, 4, [1, 2, 3], spawn)
    session = _session(unique_id, 0, 4)
    assert [child.recv() for child in children.values()] == ["met"] * 3
    children[2].kill()
    inbox = Inbox(session)
    lost = inbox.next()
    assert isinstance(lost, PeerLost)
    assert lost.rank == 2
    for rank in (1, 3):
        assert children[rank].recv()[:2] == ("PeerLost", 2)
    with pytest.raises(PeerDied, match="rank 2 of 4 died") as caught:
        session.all_gather(b"", "x")
    assert caught.value.peer == 2
    assert session.request_status(PATIENCE)[2] == {
        "answered": False,
        "reason": f"died: {lost.reason}",
    }
    children[1].pipe.send("close")  # who leaves afterwards has left, not died
    left = inbox.next()
    assert isinstance(left, PeerLeft)
    assert left.rank == 1
    assert children[3].recv()[:2] == ("PeerLeft", 1)
    session.close()


def test_a_wait_ends_when_a_rank_is_killed(spawn):
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    children = _from_children(unique_id, 2, [1], spawn)
    session = _session(unique_id, 0, 2)
    assert children[1].recv() == "met"
    error, _ = in_threads(
        [lambda: session.all_gather(b"", "x", timeout=PATIENCE), children[1].kill]
    )
    assert isinstance(error, PeerDied)
    session.close()


def _talk(sock, machine, event):
    """Run a member's machine over its socket until a message arrives."""
    sock.settimeout(PATIENCE)
    while True:
        for output in machine.handle(event):
            if isinstance(output, Send):
                sock.sendall(output.data)
            elif isinstance(output, MessageArrived):
                return output.message
        event = Received(now=0.0, data=sock.recv(4096))


def test_a_rank_killed_in_the_meeting_is_named_before_the_deadline(spawn):
    unique_id, root = create_hub(hosts=["127.0.0.1"])

    def joins_and_tells(pipe):
        sock, machine = Dialer(
            unique_id.addresses,
            secret=unique_id.secret,
            rank=1,
            nranks=3,
            deadline=time.monotonic() + PATIENCE,
        ).dial()
        accepted = _talk(
            sock, machine, SendMessage(now=0.0, message=_join(sock, None, Deadline.after(PATIENCE)))
        )
        pipe.send(type(accepted).__name__)
        pipe.poll(PATIENCE)

    victim = spawn(joins_and_tells)
    assert victim.recv() == "Accepted"
    errors = in_threads([lambda: connect(unique_id, 0, 3, PATIENCE), victim.kill])
    errors += in_threads([lambda: connect(unique_id, 2, 3, PATIENCE)])
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerDied)
        assert error.peer == 1
        assert "rank 1 of 3 died before all ranks had joined" in str(error)
    assert root.join(PATIENCE)


def test_death_of_the_hub_is_the_loss_of_rank_0(spawn):
    hub = spawn(_hub_in_child(3))
    unique_id = hub.recv()
    children = _from_children(unique_id, 3, [1], spawn)
    session = _session(unique_id, 2, 3)
    assert hub.recv() == "met"
    assert children[1].recv() == "met"
    inbox = Inbox(session)
    hub.kill()
    lost = inbox.next()
    assert isinstance(lost, PeerLost)
    assert lost.rank == 0
    assert children[1].recv()[:2] == ("PeerLost", 0)
    with pytest.raises(PeerDied, match="rank 0 of 3 died"):
        session.all_gather(b"", "x")
    # Rank 1 has taken the control plane over.
    session.notify({})
    assert children[1].recv() == ("Notice", 2, {})
    status = session.request_status(PATIENCE)
    assert status[1]["answered"]
    assert "died" in status[0]["reason"]
    session.close()


def test_hub_that_exits_has_sent_everything(spawn):
    """A rank that calls ``os._exit`` after a collective start: the others have their result as
    well.
    """
    nranks, secret = 8, b"s" * 32

    def gathers_and_ends(rank: int, unique_id: UniqueId) -> Callable[[Connection], None]:
        def main(pipe: Connection) -> None:
            root = (
                create_hub(hosts=["127.0.0.1"], port=unique_id.addresses[0][1], secret=secret)
                if rank == 0
                else None
            )
            parts = connect(unique_id, rank, nranks, PATIENCE).all_gather(
                bytes([rank]), "last", PATIENCE
            )
            if root is None:
                pipe.send(b"".join(parts))
            os._exit(0)

        return main

    for _ in range(10):
        unique_id = UniqueId(addresses=(("127.0.0.1", free_port()),), secret=secret)
        children = [spawn(gathers_and_ends(rank, unique_id)) for rank in range(nranks)]
        for child in children[1:]:
            assert child.recv() == bytes(range(nranks))


def test_death_of_the_hub_during_rendezvous(spawn):
    port, secret = free_port(), b"s" * 32
    unique_id = UniqueId(addresses=(("127.0.0.1", port),), secret=secret)

    def only_the_hub(pipe):
        class Log(list[object]):
            def append(self, event: object) -> None:
                super().append(event)
                pipe.send(type(event).__name__)

        create_hub(hosts=["127.0.0.1"], port=port, secret=secret, log=Log())
        pipe.poll(PATIENCE)

    hub = spawn(only_the_hub)

    def kill():
        names: list[str] = []
        while names.count("Received") < 2:
            names.append(hub.recv())
        with socket.create_connection(
            unique_id.addresses[0]
        ):  # when this is seen, what came before has been answered
            while names.count("Connected") < 2:
                names.append(hub.recv())
            hub.kill()

    error, _ = in_threads([lambda: connect(unique_id, 1, 2, PATIENCE), kill])
    assert isinstance(error, PeerDied)
    assert error.peer == 0
    assert "control plane at 127.0.0.1:" in str(error)


def test_a_stopped_rank_is_alive_but_does_not_answer(spawn):
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    children = _from_children(unique_id, 3, [1, 2], spawn)
    session = _session(unique_id, 0, 3)
    assert [child.recv() for child in children.values()] == ["met"] * 2
    children[1].signal(signal.SIGSTOP)
    os.waitpid(children[1].pid, os.WUNTRACED)
    status = session.request_status(0.3)
    for _ in range(100):  # a busy machine
        if not status[2]["answered"]:
            status = session.request_status(0.3)
    assert status[1] == {"answered": False, "reason": "no answer within 0.3 s"}
    assert status[2]["answered"]
    assert status[2]["pid"] == children[2].pid
    children[1].signal(signal.SIGCONT)
    assert session.request_status(PATIENCE)[1]["answered"]
    session.close()


def test_a_forked_grandchild_does_not_hide_the_death_of_its_parent(spawn):
    """A data loader's worker inherits every descriptor; the connection must close with the rank all
    the same.
    """
    unique_id, _ = create_hub(hosts=["127.0.0.1"])

    def rank_with_worker(pipe):
        session = connect(unique_id, 1, 2, PATIENCE)
        worker = os.fork()
        if worker == 0:
            pipe.send(("worker", session.closed))
            signal.pause()
        pipe.poll(PATIENCE)

    child = spawn(rank_with_worker)
    session = _session(unique_id, 0, 2)
    assert child.recv() == ("worker", False)
    worker = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()[0])
    try:
        child.kill()
        lost = Inbox(session).next()
        assert isinstance(lost, PeerLost)
        assert lost.rank == 1
    finally:
        os.kill(worker, signal.SIGKILL)
    session.close()


_PROGRAM = """
import sys
from miraccl.bootstrap import UniqueId, connect
session = connect(UniqueId.parse(sys.argv[1]), int(sys.argv[2]), 2, 20.0)
{ending}
"""


@pytest.mark.parametrize(
    ("ending", "kind", "reason"),
    [
        ("session.close('all done')", PeerLeft, "all done"),
        ("pass", PeerLeft, "its interpreter exited"),
        ("sys.exit(3)", PeerLeft, "its interpreter exited"),
        (
            "raise ValueError('bad luck')",
            PeerLeft,
            "its interpreter exited after ValueError: bad luck",
        ),
        ("import os; os._exit(0)", PeerLost, "its process ended"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", PeerLost, "its process ended"),
        ("import os; os.abort()", PeerLost, "its process ended"),
    ],
)
def test_kinds_of_exit_are_distinguished(ending, kind, reason):
    unique_id, _ = create_hub(hosts=["127.0.0.1"])
    program = _PROGRAM.format(ending=ending)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(unique_id), "1"], stderr=subprocess.DEVNULL
    )
    try:
        session = _session(unique_id, 0, 2)
        event = Inbox(session).next()
        assert isinstance(event, kind)
        assert event.rank == 1
        assert event.reason.startswith(reason)
        session.close()
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


_HUB_PROGRAM = """
import sys
from miraccl.bootstrap import connect, get_unique_id
unique_id = get_unique_id()
print(unique_id, flush=True)
session = connect(unique_id, 0, 2, 20.0)
session.barrier("met")
"""


def test_control_plane_continues_after_rank_0_exits():
    process = subprocess.Popen(
        [sys.executable, "-c", _HUB_PROGRAM], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        unique_id = UniqueId.parse(process.stdout.readline())
        session = _session(unique_id, 1, 2)
        inbox = Inbox(session)
        session.barrier("met")
        assert inbox.next() == PeerLeft(rank=0, reason="its interpreter exited")
        assert process.wait(PATIENCE) == 0
        assert session.subgroup([1], "alone").all_gather(b"x", "x", PATIENCE) == [b"x"]
        assert inbox.empty()
        with pytest.raises(BootstrapError, match="rank 0 of 2 left") as caught:
            session.barrier("x")
        assert not isinstance(caught.value, PeerDied)
        session.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None


def test_exiting_rank_0_waits_for_exiting_peers():
    moment = f"from miraccl.bootstrap import lifetime; lifetime.LINGER_SECONDS = {PATIENCE}"
    process = subprocess.Popen(
        [sys.executable, "-c", moment + _HUB_PROGRAM], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        session = _session(UniqueId.parse(process.stdout.readline()), 1, 2)
        inbox = Inbox(session)
        session.barrier("met")
        assert inbox.next() == PeerLeft(rank=0, reason="its interpreter exited")
        session.close()
        assert inbox.empty()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close() if process.stdout else None


def test_ranks_forked_by_a_launcher_with_the_hub(spawn):
    """The hub's loss is nobody's rank then; the launcher's descriptors are not held by its
    children.
    """

    def launcher(pipe):
        unique_id, _root = create_hub(hosts=["127.0.0.1"])
        ranks = [Child(child_rank(unique_id, rank, 2)) for rank in range(2)]
        pipe.send([rank.pid for rank in ranks])
        for rank in ranks:
            pipe.send(rank.recv())
        pipe.poll(PATIENCE)
        ranks[1].kill()
        pipe.send(ranks[0].recv()[:2])
        ranks[0].pipe.send("close")
        ranks[0].wait()

    child = spawn(launcher)
    pids = child.recv()
    try:
        assert [child.recv(), child.recv()] == ["met", "met"]
        child.pipe.send("go")
        assert child.recv() == ("PeerLost", 1)
        child.wait()
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
