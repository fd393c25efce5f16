"""Arrays as plain memory: address, bytes, shape and dtype of what callers pass."""

from __future__ import annotations

import bisect
import math
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.transport.shared_segment import ShmSegment


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Contiguous memory of an array.

    Attributes:
        device: Ordinal of the GPU, -1 for CPU memory.
        owner: Object that keeps the memory alive.
    """

    address: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    writable: bool
    device: int
    owner: Any


def memory_of(thing: Any, name: str, op_name: str) -> Memory:
    """Return the memory of an array of NumPy, PyTorch, CuPy, or with the buffer protocol.

    Raises:
        InvalidUsage: It is not a contiguous array of elements that memory can hold.
    """
    if type(thing) is not np.ndarray:
        from miraccl.ops.device_arrays import is_gpu_array  # 25 ms, which arrays of NumPy save

        if is_gpu_array(thing):
            return _device_memory(thing, name, op_name)
    array = _host_array(thing, name, op_name)
    if not array.flags.c_contiguous:
        raise InvalidUsage(
            f"cannot {op_name}: {name} is not contiguous: shape {array.shape}, strides "
            f"{array.strides}",
            hint="pass a contiguous array, or blocks of one with writev and readv",
        )
    if array.dtype.hasobject:
        raise InvalidUsage(f"cannot {op_name}: {name} has dtype {array.dtype}, which has pointers")
    return Memory(
        address=int(array.__array_interface__["data"][0]),
        nbytes=int(array.nbytes),
        shape=array.shape,
        dtype=str(array.dtype),
        writable=bool(array.flags.writeable),
        device=-1,
        owner=(thing, array),
    )


def _host_array(thing: Any, name: str, op_name: str) -> Any:
    if isinstance(thing, np.ndarray):
        return thing
    if hasattr(thing, "data_ptr") and hasattr(thing, "numpy"):  # a tensor of PyTorch
        return _tensor_view(thing, name, op_name)
    try:
        if hasattr(thing, "__array_interface__"):
            return np.asarray(thing)
        return np.frombuffer(thing, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidUsage(
            f"cannot {op_name}: {name} is a {type(thing).__name__}: {error}",
            hint="allowed are arrays of NumPy, PyTorch and CuPy, and the buffer protocol",
        ) from None


def _tensor_view(tensor: Any, name: str, op_name: str) -> Any:
    """Return a view of the bytes of a CPU tensor of any dtype, with its shape in bytes."""
    if not tensor.is_contiguous():
        raise InvalidUsage(f"cannot {op_name}: {name} is not contiguous: {tuple(tensor.shape)}")
    shape = tuple(tensor.shape) or (1,)
    if not tensor.numel():
        return np.empty(shape, np.uint8)
    import torch

    return tensor.detach().view(shape).view(torch.uint8).numpy()


def _device_memory(thing: Any, name: str, op_name: str) -> Memory:
    from miraccl.ops.device_arrays import device_ordinal, device_view

    view = device_view(thing, name, op_name, None, None)
    shape = tuple(int(n) for n in getattr(thing, "shape", (view.count,)))
    return Memory(
        address=view.address,
        nbytes=view.nbytes,
        shape=shape,
        dtype=str(getattr(thing, "dtype", "uint8")).removeprefix("torch."),
        writable=True,
        device=device_ordinal(thing),
        owner=thing,
    )


class WindowPool:
    """Window memory of this process: arrays in segments that peers of the host can map.

    Each array has a segment of its own, whose descriptor stays open until the array is gone.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._segments: dict[int, ShmSegment] = {}

    def empty(self, shape: Any, dtype: Any) -> Any:
        """Return an array of zeros in window memory. Raises ``SystemFailure``."""
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(dims) * kind.itemsize
        segment = ShmSegment.create("miraccl-p2p", max(4096, -(-nbytes // 4096) * 4096))
        raw = segment.file.memory(0, max(nbytes, 1))
        with self._lock:
            bisect.insort(self._starts, segment.address)
            self._segments[segment.address] = segment
        weakref.finalize(raw, self._release, segment.address).atexit = False
        return np.frombuffer(raw, np.uint8, nbytes).view(kind).reshape(dims)

    def find(self, address: int, nbytes: int) -> tuple[ShmSegment, int] | None:
        """Return the segment that contains a range and the offset in it, or None."""
        with self._lock:
            i = bisect.bisect_right(self._starts, address) - 1
            segment = self._segments[self._starts[i]] if i >= 0 else None
        if segment is None or address + nbytes > segment.address + segment.nbytes:
            return None
        return segment, address - segment.address

    def _release(self, address: int) -> None:
        # Called by the garbage collector at any point: the lock may be held by this thread.
        if self._lock.acquire(timeout=1.0):
            try:
                self._starts.remove(address)
                segment = self._segments.pop(address)
            finally:
                self._lock.release()
            segment.release()


windows = WindowPool()
