"""The datagram engine: one compiled thread per rank that moves messages over UDP.

It is the progress engine (``proxy.stream_engine``) with another loop: links are the same, and their
frames travel over compiled flows (``wire.datagram``) on sockets that all peers share.
"""

from __future__ import annotations

import ctypes
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl import native
from miraccl.native.crypto import AesGcm, addresses
from miraccl.proxy.datagram_driver import NSTREAMS, flow_config, now_ns
from miraccl.proxy.flow_memory import FlowMemory
from miraccl.proxy.kernels import flow_layout, link_layout
from miraccl.proxy.stream_engine import EngineLink, ProgressEngine
from miraccl.transport.base import DatagramConnection, DatagramPath, NetConnection, PathStatus
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.tcp_info import address_text
from miraccl.wire.datagram.credit import UNSOLICITED_BYTES
from miraccl.wire.datagram.packets import MAX_PATHS
from miraccl.wire.datagram.seal import (
    AEGIS_128X2,
    AES_128_GCM,
    CIPHERS,
    KEY_BYTES,
    Protection,
)
from miraccl.wire.proxy_records import CLOSED_WITHOUT_CLOSE_FRAME, LinkConfig, Loss, LossKind
from miraccl.wire.stream import MAX_TEXT_BYTES

#: Largest segment of a message: the ranges of one segment that loss leaves are bounded.
SEGMENT_BYTES = 1 << 20
_CRYPTO = (
    "EVP_EncryptInit_ex",
    "EVP_EncryptUpdate",
    "EVP_EncryptFinal_ex",
    "EVP_DecryptInit_ex",
    "EVP_DecryptUpdate",
    "EVP_DecryptFinal_ex",
    "EVP_CIPHER_CTX_ctrl",
)
_PROTECTIONS = {
    (Protection.MAC, AES_128_GCM): flow_layout.PROTECT_MAC,
    (Protection.AEAD, AES_128_GCM): flow_layout.PROTECT_AEAD,
    (Protection.MAC, AEGIS_128X2): flow_layout.PROTECT_AEGIS_MAC,
    (Protection.AEAD, AEGIS_128X2): flow_layout.PROTECT_AEGIS,
}


@dataclass(frozen=True, kw_only=True)
class PathReport:
    """State of one path to a peer; times in ns, sizes in bytes, counts since the start.

    Attributes:
        state: Value of ``PathState``.
        window, rate: Congestion window, and pacing rate in bytes per second.
        resent: Packets declared lost and not only late.
        gso: False if the interface refuses UDP_SEGMENT.
        silence: Time from the last packet until the path was SUSPECT the last time.
        late: Part of it after the timer was due: the thread did not run.
    """

    peer: int
    path: int
    local: str
    remote: str
    state: str
    rtt: int
    min_rtt: int
    window: int
    rate: int
    in_flight: int
    mtu: int
    sent_packets: int
    sent_bytes: int
    received_packets: int
    received_bytes: int
    acked_bytes: int
    lost_bytes: int
    resent: int
    spurious: int
    send_errors: int
    last_errno: int
    gso: bool
    silence: int
    late: int
    controller: str


@dataclass(eq=False, kw_only=True)
class DatagramLink(EngineLink):
    """One peer: its link and flow; the sockets belong to the transport."""

    flow: FlowMemory
    ciphers: tuple[AesGcm, AesGcm] | tuple[PrivateMemory, PrivateMemory]
    abort: Any = field(repr=False)
    aborted: bool = False
    #: by number of a path that was open once: False while it is dead
    works: dict[int, bool] = field(default_factory=dict)

    def close(self) -> None:
        """End the link; a peer that is not closing itself learns of it. Idempotent."""
        if not self.closed and not self.aborted and self.alive:
            self.send_abort(CLOSED_WITHOUT_CLOSE_FRAME)
        self.closed = True

    def send_abort(self, text: str) -> None:
        """Send the reason on every path, once: nothing acknowledges it."""
        data = text.encode()[:MAX_TEXT_BYTES]
        buffer = ctypes.create_string_buffer(data, len(data) + 1)
        self.abort(self.flow.address, ctypes.addressof(buffer), len(data))
        self.aborted = True

    def loss(self) -> Loss:
        """Return why the link ended."""
        loss = super().loss()
        if loss.kind is LossKind.ABORTED and loss.detail.endswith(CLOSED_WITHOUT_CLOSE_FRAME):
            return Loss(LossKind.RESET, CLOSED_WITHOUT_CLOSE_FRAME)
        return loss


