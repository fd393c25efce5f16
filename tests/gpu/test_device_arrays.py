"""GPU arrays by their protocols on the slow path: ordering after producers, rejection, registration
for fast calls.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import driver, fast_call_layout
from miraccl.fastpath.cuda.foreign_types import ArrayProtocol
from miraccl.native.capsules import pointer_of
from miraccl.ops import device_arrays as memory
from miraccl.ops.check import check
from miraccl.ops.device_arrays import DeviceMemory, DeviceReader, device_view
from miraccl.ops.dlpack import KDLCUDA, DLTensor, capsule_of
from miraccl.ops.host_arrays import view as cpu_view
from miraccl.ops.spec import ALL_REDUCE
from miraccl.ops.stream_handles import find_current_stream, stream_handle
from miraccl.runtime.gpu.stream_order import MAX_KEPT_STREAMS, StreamKeepAlive
from miraccl.runtime.gpu.windows import DeviceArray, DeviceWindows, _element_type
from miraccl.runtime.window import element_type
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DType, RedOp
from tests.gpu.fake_cuda import FakeArray, FakeCuda
from tests.gpu.fast_path_rank import torch_with_exchange_api


class GpuRecorder:
    """GPU as views use it; records which stream waits for which. ``captures``: streams of a
    capture.
    """

    ordinal = 0

    def __init__(self, captures: tuple[int, ...] = ()) -> None:
        self.ordered: list[tuple[int, int]] = []
        self._captures, self._inside = captures, False

    def owner(self, address: int) -> int:
        return 0

    @contextlib.contextmanager
    def device_guard(self) -> Iterator[None]:
        self._inside = True
        yield
        self._inside = False

    def capture_id(self, stream: int) -> int:
        assert self._inside
        return int(stream in self._captures)

    def order_streams(self, before: int, after: int) -> None:
        assert self._inside
        self.ordered.append((before, after))


class HostInterfaceArray:
    def __init__(self, **said: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (4096, False),
            "version": 3,
        } | said


class HostDlpackArray:
    """DLPack array in CPU memory that claims to be on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDLCUDA[0], 0

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__(max_version=max_version)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "array_kinds", {})
    monkeypatch.setattr(memory, "find_current_stream", lambda: lambda ordinal: 0)


def view(x: Any, stream: Any = None, gpu: Any = None) -> DeviceMemory:
    side: Any = gpu or GpuRecorder()
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
def test_an_operation_waits_for_the_stream_of_the_interface(
    producer: Any, stream: Any, ordered: Any
) -> None:
    """Version 3 of the interface; 1 is the legacy default stream."""
    gpu = GpuRecorder()
    view(HostInterfaceArray(stream=producer), stream, gpu)
    assert gpu.ordered == ordered


def test_a_capture_does_not_wait_for_streams_outside_of_it() -> None:
    both, one = GpuRecorder((5, 6)), GpuRecorder((6,))
    view(HostInterfaceArray(stream=5), 6, both)
    view(HostInterfaceArray(stream=5), 6, one)
    assert (both.ordered, one.ordered) == ([(5, 6)], [])


def test_cupy_arrays_use_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like tensors: with ``stream`` the caller provides the order. Fast calls read them
    differently.
    """
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=HostInterfaceArray))
    gpu = GpuRecorder()
    view(HostInterfaceArray(stream=5), 6, gpu)
    assert gpu.ordered == []
    assert memory.array_kinds == {}


def test_the_current_stream_is_found_in_a_library_imported_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library imported after the first operation."""
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ask = find_current_stream()
    assert ask(0) == 0
    streams = types.SimpleNamespace(
        get_current_stream=lambda ordinal: types.SimpleNamespace(ptr=5 + ordinal)
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=streams))
    assert ask(0) == find_current_stream()(0) == 5
    assert ask(3) == find_current_stream()(3) == 8  # of that GPU, whichever is current
    torch: Any = types.SimpleNamespace(_C=types.SimpleNamespace())  # not made for CUDA
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert ask(0) == find_current_stream()(0) == 5
    torch._C._cuda_getCurrentRawStream = lambda ordinal: 7 + ordinal
    assert ask(1) == find_current_stream()(1) == 8


