"""The linker of compiled kernels: what it links is what LLVM links, and what it leaves to LLVM."""

from __future__ import annotations

import ctypes
import platform
import struct
import subprocess
import sys

import pytest

from miraccl import native
from miraccl.executor.cpu import context
from miraccl.native import cache, loader
from miraccl.native.object_code import link
from miraccl.types import DType, RedOp

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other machines link by LLVM alone"
)
WORDS = "miraccl.native.words"
_RELA, _R_X86_64_64, _R_X86_64_PC32 = 4, 1, 2


def objects_of(module: str) -> list[bytes]:
    native.library(module)
    found = native._unpack(cache.read(f"words-{native._cached_key(module)}.o") or b"")
    assert found
    return found


def relocations(data: bytes) -> list[int]:
    """Return the positions of the kinds of all relocations."""
    start = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    found = []
    for number in range(count):
        section = struct.unpack_from("<IIQQQQIIQQ", data, start + number * size)
        if section[1] == _RELA:
            found += [at + 8 for at in range(section[4], section[4] + section[5], 24)]
    return found


def test_links_what_llvm_links(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = objects_of(WORDS)
    made = loader.CodeLibrary(objects)
    assert made._engine is None
    monkeypatch.setattr(loader, "link", lambda objects, resolve: None)
    by_llvm = loader.CodeLibrary(objects)
    assert by_llvm._engine is not None
    value = ctypes.c_int64(-7)
    for library in (made, by_llvm):
        read = native.builtin("load_word", library.address("miraccl_load_word"))
        assert read(ctypes.addressof(value)) == -7


def test_other_relocations_are_left_to_llvm() -> None:
    data = objects_of(WORDS)[0]
    positions = relocations(data)
    assert positions
    for at in positions:
        assert struct.unpack_from("<I", data, at)[0] == _R_X86_64_64
        changed = bytearray(data)
        struct.pack_into("<I", changed, at, _R_X86_64_PC32)
        assert link([bytes(changed)], lambda name: 1) is None


def test_other_objects_are_left_to_llvm() -> None:
    data = objects_of(WORDS)[0]
    other_machine = bytearray(data)
    struct.pack_into("<H", other_machine, 18, 183)  # EM_AARCH64
    for wrong in (b"", data[:60], b"\x7fELF" + bytes(60), bytes(other_machine)):
        assert link([wrong], lambda name: 1) is None
    assert link([data, data], lambda name: 1) is None  # a symbol that is defined twice


@pytest.mark.parametrize("module", [WORDS, "a reduction"])
def test_the_linker_of_llvm_is_not_started(module: str) -> None:
    """No compiled code of a process needs MCJIT, which takes 10 MiB, or LLVM at all."""
    load = f"library({WORDS!r}).address('miraccl_load_word')"
    objects_of(WORDS)  # in the cache
    if module != WORDS:
        load = "context.fold_kernel(DType.FLOAT32, RedOp.SUM)"
        context.fold_kernel(DType.FLOAT32, RedOp.SUM)
    code = (
        "from miraccl.executor.cpu import context\n"
        "from miraccl.native import loader, library\n"
        "from miraccl.types import DType, RedOp\n"
        f"{load}\n"
        "import sys; print(loader.target_machine.cache_info().currsize, 'llvmlite' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0 False"
