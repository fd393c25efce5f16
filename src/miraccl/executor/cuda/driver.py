"""CUDA driver library: function lookup, error checks and pointer attributes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from miraccl.errors import MissingDependency, SystemFailure
from miraccl.executor.cuda.fast_call_layout import POINTER_DEVICE_ORDINAL
from miraccl.executor.cuda.toolkit import bindings

DOCTOR = "run `miraccl doctor`, which lists what is missing"
MEMORYTYPE_DEVICE = 2  # cuda.h CU_MEMORYTYPE_DEVICE
POINTER_MEMORY_TYPE, POINTER_IS_MANAGED = 2, 8  # cuda.h CU_POINTER_ATTRIBUTE_*


def check(result: tuple[Any, ...], what: str) -> Any:
    """Return the values of a driver call; raise ``SystemFailure`` if it failed."""
    code = result[0]
    if int(code) != 0:
        raise SystemFailure(f"{what}: {getattr(code, 'name', code)}")
    rest = result[1:]
    return rest[0] if len(rest) == 1 else tuple(rest)


def driver() -> Any:
    """Return the driver's functions, initialised.

    Raises:
        MissingDependency: There is no driver, or its Python package is not installed.
    """
    cuda = bindings("driver")
    try:
        code = cuda.cuInit(0)
    except (OSError, RuntimeError) as error:  # cuda.pathfinder does not find the library
        raise MissingDependency(
            f"cannot use GPU memory: there is no NVIDIA driver ({error})", hint=DOCTOR
        ) from error
    try:
        check(code, "cuInit")
    except SystemFailure as error:
        error.hint = DOCTOR
        raise
    return cuda


def ordinal_at(address: int) -> int | None:
    """Return the ordinal of the GPU whose memory is at ``address``.

    None for managed and other memory, and if the driver does not know.
    """
    if pointer_attribute(POINTER_MEMORY_TYPE, address) != MEMORYTYPE_DEVICE or pointer_attribute(
        POINTER_IS_MANAGED, address
    ):
        return None
    return pointer_attribute(POINTER_DEVICE_ORDINAL, address)


def pointer_attribute(kind: int, address: int) -> int | None:
    """Return an integer attribute of a pointer; None if the driver has none."""
    # Not through cuda.bindings: version 13.3.1 reports all memory as GPU 0's.
    get_attribute = _pointer_function()
    value = ctypes.c_uint64(0)  # attributes have up to 8 bytes
    if (
        get_attribute is None
        or get_attribute(ctypes.byref(value), kind, ctypes.c_uint64(address)) != 0
    ):
        return None
    return value.value


@functools.cache
def _pointer_function() -> Any:
    return _function(
        "cuPointerGetAttribute"
    )  # None without a driver: the library that made the array needs none


def _function(name: str) -> Any:
    """Return a function of the driver's library; None if it does not exist."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


@functools.cache
def function_address(name: str) -> int:
    """Return the address of a function of the driver's library; 0 if it does not exist."""
    function = _function(name)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0
