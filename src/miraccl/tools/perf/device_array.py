"""Buffers in GPU memory for measurements: address, count and type, without an array library.

``PerfDeviceArray`` implements ``__cuda_array_interface__`` version 3, which is sufficient for a
communicator. With NCCL as peer the memory is PyTorch's and each array has a tensor over the same
bytes, so both libraries are called with the objects users have. Types that NumPy lacks have the
names of ``ml_dtypes`` (``bfloat16``), which ``numpy.dtype`` accepts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.tools.perf.data import numpy_dtype

ALIGNMENT = 512  # bytes, as cuMemAlloc and PyTorch's allocator give


class _Device(NamedTuple):
    """GPU of an array, with the attribute names of CuPy (``id``) and PyTorch (``index``)."""

    id: int
    index: int  # type: ignore[assignment]  # hides tuple.index


class PerfDeviceArray:
    """Array of ``count`` elements at ``address``; slices share the memory.

    ``tensor`` is PyTorch's view of it, or None.
    """

    __slots__ = (
        "__cuda_array_interface__",
        "address",
        "count",
        "device",
        "dtype",
        "name",
        "tensor",
    )

    def __init__(
        self, address: int, count: int, name: str, ordinal: int, tensor: Any = None
    ) -> None:
        self.address, self.count, self.name, self.tensor = address, count, name, tensor
        self.dtype = numpy_dtype(name)
        self.device = _Device(ordinal, ordinal)
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": self.dtype.str if self.dtype.isbuiltin == 1 else self.dtype.name,
            "data": (address if count else 0, False),
            "strides": None,
            "version": 3,
        }

    @property
    def nbytes(self) -> int:
        return int(self.count * self.dtype.itemsize)

    @property
    def argument(self) -> Any:
        """Object that a library is called with."""
        return self if self.tensor is None else self.tensor

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: slice) -> PerfDeviceArray:
        start, stop, step = place.indices(self.count)
        if step != 1:
            raise IndexError("slices of a DeviceArray are contiguous")
        part = None if self.tensor is None else self.tensor[start:stop]
        return PerfDeviceArray(
            self.address + start * self.dtype.itemsize,
            max(0, stop - start),
            self.name,
            self.device.id,
            part,
        )


class Arena:
    """One allocation from which the arrays of a case are cut.

    Nothing is allocated or freed between measurements, as in an application with a caching
    allocator. ``whole`` is PyTorch's tensor of bytes, or None.
    """

    def __init__(self, address: int, nbytes: int, ordinal: int, whole: Any = None) -> None:
        self.address, self.nbytes, self._ordinal, self._whole = address, nbytes, ordinal, whole
        self._used = 0

    def reset(self) -> None:
        """Release all arrays."""
        self._used = 0

    def allocate(self, count: int, name: str) -> PerfDeviceArray:
        """Return an uninitialised array of ``count`` elements; raise ``InvalidUsage`` if it does
        not
        fit.
        """
        nbytes = count * numpy_dtype(name).itemsize
        begin = self._used
        if begin + nbytes > self.nbytes:
            raise InvalidUsage(
                f"cannot allocate the buffers of a case: they exceed the {self.nbytes} bytes of the"
                " arena"
            )
        self._used = begin + -(-nbytes // ALIGNMENT) * ALIGNMENT
        return PerfDeviceArray(
            self.address + begin, count, name, self._ordinal, self._tensor(begin, nbytes, name)
        )

    def _tensor(self, begin: int, nbytes: int, name: str) -> Any:
        if self._whole is None:
            return None
        import torch

        return self._whole[begin : begin + nbytes].view(getattr(torch, torch_name(name)))


def torch_name(name: str) -> str:
    """Return PyTorch's name of a type."""
    return {"float8_e4m3": "float8_e4m3fn"}.get(name, name)


def padded_bytes(nbytes: int) -> int:
    """Return the bytes that an array of ``nbytes`` occupies in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def as_device_array(thing: Any, name: str, ordinal: int) -> PerfDeviceArray:
    """Wrap an array of another library, such as window memory, without a copy.

    The caller keeps ``thing`` alive.
    """
    interface = thing.__cuda_array_interface__
    count = int(np.prod(interface["shape"], dtype=np.int64))
    return PerfDeviceArray(int(interface["data"][0] or 0), count, name, ordinal, None)
