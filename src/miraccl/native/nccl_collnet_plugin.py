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

from miraccl.errors import SystemFailure
from miraccl.native import nccl_collnet_abi as abi
from miraccl.native.nccl_net_abi import HANDLE_BYTES
from miraccl.native.nccl_net_plugin import LoadedPlugin, log_callback

_P = ctypes.c_void_p


class CollNetPlugin(LoadedPlugin):
    """A loaded CollNet plugin."""

    kind, symbol, entries = "CollNet", abi.symbol, abi.entries

    def _initialize(self) -> None:
        if self.version >= 11:
            self._call("init", ctypes.byref(self._context), ctypes.c_uint64(0), log_callback)
        else:
            self._call("init", log_callback)

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

    def reduce_support(self, dtype: abi.DataType, op: abi.NcclRedOp) -> bool:
        """Return True if the network reduces a type with an operation."""
        supported = ctypes.c_int()
        self._call("reduceSupport", ctypes.c_int(dtype), ctypes.c_int(op), ctypes.byref(supported))
        return bool(supported.value)

    def iallreduce(
        self,
        comm: int,
        send: int,
        recv: int,
        count: int,
        dtype: abi.DataType,
        op: abi.NcclRedOp,
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
        op: abi.NcclRedOp,
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

    def close(self, comm: int) -> None:
        self._call("closeColl", _P(comm))
