"""Fast calls and arrays read by a protocol: what every call reads, what is retained, and the slow
path.

The arrays are NumPy's, in CPU memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.executor.cuda import fast_call_layout
from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.fastpath.cuda.foreign_types import ArrayProtocol, foreign_record
from miraccl.native.capsules import pointer_of
from miraccl.runtime import group as groups
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, DType, RedOp
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank

F32, I64 = DType.FLOAT32, DType.INT64


class InterfaceArray:
    """Array with ``__cuda_array_interface__``; ``said`` replaces entries."""

    def __init__(self, array: np.ndarray, **said: Any) -> None:
        self.array, self.said = array, said
        self.asked: Callable[[], Any] = lambda: None

    @property
    def __cuda_array_interface__(self) -> Any:
        self.asked()
        given = self.array.__array_interface__
        usual = {
            "shape": given["shape"],
            "typestr": given["typestr"],
            "data": given["data"],
            "strides": given["strides"],
            "version": 3,
        }
        return {name: value for name, value in (usual | self.said).items() if value is not Ellipsis}


class DlpackArray:
    """Array with DLPack only; counts live capsules."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[Any] = []
        self._exported: list[Any] = []
        self.asked: Callable[[], Any] = lambda: None

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.asked()
        self.streams.append(stream)
        return self.capsule(max_version=max_version)

    def capsule(self, **options: Any) -> Any:
        """Return a capsule of a new array, which lives as long."""
        array = self.array.view()
        self._exported.append(weakref.ref(array))
        return array.__dlpack__(**options)

    @property
    def capsules(self) -> int:
        return sum(array() is not None for array in self._exported)


class Subclass(InterfaceArray, DlpackArray):
    pass


@pytest.fixture
def side() -> FastPathRank:
    made = FastPathRank()
    made.fast_path.add_foreign_types(
        {InterfaceArray: ArrayProtocol(dlpack=False), DlpackArray: ArrayProtocol(dlpack=True)}
    )
    made.stream = 0  # type: ignore[attr-defined]
    made.fast_path.set_stream_query(lambda ordinal: made.stream)  # type: ignore[attr-defined]
    made.fast_path._write(fast_call_layout.STATE_CURRENT, 0)
    made.add_collective(Collective.ALL_REDUCE, F32, 12)
    return made


