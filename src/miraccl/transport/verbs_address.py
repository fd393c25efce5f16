"""Choice of the addresses between two ports of verbs devices."""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.errors import SystemFailure
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_info import PortInfo
from miraccl.wire.verbs.gids import GidWish, choose_gids


@dataclass(frozen=True, kw_only=True)
class PeerAddress:
    """Address of a peer's port as seen from one port of this host.

    Attributes:
        gid: The peer's address; b"" without one.
        gid_index: Entry of the own port's table to send from.
        reason: How it was chosen.
    """

    gid: bytes
    gid_index: int
    reason: str


def choose_address(
    rank: int, peer: int, device: VerbsDevice, port: PortInfo, wish: GidWish
) -> PeerAddress:
    """Choose the addresses of a pair of ports; both sides choose alike.

    Raises:
        SystemFailure: The tables of both ports have no addresses that fit.
    """
    own = tuple(device.gids())
    first = rank < peer  # both sides compare the tables in the same order
    lower, higher = (own, port.gids) if first else (port.gids, own)
    choice = choose_gids(lower, higher, wish)
    if choice.pair is None:
        if device.port.kind == port.kind == "ib":
            return PeerAddress(gid=b"", gid_index=0, reason="InfiniBand")
        raise SystemFailure(
            f"cannot connect {device.name} to {port.name} of rank {peer}: {choice.reason}",
            rank=rank,
            peer=peer,
            hint="MIRACCL_IB_GID_INDEX, MIRACCL_IB_ADDR_FAMILY and "
            "MIRACCL_IB_ROCE_VERSION_NUM restrict addresses",
        )
    here, there = choice.pair if first else choice.pair[::-1]
    if here.type == "ib" and here.raw[:8] == there.raw[:8]:
        # one subnet: no global route header
        return PeerAddress(gid=b"", gid_index=0, reason=choice.reason)
    return PeerAddress(gid=there.raw, gid_index=here.index, reason=choice.reason)
