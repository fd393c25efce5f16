"""Contract of a session: the control plane of one group of ranks, as communicators use it.

Two kinds fulfil it and run the same conformance kit (``tests/bootstrap/conformance.py``): sessions
over TCP, made by ``connect`` and ``join_launch``, and sessions of virtual ranks in one process,
made by ``InMemoryJob``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, runtime_checkable

from miraccl.bootstrap.events import Event
from miraccl.deadline import Deadline

EventCallback = Callable[[Event], None]
StatusProvider = Callable[[], dict[str, Any]]


@runtime_checkable
class Session(Protocol):
    """Control plane of one group of ranks.

    All methods may be called from any thread. Ranks are those of the session.

    Attributes:
        name: Name for messages; ``world`` for that of the whole job.
        timeout: Deadline in seconds of calls that give none.
        world_ranks: By rank, its number in the whole job.
        hosts: By rank, equal for ranks that share a host.
        pids: Process ids by rank.
        tokens: By rank, name of its process, the same in all sessions.
        addresses: By rank, an address that all ranks of the job can reach.
        all_addresses: By rank, all addresses that it announced.
        data_key: Key from which data transports derive theirs, distinct for each session.
        status_provider: Adds to this rank's replies to status queries.
        thread_ids: Threads whose location is reported, by default the one that made the session.
    """

    rank: int
    nranks: int
    name: str
    timeout: float
    world_ranks: tuple[int, ...]
    hosts: list[str]
    pids: list[int]
    tokens: tuple[str, ...]
    addresses: list[str]
    all_addresses: list[tuple[str, ...]]
    data_key: bytes
    status_provider: StatusProvider | None
    thread_ids: tuple[int, ...]

    @property
    def closed(self) -> bool: ...

    @property
    def key(self) -> str:
        """Name of this session, unique and the same on all ranks."""

    def all_gather(
        self, data: bytes, tag: str, timeout: float | Deadline | None = None
    ) -> list[bytes]:
        """Return every rank's ``data`` in rank order.

        Calls with different tags may overlap; calls with one tag match in order. ``timeout``:
        seconds, or the deadline of an enclosing operation. Raises ``CollectiveTimeout`` naming the
        missing ranks, ``PeerDied`` if a rank of the group died, ``BootstrapError`` if one left.
        """

    def end_gather(self, tag: str, reason: str) -> None:
        """End this rank's ``all_gather`` with this tag: it raises ``CommunicatorAborted``.

        Any thread may call it.
        """

    def barrier(self, tag: str, timeout: float | None = None) -> None:
        """Return when all ranks have called it."""

    def notify(self, payload: dict[str, Any]) -> None:
        """Send a notice (plain JSON values) to all other ranks, without waiting for them.

        Raises if the control plane is gone.
        """

    def drain(self, timeout: float) -> None:
        """Wait until this rank has handled all messages received so far, at most ``timeout`` s."""

    def gone(self) -> frozenset[int]:
        """Return the ranks that are known to have died or left."""

    def wait_until_delivered(self, timeout: float, without: Collection[int] = ()) -> None:
        """Wait until the others have handled this rank's messages, at most ``timeout`` seconds.

        Ranks that are gone, or in ``without``, are not waited for.
        """

    def request_status(
        self,
        timeout: float = 1.0,
        without: Collection[int] = (),
        quiet: float | None = None,
    ) -> dict[int, dict[str, Any]]:
        """Return the status of each rank after at most ``timeout`` seconds.

        A reply has ``answered: True``, pid, host, ``threads`` (``where``: file:line function
        outside this package, and its ``stack``, of each thread) and ``status``, the result of the
        provider. A rank that did not reply has ``answered: False`` and a ``reason``. Ranks of
        ``without`` are not waited for; the wait ends early when no reply has come for ``quiet``
        seconds.
        """

    def subgroup(self, ranks: Sequence[int], name: str) -> Session:
        """Return a session for some of the ranks, renumbered in the order given.

        Each of them calls it with the same arguments; it does not wait for the others. It outlives
        this session.
        """

    def on_event(self, callback: EventCallback) -> None:
        """Call ``callback(event)`` on the watcher thread for every event, first for earlier ones.

        It must not block.
        """

    def off_event(self, callback: EventCallback) -> None:
        """Stop calling ``callback``, whose last call may still be running."""

    def close(self, reason: str = "finalized") -> None:
        """Leave the session; the others see ``PeerLeft``.

        May be called twice. Sessions split from this one stay open.
        """

    def __enter__(self) -> Session: ...

    def __exit__(self, *exc: object) -> None: ...
