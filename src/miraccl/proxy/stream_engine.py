"""The progress engine: one thread per rank that moves messages between FIFOs and TCP streams.

The thread runs compiled code without the interpreter's lock (``proxy.kernels.progress_engine``),
whose decisions are those of ``wire.proxy``.  It returns to Python for commands of other threads and
for links that have ended.

The split between the thread that computes and a proxy that drives the network is NCCL's
(``src/proxy.cc``).
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from miraccl import clock, native, trace
from miraccl.errors import CommunicatorClosed, MiracclError, ProtocolError, as_system_failure
from miraccl.proxy.commands import COMMAND_TIMEOUT_S, CommandQueue
from miraccl.proxy.kernels import link_layout as layout
from miraccl.transport.base import NetConnection, OnLost, Wake
from miraccl.transport.fifo import PAGE_BYTES, Atomics, PrivateMemory, memory_at, native_atomics
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, LinkConfig, Loss, LossKind
from miraccl.wire.stream import MAX_TEXT_BYTES, Frame, FrameType, decode_frame, encode_frame

log = trace.logger("proxy")

KERNEL = "miraccl.proxy.kernels.progress_engine"
#: Largest segment of a message, in bytes; the kernel's buffer delays what is queued behind as much.
SEGMENT_BYTES = 1 << 22
#: Nanoseconds that an idle engine polls before it sleeps: most answers arrive within this time, and
#: waking a sleeping thread costs about as much.
SPIN_NS = 50_000
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_DOORBELL_DATA = 0xFFFFFFFF
_EPOLL_CTL_ADD = 1
_TABLE_ENTRIES = 64


class _EpollEvent(ctypes.Structure):
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))
    _pack_ = 1 if os.uname().machine == "x86_64" else 0


_libc = ctypes.CDLL(None, use_errno=True)


def register_descriptor(epoll: int, fd: int, events: int, data: int) -> None:
    event = _EpollEvent(events, data)
    if _libc.epoll_ctl(epoll, _EPOLL_CTL_ADD, fd, ctypes.byref(event)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@dataclass(eq=False)
class EngineLink:
    """One peer: its sockets, and the memory of its compiled state."""

    connection: NetConnection
    memory: PrivateMemory
    staging: PrivateMemory
    index: int
    closed: bool = field(default=False)

    @property
    def address(self) -> int:
        """Address of the compiled state."""
        return self.memory.address

    def word(self, offset: int) -> int:
        """Return one word of the state."""
        return int.from_bytes(memory_at(self.address + offset, 8), "little", signed=True)

    def store(self, offset: int, value: int) -> None:
        """Set one word of the state."""
        memory_at(self.address + offset, 8)[:] = value.to_bytes(8, "little", signed=True)

    @property
    def alive(self) -> bool:
        """True while streams and memory are in use."""
        return self.word(layout.LINK_STATE) <= layout.STATE_CLOSING

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
            if self.word(stream + layout.STREAM_WRITTEN):
                continue
            frame = Frame(FrameType.ABORT, index, length=len(data))
            with suppress(OSError):
                sock.send(encode_frame(frame) + data)

    def loss(self) -> Loss:
        """Return why the link ended, in the words of ``wire.proxy``."""
        kind = self.word(layout.LINK_FAULT)
        a = self.word(layout.LINK_FAULT_A)
        if kind == layout.FAULT_CLOSED:
            return Loss(LossKind.CLOSED, "closed its communicator")
        if kind == layout.FAULT_RESET:
            return Loss(LossKind.RESET, os.strerror(a) if a else CLOSED_WITHOUT_CLOSE_FRAME)
        if kind == layout.FAULT_ABORTED:
            text = bytes(memory_at(self.address + layout.LINK_TEXT, a)).decode("utf-8", "replace")
            return Loss(LossKind.ABORTED, f"gave up: {text}")
        detail = self._detail()
        if kind == layout.FAULT_PROTOCOL:
            return Loss(LossKind.PROTOCOL, f"violated the protocol: {detail}")
        return Loss(LossKind.INTERNAL, detail)

    def _detail(self) -> str:
        code = self.word(layout.LINK_FAULT_CODE)
        if code in (layout.BAD_MAGIC, layout.BAD_TYPE, layout.BAD_HEADER):
            header = bytes(memory_at(self.address + layout.LINK_TEXT, layout.FRAME_BYTES))
            try:
                decode_frame(header)
            except ProtocolError as error:
                return error.message
        words = (layout.LINK_FAULT_A, layout.LINK_FAULT_B, layout.LINK_FAULT_C)
        return FAULT_TEXTS[code].format(*(self.word(w) for w in words))


#: Texts of faults by code (``link_layout``).
FAULT_TEXTS = {
    layout.BAD_MAGIC: "it sent bytes that are not a frame",
    layout.BAD_TYPE: "it sent a frame of unknown type",
    layout.BAD_HEADER: "it sent a frame with invalid fields",
    layout.WRONG_STREAM: "a frame of stream {0} on stream {1}",
    layout.AFTER_CLOSE: "a frame of type {0} after CLOSE",
    layout.DIFFERENT_TOTALS: "streams close with different numbers of messages: {0} and {1}",
    layout.CLOSED_EARLY: "it closes after {0} messages, but {1} arrived",
    layout.CONSUMED_UNSENT: "it consumed {0} messages of {1}",
    layout.CONSUMED_EARLY: "it consumed message {0} before it was sent",
    layout.CTS_BEYOND: "it clears message {0} to send after consuming {1}",
    layout.CTS_SMALL: "it clears message {0} to send with {1} bytes of room, less than a slot",
    layout.ANNOUNCE_SMALL: "it announces {0} bytes, which fit into a slot",
    layout.ANNOUNCED_TWICE: "it announces message {0} again",
    layout.OUTSIDE_WINDOW: "it sends message {0}; allowed are {1} to {2}",
    layout.SENT_TWICE: "it sends message {0} again",
    layout.CHANGED: "message {0} changes on its way",
    layout.OVERLAP: "it sends bytes [{0}, {1}) twice",
    layout.UNREQUESTED: "it sends {0} bytes as message {1} without a posted receive",
    layout.POSTED_ORDER: "posted message {0} instead of {1}",
    layout.POSTED_BYTES: "posted {0} bytes",
    layout.CONSUMED_UNKNOWN: "consumed {0} of {1} messages",
    layout.BAD_DESCRIPTOR: "posted {0} bytes in mode {1} at {2:#x}",
    layout.BAD_CTS: "posted a receive of {0} bytes at {1:#x}",
    layout.TOO_MANY_RANGES: "it scatters a message over more than {0} ranges",
    layout.BAD_PACKET: "it sent a packet that no peer would send ({0}, {1})",
}


class ProgressEngine:
    """Moves messages for one rank.

    Until ``close``, ``abort`` or ``detach`` has returned, memory given to FIFOs may still be
    touched.

    Args:
        rank: This rank, for errors and the thread's name.
        wake: Called with the rank after flags or tails were published, if ``control`` is 0.
        on_lost: Called once per lost peer, from the engine's thread.
        control: Address of the executor's control page, by which compiled code wakes it.
        segment_bytes: Largest segment of a message.

    Raises:
        SystemFailure: A descriptor or the thread cannot be created.
    """

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
    ) -> None:
        self.rank = rank
        self._wake, self._on_lost = wake, on_lost
        self._atomics = atomics or native_atomics()
        self._segment_bytes = segment_bytes
        library = native.library(self.kernel)
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
        self._run = kind(library.address(native.PREFIX + "run"))
        self._close_link = kind(library.address(native.PREFIX + "close_link"))
        self._drive = library.address(native.PREFIX + "drive") if self.can_be_driven else 0
        self._links: dict[int, EngineLink] = {}
        self._closers: list[tuple[list[EngineLink], clock.Event]] = []
        self._commands = CommandQueue("the progress engine", rank)
        self._memory = PrivateMemory(layout.ENGINE_BYTES + PAGE_BYTES)
        self._table = PrivateMemory(8 * _TABLE_ENTRIES)
        self._entries = _TABLE_ENTRIES
        self._stopping = self._closed = False
        self._thread = clock.thread(target=self._main, name=f"miraccl-engine-{rank}", daemon=True)
        with (
            as_system_failure("cannot start the progress engine", rank=rank),
            ExitStack() as undo,
        ):
            self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._doorbell)
            self._epoll = undo.enter_context(select.epoll())
            register_descriptor(
                self._epoll.fileno(), self._doorbell, select.EPOLLIN, _DOORBELL_DATA
            )
            self._set(layout.ENGINE_LINKS, self._table.address)
            self._set(layout.ENGINE_EPOLL, self._epoll.fileno())
            self._set(layout.ENGINE_DOORBELL, self._doorbell)
            self._set(layout.ENGINE_ASLEEP, self.asleep)
            self._set(layout.ENGINE_CTRL, control)
            self._set(layout.ENGINE_SPIN_NS, SPIN_NS)
            self._set(layout.ENGINE_LOCK, 1)  # of the thread, whenever it is outside ``run``
            self._prepare(library)
            self._thread.start()
            undo.pop_all()

    def _prepare(self, library: native.CodeLibrary) -> None:
        """Prepare memory that the loop needs; called before the thread starts."""

    # --- other threads

    @property
    def doorbell(self) -> int:
        """Eventfd that executors write when ``asleep`` is set."""
        return self._doorbell

    @property
    def asleep(self) -> int:
        """Address of the word that is 1 while the thread sleeps."""
        return self._memory.address + layout.ENGINE_BYTES

    def driver(self, *, overlap: bool) -> tuple[int, int]:
        """Return a compiled function by which a waiting executor advances the links itself, and
        its first argument (``progress_engine.drive``); the function is 0 if there is none.

        Args:
            overlap: There is a core for the thread beside that of the executor: it moves large
                messages.
        """
        self._set(layout.ENGINE_OVERLAP, int(overlap))
        return self._drive, self._memory.address

    @property
    def rounds(self) -> int:
        """Number of rounds of the thread."""
        return self._get(layout.ENGINE_ROUNDS)

    def attach(self, connections: Sequence[NetConnection]) -> None:
        """Take over the sockets of all connections and start to move messages; of none on
        failure.
        """
        self._call(lambda: self._attach(connections))

    def detach(self, peers: Sequence[int], *, linger: float) -> None:
        """Send what is posted for at most ``linger`` seconds, then close these links."""
        deadline = clock.monotonic() + linger
        done = clock.event()
        with suppress(CommunicatorClosed):
            self._call(lambda: self._start_closing(peers, done))
            done.wait(max(0.0, deadline - clock.monotonic()))
            self._call(lambda: self._remove(peers))

    def abort(self, text: str) -> None:
        """Close all links at once; peers that listen receive ``text``."""
        with suppress(CommunicatorClosed):
            self._call(lambda: self._abort(text))

    def close(self, *, linger: float = 0.0) -> None:
        """Close all links and stop the thread; idempotent."""
        if self._closed:
            return
        self.detach(list(self._links), linger=linger)
        with suppress(CommunicatorClosed):
            self._call(self._stop)
        self._closed = True
        self._thread.join(COMMAND_TIMEOUT_S)
        self._epoll.close()
        os.close(self._doorbell)

    def _call(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the thread and wait for its end."""
        if threading.current_thread() is self._thread:
            return action()
        self._commands.call(action, self._request_attention)

    def _request_attention(self) -> None:
        self._atomics.store_release(self._memory.address + layout.ENGINE_ATTENTION, 1)
        os.eventfd_write(self._doorbell, 1)

    # --- the thread

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._run(self._memory.address, 0)
                self._atomics.store_release(self._memory.address + layout.ENGINE_ATTENTION, 0)
                self._commands.run_pending()
                self._service()
                self._report_ended()
                if self._get(layout.ENGINE_DIRTY):
                    self._set(layout.ENGINE_DIRTY, 0)
                    self._wake(self.rank)
        except Exception as error:  # a bug of ours: no rank may wait for an engine that is gone
            log.exception("the progress engine failed")
            loss = Loss(LossKind.INTERNAL, f"has no progress engine: {error!r}")
            for link in list(self._links.values()):
                link.close()
                self._report(link.connection.peer, loss)
            self._wake(self.rank)
        finally:
            self._end()

    def _end(self) -> None:
        self._remove(list(self._links))
        self._commands.close()
        for _, done in self._closers:
            done.set()

    def _service(self) -> None:
        """Handle what compiled code has left for Python; called in every round of the thread."""

    def _report_ended(self) -> None:
        """Close the sockets of links that have ended, and report losses."""
        for link in list(self._links.values()):
            if link.alive or link.word(layout.LINK_REPORTED):
                continue
            link.store(layout.LINK_REPORTED, 1)
            lost = link.word(layout.LINK_STATE) == layout.STATE_LOST
            if lost:
                loss = link.loss()
                if loss.kind in (LossKind.PROTOCOL, LossKind.INTERNAL):
                    link.send_abort(loss.detail)
            link.close()
            if lost:
                self._set(layout.ENGINE_DIRTY, 1)
                self._report(link.connection.peer, loss)
        for closer in [c for c in self._closers if not any(link.alive for link in c[0])]:
            self._closers.remove(closer)
            closer[1].set()

    def _report(self, peer: int, loss: Loss) -> None:
        log.info("rank %d is lost (%s): %s", peer, loss.kind.value, loss)
        try:
            self._on_lost(peer, loss)
        except Exception:
            log.exception("on_lost failed")

    def _attach(self, connections: Sequence[NetConnection]) -> None:
        for connection in connections:
            if connection.peer in self._links:
                raise MiracclError(f"rank {connection.peer} is already attached", rank=self.rank)
        attached: list[int] = []
        try:
            for connection in connections:
                self._links[connection.peer] = self._new_link(connection)
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
        )
        memory = PrivateMemory(layout.link_bytes(nstreams))
        staging = PrivateMemory(layout.STAGING_BYTES * nstreams)
        index = self._free_entry()
        link = EngineLink(connection, memory, staging, index)
        write_link(memory.address, config)
        self._write_memory(link)
        for i, sock in enumerate(connection.streams):
            sock.setblocking(False)
            stream = layout.LINK_STREAMS + i * layout.STREAM_BYTES
            link.store(stream + layout.STREAM_FD, sock.fileno())
            link.store(stream + layout.STREAM_READABLE, 1)
            link.store(stream + layout.STREAM_WRITABLE, 1)
            link.store(stream + layout.STREAM_STAGING, staging.address + i * layout.STAGING_BYTES)
            register_descriptor(self._epoll.fileno(), sock.fileno(), _EDGES, index << 8 | i)
        self._set_entry(index, memory.address)
        return link

    def _write_memory(self, link: EngineLink) -> None:
        """Write the addresses of a link's FIFOs into its state."""
        pair = link.connection.pair
        for offset, value in (
            (layout.LINK_ENGINE, self._memory.address),
            (layout.LINK_PEER, link.connection.peer),
            (layout.LINK_SEND_DESCRIPTORS, pair.send.descriptors),
            (layout.LINK_SEND_TAIL, pair.send.tail),
            (layout.LINK_SEND_SLOTS, pair.send.slots),
            (layout.LINK_RECV_DESCRIPTORS, pair.recv.descriptors),
            (layout.LINK_RECV_TAIL, pair.recv.tail),
            (layout.LINK_RECV_CTS, pair.recv.cts),
            (layout.LINK_RECV_SLOTS, pair.recv.slots),
        ):
            link.store(offset, value)

    def _free_entry(self) -> int:
        """Return a free entry of the table of links, growing it if there is none."""
        used = {link.index for link in self._links.values()}
        index = next(i for i in range(len(used) + 1) if i not in used)
        if index >= self._entries:
            grown = PrivateMemory(16 * self._entries)
            memory_at(grown.address, 8 * self._entries)[:] = memory_at(
                self._table.address, 8 * self._entries
            )
            self._table, self._entries = grown, 2 * self._entries
            self._set(layout.ENGINE_LINKS, grown.address)
        return index

    def _set_entry(self, index: int, address: int) -> None:
        memory_at(self._table.address + 8 * index, 8)[:] = address.to_bytes(8, "little")
        self._set(layout.ENGINE_NLINKS, max(index + 1, self._get(layout.ENGINE_NLINKS)))

    def _start_closing(self, peers: Sequence[int], done: clock.Event) -> None:
        closing = [self._links[peer] for peer in peers if peer in self._links]
        for link in closing:
            self._close_link(link.address, 0)
        self._closers.append((closing, done))

    def _remove(self, peers: Sequence[int]) -> None:
        for peer in peers:
            link = self._links.pop(peer, None)
            if link:
                self._set_entry(link.index, 0)
                link.close()

    def _abort(self, text: str) -> None:
        for link in self._links.values():
            if link.alive:
                link.send_abort(text)
        self._remove(list(self._links))

    def _stop(self) -> None:
        self._stopping = True

    def _get(self, offset: int) -> int:
        return self._atomics.load_acquire(self._memory.address + offset)

    def _set(self, offset: int, value: int) -> None:
        self._atomics.store_release(self._memory.address + offset, value)


def write_link(address: int, config: LinkConfig) -> None:
    """Write the numbers of a link into its zeroed state."""
    for offset, value in (
        (layout.LINK_NSTREAMS, config.nstreams),
        (layout.LINK_SEND_SLOT_BYTES, config.send_slot_bytes),
        (layout.LINK_RECV_SLOT_BYTES, config.recv_slot_bytes),
        (layout.LINK_SEGMENT_BYTES, config.segment_bytes),
        (layout.LINK_QUEUE_BYTES, config.queue_bytes),
        (layout.LINK_QUEUE_FRAMES, config.queue_frames),
        (layout.LINK_PEER_TOTAL, -1),
        (layout.LINK_SPREAD, int(config.spread)),
        (layout.LINK_POLICY, config.policy),
    ):
        memory_at(address + offset, 8)[:] = value.to_bytes(8, "little", signed=True)
    for i in range(config.nstreams):
        stream = address + layout.LINK_STREAMS + i * layout.STREAM_BYTES
        memory_at(stream + layout.STREAM_INDEX, 8)[:] = i.to_bytes(8, "little")
        memory_at(stream + layout.STREAM_LOW_WATER, 8)[:] = (1).to_bytes(8, "little")
