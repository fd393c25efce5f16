"""Tensors as flat arrays that collectives can use: NumPy arrays for CPU memory, tensors for GPU memory.

A contiguous tensor is viewed, never copied.  Anything else (strides, the lazy conjugate and negative bits, 16-bit integers in a
reduction, a list of tensors) goes through one temporary, which ``Staged.store`` writes back.

Element types that miraccl does not know travel as bytes, which every operation but a reduction may do.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from miraccl.errors import InvalidUsage

DEVICES = ("cpu", "cuda")
#: Types of torch that NumPy has as well.
NATIVE = {
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.int32: np.dtype(np.int32),
    torch.uint32: np.dtype(np.uint32),
    torch.int64: np.dtype(np.int64),
    torch.uint64: np.dtype(np.uint64),
    torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
#: NumPy knows these by ml_dtypes only.
SMALL_FLOATS = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
WIDENED = frozenset((torch.int16, torch.uint16))


class Form(enum.Enum):
    """What the elements of the array are: the tensor's own values where miraccl knows the type (else bytes), bytes, or int32 values."""

    VALUES = enum.auto()
    BYTES = enum.auto()
    WIDE = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Staged:
    """``array`` is flat and holds ``width`` elements per element of the tensors; ``temporary`` is None where it is their own memory.

    A temporary gets the tensors' values in ``load``, when the operation runs: one before it may write them.
    """

    tensors: Sequence[Any]
    array: Any
    width: int
    temporary: Any = None
    loads: bool = False

    @property
    def count(self) -> int:
        """Elements of the array."""
        return sum(self.counts)

    @property
    def counts(self) -> list[int]:
        """Array elements of each tensor."""
        return [t.numel() * self.width for t in self.tensors]

    @property
    def device(self) -> Any:
        return self.tensors[0].device

    @property
    def memory(self) -> list[Any]:
        """The tensors whose memory is used."""
        return [*self.tensors, *([] if self.temporary is None else [self.temporary])]

    def load(self) -> None:
        """Fill a temporary that wants it with the values of the tensors."""
        if self.loads:
            for part, tensor in self._parts():
                _copy(part, tensor)

    def store(self) -> None:
        """Write a temporary back to the tensors."""
        if self.temporary is not None:
            for part, tensor in self._parts():
                _copy(tensor, part)

    def _parts(self) -> Iterator[tuple[Any, Any]]:
        """The part of the temporary of each tensor, in its shape."""
        start = 0
        for tensor in self.tensors:
            yield self.temporary[start : start + tensor.numel()].view(tensor.shape), tensor
            start += tensor.numel()


def _copy(target: Any, source: Any) -> None:
    if target.is_inference() == torch.is_inference_mode_enabled():
        target.detach().copy_(source.detach())
    else:
        with torch.inference_mode(target.is_inference()):  # a mode of threads, and this may be the lane's
            target.detach().copy_(source.detach())


def check(tensor: Any, where: str) -> None:
    """Raise ``InvalidUsage`` for tensors that this backend cannot carry."""
    if tensor.device.type not in DEVICES:
        hint = "name a backend for this device: init_process_group('cpu:miraccl,xpu:xccl'), say"
        raise InvalidUsage(f"{where}: the tensor is on {tensor.device}; this backend works on {' and '.join(DEVICES)} tensors", hint=hint)
    if tensor.layout is not torch.strided:
        raise InvalidUsage(f"{where}: the tensor's layout is {tensor.layout}; allowed is torch.strided", hint="use to_dense()")


def check_result(tensor: Any, where: str) -> None:
    """Raise ``InvalidUsage`` for a tensor that no result can be written to: an expanded one, whose elements share memory."""
    if not tensor.is_contiguous() and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        text = f"the result goes to a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, whose elements share memory"
        raise InvalidUsage(f"{where}: {text}", hint="use clone()")


def stage(tensor: Any, where: str, form: Form = Form.VALUES) -> Staged:
    """One tensor; with its values once it is loaded."""
    check(tensor, where)
    own = tensor.detach()
    if form is not Form.WIDE and own.is_contiguous() and not own.is_conj() and not own.is_neg():
        return Staged(tensors=[tensor], array=_array(own.view(-1), form), width=_width(tensor, form))
    return stage_list([tensor], where, form)


def stage_list(tensors: Sequence[Any], where: str, form: Form = Form.VALUES, *, load: bool = True, nranks: int = 0) -> Staged:
    """Tensors of one type, one after another in one temporary, which is filled with their values if it ``load``s. With ``nranks``, one
    of each rank."""
    if nranks and len(tensors) != nranks:
        raise InvalidUsage(f"{where}: the list has {len(tensors)} tensors; it needs one for each of {nranks} ranks")
    for tensor in tensors:
        check(tensor, where)
    first = tensors[0]
    if any(t.dtype is not first.dtype for t in tensors):
        raise InvalidUsage(f"{where}: the tensors of a list have one dtype, got {sorted({str(t.dtype) for t in tensors})}")
    if any(t.device != first.device for t in tensors):
        raise InvalidUsage(f"{where}: the tensors of a list are on one device, got {sorted({str(t.device) for t in tensors})}")
    kind = torch.int32 if form is Form.WIDE else first.dtype
    temporary = torch.empty(sum(t.numel() for t in tensors), dtype=kind, device=first.device)
    return Staged(tensors=tensors, array=_array(temporary, form), width=_width(first, form), temporary=temporary, loads=load)


def _width(tensor: Any, form: Form) -> int:
    if form is Form.WIDE:
        return 1
    if form is Form.BYTES or not _known(tensor.dtype):
        return int(tensor.element_size())
    return 2 if tensor.dtype.is_complex else 1


def _on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


def _known(dtype: Any) -> bool:
    return dtype in NATIVE or dtype in SMALL_FLOATS or dtype in (torch.complex64, torch.complex128)


def _array(flat: Any, form: Form) -> Any:
    """The memory of a flat contiguous tensor."""
    if form is Form.BYTES or not _known(flat.dtype):
        flat = flat.view(torch.uint8)
    elif flat.dtype.is_complex:
        flat = torch.view_as_real(flat).view(-1)
    if _on_gpu(flat):
        return flat
    memory: Any = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())  # after Tensor.numpy nobody could resize the storage
    memory.owner = flat  # which the array keeps alive
    dtype: Any = NATIVE.get(flat.dtype) or SMALL_FLOATS[flat.dtype]
    return np.ndarray(flat.numel(), dtype, memory)