def test_the_owner_of_a_borrowed_stream_is_kept_alive() -> None:
    """Like CuPy's ExternalStream of another Stream's handle."""

    class Stream:
        pass

    class Borrowed:
        pass

    owners = StreamKeepAlive(lambda: (5,))
    ends: list[str] = []
    stream = Stream()
    weakref.finalize(stream, ends.append, "stream")
    owners.retain(5, stream)
    del stream
    for number in range(2 * MAX_KEPT_STREAMS):
        owners.retain(5, Borrowed())
        owners.retain(6 + number, Borrowed())
    assert not ends
    owners.release()
    assert ends == ["stream"]


@pytest.mark.parametrize(
    "stream",
    [
        True,
        False,
        -1,
        -(1 << 62),
        1 << 63,
        1 << 70,
        1.0,
        "0",
        types.SimpleNamespace(cuda_stream=-1),
    ],
)
def test_objects_that_are_not_streams_are_rejected(stream: Any) -> None:
    with pytest.raises(
        InvalidUsage,
        match="pass a CUstream handle >= 0 or an object that has one",
    ):
        stream_handle(stream)


@pytest.mark.parametrize(
    "said",
    [
        {"cuda_stream": "x"},
        {"ptr": object()},
        *({"__cuda_stream__": given} for given in (lambda: 5, lambda: (0,), 5)),
    ],
)
def test_streams_without_a_handle_are_rejected(said: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidUsage, match=r"cannot read the handle of stream namespace.*: (Type|Value|Index)Error"
    ):
        stream_handle(types.SimpleNamespace(**said))


def test_streams_of_all_libraries() -> None:
    named = [
        types.SimpleNamespace(cuda_stream=5),
        types.SimpleNamespace(ptr=5),
        types.SimpleNamespace(__cuda_stream__=lambda: (0, 5)),
    ]
    assert [stream_handle(stream) for stream in (0, 1, 5, (1 << 63) - 1, *named)] == [
        0,
        1,
        5,
        (1 << 63) - 1,
        5,
        5,
        5,
    ]


def test_outputs_are_ordered_in_the_stream_of_the_operation() -> None:
    gpu: Any = GpuRecorder()
    reader, out = DeviceReader(0, 2, gpu), HostDlpackArray(np.zeros(4, np.float32))
    source = DeviceMemory(4096, 4, DType.FLOAT32)
    assert check(ALL_REDUCE, reader, (source, out, RedOp.SUM), 7).target.count == 4
    check(ALL_REDUCE, reader, (source, HostInterfaceArray(stream=5), RedOp.SUM), 7)
    assert out.streams == [7]
    assert gpu.ordered == [(5, 7)]


def test_masks_and_unaligned_addresses_are_rejected() -> None:
    with pytest.raises(InvalidUsage, match="x is a masked array"):
        view(HostInterfaceArray(mask=np.ones(4)))
    odd = np.zeros(20, np.uint8)[1:17]
    for thing in (HostInterfaceArray(data=(4097, False)), Odd(odd)):
        with pytest.raises(InvalidUsage, match="x is not aligned to its element size of 4 bytes"):
            view(thing)
    assert not memory.array_kinds


class FreedHostArray(HostDlpackArray):
    """Array whose memory was freed."""

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        capsule = super().__dlpack__(stream=stream, max_version=max_version)
        tensor = DLTensor.from_address(
            pointer_of(capsule, b"dltensor_versioned") + fast_call_layout.VERSIONED_TENSOR
        )
        tensor.data, tensor.byte_offset = None, 8
        return capsule


