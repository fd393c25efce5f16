"""Driver of a peer that is reached over TCP streams (``proxy.fifo_driver``).

It copies nothing and only gives sockets where bytes are or belong.
"""

from __future__ import annotations

from collections.abc import Callable

from miraccl.errors import ProtocolError
from miraccl.proxy.driver import NO_TIMER, DriverContext
from miraccl.proxy.fifo_driver import FifoDriver
from miraccl.proxy.stream import StreamSocket
from miraccl.transport.base import NetConnection
from miraccl.transport.fifo import Atomics
from miraccl.wire import proxy_records as wire
from miraccl.wire.stream import Frame

#: System calls per stream, direction and round. A round costs 10 to 30 us between calls, because
#: the
#: copies have emptied the caches, yet the other direction and other peers should not wait for more
#: than a millisecond.
CALLS_PER_ROUND = 4


def open_driver(connection: NetConnection, context: DriverContext) -> StreamDriver:
    """Return the driver of a connection; see ``proxy.driver``."""
    return StreamDriver(
        connection,
        atomics=context.atomics,
        on_lost=context.on_lost,
        segment_bytes=context.segment_bytes,
    )


class StreamDriver(FifoDriver):
    """One peer over TCP streams; see ``proxy.driver.Driver``.

    Args:
        connection: Authenticated streams and FIFOs; the driver owns the sockets from here on.
        on_lost: Called once with (peer, loss) when the connection ends unexpectedly.
        segment_bytes: Largest segment of a message.
    """

    def __init__(
        self,
        connection: NetConnection,
        *,
        atomics: Atomics,
        on_lost: Callable[[int, wire.Loss], None],
        segment_bytes: int,
    ) -> None:
        self.streams = [StreamSocket(sock, index) for index, sock in enumerate(connection.streams)]
        super().__init__(
            connection,
            atomics=atomics,
            on_lost=on_lost,
            nstreams=len(self.streams),
            segment_bytes=segment_bytes,
        )
        self._write_error = ""  # of a stream that cannot be written any longer

    # --- calls of the proxy

    def descriptors(self) -> list[int]:
        return [stream.fd for stream in self.streams]

    def ready(self, descriptor: int, events: int) -> None:
        for stream in self.streams:
            if stream.fd == descriptor:
                stream.on_edge(events)

    def poll(self) -> bool:
        """Do what can be done without waiting, ``CALLS_PER_ROUND`` calls per stream and direction.

        Returns True if a stream is ready for more.
        """
        self.scan()
        for stream in self.streams:
            for _ in range(CALLS_PER_ROUND):
                if not stream.readable:
                    break
                self._read(stream)
        for stream in self.streams:
            for _ in range(CALLS_PER_ROUND):
                if not (stream.writable and stream.pending):
                    break
                self._write(stream)
        # a write of one stream may have queued a segment on another one
        busy = any(s.readable or (s.writable and s.pending) for s in self.streams)
        return busy and self.link.alive

    def arm(self) -> float:
        return 0.0 if self.scan() or self.dirty else NO_TIMER

    # --- streams

    def _read(self, stream: StreamSocket) -> None:
        try:
            got_some = stream.fill()
        except OSError as error:
            return self.handle(wire.StreamEnded(stream.index, str(error.strerror)))
        if not got_some:
            stream.readable = False
            return self.handle(
                wire.StreamEnded(stream.index, self._write_error or wire.CLOSED_WITHOUT_CLOSE_FRAME)
            )
        while self.link.alive and self._parse_next(stream):
            pass

    def _parse_next(self, stream: StreamSocket) -> bool:
        """Process one payload or frame of what was received; False if none is complete."""
        if stream.placing:
            stream.consume_staged()
            if stream.remaining:
                return False
            stream.placing = False
            self.handle(wire.PayloadPlaced(stream.index))
            return True
        try:
            got = stream.next_frame()
        except ProtocolError as problem:
            self.handle(wire.Garbage(stream.index, problem.message))
            return False
        if got is None:
            return False
        self.handle(wire.FrameReceived(stream.index, *got))
        return True

    def _write(self, stream: StreamSocket) -> None:
        try:
            frames = stream.send()
        except OSError as error:
            self._write_error = str(error.strerror)
            stream.drop()
            self._read_remaining()
            return self.handle(wire.StreamEnded(stream.index, self._write_error))
        if frames:
            self.handle(wire.FramesWritten(stream.index, frames))

    def _read_remaining(self) -> None:
        """Read all streams to the end: what a peer sent before it closed is valid."""
        for stream in self.streams:
            stream.readable = True
            while stream.readable and self.link.alive:
                self._read(stream)

    def _queue_frame(self, frame: Frame, payload: memoryview | None) -> None:
        self.streams[frame.stream].queue(frame, payload)

    def _place(self, stream: int, target: memoryview) -> None:
        self.streams[stream].place(target)

    def _send_abort(self, text: str) -> None:
        for stream in self.streams:
            stream.send_abort(text)

    def close(self) -> None:
        """Close the streams; memory is not touched afterwards. Idempotent."""
        for stream in self.streams:
            stream.close()
            stream.readable = stream.writable = False
