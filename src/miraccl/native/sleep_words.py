"""Offsets of the words with which a rank sleeps on its control page; see ``native.sleeper``."""

from __future__ import annotations

SLEEP, DOORBELL = 0, 8  # bytes; DOORBELL is a futex word of 32 bits
