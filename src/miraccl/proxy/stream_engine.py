"""The progress engine: one thread per rank that moves messages between FIFOs and TCP streams.

The thread runs compiled code without the interpreter's lock (``proxy.kernels.progress_engine``),
whose decisions are those of ``wire.proxy``.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from miraccl import native
from miraccl.proxy.compiled_thread import CompiledThread
from miraccl.proxy.kernels import link_layout as layout
from miraccl.proxy.link_memory import LinkMemory
from miraccl.transport.base import Driving, NetConnection, OnLost, Wake
from miraccl.transport.fifo import Atomics, PrivateMemory
from miraccl.wire.proxy_records import LinkConfig, Loss, LossKind
from miraccl.wire.stream import MAX_TEXT_BYTES, MIN_SEGMENT_BYTES, Frame, FrameType, encode_frame

KERNEL = "miraccl.proxy.kernels.progress_engine"
#: Largest segment of a message, in bytes; the kernel's buffer delays what is queued behind as much.
SEGMENT_BYTES = 1 << 22
#: Bytes that a stream queues before the kernel has them; over several networks a segment.
QUEUE_BYTES = 1 << 18
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


@dataclass(eq=False)
class EngineLink:
    """One peer: its sockets, and the memory of its compiled state."""

    connection: NetConnection
    memory: LinkMemory
    staging: PrivateMemory
    index: int
    closed: bool = field(default=False)

    @property
    def address(self) -> int:
        """Address of the compiled state."""
        return self.memory.address

    @property
    def peer(self) -> int:
        return self.connection.peer

    @property
    def alive(self) -> bool:
        """True while streams and memory are in use."""
        return self.memory.alive

    def take_end(self) -> tuple[bool, Loss | None]:
        """Return (True, loss) once, when the link has ended; see ``CompiledPeer``."""
        if not self.memory.take_end():
            return False, None
        return True, self.loss() if self.memory.lost else None

    def close(self) -> None:
        """Close the sockets; bytes that the kernel has accepted are still delivered.
        Idempotent.
        """
        self.closed = True
        for sock in self.connection.streams:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def send_abort(self, text: str) -> None:
        """Send an ABORT frame on streams that are between frames, if the kernel takes it at
        once.
        """
        data = text.encode()[:MAX_TEXT_BYTES]
        for index, sock in enumerate(self.connection.streams):
            stream = layout.LINK_STREAMS + index * layout.STREAM_BYTES
            if self.memory.word(stream + layout.STREAM_WRITTEN):
                continue
            frame = Frame(FrameType.ABORT, index, length=len(data))
            with suppress(OSError):
                sock.send(encode_frame(frame) + data)

    def loss(self) -> Loss:
        """Return why the link ended."""
        return self.memory.loss()


class ProgressEngine(CompiledThread[EngineLink]):
    """Moves messages for one rank over TCP; see ``ProgressThread`` and ``CompiledThread``.

    Args:
        segment_bytes: Largest segment of a message.
        spin_ns: Nanoseconds that an idle thread polls; see ``CompiledThread``.
    """

    noun = "progress engine"
    thread_name = "engine"
    kernel = KERNEL
    #: The kernel has ``drive``.
    can_be_driven = True

    def __init__(
        self,
        *,
        rank: int,
        wake: Wake,
        on_lost: OnLost,
        control: int = 0,
        atomics: Atomics | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        spin_ns: int | None = None,
    ) -> None:
        self._segment_bytes = segment_bytes
        super().__init__(
            rank=rank,
            wake=wake,
            on_lost=on_lost,
            control=control,
            atomics=atomics,
            spin_ns=spin_ns,
        )

    def _prepare(self) -> None:
        super()._prepare()
        self._drive = self._library.address(native.PREFIX + "drive") if self.can_be_driven else 0
        self._set(layout.ENGINE_LOCK, 1)  # of the thread, whenever it is outside ``run``

    # --- other threads

    def driver(self, *, overlap: bool) -> Driving:
        """Return how a waiting executor advances the links itself (``progress_engine.drive``).

        Args:
            overlap: There is a core for the thread beside that of the executor: it moves large
                messages. Else it sleeps at once when nothing moves: it would keep the core from
                the executor that it has just woken.
        """
        if not overlap:
            self._set(layout.ENGINE_SPIN_NS, 0)
        self._set(layout.ENGINE_OVERLAP, int(overlap))
        return Driving(self._drive, self._memory.address)

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over the sockets of all connections and start to move messages; of none on
        failure.
        """
        self._call(lambda: self._attach(connections))

    # --- the thread

    def _end_link(self, link: EngineLink, loss: Loss | None) -> None:
        if loss and loss.kind in (LossKind.PROTOCOL, LossKind.INTERNAL):
            link.send_abort(loss.detail)
        link.close()

    def _free(self, link: EngineLink) -> None:
        link.close()

    def _send_aborts(self, text: str) -> None:
        for link in self._peers.values():
            if link.alive:
                link.send_abort(text)

    def _attach(self, connections: Sequence[NetConnection]) -> None:
        for connection in connections:
            self._check_new(connection.peer)
        attached: list[int] = []
        try:
            for connection in connections:
                self._peers[connection.peer] = self._new_link(connection)
                attached.append(connection.peer)
        except BaseException:
            self._remove(attached)
            for sock in connection.streams:
                sock.close()
            raise

    def _new_link(self, connection: NetConnection) -> EngineLink:
        nstreams = len(connection.streams)
        config = LinkConfig(
            nstreams=nstreams,
            send_slot_bytes=connection.peer_slot_bytes,
            recv_slot_bytes=connection.pair.recv.slot_bytes,
            segment_bytes=self._segment_bytes,
            queue_bytes=QUEUE_BYTES if connection.rails == 1 else MIN_SEGMENT_BYTES,
            rails=connection.rails,
        )
        memory = self._link_memory(config, connection)
        rails = connection.rails
        low_water = layout.LOW_WATER_BYTES if rails == 1 else layout.RAIL_LOW_WATER_BYTES
        memory.store(layout.LINK_LOW_WATER, low_water)
        staging = PrivateMemory(layout.STAGING_BYTES * nstreams)
        index = self._free_entry()
        for i, sock in enumerate(connection.streams):
            sock.setblocking(False)
            stream = layout.LINK_STREAMS + i * layout.STREAM_BYTES
            memory.store(stream + layout.STREAM_FD, sock.fileno())
            memory.store(stream + layout.STREAM_READABLE, 1)
            memory.store(stream + layout.STREAM_WRITABLE, 1)
            memory.store(stream + layout.STREAM_STAGING, staging.address + i * layout.STAGING_BYTES)
            self._watch(sock.fileno(), _EDGES, index << 8 | i)
        self._set_entry(index, memory.address)
        return EngineLink(connection, memory, staging, index)

    def _link_memory(self, config: LinkConfig, connection: NetConnection) -> LinkMemory:
        return LinkMemory(
            config, engine=self._memory.address, peer=connection.peer, pair=connection.pair
        )
