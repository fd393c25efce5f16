"""Choice of the pair of addresses between two ports: a pure function of both tables.

NCCL takes one index per device for all peers, so two hosts whose tables differ cannot connect
unless ``NCCL_IB_GID_INDEX`` happens to fit both. Here each pair of ports gets the best pair of
entries, and both sides compute the same one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, kw_only=True, order=True)
class PortGid:
    """Entry of a port's table as it is sent to peers.

    Attributes:
        type: ``ib``, ``roce1`` or ``roce2``.
        prefix: Bits of the network that the interface is in, 0 if unknown.
    """

    index: int
    raw: bytes
    type: str
    prefix: int = 0

    @property
    def address(self) -> Address:
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address

    @property
    def link_local(self) -> bool:
        return self.address.is_link_local


@dataclass(frozen=True, kw_only=True)
class GidWish:
    """Restrictions by settings.

    Attributes:
        index: Entry to use, -1 for any.
        version: RoCE version, 0 for any.
        family: 4 or 6, 0 for any.
        range: Network that the address must be in, "" for any.
    """

    index: int = -1
    version: int = 0
    family: int = 0
    range: str = ""

    def allows(self, gid: PortGid) -> bool:
        if self.index >= 0:
            return gid.index == self.index
        if gid.type == "ib":
            return True
        if self.version and gid.type != f"roce{self.version}":
            return False
        if self.family and gid.address.version != self.family:
            return False
        if self.range:
            return gid.address in ipaddress.ip_network(self.range, strict=False)
        return True


@dataclass(frozen=True, kw_only=True)
class GidChoice:
    """Entries of both sides and the reason, or None and the reason."""

    pair: tuple[PortGid, PortGid] | None
    reason: str


def choose_gids(
    first: Sequence[PortGid], second: Sequence[PortGid], wish: GidWish | None = None
) -> GidChoice:
    """Choose the entries with which two ports reach each other.

    The better pair has RoCE v2 (routable), the same network, a global address, IPv4, and the
    lowest indices.
    """
    wish = wish or GidWish()
    pairs = [
        (a, b)
        for a in first
        for b in second
        if wish.allows(a) and wish.allows(b) and not mismatch(a, b)
    ]
    if pairs:
        best = min(pairs, key=lambda pair: _rank(*pair))
        return GidChoice(pair=best, reason=_describe(*best))
    if not first or not second:
        return GidChoice(pair=None, reason="a port has no GID")
    for table in (first, second):
        if not any(map(wish.allows, table)):
            found = ", ".join(f"{gid.index}: {gid.type} {gid.address}" for gid in table)
            return GidChoice(pair=None, reason=f"settings exclude all GIDs of a port ({found})")
    reasons = sorted({mismatch(a, b) for a in first for b in second} - {""})
    return GidChoice(pair=None, reason="; ".join(reasons))


def mismatch(a: PortGid, b: PortGid) -> str:
    """Return why two entries cannot be connected, "" if they can."""
    if a.type != b.type:
        return f"types {a.type} and {b.type}"
    if a.type == "ib":
        return ""
    if a.address.version != b.address.version:
        return f"IPv{a.address.version} and IPv{b.address.version}"
    if a.link_local != b.link_local:
        return "a link-local and a global address"
    return ""


def _same_network(a: PortGid, b: PortGid) -> bool:
    bits = min(a.prefix, b.prefix) or (24 if a.address.version == 4 else 64)
    network = ipaddress.ip_network((a.address, bits), strict=False)
    return b.address in network


def _rank(a: PortGid, b: PortGid) -> tuple[bool, bool, bool, bool, int, int]:
    return (
        a.type == "roce1",
        not _same_network(a, b),
        a.link_local,
        a.address.version != 4,
        a.index,
        b.index,
    )


def _describe(a: PortGid, b: PortGid) -> str:
    if a.type == "ib":
        return "InfiniBand"
    where = "one network" if _same_network(a, b) else "different networks"
    return f"RoCE v{a.type[-1]}, IPv{a.address.version}, {where}"
