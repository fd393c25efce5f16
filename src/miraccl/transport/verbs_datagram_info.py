"""Description of unreliable queue pairs as bytes, for the peers' ``connect``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from miraccl.errors import ProtocolError
from miraccl.transport.fifo import check_slot_bytes
from miraccl.transport.verbs_info import PortInfo, read_port, write_port
from miraccl.transport.verbs_packets import PairKind
from miraccl.wire.datagram.packets import MAX_PATHS
from miraccl.wire.datagram.seal import CIPHERS, SETUP_NONCE_BYTES, Protection
from miraccl.wire.verbs.rows import MAX_DEVICES

VERSION = 1
_NUMBERS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class VerbsDatagramInfo:
    """Description of a rank's unreliable queue pairs for its peers.

    Attributes:
        ports: Ports of the rank.
        pairs: (queue pair number, first packet number) of each path, by peer; with UD the same
            for all, under the key -1.
        qkey: Q_Key that UD packets to this rank must carry.
        share_bytes: Bytes that each peer may have on their way on a path.
        ciphers: Names of the ciphers that this rank computes.
    """

    kind: str
    ports: tuple[PortInfo, ...]
    pairs: Mapping[int, tuple[tuple[int, int], ...]]
    qkey: int
    share_bytes: int
    nonce: bytes
    connection: int
    protection: str
    ciphers: tuple[str, ...]
    slot_bytes: int

    def encode(self) -> bytes:
        record = {k: v for k, v in asdict(self).items() if k not in ("ports", "nonce", "pairs")}
        record["version"], record["nonce"] = VERSION, self.nonce.hex()
        record["ports"] = [write_port(port) for port in self.ports]
        record["pairs"] = {str(rank): rows for rank, rows in self.pairs.items()}
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> VerbsDatagramInfo:
        """Parse the result of ``encode``. Raises ``ProtocolError`` for anything else."""
        try:
            record = json.loads(data)
            if record["version"] != VERSION:
                raise ValueError(f"version {record['version']} instead of {VERSION}")
            info = cls(
                kind=PairKind(record["kind"]).value,
                ports=tuple(read_port(each) for each in record["ports"]),
                pairs={
                    int(rank): tuple((int(number), int(psn)) for number, psn in rows)
                    for rank, rows in record["pairs"].items()
                },
                qkey=int(record["qkey"]),
                share_bytes=int(record["share_bytes"]),
                nonce=bytes.fromhex(record["nonce"]),
                connection=int(record["connection"]),
                protection=Protection(record["protection"]).value,
                ciphers=tuple(name for name in CIPHERS if name in record["ciphers"]),
                slot_bytes=check_slot_bytes(int(record["slot_bytes"])),
            )
            info._check()
        except (ValueError, TypeError, LookupError, AttributeError) as problem:
            raise ProtocolError(
                f"cannot read the connect info of unreliable queue pairs: {problem}"
            ) from None
        return info

    def _check(self) -> None:
        """Raise ``ValueError`` if a value is out of range."""
        if not 1 <= len(self.ports) <= MAX_DEVICES or len(self.nonce) != SETUP_NONCE_BYTES:
            raise ValueError("a value is out of range")
        if not 0 <= self.qkey < 1 << 31 or self.share_bytes < 1:
            raise ValueError("a Q_Key or share is out of range")
        for rows in self.pairs.values():
            if not 1 <= len(rows) <= MAX_PATHS:
                raise ValueError(f"{len(rows)} queue pairs; allowed are 1 to {MAX_PATHS}")
            if any(not 0 <= n < _NUMBERS for row in rows for n in row):
                raise ValueError("a queue pair or packet number of more than 24 bits")
