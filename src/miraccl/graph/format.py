"""Sizes and times as people read them."""

from __future__ import annotations


def format_bytes(nbytes: int) -> str:
    """``2097152`` as ``2 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def format_time(us: float) -> str:
    """``2093.4`` us as ``2.093 ms``."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"
