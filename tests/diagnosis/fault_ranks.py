"""Rank functions of the failure tests; each returns the error it saw."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import miraccl
from miraccl.errors import MiracclError
from miraccl.executor.cpu.kernels import layout
from tests.diagnosis.late_watcher import LateWatcher
from tests.runtime.sweep_ranks import act_as_hosts

#: asm-generic/socket.h
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27


def seen(error: BaseException) -> dict[str, Any]:
    """An exception as plain values."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "peer": getattr(error, "peer", None),
        "op": getattr(error, "op", None),
        "graph": list(getattr(error, "graph", ())),
    }


def together(comm: miraccl.Communicator) -> None:
    """A barrier on the control plane: when it returns, no rank needs this one for it any more."""
    comm._core.session.barrier("test")


def nobody_left(comm: miraccl.Communicator) -> None:
    """Wait for all ranks, now that this one has seen its error: for who has not, a rank that ends
    has died.
    """
    with contextlib.suppress(MiracclError):
        comm._core.session.barrier("seen", timeout=10)


def call_differently(comm: miraccl.Communicator, field: str, odd: int, count: int) -> None:
    """Rank ``odd`` calls something else than the others, in one field."""
    me = comm.rank == odd
    dtype = np.int32 if field == "dtype" and me else np.float32
    n = count
    if field == "count" and me:
        n = count + comm.nranks
    if field == "far count" and me:
        n = 100 * count
    n = n // comm.nranks * comm.nranks
    x = np.ones(n, dtype)
    if field == "collective" and me:
        comm.all_gather(x)
    elif field == "root":
        comm.broadcast(x, 1 if me else 0)
    elif field == "operator":
        comm.all_reduce(x, op=miraccl.MAX if me else miraccl.SUM)
    elif field == "barrier":
        if me:
            comm.barrier()
        else:
            comm.all_reduce(x)
    elif field.startswith("broadcast"):
        comm.broadcast(np.ones(100 * n if me else n, dtype), 0)
    else:
        comm.all_reduce(x)
    for _ in range(2):  # whoever got through finds out at the next operation
        comm.barrier()


def mismatch(field: str, odd: int, count: int, ranks_per_host: int) -> dict[str, Any]:
    """``call_differently`` between processes."""
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=20)
    together(comm)
    start = time.monotonic()
    try:
        call_differently(comm, field, odd, count)
        return {"type": "none", "text": ""}
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}
    finally:
        comm.finalize()


def ends_at_once(what: str, ranks_per_host: int) -> Any:
    """The ranks meet in the process of rank 1, which finds a mismatch or hears of it and ends
    without another word.
    """
    act_as_hosts(ranks_per_host)
    launched = miraccl.init(timeout=20)
    made = str(miraccl.get_unique_id()) if launched.rank == 1 else ""
    ident = launched._core.session.all_gather(made.encode(), "id")[1].decode()
    comm = miraccl.Communicator(launched.nranks, ident, launched.rank, timeout=20)
    together(launched)
    try:
        if what == "messages" and comm.rank == 0:
            comm.send(np.ones(12, np.int32), 1)
        elif what == "messages" and comm.rank == 1:
            comm.recv(np.ones(12, np.float32), 0)
        elif what == "broadcast":
            comm.broadcast(np.ones(1200 if comm.rank == 1 else 12), 0)
        comm.barrier()
        comm.barrier()
    except MiracclError as error:
        return seen(error)
    return {"type": "none"}


def goes_through(victim: int) -> Any:
    """Ranks 0 and 1 broadcast from rank 0, rank 2 from rank 1: the others are through and gone
    while rank 2 waits for one of them.
    """
    comm = miraccl.init(timeout=20)
    session, through = comm._core.session, threading.Semaphore(0)
    session.on_event(
        lambda event: (
            through.release() if getattr(event, "payload", {}).get("kind") == "through" else None
        )
    )
    together(comm)
    x = np.ones(12)
    try:
        if comm.rank == 2:
            assert through.acquire(timeout=20)
            assert through.acquire(timeout=20)
            comm.broadcast(x, 1)
            return {"type": "none"}
        comm.broadcast(x, 0)
    except MiracclError as error:
        return seen(error)
    session.notify({"kind": "through"})
    wait_until(
        lambda: bool(comm._core.fabric.history(2))
    )  # it has called what does not fit: else that would never begin
    if comm.rank != victim:  # which ends without a word
        comm.finalize()
    return {"type": "none"}


