"""Fast calls and CuPy arrays: the attributes that are read, and the calls left to the slow path.

The arrays are in CPU memory here.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import miraccl
from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.fastpath.cuda import table
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank, torch_with_exchange_api

F32, I64 = DType.FLOAT32, DType.INT64


class FakeMemoryPointer:
    """Like CuPy's ``MemoryPointer``."""

    def __init__(self, ptr: Any, device_id: Any) -> None:
        self.ptr, self.device_id = ptr, device_id


class FakeCupyArray:
    """Array as fast calls read CuPy's; invalid attributes are read as well."""

    __slots__ = ("_c_contiguous", "array", "data", "dtype", "size")

    def __init__(self, array: np.ndarray, device: Any = 0, **wrong: Any) -> None:
        self.array, self.size, self.dtype = array, array.size, array.dtype
        self._c_contiguous = array.flags.c_contiguous
        self.data = FakeMemoryPointer(array.ctypes.data, device)
        for name, value in wrong.items():
            setattr(self, name, value)


def pretended() -> tuple[Any, Callable[..., Any]]:
    """A library like CuPy, and a constructor of its arrays."""
    return types.SimpleNamespace(ndarray=FakeCupyArray), FakeCupyArray


def real() -> tuple[Any, Callable[..., Any]]:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

    def make(array: np.ndarray, device: int = 0) -> Any:
        base = array if array.base is None else array.base
        memory = cupy.cuda.UnownedMemory(base.ctypes.data, base.nbytes, base, device)
        pointer = cupy.cuda.MemoryPointer(memory, array.ctypes.data - base.ctypes.data)
        return cupy.ndarray(array.shape, array.dtype, pointer, array.strides)

    return cupy, make


