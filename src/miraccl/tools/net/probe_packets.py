"""Packets of ``miraccl net probe``: a request, and the answer that says how it arrived.

56 bytes and padding: ``magic u32, flow u16, reply padding u16, number u32, arrival interface u32,
arrival TTL u8, 3 zero bytes, received so far u32, sender's time u64, 8 zero bytes, tag 16 bytes``.
The tag is HMAC-SHA-256 over everything else, padding included: a responder answers its own pair
only, with at most as many bytes as it got.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

MAGIC = 0x4D504E31
_FORM = struct.Struct("!IHHIIB3xIQ8x")
TAG_BYTES = 16
HEADER_BYTES = _FORM.size + TAG_BYTES


@dataclass(frozen=True, kw_only=True)
class ProbePacket:
    """A probe or its answer.

    Attributes:
        flow: Number of the flow: one pair of sockets.
        number: Position in the flow, from 0.
        interface: Answer: index of the interface on which the request arrived.
        ttl: Answer: TTL with which it arrived.
        received: Answer: requests of this flow received so far.
        sent_ns: Time of the request by the clock of its sender.
        padding: Bytes behind the packet.
    """

    flow: int
    number: int
    sent_ns: int
    interface: int = 0
    ttl: int = 0
    received: int = 0
    padding: int = 0


def encode(packet: ProbePacket, key: bytes) -> bytes:
    head = _FORM.pack(
        MAGIC,
        packet.flow,
        packet.padding,
        packet.number,
        packet.interface,
        packet.ttl,
        packet.received,
        packet.sent_ns,
    )
    rest = bytes(packet.padding)
    return head + _tag(key, head + rest) + rest


def decode(data: bytes, key: bytes) -> ProbePacket | None:
    """Return the packet; None for anything that the other end of the pair did not send."""
    if len(data) < HEADER_BYTES:
        return None
    head, tag = data[: _FORM.size], data[_FORM.size : HEADER_BYTES]
    rest = data[HEADER_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, head + rest)):
        return None
    magic, flow, padding, number, interface, ttl, received, sent_ns = _FORM.unpack(head)
    if magic != MAGIC or padding != len(rest):
        return None
    return ProbePacket(
        flow=flow,
        number=number,
        sent_ns=sent_ns,
        interface=interface,
        ttl=ttl,
        received=received,
        padding=padding,
    )


def _tag(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)[:TAG_BYTES]
