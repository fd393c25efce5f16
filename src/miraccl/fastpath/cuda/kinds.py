"""Types of arrays that doors ask by their protocol (``doors.foreign``): the words that tell them how."""

from __future__ import annotations

import ctypes
import inspect
import sys
from typing import Any, NamedTuple

from miraccl.fastpath.cuda import layout as at
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import DL_TYPES

DL_DTYPES = {dtype: code | bits << 8 | 1 << 16 for (code, bits), dtype in DL_TYPES.items()}
#: what ``__cuda_array_interface__`` says of types: NumPy's code, the name of those that have none
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
_EXPORT = "buffer_to_dlpack_managed_tensor"  # of JAX; the method is a wrapper, which takes two microseconds to look at the sharding

#: places in the state of a communicator and what stands there
WORDS = (
    (at.STATE_DLPACK, id(_DLPACK)),
    (at.STATE_INTERFACE, id(_INTERFACE)),
    (at.STATE_SHARDING, id(_SHARDING)),
    *((at.STATE_KEYS + 8 * number, id(key)) for number, key in enumerate(at.KEYS)),
    (at.STATE_TYPESTRS, id(_TYPESTRS)),
    (at.STATE_DICT_TYPE, id(dict)),
    (at.STATE_STR_TYPE, id(str)),
    (at.STATE_TRUE, id(True)),
    (at.STATE_EXCEPTION, id(Exception)),
    (at.STATE_PLAIN, ctypes.addressof(_PLAIN)),
    (at.STATE_VERSIONED, ctypes.addressof(_VERSIONED)),
    (at.STATE_ARGS + 16, id(_VERSION)),
)


class Kind(NamedTuple):
    """How arrays of a type are looked at: by DLPack, or by ``__cuda_array_interface__``."""

    dlpack: bool
    immutable: bool = False  # though DLPack does not say so


def words_of(kind: type, how: Kind) -> tuple[dict[int, int], Any]:
    """(the words of a row of ``STATE_KINDS``, an object that must live as long as they stand there)."""
    export, sharding = _export_of(kind) if how.immutable else (None, None)
    keywords = _keywords_of(kind) if how.dlpack and export is None else _OLD_KEYWORDS
    words = {
        at.KIND_DLPACK: int(how.dlpack),
        at.KIND_IMMUTABLE: int(how.immutable),
        at.KIND_EXPORT: id(export) if export is not None else 0,
        at.KIND_KEYWORDS: id(keywords),
        at.KIND_SHARDING: id(sharding) if export is not None else 0,
        at.KIND_TYPE: id(kind),
    }
    return words, (kind, export, sharding)


def _export_of(kind: type) -> tuple[Any, Any]:
    """(JAX's function that gives the capsule of an array, the type that the sharding of these arrays has); None without."""
    export = getattr(sys.modules.get(kind.__module__), _EXPORT, None)
    sharding = getattr(
        getattr(sys.modules.get("jax"), "sharding", None), "SingleDeviceSharding", None
    )
    return (None, None) if export is None or sharding is None else (export, sharding)


def _keywords_of(kind: type) -> tuple[str, ...]:
    """Names of the arguments that the method takes."""
    try:
        parameters = inspect.signature(getattr(kind, _DLPACK)).parameters.values()
    except (
        AttributeError,
        TypeError,
        ValueError,
    ):  # the method is that of an object, or one that does not tell
        return _KEYWORDS
    new = any(p.name == _KEYWORDS[1] or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    return _KEYWORDS if new else _OLD_KEYWORDS
