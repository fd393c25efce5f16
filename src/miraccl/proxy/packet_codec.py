"""Packets of one datagram connection as bytes: encoding and protection in both directions."""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.native.crypto import AesGcm
from miraccl.transport.base import DatagramConnection
from miraccl.wire.datagram.packets import Packet, Record, decode, encode
from miraccl.wire.datagram.seal import Protection, protect, unprotect


class PacketCodec:
    """Encoder and decoder of the packets of a connection, with its keys."""

    def __init__(self, connection: DatagramConnection) -> None:
        self._peer_connection = connection.peer_connection
        self._protection = Protection(connection.options.protection)
        self._seal, self._open = AesGcm(connection.send_key), AesGcm(connection.recv_key)

    def encode(self, path: int, number: int, records: Sequence[Record]) -> bytes:
        """Return a protected packet to the peer."""
        raw = encode(Packet(path, self._peer_connection, number, tuple(records)))
        return protect(self._protection, self._seal, raw)

    def decode(self, data: bytes) -> Packet | None:
        """Return a packet from the peer, None if it is not authentic.

        Raises:
            ProtocolError: It is authentic and malformed.
        """
        raw = unprotect(self._protection, self._open, data)
        return None if raw is None else decode(raw)
