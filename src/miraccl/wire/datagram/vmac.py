"""VMAC with 128-bit tags: the authentication of packets that are not encrypted.

Krovetz and Dai, "VHASH security" (eprint 2007/338) and draft-krovetz-vmac-01: a universal hash of
64-bit multiplications, encrypted with AES of the nonce. A nonce must not repeat. Compiled
(``proxy.kernels.vmac``) it costs less than AES-GMAC through libcrypto, which takes five calls per
packet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from operator import mul

BLOCK_BYTES = 128
TAGS = 2
MASK = (1 << 64) - 1
#: Primes of the polynomial and of the last multiplication, and the masks of their parts.
PRIME, LAST_PRIME = (1 << 127) - 1, (1 << 64) - 257
POLY_MASK, NH_MASK = 0x1FFFFFFF1FFFFFFF, (1 << 126) - 1
LAST_DIVISOR = (1 << 64) - (1 << 32)
NH_WORDS = BLOCK_BYTES // 8 + 2 * (TAGS - 1)


class Vmac:
    """VMAC-128 with one key.

    Args:
        encrypt_block: AES-128 of one block of 16 bytes.

    Attributes:
        nh, poly, last: Derived keys in words: of the inner hash, and (high, low) or a pair of each
            tag half for the polynomial and the last multiplication.
    """

    def __init__(self, encrypt_block: Callable[[bytes], bytes]) -> None:
        self._encrypt = encrypt_block
        self.nh = self._derive(0x80, NH_WORDS)
        self.poly = [word & POLY_MASK for word in self._derive(0xC0, 2 * TAGS)]
        self.last = self._derive(0xE0, 2 * TAGS, below=LAST_PRIME)

    def _derive(self, domain: int, count: int, below: int = 1 << 64) -> list[int]:
        words: list[int] = []
        number = 0
        while len(words) < count:
            block = self._encrypt(bytes([domain, *bytes(14), number]))
            pair = [int.from_bytes(block[i : i + 8], "big") for i in (0, 8)]
            number += 1
            if max(pair) < below:
                words += pair
        return words

    def tag(self, nonce: bytes, data: bytes) -> bytes:
        """Return the tag of 16 bytes of ``data`` for a nonce of at most 15 bytes."""
        pad = self._encrypt(nonce.rjust(16, b"\0"))
        return b"".join(
            ((self._hash(data, half) + int.from_bytes(pad[8 * half :][:8], "big")) & MASK).to_bytes(
                8, "big"
            )
            for half in range(TAGS)
        )

    def _hash(self, data: bytes, half: int) -> int:
        key = self.poly[2 * half] << 64 | self.poly[2 * half + 1]
        total = 1 if data else key
        for at in range(0, len(data), BLOCK_BYTES):
            total = (total * key + self._inner(data[at : at + BLOCK_BYTES], half)) % PRIME
        total = (total + (len(data) % BLOCK_BYTES * 8 << 64)) % PRIME
        high, low = divmod(total, LAST_DIVISOR)
        return (high + self.last[2 * half]) * (low + self.last[2 * half + 1]) % LAST_PRIME

    def _inner(self, block: bytes, half: int) -> int:
        """Sum the products of pairs of words, each plus a word of the key."""
        block += bytes(-len(block) % 16)
        words = struct.unpack(f"<{len(block) // 8}Q", block)
        added = [(w + k) & MASK for w, k in zip(words, self.nh[2 * half :], strict=False)]
        total: int = sum(map(mul, added[::2], added[1::2]))
        return total & NH_MASK
