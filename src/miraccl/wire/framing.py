"""Frames and typed fields of control messages.

A frame is a 32-bit big-endian length and that many bytes. A message is one byte of kind and its
fields in the order of its ``LAYOUT``. There is no other syntax: a decoder returns exactly one
record or raises ``ProtocolError``. Nothing is unpickled and nothing is evaluated.

Rules: the length is checked against the limit before a byte of the body is stored; a message with
trailing bytes is rejected; text is strict UTF-8; JSON is an object of finite numbers. The reader
that is fed and then polled follows h11 (``h11/_receivebuffer.py``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from miraccl.errors import InvalidUsage, ProtocolError

HEADER = struct.Struct(">I")
#: Longest frame body after the handshake (a plan of a large job is some 100 kB per rank).
MAX_FRAME_BYTES = 64 << 20
#: Longest frame body before that; the largest message of the handshake has 79 bytes.
MAX_HANDSHAKE_BYTES = 128


class Record(Protocol):
    """A message: a frozen dataclass with a kind and a layout of (field, codec)."""

    KIND: ClassVar[int]
    LAYOUT: ClassVar[tuple[tuple[str, str], ...]]


R = TypeVar("R")


def check_length(nbytes: int) -> None:
    """Raise ``InvalidUsage`` if a frame body of ``nbytes`` is too long to send."""
    if nbytes > MAX_FRAME_BYTES:
        raise InvalidUsage(
            f"cannot send a control message of {nbytes} bytes: at most {MAX_FRAME_BYTES}"
        )


def encode_frame(body: bytes) -> bytes:
    check_length(len(body))
    return HEADER.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into frames.

    ``limit`` (bytes) may be raised once the peer is authenticated; it holds from the next header
    on.
    """

    def __init__(self, limit: int = MAX_HANDSHAKE_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def rest(self) -> bytes:
        """Return the bytes that belong to no complete frame yet."""
        return bytes(self._buffer)

    def next_frame(self) -> bytes | None:
        """Return the next complete frame body, None if there is none.

        Raises ``ProtocolError`` if the announced length exceeds the limit.
        """
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(buffer)
        if length > self.limit:
            raise ProtocolError(f"a frame of {length} bytes, allowed are {self.limit}")
        end = HEADER.size + length
        if len(buffer) < end:
            return None
        frame = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        return frame


class _Cursor:
    """Reads fields off a message body."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def read(self, nbytes: int) -> bytes:
        if nbytes > len(self.data) - self.offset:
            raise ProtocolError("a message ends in the middle of a field")
        field = self.data[self.offset : self.offset + nbytes]
        self.offset += nbytes
        return field

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.read(form.size))[0]

    def count(self, smallest: int) -> int:
        """Read a list length whose elements take at least ``smallest`` bytes each.

        A false length is rejected before anything is allocated for it.
        """
        count = int(self.number(_U32))
        if count * smallest > len(self.data) - self.offset:
            raise ProtocolError("a list is longer than its message")
        return count


_U8, _U16, _U32, _U64, _F64 = (struct.Struct(">" + c) for c in "BHIQd")


def _write_number(form: struct.Struct) -> Callable[[Any], bytes]:
    def write(value: Any) -> bytes:
        try:
            return form.pack(value)
        except struct.error as error:
            raise InvalidUsage(f"cannot encode {value!r}: {error}") from None

    return write


def _read_number(form: struct.Struct) -> Callable[[_Cursor], Any]:
    return lambda cursor: cursor.number(form)


def _read_flag(cursor: _Cursor) -> bool:
    value = cursor.number(_U8)
    if value > 1:
        raise ProtocolError(f"a flag is 0 or 1, got {value}")
    return bool(value)


def _read_time(cursor: _Cursor) -> float:
    value = float(cursor.number(_F64))
    if not 0 <= value < 1e12:  # also refuses NaN
        raise ProtocolError(f"a duration in seconds was expected, got {value}")
    return value


def _write_bytes(value: Any) -> bytes:
    return _U32.pack(len(value)) + bytes(value)


def _read_bytes(cursor: _Cursor) -> bytes:
    return cursor.read(cursor.count(1))


def _write_text(value: Any) -> bytes:
    return _write_bytes(str(value).encode("utf-8", "replace"))


def _read_text(cursor: _Cursor) -> str:
    try:
        return _read_bytes(cursor).decode("utf-8")
    except UnicodeDecodeError:
        raise ProtocolError("a text is not UTF-8") from None


def _write_list(write: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda values: _U32.pack(len(values)) + b"".join(map(write, values))


def _read_list(read: Callable[[_Cursor], Any]) -> Callable[[_Cursor], tuple[Any, ...]]:
    return lambda cursor: tuple(
        read(cursor) for _ in range(cursor.count(4))
    )  # every list here has elements of >= 4 bytes


_CODECS: dict[str, tuple[Callable[[Any], bytes], Callable[[_Cursor], Any]]] = {
    "u16": (_write_number(_U16), _read_number(_U16)),
    "u32": (_write_number(_U32), _read_number(_U32)),
    "u64": (_write_number(_U64), _read_number(_U64)),
    "flag": (_write_number(_U8), _read_flag),
    "time": (_write_number(_F64), _read_time),
    "b4": (bytes, lambda cursor: cursor.read(4)),
    "b32": (bytes, lambda cursor: cursor.read(32)),
    "bytes": (_write_bytes, _read_bytes),
    "text": (_write_text, _read_text),
    "u32s": (_write_list(_write_number(_U32)), _read_list(_read_number(_U32))),
    "texts": (_write_list(_write_text), _read_list(_read_text)),
    "blobs": (_write_list(_write_bytes), _read_list(_read_bytes)),
}


def encode(message: Record) -> bytes:
    """Return the body of a message: its kind and its fields."""
    fields = (_CODECS[codec][0](getattr(message, name)) for name, codec in message.LAYOUT)
    return bytes([message.KIND]) + b"".join(fields)


def decode(body: bytes, kinds: dict[int, type[R]]) -> R:
    """Decode the one record in ``body``; ``kinds``: the records allowed here, by kind."""
    if not body:
        raise ProtocolError("an empty message")
    record = kinds.get(body[0])
    if record is None:
        raise ProtocolError(f"a message of kind {body[0]} is not expected here")
    cursor = _Cursor(body[1:])
    layout: tuple[tuple[str, str], ...] = record.LAYOUT  # type: ignore[attr-defined]
    values = {name: _CODECS[codec][1](cursor) for name, codec in layout}
    if cursor.offset != len(cursor.data):
        raise ProtocolError(
            f"{len(cursor.data) - cursor.offset} bytes too many in a message of kind {body[0]}"
        )
    return record(**values)


def encode_json(payload: dict[str, Any]) -> bytes:
    """Encode a small object of plain values. Raises ``InvalidUsage`` for anything JSON cannot
    express.
    """
    if not isinstance(payload, dict):
        raise InvalidUsage(f"cannot send a payload of type {type(payload).__name__}: it is a dict")
    try:
        return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidUsage(f"cannot send the payload: it is not plain JSON: {error}") from None


def decode_json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a payload is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ProtocolError("a payload is not a JSON object")
    return value


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")
