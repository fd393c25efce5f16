"""Stream arguments: a CUstream handle, a library's stream object, or None (current stream)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from miraccl.errors import InvalidUsage

_TOO_LARGE = 1 << 63  # for a CUstream, which is an address or a small number for a default stream


def find_current_stream(
    keep: Callable[[int, Any], None] = lambda number, stream: None,
) -> Callable[[int], int]:
    """Return a function that gives the current stream of a device.

    It is PyTorch's, CuPy's or the legacy default stream, whichever library is loaded first.
    ``keep(handle, stream)`` receives objects that destroy their stream when they die; PyTorch's do
    not.
    """
    return _torch_stream_getter() or functools.partial(_look_up_stream, keep)


def _torch_stream_getter() -> Callable[[int], int] | None:
    """Return PyTorch's function if PyTorch is loaded and was built for CUDA."""
    return getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_getCurrentRawStream", None)


def _look_up_stream(keep: Callable[[int, Any], None], ordinal: int) -> int:
    """Return the current stream of whichever library is loaded now."""
    of_torch = _torch_stream_getter()
    return cupy_stream(keep, ordinal) if of_torch is None else of_torch(ordinal)


def cupy_stream(keep: Callable[[int, Any], None], ordinal: int) -> int:
    """Return CuPy's current stream on a device; the legacy default stream without CuPy."""
    of_cupy = getattr(getattr(sys.modules.get("cupy"), "cuda", None), "get_current_stream", None)
    if of_cupy is None:
        return 0
    stream = of_cupy(ordinal)
    keep(number := int(stream.ptr), stream)
    return number


def library_stream_getter(array: Any) -> Callable[[], Any] | None:
    """Return the getter of CuPy's current stream for a CuPy array if PyTorch is loaded, too.

    ``find_current_stream`` would find PyTorch's stream. None for other arrays.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray) or _torch_stream_getter() is None:
        return None
    return functools.partial(cupy.cuda.get_current_stream, int(array.device.id))


def stream_handle(stream: Any) -> int:
    """Return the CUstream handle of an int, a stream object or a ``__cuda_stream__``."""
    number = (
        stream if isinstance(stream, int) and not isinstance(stream, bool) else _handle_of(stream)
    )
    if number is None or not 0 <= number < _TOO_LARGE:
        raise InvalidUsage(
            f"stream is {stream!r}: pass a CUstream handle >= 0 or an object that has one"
        )
    return number


def _handle_of(stream: Any) -> int | None:
    """Return the handle of a stream object, or None."""
    try:
        for name in ("cuda_stream", "ptr"):
            number = getattr(stream, name, None)
            if number is not None:
                return int(number)
        return int(stream.__cuda_stream__()[1]) if hasattr(stream, "__cuda_stream__") else None
    except Exception as error:
        raise InvalidUsage(
            f"cannot read the handle of stream {stream!r}: {type(error).__name__}: {error}"
        ) from error


def dlpack_stream(stream: Any, ordinal: int) -> int:
    """Return the consumer's stream for ``__dlpack__``: 1 legacy, 2 per-thread default stream."""
    number = find_current_stream()(ordinal) if stream is None else stream_handle(stream)
    return number or 1
