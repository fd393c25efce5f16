"""Packet protection: published vectors, tampering, and keys that differ by direction."""

from __future__ import annotations

import pytest

from miraccl.errors import MissingDependency
from miraccl.native.crypto import AesGcm, libcrypto
from miraccl.wire.datagram.aegis import Aegis, aes_round
from miraccl.wire.datagram.packets import Packet, Probe, encode
from miraccl.wire.datagram.seal import (
    AEGIS_128X2,
    AES_128_GCM,
    CIPHERS,
    Protection,
    common_cipher,
    derive_key,
    nonce_of,
    protect,
    unprotect,
)

try:
    libcrypto()
except MissingDependency as error:
    pytest.skip(str(error), allow_module_level=True)


def test_vectors_of_the_gcm_specification() -> None:
    """Test cases 2 and 4 of McGrew and Viega, The Galois/Counter Mode of Operation."""
    cipher = AesGcm(bytes(16))
    sealed = cipher.seal(bytes(12), b"", bytes(16))
    assert sealed.hex() == "0388dace60b6a392f328c2b971b2fe78ab6e47d42cec13bdf53a67b21257bddf"
    cipher = AesGcm(bytes.fromhex("feffe9928665731c6d6a8f9467308308"))
    plain = bytes.fromhex(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39"
    )
    aad = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    sealed = cipher.seal(bytes.fromhex("cafebabefacedbaddecaf888"), aad, plain)
    assert sealed[-16:].hex() == "5bc94fbc3221a5db94fae95ae7121a47"
    assert cipher.open(bytes.fromhex("cafebabefacedbaddecaf888"), aad, sealed) == plain


def test_vectors_of_the_aegis_specification() -> None:
    """Vectors of draft-irtf-cfrg-aegis-aead: AESRound, AEGIS-128X2 numbers 1 and 2."""
    block, key = (bytes(range(first, first + 16)) for first in (0, 16))
    mixed = aes_round(int.from_bytes(block, "little"), int.from_bytes(key, "little"))
    assert mixed.to_bytes(16, "little").hex() == "7a7b4e5638782546a8c0477a3b813f43"
    cipher, nonce = Aegis(bytes(range(16))), bytes(range(16, 32))
    assert cipher.seal(nonce, b"", b"").hex() == "63117dc57756e402819a82e13eca8379"
    aad, plain = bytes.fromhex("0102030401020304"), bytes.fromhex("04050607" * 30)
    sealed = cipher.seal(nonce, aad, plain)
    assert sealed[:32].hex() == "5795544301997f93621b278809d6331b3bfa6f18e90db12c4aa35965b5e98c5f"
    assert sealed[-16:].hex() == "1aebc200804f405cab637f2adebb6d77"
    assert cipher.open(nonce, aad, sealed) == plain
    assert cipher.open(nonce, aad + b"\0", sealed) is None


def test_the_cipher_is_the_best_one_of_both_sides() -> None:
    assert common_cipher(CIPHERS, CIPHERS[::-1]) == AEGIS_128X2
    assert common_cipher(CIPHERS, [AES_128_GCM]) == AES_128_GCM
    assert common_cipher([], CIPHERS) == AES_128_GCM


@pytest.mark.parametrize("kind", [AesGcm, Aegis])
@pytest.mark.parametrize("mode", [Protection.MAC, Protection.AEAD])
def test_a_changed_packet_is_not_authentic(mode: Protection, kind: type[AesGcm | Aegis]) -> None:
    cipher = kind(bytes(range(16)))
    packet = encode(Packet(3, 7, 1 << 40, (Probe(5),)))
    sent = protect(mode, cipher, packet)
    assert len(sent) == len(packet) + 16
    assert unprotect(mode, cipher, sent) == packet
    for i in range(len(sent)):
        changed = bytearray(sent)
        changed[i] ^= 1
        assert unprotect(mode, cipher, bytes(changed)) is None
    assert unprotect(mode, cipher, sent[:31]) is None


def test_nonces_and_keys_do_not_repeat() -> None:
    packets = [encode(Packet(path, 1, n, (Probe(),))) for path in (0, 1) for n in (0, 1, 256)]
    assert len({nonce_of(p) for p in packets}) == 6
    nonces = bytes(32), bytes(range(32))
    keys = {
        derive_key(b"s", b"c", 0, 1, nonces),
        derive_key(b"s", b"c", 1, 0, nonces),
        derive_key(b"s", b"d", 0, 1, nonces),
        derive_key(b"t", b"c", 0, 1, nonces),
        derive_key(b"s", b"c", 0, 1, nonces[::-1]),
    }
    assert len(keys) == 5
