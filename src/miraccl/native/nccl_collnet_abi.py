"""Binary interface of NCCL's CollNet plugins, versions 6 to 12: tables, parts, types.

A CollNet plugin reduces in the network. Its table ``ncclCollNetPlugin_vN`` lies in the same shared
object as the network table of the same version (``nccl_net_abi``), whose properties it shares. The
differences between versions:

- v8: iallgather and ireducescatter; regMr takes a ``size_t``.
- v9: the count of iallreduce and the size of a part are ``size_t``; makeVDevice.
- v11: a context per communicator for init and listen; finalize.

If ``devices`` returns 0, NCCL uses no other entry, and they may be NULL.

Source: NCCL 2.30, ``src/include/plugin/net/net_v6.h`` to ``net_v12.h``, ``nccl.h``.
"""

from __future__ import annotations

import ctypes
import enum
from dataclasses import dataclass

from miraccl.native.nccl_net_abi import VERSIONS

MAX_BYTES_V8 = 512 << 20
"""Largest part that NCCL passes to plugins before v9 (``MAX_COLLNET_SIZE``)."""

_C = ctypes


class DataType(enum.IntEnum):
    """``ncclDataType_t``."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT8_E4M3 = 10
    FLOAT8_E5M2 = 11


ITEM_BYTES: dict[DataType, int] = {
    DataType.INT8: 1,
    DataType.UINT8: 1,
    DataType.INT32: 4,
    DataType.UINT32: 4,
    DataType.INT64: 8,
    DataType.UINT64: 8,
    DataType.FLOAT16: 2,
    DataType.FLOAT32: 4,
    DataType.FLOAT64: 8,
    DataType.BFLOAT16: 2,
    DataType.FLOAT8_E4M3: 1,
    DataType.FLOAT8_E5M2: 1,
}
"""Bytes of an element of each type."""


class NcclRedOp(enum.IntEnum):
    """``ncclRedOp_t``."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


def symbol(version: int) -> str:
    """Return the name of the table of a version."""
    return f"ncclCollNetPlugin_v{version}"


def entries(version: int) -> tuple[str, ...]:
    """Return the function pointers of a version's table in their order, after the name."""
    names: tuple[str, ...] = (
        "init",
        "devices",
        "getProperties",
        "listen",
        "connect",
        "reduceSupport",
        "regMr",
        "regMrDmaBuf",
        "deregMr",
        "iallreduce",
    )
    if version >= 8:
        names += ("iallgather", "ireducescatter")
    names += ("iflush", "test", "closeColl", "closeListen")
    if version >= 9:
        names += ("makeVDevice",)
    if version >= 11:
        names += ("finalize",)
    return names


def arguments(version: int, entry: str) -> int:
    """Return the number of arguments of an entry; each is an integer or a pointer."""
    context = version >= 11
    match entry:
        case "init":
            return 3 if context else 1
        case "listen":
            return 3 + context
    return {
        "devices": 1,
        "getProperties": 2,
        "connect": 5,
        "reduceSupport": 3,
        "regMr": 5,
        "regMrDmaBuf": 7,
        "deregMr": 2,
        "iallreduce": 9,
        "iallgather": 9,
        "ireducescatter": 11,
        "iflush": 5,
        "test": 3,
        "closeColl": 1,
        "closeListen": 1,
        "makeVDevice": 2,
        "finalize": 1,
    }[entry]


def table_bytes(version: int) -> int:
    """Return the size of a version's table."""
    return 8 * (1 + len(entries(version)))


class _Part8(_C.Structure):
    _fields_ = (("mhandle", _C.c_void_p), ("address", _C.c_void_p), ("size", _C.c_uint32))


class _Part9(_C.Structure):
    _fields_ = (("mhandle", _C.c_void_p), ("address", _C.c_void_p), ("size", _C.c_size_t))


PARTS: dict[int, type[ctypes.Structure]] = {
    v: _Part9 if v >= 9 else _Part8 for v in VERSIONS if v >= 8
}
"""``ncclNetSGE_vN_t`` of each version: a part of the buffer of iallgather and ireducescatter."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A registered range of the buffer of iallgather or ireducescatter.

    Attributes:
        mhandle: What regMr returned.
        address: Start of the range.
        nbytes: Its length.
    """

    mhandle: int
    address: int
    nbytes: int


def encode_parts(version: int, parts: tuple[Part, ...]) -> ctypes.Array[ctypes.Structure]:
    """Return the C array of parts. Raises ``ValueError`` for what a version cannot express."""
    if version < 9:
        # NCCL's own adaptor of older plugins passes one part of at most MAX_BYTES_V8.
        if len(parts) != 1:
            raise ValueError(f"version {version} takes one part, not {len(parts)}")
        if parts[0].nbytes > MAX_BYTES_V8:
            raise ValueError(
                f"version {version} takes parts of at most {MAX_BYTES_V8} bytes, not "
                f"{parts[0].nbytes}"
            )
    array: ctypes.Array[ctypes.Structure] = (PARTS[version] * len(parts))()
    for item, part in zip(array, parts, strict=True):
        item.mhandle, item.address, item.size = (
            part.mhandle,
            part.address,
            part.nbytes,
        )
    return array


def decode_parts(version: int, address: int, count: int) -> tuple[Part, ...]:
    """Return the parts of a C array at an address."""
    array = (PARTS[version] * count).from_address(address)
    return tuple(
        Part(mhandle=item.mhandle or 0, address=item.address or 0, nbytes=item.size)
        for item in array
    )
