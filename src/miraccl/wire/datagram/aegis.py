"""AEGIS-128X2: authenticated encryption by rounds of AES (draft-irtf-cfrg-aegis-aead, section 4).

The specification of the compiled cipher (``proxy.kernels.aegis``), which takes a fifth of the time
of AES-128-GCM where the processor has instructions for AES.  Two states of AEGIS-128L, numbered 0
and 1, are updated by one instruction.
"""

from __future__ import annotations

from collections.abc import Iterator

TAG_BYTES = 16
NONCE_BYTES = 16
#: A block of AES; what one update of both states absorbs.
AES_BLOCK_BYTES, RATE_BYTES = 16, 64
FIRST_UPDATES, FINAL_UPDATES = 10, 7
#: Fibonacci numbers modulo 256.
C0 = bytes.fromhex("000101020305080d1522375990e97962")
C1 = bytes.fromhex("db3d18556dc22ff12011314273b528dd")


def _make_table() -> list[int]:
    """Return columns of SubBytes and MixColumns for a byte of the first row (FIPS 197)."""

    def double(x: int) -> int:
        return x << 1 ^ (0x11B if x & 0x80 else 0)

    powers = [1]
    for _ in range(254):
        powers.append(powers[-1] ^ double(powers[-1]))  # times 3
    logarithms = {value: i for i, value in enumerate(powers)}
    columns = []
    for x in range(256):
        inverse = powers[-logarithms[x] % 255] if x else 0
        s = 0x63
        for shift in range(5):
            s ^= (inverse << shift | inverse >> 8 - shift) & 0xFF
        columns.append(double(s) | s << 8 | s << 16 | (double(s) ^ s) << 24)
    return columns


_TABLE = _make_table()


def aes_round(block: int, key: int) -> int:
    """Return one round of AES; blocks are little-endian integers."""
    state, mixed = block.to_bytes(AES_BLOCK_BYTES, "little"), 0
    for column in range(4):
        word = 0
        for row in range(4):
            found = _TABLE[state[(4 * column + 5 * row) % 16]]
            word ^= (found << 8 * row | found >> 32 - 8 * row) & 0xFFFFFFFF
        mixed |= word << 32 * column
    return mixed ^ key


class Aegis:
    """AEGIS-128X2 with one key and tags of 16 bytes.

    Args:
        key: 16 bytes.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 16:
            raise ValueError(f"a key of {len(key)} bytes; AEGIS-128X2 takes 16")
        self._key = int.from_bytes(key, "little")

    def seal(self, nonce: bytes, aad: bytes, plain: bytes) -> bytes:
        """Return the ciphertext followed by the tag; short nonces end with zeros."""
        states = self._start(nonce, aad)
        made = b"".join(self._crypt(states, plain, decrypts=False))[: len(plain)]
        return made + self._tag(states, len(aad), len(plain))

    def open(self, nonce: bytes, aad: bytes, sealed: bytes) -> bytes | None:
        """Return the plaintext, or None if the tag does not match."""
        body, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        states = self._start(nonce, aad)
        made = b"".join(self._crypt(states, body, decrypts=True))[: len(body)]
        return made if self._tag(states, len(aad), len(body)) == tag else None

    def _start(self, nonce: bytes, aad: bytes) -> list[list[int]]:
        """Return both states after the associated data."""
        key, start = self._key, int.from_bytes(nonce, "little")
        c0, c1 = (int.from_bytes(c, "little") for c in (C0, C1))
        states = []
        for number in (0, 1):
            v = [key ^ start, c1, c0, c1, key ^ start, key ^ c0, key ^ c1, key ^ c0]
            for _ in range(FIRST_UPDATES):
                v[3] ^= number | 1 << 8
                v[7] ^= number | 1 << 8
                _update(v, start, key)
            states.append(v)
        for parts in _split(aad):
            for v, first, second in zip(states, parts[:2], parts[2:], strict=True):
                _update(v, first, second)
        return states

    @staticmethod
    def _crypt(states: list[list[int]], data: bytes, *, decrypts: bool) -> Iterator[bytes]:
        for at, parts in zip(range(0, len(data), RATE_BYTES), _split(data), strict=True):
            stream = [v[6] ^ v[1] ^ (v[2] & v[3]) for v in states]
            stream += [v[2] ^ v[5] ^ (v[6] & v[7]) for v in states]
            made = b"".join(
                (p ^ s).to_bytes(AES_BLOCK_BYTES, "little")
                for p, s in zip(parts, stream, strict=True)
            )[: len(data) - at]
            plain = next(_split(made)) if decrypts else parts
            for v, first, second in zip(states, plain[:2], plain[2:], strict=True):
                _update(v, first, second)
            yield made

    @staticmethod
    def _tag(states: list[list[int]], aad: int, text: int) -> bytes:
        tag = 0
        for v in states:
            mixed = v[2] ^ (8 * aad | 8 * text << 64)
            for _ in range(FINAL_UPDATES):
                _update(v, mixed, mixed)
            for block in v[:7]:
                tag ^= block
        return tag.to_bytes(TAG_BYTES, "little")


def _update(v: list[int], first: int, second: int) -> None:
    """Update one state with two blocks."""
    keys = [v[0] ^ first, *v[1:4], v[4] ^ second, *v[5:]]
    v[:] = [aes_round(v[j - 1], keys[j]) for j in range(8)]


def _split(data: bytes) -> Iterator[list[int]]:
    """Yield four blocks at a time, padded with zeros: two for each state."""
    for at in range(0, len(data), RATE_BYTES):
        part = data[at : at + RATE_BYTES].ljust(RATE_BYTES, b"\0")
        yield [
            int.from_bytes(part[i : i + AES_BLOCK_BYTES], "little")
            for i in range(0, RATE_BYTES, AES_BLOCK_BYTES)
        ]
