"""Bandwidths per channel that a search requests, highest first, in GB/s.

The source is NCCL 2.28 ``src/graph/search.cc`` speedArray*.
"""

from __future__ import annotations

from miraccl.topo.records import f32


def _floats(*values: float) -> tuple[float, ...]:
    return tuple(f32(value) for value in values)


INTRA = _floats(40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3)
INTER = _floats(48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12)
# Links of Hopper and Blackwell are so fast that one channel cannot fill them.
INTRA_HOPPER = _floats(60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3)
INTER_HOPPER = _floats(48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)
INTRA_BLACKWELL = _floats(90, 80, 70, 60, 50, 40, 30, 24, 20, 19, 18)
INTER_BLACKWELL = _floats(
    96, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12
)


def speeds_for(sm: int, inter: bool) -> tuple[float, ...]:
    """Return the list for GPUs of at least this compute capability (times ten)."""
    if sm >= 100:
        return INTER_BLACKWELL if inter else INTRA_BLACKWELL
    if sm >= 90:
        return INTER_HOPPER if inter else INTRA_HOPPER
    return INTER if inter else INTRA


def first_at_most(speeds: tuple[float, ...], limit: float) -> int:
    """Return the index of the first speed that does not exceed ``limit``, or of the last speed."""
    return next((i for i, speed in enumerate(speeds) if speed <= limit), len(speeds) - 1)