class DatagramEngine(ProgressEngine):
    """Moves messages for one rank over UDP; see ``ProgressEngine``."""

    kernel = "miraccl.proxy.kernels.datagram_engine"
    transport = "udp"
    can_be_driven = False

    def _prepare(self) -> None:
        super()._prepare()
        kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
        self._abort_flow = kind(self._library.address(native.PREFIX + "abort_flow"))
        self._sockets: Sequence[socket.socket] = ()
        self._hash = PrivateMemory(4096)
        sizes = (
            (flow_layout.PORT_OUT, flow_layout.OUT_BYTES),
            (flow_layout.PORT_BUFFER, flow_layout.BUFFER_BYTES + 4096),
            (flow_layout.PORT_VECTORS, 16 * flow_layout.VECTORS_PER_PATH * MAX_PATHS),
            (flow_layout.PORT_SCRATCH, flow_layout.SCRATCH_PER_PATH * MAX_PATHS),
        )
        self._port = PrivateMemory(flow_layout.PORT_BYTES)
        self._buffers = [PrivateMemory(size) for _, size in sizes]
        for (offset, _), memory in zip(sizes, self._buffers, strict=True):
            self._store_port(offset, memory.address)
        self._store_port(flow_layout.PORT_HASH, self._hash.address)
        self._set(link_layout.ENGINE_PORT, self._port.address)

    @property
    def ciphers(self) -> Sequence[str]:
        """Names of the ciphers that the compiled code computes on this processor."""
        return CIPHERS if self._function("has_aegis")(0, 0) else (AES_128_GCM,)

    def reached(self, peer: int) -> bool:
        """Return True once a path to the peer has carried a packet and its acknowledgement."""
        link = self._peers.get(peer)
        return isinstance(link, DatagramLink) and link.flow.word(flow_layout.FLOW_REACHED) != 0

    def reports(self) -> list[PathReport]:
        """Return the state of all paths in detail; any thread may ask."""
        return [
            _report(link, index, path, self._local_name(link.connection, index))
            for link in list(self._peers.values())
            if isinstance(link, DatagramLink) and isinstance(link.connection, DatagramConnection)
            for index, path in enumerate(link.connection.paths)
        ]

    def paths(self) -> list[PathStatus]:
        """Return the state of all paths as ``miraccl net watch`` shows it; any thread may ask."""
        return [
            PathStatus(
                peer=report.peer,
                transport=self.transport,
                path=report.path,
                local=report.local,
                remote=report.remote,
                state=report.state.upper(),
                sent_bytes=report.acked_bytes,
                received_bytes=report.received_bytes,
                resent_bytes=report.lost_bytes,
                lost=report.resent,
                rtt_us=report.rtt / 1000,
                min_rtt_us=report.min_rtt / 1000,
                rate=float(report.rate),
                window_bytes=report.window,
                controller=report.controller,
                mtu=report.mtu,
            )
            for report in self.reports()
        ]

    def _local_name(self, connection: DatagramConnection, index: int) -> str:
        """Return this end of a path for reports."""
        sock = connection.streams[connection.paths[index].socket]
        return address_text(sock.getsockname()) if sock.fileno() >= 0 else ""

    @property
    def strangers(self) -> int:
        """Number of packets without a valid tag."""
        return self._word(flow_layout.PORT_STRANGERS)

    def system_calls(self) -> dict[str, int]:
        """Return the calls of sendmsg and recvmsg so far."""
        return {
            "sends": self._word(flow_layout.PORT_SENDS),
            "receives": self._word(flow_layout.PORT_RECEIVES),
        }

    # --- the thread

    def _service(self) -> None:
        """Log paths that have died, and those that are used again."""
        for link in self._datagram_links():
            assert isinstance(link.connection, DatagramConnection)
            for index, path in enumerate(link.connection.paths):
                works = link.flow.path(index, flow_layout.PATH_STATE) <= flow_layout.SUSPECT
                if not works and index not in link.works:
                    continue  # never open so far
                changed = link.works.get(index, works) != works
                link.works[index] = works
                if changed:
                    self.log.info(
                        "rank %d: path %d to %s %s; %d of %d paths work",
                        link.peer,
                        index,
                        address_text((path.host, path.port)),
                        "is used again" if works else "is dead",
                        sum(link.works.values()),
                        len(link.connection.paths),
                    )

    def _new_link(self, connection: NetConnection) -> EngineLink:
        assert isinstance(connection, DatagramConnection)
        self._open_port(connection)
        config = LinkConfig(
            nstreams=NSTREAMS,
            send_slot_bytes=connection.peer_slot_bytes,
            recv_slot_bytes=connection.pair.recv.slot_bytes,
            segment_bytes=min(self._segment_bytes, SEGMENT_BYTES),
            spread=True,
        )
        memory = self._link_memory(config, connection)
        flow = FlowMemory(flow_config(connection), memory.address, self._library.address)
        protection, seal, ciphers = self._ciphers(connection)
        flow.store(flow_layout.FLOW_PORT, self._port.address)
        flow.store(flow_layout.FLOW_ADMITTED, UNSOLICITED_BYTES)
        flow.store(flow_layout.FLOW_ADMITS, int(connection.budget > 0))
        flow.store(flow_layout.FLOW_PROTECTION, protection)
        flow.store(flow_layout.FLOW_SEAL, seal[0])
        flow.store(flow_layout.FLOW_OPEN, seal[1])
        for index in range(len(connection.paths)):
            self._write_address(flow, connection, index)
        link = DatagramLink(
            connection,
            memory,
            self._port,
            self._free_entry(),
            flow=flow,
            ciphers=ciphers,
            abort=self._abort_flow,
        )
        memory.store(link_layout.LINK_FLOW, flow.address)
        flow.validate_paths(now_ns())
        self._set_entry(link.index, memory.address)
        self._write_hash([*self._datagram_links(), link])
        return link

    def _ciphers(
        self, connection: DatagramConnection
    ) -> tuple[int, tuple[int, int], tuple[AesGcm, AesGcm] | tuple[PrivateMemory, PrivateMemory]]:
        """Return how packets are protected, the addresses of keys or contexts to seal and to open
        them, and their owners.
        """
        mode = Protection(connection.options.protection), connection.cipher
        protection = _PROTECTIONS.get(mode, flow_layout.PROTECT_NONE)
        if connection.cipher == AEGIS_128X2:
            memory = PrivateMemory(KEY_BYTES), PrivateMemory(KEY_BYTES)
            for each, key in zip(memory, (connection.send_key, connection.recv_key), strict=True):
                memory_at(each.address, KEY_BYTES)[:] = key
            return protection, (memory[0].address, memory[1].address), memory
        write_crypto(self._port.address)
        keys = AesGcm(connection.send_key), AesGcm(connection.recv_key)
        return protection, (keys[0].prepared(sealing=True), keys[1].prepared(sealing=False)), keys

    def _open_port(self, connection: DatagramConnection) -> None:
        """Watch the sockets of the transport, once."""
        if self._sockets:
            return
        self._sockets = connection.streams
        self._store_port(flow_layout.PORT_BUDGET, connection.budget)
        self._store_port(flow_layout.PORT_ALLOWANCE, connection.budget)
        for i, sock in enumerate(self._sockets):
            at = flow_layout.PORT_SOCKETS + i * flow_layout.SOCKET_BYTES
            self._store_port(at + flow_layout.SOCKET_FD, sock.fileno())
            self._store_port(at + flow_layout.SOCKET_READABLE, 1)
            self._watch(sock.fileno(), select.EPOLLIN | select.EPOLLET, i)
        self._store_port(flow_layout.PORT_NSOCKETS, len(self._sockets))

    def _write_address(self, flow: FlowMemory, connection: DatagramConnection, index: int) -> None:
        """Write the peer's end of a path, and what carries it here."""
        path = connection.paths[index]
        address = socket_address(path.host, path.port)
        flow.write_path(index, flow_layout.PATH_ADDRESS, address)
        flow.store_path(index, flow_layout.PATH_ADDRESS_BYTES, len(address))
        flow.store_path(index, flow_layout.PATH_SOCKET, path.socket)

    def _datagram_links(self) -> list[DatagramLink]:
        return [link for link in self._peers.values() if isinstance(link, DatagramLink)]

    def _write_hash(self, links: Sequence[DatagramLink]) -> None:
        """Write the table from connection numbers to flows, at most half full."""
        entries = 16
        while entries < 2 * len(links):
            entries *= 2
        rows = [(0, 0)] * entries
        for link in links:
            number = link.flow.config.connection
            at = number & (entries - 1)
            while rows[at][1]:
                at = (at + 1) & (entries - 1)
            rows[at] = number, link.flow.address
        table = PrivateMemory(16 * entries)
        for i, row in enumerate(rows):
            memory_at(table.address + 16 * i, 16)[:] = struct.pack("<2q", *row)
        self._store_port(flow_layout.PORT_HASH, table.address)
        self._store_port(flow_layout.PORT_HASH_MASK, entries - 1)
        self._hash = table

    def _remove(self, peers: Sequence[int]) -> None:
        super()._remove(peers)
        self._write_hash(self._datagram_links())

    def _store_port(self, offset: int, value: int) -> None:
        memory_at(self._port.address + offset, 8)[:] = struct.pack("<q", value)

    def _word(self, offset: int) -> int:
        return int(struct.unpack("<q", memory_at(self._port.address + offset, 8))[0])


