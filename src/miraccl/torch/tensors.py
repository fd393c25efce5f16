"""Tensors as flat arrays: NumPy arrays for CPU memory, tensors for GPU memory.

A contiguous tensor is viewed, never copied.  Everything else (other strides, lazy conjugate and
negative bits, 16-bit integers in a reduction, lists of tensors) goes through one temporary that
``Staged.store`` copies back.  Element types unknown to miraccl travel as bytes, which every
operation except reductions allows.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch

from miraccl.errors import InvalidUsage

NAME = "miraccl"
DEVICES = ("cpu", "cuda")
#: Types that NumPy has.
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
#: Types that NumPy has through ml_dtypes.
SMALL_FLOATS = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
COMPLEX = frozenset((torch.complex64, torch.complex128))
WIDENED = frozenset((torch.int16, torch.uint16))
#: Dispatch keys of ordinary CPU tensors, and of those made in inference mode.
_PLAIN_KEYS = frozenset(
    torch._C._dispatch_keys(sample).raw_repr()
    for sample in (torch.empty(0), torch.inference_mode()(torch.empty)(0))
)
#: Memory of any length from an address.  ctypes would create a new type for every length, which
#: takes ten times as long as the rest of the call.
_ANY_LENGTH = ctypes.c_char * (1 << 46)


class ElementEncoding(enum.IntEnum):  # an IntEnum: its hash is not written in Python
    """Meaning of a staged array's elements.

    ``VALUES``: the tensor's values where miraccl knows the type, else bytes.  ``BYTES``: bytes.
    ``WIDE``: values widened to int32.
    """

    VALUES = enum.auto()
    BYTES = enum.auto()
    WIDE = enum.auto()


#: Lists below this size are copied tensor by tensor with ``memmove``; above, PyTorch uses threads.
SMALL_BYTES = 64 << 10


@dataclass(slots=True, kw_only=True)
class Staged:
    """Tensors and the flat ``array`` that stands for them; ``counts`` are its elements per tensor.

    ``temporary`` is None if the array is the tensors' own memory.  A temporary is filled by
    ``load`` when the operation runs, because an earlier operation may still write the tensors.
    """

    tensors: Sequence[Any]
    array: Any
    counts: list[int]
    temporary: Any = None
    needs_load: bool = False
    #: (tensor address, address of its part of the temporary, bytes) if a plain copy suffices.
    copies: Sequence[tuple[int, int, int]] | None = None

    @property
    def count(self) -> int:
        """Number of elements of the array."""
        return sum(self.counts)

    @property
    def device(self) -> Any:
        return self.tensors[0].device

    @property
    def plain(self) -> Any:
        """Tensor whose memory is the array: the only tensor, or the temporary."""
        return self.tensors[0] if self.temporary is None else self.temporary

    @property
    def stacked(self) -> Sequence[Any]:
        """Tensors of a list or, if all have one shape, the temporary as one stacked tensor.

        c10d's NCCL backend returns the stacked form from futures of ``all_gather``, and PyTorch's
        hooks that quantize gradients rely on it.
        """
        shape = self.tensors[0].shape
        if any(tensor.shape != shape for tensor in self.tensors):
            return self.tensors
        return [self.temporary.view(len(self.tensors), *shape)]

    @property
    def memory(self) -> list[Any]:
        """Every tensor whose memory the operation uses."""
        return [*self.tensors, *([] if self.temporary is None else [self.temporary])]

    def load(self) -> None:
        """Fill the temporary with the tensors' values, if it needs them."""
        if not self.needs_load:
            return
        if self.copies is not None:
            for own, part, nbytes in self.copies:
                ctypes.memmove(part, own, nbytes)
        else:
            for part, tensor in self._parts():
                _copy(part, tensor)

    def store(self) -> None:
        """Copy the temporary back to the tensors."""
        if self.temporary is None:
            return
        if self.copies is not None:
            for own, part, nbytes in self.copies:
                ctypes.memmove(own, part, nbytes)
        else:
            for part, tensor in self._parts():
                _copy(tensor, part)

    def _parts(self) -> Iterator[tuple[Any, Any]]:
        """Yield each tensor with its part of the temporary, in the tensor's shape."""
        start = 0
        for tensor in self.tensors:
            yield self.temporary[start : start + tensor.numel()].view(tensor.shape), tensor
            start += tensor.numel()


def with_loads(places: Sequence[Staged], action: Callable[[], Any]) -> Callable[[], None]:
    """Wrap ``action`` so that it first fills the temporaries."""

    def run() -> None:
        for place in places:
            place.load()
        action()

    return run


