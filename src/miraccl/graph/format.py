"""Human-readable sizes and times."""

from __future__ import annotations


def format_bytes(nbytes: int) -> str:
    """Format a byte count with a binary unit: ``2097152`` becomes ``2 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"


def format_time(us: float) -> str:
    """Format microseconds with a suitable unit: ``2093.4`` becomes ``2.093 ms``."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"
