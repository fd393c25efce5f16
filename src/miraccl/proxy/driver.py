"""Contract of drivers: one peer of a proxy, between its FIFOs in memory and a network.

A driver turns what it finds in memory and on the network into events of a protocol machine
(``wire.proxy`` for streams), and carries out the machine's instructions. The proxy owns the thread,
epoll and the sleep; it knows nothing about the network behind a driver. ``stream_driver`` is the
implementation for TCP streams. A connection names the module of its driver, which has a function
``open_driver(connection, context) -> Driver``.

Order of calls, all on the proxy's thread: ``descriptors`` once, then any number of ``ready``,
``handle``, ``poll`` and ``arm``, then ``close``. None of them blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miraccl.transport.base import OnLost
from miraccl.transport.fifo import Atomics
from miraccl.wire.proxy_records import Event

NO_TIMER = float("inf")


@dataclass(frozen=True, kw_only=True)
class DriverContext:
    """Resources that a proxy gives to its drivers.

    Attributes:
        on_lost: Called with (peer, loss) when a connection ends unexpectedly.
        segment_bytes: Largest segment of a message.
        shared: Objects that several drivers use, by a key of theirs.
    """

    atomics: Atomics
    on_lost: OnLost
    segment_bytes: int
    shared: dict[Any, Any] = field(default_factory=dict)


class Driver(Protocol):
    """One peer of a proxy.

    Attributes:
        peer: Rank of the peer.
        reached: True once a path to the peer is known to work in both directions.
        dirty: Set when flags or tails were published for which the executor may sleep; the proxy
            wakes it and resets the attribute.
    """

    peer: int
    reached: bool
    dirty: bool

    @property
    def alive(self) -> bool:
        """True until the connection has ended; memory is not touched afterwards."""

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors to watch, edge-triggered, for input, output and hang-up."""

    def ready(self, descriptor: int, events: int) -> None:
        """Record that epoll reported ``events`` for a descriptor."""

    def handle(self, event: Event) -> None:
        """Process an event of the owner: a request to close or abort, or an internal error."""

    def poll(self) -> bool:
        """Move what can be moved now, a bounded number of system calls.

        Returns True if more could be moved at once.
        """

    def arm(self) -> float:
        """Look for news of the executor, after the word ``asleep`` was set.

        Returns the seconds for which the proxy may sleep unless a descriptor becomes ready: 0 if
        there was news, ``NO_TIMER`` without a timer.
        """

    def close(self) -> None:
        """Close the network connection; idempotent."""
