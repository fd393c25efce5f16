"""Loader of NCCL's CollNet plugins: any version from 6 to 12 behind one set of methods.

A CollNet plugin reduces in the network (SHARP switches, or a software switch). ``connect`` may
block until all ranks are there, as it may for NCCL; ``iallreduce``, ``iallgather``,
``ireducescatter`` and ``iflush`` return None where the plugin cannot proceed yet.

Only host memory is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.native import nccl_collnet_abi as abi
from miraccl.native.nccl_net_abi import HANDLE_BYTES, PTR_HOST, VERSIONS
from miraccl.native.nccl_net_plugin import (
    PluginDevice,
    check_result,
    device_of,
    log_callback,
    open_library,
    read_table,
)

_P = ctypes.c_void_p


class CollNetPlugin:
    """A loaded CollNet plugin.

    Args:
        path: File of the shared object, a name, or ``STATIC_PLUGIN``, as for ``NetPlugin``.
        version: Version to use; by default the newest that the plugin has.

    Raises:
        SystemFailure: The file cannot be loaded, or a call of the plugin fails.
        InvalidUsage: It has no CollNet plugin, or none of this version.
    """

    def __init__(self, path: str, version: int = 0) -> None:
        self.path = path
        wanted = (version,) if version else VERSIONS
        self._library = open_library(path)
        for candidate in wanted:
            if hasattr(self._library, abi.symbol(candidate)):
                self.version = candidate
                break
        else:
            raise InvalidUsage(
                f"cannot use {path} as a CollNet plugin: it has none of the symbols "
                f"{', '.join(map(abi.symbol, wanted))}"
            )
        self.name, self._functions = read_table(
            self._library, abi.symbol(self.version), abi.entries(self.version)
        )
        self._context = _P()
        if self.version >= 11:
            self._call("init", ctypes.byref(self._context), ctypes.c_uint64(0), log_callback)
        else:
            self._call("init", log_callback)

    def has(self, entry: str) -> bool:
        """Return True if the plugin's table has a function for an entry."""
        return self._functions.get(entry) is not None

    def _call(self, entry: str, *arguments: Any) -> None:
        function = self._functions.get(entry)
        if function is None:
            raise SystemFailure(
                f"CollNet plugin {self.name} has no {entry} (interface v{self.version})"
            )
        check_result(f"CollNet plugin {self.name}", entry, function(*arguments))

    def devices(self) -> list[PluginDevice]:
        """Return the properties of all devices; without one, no other method may be called."""
        count = ctypes.c_int()
        self._call("devices", ctypes.byref(count))
        return [
            device_of(self.version, dev, lambda *args: self._call("getProperties", *args))
            for dev in range(count.value)
        ]

    def listen(self, dev: int) -> tuple[bytes, int]:
        """Return the handle that all ranks need for ``connect``, and the listening object."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        comm = _P()
        context = (self._context,) if self.version >= 11 else ()
        self._call("listen", *context, ctypes.c_int(dev), handle, ctypes.byref(comm))
        return handle.raw, comm.value or 0

    def connect(self, handles: Sequence[bytes], rank: int, listening: int) -> int:
        """Connect a group; return its communicator.

        Args:
            handles: One of ``HANDLE_BYTES`` per rank, in the order of ranks.
            rank: This rank's number in the group.
            listening: This rank's listening object.
        """
        buffers = [ctypes.create_string_buffer(h, HANDLE_BYTES) for h in handles]
        pointers = (_P * len(buffers))(*map(ctypes.addressof, buffers))
        comm = _P()
        self._call(
            "connect",
            pointers,
            ctypes.c_int(len(buffers)),
            ctypes.c_int(rank),
            _P(listening),
            ctypes.byref(comm),
        )
        if not comm.value:
            raise SystemFailure(f"CollNet plugin {self.name} connected no communicator")
        return comm.value

    def reduce_support(self, dtype: abi.DataType, op: abi.RedOp) -> bool:
        """Return True if the network reduces a type with an operation."""
        supported = ctypes.c_int()
        self._call("reduceSupport", ctypes.c_int(dtype), ctypes.c_int(op), ctypes.byref(supported))
        return bool(supported.value)

    def register(self, comm: int, address: int, nbytes: int) -> int:
        """Register host memory; return the plugin's handle for it."""
        handle = _P()
        size = ctypes.c_size_t(nbytes) if self.version >= 8 else ctypes.c_int(nbytes)
        self._call(
            "regMr", _P(comm), _P(address), size, ctypes.c_int(PTR_HOST), ctypes.byref(handle)
        )
        return handle.value or 0

    def deregister(self, comm: int, handle: int) -> None:
        self._call("deregMr", _P(comm), _P(handle))

    def iallreduce(
        self,
        comm: int,
        send: int,
        recv: int,
        count: int,
        dtype: abi.DataType,
        op: abi.RedOp,
        send_handle: int,
        recv_handle: int,
    ) -> int | None:
        """Begin an all-reduce of ``count`` elements; return the request.

        ``send`` and ``recv`` are addresses of registered memory.
        """
        request = _P()
        elements: Any = ctypes.c_size_t(count) if self.version >= 9 else ctypes.c_int(count)
        self._call(
            "iallreduce",
            _P(comm),
            _P(send),
            _P(recv),
            elements,
            ctypes.c_int(dtype),
            ctypes.c_int(op),
            _P(send_handle),
            _P(recv_handle),
            ctypes.byref(request),
        )
        return request.value

    def iallgather(
        self,
        comm: int,
        send: int,
        parts: Sequence[abi.Part],
        bytes_per_rank: int,
        window: tuple[int, int],
        send_handle: int,
    ) -> int | None:
        """Begin an all-gather; return the request.

        Args:
            send: Address of this rank's contribution within the window.
            parts: Where the result goes.
            bytes_per_rank: Length of each rank's contribution to the whole operation.
            window: Offset and length in bytes of what this call moves of the whole result.
            send_handle: Registration of ``send``.
        """
        request = _P()
        array = abi.encode_parts(self.version, tuple(parts))
        self._call(
            "iallgather",
            _P(comm),
            _P(send),
            ctypes.c_int(len(parts)),
            array,
            *map(ctypes.c_size_t, (bytes_per_rank, *window)),
            _P(send_handle),
            ctypes.byref(request),
        )
        return request.value

    def ireducescatter(
        self,
        comm: int,
        parts: Sequence[abi.Part],
        recv: int,
        bytes_per_rank: int,
        window: tuple[int, int],
        dtype: abi.DataType,
        op: abi.RedOp,
        recv_handle: int,
    ) -> int | None:
        """Begin a reduce-scatter; return the request. Arguments as for ``iallgather``."""
        request = _P()
        array = abi.encode_parts(self.version, tuple(parts))
        self._call(
            "ireducescatter",
            _P(comm),
            ctypes.c_int(len(parts)),
            array,
            _P(recv),
            *map(ctypes.c_size_t, (bytes_per_rank, *window)),
            ctypes.c_int(dtype),
            ctypes.c_int(op),
            _P(recv_handle),
            ctypes.byref(request),
        )
        return request.value

    def iflush(self, comm: int, address: int, nbytes: int, handle: int) -> int | None:
        """Begin to make received data visible to the device that owns the memory."""
        request = _P()
        self._call(
            "iflush",
            _P(comm),
            _P(address),
            ctypes.c_int(nbytes),
            _P(handle),
            ctypes.byref(request),
        )
        return request.value

    def test(self, request: int) -> int | None:
        """Return the bytes of a finished request, None for one that has not finished."""
        done, size = ctypes.c_int(), ctypes.c_int(-1)
        self._call("test", _P(request), ctypes.byref(done), ctypes.byref(size))
        return size.value if done.value else None

    def close(self, comm: int) -> None:
        self._call("closeColl", _P(comm))

    def close_listen(self, listening: int) -> None:
        self._call("closeListen", _P(listening))
