"""Emulator of the kernels of ``executor.cuda`` on the CPU, all ranks in one process.

``Machine`` owns the symmetric memory of all ranks. ``Machine.launch`` compiles a kernel's source
with a C++ compiler (``machine.h`` and ``machine.cpp`` replace ``machine.cuh``) and runs one launch
on every rank. Compiled kernels are cached in the folder MIRACCL_EMULATOR_CACHE, else in one of the
test session.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.source import KernelSpec, write_source
from tests.gpu.emulator.memory import initial_memory, written_bytes

COMPILER = next((path for name in ("g++", "clang++") if (path := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(
    COMPILER is None,
    reason="kernels are emulated with a C++ compiler (g++ or clang++), and there is none",
)
HERE = Path(__file__).parent
Word = TypeVar("Word", ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64)
_GIVEN = os.environ.get("MIRACCL_EMULATOR_CACHE")  # tests have an environment without it
_folder: Path | None = None
_loaded: dict[str, Any] = {}


def folder() -> Path:
    global _folder
    if _folder is None:
        given = os.environ.get("MIRACCL_EMULATOR_CACHE") or _GIVEN
        _folder = Path(given or tempfile.mkdtemp(prefix="miraccl-emulator-"))
        _folder.mkdir(parents=True, exist_ok=True)
        if not given:
            atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


# -w: CUDA pragmas and unused functions; no _FORTIFY_SOURCE: the fibers of machine.cpp longjmp.
OPTIONS = (
    "-std=c++17",
    "-O0",  # a quarter less processor time than -O1, compilation included
    "-w",
    "-fPIC",
    "-pthread",
    "-shared",
    "-U_FORTIFY_SOURCE",
    f"-I{HERE}",
)
QUICK = ("-fno-exceptions", "-fno-asynchronous-unwind-tables")  # a quarter less to compile


def compiled(name: str, text: str, *more: str) -> Path:
    """Return the library of a C++ source; concurrent requests compile it once."""
    library = folder() / f"{name}.so"
    with contextlib.suppress(FileNotFoundError):
        os.utime(library)  # .ci/test deletes what was not used for two weeks
    if not library.exists():
        with (folder() / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                source, own = library.with_suffix(".cpp"), library.with_suffix(".new")
                source.write_text(text)
                command = [str(COMPILER), *OPTIONS, *QUICK, "-o", str(own), str(source), *more]
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=120, check=False
                )
                if done.returncode:
                    raise AssertionError(f"{name}: {done.stderr[:4000]}")
                own.rename(library)
    return library


@functools.cache
def _texts() -> dict[str, str]:
    return {name: (HERE / name).read_text() for name in ("machine.h", "machine.cpp", "launch.h")}


@functools.cache
def _toolchain() -> str:
    """Return what compiled code depends on besides its text."""
    version = subprocess.run(
        [str(COMPILER), "--version"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    return " ".join((version.stdout, *OPTIONS[:-1], *QUICK))


def _key_of(text: str) -> str:
    whole = "".join((text, *_texts().values(), _toolchain()))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def machine_library() -> Path:
    """Return the library that all kernels share."""
    return compiled(f"machine-{_key_of('')}", _texts()["machine.cpp"])


def shared(kind: type[Word], name: str) -> Word:
    """Return a variable of the shared library."""
    return kind.in_dll(ctypes.CDLL(str(machine_library())), name)


class EmulatorClock:
    """Clock of all emulated GPUs of this process."""

    def __init__(self) -> None:
        self._ahead, self._reads = (
            shared(ctypes.c_int64, "clock_offset"),
            shared(ctypes.c_uint64, "clock_reads"),
        )
        self._held = shared(ctypes.c_uint32, "clock_paused")

    def reads(self) -> int:
        """Return the number of clock reads by kernels."""
        return self._reads.value

    def jump(self, seconds: float) -> None:
        self._ahead.value += int(seconds * 1e9)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Block kernels that read the clock inside the block."""
        self._held.value = 1
        try:
            yield
        finally:
            self._held.value = 0


@contextlib.contextmanager
def weak_memory(seed: int) -> Iterator[None]:
    """Inside the block, unordered stores of emulated GPUs land late and in random order.

    ``seed``: not 0.
    """
    word = shared(ctypes.c_uint32, "weak_memory")
    word.value = seed
    try:
        yield
    finally:
        word.value = 0


