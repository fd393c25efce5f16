"""Atomic words at addresses of this process, as fast builtins; the caller guarantees the memory.

Each function is bound at its first use, so that importing this module compiles and loads nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

from miraccl import native


@functools.cache
def bound(name: str) -> Callable[..., int]:
    """Return the builtin for an export of ``native.words``; keep it where speed matters."""
    address = native.library("miraccl.native.words").address(native.PREFIX + name)
    return cast("Callable[..., int]", native.builtin(name, address))


def load_acquire(address: int, /) -> int:
    """Load a word with acquire order."""
    return bound("load_word")(address)


def store_release(address: int, value: int, /) -> None:
    """Store a word with release order."""
    bound("store_word")(address, value)


def exchange(address: int, value: int, /) -> int:
    """Store a word and return the old value; a full fence."""
    return bound("exchange_word")(address, value)


def add(address: int, number: int, /) -> int:
    """Add to a word and return the old value."""
    return bound("add_word")(address, number)


def ring_futex(address: int, /) -> None:
    """Add one to a 32-bit word and wake all its sleepers (a futex shared between processes)."""
    bound("ring_futex")(address)


def register_membarrier() -> bool:
    """Register this process for the global expedited ``membarrier`` (Linux 4.16).

    Returns False if the kernel does not support it.
    """
    import platform

    number = {"x86_64": 324, "aarch64": 283}.get(platform.machine())
    if number is None:
        return False
    register_global_expedited = 1 << 2  # linux/membarrier.h
    return bound("system_call")(number, register_global_expedited, 0, 0) == 0
