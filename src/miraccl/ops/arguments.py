"""Reading and validation of the arguments of operations on CPU memory.

NumPy arrays are used as they are; objects with ``__array_interface__``, the buffer protocol or
DLPack (on the CPU) are viewed, never copied.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from dataclasses import dataclass
from operator import index as whole_number
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu.arrays import dtype_of
from miraccl.native.capsules import name_of, pointer_of
from miraccl.schedule.reduction import DTYPE_OF, NUMPY_DTYPE, accumulator
from miraccl.types import DL_TYPES, DType, PreMulSum, RedOp

Array = np.ndarray

ALLOWED = ", ".join(code.label for code in DType)
#: Upper bound of an array: the address space of a process (x86-64, five-level page tables).
MAX_BYTES = 1 << 57


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
        raise InvalidUsage(
            f"{where}: {name} is not contiguous (shape {array.shape}, strides {array.strides})",
            hint=hint,
        )
    if not array.flags.aligned:
        raise InvalidUsage(
            f"{where}: {name} is not aligned to its element size of {array.itemsize} bytes"
        )
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


# ---- DLPack (dlpack.h, version 1): NumPy's importer supports neither bfloat16 nor 8-bit floats


class DLTensor(ctypes.Structure):
    """``DLTensor`` of dlpack.h, version 1."""

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


_DL_CPU = 1
_DL_VERSION = (1, 0)
_DL_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags
#: Offsets in DLManagedTensorVersioned (version, manager_ctx, deleter, flags, dl_tensor).
_DL_FLAGS_AT, _DL_TENSOR_AT = 24, 32
#: Libraries whose arrays are immutable although their DLPack tensors are not marked read-only.
IMMUTABLE = ("jax", "jaxlib")


def capsule_of(obj: Any, **options: Any) -> tuple[Any, int, bool]:
    """Return (DLPack capsule, address of its ``DLTensor``, True if it is read-only).

    ``options`` are further arguments of ``__dlpack__``.
    """
    try:
        capsule = obj.__dlpack__(max_version=_DL_VERSION, **options)
    except TypeError:  # exporters from before DLPack 1.0
        capsule = obj.__dlpack__(**options)
    name = name_of(capsule)
    if name == b"dltensor_versioned":
        pointer = pointer_of(capsule, name)
        flags = ctypes.c_uint64.from_address(pointer + _DL_FLAGS_AT).value
        return capsule, pointer + _DL_TENSOR_AT, bool(flags & _DL_READ_ONLY)
    return (
        capsule,
        pointer_of(capsule, b"dltensor"),
        type(obj).__module__.partition(".")[0] in IMMUTABLE,
    )


def masked_array_error(name: str, where: str) -> InvalidUsage:
    return InvalidUsage(f"{where}: {name} is a masked array; masks are not supported")


def too_large_error(count: int, dtype: str, name: str, where: str) -> InvalidUsage:
    return InvalidUsage(
        f"{where}: {name} claims {count} elements of {dtype}; a process can address at most "
        f"{MAX_BYTES} bytes"
    )


def freed_storage_error(name: str, where: str, count: int) -> InvalidUsage:
    return InvalidUsage(
        f"{where}: {name} has {count} elements, but no memory",
        hint="its storage may have been freed",
    )


def shape_of(tensor: DLTensor, name: str, where: str) -> tuple[int, ...]:
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.ndim < 0 or min(shape, default=0) < 0:
        raise InvalidUsage(
            f"{where}: cannot read {name} by DLPack: {tensor.ndim} axes, shape {list(shape)}"
        )
    return shape


def lazily_negated_error(name: str, where: str) -> InvalidUsage:
    """Error for a PyTorch tensor with the lazy negative bit: its memory has the negated values."""
    return InvalidUsage(
        f"{where}: {name} is lazily negated (is_neg()): its memory has other values",
        hint="pass x.resolve_neg()",
    )


def _from_dlpack(obj: Any, name: str, where: str) -> Array:
    """Return a NumPy view of a CPU tensor.

    The view owns the capsule without consuming it: freeing it drops the reference to the tensor.
    """
    try:
        kind = int(obj.__dlpack_device__()[0]) if hasattr(obj, "__dlpack_device__") else _DL_CPU
    except Exception as error:
        raise InvalidUsage(f"{where}: cannot read the DLPack device of {name}: {error}") from error
    if kind != _DL_CPU:
        raise InvalidUsage(
            f"{where}: {name} is in device memory (DLPack type {kind}); allowed is CPU memory"
        )
    torch = sys.modules.get("torch")
    if (
        torch is not None and isinstance(obj, torch.Tensor) and obj.is_neg()
    ):  # DLPack does not show it
        raise lazily_negated_error(name, where)
    try:
        capsule, pointer, read_only = capsule_of(obj)
    except Exception as error:
        raise InvalidUsage(f"{where}: cannot read {name} by DLPack: {error}") from error
    tensor = DLTensor.from_address(pointer)
    code = DL_TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if code is None:
        raise InvalidUsage(
            f"{where}: {name} has DLPack type ({tensor.code}, {tensor.bits} bits); "
            f"allowed are {ALLOWED}"
        )
    shape = shape_of(tensor, name, where)
    dtype = NUMPY_DTYPE[code]
    strides = (
        tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
        if tensor.strides
        else None
    )
    start = (tensor.data or 0) + tensor.byte_offset
    if 0 in shape:
        return np.empty(shape, dtype)
    if not tensor.data or (
        torch is not None and isinstance(obj, torch.Tensor) and not obj.untyped_storage().nbytes()
    ):
        # A slice of a tensor with freed storage still has its byte offset as address.
        raise freed_storage_error(name, where, math.prod(shape))
    if math.prod(shape) * dtype.itemsize > MAX_BYTES:
        raise too_large_error(math.prod(shape), code.label, name, where)
    base = _Exporter(start, shape, strides, dtype, capsule, read_only)
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


# ---- operators, peers, shapes

_SURELY_FINITE = 1e38  # finite in every accumulator type


def resolve_operator(op: Any, dtype: DType, where: str) -> tuple[RedOp, float]:
    """Return (operator, scalar of a ``PreMulSum``, else 1.0).

    The scalar is an int for integer types, since float64 does not represent all of their values.

    Raises:
        InvalidUsage: ``op`` is not an operator, or its scalar is not a value of ``dtype``.
    """
    if isinstance(op, PreMulSum):
        if not dtype.is_float:
            if not _is_integer(op.scalar, dtype):
                raise InvalidUsage(
                    f"{where}: scalar {op.scalar} of PreMulSum is not a value of {dtype.label}"
                )
            return RedOp.PREMUL_SUM, int(op.scalar)
        scalar = float(op.scalar)
        if _SURELY_FINITE < abs(scalar) < math.inf:
            _expect_finite(scalar, dtype, where)
        return RedOp.PREMUL_SUM, scalar
    if isinstance(op, RedOp) and op is not RedOp.PREMUL_SUM:
        return op, 1.0
    names = ", ".join(o.name for o in RedOp if o is not RedOp.PREMUL_SUM)
    raise InvalidUsage(
        f"{where}: op is {op!r}; allowed are miraccl.{names} and miraccl.PreMulSum(scalar)"
    )


def _is_integer(scalar: float, dtype: DType) -> bool:
    limits = np.iinfo(NUMPY_DTYPE[dtype])
    whole = isinstance(scalar, int) or scalar.is_integer()
    return whole and int(limits.min) <= int(scalar) <= int(limits.max)


def _expect_finite(scalar: float, dtype: DType, where: str) -> None:
    """Raise if ``scalar`` overflows the type in which elements of ``dtype`` are accumulated."""
    wide = accumulator(NUMPY_DTYPE[dtype])
    with np.errstate(over="ignore"):
        if np.isfinite(wide.type(scalar)):
            return
    limit = f"{np.finfo(wide).max:.8g}, the largest {wide}, in which {dtype.label} is accumulated"
    raise InvalidUsage(f"{where}: scalar {scalar:g} of PreMulSum exceeds {limit}")


def data_type(value: Any) -> DType:
    """Return the ``DType`` of a ``DType``, its label or a NumPy type."""
    if isinstance(value, str) and value.upper() in DType.__members__:
        return DType[value.upper()]
    if isinstance(value, DType):
        return value
    if value is not None and not isinstance(value, str):
        with contextlib.suppress(TypeError):
            if (code := DTYPE_OF.get(np.dtype(value))) is not None:
                return code
    raise InvalidUsage(f"dtype is {value!r}; allowed are {ALLOWED}")


def peer_rank(value: Any, name: str, nranks: int, where: str) -> int:
    """Return ``value`` as a rank from 0 to ``nranks`` - 1, or raise ``InvalidUsage``."""
    if type(value) is int and 0 <= value < nranks:
        return value  # common case first: GPU calls take fractions of a microsecond
    if (
        isinstance(value, bool)
        or not isinstance(value, int | np.integer)
        or not 0 <= value < nranks
    ):
        raise InvalidUsage(f"{where}: {name} is {value!r}; allowed are the ranks 0 to {nranks - 1}")
    return int(value)


def reject_stream(stream: Any, rank: int, name: str | None = None) -> None:
    """Raise if an operation on CPU memory was given a stream."""
    if stream is not None:
        raise InvalidUsage(
            "stream is given, but the arrays are in CPU memory; streams are for GPU memory",
            rank=rank,
            op=name,
        )


def same_dtype(a: HostMemory, b: HostMemory, names: str, where: str) -> None:
    if a.dtype is not b.dtype:
        raise InvalidUsage(
            f"{where}: {names} have different dtypes, {a.dtype.label} and {b.dtype.label}"
        )


def expect_count(memory: HostMemory, count: int, name: str, why: str, where: str) -> None:
    if memory.count != count:
        raise InvalidUsage(
            f"{where}: {name} has {memory.count} elements, but needs {count} ({why})"
        )


def counts_of(values: Any, name: str, nranks: int, where: str) -> list[int]:
    """Return the element counts, one per rank, of an uneven operation."""
    try:
        if isinstance(values, (dict, set, frozenset)):  # unordered, or ordered by key
            raise TypeError
        counts = [whole_number(v) for v in values]
    except TypeError as error:
        raise InvalidUsage(
            f"{where}: {name} must be a list of {nranks} element counts, got {values!r}"
        ) from error
    if len(counts) != nranks or min(counts) < 0:
        raise InvalidUsage(
            f"{where}: {name} must have {nranks} counts of 0 or more, one per rank, got {counts}"
        )
    return counts
