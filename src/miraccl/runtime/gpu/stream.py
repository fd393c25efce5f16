"""Streams as users name them: a number, an object of a library, or none for the current one."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from miraccl.errors import InvalidUsage

_TOO_LARGE = (
    1 << 63
)  # for an address, which a stream is, or one of the small numbers that stand for a default one


def find_current_stream(
    keep: Callable[[int, Any], None] = lambda number, stream: None,
) -> Callable[[int], int]:
    """How to ask for the current stream of a device: PyTorch's, CuPy's, or the legacy default stream, whichever is there first. ``keep``
    hears of objects that may destroy their streams, which PyTorch's do not."""
    return _torch_stream_getter() or functools.partial(_look_up_stream, keep)


def _torch_stream_getter() -> Callable[[int], int] | None:
    """PyTorch's function, where it is there and made for CUDA."""
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_getCurrentRawStream", None)


def _look_up_stream(keep: Callable[[int, Any], None], ordinal: int) -> int:
    """Without PyTorch what is there is looked up in every call: a program may import a library after its first operation."""
    of_torch = _torch_stream_getter()
    return cupy_stream(keep, ordinal) if of_torch is None else of_torch(ordinal)


def cupy_stream(keep: Callable[[int, Any], None], ordinal: int) -> int:
    """CuPy's current stream on a device; the legacy default stream without CuPy."""
    of_cupy = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "get_current_stream", None)
    if of_cupy is None:
        return 0
    stream = of_cupy(ordinal)
    keep(number := int(stream.ptr), stream)
    return number


def library_stream_getter(array: Any) -> Callable[[], Any] | None:
    """The function that gives the current stream of the library of ``array``, where that is not what ``find_current_stream`` finds: CuPy's,
    in a program that has PyTorch as well. Else None."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray) or _torch_stream_getter() is None:
        return None
    return functools.partial(cupy.cuda.get_current_stream, int(array.device.id))


def stream_handle(stream: Any) -> int:
    """A stream as the driver's number: a number, a stream of PyTorch or CuPy, anything with ``__cuda_stream__``."""
    number = (
        stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of(stream)
    )
    if number is None or not 0 <= number < _TOO_LARGE:
        raise InvalidUsage(
            f"stream is {stream!r}; allowed are a CUstream as a number from 0 on, and objects that have one"
        )
    return number


def _handle_of(stream: Any) -> int | None:
    """The number that an object has; None without."""
    try:
        for name in ("cuda_stream", "ptr"):
            number = getattr(stream, name, None)
            if number is not None:
                return int(number)
        return int(stream.__cuda_stream__()[1]) if hasattr(stream, "__cuda_stream__") else None
    except (
        Exception
    ) as error:  # an object may do anything; what it is says who asked for its number
        raise InvalidUsage(
            f"stream is {stream!r}, which gives no number: {type(error).__name__}: {error}"
        ) from error


def dlpack_stream(stream: Any, ordinal: int) -> int:
    """The consumer's stream as ``__dlpack__`` wants to hear it: 1 is the legacy default stream, 2 that of the thread."""
    number = find_current_stream()(ordinal) if stream is None else stream_handle(stream)
    return number or 1
