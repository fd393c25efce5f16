"""Packet format of the datagram transport.

A packet is a header of 16 bytes, one or more records, and a tag of 16 bytes over all before it::

    version|type u8, path u8, flags u16, connection u32, number u64

Packet numbers count per path and direction and are never reused: reordering between paths is no
sign of loss, RTT samples are unambiguous, and (path, number) is a nonce.  Data are named by stream,
frame and offset, so a retransmission may take any path.

``decode`` rejects everything that ``encode`` would not have produced.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from miraccl.errors import ProtocolError
from miraccl.wire.stream import HEADER_BYTES as FRAME_BYTES
from miraccl.wire.stream import MAX_SEGMENT_BYTES, MAX_TEXT_BYTES

VERSION = 1
TAG_BYTES = 16
MAX_PATHS = 16
MAX_STREAMS = 64
MAX_ACK_RANGES = 32
MAX_NUMBER = 1 << 62
#: Key phase of the packet, toggled when keys are replaced.
FLAG_KEY_PHASE = 1

_HEADER = struct.Struct("<BBHIQ")
_DATA = struct.Struct("<BBIIH")
_ACK = struct.Struct("<BBQIIIB")
_RANGE = struct.Struct("<II")
_GRANT = struct.Struct("<BQ")
_PROBE = struct.Struct("<BHH")
_ABORT = struct.Struct("<BB")
HEADER_BYTES = _HEADER.size
DATA_BYTES = _DATA.size
PROBE_BYTES = _PROBE.size
ABORT_BYTES = _ABORT.size
#: Bytes around the payload of a packet with one data record that carries its frame header.
OVERHEAD_BYTES = HEADER_BYTES + DATA_BYTES + FRAME_BYTES + TAG_BYTES
#: Smallest packet that every IPv6 path carries (RFC 8200: 1280 bytes less IPv6 and UDP headers).
MIN_MTU = 1280 - 48

_KIND_DATA, _KIND_DATA_HEADED, _KIND_ACK, _KIND_GRANT, _KIND_PROBE = 1, 2, 3, 4, 5
_KIND_ABORT = 6


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes ``[offset, offset + len(payload))`` of frame ``frame`` of ``stream``.

    ``header`` is the 48-byte frame header (``wire.stream``), or empty once the peer has
    acknowledged a packet with it.  ``payload`` is memory of the caller when sending and a view when
    receiving.
    """

    stream: int
    frame: int
    offset: int
    payload: bytes | memoryview
    header: bytes = b""


@dataclass(frozen=True, slots=True)
class Ack:
    """Packets of ``path`` received: ``ranges`` half-open, highest first.

    ``delay_us`` is the time since the highest one arrived; ``ce`` counts packets with ECN's CE mark
    and ``duplicates`` packets received twice, both since the start (modulo 2^32).
    """

    path: int
    ranges: tuple[tuple[int, int], ...]
    delay_us: int = 0
    ce: int = 0
    duplicates: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Total payload bytes of new data that the receiver admits, since the start of the connection.

    A total and not a difference, so that a lost grant costs nothing.
    """

    total: int


@dataclass(frozen=True, slots=True)
class Probe:
    """Packet that asks for an acknowledgement: keep-alive, path validation, search for the path
    MTU.

    ``padding`` bytes of zeros follow; ``entropy`` names the UDP port pair that carried it.
    """

    padding: int = 0
    entropy: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Reason why the sender gives up: at most ``MAX_TEXT_BYTES`` of UTF-8; never acknowledged."""

    text: bytes


Record = Data | Ack | Grant | Probe | Abort


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet without its tag."""

    path: int
    connection: int
    number: int
    records: tuple[Record, ...] = field(default=())
    flags: int = 0

    @property
    def ack_eliciting(self) -> bool:
        """True if the receiver must acknowledge this packet: it carries data or a probe."""
        return any(isinstance(r, Data | Probe) for r in self.records)


def encode(packet: Packet) -> bytes:
    """Return the packet's bytes without its tag."""
    parts = [
        _HEADER.pack(VERSION << 4, packet.path, packet.flags, packet.connection, packet.number)
    ]
    for record in packet.records:
        parts += _encode_record(record)
    return b"".join(parts)


def _encode_record(record: Record) -> list[bytes]:
    if isinstance(record, Data):
        kind = _KIND_DATA_HEADED if record.header else _KIND_DATA
        head = _DATA.pack(
            kind, record.stream, record.frame & 0xFFFFFFFF, record.offset, len(record.payload)
        )
        return [head, record.header, bytes(record.payload)]
    if isinstance(record, Ack):
        return _encode_ack(record)
    if isinstance(record, Grant):
        return [_GRANT.pack(_KIND_GRANT, record.total)]
    if isinstance(record, Abort):
        return [_ABORT.pack(_KIND_ABORT, len(record.text)), record.text]
    return [_PROBE.pack(_KIND_PROBE, record.padding, record.entropy), bytes(record.padding)]


