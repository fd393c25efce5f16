"""Driver of a peer that is reached over UDP: ``wire.datagram`` on real sockets, in Python.

The reference of the compiled engine (``proxy.datagram_engine``): the same machines, one packet per
system call.  The sockets are shared by all peers of a transport; a packet names its connection.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from socket import IPPROTO_UDP, socket

from miraccl import clock, trace
from miraccl.errors import ProtocolError
from miraccl.proxy.driver import NO_TIMER, DriverContext
from miraccl.proxy.fifo_driver import FifoDriver
from miraccl.proxy.packet_codec import PacketCodec
from miraccl.transport.base import DatagramConnection
from miraccl.transport.fifo import Atomics
from miraccl.wire import proxy_records as wire
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES, Grantor
from miraccl.wire.datagram.flow import DatagramFlow
from miraccl.wire.datagram.flow_records import (
    FlowConfig,
    FlowEvent,
    FrameAcknowledged,
    FrameCompleted,
    FrameStarted,
    OutgoingPacket,
    PathChanged,
    PayloadReceived,
    PeerAborted,
)
from miraccl.wire.datagram.packets import Data, Record
from miraccl.wire.proxy_states import LinkState
from miraccl.wire.stream import MAX_TEXT_BYTES, Frame, FrameType, decode_frame, encode_frame

log = trace.logger("proxy")

#: Streams of a link: frames in flight at once, each of them at least 64 KiB of a large message.
NSTREAMS = 16
#: Packets received per socket and sent per peer in one round.
PACKETS_PER_ROUND = 64
#: Probe timeouts after which a CLOSE counts as received by a peer that has closed as well.
CLOSE_TIMEOUTS = 3
#: Copies of a last acknowledgement, which nothing can ask for again.
LAST_COPIES = 3
_CONNECTION_AT = slice(4, 8)
#: linux/udp.h: size of the packets in a received super-packet.
UDP_GRO = 104


def flow_config(connection: DatagramConnection) -> FlowConfig:
    """Return the configuration of the flow of a connection."""
    return FlowConfig(
        connection=connection.connection,
        peer_connection=connection.peer_connection,
        npaths=len(connection.paths),
        nstreams=NSTREAMS,
        mtu=min(path.mtu for path in connection.paths),
        congestion=connection.options.congestion,
        granted=UNSOLICITED_BYTES if connection.needs_grants else None,
        max_in_flight=min(path.share_bytes for path in connection.paths),
    )


class DatagramSockets:
    """UDP sockets of a transport, and the drivers by the connection number in packets to them."""

    def __init__(self, sockets: Sequence[socket]) -> None:
        self.sockets = list(sockets)
        self.drivers: dict[int, DatagramDriver] = {}
        self.strangers = 0
        self.grantor: Grantor | None = None

    def admit(self, driver: DatagramDriver, budget: int) -> None:
        """Grant a peer what it sends, if there is a budget."""
        if budget:
            self.grantor = self.grantor or Grantor(budget)
            self.grantor.add(driver.number)

    def issue_grants(self) -> None:
        """Give the flows the grants that are due."""
        for number, total in self.grantor.issue(now_ns()) if self.grantor else ():
            self.drivers[number].flow.grant(total)

    def receive(self) -> bool:
        """Hand waiting packets to their drivers; return True if more may wait."""
        more = [self._receive(sock) for sock in self.sockets]
        self.issue_grants()
        return any(more)

    def _receive(self, sock: socket) -> bool:
        for _ in range(PACKETS_PER_ROUND):
            try:
                data, control, _, _ = sock.recvmsg(1 << 16, 256)
            except ConnectionRefusedError:
                continue
            except OSError:
                return False
            sizes = [
                int.from_bytes(value, "little")
                for level, kind, value in control
                if (level, kind) == (IPPROTO_UDP, UDP_GRO)
            ]
            size = sizes[0] if sizes else max(1, len(data))
            for at in range(0, len(data), size):
                self._deliver(data[at : at + size])
        return True

    def _deliver(self, data: bytes) -> None:
        driver = self.drivers.get(int.from_bytes(data[_CONNECTION_AT], "little"))
        if driver is None or not driver.receive(data):
            self.strangers += 1


def open_driver(connection: DatagramConnection, context: DriverContext) -> DatagramDriver:
    """Return the driver of a connection; see ``proxy.driver``."""
    key = DatagramSockets, connection.streams[0].fileno()
    sockets = context.shared.setdefault(key, DatagramSockets(connection.streams))
    return DatagramDriver(
        connection,
        sockets=sockets,
        atomics=context.atomics,
        on_lost=context.on_lost,
        segment_bytes=context.segment_bytes,
    )


class DatagramDriver(FifoDriver):
    """One peer over UDP; see ``proxy.driver.Driver``.

    Args:
        connection: Paths, keys and FIFOs.
        sockets: Sockets of the transport, shared by its peers.
        on_lost: Called once with (peer, loss) when the connection ends unexpectedly.
        segment_bytes: Largest segment of a message.
    """

    def __init__(
        self,
        connection: DatagramConnection,
        *,
        sockets: DatagramSockets,
        atomics: Atomics,
        on_lost: Callable[[int, wire.Loss], None],
        segment_bytes: int,
    ) -> None:
        super().__init__(
            connection,
            atomics=atomics,
            on_lost=on_lost,
            nstreams=NSTREAMS,
            segment_bytes=segment_bytes,
            spread=True,
        )
        self.reached = False
        self._connection, self._sockets = connection, sockets
        self._codec = PacketCodec(connection)
        self._addresses = [(p.host, p.port) for p in connection.paths]
        self._payloads: list[deque[memoryview]] = [deque() for _ in range(NSTREAMS)]
        self._targets: list[memoryview | None] = [None] * NSTREAMS
        self._descriptors = [os.dup(sock.fileno()) for sock in sockets.sockets]
        self.flow = DatagramFlow(flow_config(connection))
        self.flow.validate_paths(now_ns())
        self.number = connection.connection
        sockets.drivers[self.number] = self
        sockets.admit(self, connection.budget)
        self._grantor = sockets.grantor

    # --- calls of the proxy

    def descriptors(self) -> Sequence[int]:
        """Return duplicates of the shared sockets, so that each driver watches them."""
        return self._descriptors

    def ready(self, descriptor: int, events: int) -> None:
        """Do nothing: every round reads the sockets."""

    def poll(self) -> bool:
        self.scan()
        more = self._sockets.receive()
        if not self.alive:
            return False
        now = now_ns()
        due = self.flow.timer(now)
        if due and due <= now:
            self._note(self.flow.on_timer(now))
        for _ in range(PACKETS_PER_ROUND):
            packet = self.flow.next_packet(now)
            if packet is None:
                break
            self._send_packet(packet)
        self._end_close()
        return (more or packet is not None) and self.alive

    def arm(self) -> float:
        if self.scan() or self.dirty:
            return 0.0
        now = now_ns()
        due = self.flow.timer(now) if self.alive else 0
        return max(0.0, (due - now) / 1e9) if due else NO_TIMER

    def close(self) -> None:
        """Stop to receive; the sockets belong to the transport."""
        self._sockets.drivers.pop(self.number, None)
        if self._grantor is not None:
            self._grantor.remove(self.number)
        if self.alive and self._descriptors:
            self._send_abort(wire.CLOSED_WITHOUT_CLOSE_FRAME)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    # --- packets

    def receive(self, data: bytes) -> bool:
        """Process a received packet; return False if it is not authentic."""
        try:
            packet = self._codec.decode(data)
            if packet is None:
                return False
            self._note(self.flow.receive(now_ns(), packet, path=packet.path))
        except ProtocolError as problem:
            self.handle(wire.Garbage(0, problem.message))
        return True

    def _send_packet(self, packet: OutgoingPacket) -> None:
        records: list[Record] = list(packet.records)
        for s in packet.segments:
            payload = self._payloads[s.stream][0][s.offset : s.offset + s.length]
            records.append(Data(s.stream, s.frame, s.offset, payload, s.header))
        data = self._codec.encode(packet.path, packet.number, records)
        sock = self._sockets.sockets[self._connection.paths[packet.path].socket]
        try:
            sock.sendto(data, self._addresses[packet.path])
        except BlockingIOError:
            pass  # counts as lost
        except OSError as error:
            log.info("rank %d: path %d: %s", self.peer, packet.path, error)
            if error.errno == errno.EMSGSIZE:
                self.flow.paths[packet.path].shrink(now_ns())
            else:
                self.flow.on_unreachable(packet.path)

    def _note(self, events: list[FlowEvent]) -> None:
        for event in events:
            if isinstance(event, FrameStarted):
                if self._grantor is not None:
                    self._grantor.want(self.number, int.from_bytes(event.header[4:8], "little"))
                self._start_frame(event)
            elif isinstance(event, PayloadReceived):
                if self._grantor is not None:
                    self._grantor.on_received(self.number, len(event.payload))
                target = self._targets[event.stream]
                if target is not None:
                    target[event.offset : event.offset + len(event.payload)] = event.payload
            elif isinstance(event, FrameCompleted):
                if self._targets[event.stream] is not None:
                    self._targets[event.stream] = None
                    self.handle(wire.PayloadPlaced(event.stream))
            elif isinstance(event, FrameAcknowledged):
                self._payloads[event.stream].popleft()
                self.handle(wire.FramesWritten(event.stream, 1))
            elif isinstance(event, PathChanged):
                self.reached |= event.opened
                log.info(
                    "rank %d: path %d: %s -> %s", self.peer, event.path, event.before, event.after
                )
            elif isinstance(event, PeerAborted):
                self._peer_aborted(event.text.decode("utf-8", "replace"))
            if not self.alive:
                return

    def _start_frame(self, event: FrameStarted) -> None:
        try:
            frame = decode_frame(event.header)
        except ProtocolError as problem:
            return self.handle(wire.Garbage(event.stream, problem.message))
        self.handle(wire.FrameReceived(event.stream, frame))

    def _peer_aborted(self, text: str) -> None:
        if self.link.peer_closed:
            return  # its last frames have arrived
        if text == wire.CLOSED_WITHOUT_CLOSE_FRAME:
            for stream in range(NSTREAMS):
                self.handle(wire.StreamEnded(stream, text))
            return
        frame = Frame(FrameType.ABORT, 0, length=len(text.encode()[:MAX_TEXT_BYTES]))
        self.handle(wire.FrameReceived(0, frame, text))

    def _end_close(self) -> None:
        """End a link whose CLOSE frames the peer has, or that has those of a peer that answers no
        longer.
        """
        if self.link.state is not LinkState.CLOSING:
            return
        if not self.link.sender.closing:
            # A peer that was open when it received them sends none of its own.
            for stream in range(NSTREAMS):
                self.handle(wire.StreamEnded(stream, wire.CLOSED_WITHOUT_CLOSE_FRAME))
            return
        if not self.link.peer_closed:
            return
        if max(path.timeouts for path in self.flow.paths) < CLOSE_TIMEOUTS:
            return
        for stream, queue in enumerate(self._payloads):
            if queue and self.alive:
                self.handle(wire.FramesWritten(stream, len(queue)))

    # --- network side of the link

    def _queue_frame(self, frame: Frame, payload: memoryview | None) -> None:
        self._payloads[frame.stream].append(payload if payload is not None else memoryview(b""))
        self.flow.submit(frame.stream, encode_frame(frame), frame.length)

    def _place(self, stream: int, target: memoryview) -> None:
        self._targets[stream] = target

    def _send_abort(self, text: str) -> None:
        for packet in self.flow.abort(text.encode()[:MAX_TEXT_BYTES]):
            self._send_packet(packet)

    def _do_finished(self, instruction: wire.LinkFinished) -> None:
        self._say_goodbye()
        self.close()

    def _do_lost(self, instruction: wire.PeerLost) -> None:
        if instruction.loss.kind is wire.LossKind.CLOSED and self._descriptors:
            self._say_goodbye()
        super()._do_lost(instruction)

    def _say_goodbye(self) -> None:
        """Send the last acknowledgements, several times: nothing asks for them again."""
        now = now_ns() + 1_000_000_000  # also those that would wait
        with suppress(OSError):
            while (packet := self.flow.next_packet(now)) is not None:
                for _ in range(LAST_COPIES):
                    self._send_packet(replace(packet, segments=()))


def now_ns() -> int:
    """Return the clock of flows, in ns."""
    return int(clock.monotonic() * 1e9)
