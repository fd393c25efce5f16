"""Binary interface of NCCL's network plugins, versions 6 to 12: tables, properties, results.

A plugin exports one table of function pointers per version, ``ncclNetPlugin_v12`` and so on. NCCL
asks for the newest first. The differences between versions:

- v7: connect and accept return a device handle; getDeviceMr, irecvConsumed.
- v8: regIsGlobal; regMr takes a ``size_t``.
- v9: sizes of isend and irecv are ``size_t``; virtual devices, forceFlush, largest transfers.
- v10: init receives a profiler callback; connect a configuration; isend and irecv profiler handles.
- v11: a context per communicator; finalize and setNetAttr.
- v12: eight devices per virtual device, rail and plane.

Source: NCCL 2.30, ``plugins/net/example/nccl/net_v6.h`` to ``net_v12.h`` and ``err.h``.
"""

from __future__ import annotations

import ctypes
import enum

VERSIONS = (12, 11, 10, 9, 8, 7, 6)
"""Versions in the order in which NCCL looks for them."""
HANDLE_BYTES = 128
PTR_HOST, PTR_CUDA, PTR_DMABUF = 1, 2, 4
MAX_REQUESTS = 32
"""Largest number of requests of a communicator that NCCL keeps open."""
UNDEFINED_ID = -1


class Result(enum.IntEnum):
    """``ncclResult_t``."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6


_BEFORE_V7 = (
    "init",
    "devices",
    "getProperties",
    "listen",
    "connect",
    "accept",
    "regMr",
    "regMrDmaBuf",
    "deregMr",
    "isend",
    "irecv",
    "iflush",
    "test",
    "closeSend",
    "closeRecv",
    "closeListen",
)


def symbol(version: int) -> str:
    """Return the name of the table of a version."""
    return f"ncclNetPlugin_v{version}"


def entries(version: int) -> tuple[str, ...]:
    """Return the function pointers of a version's table in their order, after the name."""
    names: tuple[str, ...] = _BEFORE_V7
    if version >= 7:
        names += ("getDeviceMr", "irecvConsumed")
    if version >= 9:
        names += ("makeVDevice",)
    if version >= 11:
        names += ("finalize", "setNetAttr")
    return names


def table_bytes(version: int) -> int:
    """Return the size of a version's table."""
    return 8 * (1 + len(entries(version)))


_C = ctypes
_HEAD = [("name", _C.c_char_p), ("pciPath", _C.c_char_p), ("guid", _C.c_uint64)]
_PORT = [
    ("speed", _C.c_int),
    ("port", _C.c_int),
    ("latency", _C.c_float),
    ("maxComms", _C.c_int),
    ("maxRecvs", _C.c_int),
]
_DEVICE = [("netDeviceType", _C.c_int), ("netDeviceVersion", _C.c_int)]


class _VirtualDevice4(_C.Structure):
    _fields_ = (("ndevs", _C.c_int), ("devs", _C.c_int * 4))


class _VirtualDevice8(_C.Structure):
    _fields_ = (("ndevs", _C.c_int), ("devs", _C.c_int * 8))


def _properties(version: int) -> type[ctypes.Structure]:
    fields: list[tuple[str, type]] = [*_HEAD, ("ptrSupport", _C.c_int)]
    if version >= 8:
        fields.append(("regIsGlobal", _C.c_int))
    if version >= 9:
        fields.append(("forceFlush", _C.c_int))
    fields += _PORT
    if version >= 7:
        fields += _DEVICE
    if version >= 9:
        virtual = _VirtualDevice8 if version >= 12 else _VirtualDevice4
        fields += [
            ("vProps", virtual),
            ("maxP2pBytes", _C.c_size_t),
            ("maxCollBytes", _C.c_size_t),
        ]
    if version >= 11:
        fields.append(("maxMultiRequestSize", _C.c_int))
    if version >= 12:
        fields += [("railId", _C.c_int16), ("planeId", _C.c_int16)]
    return type(f"NetProperties{version}", (_C.Structure,), {"_fields_": fields})


PROPERTIES: dict[int, type[ctypes.Structure]] = {v: _properties(v) for v in VERSIONS}
"""``ncclNetProperties_vN_t`` of each version."""
