"""Window memory on GPUs, mapped by all ranks of the host: ``comm.empty(..., device="cuda")``.

All ranks allocate windows together, in the same order and of the same size; they live as long as
the communicator. Operations that only move data write straight into peers' windows
(``executor.cuda.copies``); all ranks must then pass the same offset in the same window.
"""

from __future__ import annotations

import bisect
import math
import sys
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.copies import WindowPosition
from miraccl.ops.array_errors import MAX_BYTES
from miraccl.ops.device_arrays import DTYPE_NAMES, DeviceMemory
from miraccl.runtime.control import ControlPlane
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.runtime.window import dimensions, element_type
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.transport.cuda_p2p import SymmetricMemory, WindowMemory
from miraccl.types import DType

#: dtypes by name; bool is stored as uint8
_DTYPES_BY_NAME = DTYPE_NAMES | {"bool": DType.UINT8}


class DeviceArray:
    """Window memory as an array: ``__cuda_array_interface__``, and ``torch()`` for PyTorch.

    Floating-point types unknown to NumPy appear as unsigned integers of their size.
    """

    def __init__(
        self, address: int, shape: tuple[int, ...], dtype: DType, keep: Any, ordinal: int = 0
    ) -> None:
        """``keep``: owner of the memory, which is on GPU ``ordinal``."""
        self.address, self.shape, self.dtype, self._keep, self._ordinal = (
            address,
            shape,
            dtype,
            keep,
            ordinal,
        )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        kind = NUMPY_DTYPE[self.dtype]
        typestr = (
            kind.str if kind.isbuiltin == 1 else f"<u{kind.itemsize}"
        )  # isbuiltin 2: a dtype of another package, whose code consumers do not know
        return {
            "shape": self.shape,
            "typestr": typestr,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }

    @property
    def miraccl_view(self) -> DeviceMemory:
        """Memory with its own dtype, for calls of this package."""
        return DeviceMemory(self.address, math.prod(self.shape), self.dtype)

    def torch(self) -> Any:
        """Return the same memory as a tensor."""
        import torch

        kind = getattr(
            torch, "float8_e4m3fn" if self.dtype is DType.FLOAT8_E4M3 else self.dtype.label
        )
        flat = DeviceArray(self.address, (max(1, self.nbytes),), DType.UINT8, self._keep)
        tensor = torch.as_tensor(flat, device=f"cuda:{self._ordinal}")[
            : self.nbytes
        ]  # on another current device it would be a copy
        return tensor.view(kind).reshape(self.shape)

    def __repr__(self) -> str:
        return f"<window memory on a GPU: {self.shape} {self.dtype.label}>"


class DeviceWindows:
    """Windows of a communicator."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._windows: list[WindowMemory] = []
        self._starts: list[tuple[int, int]] = []  # (address, number), sorted

    @property
    def nbytes(self) -> int:
        return sum(window.nbytes for window in self._windows)

    def empty(self, shape: Any, dtype: Any, plane: ControlPlane, stages: SetupPhases) -> Any:
        """Allocate zeroed memory on every rank: a tensor for a PyTorch dtype or a ``DeviceArray``.

        All ranks pass the same arguments.
        """
        kind, dims = _element_type(dtype), dimensions(shape)
        nbytes = max(1, math.prod(dims)) * kind.itemsize
        if nbytes > MAX_BYTES:
            raise InvalidUsage(
                f"empty: cannot allocate {nbytes} bytes for {dims} {kind.label}: "
                f"the maximum is {MAX_BYTES}"
            )
        requested = f"{dims} {kind.label}"
        for rank, theirs in enumerate(
            plane.run_control_op(stages.activity, "gpu empty", requested.encode(), stages.deadline)
        ):
            if theirs.decode() != requested:
                raise InvalidUsage(
                    f"empty: rank {rank} requests {theirs.decode()}, this rank {requested}",
                    peer=rank,
                )
        window = self._memory.window(nbytes, stages)
        bisect.insort(self._starts, (window.own, len(self._windows)))
        self._windows.append(window)
        array = DeviceArray(window.own, dims, kind, window, self._memory.gpu.ordinal)
        # bool is stored as uint8
        return (
            array.torch().view(dtype)
            if "torch" in sys.modules and isinstance(dtype, sys.modules["torch"].dtype)
            else array
        )

    def locate(self, memory: DeviceMemory) -> WindowPosition | None:
        """Return the location of ``memory`` in a window that every rank can address, or None."""
        at = bisect.bisect_right(self._starts, (memory.address, len(self._windows))) - 1
        if at < 0:
            return None
        start, number = self._starts[at]
        window = self._windows[number]
        if not window.addressable or memory.address + memory.nbytes > start + window.nbytes:
            return None
        return WindowPosition(window=number, offset=memory.address - start, bases=window.addresses)

    def close(self) -> None:
        """Free the windows; no rank uses them."""
        windows, self._windows, self._starts = self._windows, [], []
        for window in reversed(windows):
            window.close()


def _element_type(dtype: Any) -> DType:
    """Return the dtype for an argument of ``empty``: as on CPUs, or a PyTorch dtype."""
    if isinstance(dtype, DType):
        return dtype
    found = _DTYPES_BY_NAME.get(str(dtype).removeprefix("torch."))
    if found is None and (kind := element_type(dtype)).isnative:
        found = _DTYPES_BY_NAME.get(kind.name)
    if found is None:
        allowed = ", ".join(_DTYPES_BY_NAME)
        raise InvalidUsage(f"empty: cannot communicate dtype {dtype!r}; allowed are {allowed}")
    return found
