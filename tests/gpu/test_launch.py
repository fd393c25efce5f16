"""Launches without cuda.bindings: the C function gets what it should, and the pointers and the stream of each call."""

from __future__ import annotations

import ctypes

from miraccl import native
from miraccl.executor.cuda import call

_KINDS = [ctypes.c_void_p] + [ctypes.c_uint32] * 7 + [ctypes.c_void_p] * 3


def test_a_launch_passes_its_words() -> None:
    seen: list[tuple[int | None, ...]] = []

    def record(*arguments: int) -> int:
        seen.append((*arguments, argument[0], argument[1]))
        return -3 if len(seen) == 2 else 700

    pretended = ctypes.CFUNCTYPE(ctypes.c_int, *_KINDS)(record)
    argument = (ctypes.c_uint64 * 3)(1, 2, 3)
    address = ctypes.cast(pretended, ctypes.c_void_p).value or 0
    words = (address, ctypes.addressof(argument), 1 << 46, 528, 1, 2, 256, 3, 4, 48, 0, 1 << 45, 0)
    assert len(words) == call.BLOCK_WORDS
    block = (ctypes.c_uint64 * len(words))(*words)
    launch = native.builtin("launch", native.library("miraccl.executor.cuda.call").address(native.PREFIX + "launch"))
    assert launch(ctypes.addressof(block), 1 << 44, (1 << 44) + 8, 77) == 700
    assert launch(ctypes.addressof(block), 5, 6, 0) == -3
    assert seen[0] == (1 << 46, 528, 1, 2, 256, 3, 4, 48, 77, 1 << 45, None, 1 << 44, (1 << 44) + 8)
    assert seen[1][8:] == (None, 1 << 45, None, 5, 6)
    assert argument[2] == 3