def zeros(count: int = 12, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(count, dtype)


def frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


both = pytest.mark.parametrize("make", [InterfaceArray, DlpackArray])


# ---- both protocols


@both
def test_arrays_find_the_launch(side: FastPathRank, make: Any) -> None:
    host, out, whole = zeros(24), zeros(), zeros(24)
    side.add_collective(Collective.ALL_GATHER, F32, 12)
    side.add_collective(Collective.REDUCE_SCATTER, F32, 12)
    side.add_collective(Collective.BROADCAST, F32, 12, root=1)
    side.add_messages(1, (False, 1, 12, F32))
    side.add_messages(
        3, (False, 1, 12, F32), signature=op_signature(Collective.GATHER, 1, (12, 12))
    )
    side.add_messages(2, (False, 1, 12, F32), (True, 1, 12, F32))
    for part in (host[:12], host[12:], host[5:17].reshape(3, 4), host[3:15].reshape(1, 12, 1)):
        assert side.all_reduce(make(part)) == 0
        assert side.driver.seen[-1] == (12, 0, *SHAPE, 0, part.ctypes.data, part.ctypes.data)
    assert side.all_reduce(make(out), make(host[12:])) == 0
    assert side.driver.seen[-1][-2:] == (out.ctypes.data, host[12:].ctypes.data)
    assert (
        side.all_gather(make(out), make(whole))
        == side.reduce_scatter(make(whole), make(out), RedOp.SUM)
        == 0
    )
    assert side.driver.seen[-1][-2:] == (whole.ctypes.data, out.ctypes.data)
    assert side.broadcast(make(out), 1) == 0
    assert side.send(make(host[2:14])) == side.sendrecv(make(host[:12]), make(host[12:])) == 0
    assert side.driver.seen[-1][-2:] == (host[12:].ctypes.data, host.ctypes.data)
    assert side.calls["gather"](make(out), None, 1, None, None, False, None) == 0
    assert (
        side.calls["reduce_scatter_v"](make(whole), make(out), RedOp.SUM, False, None, [12, 12])
        == 0
    )
    seen = len(side.driver.seen)
    assert (
        side.all_reduce(make(zeros(11)))
        == side.all_reduce(make(zeros(12, np.int32)))
        == side.all_reduce(make(host[::2]))
        == 1
    )
    assert (
        side.all_reduce(make(host[:12].reshape(3, 4).T))
        == side.all_reduce(make(zeros(0)))
        == side.send(make(zeros(0)))
        == 1
    )
    assert (
        side.all_reduce(make(host[:12]), make(host[6:18]))
        == side.all_reduce(make(host[:12]), make(zeros(12, np.int32)))
        == 1
    )
    assert side.sendrecv(make(host[:12]), make(host[6:18])) == 1
    assert side.all_reduce(make(zeros(13).view(np.uint8)[1:49].view(np.float32))) == 1
    assert len(side.driver.seen) == seen


@both
def test_read_only_arrays_are_not_written(side: FastPathRank, make: Any) -> None:
    x, out = frozen(zeros()), zeros()
    for root in range(2):
        side.add_collective(Collective.BROADCAST, F32, 12, root=root)
        side.add_collective(Collective.REDUCE, F32, 12, RedOp.SUM, root)
    side.add_collective(Collective.REDUCE_SCATTER, F32, 12)
    for receives in (False, True):
        side.add_messages(1 + receives, (receives, 1, 12, F32))
    side.add_messages(3, (False, 1, 12, F32), (True, 1, 12, F32))
    gathered = op_signature(Collective.GATHER, 0, (12, 12))
    side.add_messages(
        4, (False, 0, 12, F32), (True, 0, 12, F32), (True, 1, 12, F32), signature=gathered
    )
    assert (
        side.all_reduce(make(x), make(out))
        == side.send(make(x))
        == side.sendrecv(make(x), make(out))
        == 0
    )
    assert (
        side.broadcast(make(x), 0)
        == side.reduce(make(x), 1)
        == side.reduce(make(x), 0, make(out))
        == 0
    )
    seen = len(side.driver.seen)
    assert (
        side.all_reduce(make(x))
        == side.all_reduce(make(out), make(x))
        == side.recv(make(x))
        == side.sendrecv(make(out), make(x))
        == 1
    )
    assert (
        side.broadcast(make(x), 1)
        == side.reduce(make(x), 0)
        == side.reduce(make(out), 0, make(x))
        == 1
    )
    assert side.calls["gather"](make(out), make(frozen(zeros(24))), 0, None, None, False, None) == 1
    assert (
        side.calls["reduce_scatter_v"](make(zeros(24)), make(x), RedOp.SUM, False, None, [12, 12])
        == 1
    )
    assert len(side.driver.seen) == seen
    assert side.calls["gather"](make(out), make(zeros(24)), 0, None, None, False, None) == 0
    assert (
        side.calls["reduce_scatter_v"](make(zeros(24)), make(out), RedOp.SUM, False, None, [12, 12])
        == 0
    )


@both
def test_only_registered_types_are_read(side: FastPathRank, make: Any) -> None:
    def never() -> None:
        raise AssertionError

    for thing in (
        Subclass(zeros()),
        object.__new__(make),
        types.SimpleNamespace(),
        make,
        None,
        zeros(),
    ):
        if isinstance(thing, Subclass):
            thing.asked = never
        assert side.all_reduce(thing) == side.send(thing) == 1
    many = {
        type(f"ArrayProtocol{number}", (make,), {}): ArrayProtocol(dlpack=make is DlpackArray)
        for number in range(fast_call_layout.MAX_FOREIGN_TYPES)
    }
    side.fast_path.add_foreign_types(
        {InterfaceArray: ArrayProtocol(dlpack=False), DlpackArray: ArrayProtocol(dlpack=True)}
        | many
    )
    taken = [side.all_reduce(kind(zeros())) for kind in many]
    assert taken == [0] * (fast_call_layout.MAX_FOREIGN_TYPES - 2) + [1] * 2  # as many as fit


def test_registered_types_are_kept_alive() -> None:
    """A type's address must not be reused by another type."""
    side = FastPathRank()
    kind = type("Short", (InterfaceArray,), {})
    alive = weakref.ref(kind)
    side.fast_path.add_foreign_types({kind: ArrayProtocol(dlpack=False)})
    del kind
    gc.collect()
    assert alive() is not None


def test_types_may_be_added_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may be threads, which share the types."""
    side = FastPathRank()
    kinds: dict[type, ArrayProtocol] = {InterfaceArray: ArrayProtocol(dlpack=False)}

    def add(kind: type, how: ArrayProtocol) -> Any:
        kinds[DlpackArray] = ArrayProtocol(dlpack=True)
        return foreign_record(kind, how)

    monkeypatch.setattr("miraccl.fastpath.cuda.table.foreign_record", add)
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.fast_path.add_foreign_types(kinds)
    assert (
        side.all_reduce(InterfaceArray(zeros()), stream=0),
        side.all_reduce(DlpackArray(zeros()), stream=0),
    ) == (0, 1)
    side.fast_path.add_foreign_types(kinds)
    assert (
        side.all_reduce(InterfaceArray(zeros()), stream=0),
        side.all_reduce(DlpackArray(zeros()), stream=0),
    ) == (0, 0)


@both
@pytest.mark.parametrize("error", [AttributeError, ValueError, BufferError])
def test_arrays_that_raise_take_the_slow_path(
    side: FastPathRank, make: Any, error: type[Exception]
) -> None:
    """For example deleted arrays. No exception is left behind."""
    x, good = make(zeros()), make(zeros())

    def refuse() -> None:
        raise error

    x.asked = refuse
    assert (
        side.all_reduce(x)
        == side.all_reduce(good, x)
        == side.send(x)
        == side.sendrecv(good, x)
        == 1
    )
    assert side.all_reduce(good) == 0


@both
def test_exceptions_that_end_programs_propagate(side: FastPathRank, make: Any) -> None:
    x, good = make(zeros()), make(zeros())

    def interrupt() -> None:
        raise KeyboardInterrupt

    x.asked = interrupt
    for call in (
        lambda: side.all_reduce(x),
        lambda: side.all_reduce(good, x),
        lambda: side.sendrecv(good, x),
        lambda: side.recv(x),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
    with pytest.raises(KeyboardInterrupt):
        side.calls["gather"](x, zeros(24), 0, None, None, False, None)
    assert side.all_reduce(good) == 0
    assert len(side.driver.seen) == 1


@both
def test_protocols_that_call_operations(side: FastPathRank, make: Any) -> None:
    """An array may compute its protocol and call operations.

    Fast calls handle none of these, and the outer call is correct unless they changed the stream.
    """
    x, out, other = make(zeros()), make(zeros()), make(zeros())
    answers: list[int] = []

    def compute() -> None:
        answers.extend(
            (side.all_reduce(other), side.send(other), side.sendrecv(other, make(zeros())))
        )

    x.asked = out.asked = compute
    assert side.all_reduce(x, out) == 0
    assert answers == [1] * 6
    assert side.driver.seen == [(12, 0, *SHAPE, 0, x.array.ctypes.data, out.array.ctypes.data)]

    def go_elsewhere() -> None:
        side.fast_path.stream = 5

    out.asked = go_elsewhere
    assert side.all_reduce(x, out) == 1
    assert len(side.driver.seen) == 1


@both
def test_the_stream_is_checked_before_the_array(side: FastPathRank, make: Any) -> None:
    """The previous stream may be gone: nothing may wait in it if it is not this call's."""
    x = make(zeros())

    def never() -> None:
        raise AssertionError

    x.asked = never
    assert (
        side.all_reduce(x, stream=5)
        == side.send(x, stream=5)
        == side.all_reduce(x, stream=None, op=None)
        == 1
    )
    side.stream = 7  # type: ignore[attr-defined]
    assert (
        side.all_reduce(x)
        == side.sendrecv(x, x)
        == side.calls["all_gather_v"](x, x, None, None, [12, 0], False, None)
        == 1
    )
    side.abort.value = 1
    assert side.all_reduce(x, stream=0) == 1


def test_without_driver_functions_no_array_is_read(side: FastPathRank) -> None:
    side.fast_path.set_driver_functions(0, 0)
    assert side.all_reduce(InterfaceArray(zeros())) == side.all_reduce(DlpackArray(zeros())) == 1


# ---- __cuda_array_interface__


@pytest.mark.parametrize("code", list(DType))
def test_every_type_of_the_interface(side: FastPathRank, code: DType) -> None:
    side.add_collective(Collective.ALL_REDUCE, code, 8)
    dtype = NUMPY_DTYPE[code]
    assert side.all_reduce(InterfaceArray(zeros(8, dtype), typestr=dtype.str)) == int(
        dtype.isbuiltin != 1
    )
    assert side.all_reduce(InterfaceArray(zeros(8, dtype), typestr=dtype.name)) == int(
        dtype.isbuiltin == 1
    )  # where it has no code
    for other in DType:
        for text in (NUMPY_DTYPE[other].str, NUMPY_DTYPE[other].name):
            assert (
                side.all_reduce(InterfaceArray(zeros(8, NUMPY_DTYPE[other]), typestr=text)) == 1
                or other is code
            )
    assert side.all_reduce(InterfaceArray(zeros(8, np.bool_))) == 1


@pytest.mark.parametrize(
    "said",
    [
        {"shape": (13,)},
        {"shape": (3, 5)},
        {"shape": [12]},
        {"shape": (np.int64(12),)},
        {"shape": (True, 12)},
        {"shape": (-12,)},
        {"shape": (1 << 70,)},
        {"shape": (1 << 32, 1 << 32, 12)},
        {"shape": (4, 3 + (1 << 62))},
        {"shape": ...},
        {"shape": None},
        {"strides": (8,)},
        {"strides": (-4,)},
        {"strides": (4, 4)},
        {"strides": [4]},
        {"strides": (4.0,)},
        {"typestr": ">f4"},
        {"typestr": "<f8"},
        {"typestr": "<c8"},
        {"typestr": "<V4"},
        {"typestr": "|b1"},
        {"typestr": b"<f4"},
        {"typestr": np.dtype("f4")},
        {"typestr": ...},
        {"data": (4098, False)},
        {"data": (0, False)},
        {"data": (None, False)},
        {"data": (-4096, False)},
        {"data": (1 << 70, False)},
        {"data": (4096,)},
        {"data": (4096, 0)},
        {"data": (4096, None)},
        {"data": [4096, False]},
        {"data": ...},
        {"mask": np.ones(12, np.bool_)},
        {"stream": 5},
        {"stream": 2},
        {"stream": -1},
        {"stream": "1"},
        {"stream": 1 << 70},
    ],
    ids=str,
)
def test_interfaces_left_to_the_slow_path(side: FastPathRank, said: dict[str, Any]) -> None:
    good, bad = InterfaceArray(zeros()), InterfaceArray(zeros(), **said)
    side.add_messages(1, (False, 1, 12, F32), (True, 1, 12, F32))
    assert (
        side.all_reduce(bad)
        == side.all_reduce(good, bad)
        == side.sendrecv(good, bad)
        == side.sendrecv(bad, good)
        == 1
    )
    assert not side.driver.seen
    bad.said = {}
    assert side.all_reduce(bad) == 0


def test_an_interface_that_is_not_a_dictionary(side: FastPathRank) -> None:
    class Sized(dict[str, Any]):
        pass

    for other in (
        None,
        5,
        Sized(InterfaceArray(zeros()).__cuda_array_interface__),
        list(InterfaceArray(zeros()).__cuda_array_interface__.items()),
    ):
        kind = type("Other", (), {"__cuda_array_interface__": other})
        apart = FastPathRank()
        apart.add_collective(Collective.ALL_REDUCE, F32, 12)
        apart.fast_path.add_foreign_types({kind: ArrayProtocol(dlpack=False)})
        assert apart.all_reduce(kind(), stream=0) == 1


def test_optional_entries_of_an_interface(side: FastPathRank) -> None:
    nothing: tuple[dict[str, Any], ...] = (
        {"strides": None},
        {"strides": ...},
        {"stream": None},
        {"mask": None},
        {"version": ...},
    )
    for said in (*nothing, {"strides": (4,)}, {"descr": [("", "<f4")]}):
        assert side.all_reduce(InterfaceArray(zeros(), **said)) == 0
    assert (
        side.all_reduce(InterfaceArray(zeros(), shape=(1, 12, 1), strides=(77, 4, 0))) == 0
    )  # steps along axes of one


def test_the_driver_provides_the_gpu_of_an_address(side: FastPathRank) -> None:
    x, out = InterfaceArray(zeros()), InterfaceArray(zeros())
    assert side.all_reduce(x, out) == 0
    for ordinal in (1, -1, None):
        side.driver.ordinals[out.array.ctypes.data] = ordinal
        assert side.all_reduce(x, out) == side.all_reduce(out) == 1
    side.driver.ordinals.clear()  # the same address may be memory of another GPU at any time
    assert side.all_reduce(x, out) == side.all_reduce(out) == 0


def test_an_interface_with_the_stream_of_the_operation(side: FastPathRank) -> None:
    """1 is the legacy default stream."""
    x = InterfaceArray(zeros(), stream=1)
    assert side.all_reduce(x) == 0
    side.fast_path.stream = side.stream = 1  # type: ignore[attr-defined]
    assert side.all_reduce(x) == 0
    x.said = {"stream": 77}
    assert side.all_reduce(x) == 1
    side.fast_path.stream = side.stream = 77  # type: ignore[attr-defined]
    assert side.all_reduce(x) == side.all_reduce(InterfaceArray(zeros())) == 0
    x.said = {"stream": 1}
    assert side.all_reduce(x) == 1


def test_interfaces_in_groups(side: FastPathRank) -> None:
    side.add_messages(4, (False, 1, 12, F32), (True, 1, 7, I64))
    arrays = [zeros(), zeros(7, np.int64)]
    want = [array.ctypes.data for array in arrays]
    alive = [weakref.ref(array) for array in arrays]
    with miraccl.group():
        assert side.send(InterfaceArray(arrays[0])) == side.recv(InterfaceArray(arrays[1])) == 0
        assert side.recv(InterfaceArray(frozen(zeros(7, np.int64)))) == 1
        del arrays
        assert all(array() is not None for array in alive)
        side.handed_over.clear()
    assert side.driver.seen == [(4, 0, *SHAPE, 0, *reversed(want))]
    assert all(array() is None for array in alive)


def test_references_of_interfaces_are_released(side: FastPathRank) -> None:
    x, bad = InterfaceArray(zeros()), InterfaceArray(zeros(), data=(4098, False))
    interface, wrong = x.__cuda_array_interface__, bad.__cuda_array_interface__

    class Constant:
        pass

    good, other = Constant(), Constant()
    good.__cuda_array_interface__ = interface  # type: ignore[attr-defined]
    other.__cuda_array_interface__ = wrong  # type: ignore[attr-defined]
    side.fast_path.add_foreign_types(
        {
            InterfaceArray: ArrayProtocol(dlpack=False),
            DlpackArray: ArrayProtocol(dlpack=True),
            Constant: ArrayProtocol(dlpack=False),
        }
    )
    watched = (
        interface,
        wrong,
        interface["data"],
        interface["shape"],
        interface["typestr"],
        good,
        other,
    )
    counts = [sys.getrefcount(thing) for thing in watched]
    for _ in range(100):
        assert side.all_reduce(good) == 0
        assert side.all_reduce(other) == 1
    assert [sys.getrefcount(thing) for thing in watched] == counts


# ---- DLPack


def test_the_producer_receives_the_stream(side: FastPathRank) -> None:
    x = DlpackArray(zeros())
    for stream in (0, 1, 2, 77):
        side.fast_path.stream = side.stream = stream  # type: ignore[attr-defined]
        assert side.all_reduce(x) == 0
    assert x.streams == [1, 1, 2, 77]


def test_capsules_are_retained_until_they_are_handed_over(side: FastPathRank) -> None:
    x, out = DlpackArray(zeros()), DlpackArray(zeros())
    assert (x.capsules, out.capsules) == (0, 0)
    for number in range(1, fast_call_layout.MAX_RETAINED // 2):
        assert side.all_reduce(x, out) == 0
        assert (x.capsules, out.capsules) == (number, number)
    assert not side.retained
    assert side.all_reduce(x, out) == 0
    ((objects, stream),) = side.retained
    assert (len(objects), stream) == (fast_call_layout.MAX_RETAINED, 0)
    assert side.fast_path.retained == []
    assert x.capsules == out.capsules == fast_call_layout.MAX_RETAINED // 2
    side.retained.clear()
    del objects
    assert x.capsules == out.capsules == 0
    assert side.all_reduce(x) == 0
    assert x.capsules == 1
    side.fast_path.release()
    assert len(side.retained) == 1
    side.fast_path.release()
    assert len(side.retained) == 1


def test_much_memory_is_handed_over_at_once(side: FastPathRank) -> None:
    count = fast_call_layout.MAX_RETAINED_BYTES // 4
    side.add_collective(Collective.ALL_REDUCE, F32, count)
    side.add_collective(Collective.ALL_REDUCE, F32, count - 1)
    assert side.all_reduce(DlpackArray(zeros(count - 1))) == 0
    assert not side.retained
    assert side.all_reduce(DlpackArray(zeros())) == 0
    assert [len(objects) for objects, _ in side.retained] == [2]
    assert side.all_reduce(DlpackArray(zeros(count))) == 0
    assert [len(objects) for objects, _ in side.retained] == [2, 1]
    assert side.all_reduce(DlpackArray(zeros())) == 0
    assert len(side.retained) == 2


def test_capsules_are_handed_over_with_their_stream(side: FastPathRank) -> None:
    x = DlpackArray(zeros())
    assert side.all_reduce(x) == side.all_reduce(x) == 0
    side.fast_path.stream = side.stream = 5  # type: ignore[attr-defined]
    assert side.all_reduce(x) == 0
    assert [(len(objects), stream) for objects, stream in side.retained] == [(2, 0)]
    side.fast_path.release()
    assert [(len(objects), stream) for objects, stream in side.retained] == [(2, 0), (1, 5)]


def test_a_stream_switch_releases_retained_capsules(side: FastPathRank) -> None:
    """The application may destroy it then."""
    record, wait = (
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
        ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 3),
    )
    ask, current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int64)), [7]
    calls = (
        record(lambda event, stream: 0),
        wait(lambda stream, event, flags: 0),
        ask(lambda place: place.__setitem__(0, current[0]) or 0),
    )
    side.fast_path.enable_stream_switches(
        1, [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls], context=7
    )
    x = DlpackArray(zeros())
    assert (side.all_reduce(x, stream=0), len(side.fast_path.retained)) == (0, 1)
    assert (side.all_reduce(x, stream=5), side.fast_path.stream) == (1, 0)
    side.fast_path.release()
    current[0] = 8  # context of another GPU, to which stream 0 would belong
    assert (side.all_reduce(x, stream=5), side.fast_path.stream) == (1, 0)
    current[0] = 7
    assert (side.all_reduce(x, stream=5), side.fast_path.stream) == (0, 5)
    assert [(len(objects), stream) for objects, stream in side.retained] == [(1, 0)]


