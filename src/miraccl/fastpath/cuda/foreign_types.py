"""Types of arrays that fast calls read by a protocol (``foreign``), and their records."""

from __future__ import annotations

import ctypes
import inspect
import sys
from typing import Any, NamedTuple

from miraccl.executor.cuda import fast_call_layout
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DL_TYPES

DL_DTYPES = {dtype: code | bits << 8 | 1 << 16 for (code, bits), dtype in DL_TYPES.items()}
#: typestr of ``__cuda_array_interface__`` -> DLDataType; NumPy's code, or a name without one.
_TYPESTRS = {
    dtype.str if dtype.isbuiltin == 1 else dtype.name: DL_DTYPES[code]
    for code, dtype in NUMPY_DTYPE.items()
}
_DLPACK, _INTERFACE, _SHARDING = "__dlpack__", "__cuda_array_interface__", "sharding"
_PLAIN, _VERSIONED = (
    ctypes.create_string_buffer(b"dltensor"),
    ctypes.create_string_buffer(b"dltensor_versioned"),
)
_VERSION = (1, 0)
_KEYWORDS, _OLD_KEYWORDS = ("stream", "max_version"), ("stream",)  # in the order of ``STATE_ARGS``
#: Function of JAX; the method wraps it and spends two microseconds on the sharding.
_EXPORT = "buffer_to_dlpack_managed_tensor"

#: (offset in the state of a communicator, constant word).
STATE_CONSTANTS = (
    (fast_call_layout.STATE_DLPACK, id(_DLPACK)),
    (fast_call_layout.STATE_INTERFACE, id(_INTERFACE)),
    (fast_call_layout.STATE_SHARDING, id(_SHARDING)),
    *(
        (fast_call_layout.STATE_KEYS + 8 * number, id(key))
        for number, key in enumerate(fast_call_layout.KEYS)
    ),
    (fast_call_layout.STATE_TYPESTRS, id(_TYPESTRS)),
    (fast_call_layout.STATE_DICT_TYPE, id(dict)),
    (fast_call_layout.STATE_STR_TYPE, id(str)),
    (fast_call_layout.STATE_TRUE, id(True)),
    (fast_call_layout.STATE_EXCEPTION, id(Exception)),
    (fast_call_layout.STATE_CAPSULE_NAME, ctypes.addressof(_PLAIN)),
    (fast_call_layout.STATE_VERSIONED_NAME, ctypes.addressof(_VERSIONED)),
    (fast_call_layout.STATE_ARGS + 16, id(_VERSION)),
)


class ArrayProtocol(NamedTuple):
    """Protocol by which arrays of a type are read: DLPack, or ``__cuda_array_interface__``."""

    dlpack: bool
    immutable: bool = False  # although DLPack does not say so


def foreign_record(type_: type, protocol: ArrayProtocol) -> tuple[dict[int, int], Any]:
    """Return (words of a ``STATE_FOREIGN_TYPES`` record, object that must outlive it)."""
    export, sharding = _export_of(type_) if protocol.immutable else (None, None)
    keywords = _keywords_of(type_) if protocol.dlpack and export is None else _OLD_KEYWORDS
    record = {
        fast_call_layout.FOREIGN_DLPACK: int(protocol.dlpack),
        fast_call_layout.FOREIGN_IMMUTABLE: int(protocol.immutable),
        fast_call_layout.FOREIGN_EXPORT: id(export) if export is not None else 0,
        fast_call_layout.FOREIGN_KEYWORDS: id(keywords),
        fast_call_layout.FOREIGN_SHARDING: id(sharding) if export is not None else 0,
        fast_call_layout.FOREIGN_TYPE: id(type_),
    }
    return record, (type_, export, sharding)


def _export_of(type_: type) -> tuple[Any, Any]:
    """Return (JAX's function that creates an array's capsule, type of the sharding it is valid
    for),
    or None.
    """
    export = getattr(sys.modules.get(type_.__module__), _EXPORT, None)
    sharding = getattr(
        getattr(sys.modules.get("jax"), "sharding", None), "SingleDeviceSharding", None
    )
    return (None, None) if export is None or sharding is None else (export, sharding)


def _keywords_of(type_: type) -> tuple[str, ...]:
    """Return the names of the keyword arguments that ``__dlpack__`` of the type accepts."""
    try:
        parameters = inspect.signature(getattr(type_, _DLPACK)).parameters.values()
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # an instance attribute, or without a signature
        return _KEYWORDS
    new = any(p.name == _KEYWORDS[1] or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return _KEYWORDS if new else _OLD_KEYWORDS
