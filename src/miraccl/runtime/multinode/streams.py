"""TCP streams between nodes that staging threads serve themselves (``executor.cpu.kernels.nogil``).

The socket transport connects the peers and creates the streams, in addition to those of the CPU
communicator; compiled code uses their descriptors instead of a proxy.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Mapping, Sequence

import numpy as np

from miraccl import params
from miraccl.executor.cpu.context import call_kernel, nogil_kernel
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport import registry
from miraccl.transport.base import NetConnection, Transport
from miraccl.transport.fifo import PAGE_BYTES
from miraccl.transport.socket import SocketOptions, SocketTransport


class _StreamCollector:
    """Proxy port that collects a transport's streams without serving them (``transport.base``)."""

    doorbell, asleep = -1, 0

    def __init__(self) -> None:
        self.streams: dict[int, socket.socket] = {}

    def attach(self, connections: Sequence[NetConnection]) -> None:
        self.streams |= {connection.peer: connection.streams[0] for connection in connections}

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        self.abort("")

    def abort(self, text: str) -> None:
        for stream in self.streams.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
            stream.close()
        self.streams.clear()


def network_between_hosts(core: CoreAccess) -> str:
    """Return the transport that connects all pairs of ranks on different hosts, "" if several do.

    All ranks agree, because a choice depends on the two endpoints and the common settings.
    """
    specs = registry.allowed(params.NET.read())
    names = {
        registry.choose(core.endpoints[a], core.endpoints[b], specs).name
        for a, b in itertools.combinations(range(core.nranks), 2)
        if core.hosts[a] != core.hosts[b]
    }
    return names.pop() if len(names) == 1 else ""


def streams_possible(core: CoreAccess) -> bool:
    """Return True if the ranks of different hosts have only TCP; all ranks agree."""
    hosts = len(set(core.hosts))
    return hosts <= 1 or network_between_hosts(core) == registry.TCP.name


def open_streams(
    stages: SetupPhases, core: CoreAccess, name: str, collector: _StreamCollector
) -> Transport:
    """Return a transport that opens one TCP stream per peer and hands it to ``collector``.

    This is the one place that depends on the transport. ``name``: distinguishes the streams from
    others of the session.
    """
    session = stages.session

    def check_setup() -> None:
        stages.check()
        core.check("connecting")

    return SocketTransport(
        core.endpoints[core.rank],
        proxy=collector,
        secret=session.data_key,
        job=f"{session.name} {name}".encode(),
        slot_bytes=PAGE_BYTES,
        options=SocketOptions(nstreams=1, buffer_bytes=params.SOCKET_BUFFER.read()),
        timeout=stages.deadline,
        check=check_setup,
    )


class StagingStreams:
    """One stream to each of ``peers``, created by all ranks of the session of ``stages``.

    Ranks are those of ``core``. Used by one thread at a time.
    """

    def __init__(
        self, stages: SetupPhases, core: CoreAccess, peers: Sequence[int], name: str
    ) -> None:
        self.core, self.peers = core, tuple(sorted(peers))
        self._collector = _StreamCollector()
        self._transport = open_streams(stages, core, name, self._collector)
        try:
            infos = stages.gather(name, self._transport.setup())
            self._transport.connect({peer: infos[peer] for peer in self.peers})
        except BaseException:
            self.close()
            raise

    @property
    def sockets(self) -> Mapping[int, socket.socket]:
        """Streams by peer."""
        return self._collector.streams

    def descriptor(self, peer: int) -> int:
        return self._collector.streams[peer].fileno()

    def shutdown_writes(self) -> None:
        """Shut down sending: peers find the end of the stream behind the data sent."""
        for stream in self.sockets.values():
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the streams. May be called twice."""
        self._transport.close()


class StreamOperation:
    """Operation on streams (``staging.PreparedSegment``); ``kernel``: its compiled function."""

    kernel: str

    def __init__(self, core: CoreAccess, name: str) -> None:
        self.name, self.core = name, core
        self._words = np.zeros(offsets.EXCHANGE_BYTES // 8, np.int64)

    def _set_rows(self, rows: np.ndarray) -> None:
        """Set the words of the peers."""
        self.rows, self._polls = rows, np.zeros(len(rows), np.int64)
        write_words(
            self._words,
            (offsets.NPEERS, len(rows)),
            (offsets.ROWS, rows.ctypes.data),
            (offsets.POLLS, self._polls.ctypes.data),
        )

    def unlocked(self) -> tuple[int, int, int]:
        """Return (function, context, exchange) as in ``runtime.persistent``."""
        return (
            nogil_kernel(self.kernel),
            self.core.context_address,
            int(self._words.ctypes.data),
        )

    def check_result(self, code: int) -> None:
        """Raise the error of a code of the compiled function."""
        self.core.check_result(code, self.name)

    def __call__(self) -> None:
        self.core.check(self.name)
        function, context, exchange = self.unlocked()
        self.check_result(call_kernel(function, context, exchange, 0, 0))


def remaining_bytes(row: np.ndarray, direction: int) -> int:
    """Return the bytes of a peer's message still to send (``OUT``) or to receive (``IN``)."""
    return int(row[(direction + offsets.BYTES) // 8] - row[(direction + offsets.MOVED) // 8])


def write_words(words: np.ndarray, *values: tuple[int, int]) -> None:
    """Write words at byte offsets."""
    for place, value in values:
        words[place // 8] = value
