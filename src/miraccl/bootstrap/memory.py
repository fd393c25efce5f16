"""Control plane of virtual ranks in one process: no sockets, no proofs, one thread for all ranks.

For simulations and tests. The rules of groups, gathers, notices and status queries are those of the
hub (``wire.bootstrap_groups``); sessions and links are those of real jobs, with records instead of
bytes between them. With a virtual clock (``miraccl.clock``) deadlines pass without waiting.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from miraccl import clock
from miraccl.bootstrap.control_link import ControlLink, Membership
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import CommunicatorClosed, ProtocolError
from miraccl.host import network_fingerprint
from miraccl.wire.bootstrap_groups import Groups
from miraccl.wire.bootstrap_messages import Gone, Join

Command = Callable[[], None]


class InMemoryJob:
    """A formed job of ``nranks`` virtual ranks.

    ``sessions``: one per rank, of the whole job. ``timeout``: their deadline in seconds. ``hosts``:
    by rank the name of its host, default the same for all.
    """

    def __init__(
        self, nranks: int, *, timeout: float = 60.0, hosts: Sequence[str] | None = None
    ) -> None:
        self.nranks = nranks
        self._commands: clock.Queue[Command | None] = clock.simple_queue()
        self._groups = Groups(self._send)
        self._groups.open_world(nranks)
        self._alive = set(range(nranks))
        members = tuple(_member(rank, hosts[rank] if hosts else "") for rank in range(nranks))
        membership = Membership(members=members, hub_rank=-1)
        self._thread = clock.thread(target=self._run, name="miraccl-memory-hub", daemon=True)
        self._links = [MemoryLink(self, membership, rank=rank) for rank in range(nranks)]
        self.sessions = [
            LinkSession(
                link=link,
                membership=membership,
                ranks=tuple(range(nranks)),
                rank=link.rank,
                timeout=timeout,
            )
            for link in self._links
        ]
        key = hashlib.sha256(b"miraccl data" + clock.random_bytes(32)).digest()
        for session in self.sessions:
            session.data_key = key
        self._thread.start()

    def kill(self, rank: int, reason: str = "its process ended") -> None:
        """Let a rank die: the others see ``PeerLost``, and its own calls raise."""
        self.post(lambda: self._remove(rank, left=False, reason=reason))

    def close(self) -> None:
        """Close all sessions and wait for the thread."""
        for session in self.sessions:
            session.close()
        for link in self._links:
            link.close("the job was closed")
        self._thread.join()

    def __enter__(self) -> InMemoryJob:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- for links ---

    @property
    def on_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def post(self, command: Command) -> None:
        """Run ``command`` on the job's thread, after those posted before."""
        self._commands.put(command)

    def handle(self, rank: int, message: Any) -> None:
        """Handle a message of a rank; on the job's thread."""
        if rank in self._alive:
            try:
                self._groups.handle(rank, message, clock.monotonic())
            except ProtocolError as error:
                self._remove(rank, left=False, reason=error.message)

    def leave(self, rank: int, reason: str) -> None:
        """Handle a rank's goodbye; on the job's thread."""
        self._remove(rank, left=True, reason=reason)

    # --- thread ---

    def _run(self) -> None:
        while self._alive:
            deadline = min(self._groups.deadlines(), default=None)
            left = None if deadline is None else max(0.0, deadline - clock.monotonic())
            try:
                command = self._commands.get(timeout=left)
            except queue.Empty:
                self._groups.tick(clock.monotonic())
                continue
            if command is not None:
                command()
        while not self._commands.empty():  # a link that closes waits for what it has posted
            if (command := self._commands.get()) is not None:
                command()

    def _send(self, ranks: Iterable[int], message: Any) -> None:
        for rank in ranks:
            if rank in self._alive:
                self._links[rank].receive(message)

    def _remove(self, rank: int, *, left: bool, reason: str) -> None:
        if rank not in self._alive:
            return
        self._alive.discard(rank)
        self._links[rank].end(left, reason)
        self._send(range(self.nranks), Gone(rank=rank, left=left, reason=reason))
        self._groups.remove_rank(rank)


class MemoryLink(ControlLink):
    """Link of one virtual rank."""

    def __init__(self, job: InMemoryJob, membership: Membership, *, rank: int) -> None:
        super().__init__(rank=rank, nranks=job.nranks)
        self.membership = membership
        self._job = job
        self._stopped = clock.event()

    @property
    def hub_name(self) -> str:
        return "the control plane of this process"

    @property
    def on_watcher(self) -> bool:
        return self._job.on_thread

    def close(self, reason: str) -> None:
        with self._cond:
            first, self._closed = not self._closed, True
        if first:
            self._job.post(lambda: self._job.leave(self.rank, reason))
        if not self.on_watcher:
            self._stopped.wait()

    def drain(self, timeout: float) -> None:
        if not self.on_watcher and not self._stopped.is_set():
            drained = clock.event()
            self._job.post(drained.set)
            drained.wait(timeout)

    def _transmit(self, message: Any) -> None:
        if self._stopped.is_set():
            raise CommunicatorClosed("cannot send: the rank has ended", rank=self.rank)
        self._job.post(lambda: self._job.handle(self.rank, message))

    def _wake_watcher(self) -> None:
        self._job.post(self._run_callbacks)

    # --- on the job's thread ---

    def receive(self, message: Any) -> None:
        """Handle a message, then run the callbacks that it leads to."""
        with self._cond:
            self._handle_message(message)
        self._run_callbacks()

    def end(self, left: bool, reason: str) -> None:
        """The rank has left or died."""
        with self._cond:
            if not self._closed:
                self._control_plane_lost(left, reason)
        self._run_callbacks()
        self._stopped.set()


def _member(rank: int, host: str) -> Join:
    return Join(
        host=hashlib.sha256(host.encode()).hexdigest()[:16],
        network=network_fingerprint(),
        token=clock.random_bytes(8),
        pid=os.getpid(),
        addresses=("127.0.0.1",),
        loopback=True,
        timeout_total=0.0,
        timeout_left=0.0,
        standby_port=0,
    )