def test_capsules_of_unhandled_calls_are_released(side: FastPathRank) -> None:
    x, odd, unknown = DlpackArray(zeros()), DlpackArray(zeros(24)[::2]), DlpackArray(zeros(13))
    assert (
        side.all_reduce(odd)
        == side.all_reduce(unknown)
        == side.all_reduce(x, unknown)
        == side.all_reduce(x, odd)
        == 1
    )
    assert side.send(x) == side.sendrecv(x, odd) == side.all_reduce(x, None, RedOp.MAX) == 1
    side.driver._codes = (700,)
    assert side.all_reduce(x, DlpackArray(zeros())) == 1
    assert x.capsules == odd.capsules == unknown.capsules == 0
    assert side.fast_path.retained == []
    assert side.all_reduce(x) == 0
    assert x.capsules == 1


def test_a_failed_hand_over_raises(side: FastPathRank) -> None:
    """The operation is running, so its input stays alive."""

    def refuse(objects: list[Any], stream: int) -> None:
        raise ZeroDivisionError

    side.fast_path._retain = refuse
    x = DlpackArray(zeros())
    for _ in range(fast_call_layout.MAX_RETAINED - 1):
        assert side.all_reduce(x) == 0
    with pytest.raises(ZeroDivisionError):
        side.all_reduce(x)
    assert x.capsules == fast_call_layout.MAX_RETAINED == len(side.driver.seen)


