"""Words with which a rank sleeps on its control page, and the wake-up of another thread.

A sleeper sets ``SLEEP``, checks its condition once more and waits on the futex ``DOORBELL``. Who
makes the condition true fences, reads ``SLEEP`` and rings. Executor and proxy both ring.
"""

from __future__ import annotations

from miraccl.native.intrinsics import FUTEX_WAKE, SYS_FUTEX, add32, inline, syscall
from miraccl.native.sleep_words import DOORBELL, SLEEP

__all__ = ["ALL_SLEEPERS", "DOORBELL", "SLEEP", "ring_doorbell"]

ALL_SLEEPERS = 1 << 30


@inline
def ring_doorbell(page: int) -> None:
    """Wake all sleepers on the doorbell of a control page."""
    add32(page + DOORBELL, 1)
    syscall(SYS_FUTEX, page + DOORBELL, FUTEX_WAKE, ALL_SLEEPERS, 0, 0, 0)