def send_differently(comm: miraccl.Communicator, what: str) -> None:
    """Rank 0 sends rank 1 something else than it expects; rank 2 waits for rank 1."""
    if comm.rank == 0:
        comm.send(np.ones(12, np.int32 if what == "dtype" else np.float32), 1)
    elif comm.rank == 1:
        if what == "collective":
            comm.all_reduce(np.ones(12, np.float32))
        comm.recv(np.ones({"count": 13, "size": 100_000}.get(what, 12), np.float32), 0)
    comm.barrier()


def unlike_messages(what: str, ranks_per_host: int) -> Any:
    """``send_differently`` between processes."""
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=10)
    together(comm)
    try:
        send_differently(comm, what)
    except MiracclError as error:
        found = seen(error)
        nobody_left(comm)
        return found
    return {"type": "none"}


def unlike_messages_of_groups(what: str) -> Any:
    """Every rank sends to the next and receives from the one before in a group; the message of rank
    0 is another than rank 1 expects.
    """
    comm = miraccl.init(timeout=10)
    together(comm)
    comm.all_reduce(np.ones(3))
    right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    odd = comm.rank == 0
    x = np.ones(
        13 if what == "count" and odd else 12, np.int32 if what == "dtype" and odd else np.float32
    )
    try:
        with miraccl.group():
            comm.send(x, right)
            comm.recv(np.ones(12, np.float32), left)
        comm.barrier()
    except MiracclError as error:
        found = seen(error)
        nobody_left(comm)
        return found
    return {"type": "none"}


def split_against(what: str, ranks_per_host: int) -> Any:
    """Rank 1 calls split, the others ``what``; all have time. Where rank 0 aborts, rank 2 calls
    split as well: no mismatch is first.
    """
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=600)
    comm.all_reduce(np.ones(3))
    together(comm)
    session = comm._core.session
    session.timeout = 600
    x, large = np.ones(3), np.ones(300_000)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "async": lambda: comm.all_reduce(x, async_op=True).wait(),
        "broadcast": lambda: comm.broadcast(x, 1),
        "barrier": comm.barrier,
        "recv": lambda: comm.recv(x, 1),
        "send": lambda: comm.send(large, 1),
        "sendrecv": lambda: comm.sendrecv(x, 1, x.copy(), 1),
        "abort": lambda: comm.abort("for a test"),
    }
    try:
        if comm.rank == 1 or (what == "abort" and comm.rank == 2):
            comm.split(0)
        else:
            if what == "abort":
                until(lambda told: bool(told[1]["control_op"] and told[2]["control_op"]), session)
            calls[what]()
            comm.barrier()
    except MiracclError as error:
        return seen(error)
    finally:
        comm.finalize()
    return {"type": "none"}


def split_after_an_operation_of_another_thread() -> float:
    """Rank 0 has begun an operation in the background that the others call after split, in which
    they wait long enough to tell.
    """
    with miraccl.init(timeout=20) as comm:
        x = np.ones(3)
        if comm.rank == 0:
            work = comm.all_reduce(x, async_op=True)
            wait_until(lambda: bool(comm._core.context.control_waits[1:, 0].all()))
            time.sleep(
                0.2
            )  # in which the operation looks whether somebody waits for this rank, and goes on
        part = comm.split(0)
        work.wait() if comm.rank == 0 else comm.all_reduce(x)
        assert part is not None
        part.all_reduce(x)
        comm.all_reduce(x)  # nothing is left of what was told
        part.finalize()
        return float(x[0])