def test_arrays_without_memory_are_rejected() -> None:
    for thing in (
        HostInterfaceArray(data=(0, False)),
        HostInterfaceArray(data=(None, False)),
        FreedHostArray(np.zeros(4, np.float32)),
    ):
        with pytest.raises(InvalidUsage, match="a test: x has 4 elements, but no memory"):
            view(thing)
    assert not memory.array_kinds
    for empty in (
        HostInterfaceArray(data=(0, False), shape=(3, 0)),
        HostInterfaceArray(data=(None, False), shape=(0,)),
        FreedHostArray(np.zeros(0, np.float32)),
    ):
        assert view(empty).count == 0


def test_tensors_with_freed_storage_are_rejected() -> None:
    """The address of a slice is its offset. These are in CPU memory, whose device is -1."""
    torch = torch_with_exchange_api()
    gpu = GpuRecorder()
    gpu.ordinal = -1
    whole = torch.zeros(1 << 20)
    parts = [whole, whole[:12], whole[3:], whole[1 << 19 :]]
    assert [view(part, gpu=gpu).address for part in parts] == [part.data_ptr() for part in parts]
    whole.untyped_storage().resize_(0)
    for part in parts:
        with pytest.raises(
            InvalidUsage,
            match=f"a test: x has {part.numel()} elements, but no memory "
            ".its storage may have been freed",
        ):
            view(part, gpu=gpu)
    assert view(whole[:0], gpu=gpu).count == 0


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"data": None}, "data of .* is None; it must be a tuple of an address and a read"),
        ({"data": 4096}, "data of .* is 4096; it must be"),
        ({"data": (4096,)}, "data of .* is .4096,.; it must be"),
        ({"data": ("4096", False)}, "data of .* is .'4096', False.; it must be"),
        ({"data": (-4096, False)}, "data of .* is .-4096, False.; it must be"),
        ({"data": (1 << 64, False)}, "data of .* is .18446744073709551616, False.; it must be"),
        ({"shape": None}, "shape of .* is None; it must be a tuple of lengths"),
        ({"shape": 4}, "shape of .* is 4; it must be"),
        ({"shape": (4.0,)}, "shape of .* is .4.0,.; it must be"),
        ({"shape": (-4,)}, "shape of .* is .-4,.; it must be"),
        ({"shape": (-2, -2)}, "shape of .* is .-2, -2.; it must be"),
        ({"strides": (None,)}, "strides of .* is .None,.; it must be None or a tuple of strides"),
        ({"strides": 4}, "strides of .* is 4; it must be"),
        ({"strides": (4, 4)}, "1 lengths in shape, but 2 strides"),
        ({"typestr": None}, "typestr of .* is None; it must be a str"),
        ({"typestr": np.float32}, "typestr of .* is <class 'numpy.float32'>; it must be"),
        ({"stream": "main"}, "stream of .* is 'main'; it must be None or"),
        ({"stream": -1}, "stream of .* is -1; it must"),
        ({"stream": 1 << 64}, "stream of .* is 18446744073709551616; it must"),
    ],
)
def test_malformed_interfaces_are_rejected(said: dict[str, Any], words: str) -> None:
    given, lacking = HostInterfaceArray(**said), HostInterfaceArray(stream=None, strides=None)
    for key in said:
        del lacking.__cuda_array_interface__[key]
    with pytest.raises(InvalidUsage, match=f"a test: x: .*{words}"):
        view(given)
    with pytest.raises(InvalidUsage, match=f"an array: .*{words}"):
        memory.device_ordinal(given)
    if not said.keys() & {"strides", "stream"}:  # may be left out
        with pytest.raises(
            InvalidUsage, match=f"x: {next(iter(said))} of __cuda_array_interface__ is None"
        ):
            view(lacking)
    assert not memory.array_kinds


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({"shape": (1 << 60,)}, 1 << 60),
        ({"shape": (1 << 31, 1 << 31, 4)}, 1 << 64),
        ({"shape": (1 << 58,), "typestr": "|i1"}, 1 << 58),
    ],
    ids=str,
)
def test_impossible_element_counts_are_rejected(said: dict[str, Any], count: int) -> None:
    with pytest.raises(
        InvalidUsage,
        match=f"a test: x claims {count} elements of .*; "
        f"a process can address at most {1 << 57} bytes",
    ):
        view(HostInterfaceArray(**said))
    with pytest.raises(InvalidUsage, match=f"a test: x claims {1 << 60} elements of float32"):
        view(Endless(np.zeros(4, np.float32)))
    with pytest.raises(
        InvalidUsage, match=r"a test: cannot read x by DLPack: 1 axes, shape \[-4\]"
    ):
        view(Endless(np.zeros(4, np.float32), -4))
    assert view(HostInterfaceArray(shape=(1 << 55,))).count == 1 << 55
    assert Endless not in memory.array_kinds