def patch_kernels(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, str]) -> None:
    """Replace fragments of kernel source, which must exist, until the end of the test."""
    write = write_source

    def changed(spec: KernelSpec, arch: int, machine: str = "") -> str:
        text = write(spec, arch, machine)
        for words, instead in changes.items():
            assert words in text
            text = text.replace(words, instead) if words else text
        return text

    monkeypatch.setitem(globals(), "write_source", changed)


def compile_kernel(spec: KernelSpec) -> Any:
    """Return the function ``emulate`` of a kernel."""
    text = write_source(spec, 90, machine='#include "machine.h"\n')
    key = _key_of(text)
    if key not in _loaded:
        whole = f'{text}\n#define ENTRY {spec.entry}\n#include "launch.h"\n'
        loaded = ctypes.CDLL(str(compiled(f"{spec.name}-{key}", whole, str(machine_library()))))
        function: Any = loaded.emulate
        function.argument_bytes = loaded.argument_bytes()
        _loaded[key] = function  # which other threads may find at once
    return _loaded[key]


class EmulatedMachine:
    """``nranks`` GPUs: symmetric memory as after the start of a communicator, and host words."""

    def __init__(self, nranks: int, timeout_s: float = 20.0) -> None:
        self.nranks = nranks
        self.memory = [initial_memory() for _ in range(nranks)]
        self.host = [np.zeros(layout.HOST_BYTES // 4, np.uint32) for _ in range(nranks)]
        self.timeout_ns = int(timeout_s * 1e9)

    def comm_args(self, rank: int, order: Sequence[int] = ()) -> CommArgs:
        own = self.memory[rank].ctypes.data
        return CommArgs(
            rank=rank,
            own=own,
            inboxes=(own,) * self.nranks,
            outboxes=tuple(memory.ctypes.data for memory in self.memory),
            host=self.host[rank].ctypes.data,
            timeout_ns=self.timeout_ns,
            order=tuple(order),
        )

    def launch(
        self, spec: KernelSpec, args: Sequence[bytes | bytearray], blocks: int | Sequence[int]
    ) -> None:
        """Run one launch on every rank and wait for all. ``blocks``: of all ranks, or by rank."""
        launch(spec, args, [blocks] * self.nranks if isinstance(blocks, int) else blocks)

    def launch_in_a_row(
        self, launches: Sequence[tuple[KernelSpec, Sequence[bytes | bytearray], int]]
    ) -> None:
        """Run several launches (kernel, arguments by rank, blocks); ranks proceed independently."""
        for spec, _, _ in launches:
            compile_kernel(spec)

        def follow(rank: int) -> None:
            for spec, args, blocks in launches:
                launch(spec, [args[rank]], [blocks])

        with ThreadPoolExecutor(self.nranks) as ranks:
            list(ranks.map(follow, range(self.nranks)))

    def launches(self, rank: int) -> int:
        """Return the launch number of a rank."""
        at = layout.STATE_OFFSET + 8 * layout.STATE_LAUNCH
        return int(self.memory[rank][at : at + 8].view(np.uint64)[0])

    def errors(self) -> list[int]:
        return [int(words[layout.HOST_ERROR]) for words in self.host]

    def packets_are_cleared(self) -> bool:
        """Return True if the packet buffers of all ranks are full of ones."""
        lo, hi = layout.PACKETS_OFFSET, layout.PACKETS_OFFSET + 2 * layout.HALF_BYTES
        return all(
            bool((written_bytes(memory, lo, hi).view(np.uint64) == np.uint64(2**64 - 1)).all())
            for memory in self.memory
        )


def launch(spec: KernelSpec, args: Sequence[bytes | bytearray], blocks: Sequence[int]) -> None:
    """Run one launch on as many ranks as there are ``args``."""
    held = [_aligned(len(block)) for block in args]
    for target, block in zip(held, args, strict=True):
        target[:] = np.frombuffer(bytes(block), np.uint8)
    pointers = (ctypes.c_void_p * len(held))(*(block.ctypes.data for block in held))
    compile_kernel(spec)(pointers, (ctypes.c_uint32 * len(held))(*blocks), len(held), spec.threads)


def _aligned(nbytes: int) -> Any:
    """Return zeroed bytes aligned to 4096."""
    whole = np.zeros(nbytes + 4096, np.uint8)
    start = -whole.ctypes.data % 4096
    return whole[start : start + nbytes]
