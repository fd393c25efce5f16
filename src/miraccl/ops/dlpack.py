"""Tensors read through DLPack (dlpack.h, version 1), in CPU and GPU memory.

The capsule is kept, not consumed: the producer's reference to the tensor is dropped when the
capsule is freed. NumPy's importer supports neither bfloat16 nor 8-bit floats.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, NamedTuple

from miraccl.errors import InvalidUsage
from miraccl.native.capsules import name_of, pointer_of
from miraccl.ops.array_errors import ALLOWED, MAX_BYTES, freed_storage_error, too_large_error
from miraccl.types import DL_TYPES, DType

KDLCPU = 1
#: kDLCUDA and kDLCUDAManaged.
KDLCUDA = (2, 13)
#: Libraries whose arrays are immutable although their tensors are not marked read-only.
IMMUTABLE = ("jax", "jaxlib")
_VERSION = (1, 0)
_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags
#: Offsets in DLManagedTensorVersioned (version, manager_ctx, deleter, flags, dl_tensor).
_FLAGS_AT, _TENSOR_AT = 24, 32


class DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DlpackTensor(NamedTuple):
    """A tensor read through DLPack.

    Attributes:
        shape, strides: Lengths and strides in elements; strides are None if it is contiguous.
        capsule: Keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DType
    read_only: bool
    capsule: Any


def capsule_of(obj: Any, **options: Any) -> tuple[Any, int, bool]:
    """Return (DLPack capsule, address of its ``DLTensor``, True if it is read-only).

    ``options`` are further arguments of ``__dlpack__``.
    """
    try:
        capsule = obj.__dlpack__(max_version=_VERSION, **options)
    except TypeError:  # exporters from before DLPack 1.0
        capsule = obj.__dlpack__(**options)
    name = name_of(capsule)
    if name == b"dltensor_versioned":
        pointer = pointer_of(capsule, name)
        flags = ctypes.c_uint64.from_address(pointer + _FLAGS_AT).value
        return capsule, pointer + _TENSOR_AT, bool(flags & _READ_ONLY)
    return (
        capsule,
        pointer_of(capsule, b"dltensor"),
        type(obj).__module__.partition(".")[0] in IMMUTABLE,
    )


def read_dlpack(obj: Any, name: str, where: str, **options: Any) -> DlpackTensor:
    """Return the tensor of argument ``name`` of ``where``, which may be in any kind of memory.

    Raises:
        InvalidUsage: The tensor cannot be exported, or has an unsupported type, size or no memory.
    """
    try:
        capsule, pointer, read_only = capsule_of(obj, **options)
    except Exception as error:
        raise InvalidUsage(f"{where}: cannot read {name} by DLPack: {error}") from error
    tensor = DLTensor.from_address(pointer)
    dtype = DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        found = f"({tensor.code}, {tensor.bits} bits)"
        raise InvalidUsage(f"{where}: {name} has DLPack type {found}; allowed are {ALLOWED}")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.ndim < 0 or min(shape, default=0) < 0:
        raise InvalidUsage(
            f"{where}: cannot read {name} by DLPack: {tensor.ndim} axes, shape {list(shape)}"
        )
    count = math.prod(shape)
    if count * dtype.itemsize > MAX_BYTES:
        raise too_large_error(count, dtype.label, name, where)
    if count and not tensor.data:
        raise freed_storage_error(name, where, count)
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None
    address = (tensor.data or 0) + tensor.byte_offset
    return DlpackTensor(address, shape, strides, dtype, read_only, capsule)