class Endless(HostDlpackArray):
    """Array whose capsule has too many or a negative number of elements."""

    def __init__(self, array: np.ndarray, length: int = 1 << 60) -> None:
        super().__init__(array)
        self.length = length

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        capsule = super().__dlpack__(stream=stream, max_version=max_version)
        DLTensor.from_address(
            pointer_of(capsule, b"dltensor_versioned") + fast_call_layout.VERSIONED_TENSOR
        ).shape[0] = self.length
        return capsule


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((0, 4), (7, 7)), ((4, 0), (0, 0)), ((0,), (-4,)), ((2, 0, 3), (1, 2, 3))],
)
def test_strides_of_empty_arrays_are_ignored(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Like DLPack, and NumPy on CPUs."""
    assert view(HostInterfaceArray(shape=shape, strides=strides)) == DeviceMemory(
        4096, 0, DType.FLOAT32
    )


def test_bools_are_rejected() -> None:
    """Sums of their bytes are not bools."""
    with pytest.raises(InvalidUsage, match=r"a test: x has type '.b1'; allowed are int8, uint8"):
        view(HostInterfaceArray(typestr="|b1"))
    torch, gpu = torch_with_exchange_api(), GpuRecorder()
    gpu.ordinal = -1
    with pytest.raises(
        InvalidUsage, match=r"a test: x has dtype torch.bool; allowed are int8, uint8"
    ):
        view(torch.zeros(4, dtype=torch.bool), gpu=gpu)
    assert view(torch.zeros(4, dtype=torch.bool).view(torch.uint8), gpu=gpu).dtype is DType.UINT8


def test_lazily_negated_tensors_are_rejected() -> None:
    """On GPUs and CPUs: neither their address nor DLPack reveals it."""
    torch, gpu = torch_with_exchange_api(), GpuRecorder()
    gpu.ordinal = -1
    for x in (torch._neg_view(torch.ones(4)), torch.ones(1, dtype=torch.complex64).conj().imag):
        assert x.is_contiguous()
        with pytest.raises(
            InvalidUsage, match=r"a test: x is lazily negated \(is_neg\(\)\).*pass x.resolve_neg"
        ):
            view(x, gpu=gpu)
        with pytest.raises(
            InvalidUsage, match=r"a test: x is lazily negated \(is_neg\(\)\).*pass x.resolve_neg"
        ):
            cpu_view(x, "x", writes=False, where="a test")
        assert view(x.resolve_neg(), gpu=gpu).count == x.numel()


class Raising:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("no context")


class OnCpuRaising(Raising):
    """Array in CPU memory according to DLPack."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Nowhere:
    """Array whose DLPack device ``said`` does not exist."""

    def __init__(self, said: Any) -> None:
        self._said = said

    def __dlpack_device__(self) -> Any:
        return self._said


class Unwilling:
    @property
    def is_cuda(self) -> bool:
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("thing", "there"),
    [
        (Raising(), True),
        (OnCpuRaising(), False),
        (Unwilling(), False),
        *((Nowhere(said), False) for said in ("xx", (None, 0), 2, (2, "a"))),
    ],
)
def test_is_gpu_array_never_raises(thing: Any, there: bool) -> None:
    """Errors are raised when the memory is requested, as errors of an argument."""
    assert memory.is_gpu_array(thing) is there
    with pytest.raises(InvalidUsage, match=r"a test: x:? "):
        view(thing)
    with pytest.raises(InvalidUsage, match=r"a test: x:? "):
        cpu_view(thing, "x", writes=False, where="a test")