class Without(FastPathRank):
    """Rank in a process without PyTorch: a Python function returns streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
        monkeypatch.setattr(table, "sys", types.SimpleNamespace(modules={"cupy": cupy}))
        super().__init__()
        self.stream: Any = 0
        self.asked: list[int] = []
        self.fast_path.set_stream_query(self.ask)
        self.fast_path.set_cupy_stream_query(self.ask)

    def ask(self, ordinal: int) -> Any:
        self.asked.append(ordinal)
        if isinstance(self.stream, BaseException):
            raise self.stream
        return self.stream


@pytest.fixture(params=[pretended, real])
def library(request: pytest.FixtureRequest) -> tuple[Any, Callable[..., Any]]:
    made: tuple[Any, Callable[..., Any]] = request.param()
    return made


@pytest.fixture
def make(library: tuple[Any, Callable[..., Any]]) -> Callable[..., Any]:
    return library[1]


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch, library: tuple[Any, Callable[..., Any]]) -> Without:
    return Without(monkeypatch, library[0])


def zeros(count: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(count, dtype)


def test_arrays_find_the_launch(side: Without, make: Callable[..., Any]) -> None:
    host, out, both = zeros(24), zeros(12), zeros(24)
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.add_collective(Collective.ALL_GATHER, F32, 12)
    side.add_collective(Collective.REDUCE, F32, 12, RedOp.MAX, 1)
    for part in (host[:12], host[12:], host[5:17].reshape(3, 4), host[3:15].reshape(1, 12, 1)):
        assert side.all_reduce(make(part)) == 0
        assert side.driver.seen[-1] == (12, 0, *SHAPE, 0, part.ctypes.data, part.ctypes.data)
    assert side.all_reduce(make(host[:12]), make(out)) == 0
    assert side.driver.seen[-1][-2:] == (host.ctypes.data, out.ctypes.data)
    assert side.all_gather(make(out), make(both)) == 0
    assert side.driver.seen[-1][-2:] == (out.ctypes.data, both.ctypes.data)
    assert side.reduce(make(out), 1, op=RedOp.MAX) == 0
    assert side.all_reduce(make(host[:12]), make(host[6:18])) == 1
    assert side.all_reduce(make(host[:11])) == side.all_reduce(make(zeros(12, np.int32))) == 1
    assert set(side.asked) == {0}
    assert len(side.driver.seen) == 7


@pytest.mark.parametrize("code", list(DType))
def test_every_type_is_supported(side: Without, make: Callable[..., Any], code: DType) -> None:
    side.add_collective(Collective.ALL_REDUCE, code, 8)
    for other in DType:
        assert side.all_reduce(make(zeros(8, NUMPY_DTYPE[other]))) == int(other is not code)


def test_arrays_left_to_the_slow_path(side: Without, make: Callable[..., Any]) -> None:
    kind = type(make(zeros(12)))
    wrong = [
        make(zeros(24)[::2]),
        make(zeros(12).reshape(3, 4).T),
        make(zeros(12, np.complex64)),
        make(zeros(12, np.bool_)),
        make(zeros(12, np.int64).view(np.longlong)),
        make(zeros(12), 1),
        make(zeros(13).view(np.uint8)[1:49].view(np.float32)),
        make(zeros(0)),
        np.zeros(12, np.float32),
        kind,
        None,
    ]
    wrong.append(make(np.zeros(12, ">f4")) if kind is FakeCupyArray else None)
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.add_collective(Collective.ALL_REDUCE, I64, 12)
    side.add_messages(3, (False, 1, 12, F32), (True, 1, 12, F32))
    x = make(zeros(12))
    for thing in wrong:
        assert (
            side.all_reduce(thing)
            == side.send(thing)
            == side.sendrecv(thing, x)
            == side.sendrecv(x, thing)
            == 1
        )
        assert side.all_reduce(x, thing) == 1 or thing is None
    side.driver.seen.clear()
    assert side.all_reduce(x) == side.sendrecv(x, make(zeros(12))) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": None},
        {"size": -1},
        {"size": 1 << 70},
        {"size": "12"},
        {"dtype": "float32"},
        {"_c_contiguous": 0},
        {"_c_contiguous": None},
        {"data": None},
        {"data": FakeMemoryPointer(None, 0)},
        {"data": FakeMemoryPointer(-8, 0)},
        {"data": FakeMemoryPointer(0, 0)},
        {"data": FakeMemoryPointer(64, 0)},  # an offset into memory that is no more
        {"data": FakeMemoryPointer(1 << 40, None)},
        {"data": FakeMemoryPointer(1 << 40, 1 << 32)},
    ],
)
def test_attributes_of_other_types(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]) -> None:
    """A CuPy version with other attributes takes the slow path and leaves no exception behind."""
    side = Without(monkeypatch, pretended()[0])
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    bad = FakeCupyArray(zeros(12), **wrong)
    assert side.all_reduce(bad) == side.all_reduce(FakeCupyArray(zeros(12)), bad) == 1
    for name in wrong:
        delattr(bad, name)
    assert side.all_reduce(bad) == side.send(bad) == 1
    assert side.all_reduce(FakeCupyArray(zeros(12))) == 0


def test_a_library_without_these_attributes_takes_the_slow_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other:
        size = dtype = data = None

    side = Without(monkeypatch, types.SimpleNamespace(ndarray=Other))
    assert side.all_reduce(Other()) == 1


def test_the_stream_is_queried(side: Without, make: Callable[..., Any]) -> None:
    x = make(zeros(12))
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    for wrong in (5, None, "0", -1, 1 << 70, ZeroDivisionError()):
        side.stream = wrong
        assert side.all_reduce(x) == 1
    assert len(side.asked) == 6
    side.fast_path.stream = side.stream = 5
    assert side.all_reduce(x) == 0
    assert side.driver.seen[-1][-3] == 5
    assert side.all_reduce(x, stream=5) == 0
    assert len(side.asked) == 7


def test_exceptions_that_end_programs_propagate(side: Without, make: Callable[..., Any]) -> None:
    """Such as a signal handler that runs during the stream query."""
    x, out = make(zeros(12)), make(zeros(24))
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.stream = KeyboardInterrupt()
    for call in (
        lambda: side.all_reduce(x),
        lambda: side.send(x),
        lambda: side.sendrecv(x, out),
        lambda: side.calls["gather"](x, out, 0, None, None, False, None),
        lambda: side.calls["reduce_scatter_v"](out, x, RedOp.SUM, False, None, [12, 12]),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
    side.stream = 0
    assert side.all_reduce(x) == 0
    assert len(side.driver.seen) == 1


def test_arrays_in_groups(side: Without, make: Callable[..., Any]) -> None:
    x, y = zeros(12), zeros(7, np.int64)
    side.add_messages(4, (False, 1, 12, F32), (True, 1, 7, I64), (True, 0, 12, F32))
    with miraccl.group():
        assert side.send(make(x)) == side.recv(make(y)) == side.recv(make(x), 0) == 0
    assert side.driver.seen == [(4, 0, *SHAPE, 0, x.ctypes.data, y.ctypes.data, x.ctypes.data)]


def test_an_empty_array_overlaps_nothing(side: Without, make: Callable[..., Any]) -> None:
    """Unlike PyTorch's, empty CuPy arrays have an address."""
    whole = zeros(12)
    side.add_messages(
        1, (True, 1, 12, F32), signature=op_signature(Collective.ALL_GATHER, counts=(0, 12))
    )
    for first in range(13):
        assert (
            side.calls["all_gather_v"](
                make(whole[first:first]), make(whole), None, None, [0, 12], False, None
            )
            == 0
        )
        assert side.driver.seen.pop()[-1] == whole.ctypes.data


def test_references_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    side, size, ptr = Without(monkeypatch, pretended()[0]), 100_000, zeros(100_000).ctypes.data
    side.add_collective(Collective.ALL_REDUCE, F32, size)
    memory = FakeMemoryPointer(ptr, 0)
    good = FakeCupyArray(zeros(size), size=size, data=memory)
    bad = FakeCupyArray(zeros(size), size=size, data=FakeMemoryPointer(ptr + 1, 0))
    watched = (size, ptr, memory, good.dtype, good, side.ask)
    counts = [sys.getrefcount(thing) for thing in watched]
    for _ in range(100):
        assert side.all_reduce(good) == 0
        assert side.all_reduce(bad) == 1
    side.asked.clear()
    assert [sys.getrefcount(thing) for thing in watched] == counts


