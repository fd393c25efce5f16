"""Arrays on a GPU: PyTorch tensors, ``__cuda_array_interface__`` (CuPy, Numba, RAPIDS) and DLPack.

Only headers are read; nothing is copied. PyTorch is recognised without importing it. DLPack is
tried last: it may make streams wait.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import fast_call_layout
from miraccl.fastpath.cuda.foreign_types import ArrayProtocol
from miraccl.ops.array_errors import (
    ALLOWED,
    MAX_BYTES,
    freed_storage_error,
    lazily_negated_error,
    masked_array_error,
    not_contiguous_error,
    too_large_error,
    unaligned_error,
)
from miraccl.ops.dlpack import IMMUTABLE, KDLCUDA, read_dlpack
from miraccl.ops.spec import OpSpec
from miraccl.ops.stream_handles import dlpack_stream, find_current_stream, stream_handle
from miraccl.types import DType

if TYPE_CHECKING:
    from miraccl.executor.cuda.gpu import Gpu

#: names of dtypes: ours, and PyTorch's and NumPy's where they differ
DTYPE_NAMES = {dtype.label: dtype for dtype in DType} | {"float8_e4m3fn": DType.FLOAT8_E4M3}
_torch_dtypes: dict[Any, DType] = {}
_typestrs: dict[str, DType] = {}
#: for the fast path: types of valid arrays and the protocol they were read by; at most MOST_KINDS
array_kinds: dict[type, ArrayProtocol] = {}


class DeviceMemory(NamedTuple):
    """Contiguous buffer on a GPU.

    ``keep``: object to keep alive while the GPU works on the buffer, beyond the caller's
    references; None for most.
    """

    address: int
    count: int  # type: ignore[assignment]  # elements; hides tuple.count
    dtype: DType
    keep: Any = None
    read_only: bool = False

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def slice(self, first: int, count: int) -> DeviceMemory:
        """Return elements ``first`` to ``first + count``."""
        return DeviceMemory(
            self.address + first * self.dtype.itemsize, count, self.dtype, self.keep, self.read_only
        )


def is_gpu_array(thing: Any) -> bool:
    """Return True if ``thing`` is an array in GPU memory. Cheap, never raises, imports nothing."""
    if isinstance(thing, np.ndarray):
        return False
    try:
        flag = getattr(thing, "is_cuda", None)
        if flag is not None:
            return bool(flag)
    except Exception:  # a property may raise anything
        return _dlpack_device(thing)[0] in KDLCUDA
    try:
        # The class first, which is cheap. JAX's class has the attribute, but of its arrays only
        # those on a GPU do.
        if hasattr(type(thing), "__cuda_array_interface__") and hasattr(
            thing, "__cuda_array_interface__"
        ):
            return True
    except Exception:  # reading the address raises the proper error
        return _dlpack_device(thing)[0] in (0, *KDLCUDA)
    return _dlpack_device(thing)[0] in KDLCUDA


#: more bytes than any GPU has: a tensor whose storage was freed has its storage offset as address
MAX_FREED_ADDRESS = 1 << 40


def _dlpack_device(thing: Any) -> tuple[int, int]:
    """Return (type, ordinal) of the DLPack device; (0, 0) if there is none."""
    if not hasattr(type(thing), "__dlpack_device__"):
        return 0, 0
    try:
        kind, number = thing.__dlpack_device__()
        return int(kind), int(number)
    except Exception:  # a sharded or deleted array, or not a device
        return 0, 0


def device_ordinal(thing: Any) -> int:
    """Return the ordinal of the GPU of ``thing``; the current one if unknown."""
    # `index` in PyTorch, `id` in CuPy; the `id` of JAX counts the devices of all processes
    number = getattr(getattr(thing, "device", None), "id" if _is_cupy(thing) else "index", None)
    if isinstance(number, int):
        return number
    kind, number = _dlpack_device(thing)
    if kind in KDLCUDA:
        return number
    interface = _read_interface(thing, "", "an array")
    if interface is None:
        return current_ordinal()
    from miraccl.executor.cuda.driver import ordinal_at

    _check_interface(interface, "an array")
    found = ordinal_at(int(interface["data"][0] or 0))
    return current_ordinal() if found is None else found  # managed memory has no owner


def current_ordinal() -> int:
    """Return the current GPU's ordinal: PyTorch's, CuPy's, the driver's current context, or 0."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_available():
        return int(torch.cuda.current_device())
    if cupy is not None:
        return int(cupy.cuda.Device().id)
    from miraccl.executor.cuda.contexts import current_ordinal

    return current_ordinal() or 0


