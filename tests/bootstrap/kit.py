"""Ranks as threads and as forked processes, with bounded waits everywhere."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest

from miraccl.bootstrap import (
    Event,
    PeerLeft,
    PeerLost,
    Session,
    StatusRequest,
    UniqueId,
    connect,
    create_hub,
)
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import BootstrapError

PATIENCE = (
    60.0  # seconds until a test gives up; on an idle machine nothing takes more than one or two
)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")


def in_threads(calls: Sequence[Callable[..., Any]]) -> list[Any]:
    """Run the calls at the same time; their results in order, an exception as a result."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return results


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that another thread does and does not announce."""
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "what was waited for does not happen"
        time.sleep(0.002)


@contextlib.contextmanager
def job(nranks: int, hosts: Sequence[str] | None = ("127.0.0.1",)) -> Iterator[list[LinkSession]]:
    """Sessions of a job whose ranks are threads of this process."""
    unique_id, root = create_hub(hosts=hosts)
    sessions = in_threads(
        [
            lambda rank=rank: connect(unique_id, rank, nranks, PATIENCE, session_timeout=PATIENCE)
            for rank in range(nranks)
        ]
    )
    for session in sessions:
        assert isinstance(session, LinkSession), session
    try:
        yield sessions
    finally:
        for session in sessions:
            session.close()
        assert root.join(PATIENCE)


def raises_at_the_deadline(
    text: str, attempt: Callable[[float], object], kind: type[BootstrapError] = BootstrapError
) -> None:
    """``attempt(seconds)`` raises what the pattern ``text`` describes; on a busy machine it may
    take more seconds to find that out.
    """
    for seconds in (0.1, 0.5, 2.0, PATIENCE / 4):
        with pytest.raises(BootstrapError) as caught:
            attempt(seconds)
        if isinstance(caught.value, kind) and re.search(text, str(caught.value)):
            return
    raise AssertionError(f"it does not say {text!r}") from caught.value


class Inbox:
    """Events of a session, to be waited for."""

    def __init__(self, session: Session) -> None:
        self._events: queue.Queue[Event] = queue.Queue()
        session.on_event(self._events.put)

    def next(self) -> Event:
        return self._events.get(timeout=PATIENCE)

    def next_of(self, *kinds: type[Any]) -> Any:
        """The next event of these kinds."""
        while not isinstance(event := self.next(), kinds):
            pass
        return event

    def empty(self) -> bool:
        return self._events.empty()


class Child:
    """A forked process that runs ``main(pipe)``; ``recv`` waits for what it sends."""

    def __init__(self, main: Callable[[Connection], None]) -> None:
        self.pipe, theirs = Pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.pipe.close()
                main(theirs)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        theirs.close()
        self._ended = False

    def recv(self) -> Any:
        assert self.pipe.poll(PATIENCE), "a child says nothing"
        return self.pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        if not self._ended:
            self._ended = True
            os.waitpid(self.pid, 0)

    def end(self) -> None:
        if not self._ended:
            self.kill()
        self.pipe.close()


def report_events(session: LinkSession, pipe: Connection) -> None:
    """Send events through the pipe as (kind, rank, reason)."""

    def send(event: Event) -> None:
        if isinstance(event, PeerLost | PeerLeft):
            pipe.send((type(event).__name__, event.rank, event.reason))
        elif not isinstance(event, StatusRequest):
            pipe.send((type(event).__name__, event.from_rank, event.payload))

    session.on_event(send)


def child_rank(unique_id: UniqueId, rank: int, nranks: int) -> Callable[[Connection], None]:
    """A rank that meets, says so, reports events, and closes when the pipe says anything."""

    def main(pipe: Connection) -> None:
        try:
            session = connect(unique_id, rank, nranks, PATIENCE)
        except Exception as error:
            pipe.send(error)
            return
        pipe.send("met")
        report_events(session, pipe)
        if pipe.poll(PATIENCE):
            pipe.recv()
        session.close()

    return main


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])