def test_an_interface_that_raises_is_reported() -> None:
    with pytest.raises(
        InvalidUsage,
        match="a test: x: cannot read __cuda_array_interface__: RuntimeError: no context",
    ):
        view(Raising())
    with pytest.raises(
        InvalidUsage,
        match="an array: cannot read __cuda_array_interface__: RuntimeError: no context",
    ):
        memory.device_ordinal(Raising())


class OfJax(HostDlpackArray):
    """Array on the first GPU of its process, the fourth of all processes."""

    device = types.SimpleNamespace(id=3, local_hardware_id=0)


class OfCupy(HostDlpackArray):
    device = types.SimpleNamespace(id=3)


def test_device_ordinals_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's device id counts devices of all processes; CuPy's and PyTorch's are the driver's
    ordinal.
    """
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=OfCupy))
    assert memory.device_ordinal(OfJax(np.zeros(4))) == 0
    assert memory.device_ordinal(OfCupy(np.zeros(4))) == 3
    assert memory.device_ordinal(types.SimpleNamespace(device=types.SimpleNamespace(index=2))) == 2


class Gpus:
    """CuPy's devices, one of them current; arrays are created there."""

    def __init__(self) -> None:
        self.current = 0

    @contextlib.contextmanager
    def at(self, ordinal: int) -> Iterator[None]:
        before, self.current = self.current, ordinal
        yield
        self.current = before


