"""Driver of a peer that is reached over a network plugin of NCCL.

A frame of ``wire.stream`` is one message of the plugin, header first. It passes through registered
buffers on both sides, because a plugin delivers a message only into a buffer that was posted before
its content is known. Plugins have no events, so the driver polls while it has requests open: every
round for ``BUSY_S`` after the last progress, then every millisecond.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from miraccl import clock
from miraccl.errors import ProtocolError, SystemFailure
from miraccl.proxy.driver import DriverContext
from miraccl.proxy.fifo_driver import FifoDriver
from miraccl.transport.fifo import Atomics, PrivateMemory, memory_at
from miraccl.transport.net_plugin import PluginConnection
from miraccl.wire import proxy_records as wire
from miraccl.wire.stream import (
    HEADER_BYTES,
    MAX_TEXT_BYTES,
    Frame,
    FrameType,
    decode_frame,
    encode_frame,
)

SEGMENT_BYTES = 1 << 18
BUFFER_BYTES = HEADER_BYTES + SEGMENT_BYTES
NBUFFERS = 4
"""Messages under way per direction; NCCL keeps up to 32, each in memory of its own."""
TAG = 0
BUSY_S = 0.002
IDLE_S = 0.001


class _Request(NamedTuple):
    number: int
    buffer: int


class _Buffers:
    """Registered buffers of one direction."""

    def __init__(self, connection: PluginConnection, comm: int) -> None:
        self._plugin, self._comm = connection.plugin, comm
        self.memory = PrivateMemory(NBUFFERS * BUFFER_BYTES)
        self._mhandle = self._plugin.register(comm, self.memory.address, NBUFFERS * BUFFER_BYTES)
        self.free = deque(range(NBUFFERS))
        self.requests: deque[_Request] = deque()

    def address(self, index: int) -> int:
        return self.memory.address + index * BUFFER_BYTES

    def view(self, index: int, nbytes: int) -> memoryview:
        return memory_at(self.address(index), nbytes)

    def post(self, post: Callable[[int, int, int, int, int], int | None], nbytes: int) -> bool:
        """Post the next free buffer; False if the plugin takes nothing now."""
        index = self.free[0]
        number = post(self._comm, self.address(index), nbytes, TAG, self._mhandle)
        if number is None:
            return False
        self.free.popleft()
        self.requests.append(_Request(number, index))
        return True

    def finished(self) -> tuple[int, int] | None:
        """Return (buffer, size) of the oldest request if it has finished."""
        if not self.requests:
            return None
        size = self._plugin.test(self.requests[0].number)
        return None if size is None else (self.requests.popleft().buffer, size)

    def deregister(self) -> None:
        with suppress(SystemFailure):
            self._plugin.deregister(self._comm, self._mhandle)


def open_driver(connection: PluginConnection, context: DriverContext) -> PluginDriver:
    """Return the driver of a connection; see ``proxy.driver``."""
    return PluginDriver(
        connection,
        atomics=context.atomics,
        on_lost=context.on_lost,
        segment_bytes=context.segment_bytes,
    )


class PluginDriver(FifoDriver):
    """One peer over a network plugin; see ``proxy.driver.Driver``.

    Args:
        connection: The plugin's connections and the FIFOs.
        on_lost: Called once with (peer, loss) when the connection ends unexpectedly.
    """

    def __init__(
        self,
        connection: PluginConnection,
        *,
        atomics: Atomics,
        on_lost: Callable[[int, wire.Loss], None],
        segment_bytes: int,
    ) -> None:
        super().__init__(
            connection,
            atomics=atomics,
            on_lost=on_lost,
            nstreams=1,
            segment_bytes=min(segment_bytes, SEGMENT_BYTES),
        )
        self._plugin = connection.plugin
        self._comms = connection.send_comm, connection.recv_comm
        self._sends = _Buffers(connection, connection.send_comm)
        self._recvs = _Buffers(connection, connection.recv_comm)
        self._queue: deque[tuple[Frame, memoryview | None]] = deque()
        self._target: memoryview | None = None
        self._active_until = 0.0
        self._open = True

    # --- calls of the proxy

    def descriptors(self) -> Sequence[int]:
        """Return none: plugins have no events."""
        return ()

    def ready(self, descriptor: int, events: int) -> None:
        """Do nothing; there are no descriptors."""

    def poll(self) -> bool:
        progressed = self.scan()
        try:
            progressed |= self._receive_frames()
            progressed |= self._send_frames()
        except SystemFailure as error:
            self.handle(wire.StreamEnded(0, error.message))
        if progressed:
            self._active_until = clock.monotonic() + BUSY_S
        return self.alive and (progressed or clock.monotonic() < self._active_until)

    def arm(self) -> float:
        return 0.0 if self.scan() or self.dirty else IDLE_S

    # --- network

    def _queue_frame(self, frame: Frame, payload: memoryview | None) -> None:
        self._queue.append((frame, payload))

    def _send_frames(self) -> bool:
        progressed = False
        while self._open and (done := self._sends.finished()):
            self._sends.free.append(done[0])
            self.handle(wire.FramesWritten(0, 1))
            progressed = True
        while self._open and self._queue and self._sends.free:
            frame, payload = self._queue[0]
            nbytes = HEADER_BYTES + (len(payload) if payload is not None else 0)
            view = self._sends.view(self._sends.free[0], nbytes)
            view[:HEADER_BYTES] = encode_frame(frame)
            if payload is not None:
                view[HEADER_BYTES:] = payload
            if not self._sends.post(self._plugin.isend, nbytes):
                break
            self._queue.popleft()
            progressed = True
        return progressed

    def _receive_frames(self) -> bool:
        progressed = False
        while self._open and (done := self._recvs.finished()):
            self._process(self._recvs.view(done[0], BUFFER_BYTES), done[1])
            self._recvs.free.append(done[0])
            progressed = True
        while self._open and self._recvs.free:
            if not self._recvs.post(self._plugin.irecv, BUFFER_BYTES):
                break
        return progressed

    def _process(self, data: memoryview, size: int) -> None:
        """Process one received frame, whose header counts if the plugin reports no size (-1, 0)."""
        try:
            if size > BUFFER_BYTES or 0 < size < HEADER_BYTES:
                raise ProtocolError(self._wrong_size(size, f"{HEADER_BYTES} to {BUFFER_BYTES}"))
            frame = decode_frame(data)
            if frame.length > SEGMENT_BYTES:
                raise ProtocolError(f"frame of {frame.length} bytes in a message of the plugin")
            if size > 0 and size != HEADER_BYTES + frame.length:
                raise ProtocolError(self._wrong_size(size, HEADER_BYTES + frame.length))
        except ProtocolError as problem:
            return self.handle(wire.Garbage(0, problem.message))
        payload = data[HEADER_BYTES : HEADER_BYTES + frame.length]
        if frame.type is FrameType.ABORT:
            text = bytes(payload).decode("utf-8", "replace")
            return self.handle(wire.FrameReceived(0, frame, text))
        self.handle(wire.FrameReceived(0, frame))
        if self._target is not None:
            target, self._target = self._target, None
            target[:] = payload
            self.handle(wire.PayloadPlaced(0))

    def _wrong_size(self, size: int, wanted: object) -> str:
        return f"network plugin {self._plugin.name} reports {size} bytes of a message of {wanted}"

    def _place(self, stream: int, target: memoryview) -> None:
        self._target = target

    def _send_abort(self, text: str) -> None:
        data = text.encode()[:MAX_TEXT_BYTES]
        with suppress(SystemFailure):
            if self._open and self._sends.free:
                view = self._sends.view(self._sends.free[0], HEADER_BYTES + len(data))
                view[:HEADER_BYTES] = encode_frame(Frame(FrameType.ABORT, 0, length=len(data)))
                view[HEADER_BYTES:] = data
                self._sends.post(self._plugin.isend, HEADER_BYTES + len(data))

    def close(self) -> None:
        """Close the plugin's connections; buffers of requests in progress stay with the driver."""
        if not self._open:
            return
        self._open = False
        self._sends.deregister()
        self._recvs.deregister()
        for close, comm in zip(
            (self._plugin.close_send, self._plugin.close_recv), self._comms, strict=True
        ):
            with suppress(SystemFailure):
                close(comm)
