"""Transport for ranks that are threads of one process: FIFOs in private memory, no system calls.

Simulated clusters use it for every pair of ranks, whatever hosts they claim to be on. It is the
smallest transport without a proxy: a peer's control page and window are the peer's own addresses.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import ClassVar

from miraccl import clock
from miraccl.errors import CommunicatorClosed, ProtocolError, SystemFailure
from miraccl.transport import registry
from miraccl.transport.base import Fifo, FifoPair, Transport, TransportContext
from miraccl.transport.fifo import FifoMemory, PrivateMemory, check_slot_bytes, slot_bytes_for
from miraccl.transport.region import (
    KEY_BYTES,
    MappedRegion,
    Region,
    RegionDescriptor,
    Rights,
    StaleRegion,
    copy_memory,
    fence,
)

CAPABILITIES = registry.MEMORY.capabilities
TOKEN_BYTES = 16

_lock = threading.Lock()
_transports: weakref.WeakValueDictionary[str, MemoryTransport] = weakref.WeakValueDictionary()


class _Duplex:
    """FIFO memory of both directions of one pair; ``sends[token]`` is written by that rank."""

    def __init__(self, tokens: tuple[str, str], slot_bytes: int) -> None:
        self.sends = {token: FifoMemory(slot_bytes) for token in tokens}


class MemoryTransport(Transport):
    """In-process transport of one communicator and rank.

    A pair uses the smaller of the two slot sizes. ``context.control`` and ``context.window`` must
    stay valid as long as any peer is connected.
    """

    def __init__(self, context: TransportContext) -> None:
        self.context = context
        self.slot_bytes = slot_bytes_for(len(context.peers), context.budget, context.max_slot_bytes)
        self._token = clock.random_hex(TOKEN_BYTES)
        self._closed = False
        # By token of the peer, on the transport with the smaller token. Not in one table of the
        # process: the tokens of two simulations with one seed are the same.
        self._duplexes: weakref.WeakValueDictionary[str, _Duplex] = weakref.WeakValueDictionary()
        with _lock:
            _transports[self._token] = self

    def setup(self) -> bytes:
        return json.dumps({"token": self._token, "slot_bytes": self.slot_bytes}).encode()

    def connect(self, infos: Mapping[int, bytes]) -> dict[int, FifoPair]:
        if self._closed:
            raise CommunicatorClosed("cannot connect: the in-process transport is closed")
        return {peer: self._connect_peer(peer, info) for peer, info in infos.items()}

    def _connect_peer(self, peer: int, info: bytes) -> FifoPair:
        try:
            record = json.loads(info)
            token, slot_bytes = str(record["token"]), check_slot_bytes(record["slot_bytes"])
        except (ValueError, KeyError, TypeError):
            raise ProtocolError(
                f"cannot connect to rank {peer}: its in-process description is malformed", peer=peer
            ) from None
        with _lock:
            other = _transports.get(token)
            if other is None:
                raise SystemFailure(
                    f"cannot connect to rank {peer}: it is not in this process, or has closed its "
                    "transport",
                    rank=self.context.endpoint.rank,
                    peer=peer,
                )
            owner, guest = (self, token) if self._token < token else (other, self._token)
            duplex = owner._duplexes.get(guest)
            if duplex is None:
                tokens = (self._token, token)
                duplex = _Duplex(tokens, min(self.slot_bytes, slot_bytes))
                owner._duplexes[guest] = duplex
        send, recv = duplex.sends[self._token], duplex.sends[token]
        return FifoPair(
            send=Fifo.from_address(send.address, send.slot_bytes, capabilities=CAPABILITIES),
            recv=Fifo.from_address(recv.address, recv.slot_bytes, capabilities=CAPABILITIES),
            control=other.context.control,
            pid=other.context.endpoint.pid,
            window=other.context.window[0],
            readable=True,
            memory=(duplex, other.context),
        )

    def close(self) -> None:
        """Refuse further peers; FIFO memory lives as long as a pair that uses it."""
        self._closed = True
        with _lock:
            if _transports.get(self._token) is self:
                del _transports[self._token]


class MemoryRegion(Region):
    """Region of a thread of this process; see ``MemoryRegions``."""

    def __init__(self, nbytes: int) -> None:
        self._memory: PrivateMemory | None = PrivateMemory(max(1, nbytes))
        self.address, self.nbytes = self._memory.address, nbytes
        self.key, self.generation = clock.random_bytes(KEY_BYTES), 0

    def descriptor(self, rights: Rights = Rights.READ | Rights.WRITE) -> bytes:
        if self._memory is None:
            raise StaleRegion("cannot describe a region that is closed")
        return RegionDescriptor(
            provider=MemoryRegions.name,
            key=self.key,
            generation=self.generation,
            nbytes=self.nbytes,
            rights=rights,
        ).encode()

    def revoke(self) -> None:
        self.generation += 1

    def close(self) -> None:
        self.generation, self._memory = -2, None


class MemoryRegions:
    """Provider of regions for threads of one process: plain memory and a table of keys."""

    name = "memory"
    _regions: ClassVar[weakref.WeakValueDictionary[bytes, MemoryRegion]] = (
        weakref.WeakValueDictionary()
    )

    def register(self, nbytes: int) -> MemoryRegion:
        region = MemoryRegion(nbytes)
        with _lock:
            self._regions[region.key] = region
        return region

    def attach(self, descriptor: bytes) -> MappedRegion:
        parsed = RegionDescriptor.decode(descriptor, self.name)
        with _lock:
            region = self._regions.get(parsed.key)
        if region is None or region.generation != parsed.generation:
            raise StaleRegion("cannot attach a region: it was revoked or freed by its owner")
        if parsed.nbytes != region.nbytes:
            raise ProtocolError(
                f"cannot attach a region: its descriptor names {parsed.nbytes} bytes instead of "
                f"{region.nbytes}"
            )
        return MappedRegion(
            parsed,
            region.address,
            generation=lambda: region.generation,
            copy=copy_memory,
            flush=fence,
            memory=(region, region._memory),
        )


def open_transport(context: TransportContext) -> MemoryTransport:
    """Open the in-process transport; see ``registry.TransportSpec``."""
    return MemoryTransport(context)