def _copy(target: Any, source: Any) -> None:
    if target.is_inference() == torch.is_inference_mode_enabled():
        target.detach().copy_(source.detach())
    else:
        # the mode is per thread, and this may be the work queue's thread
        with torch.inference_mode(target.is_inference()):
            target.detach().copy_(source.detach())


def check(tensor: Any, where: str) -> None:
    """Raise ``InvalidUsage`` for tensors that this backend cannot carry."""
    if torch._C._len_torch_dispatch_stack():
        _check_not_recorded(where)
    if not tensor.is_cpu and not tensor.is_cuda:
        hint = "name a backend for this device, as in init_process_group('cpu:miraccl,xpu:xccl')"
        raise InvalidUsage(
            f"{where}: the tensor is on {tensor.device}; "
            f"this backend supports {' and '.join(DEVICES)} tensors",
            hint=hint,
        )
    if tensor.layout is not torch.strided:
        raise InvalidUsage(
            f"{where}: the tensor's layout is {tensor.layout}; allowed is torch.strided",
            hint="use to_dense()",
        )


def _check_not_recorded(where: str) -> None:
    """Raise ``InvalidUsage`` under ``make_fx``.

    It records PyTorch operators only; a call of a group written in Python would be missing from the
    recorded program.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        hint = "use torch.distributed._functional_collectives, or torch.compile"
        raise InvalidUsage(f"{where}: cannot be recorded by make_fx", hint=hint)


def check_result(tensor: Any, where: str) -> None:
    """Raise ``InvalidUsage`` for a result tensor whose elements share memory."""
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    ):
        text = (
            f"cannot write the result: elements of the tensor of shape {tuple(tensor.shape)} "
            f"and strides {tensor.stride()} share memory"
        )
        raise InvalidUsage(f"{where}: {text}", hint="use clone()")


def _owning_tensor(tensor: Any, where: str) -> Any:
    """Return the tensor that owns the memory; waits for an ``AsyncCollectiveTensor``."""
    check(tensor, where)
    if type(tensor) is torch.Tensor:
        return tensor
    if hasattr(tensor, "fake_mode"):
        raise InvalidUsage(
            f"{where}: a {type(tensor).__name__} has no values",
            hint="use torch.distributed._functional_collectives",
        )
    own = tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor.detach()
    if own.numel() and not own.data_ptr():
        raise InvalidUsage(
            f"{where}: a {type(tensor).__name__} has no memory of its own",
            hint="use to_local() of a DTensor",
        )
    return own


def stage(tensor: Any, where: str, encoding: ElementEncoding = ElementEncoding.VALUES) -> Staged:
    """Stage one tensor."""
    own = _owning_tensor(tensor, where)
    if encoding is ElementEncoding.WIDE or not _is_plain(own):
        return stage_list([own], where, encoding)
    array, width = _array(own, encoding)
    return Staged(tensors=[own], array=array, counts=[own.numel() * width])


def stage_list(
    tensors: Sequence[Any],
    where: str,
    encoding: ElementEncoding = ElementEncoding.VALUES,
    *,
    load: bool = True,
    nranks: int = 0,
) -> Staged:
    """Stage tensors of one dtype and device, concatenated in one temporary.

    Args:
        load: Fill the temporary with the tensors' values when the operation runs.
        nranks: If not 0, the required number of tensors, one per rank.
    """
    if nranks and len(tensors) != nranks:
        raise InvalidUsage(
            f"{where}: the list has {len(tensors)} tensors; it needs one per rank, {nranks}"
        )
    tensors = [_owning_tensor(tensor, where) for tensor in tensors]
    dtype, device = tensors[0].dtype, tensors[0].device
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.device != device:
            raise _mixed(tensors, where)
    counts = [t.numel() for t in tensors]
    temporary = torch.empty(
        sum(counts), dtype=torch.int32 if encoding is ElementEncoding.WIDE else dtype, device=device
    )
    array, width = _array(temporary, encoding)
    if width != 1:
        counts = [n * width for n in counts]
    moves = None
    if (
        encoding is not ElementEncoding.WIDE
        and not _on_gpu(temporary)
        and temporary.nbytes < SMALL_BYTES
        and all(map(_is_plain, tensors))
    ):
        moves = _copy_list(tensors, temporary.data_ptr())
    return Staged(
        tensors=tensors,
        array=array,
        counts=counts,
        temporary=temporary,
        needs_load=load,
        copies=moves,
    )


def _mixed(tensors: Sequence[Any], where: str) -> InvalidUsage:
    dtypes, devices = (
        sorted({str(t.dtype) for t in tensors}),
        sorted({str(t.device) for t in tensors}),
    )
    if len(dtypes) > 1:
        return InvalidUsage(f"{where}: the tensors of a list must have one dtype, got {dtypes}")
    return InvalidUsage(f"{where}: the tensors of a list must be on one device, got {devices}")


def _copy_list(tensors: Sequence[Any], address: int) -> list[tuple[int, int, int]]:
    """Return (tensor address, address of its part at ``address``, bytes) of each tensor."""
    moves = []
    for tensor in tensors:
        nbytes = tensor.nbytes
        moves.append((tensor.data_ptr(), address, nbytes))
        address += nbytes
    return moves


def _is_plain(tensor: Any) -> bool:
    """Return True if the tensor is contiguous, without lazy conjugate or negative bits."""
    if not tensor.is_contiguous():
        return False
    return _has_plain_keys(tensor) or not (tensor.is_conj() or tensor.is_neg())


def _has_plain_keys(tensor: Any) -> bool:
    """Return True for dense CPU memory without lazy bits: one look at the dispatch keys.

    ``is_neg()`` and ``is_conj()`` release the GIL, for which the thread of the work queue may wait:
    a call then takes 20 us instead of 0.5.
    """
    return tensor.is_cpu and torch._C._dispatch_keys(tensor).raw_repr() in _PLAIN_KEYS


def _on_gpu(tensor: Any) -> bool:
    return bool(tensor.is_cuda)


@functools.cache
def _element(dtype: Any, encoding: ElementEncoding) -> tuple[Any, int, Any]:
    """Return NumPy's type, how many of them form one element, and torch's type to view it as."""
    if encoding is ElementEncoding.BYTES or not (
        dtype in NATIVE or dtype in SMALL_FLOATS or dtype in COMPLEX
    ):
        return np.dtype(np.uint8), dtype.itemsize, torch.uint8
    if dtype in COMPLEX:
        return NATIVE[dtype.to_real()], 2, dtype.to_real()
    return NATIVE.get(dtype) or SMALL_FLOATS[dtype], 1, dtype


def _array(tensor: Any, encoding: ElementEncoding) -> tuple[Any, int]:
    """Return the memory of a plain tensor as an array, and the array elements per tensor element.

    Values on a GPU keep the tensor's shape.
    """
    kind, width, seen_as = _element(tensor.dtype, encoding)
    if _on_gpu(tensor):
        own = (
            tensor.detach() if tensor.requires_grad or type(tensor) is not torch.Tensor else tensor
        )
        if own.numel() <= 1:  # a single element may have any stride
            own = own.as_strided((own.numel(),), (1,))
        return (
            own
            if encoding is ElementEncoding.VALUES and seen_as is own.dtype
            else own.view(-1).view(seen_as)
        ), width
    # not Tensor.numpy(), after which the storage cannot be resized
    return array_at(tensor.data_ptr(), tensor.numel() * width, kind, tensor), width


def array_at(address: int, count: int, kind: Any, owner: Any) -> Any:
    """Return memory at an address as a flat array that keeps ``owner`` alive."""
    memory: Any = _ANY_LENGTH.from_address(address)
    memory.owner = owner
    return np.ndarray(count, kind, memory)


def is_plain_cpu_tensor(tensor: Any) -> bool:
    """Return True for an ordinary contiguous CPU tensor outside any dispatch mode."""
    ordinary = (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and _is_plain(tensor)
    )
    return ordinary and not torch._C._len_torch_dispatch_stack()


def plain_cpu_array(tensor: Any) -> Any:
    """Return the memory of an ordinary contiguous CPU tensor as a flat array.

    None if ``stage`` has to look at the tensor: another layout or class, or a type without values
    in NumPy.
    """
    kind = NATIVE.get(tensor.dtype) or SMALL_FLOATS.get(tensor.dtype)
    if (
        kind is None
        or type(tensor) is not torch.Tensor
        or not _has_plain_keys(tensor)
        or not tensor.is_contiguous()
        or torch._C._len_torch_dispatch_stack()
    ):
        return None
    return array_at(tensor.data_ptr(), tensor.numel(), kind, tensor)


def is_plain_gpu_tensor(tensor: Any, ordinal: int) -> bool:
    """Return True for an ordinary contiguous tensor on GPU ``ordinal`` of a type that miraccl
    knows.

    Single elements are excluded: their strides are arbitrary.
    """
    own = (
        type(tensor) is torch.Tensor
        and tensor.is_cuda
        and tensor.get_device() == ordinal
        and tensor.numel() > 1
    )
    if (
        not own
        or tensor.layout is not torch.strided
        or tensor.requires_grad
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return False
    return (
        tensor.dtype in NATIVE or tensor.dtype in SMALL_FLOATS
    ) and not torch._C._len_torch_dispatch_stack()
