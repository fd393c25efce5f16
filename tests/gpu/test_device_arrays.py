"""Arrays on a GPU by the protocols that they speak, the long way: what waits for their producers, what is refused, what doors are told."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from miraccl.comm.arguments import DLTensor, capsule_of
from miraccl.comm.device import memory
from miraccl.comm.device.arguments import DeviceArguments
from miraccl.comm.device.memory import DeviceMemory, device_view
from miraccl.comm.device.windows import DeviceArray
from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.doors import layout as at
from miraccl.executor.cuda.doors.kinds import Kind
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DType


class Gpu:
    """What a view asks of a GPU; writes down which stream waits for which. ``captures`` are the streams of a capture."""

    ordinal = 0

    def __init__(self, captures: tuple[int, ...] = ()) -> None:
        self.ordered: list[tuple[int, int]] = []
        self._captures = captures

    def owner(self, address: int) -> int:
        return 0

    def capture_id(self, stream: int) -> int:
        return int(stream in self._captures)

    def order_streams(self, before: int, after: int) -> None:
        self.ordered.append((before, after))


class Described:
    def __init__(self, **said: Any) -> None:
        self.__cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3} | said


class Packed:
    """In CPU memory, which is taken for that of a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return memory._DL_CUDA[0], 0

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(max_version=max_version)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "kinds", {})
    monkeypatch.setattr(memory, "find_current_stream", lambda: lambda ordinal: 0)


def view(x: Any, stream: Any = None, gpu: Any = None) -> DeviceMemory:
    side: Any = gpu or Gpu()
    return device_view(x, "x", "a test", stream, side)


@pytest.mark.parametrize(
    ("producer", "stream", "ordered"),
    [
        (None, None, []),
        (None, 5, []),
        (1, None, []),
        (1, 0, []),
        (1, 1, []),
        (5, 5, []),
        (5, None, [(5, 0)]),
        (5, 6, [(5, 6)]),
        (1, 6, [(1, 6)]),
        (2, None, [(2, 0)]),
        (2, 2, []),
    ],
)
def test_the_operation_waits_for_the_stream_of_the_interface(producer: Any, stream: Any, ordered: Any) -> None:
    """Version 3 of the interface; 1 is the legacy default stream."""
    gpu = Gpu()
    view(Described(stream=producer), stream, gpu)
    assert gpu.ordered == ordered


def test_a_stream_outside_of_a_capture_is_no_part_of_its_order() -> None:
    both, one = Gpu((5, 6)), Gpu((6,))
    view(Described(stream=5), 6, both)
    view(Described(stream=5), 6, one)
    assert (both.ordered, one.ordered) == ([(5, 6)], [])


def test_arrays_of_cupy_name_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken as tensors are: with ``stream`` the caller sees to the order. Doors have another way to look at them."""
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Described))
    gpu = Gpu()
    view(Described(stream=5), 6, gpu)
    assert gpu.ordered == []
    assert memory.kinds == {}


def test_outputs_wait_in_the_stream_of_the_operation() -> None:
    class Arguments(DeviceArguments):
        rank, nranks = 0, 2

        def __init__(self) -> None:
            self.gpu: Any = Gpu()

    mine, out = Arguments(), Packed(np.zeros(4, np.float32))
    source = DeviceMemory(4096, 4, DType.FLOAT32)
    assert mine._like(out, source, 4, "a test", 7).count == 4
    mine._like(Described(stream=5), source, 4, "a test", 7)
    assert out.streams == [7]
    assert mine.gpu.ordered == [(5, 7)]


def test_masks_and_odd_addresses_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="x has a mask"):
        view(Described(mask=np.ones(4)))
    odd = np.zeros(20, np.uint8)[1:17]
    for thing in (Described(data=(4097, False)), Odd(odd)):
        with pytest.raises(InvalidUsage, match="x is not aligned to its element size of 4 bytes"):
            view(thing)
    assert not memory.kinds


class Odd(Packed):
    """Bytes that are said to be float32."""

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        capsule = super().__dlpack__(stream=stream, max_version=max_version)
        _, address, _ = capsule_of(types.SimpleNamespace(__dlpack__=lambda **_: capsule))
        tensor = DLTensor.from_address(address)
        tensor.code, tensor.bits, tensor.shape[0] = 2, 32, 4
        return capsule


@pytest.mark.parametrize("code", list(DType))
def test_windows_are_shown_to_others_as_numbers_that_they_know(code: DType) -> None:
    """Not to this package: doors must not take 8-bit floats for integers."""
    window = DeviceArray(4096, (2, 3), code, None)
    shown = np.dtype(window.__cuda_array_interface__["typestr"])
    kind = NUMPY_DTYPE[code]
    assert shown == kind if kind.isbuiltin == 1 else (shown.kind, shown.itemsize) == ("u", kind.itemsize)
    assert view(window) == DeviceMemory(4096, 6, code)
    assert memory.kinds == {}


def test_doors_are_told_what_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jax(Packed):
        pass

    Jax.__module__ = "jaxlib.something"
    good = np.zeros(4, np.float32)
    for wrong in (Described(typestr="<c8"), Packed(np.zeros(8, np.float32)[::2]), None, good):
        with pytest.raises(InvalidUsage):
            view(wrong)
    assert memory.kinds == {}
    view(Described())
    view(Packed(good))
    assert view(Jax(good)).read_only
    want = {Described: Kind(dlpack=False), Packed: Kind(dlpack=True), Jax: Kind(dlpack=True, immutable=True)}
    assert memory.kinds == want
    for number in range(at.MOST_KINDS):
        view(type(f"Kind{number}", (Described,), {})())
    assert len(memory.kinds) == at.MOST_KINDS
