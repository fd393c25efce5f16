"""Compiled code: kernels written in Python, compiled once per machine, cached on disk.

``library(module)`` returns the code; ``builtin`` makes an entry callable from Python. The first
process that needs a library compiles it under a lock, reports this on stderr, and stores the object
code in the cache; other ranks wait for it, and every later process links it in milliseconds,
without LLVM (``object_code``). The cache key covers everything the code depends on: the text of the
kernel's package, of this one and of the modules and packages that a package lists as ``SOURCES``,
the versions of Numba, llvmlite and Python, and the processor with its features.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import platform
import sys
import threading
from pathlib import Path

from miraccl.errors import as_system_failure
from miraccl.native import cache
from miraccl.native.loader import CodeLibrary, builtin, cpu_features, entry_of

__all__ = ["CodeLibrary", "builtin", "entry_of", "library"]

PREFIX = "miraccl_"

#: Kernel sources whose compilation is noticed: what they are, and seconds on an idle core (AMD EPYC
#: 9004, 2.6 GHz).
_EXPECTED = {
    "miraccl.executor.cpu.kernels.engine": ("compiling the engine", 3.0),
    "miraccl.proxy.kernels.progress_engine": ("compiling the network engine", 1.0),
    "miraccl.fastpath.cuda.call": ("compiling the calls for GPUs", 1.0),
    "miraccl.graph.search.kernel.channel_search": ("compiling the channel search", 11.0),
}

_loaded: dict[tuple[str, tuple[str, ...] | None], CodeLibrary] = {}
_lock = threading.Lock()


def library(module: str, only: tuple[str, ...] | None = None) -> CodeLibrary:
    """Return the compiled exports of a kernel source, or only those in ``only``.

    Symbols are ``PREFIX + name``. Raises ``SystemFailure``.
    """
    with _lock:
        if (module, only) not in _loaded:
            with as_system_failure(f"the compiled code of {module} cannot be loaded"):
                _loaded[module, only] = _load(module, only)
        return _loaded[module, only]


def _load(module: str, only: tuple[str, ...] | None) -> CodeLibrary:
    label = module.rsplit(".", 1)[-1] + ("-" + "-".join(only) if only else "")
    name = f"{label}-{_cached_key(module)}.o"
    objects = _unpack(cache.read(name) or b"")
    if objects is None:
        with cache.lock(label):
            objects = _unpack(cache.read(name) or b"")
            if objects is None:
                objects = _compile(module, only)
                cache.write(name, _pack(objects))
    return CodeLibrary(objects)


def _compile(module: str, only: tuple[str, ...] | None) -> list[bytes]:
    from miraccl.native import progress
    from miraccl.native.compiler import compile_module

    if module not in _EXPECTED:
        return compile_module(module, PREFIX, only)
    with progress.show(*_EXPECTED[module]):
        return compile_module(module, PREFIX, only)


def _pack(objects: list[bytes]) -> bytes:
    head = b"".join(len(data).to_bytes(8, "little") for data in objects)
    body = b"".join(objects)
    digest = hashlib.sha256(head + body).digest()
    return digest + len(objects).to_bytes(8, "little") + head + body


def _unpack(data: bytes) -> list[bytes] | None:
    """Return the objects, None for an incomplete file."""
    if len(data) < 40 or hashlib.sha256(data[40:]).digest() != data[:32]:
        return None
    count = int.from_bytes(data[32:40], "little")
    sizes = [int.from_bytes(data[40 + 8 * i : 48 + 8 * i], "little") for i in range(count)]
    objects, at = [], 40 + 8 * count
    for size in sizes:
        objects.append(data[at : at + size])
        at += size
    return objects


def _key(module: str) -> str:
    return _key_of_package(_package_of(module))


def _package_of(module: str) -> str:
    return module.rpartition(".")[0]


def _key_of_package(package: str) -> str:
    """Return the part of the cache key that all kernel sources of a package share."""
    digest = hashlib.sha256()
    for part in (
        _version_of("numba"),
        _version_of("llvmlite"),
        sys.version,
        platform.machine(),
        _processor(),
    ):
        digest.update(part.encode() + b"\0")
    for source in _sources_of_package(package):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def _version_of(package: str) -> str:
    """Return a text that names the installed version of a package, which is not imported."""
    # ``importlib.metadata`` imports the package ``email``: 30 ms of the start of an agent.
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        with contextlib.suppress(OSError):
            return Path(spec.origin).with_name("_version.py").read_text()
    from importlib.metadata import version

    return version(package)


#: Lines of /proc/cpuinfo by which LLVM distinguishes processors: those of x86-64 and of aarch64.
_PROCESSOR_LINES = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "Features",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
)


@functools.cache
def _processor() -> str:
    """Return a text that names the processor with its features."""
    # Loading LLVM for that would take 40 ms, and memory that linking does not need.
    try:
        with open("/proc/cpuinfo") as file:  # only the first processor: others take time
            lines = file.read(8192).partition("\n\n")[0].splitlines()
    except OSError:
        return cpu_features()
    kept = [line for line in lines if line.partition(":")[0].strip() in _PROCESSOR_LINES]
    named = any(line.startswith(("flags", "Features")) for line in kept)
    return "\n".join(kept) if named else cpu_features()


def sources_of(module: str) -> list[Path]:
    """Return the files that compiled code of a kernel source depends on."""
    return _sources_of_package(_package_of(module))


def _sources_of_package(package: str) -> list[Path]:
    names = ["miraccl.native", package]
    for name in names:  # grows in the loop
        names += [
            more
            for more in getattr(importlib.import_module(name), "SOURCES", ())
            if more not in names
        ]
    return [path for name in names for path in _files_of(name)]


_cached_package_key = functools.cache(_key_of_package)


def _cached_key(module: str) -> str:
    # Reading the sources again would take longer than loading a kernel.
    return _cached_package_key(_package_of(module))


def _files_of(name: str) -> list[Path]:
    """Return the sources of a package, or the one of a module."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    return sorted(origin.parent.glob("*.py")) if spec.submodule_search_locations else [origin]
