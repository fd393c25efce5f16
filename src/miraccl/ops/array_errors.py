"""Errors of arrays that operations cannot use, the same for CPU and GPU memory."""

from __future__ import annotations

from miraccl.errors import InvalidUsage
from miraccl.types import DType

ALLOWED = ", ".join(code.label for code in DType)
#: Upper bound of an array: the address space of a process (x86-64, five-level page tables).
MAX_BYTES = 1 << 57


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


def unaligned_error(name: str, where: str, itemsize: int) -> InvalidUsage:
    return InvalidUsage(f"{where}: {name} is not aligned to its element size of {itemsize} bytes")


def not_contiguous_error(name: str, where: str, form: str, hint: str | None = None) -> InvalidUsage:
    """Error for an array with gaps; ``form``: its shape and strides."""
    return InvalidUsage(f"{where}: {name} is not contiguous ({form})", hint=hint)


def lazily_negated_error(name: str, where: str) -> InvalidUsage:
    """Error for a PyTorch tensor with the lazy negative bit: its memory has the negated values."""
    return InvalidUsage(
        f"{where}: {name} is lazily negated (is_neg()): its memory has other values",
        hint="pass x.resolve_neg()",
    )
