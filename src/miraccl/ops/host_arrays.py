"""Arrays in CPU memory: NumPy, ``__array_interface__``, the buffer protocol and DLPack.

NumPy arrays are used as they are; other arrays are viewed, never copied.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.executor.cpu.arrays import dtype_of
from miraccl.ops.array_errors import (
    ALLOWED,
    MAX_BYTES,
    freed_storage_error,
    lazily_negated_error,
    masked_array_error,
    not_contiguous_error,
    too_large_error,
    unaligned_error,
)
from miraccl.ops.dlpack import KDLCPU, read_dlpack
from miraccl.ops.spec import OpSpec
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DType

Array = np.ndarray


@dataclass(frozen=True)
class HostMemory:
    """A contiguous buffer in CPU memory.

    Attributes:
        array: NumPy view of the buffer; keeps it alive.
        given: The object that the caller passed; returned as the result.
    """

    array: Array
    dtype: DType
    given: Any

    @property
    def address(self) -> int:
        return int(self.array.__array_interface__["data"][0])

    @property
    def count(self) -> int:
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)


def view(obj: Any, name: str, *, writes: bool, where: str) -> HostMemory:
    """Return the memory of ``obj``.

    Args:
        name: Argument name, for errors.
        writes: True if the operation writes to the memory.
        where: Operation name, for errors.

    Raises:
        InvalidUsage: ``obj`` is not an array in CPU memory, or has an unsupported dtype or layout.
    """
    array = _as_array(obj, name, where)
    if type(obj) is not np.ndarray:
        _check_foreign(obj, array, name, where)
    dtype = dtype_of(array)
    if dtype is None:
        reason = (
            "has non-native byte order"
            if array.dtype.newbyteorder() in NUMPY_DTYPE.values()
            else f"has dtype {array.dtype}"
        )
        # ml_dtypes has a float8_e4m3 as well, which is another type than ours of that name.
        meant = next((NUMPY_DTYPE[code] for code in DType if code.label == str(array.dtype)), None)
        raise InvalidUsage(
            f"{where}: {name} {reason}; allowed are {ALLOWED}",
            hint=f"{array.dtype} is {meant} here" if meant else None,
        )
    if not array.flags.c_contiguous:
        hint = "pass numpy.ascontiguousarray(...) and copy the result back if needed"
        form = f"shape {array.shape}, strides {array.strides}"
        raise not_contiguous_error(name, where, form, hint)
    if not array.flags.aligned:
        raise unaligned_error(name, where, array.itemsize)
    if writes and not array.flags.writeable:
        advice = "pass a writable copy, or out= if the operation has it" if name == "x" else None
        raise InvalidUsage(
            f"{where}: {name} is read-only, but the result is written to it", hint=advice
        )
    return HostMemory(array, dtype, obj)


def _check_foreign(obj: Any, array: Array, name: str, where: str) -> None:
    """Reject arrays of an impossible size, and masks, which a view of the memory would ignore."""
    if array.nbytes > MAX_BYTES:
        raise too_large_error(array.size, str(array.dtype), name, where)
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    interface = (
        None
        if isinstance(obj, np.ndarray) or hasattr(obj, "__dlpack__")
        else getattr(obj, "__array_interface__", None)
    )
    if isinstance(obj, masked) or (interface is not None and interface.get("mask") is not None):
        raise masked_array_error(name, where)


def _as_array(obj: Any, name: str, where: str) -> Array:
    if isinstance(obj, np.ndarray):
        return obj
    # NumPy copies a scalar, so a result written to the copy would be lost.
    if isinstance(obj, np.generic):
        array = np.asarray(obj)
        array.flags.writeable = False
        return array
    if hasattr(obj, "__dlpack__"):
        return _from_dlpack(obj, name, where)
    try:
        if hasattr(obj, "__array_interface__"):
            return np.asarray(obj)
    except Exception as error:  # ``__array_interface__`` may be a property that raises anything
        raise InvalidUsage(
            f"{where}: cannot read the __array_interface__ of {name}: "
            f"{type(error).__name__}: {error}"
        ) from error
    try:
        return np.asarray(memoryview(obj))
    except (TypeError, ValueError, BufferError) as error:
        kind = type(obj).__name__
        raise InvalidUsage(
            f"{where}: {name} is a {kind}; allowed are NumPy arrays and objects with "
            "__array_interface__, the buffer protocol or DLPack"
        ) from error


def _from_dlpack(obj: Any, name: str, where: str) -> Array:
    """Return a NumPy view of a CPU tensor."""
    try:
        kind = int(obj.__dlpack_device__()[0]) if hasattr(obj, "__dlpack_device__") else KDLCPU
    except Exception as error:
        raise InvalidUsage(f"{where}: cannot read the DLPack device of {name}: {error}") from error
    if kind != KDLCPU:
        raise InvalidUsage(
            f"{where}: {name} is in device memory (DLPack type {kind}); allowed is CPU memory"
        )
    torch = sys.modules.get("torch")
    is_torch = torch is not None and isinstance(obj, torch.Tensor)
    if is_torch and obj.is_neg():  # DLPack does not show it
        raise lazily_negated_error(name, where)
    tensor = read_dlpack(obj, name, where)
    dtype = NUMPY_DTYPE[tensor.dtype]
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    if is_torch and not obj.untyped_storage().nbytes():
        # A slice of a tensor with freed storage still has its byte offset as address.
        raise freed_storage_error(name, where, obj.numel())
    strides = tensor.strides and tuple(step * dtype.itemsize for step in tensor.strides)
    base = _Exporter(tensor.address, tensor.shape, strides, dtype, tensor.capsule, tensor.read_only)
    return np.asarray(base).view(dtype)


class _Exporter:
    """Exports memory through the array interface, as bytes of any item size."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: Any,
        owner: Any,
        read_only: bool,
    ) -> None:
        plain = np.dtype(f"<u{dtype.itemsize}") if dtype.kind == "V" or dtype.num > 23 else dtype
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": plain.str,
            "data": (address, read_only),
        }


class HostReader:
    """Arrays in CPU memory, for ``ops.check``."""

    def __init__(self, rank: int, nranks: int) -> None:
        self.rank, self.nranks = rank, nranks

    def view(self, obj: Any, name: str, op: str, stream: Any, writes: bool) -> HostMemory:
        return view(obj, name, writes=writes, where=op)

    def allocate(self, spec: OpSpec, x: Any, source: HostMemory, count: int) -> Array:
        array, nranks = source.array, self.nranks
        shape: tuple[int, ...] = (count,)
        if spec.one_input == spec.one_output and not spec.uneven:
            shape = array.shape
        elif not spec.uneven and array.ndim and spec.one_input:
            shape = (nranks * array.shape[0], *array.shape[1:])
        elif not spec.uneven and array.ndim and array.shape[0] % nranks == 0:
            shape = (array.shape[0] // nranks, *array.shape[1:])
        try:
            return np.empty(shape, array.dtype)
        except ValueError as error:
            raise InvalidUsage(
                f"{spec.name}: cannot allocate a result of shape {shape}: {error}"
            ) from error
        except MemoryError as error:
            raise SystemFailure(
                f"{spec.name}: cannot allocate a result of shape {shape}: out of memory",
                rank=self.rank,
            ) from error
