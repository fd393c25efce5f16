"""NVRTC: compiles CUDA source to machine code, cached on disk.

The compiler comes from ``cuda.bindings`` and is imported when the first kernel is needed. The cache
key covers the source with its macros, the architecture, the options and the NVRTC version. Neither
a GPU nor a driver is needed here.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from miraccl.errors import MiracclError, MissingDependency
from miraccl.native import cache

INSTALL = "pip install 'miraccl[cuda]'"
#: NVRTC 12.9 is the last for GPUs before sm_75, and drivers of CUDA 12 load its code. It must
#: replace NVRTC 13, which cuda.bindings would prefer.
INSTALL_12 = "pip uninstall nvidia-cuda-nvrtc; pip install 'miraccl[cuda12]'"
INSTALL_NEWER = "pip install --upgrade 'cuda-bindings>=13' nvidia-cuda-nvrtc"
MIN_ARCH = 70  # __grid_constant__, and independent progress of a warp's threads
OPTIONS = ("--std=c++17", "-lineinfo")


class CompileError(MiracclError):
    """NVRTC rejected a kernel, which is a bug of this package; the message is NVRTC's log."""


@functools.cache
def bindings(name: str) -> Any:
    """Return ``cuda.bindings.<name>`` ("nvrtc" or "driver").

    Raises:
        MissingDependency: It is not installed or finds no library; the hint says what to install.
    """
    import importlib

    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except Exception as error:  # the package or its library is missing
        raise MissingDependency(
            f"cannot use GPU memory without cuda.bindings.{name}: {error}", hint=INSTALL
        ) from error


def _checked(result: tuple[Any, ...], what: str) -> Any:
    code, *rest = result
    if int(code) != 0:
        raise CompileError(f"{what}: {code.name}")
    return rest[0] if len(rest) == 1 else tuple(rest)


@functools.cache
def version() -> tuple[int, int]:
    """Return the version of NVRTC; raise ``MissingDependency`` if its library cannot be loaded."""
    nvrtc = bindings("nvrtc")
    try:
        major, minor = _checked(nvrtc.nvrtcVersion(), "nvrtcVersion")
    except CompileError:
        raise
    except Exception as error:
        raise MissingDependency(f"cannot load the NVRTC library: {error}", hint=INSTALL) from error
    return int(major), int(minor)


@functools.cache
def supported_archs() -> tuple[int, ...]:
    """Return the architectures that this NVRTC compiles for; 90 is sm_90."""
    version()
    nvrtc = bindings("nvrtc")
    count = _checked(nvrtc.nvrtcGetNumSupportedArchs(), "nvrtcGetNumSupportedArchs")
    listed = _checked(nvrtc.nvrtcGetSupportedArchs(), "nvrtcGetSupportedArchs")
    return tuple(int(arch) for arch in listed)[: int(count)]


def incompatibility(arch: int) -> tuple[str, str]:
    """Return (reason, hint) if this NVRTC cannot compile for sm_``arch``, else empty strings."""
    archs = supported_archs()
    if arch < MIN_ARCH:
        return (
            f"cannot run kernels on sm_{arch}: they need sm_{MIN_ARCH} or newer",
            "copy the data to arrays in CPU memory",
        )
    if arch in archs:
        return "", ""
    text = (
        f"cannot compile for sm_{arch}: NVRTC {'.'.join(map(str, version()))} supports "
        f"sm_{archs[0]} to sm_{archs[-1]}"
    )
    return text, INSTALL_12 if arch < archs[0] else INSTALL_NEWER


def compile_cubin(source: str, arch: int, name: str) -> bytes:
    """Return machine code of ``source`` for sm_``arch``, from the cache if possible.

    ``name`` is used in messages and file names.

    Raises:
        MissingDependency: This NVRTC does not know the architecture.
        CompileError: The source does not compile.
    """
    content = "\0".join((source, str(arch), *OPTIONS, ".".join(map(str, version()))))
    key = f"cuda-{name}-sm{arch}-{hashlib.sha256(content.encode()).hexdigest()[:20]}.cubin"
    found = cache.read(key)
    if found is not None and len(found) > 32 and hashlib.sha256(found[32:]).digest() == found[:32]:
        return found[32:]
    reason, hint = incompatibility(arch)
    if reason:
        raise MissingDependency(reason, hint=hint)
    code = _compile(source, arch, name)
    cache.write(key, hashlib.sha256(code).digest() + code)
    return code


def _compile(source: str, arch: int, name: str) -> bytes:
    nvrtc = bindings("nvrtc")
    program = _checked(
        nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []),
        "nvrtcCreateProgram",
    )
    try:
        options = [option.encode() for option in (f"--gpu-architecture=sm_{arch}", *OPTIONS)]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code) != 0:
            log = b" " * int(
                _checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
            )
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(
                f"{name} for sm_{arch}: {code.name}\n{log.decode(errors='replace').strip()}"
            )
        cubin = b" " * int(_checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize"))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin), "nvrtcGetCUBIN")
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)
