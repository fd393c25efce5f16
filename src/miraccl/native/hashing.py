"""A hash that Python and compiled code compute alike."""

from __future__ import annotations


def mix(hashed: int, word: int) -> int:
    """Hash one more word into 31 bits. No product reaches 2^63: to compiled code that would mean that it cannot happen."""
    low = (hashed ^ word & 0x7FFFFFFF) * 0x5851F42D
    low = (low ^ low >> 32) & 0x7FFFFFFF
    high = (low ^ word >> 31 & 0x7FFFFFFF) * 0x5851F42D
    return (high ^ high >> 32) & 0x7FFFFFFF
