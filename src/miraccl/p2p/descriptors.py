"""Descriptors of registered memory, as bytes that travel by any means.

A descriptor admits its holder to the memory that it names, for the rights in it, if the holder also
knows the secret of the agents. It has no address of the owner's process and is never unpickled.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass, field, replace

from miraccl.errors import InvalidUsage, ProtocolError
from miraccl.transport.region import KEY_BYTES, Rights

MAGIC = b"MRD1"
#: magic, agent, slot, generation, key, offset, bytes, block bytes, rights, device, lengths of the
#: dtype, name, address and GPU handle, number of dimensions
_HEAD = struct.Struct("<4s32sIQ16sQQQBhBBBBB")
_CRC = struct.Struct("<I")
MAX_DIMENSIONS = 32


@dataclass(frozen=True, kw_only=True)
class RemoteMemory:
    """Memory of another agent, as its descriptor says.

    Attributes:
        agent: Random identifier of the owner; a restarted one has another.
        slot, generation: Registration in the owner's table.
        offset: First byte within the registration.
        block_nbytes: Bytes of a block, by default those of a row (an index of the first axis).
        device: Ordinal of the owner's GPU, -1 for CPU memory.
        handle: Exported handle of GPU memory, for processes of the owner's host.
        name, address: The owner's name and host:port.
    """

    agent: bytes
    slot: int
    generation: int
    key: bytes = field(repr=False)
    offset: int
    nbytes: int
    block_nbytes: int
    rights: Rights
    shape: tuple[int, ...]
    dtype: str
    device: int = -1
    name: str = ""
    address: str = ""
    handle: bytes = field(default=b"", repr=False)

    @property
    def nblocks(self) -> int:
        return self.nbytes // self.block_nbytes if self.block_nbytes else 0

    def rows(self, start: int, stop: int) -> RemoteMemory:
        """Return the part of some rows (indices of the first axis).

        Raises:
            InvalidUsage: The rows are not in the memory.
        """
        count = self.shape[0] if self.shape else 0
        if not 0 <= start <= stop <= count:
            raise InvalidUsage(f"cannot select rows {start} to {stop}: the memory has {count} rows")
        row = self.nbytes // count if count else 0
        return replace(
            self,
            offset=self.offset + start * row,
            nbytes=(stop - start) * row,
            shape=(stop - start, *self.shape[1:]),
        )

    def encode(self) -> bytes:
        dtype, name, address = (t.encode() for t in (self.dtype, self.name, self.address))
        head = _HEAD.pack(
            MAGIC,
            self.agent,
            self.slot,
            self.generation,
            self.key,
            self.offset,
            self.nbytes,
            self.block_nbytes,
            int(self.rights),
            self.device,
            len(dtype),
            len(name),
            len(address),
            len(self.handle),
            len(self.shape),
        )
        body = (
            head
            + dtype
            + name
            + address
            + self.handle
            + struct.pack(f"<{len(self.shape)}Q", *self.shape)
        )
        return body + _CRC.pack(zlib.crc32(body))

    @classmethod
    def decode(cls, data: bytes) -> RemoteMemory:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            return cls._parse(bytes(data))
        except (struct.error, ValueError, UnicodeDecodeError, TypeError) as error:
            raise ProtocolError(f"cannot read a descriptor of memory: {error}") from None

    @classmethod
    def _parse(cls, data: bytes) -> RemoteMemory:
        if len(data) < _HEAD.size + _CRC.size or data[:4] != MAGIC:
            raise ValueError(f"{len(data)} bytes that do not begin with {MAGIC!r}")
        body, crc = data[: -_CRC.size], _CRC.unpack(data[-_CRC.size :])[0]
        if zlib.crc32(body) != crc:
            raise ValueError("its checksum is wrong")
        _, agent, slot, generation, key, offset, nbytes, block, rights, device, *lengths = (
            _HEAD.unpack_from(body)
        )
        at, texts = _HEAD.size, []
        for length in lengths[:3]:
            texts.append(body[at : at + length].decode())
            at += length
        handle = body[at : at + lengths[3]]
        at += lengths[3]
        if lengths[4] > MAX_DIMENSIONS or len(body) != at + 8 * lengths[4]:
            raise ValueError(f"its length is {len(data)}")
        shape = struct.unpack_from(f"<{lengths[4]}Q", body, at)
        if not 0 < block <= max(nbytes, 1) or offset + nbytes >= 1 << 62 or rights > 3:
            raise ValueError(f"{nbytes} bytes in blocks of {block}, rights {rights}")
        if any(n >= 1 << 62 for n in (slot, generation, *shape)):
            raise ValueError("a number is too large")
        return cls(
            agent=agent,
            slot=slot,
            generation=generation,
            key=key,
            offset=offset,
            nbytes=nbytes,
            block_nbytes=block,
            rights=Rights(rights),
            shape=shape,
            dtype=texts[0],
            device=device,
            name=texts[1],
            address=texts[2],
            handle=handle,
        )


def parse_access(access: str) -> Rights:
    """Return the rights for ``"r"``, ``"w"`` or ``"rw"``.

    Raises:
        InvalidUsage: ``access`` is something else.
    """
    rights = {"r": Rights.READ, "w": Rights.WRITE, "rw": Rights.READ | Rights.WRITE}
    if access not in rights:
        raise InvalidUsage(f"cannot register: access is {access!r}; allowed are 'r', 'w' and 'rw'")
    return rights[access]


def row_bytes(shape: tuple[int, ...], nbytes: int) -> int:
    """Return the bytes of a row: an index of the first axis; at least 1."""
    rows = shape[0] if shape else 1
    return max(1, nbytes // rows if rows and math.prod(shape) else nbytes)


assert KEY_BYTES == 16