# ---- beside PyTorch


def test_tensors_and_arrays(
    monkeypatch: pytest.MonkeyPatch, library: tuple[Any, Callable[..., Any]]
) -> None:
    """In any import order: one launch table, and each array in its library's current stream.

    Compiled code queries PyTorch's stream if PyTorch was known at the first operation.
    """
    torch = torch_with_exchange_api()
    cupy, make = library
    modules: dict[str, Any] = {}
    monkeypatch.setattr(table, "sys", types.SimpleNamespace(modules=modules))
    asked: list[str] = []

    def ask(name: str, ordinal: int) -> int:
        asked.append(name)
        return 0

    tensor, array = torch.zeros(12), make(zeros(12))
    for first, second in (("torch", "cupy"), ("cupy", "torch")):
        things = {"torch": tensor, "cupy": array}
        modules.clear()
        asked.clear()
        side = FastPathRank()
        side.add_collective(Collective.ALL_REDUCE, F32, 12)
        assert side.all_reduce(tensor) == side.all_reduce(array) == 1
        side.fast_path.set_cupy_stream_query(functools.partial(ask, "cupy"))
        modules[first] = types.SimpleNamespace()  # which is being imported
        side.fast_path.detect_array_types()
        modules[first] = {"torch": torch, "cupy": cupy}[first]
        side.fast_path.detect_array_types()
        side.fast_path.set_stream_query(functools.partial(ask, "torch"))
        assert side.all_reduce(things[first]) == 0
        assert side.all_reduce(things[second]) == 1
        modules[second] = {"torch": torch, "cupy": cupy}[second]
        side.fast_path.detect_array_types()
        assert (
            side.all_reduce(tensor)
            == side.all_reduce(array)
            == side.all_reduce(tensor, make(zeros(12)))
            == 0
        )
        assert set(asked) == ({"cupy"} if first == "torch" else {"cupy", "torch"})


def test_arrays_use_the_stream_of_their_library(
    monkeypatch: pytest.MonkeyPatch, library: tuple[Any, Callable[..., Any]]
) -> None:
    """The library of the first array that is used."""
    torch, (cupy, make) = torch_with_exchange_api(), library
    monkeypatch.setattr(table, "sys", types.SimpleNamespace(modules={"torch": torch, "cupy": cupy}))
    side, tensor, array, blocks = FastPathRank(), torch.zeros(12), make(zeros(12)), make(zeros(24))
    side.fast_path.set_cupy_stream_query(lambda ordinal: 5)
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.add_messages(1, (False, 1, 12, F32))
    side.add_messages(2, (False, 1, 12, F32), (True, 1, 12, F32))
    side.add_messages(
        3, (True, 1, 12, F32), signature=op_signature(Collective.SCATTER, 1, (12, 12))
    )
    side.add_messages(
        4, (False, 1, 12, F32), signature=op_signature(Collective.GATHER, 1, (12, 12))
    )
    calls: list[Callable[[], int]] = [
        lambda: side.all_reduce(array, tensor),
        lambda: side.send(array),
        lambda: side.sendrecv(array, tensor),
        lambda: side.calls["scatter"](None, array, 1, None, None, False, None),
        lambda: side.calls["gather"](array, None, 1, None, None, False, None),
        lambda: side.calls["reduce_scatter_v"](blocks, array, RedOp.SUM, False, None, [12, 12]),
    ]
    assert [call() for call in calls] == [1] * len(
        calls
    )  # the last operation was in stream 0; no event orders streams
    assert side.all_reduce(tensor, array) == 0
    side.fast_path.stream = 5
    assert side.all_reduce(tensor, array) == 1
    side.add_collective(Collective.REDUCE_SCATTER, F32, 12)
    assert [call() for call in calls] == [0] * len(calls)
    assert side.all_reduce(tensor, stream=5) == 0


# ---- slow path


def test_types_without_a_numpy_code() -> None:
    """CuPy arrays of bfloat16 have typestr "<V2"; other byte orders are not numbers."""
    from miraccl.errors import InvalidUsage
    from miraccl.ops.device_arrays import device_view

    class Other:
        def __init__(self, dtype: Any) -> None:
            self.dtype = np.dtype(dtype)

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {"shape": (4,), "typestr": self.dtype.str, "data": (4096, False), "version": 3}

    for code, dtype in NUMPY_DTYPE.items():
        assert device_view(Other(dtype), "x", "a test").dtype is code
    for wrong in (">f4", "V2", np.complex64, ml_dtypes.float8_e4m3fnuz):
        with pytest.raises(InvalidUsage, match="x has type"):
            device_view(Other(wrong), "x", "a test")
