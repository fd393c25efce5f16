"""Target of a stream as a machine: bytes in, instructions out.

The specification of ``p2p.kernels.serve``: tests feed both the same bytes and compare replies,
memory and notifications. ``p2p.stream_layout`` describes the frames.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from miraccl.errors import ProtocolError

MAGIC = 0x5052
PUT, GET, NOTIFY, END = 1, 2, 3, 4
ACK, DATA = 16, 17
LAST, NOTIFIES = 1, 2
OK, STALE, WRONG_KEY, NO_RIGHT, OUTSIDE, CANCELLED = range(6)
READ, WRITE = 1, 2
MAX_EXTENTS, MAX_PAYLOAD, MAX_NOTIFY = 1024, 1 << 20, 1 << 15
MAX_REGIONS, MAX_OFFSET = 4096, 1 << 62

REQUEST = struct.Struct("<HBBIqIIq16sqq")
EXTENT = struct.Struct("<qq")
REPLY = struct.Struct("<HBBIqIIq")
TRAILER = struct.Struct("<q")


@dataclass(frozen=True, kw_only=True)
class TargetRequest:
    """Header of a request; ``extents`` is what its table says, or its single extent."""

    kind: int
    flags: int = 0
    number: int
    slot: int = 0
    payload: int = 0
    generation: int = 0
    key: bytes = bytes(16)
    offset: int = 0
    position: int = 0
    extents: tuple[tuple[int, int], ...] = ()

    def encode(self) -> bytes:
        """Return the header and the table."""
        single = len(self.extents) == 1
        head = REQUEST.pack(
            MAGIC,
            self.kind,
            self.flags,
            len(self.extents),
            self.number,
            self.slot,
            self.payload,
            self.generation,
            self.key,
            self.extents[0][0] if single else self.offset,
            self.position,
        )
        return head + (b"" if single else b"".join(EXTENT.pack(*e) for e in self.extents))


@dataclass(frozen=True, kw_only=True)
class TargetRegion:
    """Registered memory, as requests are checked against it."""

    generation: int
    key: bytes
    rights: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """Instruction: store ``data`` at ``offset`` of the region in ``slot``."""

    slot: int
    offset: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class SendBytes:
    """Instruction: send these bytes."""

    data: bytes


@dataclass(frozen=True, kw_only=True)
class SendMemory:
    """Instruction: send ``head``, the extents of the region in ``slot``, and ``tail``."""

    slot: int
    extents: tuple[tuple[int, int], ...]
    head: bytes
    tail: bytes


@dataclass(frozen=True, kw_only=True)
class Notify:
    """Instruction: deliver a notification; ``status`` other than OK: its transfer failed."""

    number: int
    status: int
    position: int
    data: bytes


Instruction = Place | SendBytes | SendMemory | Notify


@dataclass(kw_only=True)
class Target:
    """State of one stream.

    Attributes:
        regions: Registered regions by slot.
        op: Operation under way, -1 for none, with its first failure.
        last_op: Operation that ended last, with its result.
        violation: First request that the protocol does not allow, or None.
    """

    regions: Mapping[int, TargetRegion]
    op: int = -1
    status: int = OK
    position: int = 0
    last_op: int = -1
    last_status: int = OK
    last_position: int = 0
    buffer: bytearray = field(default_factory=bytearray)
    violation: ProtocolError | None = None

    def receive(self, data: bytes) -> list[Instruction]:
        """Process received bytes; after a ``violation`` the stream must be closed."""
        self.buffer += data
        out: list[Instruction] = []
        while (found := self._following()) is not None:
            request, payload = found
            out += self._execute(request, payload)
        return out

    def flush(self) -> list[Instruction]:
        """Process the end of the stream: the part of a payload that has come is stored."""
        found = self._following(partial=True)
        if found is None or found[0].kind != PUT:
            return []
        request, payload = found
        return [i for i in self._put(request, payload) if isinstance(i, Place)]

    def _following(self, partial: bool = False) -> tuple[TargetRequest, bytes] | None:
        if self.violation is not None:
            return None
        try:
            return self._next(partial)
        except ProtocolError as error:
            self.violation = error
            return None

    def _next(self, partial: bool = False) -> tuple[TargetRequest, bytes] | None:
        """Cut the next request and its payload off the buffer, None if it is incomplete."""
        buffer = self.buffer
        if len(buffer) < REQUEST.size:
            return None
        magic, kind, flags, word, number, slot, payload, generation, key, offset, position = (
            REQUEST.unpack_from(buffer)
        )
        count = word & 0xFFFF
        self._check(magic, kind, count, number, payload, position)
        size = REQUEST.size + (EXTENT.size * count if count > 1 else 0)
        carried = payload if kind in (PUT, NOTIFY) else 0
        if len(buffer) < size:
            return None
        extents: tuple[tuple[int, int], ...] = ()
        if count == 1:
            extents = ((offset, payload),)
        elif count:
            table = buffer[REQUEST.size : size]
            extents = tuple(EXTENT.iter_unpack(bytes(table)))
        if kind in (PUT, GET) and not self._sums_up(extents, payload):
            raise ProtocolError("the extents of a request do not add up to its payload")
        if len(buffer) < size + carried and not partial:
            return None
        request = TargetRequest(
            kind=kind,
            flags=flags,
            number=number,
            slot=slot,
            payload=payload,
            generation=generation,
            key=key,
            offset=offset,
            position=position,
            extents=extents,
        )
        data = bytes(buffer[size : size + carried])
        del buffer[: size + carried]
        return request, data

    @staticmethod
    def _sums_up(extents: tuple[tuple[int, int], ...], payload: int) -> bool:
        sizes = [nbytes for _, nbytes in extents]
        return all(0 <= n <= MAX_PAYLOAD for n in sizes) and sum(sizes) == payload

    @staticmethod
    def _check(magic: int, kind: int, count: int, number: int, payload: int, position: int) -> None:
        good = magic == MAGIC and number >= 0 and position >= 0
        if kind == NOTIFY:
            good = good and count == 0 and payload <= MAX_NOTIFY
        elif kind == END:
            good = good and count == 0 and payload == 0
        else:
            good = good and kind in (PUT, GET)
            good = good and 1 <= count <= MAX_EXTENTS and payload <= MAX_PAYLOAD
        if not good:
            raise ProtocolError(
                f"a request of kind {kind} with {count} extents and {payload} bytes is not allowed"
            )

    def _execute(self, request: TargetRequest, payload: bytes) -> list[Instruction]:
        if request.kind == PUT:
            return self._put(request, payload)
        if request.kind == GET:
            return self._get(request)
        if request.kind == NOTIFY:
            return [self._notify(request, payload)]
        if self.op != request.number:
            self.status, self.position = OK, 0
        self._fail(CANCELLED, request.position)
        return [self._end(request.number)]

    def _put(self, request: TargetRequest, payload: bytes) -> list[Instruction]:
        if self.op != request.number:
            self.op, self.status, self.position = request.number, OK, 0
        out: list[Instruction] = []
        if self.status == OK:
            self._fail(self._verdict(request, WRITE), request.position)
        if self.status == OK:
            at = 0
            for offset, nbytes in request.extents:
                data = payload[at : at + nbytes]
                out.append(Place(slot=request.slot, offset=offset, data=data))
                at += nbytes
        if request.flags & LAST:
            out.append(self._end(request.number))
        return out

    def _get(self, request: TargetRequest) -> list[Instruction]:
        status = self._verdict(request, READ)
        if status != OK:
            return [SendBytes(data=self._ack(request.number, status, request.position))]
        head = REPLY.pack(MAGIC, DATA, 0, 0, request.number, 0, request.payload, request.position)
        return [
            SendMemory(slot=request.slot, extents=request.extents, head=head, tail=TRAILER.pack(OK))
        ]

    def _notify(self, request: TargetRequest, data: bytes) -> Notify:
        status, position = request.offset, request.position
        if request.generation == 1 and request.number == self.last_op:
            status, position = self.last_status, self.last_position
        return Notify(number=request.number, status=status, position=position, data=data)

    def _end(self, number: int) -> SendBytes:
        self.last_op, self.last_status, self.last_position = number, self.status, self.position
        self.op = -1
        return SendBytes(data=self._ack(number, self.status, self.position))

    def _fail(self, status: int, position: int) -> None:
        if self.status == OK and status != OK:
            self.status, self.position = status, position

    def _verdict(self, request: TargetRequest, right: int) -> int:
        region = self.regions.get(request.slot)
        if request.slot >= MAX_REGIONS or region is None or request.generation % 2 == 0:
            return STALE
        if region.generation != request.generation:
            return STALE
        if not hmac.compare_digest(region.key, request.key):
            return WRONG_KEY
        if not region.rights & right:
            return NO_RIGHT
        for offset, nbytes in request.extents:
            if not 0 <= offset <= MAX_OFFSET or offset + nbytes > region.nbytes:
                return OUTSIDE
        return OK

    @staticmethod
    def _ack(number: int, status: int, position: int) -> bytes:
        return REPLY.pack(MAGIC, ACK, 0, 0, number, status, 0, position)
