"""Hash that Python and compiled code compute alike."""

from __future__ import annotations


def mix(hashed: int, word: int) -> int:
    """Return a 31-bit hash of ``hashed`` and one more word."""
    # No product reaches 2^63, which compiled code would treat as impossible.
    low = (hashed ^ word & 0x7FFFFFFF) * 0x5851F42D
    low = (low ^ low >> 32) & 0x7FFFFFFF
    high = (low ^ word >> 31 & 0x7FFFFFFF) * 0x5851F42D
    return (high ^ high >> 32) & 0x7FFFFFFF
