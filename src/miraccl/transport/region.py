"""Registered memory that peers put to and get from: contract, descriptors, and local checks.

A rank registers a region and publishes its descriptor; a peer attaches the descriptor and gets a
``RemoteRegion`` with ``put``, ``get`` and ``flush``. A descriptor carries the key, range, rights
and generation of the region, as a memory region of verbs carries its rkey. ``revoke`` starts a new
generation: operations with an older descriptor fail from then on.

Windows are regions. ``memory.MemoryRegions`` (one process) and ``shm.ShmRegions`` (one host) are
complete providers; ``cuda_p2p.WindowMemory`` attaches the regions of all ranks at once, because its
mappings are chosen by all ranks together.
"""

from __future__ import annotations

import abc
import enum
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from miraccl.errors import InvalidUsage, MiracclError, ProtocolError
from miraccl.transport.fifo import PrivateMemory, memory_at, native_atomics

KEY_BYTES = 16


class Rights(enum.IntFlag):
    """Operations that a descriptor permits to peers."""

    READ = 1
    WRITE = 2


class StaleRegion(MiracclError):
    """The region was revoked or freed after its descriptor was made."""


@dataclass(frozen=True, kw_only=True)
class RegionDescriptor:
    """Description of a region for its peers.

    Attributes:
        provider: Kind of region, such as ``shm``.
        key: Random identifier; a provider rejects descriptors whose key is not the region's.
        generation: Number of revocations before this descriptor was made.
        nbytes: Size; offsets of ``put`` and ``get`` are below it.
        location: What the provider needs to reach the memory.
    """

    provider: str
    key: bytes
    generation: int
    nbytes: int
    rights: Rights
    location: Mapping[str, int | str] = field(default_factory=dict)

    def encode(self) -> bytes:
        return json.dumps(
            [
                self.provider,
                self.key.hex(),
                self.generation,
                self.nbytes,
                int(self.rights),
                dict(self.location),
            ]
        ).encode()

    @classmethod
    def decode(cls, data: bytes, provider: str) -> RegionDescriptor:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            kind, key, generation, nbytes, rights, location = json.loads(data)
            descriptor = cls(
                provider=str(kind),
                key=bytes.fromhex(key),
                generation=int(generation),
                nbytes=int(nbytes),
                rights=Rights(rights),
                location=dict(location),
            )
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"cannot read a region descriptor: {error}") from None
        if descriptor.provider != provider or descriptor.nbytes < 0:
            raise ProtocolError(
                f"cannot attach a region of {descriptor.nbytes} bytes of provider "
                f"{descriptor.provider!r}: expected {provider!r}"
            )
        return descriptor


class Region(abc.ABC):
    """Registered memory of this rank.

    Attributes:
        address: Local address of the first byte.
    """

    address: int
    nbytes: int

    @abc.abstractmethod
    def descriptor(self, rights: Rights = Rights.READ | Rights.WRITE) -> bytes:
        """Return a descriptor of the current generation with these rights."""

    @abc.abstractmethod
    def revoke(self) -> None:
        """Start a new generation: operations with older descriptors raise ``StaleRegion``.

        An operation that has begun may still complete.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Revoke the region and free its memory with the last mapping; idempotent."""


class RemoteRegion(abc.ABC):
    """Region of a peer.

    Attributes:
        address: Address at which this process, or its GPU, loads and stores the region; 0 if it is
            reached by ``put`` and ``get`` only.
    """

    def __init__(self, descriptor: RegionDescriptor, address: int = 0) -> None:
        self.descriptor, self.address = descriptor, address

    @property
    def nbytes(self) -> int:
        return self.descriptor.nbytes

    def put(self, offset: int, source: int, nbytes: int) -> None:
        """Write local memory at ``source`` to the region; complete after ``flush``.

        ``source`` must not change before then.

        Raises:
            InvalidUsage: The range exceeds the region, or the descriptor lacks ``WRITE``.
            StaleRegion: The region was revoked.
        """
        self._check("put", offset, nbytes, Rights.WRITE)
        if nbytes:
            self._put(offset, source, nbytes)

    def get(self, offset: int, target: int, nbytes: int) -> None:
        """Read the region to local memory at ``target``; complete after ``flush``.

        Raises as ``put``, for ``READ``.
        """
        self._check("get", offset, nbytes, Rights.READ)
        if nbytes:
            self._get(offset, target, nbytes)

    @abc.abstractmethod
    def flush(self) -> None:
        """Wait until all puts are visible to the peer and all gets have arrived."""

    @abc.abstractmethod
    def close(self) -> None:
        """Detach; idempotent. The peer's memory is not affected."""

    @abc.abstractmethod
    def _put(self, offset: int, source: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def _get(self, offset: int, target: int, nbytes: int) -> None: ...

    @abc.abstractmethod
    def _generation(self) -> int:
        """Return the current generation of the peer's region, -1 if it was freed."""

    def _check(self, what: str, offset: int, nbytes: int, right: Rights) -> None:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidUsage(
                f"cannot {what} {nbytes} bytes at offset {offset}: the region has {self.nbytes} "
                "bytes"
            )
        if right not in self.descriptor.rights:
            raise InvalidUsage(f"cannot {what}: the descriptor does not permit {right.name}")
        if self._generation() != self.descriptor.generation:
            raise StaleRegion(f"cannot {what} {nbytes} bytes: the region was revoked by its owner")


class MappedRegion(RemoteRegion):
    """Region that this process, or its GPU, loads and stores at ``address``.

    Args:
        generation: Returns the current generation of the region.
        copy: ``copy(target, source, nbytes)`` between two addresses; complete after ``flush``.
        flush: Makes copies visible to the peer.
        memory: Object that keeps the mapping alive.
    """

    def __init__(
        self,
        descriptor: RegionDescriptor,
        address: int,
        *,
        generation: Callable[[], int],
        copy: Callable[[int, int, int], None],
        flush: Callable[[], None],
        memory: Any = None,
    ) -> None:
        super().__init__(descriptor, address)
        self._current_generation, self._copy, self._flush = generation, copy, flush
        self._memory = memory
        self._closed = False

    def flush(self) -> None:
        self._flush()

    def close(self) -> None:
        self._closed, self._memory = True, None

    def _put(self, offset: int, source: int, nbytes: int) -> None:
        self._copy(self.address + offset, source, nbytes)

    def _get(self, offset: int, target: int, nbytes: int) -> None:
        self._copy(target, self.address + offset, nbytes)

    def _generation(self) -> int:
        return -1 if self._closed else self._current_generation()


class RegionProvider(Protocol):
    """Maker of regions of one kind, and the way to those of peers."""

    def register(self, nbytes: int) -> Region:
        """Allocate and register zeroed memory. Raises ``SystemFailure``."""

    def attach(self, descriptor: bytes) -> RemoteRegion:
        """Attach the region of a peer.

        Raises:
            ProtocolError: The descriptor is malformed, or not the region's.
            StaleRegion: The region was revoked or freed.
            SystemFailure: The memory cannot be mapped.
        """


@functools.cache
def _fence_word() -> PrivateMemory:
    return PrivateMemory(8)


def fence() -> None:
    """Order all earlier stores of this process before all later ones."""
    native_atomics().exchange(_fence_word().address, 0)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses of this process."""
    memory_at(target, nbytes)[:] = memory_at(source, nbytes)
