"""Launches without cuda.bindings: the C function gets what it should, and the pointers and the stream of each call."""

from __future__ import annotations

import ctypes

from miraccl import native
from miraccl.executor.cuda import call, launch


def test_a_launch_passes_its_words() -> None:
    seen: list[tuple[int, ...]] = []

    def record(config: int, function: int, parameters: int, extra: int | None) -> int:
        said = launch._Config.from_address(config)
        shape = (*said.grid, *said.block, said.shared_bytes, said.stream or 0)
        seen.append((function, parameters, extra or 0, *shape, argument[0], argument[1]))
        attribute = said.attributes[0]
        assert (said.nattributes, attribute.id, attribute.value[0], ctypes.sizeof(attribute)) == (1, 6, 1, 72)
        return -3 if len(seen) == 2 else 700

    pretended = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(record)
    argument = (ctypes.c_uint64 * 3)(1, 2, 3)
    address = ctypes.cast(pretended, ctypes.c_void_p).value or 0
    config = launch._Config((528, 1, 2), (256, 3, 4), 48, None, ctypes.pointer(launch._Attribute(6, (1,))), 1)
    assert (ctypes.sizeof(config), launch._Config.stream.offset) == (56, call.CONFIG_STREAM)
    words = (address, ctypes.addressof(argument), ctypes.addressof(config), 1 << 46, 1 << 45, 0)
    assert len(words) == call.BLOCK_WORDS
    block = (ctypes.c_uint64 * len(words))(*words)
    run = native.builtin("launch", native.library("miraccl.executor.cuda.call").address(native.PREFIX + "launch"))
    assert run(ctypes.addressof(block), 1 << 44, (1 << 44) + 8, 77) == 700
    assert run(ctypes.addressof(block), 5, 6, 0) == -3
    assert seen[0] == (1 << 46, 1 << 45, 0, 528, 1, 2, 256, 3, 4, 48, 77, 1 << 44, (1 << 44) + 8)
    assert seen[1][-3:] == (0, 5, 6)
    assert argument[2] == 3
