"""Kernel source: tags and encryption of single packets by AEGIS-128X2, for tests."""

from __future__ import annotations

from typing import Any

from miraccl.proxy.kernels import aegis
from miraccl.proxy.kernels import flow_layout as fl
from miraccl.proxy.kernels.datagram_io import crypt_aegis, set_nonce


def mac(port: int, key: int, packet: int, size: int) -> int:
    """Write the MAC of a packet behind it, in parts as of iovecs."""
    context = port + fl.PORT_AEGIS
    aegis.start(context, key, set_nonce(port, packet))
    at, part = 0, 1
    while at < size:
        aegis.absorb(context, packet + at, min(part, size - at))
        at += part
        part = part * 3 + 1
    aegis.end_absorbing(context)
    aegis.finish(context, 0, packet + size)
    return 0


def aead(port: int, key: int, packet: int, size_and_decrypts: int) -> int:
    """Encrypt or decrypt a packet in place and write its tag behind it."""
    size = size_and_decrypts >> 1
    crypt_aegis(port, key, packet, size + 16, size_and_decrypts & 1 != 0, packet + size)
    return 0


EXPORTS: dict[str, Any] = {"mac": mac, "aead": aead}
