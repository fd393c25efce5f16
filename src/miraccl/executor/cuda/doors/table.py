"""The doors of a communicator on GPU memory, and the launches that they find.

A call of a collective whose launch has been prepared needs nothing of Python but the addresses of two tensors and the current stream, and
the type of the tensors tells these to compiled code: ``__dlpack_c_exchange_api__`` (DLPack 1.3; PyTorch has it from 2.10 on).  Doors know
PyTorch's tensors; all other arrays, and all that is not as the last time, go the long way.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from miraccl import native
from miraccl.executor.cuda.doors import layout as at
from miraccl.executor.cuda.launch import Launch
from miraccl.types import DL_TYPES, Collective, DType, RedOp

Door = Callable[[Any, Any, Any, Any], int]
#: collective -> whether ``x`` has a block per rank, whether ``out`` has, whether the result lies in ``x`` without ``out``
SHAPES = {
    Collective.ALL_REDUCE: (False, False, True),
    Collective.ALL_GATHER: (False, True, False),
    Collective.REDUCE_SCATTER: (True, False, False),
    Collective.ALL_TO_ALL: (True, True, False),
    Collective.BROADCAST: (False, False, True),
}
_OPERATORS = tuple(RedOp(number) for number in range(at.NOPS))
_DL_DTYPES = {dtype: code | bits << 8 | 1 << 16 for (code, bits), dtype in DL_TYPES.items()}
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Doors:
    """``abort`` is the address of a 32-bit word that is not 0 when calls are to go the long way; ``order`` a word that holds ``own`` while
    no other communicator has filled the GPU last."""

    def __init__(self, nranks: int, ordinal: int, *, abort: int, order: int, own: int) -> None:
        self._nranks = nranks
        self._state = np.zeros(at.STATE_BYTES // 8, np.int64)
        self._records: list[Any] = []
        self._launches: dict[int, Launch] = {}  # by the address of their block: those in the table
        self._put(at.STATE_ABORT, abort)
        self._put(at.STATE_DEVICE, ordinal << 32 | at.DL_CUDA)
        self._put(at.STATE_ORDER, order)
        self._put(at.STATE_SELF, own)
        self._put(at.STATE_NONE, id(None))
        self._put(at.STATE_INT_TYPE, id(int))
        self.stream = -1
        for number, op in enumerate(_OPERATORS):
            self._put(at.STATE_OPS + 8 * number, id(op))

    def _put(self, where: int, value: int) -> None:
        self._state[where // 8] = value

    @property
    def stream(self) -> int:
        """Of the last operation, as the driver's number; -1 before the first."""
        return int(self._state[at.STATE_STREAM // 8])

    @stream.setter
    def stream(self, number: int) -> None:
        self._put(at.STATE_STREAM, number)

    def door(self, collective: Collective) -> Door:
        """The builtin ``door(x, out, op or root, stream)`` of a collective: 0, or not 0 where Python is to do it."""
        many_in, many_out, in_place = SHAPES[collective]
        blocks = (self._nranks if many_in else 1, self._nranks if many_out else 1)
        third = at.THIRD_OPERATOR if collective.reduces else at.THIRD_ROOT if collective.rooted else at.THIRD_NOTHING
        record = np.array([self._state.ctypes.data, int(collective), *blocks, third, in_place], np.int64)
        self._records.append(record)
        entry = native.library("miraccl.executor.cuda.doors.call").address(native.PREFIX + "collective")
        return native.builtin(collective.label, entry, int(record.ctypes.data))

    # ---- the table

    def remember(self, collective: Collective, dtype: DType, count: int, op: Any, root: int, launch: Launch, fills: bool) -> None:
        """Enter a launch for blocks of ``count`` elements; an older entry in its places is replaced."""
        block = launch.block
        if collective not in SHAPES or not block or dtype not in _DL_DTYPES or not self._knows_tensors():
            return
        if collective.reduces and not isinstance(op, RedOp):  # with a scalar of its own
            return
        key = at.key_of(int(collective), int(op) if collective.reduces else root, _DL_DTYPES[dtype])
        places = [at.STATE_TABLE + at.slot_of(key, count, probe) * at.ROW_BYTES for probe in range(at.PROBES)]
        free = [place for place in places if not self._state[(place + at.ROW_BLOCK) // 8]]
        row = free[0] if free else places[0]
        self._launches.pop(int(self._state[(row + at.ROW_BLOCK) // 8]), None)
        self._launches[block] = launch
        for offset, value in ((at.ROW_KEY, key), (at.ROW_COUNT, count), (at.ROW_BLOCK, block), (at.ROW_FILLS, int(fills))):
            self._put(row + offset, value)

    def forget(self) -> None:
        """Drop all launches."""
        self._state[at.STATE_TABLE // 8 :] = 0
        self.went_another_way()
        self._launches.clear()

    @property
    def last(self) -> Launch | None:
        """The launch of the last operation, if that went through a door."""
        return self._launches.get(int(self._state[at.STATE_LAST // 8]))

    def went_another_way(self) -> None:
        """The last operation did not go through a door."""
        self._put(at.STATE_LAST, 0)

    def _knows_tensors(self) -> bool:
        """Whether PyTorch is there and offers what doors need; its type is asked for once."""
        torch = sys.modules.get("torch")
        if self._state[at.STATE_TYPE // 8] == 0 and torch is not None:
            capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
            if type(capsule).__name__ != "PyCapsule":
                return False
            table = int(_get_pointer(capsule, b"dlpack_exchange_api") or 0)
            if ctypes.c_uint32.from_address(table + at.API_MAJOR).value != at.DL_MAJOR:
                return False
            self._put(at.STATE_VIEW, ctypes.c_int64.from_address(table + at.API_VIEW).value)
            self._put(at.STATE_CURRENT, ctypes.c_int64.from_address(table + at.API_CURRENT).value)
            self._put(at.STATE_TYPE, id(torch.Tensor))
        return bool(self._state[at.STATE_TYPE // 8])
