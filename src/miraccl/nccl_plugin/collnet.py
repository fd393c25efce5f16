"""CollNet table of the exported plugin.

With ``MIRACCL_SWITCH`` the table has a device: software switches reduce (``collnet_switch``).

Without it, miraccl's transports move data and do not reduce, so the table says so: ``devices``
returns 0, with which NCCL uses no CollNet algorithm and no other entry, and ``reduceSupport``
returns 0 for every type. Entries that may not be called then fail with ``ncclSystemError`` and
write no result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from miraccl import params, trace
from miraccl.native import nccl_collnet_abi
from miraccl.native.nccl_net_abi import Result
from miraccl.nccl_plugin.callbacks import guarded
from miraccl.nccl_plugin.collnet_switch import SwitchFunctions
from miraccl.transport.fifo import memory_at

log = trace.logger("nccl_plugin")

_INT64 = ctypes.c_int64


class CollNetEntries:
    """Addresses of the functions of the CollNet tables; keep it while NCCL may call them."""

    def __init__(self) -> None:
        self._switch = SwitchFunctions() if params.SWITCH.read() else None
        self._kept: dict[tuple[str, int], Any] = {}

    def address(self, entry: str, version: int) -> int:
        """Return the address of a table's function, 0 for one that may be absent."""
        if entry in ("regMrDmaBuf", "makeVDevice"):
            return 0
        nargs = nccl_collnet_abi.arguments(version, entry)
        # Every C argument is an integer or a pointer in a register or stack word of its own.
        kept = self._kept[entry, version] = ctypes.CFUNCTYPE(ctypes.c_int, *[_INT64] * nargs)(
            self._function(entry, version)
        )
        return ctypes.cast(kept, ctypes.c_void_p).value or 0

    def _function(self, entry: str, version: int) -> Callable[..., int]:
        if self._switch is not None:
            return guarded(entry, self._switch.function(entry, version))
        match entry:
            case "init":
                return _init_context if version >= 11 else _succeed
            case "devices":
                return _no_devices
            case "reduceSupport":
                return _no_support
            case "finalize":
                return _succeed
        return _unsupported(entry)


def _succeed(*_: int) -> int:
    return Result.SUCCESS


def _init_context(context: int, *_: int) -> int:
    memory_at(context, 8)[:] = (1).to_bytes(8, "little")
    return Result.SUCCESS


def _no_devices(count: int) -> int:
    memory_at(count, 4)[:] = bytes(4)
    return Result.SUCCESS


def _no_support(dtype: int, op: int, supported: int) -> int:
    memory_at(supported, 4)[:] = bytes(4)
    return Result.SUCCESS


def _unsupported(entry: str) -> Callable[..., int]:
    def fail(*_: int) -> int:
        log.warning(
            "cannot run CollNet's %s: this plugin has no device that reduces in the network", entry
        )
        return Result.SYSTEM_ERROR

    return fail