def test_new_cupy_results_are_on_the_gpu_of_the_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = Gpus()
    cupy = types.SimpleNamespace(
        ndarray=types.SimpleNamespace, empty=lambda count, dtype: (count, dtype, gpus.current)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    x = types.SimpleNamespace(device=gpus.at(2), dtype="f4")
    assert (memory.empty_like(x, 5, "all_gather"), gpus.current) == ((5, "f4", 2), 0)


def test_the_driver_provides_the_current_gpu_without_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Numba is such a library; memory visible to all GPUs has no owner."""
    for name in ("torch", "cupy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("bindings", "pointer_attribute"):
        monkeypatch.setattr(driver, name, vars(driver)[name])  # restored after install
    cuda = FakeCuda(home=3)
    x = FakeArray(cuda, np.ones(4))
    cuda.install()
    assert memory.current_ordinal() == memory.device_ordinal(x) == 3
    cuda.set_current(2)
    assert (
        memory.current_ordinal(),
        memory.device_ordinal(x),
        memory.device_ordinal(HostInterfaceArray()),
    ) == (
        2,
        3,
        2,
    )
    cuda.cuCtxSetCurrent(None)
    assert (
        memory.current_ordinal(),
        memory.device_ordinal(x),
        memory.device_ordinal(HostInterfaceArray()),
    ) == (
        0,
        3,
        0,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "f4",
        "<f4",
        "FLOAT32",
        float,
        "float",
        np.int8,
        np.dtype("u4"),
        DType.BFLOAT16,
        "float8_e4m3fn",
        None,
    ],
)
def test_gpu_windows_support_the_types_of_cpu_windows(dtype: Any) -> None:
    assert NUMPY_DTYPE[_element_type(dtype)] == element_type(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        ">f4",
        np.dtype(">f4"),
        np.dtype(">i8"),
        "int16",
        "complex64",
        "hello",
        ",,",
        object,
        "V",
        7,
        "3f4",
    ],
)
def test_windows_of_unsupported_types_are_rejected(dtype: Any) -> None:
    with pytest.raises(
        InvalidUsage,
        match=r"empty: (cannot communicate dtype|dtype .* is not supported)",
    ):
        _element_type(dtype)


def test_invalid_interfaces_are_rejected() -> None:
    thing = HostInterfaceArray()
    thing.__cuda_array_interface__ = [4096]  # type: ignore[assignment]
    with pytest.raises(
        InvalidUsage, match="x: __cuda_array_interface__ is a list; it must be a dict"
    ):
        view(thing)
    with pytest.raises(InvalidUsage, match="x has type '<f4,'"):
        view(HostInterfaceArray(typestr="<f4,"))


class Odd(HostDlpackArray):
    """Bytes that claim to be float32."""

    def __dlpack__(self, *, stream: Any, max_version: Any) -> Any:
        capsule = super().__dlpack__(stream=stream, max_version=max_version)
        _, address, _ = capsule_of(types.SimpleNamespace(__dlpack__=lambda **_: capsule))
        tensor = DLTensor.from_address(address)
        tensor.code, tensor.bits, tensor.shape[0] = 2, 32, 4
        return capsule


@pytest.mark.parametrize("code", list(DType))
def test_windows_export_types_that_other_libraries_know(code: DType) -> None:
    """But not to this package: fast calls must not read 8-bit floats as integers."""
    window = DeviceArray(4096, (2, 3), code, None)
    shown = np.dtype(window.__cuda_array_interface__["typestr"])
    kind = NUMPY_DTYPE[code]
    assert (
        shown == kind
        if kind.isbuiltin == 1
        else (shown.kind, shown.itemsize) == ("u", kind.itemsize)
    )
    assert view(window) == DeviceMemory(4096, 6, code)
    assert memory.array_kinds == {}


def test_a_window_is_a_tensor_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on PyTorch's current GPU, to which it would be copied."""
    torch = torch_with_exchange_api()
    devices: list[str] = []

    def as_tensor(flat: Any, device: str) -> Any:
        devices.append(device)
        return torch.zeros(flat.nbytes, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory: Any = types.SimpleNamespace(
        gpu=types.SimpleNamespace(ordinal=1),
        window=lambda nbytes, stages: types.SimpleNamespace(own=4096),
    )
    plane: Any = types.SimpleNamespace(run_control_op=lambda what, name, asked, deadline: [asked])
    stages: Any = types.SimpleNamespace(activity="", deadline=None)
    tensor = DeviceWindows(memory).empty((2, 3), torch.bfloat16, plane, stages)
    assert (tensor.shape, tensor.dtype, devices) == ((2, 3), torch.bfloat16, ["cuda:1"])


def test_valid_array_types_are_registered_for_fast_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    class Jax(HostDlpackArray):
        pass

    Jax.__module__ = "jaxlib.something"
    good = np.zeros(4, np.float32)
    for wrong in (
        HostInterfaceArray(typestr="<c8"),
        HostDlpackArray(np.zeros(8, np.float32)[::2]),
        None,
        good,
    ):
        with pytest.raises(InvalidUsage):
            view(wrong)
    assert memory.array_kinds == {}
    view(HostInterfaceArray())
    view(HostDlpackArray(good))
    assert view(Jax(good)).read_only
    want = {
        HostInterfaceArray: ArrayProtocol(dlpack=False),
        HostDlpackArray: ArrayProtocol(dlpack=True),
        Jax: ArrayProtocol(dlpack=True, immutable=True),
    }
    assert memory.array_kinds == want
    for number in range(fast_call_layout.MAX_FOREIGN_TYPES):
        view(type(f"ArrayProtocol{number}", (HostInterfaceArray,), {})())
    assert len(memory.array_kinds) == fast_call_layout.MAX_FOREIGN_TYPES