def split_against_another_meeting() -> Any:
    """Rank 1 calls split, the others something else on the control plane."""
    with miraccl.init(timeout=600) as comm:
        together(comm)
        comm._core.session.timeout = 600
        try:
            comm.split(0) if comm.rank == 1 else comm._core.run_control_op(
                "something else", "other", b""
            )
        except MiracclError as error:
            return seen(error)
        return {"type": "none"}


def until(right: Callable[[dict[int, dict[str, Any]]], bool], session: Any) -> None:
    """Ask what all ranks are doing until ``right`` says yes."""
    while True:
        answers = session.request_status(10.0)
        told = {
            rank: answer["status"]
            for rank, answer in answers.items()
            if "seq" in answer.get("status", {})
        }
        if len(told) == len(answers) and right(told):
            return


def other_settings(field: str) -> Any:
    """Rank 1 was started with another setting than the others."""
    odd = os.environ["MIRACCL_RANK"] == "1"
    given: dict[str, Any] = {"algo": "ring", "deterministic": True, "buffsize": 1 << 20}
    if odd and field == "net":
        os.environ["MIRACCL_NET"] = "udp"
    try:
        miraccl.init(timeout=10, **({field: given[field]} if odd and field in given else {}))
    except MiracclError as error:
        return seen(error)
    return {"type": "none"}


# ---- forks


def forks() -> tuple[list[str], float]:
    """What a forked child, which leaves the ``with`` block by an exception, is told by two calls;
    and a sum of the ranks afterwards.
    """
    with miraccl.init(timeout=10) as comm:
        comm.all_reduce(np.ones(3))
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            with open(writer, "w") as told:
                for call in (lambda: comm.all_reduce(np.ones(3)), comm.shrink):
                    try:
                        call()
                    except MiracclError as error:
                        print(f"{type(error).__name__}: {error}", file=told)
            sys.exit(0)
        os.close(writer)
        _, status = os.waitpid(pid, 0)
        assert status == 0
        with open(reader) as told:
            return told.read().splitlines(), float(comm.all_reduce(np.ones(3))[0])


# ---- death