def _encode_ack(ack: Ack) -> list[bytes]:
    """First the highest number, then alternating lengths of ranges and of the gaps below them."""
    highest = ack.ranges[0][1] - 1
    parts = [
        _ACK.pack(
            _KIND_ACK,
            ack.path,
            highest,
            min(ack.delay_us, 0xFFFFFFFF),
            ack.ce & 0xFFFFFFFF,
            ack.duplicates & 0xFFFFFFFF,
            len(ack.ranges),
        )
    ]
    above = highest + 1
    for start, stop in ack.ranges:
        parts.append(_RANGE.pack(above - stop, stop - start))
        above = start
    return parts


def decode(data: bytes | bytearray | memoryview) -> Packet:
    """Parse an authenticated packet without its tag.

    Raises:
        ProtocolError: Not a packet that ``encode`` could have produced; names the record and field.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise ProtocolError(f"packet of {len(view)} bytes, at least {HEADER_BYTES} are needed")
    kind, path, flags, connection, number = _HEADER.unpack_from(view)
    if kind != VERSION << 4:
        raise ProtocolError(
            f"packet version and type are {kind:#04x}, expected {VERSION << 4:#04x}"
        )
    if path >= MAX_PATHS or number >= MAX_NUMBER or flags & ~FLAG_KEY_PHASE:
        raise ProtocolError(f"packet header: path {path}, number {number}, flags {flags:#x}")
    records: list[Record] = []
    at = HEADER_BYTES
    while at < len(view):
        record, at = _decode_record(view, at)
        records.append(record)
    if not records:
        raise ProtocolError("packet without records")
    return Packet(path, connection, number, tuple(records), flags)


def _decode_record(view: memoryview, at: int) -> tuple[Record, int]:
    kind = view[at]
    reader = _READERS.get(kind)
    if reader is None:
        raise ProtocolError(f"record type {kind} is unknown")
    try:
        return reader(view, at)
    except struct.error:
        raise ProtocolError(f"record type {kind} is cut off after {len(view) - at} bytes") from None


def _take(view: memoryview, at: int, length: int) -> tuple[memoryview, int]:
    if at + length > len(view):
        raise ProtocolError(
            f"record of {length} bytes in a packet with {len(view) - at} bytes left"
        )
    return view[at : at + length], at + length


def _read_data(view: memoryview, at: int) -> tuple[Record, int]:
    kind, stream, frame, offset, length = _DATA.unpack_from(view, at)
    if stream >= MAX_STREAMS:
        raise ProtocolError(f"data of stream {stream}, allowed are 0 to {MAX_STREAMS - 1}")
    if offset + length > MAX_SEGMENT_BYTES:
        raise ProtocolError(f"data [{offset}, {offset + length}) beyond {MAX_SEGMENT_BYTES} bytes")
    at += DATA_BYTES
    header = memoryview(b"")
    if kind == _KIND_DATA_HEADED:
        header, at = _take(view, at, FRAME_BYTES)
    elif not length:
        raise ProtocolError("data record without header and payload")
    payload, at = _take(view, at, length)
    return Data(stream, frame, offset, payload, bytes(header)), at


def _read_ack(view: memoryview, at: int) -> tuple[Record, int]:
    _, path, highest, delay, ce, duplicates, count = _ACK.unpack_from(view, at)
    if path >= MAX_PATHS or highest >= MAX_NUMBER or not 1 <= count <= MAX_ACK_RANGES:
        raise ProtocolError(f"ack of path {path}: highest {highest}, {count} ranges")
    at += _ACK.size
    above, ranges = highest + 1, []
    for i in range(count):
        gap, length = _RANGE.unpack_from(view, at)
        at += _RANGE.size
        stop = above - gap
        if (gap == 0) != (i == 0) or not length or stop - length < 0:
            raise ProtocolError(f"ack range {i}: gap {gap}, length {length} below {above}")
        above = stop - length
        ranges.append((above, stop))
    return Ack(path, tuple(ranges), delay, ce, duplicates), at


def _read_grant(view: memoryview, at: int) -> tuple[Record, int]:
    _, total = _GRANT.unpack_from(view, at)
    if total >= MAX_NUMBER:
        raise ProtocolError(f"grant of {total} bytes")
    return Grant(total), at + _GRANT.size


def _read_probe(view: memoryview, at: int) -> tuple[Record, int]:
    _, padding, entropy = _PROBE.unpack_from(view, at)
    body, at = _take(view, at + _PROBE.size, padding)
    if any(body):
        raise ProtocolError("padding of a probe is not zero")
    return Probe(padding, entropy), at


def _read_abort(view: memoryview, at: int) -> tuple[Record, int]:
    _, length = _ABORT.unpack_from(view, at)
    if length > MAX_TEXT_BYTES:
        raise ProtocolError(f"abort with {length} bytes of text, allowed are {MAX_TEXT_BYTES}")
    text, at = _take(view, at + _ABORT.size, length)
    return Abort(bytes(text)), at


_READERS = {
    _KIND_DATA: _read_data,
    _KIND_DATA_HEADED: _read_data,
    _KIND_ACK: _read_ack,
    _KIND_GRANT: _read_grant,
    _KIND_PROBE: _read_probe,
    _KIND_ABORT: _read_abort,
}