def write_crypto(port: int) -> None:
    """Write the addresses of libcrypto's functions into a port."""
    functions = addresses()
    for i, name in enumerate(_CRYPTO):
        at = port + flow_layout.PORT_CRYPTO + 8 * i
        memory_at(at, 8)[:] = struct.pack("<q", functions[name])


def socket_address(host: str, port: int) -> bytes:
    """Return struct sockaddr_in or sockaddr_in6 (ip(7), ipv6(7))."""
    if ":" in host:
        family = struct.pack("=H", socket.AF_INET6)
        where = struct.pack("!HI", port, 0) + socket.inet_pton(socket.AF_INET6, host)
        return family + where + bytes(4)
    family = struct.pack("=H", socket.AF_INET)
    return family + struct.pack("!H", port) + socket.inet_aton(host) + bytes(8)


def _report(link: DatagramLink, index: int, path: DatagramPath, local: str) -> PathReport:
    def word(offset: int) -> int:
        return link.flow.path(index, offset)

    window, smoothed = word(flow_layout.PATH_CONTROL), word(flow_layout.PATH_SMOOTHED)
    rate = word(flow_layout.PATH_CONTROL + 8) or window * 1_000_000_000 // max(1, smoothed)
    return PathReport(
        peer=link.connection.peer,
        path=index,
        local=local,
        remote=address_text((path.host, path.port)),
        state=flow_layout.STATES[word(flow_layout.PATH_STATE)].value,
        rtt=smoothed,
        min_rtt=word(flow_layout.PATH_MINIMUM),
        window=window,
        rate=rate,
        in_flight=word(flow_layout.PATH_IN_FLIGHT),
        mtu=word(flow_layout.PATH_MTU),
        sent_packets=word(flow_layout.PATH_SENT_PACKETS),
        sent_bytes=word(flow_layout.PATH_SENT_BYTES),
        received_packets=word(flow_layout.PATH_RECEIVED_PACKETS),
        received_bytes=word(flow_layout.PATH_RECEIVED_BYTES),
        acked_bytes=word(flow_layout.PATH_ACKED_BYTES),
        lost_bytes=word(flow_layout.PATH_LOST_BYTES),
        resent=word(flow_layout.PATH_LOST_PACKETS),
        spurious=word(flow_layout.PATH_SPURIOUS),
        send_errors=word(flow_layout.PATH_SEND_ERRORS),
        last_errno=word(flow_layout.PATH_LAST_ERRNO),
        gso=not word(flow_layout.PATH_NO_GSO),
        silence=word(flow_layout.PATH_SILENCE),
        late=word(flow_layout.PATH_LATE),
        controller=link.flow.config.congestion,
    )
