"""Description of a rank's verbs endpoints for its peers: what ``setup`` sends.

Peers are authenticated by the control plane that carries the descriptions. RDMA itself carries no
proof of its sender: a process that can send packets with a queue pair's numbers can write where
its keys allow, which are the slots and rows of this connection and posted receives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from miraccl.errors import ProtocolError
from miraccl.transport.fifo import check_slot_bytes
from miraccl.wire.verbs.gids import PortGid
from miraccl.wire.verbs.rows import MAX_DEVICES, MAX_STREAMS

#: 2: an immediate names several rows.
VERSION = 2


@dataclass(frozen=True, kw_only=True)
class PortInfo:
    """One port of a rank: its address forms and limits."""

    name: str
    kind: str
    lid: int
    mtu: int
    gids: tuple[PortGid, ...]


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """Queue pairs and memory that a rank has prepared for one peer.

    Attributes:
        qps: (queue pair number, first packet number); pair i is on device ``i % len(ports)``.
        slots, rows, text: Addresses that the peer may write.
        keys: Remote key of these on each device.
    """

    qps: tuple[tuple[int, int], ...]
    slots: int
    rows: int
    text: int
    keys: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class VerbsInfo:
    """Description of a rank: its ports, and what it has prepared for each peer."""

    slot_bytes: int
    ports: tuple[PortInfo, ...]
    peers: Mapping[int, PeerInfo]

    def encode(self) -> bytes:
        ports = [write_port(port) for port in self.ports]
        peers = {str(rank): asdict(peer) for rank, peer in self.peers.items()}
        record = {
            "version": VERSION,
            "slot_bytes": self.slot_bytes,
            "ports": ports,
            "peers": peers,
        }
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> VerbsInfo:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            record = json.loads(data)
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']} instead of {VERSION}")
            info = cls(
                slot_bytes=check_slot_bytes(int(record["slot_bytes"])),
                ports=tuple(read_port(each) for each in record["ports"]),
                peers={int(rank): _peer(each) for rank, each in record["peers"].items()},
            )
            _check(info)
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            raise ProtocolError(f"cannot read the connect info of verbs: {problem}") from None
        return info


def write_port(port: PortInfo) -> dict[str, Any]:
    """Return a port as JSON has it."""
    return asdict(port) | {"gids": [[g.index, g.raw.hex(), g.type, g.prefix] for g in port.gids]}


def read_port(record: Mapping[str, Any]) -> PortInfo:
    """Return the port of ``write_port``. Raises ``ValueError``, ``TypeError``, ``LookupError``."""
    gids = tuple(
        PortGid(index=int(index), raw=bytes.fromhex(raw), type=str(kind), prefix=int(prefix))
        for index, raw, kind, prefix in record["gids"]
    )
    if any(len(gid.raw) != 16 for gid in gids):
        raise ValueError("a GID that is not 16 bytes")
    return PortInfo(
        name=str(record["name"]),
        kind=str(record["kind"]),
        lid=int(record["lid"]),
        mtu=int(record["mtu"]),
        gids=gids,
    )


def _peer(record: Mapping[str, Any]) -> PeerInfo:
    return PeerInfo(
        qps=tuple((int(number), int(psn)) for number, psn in record["qps"]),
        slots=int(record["slots"]),
        rows=int(record["rows"]),
        text=int(record["text"]),
        keys=tuple(int(key) for key in record["keys"]),
    )


def _check(info: VerbsInfo) -> None:
    """Raise ``ValueError`` if a value is out of range."""
    if not 1 <= len(info.ports) <= MAX_DEVICES:
        raise ValueError(f"{len(info.ports)} ports; allowed are 1 to {MAX_DEVICES}")
    for peer in info.peers.values():
        if not 1 <= len(peer.qps) <= MAX_STREAMS:
            raise ValueError(f"{len(peer.qps)} queue pairs; allowed are 1 to {MAX_STREAMS}")
        if len(peer.keys) != len(info.ports):
            raise ValueError(f"{len(peer.keys)} keys for {len(info.ports)} ports")
        if any(not 0 <= n < 1 << 24 for pair in peer.qps for n in pair):
            raise ValueError("a queue pair or packet number of more than 24 bits")
