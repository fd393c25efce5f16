"""Integer hashes and random draws, equal in Python and in compiled code.

The finaliser of MurmurHash3 (Appleby, 2011) on 32 bits: intermediate values stay below 2^63 after
masking, so wrapping int64 arithmetic and Python's integers agree.
"""

from __future__ import annotations

#: Range of ``mix`` and ``draw``; a probability p is compared as ``draw < p * DRAW_RANGE``.
DRAW_RANGE = 1 << 32


def mix(value: int) -> int:
    """Hash a non-negative integer to 32 bits."""
    x = (value ^ (value >> 32)) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def draw(seed: int, counter: int) -> int:
    """Random number ``counter`` of a seed, in 32 bits."""
    return mix(mix(seed) + counter)


def choose(salt: int, flow: int, entropy: int, count: int) -> int:
    """ECMP: member of a group of ``count`` links for a packet, by its flow and entropy."""
    return mix(mix(flow * 65536 + entropy + 1) ^ salt) % count
