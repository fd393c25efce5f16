"""Keys, nonces and modes of packet protection.

Each direction of each pair of ranks has its own key, derived from the job's secret and fresh nonces
of both sides, so a key is never used twice; within a key the nonce (path, packet number) never
repeats.

A receiver checks, in this order: length, connection number, tag, replay window, meaning.  A packet
without a valid tag is dropped without an answer.
"""

from __future__ import annotations

import enum
import hmac
from collections.abc import Iterable
from typing import Protocol

from miraccl.wire.datagram.packets import HEADER_BYTES, TAG_BYTES

KEY_BYTES = 16
NONCE_BYTES = 12
SETUP_NONCE_BYTES = 32
AES_128_GCM, AEGIS_128X2 = "aes-128-gcm", "aegis-128x2"
#: Ciphers, best first.
CIPHERS = (AEGIS_128X2, AES_128_GCM)
_NUMBER_AT = 8


class Protection(enum.Enum):
    """Protection of packets: a tag over all bytes, encryption as well, or none (by name only)."""

    MAC = "mac"
    AEAD = "aead"
    NONE = "none"


class Cipher(Protocol):
    """AES-128-GCM (NIST SP 800-38D) or AEGIS-128X2 with one key.

    Without plaintext, the tag is a MAC of the associated data.
    """

    def seal(self, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return the ciphertext followed by the tag of 16 bytes."""
        ...

    def open(self, nonce: bytes, aad: bytes, sealed: bytes) -> bytes | None:
        """Return the plaintext, or None if the tag does not match."""
        ...


def common_cipher(own: Iterable[str], peer: Iterable[str]) -> str:
    """Return the best cipher that both sides compute; both compute AES-128-GCM."""
    both = set(own) & set(peer)
    return next((name for name in CIPHERS if name in both), AES_128_GCM)


def derive_key(
    secret: bytes, communicator: bytes, sender: int, receiver: int, nonces: tuple[bytes, bytes]
) -> bytes:
    """Derive the key of one direction by HKDF-SHA-256 (RFC 5869).

    Args:
        secret: The job's secret.
        communicator: Name of the communicator.
        sender: Rank that seals with the key.
        receiver: Rank that opens with it.
        nonces: Random values of the sender and the receiver, exchanged over the control plane.
    """
    extracted = hmac.digest(nonces[0] + nonces[1], secret, "sha256")
    info = b"miraccl datagram 1\0" + communicator + b"\0"
    info += sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
    return hmac.digest(extracted, info + b"\x01", "sha256")[:KEY_BYTES]


def nonce_of(packet: bytes) -> bytes:
    """Return the nonce of an encoded packet: its path, three zero bytes, its number."""
    return packet[1:2] + bytes(3) + packet[_NUMBER_AT:HEADER_BYTES]


def protect(mode: Protection, cipher: Cipher, packet: bytes) -> bytes:
    """Return the bytes to send for an encoded packet; always ``TAG_BYTES`` longer."""
    if mode is Protection.NONE:
        return packet + bytes(TAG_BYTES)
    if mode is Protection.MAC:
        return packet + cipher.seal(nonce_of(packet), packet, b"")
    header, body = packet[:HEADER_BYTES], packet[HEADER_BYTES:]
    return header + cipher.seal(nonce_of(packet), header, body)


def unprotect(mode: Protection, cipher: Cipher, data: bytes) -> bytes | None:
    """Return the encoded packet of received bytes, or None if it is not authentic."""
    if len(data) < HEADER_BYTES + TAG_BYTES:
        return None
    if mode is Protection.NONE:
        return data[:-TAG_BYTES]
    if mode is Protection.MAC:
        packet = data[:-TAG_BYTES]
        return None if cipher.open(nonce_of(data), packet, data[-TAG_BYTES:]) is None else packet
    header = data[:HEADER_BYTES]
    body = cipher.open(nonce_of(data), header, data[HEADER_BYTES:])
    return None if body is None else header + body