def test_captured_calls_are_left_to_python(side: FastPathRank) -> None:
    x = DlpackArray(zeros())
    side.driver.capturing.add(0)
    assert side.all_reduce(x) == 1
    assert not x.streams
    assert side.all_reduce(InterfaceArray(zeros())) == 0
    side.driver.capturing.clear()
    assert side.all_reduce(x) == 0


@pytest.fixture
def grouping(side: FastPathRank) -> FastPathRank:
    """A rank that knows the launch of a send, a receive and a pair."""
    side.add_messages(
        4, (False, 1, 12, F32), (True, 1, 12, F32), (False, 1, 12, F32), (True, 1, 12, F32)
    )
    return side


def test_capsules_in_groups(grouping: FastPathRank) -> None:
    side, x, y = grouping, DlpackArray(zeros()), DlpackArray(zeros())
    for turn in range(1, fast_call_layout.MAX_RETAINED // 4 + 1):
        with miraccl.group():
            assert side.send(x) == side.recv(y) == side.sendrecv(x, y) == 0
            assert (x.capsules, y.capsules, len(side.fast_path.retained)) == (
                2 * turn,
                2 * turn,
                4 * (turn - 1),
            )
        assert side.driver.seen.pop()[-1] == x.array.ctypes.data
        assert not side.driver.seen
        assert len(side.fast_path.retained) == 4 * turn % fast_call_layout.MAX_RETAINED
    assert [(len(objects), stream) for objects, stream in side.retained] == [
        (fast_call_layout.MAX_RETAINED, 0)
    ]
    side.retained.clear()
    assert (x.capsules, y.capsules) == (0, 0)
    assert not side.handed_over


@pytest.mark.parametrize("why", ["python", "exception", "captured", "failed", "asked"])
def test_capsules_of_a_group_that_is_handed_over(grouping: FastPathRank, why: str) -> None:
    """Python creates its own capsules."""
    side, x, y = grouping, DlpackArray(zeros()), DlpackArray(zeros())
    with contextlib.suppress(ZeroDivisionError), miraccl.group():
        assert side.send(x) == side.recv(y) == 0
        if why == "asked":
            x.asked = groups.current
            assert side.sendrecv(x, y) == side.send(y) == 1
        else:
            assert side.sendrecv(x, y) == 0
        if why == "python":
            assert groups.current() is not None
            assert (x.capsules, y.capsules) == (0, 0)
        if why == "captured":
            side.driver.capturing.add(0)
        if why == "failed":
            side.driver._codes = (700,)
        if why == "exception":
            raise ZeroDivisionError
    ((_, notes),) = side.handed_over
    assert [thing for thing, _, _ in notes] == ([x, y] if why == "asked" else [x, y, x, y])
    assert (x.capsules, y.capsules, side.fast_path.retained) == (0, 0, [])
    assert len(side.driver.seen) == (why == "failed")
    x.asked = lambda: None
    side.driver.capturing.clear()
    with miraccl.group():
        assert side.send(x) == side.recv(y) == side.sendrecv(x, y) == 0
    assert (x.capsules, y.capsules) == (2, 2)


def test_much_memory_of_a_group_is_handed_over_at_once(side: FastPathRank) -> None:
    count = fast_call_layout.MAX_RETAINED_BYTES // 8
    side.add_messages(4, (False, 1, count, F32), (True, 1, count, F32))
    for _ in range(2):
        with miraccl.group():
            assert side.send(DlpackArray(zeros(count))) == side.recv(DlpackArray(zeros(count))) == 0
    assert [len(objects) for objects, _ in side.retained] == [2, 2]


def test_a_failed_hand_over_of_a_group_raises(
    grouping: FastPathRank,
) -> None:
    def refuse(objects: list[Any], stream: int) -> None:
        raise ZeroDivisionError

    side, x = grouping, DlpackArray(zeros())
    side.fast_path._retain = refuse

    def exchange() -> None:
        with miraccl.group():
            assert (
                side.send(x)
                == side.recv(DlpackArray(zeros()))
                == side.sendrecv(x, DlpackArray(zeros()))
                == 0
            )

    for _ in range(fast_call_layout.MAX_RETAINED // 4 - 1):
        exchange()
    with pytest.raises(ZeroDivisionError):
        exchange()
    assert 4 * len(side.driver.seen) == fast_call_layout.MAX_RETAINED == 2 * x.capsules
    assert groups.current() is None
    with miraccl.group():
        assert groups.current() is not None


def test_capsules_that_cannot_be_retained_are_leaked(grouping: FastPathRank) -> None:
    def refuse(objects: list[Any], stream: int) -> None:
        raise ZeroDivisionError

    side, x, y = grouping, DlpackArray(zeros()), DlpackArray(zeros())
    assert side.all_reduce(x) == 0
    side.fast_path._retain = refuse
    side.fast_path.stream = side.stream = 5  # type: ignore[attr-defined]
    with (
        pytest.raises(ZeroDivisionError),
        miraccl.group(),
    ):  # where those of the other stream were to be handed over first
        assert side.send(x) == side.recv(y) == side.sendrecv(x, y) == 0
    assert (x.capsules, y.capsules, len(side.fast_path.retained)) == (3, 2, 1)
    with pytest.raises(ZeroDivisionError):
        side.all_reduce(y)
    assert (y.capsules, len(side.fast_path.retained)) == (3, 1)


def test_arrays_in_a_group_of_another_thread_are_not_read(side: FastPathRank) -> None:
    side.add_messages(1, (False, 1, 12, F32))
    x = DlpackArray(zeros())
    with miraccl.group():
        thread = threading.Thread(target=lambda: x.streams.append(side.send(x)))
        thread.start()
        thread.join()
    assert x.streams == [1]  # passed by the fast call


def test_an_operation_of_several_launches_retains_once(side: FastPathRank) -> None:
    for root in range(2):
        side.add_collective(Collective.REDUCE, F32, 4 + root, root=root).check = lambda code: [][
            code
        ]
    x, out = DlpackArray(zeros(9)), DlpackArray(zeros(4))
    side.driver._codes = (700, 0, 0, 0, 700)
    assert side.calls["reduce_scatter_v"](x, out, RedOp.SUM, False, None, [4, 5]) == 1
    assert (x.capsules, out.capsules) == (0, 0)
    assert side.calls["reduce_scatter_v"](x, out, RedOp.SUM, False, None, [4, 5]) == 0
    assert (x.capsules, out.capsules) == (1, 1)
    with pytest.raises(IndexError):  # the first launch is under way
        side.calls["reduce_scatter_v"](x, out, RedOp.SUM, False, None, [4, 5])
    assert (x.capsules, out.capsules, len(side.fast_path.retained)) == (2, 2, 4)


class Old(DlpackArray):
    """Array from before DLPack 1.0: no further arguments, and capsules without a read-only flag."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.capsule()


class Telling(DlpackArray):
    def __dlpack__(self, **given: Any) -> Any:
        assert given == {"stream": 1, "max_version": (1, 0)}
        return self.capsule(max_version=(1, 0))


@pytest.mark.parametrize("kind", [Old, Telling])
@pytest.mark.parametrize("immutable", [False, True])
def test_producers_of_all_dlpack_versions(side: FastPathRank, kind: Any, immutable: bool) -> None:
    side.fast_path.add_foreign_types(
        {
            InterfaceArray: ArrayProtocol(dlpack=False),
            DlpackArray: ArrayProtocol(dlpack=True),
            kind: ArrayProtocol(dlpack=True, immutable=immutable),
        }
    )
    assert side.all_reduce(kind(zeros()), DlpackArray(zeros())) == 0
    assert (
        side.all_reduce(kind(zeros()))
        == side.all_reduce(DlpackArray(zeros()), kind(zeros()))
        == int(immutable)
    )


class Later(DlpackArray):
    """Array of an unknown version of DLPack."""

    def __dlpack__(self, **given: Any) -> Any:
        capsule = self.capsule(max_version=given["max_version"])
        ctypes.c_uint32.from_address(pointer_of(capsule, b"dltensor_versioned")).value = (
            fast_call_layout.DL_MAJOR + 1
        )
        return capsule


def test_a_capsule_of_another_version(side: FastPathRank) -> None:
    side.fast_path.add_foreign_types(
        {
            InterfaceArray: ArrayProtocol(dlpack=False),
            DlpackArray: ArrayProtocol(dlpack=True),
            Later: ArrayProtocol(dlpack=True),
        }
    )
    x = Later(zeros())
    assert side.all_reduce(x) == 1
    assert x.capsules == 0


def test_objects_that_are_not_capsules(side: FastPathRank) -> None:
    used = zeros().__dlpack__()
    np.from_dlpack(
        types.SimpleNamespace(__dlpack__=lambda **_: used, __dlpack_device__=lambda: (1, 0))
    )
    for thing in (None, 5, used, zeros().__array_struct__):
        other = DlpackArray(zeros())
        kind = type("Other", (), {"__dlpack__": lambda self, thing=thing, **_: thing})
        apart = FastPathRank()
        apart.add_collective(Collective.ALL_REDUCE, F32, 12)
        apart.fast_path.add_foreign_types({kind: ArrayProtocol(dlpack=True)})
        assert apart.all_reduce(kind(), stream=0) == apart.all_reduce(kind(), other, stream=0) == 1
        assert apart.fast_path.retained == []


class FreedDlpackArray(DlpackArray):
    """Array whose memory was freed."""

    def __dlpack__(self, **given: Any) -> Any:
        capsule = self.capsule(max_version=given["max_version"])
        place = (
            pointer_of(capsule, b"dltensor_versioned")
            + fast_call_layout.VERSIONED_TENSOR
            + fast_call_layout.DL_DATA
        )
        ctypes.c_uint64.from_address(place).value = 0
        ctypes.c_uint64.from_address(
            place - fast_call_layout.DL_DATA + fast_call_layout.DL_OFFSET
        ).value = 1 << 20
        return capsule


def test_capsules_without_memory(side: FastPathRank) -> None:
    side.fast_path.add_foreign_types(
        {
            InterfaceArray: ArrayProtocol(dlpack=False),
            DlpackArray: ArrayProtocol(dlpack=True),
            FreedDlpackArray: ArrayProtocol(dlpack=True),
        }
    )
    side.add_messages(1, (False, 1, 12, F32))
    x = FreedDlpackArray(zeros())
    assert side.all_reduce(x) == side.all_reduce(DlpackArray(zeros()), x) == side.send(x) == 1
    assert x.capsules == 0
    assert not side.driver.seen


def test_types_and_devices_of_capsules(side: FastPathRank) -> None:
    for dtype in (np.complex64, np.bool_, np.float64):
        assert side.all_reduce(DlpackArray(zeros(12, dtype))) == 1
    x = DlpackArray(zeros())
    for device in (fast_call_layout.DL_CUDA, 13, 3, 1 << 32 | 1):
        side.fast_path._write(fast_call_layout.STATE_DEVICE, device)
        assert side.all_reduce(x) == 1
    assert x.capsules == 0
    side.fast_path._write(fast_call_layout.STATE_DEVICE, 1)
    assert side.all_reduce(x) == 0


# ---- JAX arrays: the method wraps a function, which exports the first part of a sharded array


class SingleDeviceSharding:
    pass


class Sharded(DlpackArray):
    def __init__(self, array: np.ndarray, sharding: Any) -> None:
        super().__init__(array)
        self.sharding = sharding


def test_the_export_function_is_called_directly(
    side: FastPathRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def export(x: Any, stream: Any) -> Any:
        given.append((x, stream))
        return x.capsule()

    monkeypatch.setitem(
        sys.modules, "a_library", types.SimpleNamespace(buffer_to_dlpack_managed_tensor=export)
    )
    shardings = types.SimpleNamespace(SingleDeviceSharding=SingleDeviceSharding)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(sharding=shardings))
    monkeypatch.setattr(Sharded, "__module__", "a_library")
    side.fast_path.add_foreign_types({Sharded: ArrayProtocol(dlpack=True, immutable=True)})
    x, out = Sharded(zeros(), SingleDeviceSharding()), zeros()
    assert side.all_reduce(x, DlpackArray(out)) == 0
    assert side.driver.seen[-1][-2:] == (x.array.ctypes.data, out.ctypes.data)
    assert given == [(x, 1)]
    assert x.capsules == 1
    assert (
        side.all_reduce(x) == side.all_reduce(DlpackArray(out), x) == 1
    )  # arrays of JAX never change
    before = len(given)
    assert not x.streams
    for sharding in (object(), None, SingleDeviceSharding):
        other = Sharded(zeros(), sharding)
        assert side.all_reduce(other, DlpackArray(out)) == 0
        assert other.streams == [1]  # the method was called
    del x.sharding
    assert side.all_reduce(x, DlpackArray(out)) == 0
    assert x.streams == [1]
    assert len(given) == before


def test_without_an_export_function_the_method_is_called(side: FastPathRank) -> None:
    side.fast_path.add_foreign_types({Sharded: ArrayProtocol(dlpack=True, immutable=True)})
    x = Sharded(zeros(), object())
    assert side.all_reduce(x, DlpackArray(zeros())) == 0
    assert x.streams == [1]