def die(path: str) -> None:
    """End this process the hard way, and leave the time in ``path``."""
    with open(path, "w") as file:
        file.write(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def survive(comm: miraccl.Communicator, path: str, action: Any) -> dict[str, Any]:
    """Run ``action`` until it raises; says what it raised and how long after the death that was."""
    try:
        while True:
            action()
    except MiracclError as error:
        now = time.monotonic()
        with open(path) as file:
            after = now - float(file.read())
        again = ""
        try:
            comm.barrier()
        except MiracclError as second:
            again = type(second).__name__
        return {**seen(error), "after": after, "again": again}


def killed(phase: str, victim: int, path: str, ranks_per_host: int) -> Any:
    """Rank ``victim`` is killed in a phase; the others say what they saw, then go on without it if
    they can.
    """
    act_as_hosts(ranks_per_host)
    rank = int(os.environ["MIRACCL_RANK"])
    if phase == "bootstrap" and rank == victim:
        from miraccl.runtime.fabric import ProcessFabric

        ProcessFabric._open_transports = lambda self, me, config: die(path)  # type: ignore[method-assign]
    if phase == "connect" and rank == victim:
        from miraccl.transport.datagram import DatagramTransport
        from miraccl.transport.shm import ShmTransport
        from miraccl.transport.socket import SocketTransport

        # after its peers were told where to find it
        for transport in (ShmTransport, SocketTransport, DatagramTransport):
            transport.connect = lambda self, infos: die(path) if infos else {}  # type: ignore[method-assign, assignment]
    if phase in ("bootstrap", "connect"):
        try:
            miraccl.init(timeout=30)
        except MiracclError as error:
            with open(path) as file:
                return {**seen(error), "after": time.monotonic() - float(file.read())}
        return {"type": "none"}
    comm = miraccl.init(timeout=30)
    n = comm.nranks
    big = np.ones(4_000_000 if phase in ("large", "window") else 9, np.float32)
    if phase == "window":
        big = comm.empty(big.size, np.float32)
        big[:] = 0
    together(comm)
    if rank == victim:
        if phase in ("large", "window", "p2p", "async"):
            watch_and_die(comm, path)
        else:
            die(path)
    if phase in ("waiting", "spawned"):
        result = survive(comm, path, lambda: comm.all_reduce(big))
    elif phase == "p2p":
        x, out = np.ones(3_000_000, np.float32), np.ones(3_000_000, np.float32)
        result = survive(comm, path, lambda: comm.sendrecv(x, (rank + 1) % n, out, (rank - 1) % n))
    elif phase == "async":
        result = survive(comm, path, lambda: comm.all_reduce(big, async_op=True).wait())
    elif phase == "barrier":
        result = survive(comm, path, comm.barrier)
    else:
        result = survive(comm, path, lambda: comm.all_reduce(big))
    smaller = comm.shrink()
    result["shrunk"] = [
        smaller.rank,
        smaller.nranks,
        float(smaller.all_reduce(np.full(70000, smaller.rank + 1.0))[-1]),
    ]
    smaller.barrier()
    smaller.finalize()
    comm.finalize()
    return result


def killed_while_shrinking(path: str) -> Any:
    """Rank 1 is killed when the others are at shrink() already, without having noticed; they go on
    without it.
    """
    comm = miraccl.init(timeout=30)
    together(comm)
    if comm.rank == 1:
        others = [r for r in range(comm.nranks) if r != 1]
        session, calls = comm._core.session, {""}
        while calls != {"shrink"}:
            status = session.request_status(10)
            calls = {thread["call"] for r in others for thread in status[r]["threads"][:1]}
        die(path)
    smaller = comm.shrink()
    return {"shrunk": [smaller.rank, smaller.nranks, float(smaller.all_reduce(np.ones(3))[0])]}


def hub_in_rank_0(path: str) -> Any:
    """Ranks that meet at an id made by rank 0, which is killed."""
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    world = miraccl.init(timeout=30)
    made = str(miraccl.get_unique_id()) if rank == 0 else ""
    ident = world._core.session.all_gather(made.encode(), "id")[0].decode()
    comm = miraccl.Communicator(nranks, ident, rank, timeout=30)
    world.finalize()
    comm.all_reduce(np.ones(4))
    if rank == 0:
        die(path)
    result = survive(comm, path, lambda: comm.all_reduce(np.ones(4)))
    smaller = comm.shrink()
    total = float(smaller.all_reduce(np.ones(3))[0])
    result["shrunk"] = [smaller.rank, smaller.nranks, total]
    return result


def dies_with_a_message() -> Any:
    """Rank 1 is killed before rank 0 reads a message from its memory, whose watcher is late: it
    hears of that only afterwards.
    """
    comm = miraccl.init(timeout=30)
    comm._core.context.set(layout.CTX_P2P_DIRECT, 0)
    x, session = np.ones(100_000), comm._core.session
    watcher = LateWatcher(session)
    pids = [int(pid) for pid in session.all_gather(str(os.getpid()).encode(), "pid")]
    if comm.rank == 1:
        comm.send(x, 0, async_op=True)
        session.notify({"kind": "for a test"})
        os.kill(os.getpid(), signal.SIGKILL)
    watcher.wait_for_event()
    wait_until(lambda: has_ended(pids[1]))

    def let_go() -> None:
        wait_until(lambda: comm._core.faults.fault is not None or watcher.awaited)
        watcher.release(100)

    threading.Thread(target=let_go, daemon=True).start()
    try:
        comm.recv(x, 1)
    except MiracclError as error:
        return seen(error)
    return {"type": "none"}


def dies_for_one_that_leaves() -> Any:
    """Rank 0 finalizes while an operation is pending, for which rank 1, which is killed then, does
    not come any more.
    """
    comm = miraccl.init(timeout=30)
    session, leaving = comm._core.session, threading.Event()
    session.on_event(
        lambda event: (
            leaving.set() if getattr(event, "payload", {}).get("kind") == "for a test" else None
        )
    )
    together(comm)
    if comm.rank == 1:
        assert leaving.wait(20)
        os.kill(os.getpid(), signal.SIGKILL)

    def tell() -> None:
        wait_until(lambda: comm._core.faults.closing)
        session.notify({"kind": "for a test"})

    work = comm.all_reduce(np.ones(3), async_op=True)
    threading.Thread(target=tell, daemon=True).start()
    comm.finalize()
    try:
        work.wait()
    except MiracclError as error:
        return seen(error)
    return {"type": "none"}


def has_ended(pid: int) -> bool:
    """Return True once the memory of a process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def watch_and_die(comm: miraccl.Communicator, path: str) -> None:
    """A thread that kills this process in the middle of its fourth operation or so."""

    def watch() -> None:
        calls = 0
        while calls < 40:
            calls += bool(comm._core.context.get(320))  # inside the engine
            time.sleep(0)
        die(path)

    threading.Thread(target=watch, daemon=True).start()


def exits(how: str, ranks_per_host: int) -> Any:
    """Rank 1 ends without finalize; the others need it."""
    act_as_hosts(ranks_per_host)
    comm, done = miraccl.init(timeout=30), 0
    try:
        comm.all_reduce(np.ones(5))
        done += 1
        if comm.rank == 1:
            if how == "pending":
                comm.all_reduce(np.ones(5), async_op=True)
            if how == "finalize":
                comm.finalize()
            return "left"
        if how == "pending":  # rank 1 may or may not get to its part of this one
            comm.all_reduce(np.ones(5))
        if (
            how == "finalize"
            # otherwise a finished rank may see rank 1 leave and end the other one's operation
        ):
            other = 2 - comm.rank
            comm.sendrecv(np.ones(5), other, np.ones(5), other)
        comm.all_reduce(np.ones(5))
    except MiracclError as error:
        assert (
            done or how != "finalize"
        )  # who just ends may be missed in its last operation by a rank that is not yet through
        return seen(error)
    return "nothing"


# ---- never arrives

PASSES = {"kind": "the deadline passes"}


def absent(where: str, ranks_per_host: int) -> Any:
    """Rank 1 does not come to an operation: it sleeps in Python, or sits in C code and keeps the
    interpreter's lock. The deadline of the others passes when they wait for it.
    """
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=30)
    session, context = comm._core.session, comm._core.context
    session.on_event(
        lambda event: (
            context.set(layout.CTX_DEADLINE, 1) if getattr(event, "payload", {}) == PASSES else None
        )
    )
    comm.all_reduce(np.ones(3, np.float32))
    session.barrier(
        "all have ended it"
    )  # what rank 1 keeps the lock from could be its last message
    start = time.monotonic()
    try:
        if comm.rank == 1:
            until(
                lambda told: (
                    told[0]["peer"] == 1
                    and all(told[rank]["state"] == layout.STATE_WAITING for rank in (0, 2))
                ),
                session,
            )
            if where == "python":
                return elsewhere(comm)
            if where == "c":
                import ctypes

                session.notify(PASSES)
                ctypes.PyDLL(None).usleep(2_500_000)  # with the interpreter's lock
                comm.all_reduce(np.ones(3, np.float32))
        if where == "recv":
            if comm.rank == 0:
                comm.recv(np.ones(3, np.float32), 1)
            elif comm.rank == 1:
                return elsewhere(comm)
            else:
                comm.barrier()
        comm.all_reduce(np.ones(3, np.float32))
    except MiracclError as error:
        return {**seen(error), "seconds": time.monotonic() - start}
    return "nothing"


def elsewhere(comm: miraccl.Communicator) -> Any:
    """Let the deadline of the others pass, who should name this function, and wait until the
    communicator is broken.
    """
    comm._core.session.notify(PASSES)
    limit = time.monotonic() + 20
    while comm._core.faults.fault is None and time.monotonic() < limit:
        time.sleep(0.01)
    try:
        comm.barrier()
    except MiracclError as error:
        return {**seen(error), "seconds": 0.0}
    return "nothing"


# ---- from outside: a signal, abort, the end of a with block


def interrupted(what: str, ranks_per_host: int) -> Any:
    """Rank 1 waits for rank 0 and gets a SIGINT there; the others must hear of it, and rank 1's own
    next call as well.
    """
    act_as_hosts(ranks_per_host)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of the test server ignore it
    comm = miraccl.init(timeout=20)
    together(comm)
    x = np.ones(40_000, np.float32)

    def interrupt_when_waiting() -> None:
        wait_until(lambda: comm._core.fabric.board()["state"] == layout.STATE_WAITING)
        os.kill(os.getpid(), signal.SIGINT)

    if comm.rank == 1:
        threading.Thread(target=interrupt_when_waiting, daemon=True).start()
    try:
        if comm.rank == 0:
            wait_until(lambda: comm._core.faults.fault is not None)
        if what == "recv":
            comm.recv(x, 0 if comm.rank == 1 else 1)
        elif what == "group":
            with miraccl.group():
                comm.send(x, (comm.rank + 1) % 3)
                comm.recv(x.copy(), 2 if comm.rank == 0 else 0)
        else:
            comm.all_reduce(x)
    except KeyboardInterrupt:
        try:
            comm.barrier()
        except MiracclError as error:
            return {"first": "KeyboardInterrupt", **seen(error)}
    except MiracclError as error:
        return {"first": "", **seen(error)}
    return "nothing"


def wait_until(condition: Any, seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise AssertionError("the condition did not come true")
        time.sleep(0.002)


def handled(ranks_per_host: int) -> int:
    """A signal whose handler does not raise leaves a wait as it is."""
    act_as_hosts(ranks_per_host)
    calls = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append(1))
    with miraccl.init(timeout=20) as comm:
        heard = threading.Event()
        comm._core.session.on_event(
            lambda event: heard.set() if getattr(event, "payload", {}).get("kind") == "go" else None
        )
        together(comm)
        if comm.rank == 1:

            def poke() -> None:
                wait_until(lambda: comm._core.fabric.board()["state"] == layout.STATE_WAITING)
                os.kill(os.getpid(), signal.SIGUSR1)
                wait_until(lambda: bool(calls))
                comm._core.session.notify({"kind": "go"})

            threading.Thread(target=poke, daemon=True).start()
        else:
            assert heard.wait(15)
        assert comm.all_reduce(np.ones(3))[0] == comm.nranks
        return len(calls)


def aborted(how: str, ranks_per_host: int) -> Any:
    """Rank 0 ends the communicator while the others wait for it: by abort() in another thread, or
    by leaving a with block.
    """
    act_as_hosts(ranks_per_host)
    comm = miraccl.init(timeout=20)
    together(comm)
    try:
        if comm.rank == 0 and how == "with":
            with comm:
                raise ZeroDivisionError("of the application")
        if comm.rank == 0 and how == "abort":
            comm.abort("enough of it")
        if how == "thread":
            if comm.rank == 0:
                threading.Thread(target=abort_when_waiting, args=(comm,), daemon=True).start()
            comm.recv(np.zeros(3), (comm.rank + 1) % 3)
        if how == "async":
            work = comm.all_reduce(np.ones(3), async_op=True) if comm.rank else None
            if comm.rank == 0:
                comm.abort("while others wait in the background")
            else:
                assert work is not None
                work.wait()
        comm.all_reduce(np.ones(3))
    except ZeroDivisionError:
        return {"type": "ZeroDivisionError", "closed": repr(comm)}
    except MiracclError as error:
        result = seen(error)
        comm.finalize()
        comm.finalize()
        return result
    return "nothing"


def abort_when_waiting(comm: miraccl.Communicator) -> None:
    wait_until(lambda: comm._core.fabric.board()["state"] == layout.STATE_WAITING)
    comm.abort("from a thread")


def ends_waits_before_its_fault_is_seen() -> bool:
    """Rank 0 aborts; whether a program that saw the fault could still have begun an operation,
    which others would be compared with.
    """
    with contextlib.suppress(MiracclError), miraccl.init(timeout=30) as comm:
        faults = comm._core.faults
        seen, set_abort = [], faults.fabric.set_abort

        def end_waits(code: int) -> None:
            seen.append(faults.fault)
            set_abort(code)

        faults.fabric.set_abort = end_waits  # type: ignore[method-assign]
        together(comm)
        if comm.rank == 0:
            comm.abort("a test")
        comm.all_reduce(np.ones(4))
    return seen[0] is None


def after_finalize() -> None:
    """Every operation of a closed communicator says so; finalize, abort and the end of a with block
    may come again.
    """
    with miraccl.init() as comm:
        x = comm.empty(10)
        x[:] = comm.rank
        op = comm.all_reduce_init(x)
        op()
        work = comm.all_reduce(np.ones(3), async_op=True)
        comm.finalize()
        assert work.done()
        comm.finalize()
        comm.abort()
        a = np.ones(comm.nranks)
        calls: list[Any] = [
            lambda: comm.all_reduce(x),
            lambda: comm.all_reduce(x, async_op=True),
            lambda: comm.barrier(),
            lambda: comm.send(a, 0),
            lambda: comm.recv(a, 0, async_op=True),
            lambda: comm.sendrecv(a, 0, a.copy(), 0),
            lambda: comm.all_to_all(a),
            lambda: comm.broadcast(a),
            lambda: comm.gather(a),
            lambda: comm.empty(3),
            lambda: comm.memory(),
            lambda: comm.split(0),
            lambda: comm.all_reduce_init(a),
            op,
        ]
        for number, call in enumerate(calls):
            try:
                call()
            except miraccl.errors.CommunicatorClosed:
                continue
            raise AssertionError(f"call {number} of a closed communicator did not complain")
    assert "closed" in repr(comm)
    assert x.sum() == 10 * (
        comm.nranks * (comm.nranks - 1) // 2
    )  # window memory lives on with its array
    x[:] = 5


def stopped_rank(deadline: float) -> Any:
    """Rank 1 is stopped (SIGSTOP) before an operation; the others measure when they raise."""
    comm = miraccl.init(timeout=deadline)
    comm.all_reduce(np.ones(4))
    session = comm._core.session
    pids = [int(pid) for pid in session.all_gather(str(os.getpid()).encode(), "pid", 30)]
    if comm.rank == 1:
        child = os.fork()
        if child == 0:  # wakes its parent when the others are done
            time.sleep(deadline + 6)
            os.kill(pids[1], signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
        return {"type": "none"}
    time.sleep(0.3)
    begun = time.monotonic()
    try:
        comm.all_reduce(np.ones(4))
    except MiracclError as error:
        late = time.monotonic() - begun - deadline
        return {**seen(error), "late": late}
    return {"type": "none"}


def split_death() -> Any:
    """Rank 3 dies in a communicator of ranks 1 and 3; rank 1 says who that is in the job."""
    comm = miraccl.init(timeout=20)
    part = comm.split(comm.rank % 2)
    assert part is not None
    part.all_reduce(np.ones(4))
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank != 1:
        return {}
    try:
        while True:
            part.all_reduce(np.ones(4))
    except MiracclError as error:
        return seen(error)


# ---- the network between live ranks


def black_hole(seconds: float) -> Any:
    """No packet reaches rank 1 for ``seconds``, or ever with 0; the control plane works."""
    comm = miraccl.init(timeout=20 if seconds else 4)
    comm.all_reduce(np.ones(70_000))
    together(comm)
    if comm.rank == 1:
        fabric: Any = comm._core.fabric
        (proxy,) = fabric._proxies.values()
        sockets = {s for peer in proxy._peers.values() for s in peer.connection.streams}
        reject = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: accept 0
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(reject))
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        if seconds:

            def heal() -> None:
                for sock in sockets:
                    sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)

            threading.Timer(seconds, heal).start()
    together(comm)
    start = time.monotonic()
    try:
        total = comm.all_reduce(np.full(70_000, comm.rank + 1.0))
        assert (total == comm.nranks * (comm.nranks + 1) / 2).all()
    except MiracclError as error:
        found = {**seen(error), "seconds": time.monotonic() - start}
        nobody_left(comm)
        return found
    comm.finalize()
    return {"type": "none"}