def device_view(
    thing: Any, name: str, op_name: str, stream: Any = None, gpu: Gpu | None = None
) -> DeviceMemory:
    """Return the memory of argument ``name`` of ``op_name``; raise ``InvalidUsage`` if unsuitable.

    ``stream``: stream in which the memory will be used; a DLPack producer makes it wait for pending
    work. ``gpu``: GPU that will use the memory; arrays on another one are rejected.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return _view_tensor(thing, torch, name, op_name, gpu)
    if isinstance(thing, DeviceMemory):
        return thing
    if hasattr(type(thing), "miraccl_view"):
        return _check_device(gpu, thing.miraccl_view, name, op_name)
    immutable = type(thing).__module__.partition(".")[0] in IMMUTABLE
    interface = None if immutable else _read_interface(thing, name, op_name)
    if interface is not None:
        view = _check_device(gpu, _view_interface(thing, interface, name, op_name), name, op_name)
        if not _is_cupy(thing):
            _wait_for_producer(interface, stream, gpu)
            _remember_type(thing, ArrayProtocol(dlpack=False))
        return view
    kind, ordinal = _dlpack_device(thing)
    if kind in KDLCUDA:
        if gpu is not None and kind == KDLCUDA[0] and ordinal != gpu.ordinal:
            raise _wrong_device(name, op_name, ordinal, gpu)
        view = _view_dlpack(thing, name, op_name, dlpack_stream(stream, ordinal))
        _remember_type(thing, ArrayProtocol(dlpack=True, immutable=immutable))
        return view._replace(read_only=view.read_only or immutable)
    if kind or hasattr(type(thing), "__array_interface__"):
        raise _on_cpu(name, op_name)
    text = f"{op_name}: {name} is a {type(thing).__name__}"
    allowed = "PyTorch tensors and GPU memory with __cuda_array_interface__ or DLPack"
    raise InvalidUsage(f"{text}; allowed are {allowed}")


def _check_device(gpu: Gpu | None, view: DeviceMemory, name: str, op_name: str) -> DeviceMemory:
    """Return ``view``; raise if it lies on another GPU."""
    if gpu is not None and view.count and (owner := gpu.owner(view.address)) != gpu.ordinal:
        raise _wrong_device(name, op_name, owner, gpu)
    return view


def _read_interface(thing: Any, name: str, op_name: str) -> Any:
    """Return the ``__cuda_array_interface__`` of ``thing``, or None."""
    try:
        return getattr(thing, "__cuda_array_interface__", None)
    except Exception as error:
        which = f"{op_name}: {name}" if name else op_name
        raise InvalidUsage(
            f"{which}: cannot read __cuda_array_interface__: {type(error).__name__}: {error}"
        ) from error


def _is_cupy(thing: Any) -> bool:
    """Return True for CuPy arrays, whose interface names the current stream.

    Calls without ``stream`` use that one; with another one the caller orders them.
    """
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(thing, cupy.ndarray)


def _wait_for_producer(interface: dict[str, Any], stream: Any, gpu: Gpu | None) -> None:
    """Make the operation's stream wait for the interface's stream, as its version 3 demands."""
    producer = interface.get("stream")
    if producer is None or gpu is None:
        return
    consumer = find_current_stream()(gpu.ordinal) if stream is None else stream_handle(stream)
    if (int(producer) or fast_call_layout.STREAM_LEGACY) == (
        consumer or fast_call_layout.STREAM_LEGACY
    ):
        return
    with gpu.device_guard():
        if gpu.capture_id(int(producer)) == gpu.capture_id(
            consumer
        ):  # work outside a graph is not ordered with work inside it
            gpu.order_streams(int(producer), consumer)


def _remember_type(thing: Any, how: ArrayProtocol) -> None:
    """Register the type of a valid array with the fast path."""
    if type(thing) not in array_kinds and len(array_kinds) < fast_call_layout.MAX_FOREIGN_TYPES:
        array_kinds[type(thing)] = how


def _view_dlpack(thing: Any, name: str, op_name: str, stream: int) -> DeviceMemory:
    """Return the memory of a DLPack tensor, which the capsule keeps alive."""
    tensor = read_dlpack(thing, name, op_name, stream=stream)
    count, dense, shape = 1, True, tensor.shape
    for axis in reversed(range(len(shape))):
        dense = dense and (
            tensor.strides is None or shape[axis] == 1 or tensor.strides[axis] == count
        )
        count *= shape[axis]
    if not dense and count:
        form = f"shape {list(shape)}, strides {list(tensor.strides or ())} elements"
        raise not_contiguous_error(name, op_name, form)
    if tensor.address % tensor.dtype.itemsize:
        raise unaligned_error(name, op_name, tensor.dtype.itemsize)
    return DeviceMemory(tensor.address, count, tensor.dtype, tensor.capsule, tensor.read_only)


def _check_size(count: int, dtype: DType, name: str, op_name: str) -> None:
    """Raise if no memory can be that large."""
    if count * dtype.itemsize > MAX_BYTES:  # the driver rejects smaller sizes itself
        raise too_large_error(count, dtype.label, name, op_name)


def _on_cpu(name: str, op_name: str) -> InvalidUsage:
    return InvalidUsage(f"{op_name}: {name} is in CPU memory, but the other arrays are on a GPU")


def _wrong_device(name: str, op_name: str, ordinal: int, gpu: Gpu) -> InvalidUsage:
    text = f"{op_name}: {name} is on GPU {ordinal}, but this communicator uses GPU {gpu.ordinal}"
    return InvalidUsage(text, hint="a rank uses one GPU: that of the first array it passed")


def _view_tensor(tensor: Any, torch: Any, name: str, op_name: str, gpu: Gpu | None) -> DeviceMemory:
    if not _torch_dtypes:
        _torch_dtypes.update(
            {
                getattr(torch, label): code
                for label, code in DTYPE_NAMES.items()
                if hasattr(torch, label)
            }
        )
    dtype = _torch_dtypes.get(tensor.dtype)
    if dtype is None:
        raise InvalidUsage(f"{op_name}: {name} has dtype {tensor.dtype}; allowed are {ALLOWED}")
    if gpu is None or tensor.get_device() != gpu.ordinal:  # as cheap as is_cuda
        if not tensor.is_cuda:
            raise _on_cpu(name, op_name)
        if gpu is not None:
            raise _wrong_device(name, op_name, tensor.get_device(), gpu)
    if not tensor.is_contiguous():
        form = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise not_contiguous_error(name, op_name, form, "pass x.contiguous()")
    if tensor.is_neg():
        raise lazily_negated_error(name, op_name)
    address, count = tensor.data_ptr(), tensor.numel()
    if (
        address < MAX_FREED_ADDRESS
        and count
        and address == tensor.storage_offset() * dtype.itemsize
    ):
        raise freed_storage_error(name, op_name, count)
    return DeviceMemory(address, count, dtype)


def _dtype_of(thing: Any, typestr: str) -> DType | None:
    """Return the dtype of an array with this ``typestr``.

    NumPy has no code for bfloat16 and 8-bit floats; their name comes from the array's dtype.
    """
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        dtype = np.dtype(typestr)
        if dtype.kind != "V" or dtype.name in DTYPE_NAMES:
            found = DTYPE_NAMES.get(dtype.name) if dtype.isnative else None
            if found is not None:
                _typestrs[typestr] = found
            return found
    return DTYPE_NAMES.get(getattr(getattr(thing, "dtype", None), "name", ""))


_NUMBERS, _TUPLES = (int, np.integer), (tuple, list)


def _is_number(given: Any) -> bool:
    return isinstance(given, _NUMBERS) and bool(given >= 0)


def _is_handle(given: Any) -> bool:
    """Return True for an address or a stream handle."""
    return _is_number(given) and bool(given < 1 << 63)


def _is_shape(given: Any) -> bool:
    return isinstance(given, _TUPLES) and all(map(_is_number, given))


def _are_strides(given: Any) -> bool:
    return given is None or (
        isinstance(given, _TUPLES) and all(isinstance(step, _NUMBERS) for step in given)
    )


def _is_data(given: Any) -> bool:
    return (
        isinstance(given, _TUPLES)
        and len(given) == 2
        and (given[0] is None or _is_handle(given[0]))
    )


#: keys read from ``__cuda_array_interface__``: (validity check, description of valid values)
_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "shape": (_is_shape, "a tuple of lengths >= 0"),
    "strides": (_are_strides, "None or a tuple of strides in bytes"),
    "typestr": (lambda given: isinstance(given, str), "a str"),
    "data": (_is_data, "a tuple of an address and a read-only flag"),
    "stream": (lambda given: given is None or _is_handle(given), "None or a stream handle"),
}


def _check_interface(interface: Any, which: str) -> None:
    """Raise if ``interface`` is invalid; ``which`` names the call and its array."""
    if not isinstance(interface, dict):
        kind = type(interface).__name__
        raise InvalidUsage(f"{which}: __cuda_array_interface__ is a {kind}; it must be a dict")
    for key, (is_right, form) in _KEYS.items():
        if not is_right(given := interface.get(key)):
            raise InvalidUsage(
                f"{which}: {key} of __cuda_array_interface__ is {given!r}; it must be {form}"
            )
    shape, strides = interface["shape"], interface.get("strides")
    if strides is not None and len(strides) != len(shape):
        raise InvalidUsage(
            f"{which}: __cuda_array_interface__ has {len(shape)} lengths in shape, "
            f"but {len(strides)} strides"
        )


def _view_interface(thing: Any, interface: dict[str, Any], name: str, op_name: str) -> DeviceMemory:
    _check_interface(interface, f"{op_name}: {name}")
    shape, typestr = interface["shape"], interface["typestr"]
    dtype = _typestrs.get(typestr)
    if dtype is None and (dtype := _dtype_of(thing, typestr)) is None:
        raise InvalidUsage(f"{op_name}: {name} has type {typestr!r}; allowed are {ALLOWED}")
    strides, size, count = interface.get("strides"), dtype.itemsize, 1
    for length in shape:
        count *= int(length)
    _check_size(count, dtype, name, op_name)
    if strides is not None and count:
        expected = size
        for length, stride in zip(reversed(shape), reversed(strides)):
            if length != 1 and stride != expected:
                form = f"shape {shape}, strides {strides} bytes"
                raise not_contiguous_error(name, op_name, form)
            expected *= length
    address, read_only = interface["data"]
    if not address and count:
        raise freed_storage_error(name, op_name, count)
    address = int(address or 0)
    if address % size:
        raise unaligned_error(name, op_name, size)
    if interface.get("mask") is not None:
        raise masked_array_error(name, op_name)
    return DeviceMemory(address, count, dtype, None, bool(read_only))


def empty_like(thing: Any, count: int, op_name: str) -> Any:
    """Return a flat array of ``count`` elements of the same library, dtype and device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(thing, torch.Tensor):
        return torch.empty(count, dtype=thing.dtype, device=thing.device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(thing, cupy.ndarray):
        make: Callable[..., Any] = cupy.empty
        with thing.device:  # allocates on that device
            return make(count, dtype=thing.dtype)
    raise InvalidUsage(f"{op_name}: cannot allocate a result like {type(thing).__name__}: pass out")


class DeviceReader:
    """Arrays in the memory of one GPU, for ``ops.check``."""

    def __init__(self, rank: int, nranks: int, gpu: Gpu) -> None:
        self.rank, self.nranks, self._gpu = rank, nranks, gpu

    def view(self, obj: Any, name: str, op: str, stream: Any, writes: bool) -> DeviceMemory:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, torch.Tensor):  # the common case, one call less
            return _view_tensor(obj, torch, name, op, self._gpu)
        memory = device_view(obj, name, op, stream, self._gpu)
        if writes and memory.read_only:
            raise InvalidUsage(
                f"{op}: {name} is read-only, but the result is written to it",
                rank=self.rank,
                hint="pass a writable array as out; JAX arrays are immutable",
            )
        return memory

    def allocate(self, spec: OpSpec, x: Any, source: DeviceMemory, count: int) -> Any:
        return empty_like(x, count, spec.name)
