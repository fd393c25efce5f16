"""One-sided operations of a communicator: put, get and signals on windows that ranks register."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

# miraccl.p2p loads the transports of agents, which most programs do not use: imported when called.
from miraccl import clock
from miraccl.errors import CollectiveTimeout, InvalidUsage

if TYPE_CHECKING:
    from miraccl.p2p.agent import Agent
    from miraccl.p2p.descriptors import RemoteMemory
    from miraccl.p2p.notify import Notification
    from miraccl.p2p.peer import Peer
    from miraccl.p2p.registration import Registration
    from miraccl.p2p.transfer import Transfer

_SIGNAL = struct.Struct("<4sq")
_MAGIC = b"MRSG"
#: Room for the descriptor of a rank in the exchange of ``window``.
_DESCRIPTOR_BYTES = 1024


class Window:
    """Memory that each rank of a communicator has registered for the others; see ``window``.

    Attributes:
        array: This rank's memory.
    """

    def __init__(self, array: Any, registration: Registration, remotes: list[RemoteMemory]) -> None:
        self.array, self._registration = array, registration
        self.remotes = remotes

    def nbytes(self, rank: int) -> int:
        """Return the size of a rank's memory."""
        return self.remotes[rank].nbytes

    def close(self) -> None:
        """End the registration; returns when no further access can come.

        Raises:
            TransferTimeout: A rank still accesses the memory.
        """
        self._registration.deregister()


class OneSided:
    """Mixin of ``Communicator`` with the operations on windows."""

    rank: int
    nranks: int
    _agent: Agent | None = None

    def window(self, x: Any) -> Window:
        """Register an array of each rank for ``put`` and ``get`` of all others; collective.

        Args:
            x: Contiguous array in CPU or GPU memory; its size may differ between ranks. Memory of
                an agent's ``empty`` is fastest.

        Returns:
            The window; ``close`` ends it.

        Raises:
            InvalidUsage: ``x`` cannot be registered.
        """
        agent = self._open_agent()
        registration = agent.register(x)
        remotes = self._gather_descriptors(registration.advertise())
        return Window(x, registration, remotes)

    def put(
        self, x: Any, dst: int, window: Window, *, offset: int = 0, signal: int | None = None
    ) -> None:
        """Write ``x`` to the window of rank ``dst``; returns when it is there.

        Args:
            x: Contiguous array.
            dst: Rank from 0 to nranks - 1.
            window: Result of ``window``.
            offset: Byte in the window of ``dst``.
            signal: Number of the signal that ``dst`` gets after the data; None for none.

        Raises:
            InvalidUsage: The range is outside the window.
            TransferError: The transfer failed; see ``miraccl.Agent``.
        """
        self._move("write", x, dst, window, offset, signal).wait()

    def get(self, x: Any, src: int, window: Window, *, offset: int = 0) -> Any:
        """Read the window of rank ``src`` into ``x`` and return it; arguments as ``put``.

        Raises:
            InvalidUsage: The range is outside the window.
            TransferError: The transfer failed.
        """
        self._move("read", x, src, window, offset, None).wait()
        return x

    def signal(self, dst: int, signal: int = 0) -> None:
        """Send a signal to rank ``dst``, after the data of all earlier ``put``.

        Args:
            dst: Rank from 0 to nranks - 1.
            signal: Number of the signal.

        Raises:
            InvalidUsage: No window has been made yet.
            TransferError: The rank cannot be reached.
        """
        self._opened("signal")
        self._peer(dst, self._addresses).notify(_SIGNAL.pack(_MAGIC, signal))

    def wait_signal(self, src: int, signal: int = 0, *, timeout: float | None = None) -> None:
        """Wait for one signal of rank ``src``.

        Args:
            src: Rank from 0 to nranks - 1.
            signal: Number of the signal.
            timeout: Seconds, default the communicator's.

        Raises:
            CollectiveTimeout: It has not come in time.
            TransferError: The ``put`` with this signal failed.
        """
        agent = self._opened("wait_signal")
        wanted, sender = _SIGNAL.pack(_MAGIC, signal), self._addresses[src].agent

        def is_ours(notification: Notification) -> bool:
            return notification.agent == sender and notification.data == wanted

        found = agent.wait_notification(timeout, match=is_ours)
        if found is None:
            raise CollectiveTimeout(
                f"signal {signal} of rank {src} has not come within "
                f"{agent.timeout if timeout is None else timeout:g} s",
                rank=self.rank,
                peer=src,
            )
        if found.error is not None:
            raise found.error

    # ---- inside

    _addresses: list[RemoteMemory]

    def _move(
        self, kind: str, x: Any, peer: int, window: Window, offset: int, signal: int | None
    ) -> Transfer:
        self._opened(kind)
        from miraccl.p2p.arrays import memory_of

        memory = memory_of(x, "x", kind)
        remote = window.remotes[self._checked(peer)]
        if offset < 0 or offset + memory.nbytes > remote.nbytes:
            raise InvalidUsage(
                f"cannot {kind} {memory.nbytes} bytes at offset {offset}: the window of rank "
                f"{peer} has {remote.nbytes} bytes"
            )
        part = replace(remote, offset=offset, nbytes=memory.nbytes, block_nbytes=1)
        notify = None if signal is None else _SIGNAL.pack(_MAGIC, signal)
        connection = self._peer(peer, window.remotes)
        call = connection.write if kind == "write" else connection.read
        return call(x, part, notify=notify)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.nranks:
            raise InvalidUsage(f"rank {rank} is not in 0..{self.nranks - 1}")
        return rank

    def _peer(self, rank: int, remotes: list[RemoteMemory]) -> Peer:
        assert self._agent is not None
        return self._agent.peer_of(remotes[self._checked(rank)])

    def _opened(self, op_name: str) -> Agent:
        if self._agent is None:
            raise InvalidUsage(f"cannot {op_name}: make a window first, with comm.window(x)")
        return self._agent

    def _open_agent(self) -> Agent:
        """Make the agent of this rank at the first window; collective."""
        comm: Any = self
        if self._agent is None:
            from miraccl.p2p.agent import Agent
            from miraccl.wire.auth import SECRET_BYTES

            secret = np.frombuffer(clock.random_bytes(SECRET_BYTES), np.uint8).copy()
            secret = comm.broadcast(secret, root=0)
            self._agent = Agent(
                f"rank-{self.rank}", secret=secret.tobytes(), timeout=comm._core.session.timeout
            )
            marker = self._agent.register(np.zeros(1, np.uint8))
            self._addresses = self._gather_descriptors(marker.advertise())
        return self._agent

    def _gather_descriptors(self, descriptor: bytes) -> list[RemoteMemory]:
        """Return the descriptors of all ranks; collective."""
        from miraccl.p2p.descriptors import RemoteMemory

        comm: Any = self
        line = len(descriptor).to_bytes(2, "little") + descriptor
        mine = np.frombuffer(line.ljust(_DESCRIPTOR_BYTES, b"\0"), np.uint8).copy()
        lines = comm.all_gather(mine).reshape(self.nranks, -1)
        return [
            RemoteMemory.decode(data[2 : 2 + int.from_bytes(data[:2], "little")])
            for data in (each.tobytes() for each in lines)
        ]

    def _close_agent(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()
