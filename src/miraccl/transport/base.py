"""The contract between ranks' memory and whatever moves bytes: endpoints, FIFO descriptors, transports.

A transport connects pairs of ranks.  ``setup`` opens what peers must know of and describes it in opaque bytes; ``comm`` carries
these through the bootstrap's all-gather and gives everybody's to ``connect``, which returns a ``FifoPair`` per peer.  From then on
data move through FIFOs in memory (``transport.fifo``); the executor neither knows nor asks who is on the other side of one.

Who owns what: the transport owns memory, segments, sockets and descriptors, and frees them in ``close``; executors own nothing here and
must have stopped before ``close``.  Each FIFO has one writer and one reader.  Receiver-driven: a payload lands in a free slot or at an
address that the receiver wants, nowhere else.
"""

from __future__ import annotations

import abc
import enum
import os
import socket as _socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miraccl.transport import fifo
from miraccl.wire.proxy_records import Loss

OnLost = Callable[[int, Loss], None]
"""``on_lost(peer, loss)``: called once per peer, at once, possibly from the proxy's thread; it must be quick and not raise."""
Wake = Callable[[int], None]
"""``wake(rank)``: wake this process's executor of ``rank`` if it sleeps; called after flags or tails were published."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """One rank as transports see it.

    ``hostid`` names the machine (ranks with different names never share memory), ``pid`` is the process, ``addresses`` are the host's
    numeric IP addresses that peers may use, best first.
    """

    rank: int
    hostid: str
    pid: int
    addresses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"a rank is 0 or more, got {self.rank}")


def machine_id() -> str:
    """The kernel's boot: equal on all ranks of a machine, whatever hosts they claim to be on."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


class FifoKind(enum.IntEnum):
    """Who is on the other side of a FIFO: the peer itself, or the proxy."""

    SHM = 0
    NET = 1


@dataclass(frozen=True, kw_only=True)
class Fifo:
    """Addresses in this process of one FIFO; the layout is that of ``transport.fifo``.

    ``post``, ``want`` and ``slots`` are bases of rings, ``tail`` is a word.  ``bell`` is an eventfd and ``asleep`` the address of a word:
    whoever stored a flag, a tail or a want writes 1 to ``bell`` if, after a full fence, it reads 1 from ``asleep``.  A shared-memory FIFO
    has ``bell`` -1 and ``asleep`` 0.
    """

    kind: FifoKind
    descriptors: int
    tail: int
    cts: int
    slots: int
    slot_bytes: int
    doorbell: int = -1
    asleep: int = 0

    @classmethod
    def from_address(
        cls, address: int, slot_bytes: int, *, kind: FifoKind, doorbell: int = -1, asleep: int = 0
    ) -> Fifo:
        """The FIFO that lies at ``address`` in the standard layout."""
        return cls(
            kind=kind,
            descriptors=address + fifo.DESC_OFFSET,
            tail=address + fifo.TAIL_OFFSET,
            cts=address + fifo.CTS_OFFSET,
            slots=address + fifo.SLOTS_OFFSET,
            slot_bytes=slot_bytes,
            doorbell=doorbell,
            asleep=asleep,
        )


@dataclass(frozen=True, kw_only=True)
class FifoPair:
    """The two FIFOs between this rank and a peer.  ``memory`` keeps the memory alive as long as the pair."""

    send: Fifo
    recv: Fifo
    memory: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class NetConnection:
    """Authenticated streams to a peer and the FIFOs that they feed; the proxy owns the sockets from here on.

    ``peer_slot_bytes`` is the size of the slots into which the peer receives: larger messages wait for a want.
    """

    peer: int
    streams: Sequence[_socket.socket]
    pair: FifoPair
    peer_slot_bytes: int


class ProxyPort(Protocol):
    """What a network transport needs of a proxy."""

    @property
    def doorbell(self) -> int: ...
    @property
    def asleep(self) -> int: ...
    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over sockets and start to move messages."""

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close; memory is not touched afterwards."""

    def abort(self, text: str) -> None:
        """Tell all peers why, if they listen, and close at once; memory is not touched afterwards."""


class Transport(abc.ABC):
    """A way to connect pairs of ranks; one object per communicator and rank. ``comm.fabric`` says which pairs get which."""

    @staticmethod
    @abc.abstractmethod
    def can_connect(a: Endpoint, b: Endpoint) -> bool:
        """Whether two ranks can be connected; symmetric, and a function of the two records only."""

    @abc.abstractmethod
    def setup(self) -> bytes:
        """Open what peers need to find this rank; the bytes are for their ``connect``.  A second call returns the same."""

    @abc.abstractmethod
    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        """Connect to the ranks in ``infos`` (rank -> their ``setup()``); both ranks of a pair must ask for each other.

        May be called again for other ranks.  Raises ``AuthenticationError``, ``SystemFailure`` or ``BootstrapError`` naming the
        peers, within the transport's deadline.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything; may be called twice.  What was posted is sent first, within a bounded time."""

    def abort(self, text: str) -> None:
        """Close at once and, where the transport can, tell the peers ``text``.  No memory is touched after the return."""
        self.close()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
