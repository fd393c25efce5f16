"""Launches without cuda.bindings: the C function gets what it should, and the pointers and the stream of each call; so through doors, which
find the launch of a call by themselves.  PyTorch's tensors stand in CPU memory here."""

from __future__ import annotations

import ctypes
import types
from typing import Any

import numpy as np
import pytest

from miraccl import native
from miraccl.executor.cuda import launch
from miraccl.executor.cuda.doors import layout as at
from miraccl.executor.cuda.doors.table import SHAPES, Doors
from miraccl.types import Collective, DType, PreMulSum, RedOp

DL_CPU = 1


class Driver:
    """A cuLaunchKernelEx that writes down what it gets."""

    def __init__(self, codes: tuple[int, ...] = ()) -> None:
        self.seen: list[tuple[int, ...]] = []
        self._codes = codes
        self._function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launched)
        self._keep: list[Any] = []

    def _launched(self, config: int, function: int, parameters: int, extra: int | None) -> int:
        said = launch._Config.from_address(config)
        argument = (ctypes.c_uint64 * 2).from_address(parameters)  # as if the address of the argument stood there
        shape = (*said.grid, *said.block, said.shared_bytes, said.stream or 0)
        attribute = said.attributes[0]
        assert (said.nattributes, attribute.id, attribute.value[0], ctypes.sizeof(attribute)) == (1, 6, 1, 72)
        self.seen.append((function, extra or 0, *shape, *argument))
        return self._codes[len(self.seen) - 1] if len(self.seen) <= len(self._codes) else 0

    def block(self, function: int) -> int:
        """The words of a launch of ``function``."""
        argument = (ctypes.c_uint64 * 3)(1, 2, 3)
        config = launch._Config((528, 1, 2), (256, 3, 4), 48, None, ctypes.pointer(launch._Attribute(6, (1,))), 1)
        assert (ctypes.sizeof(config), launch._Config.stream.offset) == (56, at.CONFIG_STREAM)
        address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        words = (address, ctypes.addressof(argument), ctypes.addressof(config), function, ctypes.addressof(argument))
        assert len(words) == at.BLOCK_WORDS
        block = (ctypes.c_uint64 * len(words))(*words)
        self._keep += [argument, config, block]
        return ctypes.addressof(block)


SHAPE = (528, 1, 2, 256, 3, 4, 48)


def test_a_launch_passes_its_words() -> None:
    driver = Driver((700, -3))
    block = driver.block(1 << 46)
    run = native.builtin("launch", native.library("miraccl.executor.cuda.doors.call").address(native.PREFIX + "launch"))
    assert run(block, 1 << 44, (1 << 44) + 8, 77) == 700
    assert run(block, 5, 6, 0) == -3
    assert driver.seen[0] == (1 << 46, 0, *SHAPE, 77, 1 << 44, (1 << 44) + 8)
    assert driver.seen[1][-3:] == (0, 5, 6)


class Side:
    """Two ranks' doors as a communicator has them, on tensors in CPU memory, whose stream is 0."""

    def __init__(self) -> None:
        self.abort, self.order = ctypes.c_uint32(0), ctypes.c_int64(7)
        self.doors = Doors(2, 0, abort=ctypes.addressof(self.abort), order=ctypes.addressof(self.order), own=7)
        self.doors._put(at.STATE_DEVICE, DL_CPU)
        self.doors.stream = 0
        self.driver = Driver()
        self.door = {collective: self.doors.door(collective) for collective in SHAPES}

    def remember(self, collective: Collective, dtype: DType, count: int, op: Any = RedOp.SUM, root: int = 0, fills: bool = False) -> Any:
        """A launch whose function is its number."""
        made: Any = types.SimpleNamespace(block=self.driver.block(count))
        self.doors.remember(collective, dtype, count, op, root, made, fills)
        return made

    def all_reduce(self, x: Any, out: Any = None, op: Any = RedOp.SUM, stream: Any = None) -> int:
        return self.door[Collective.ALL_REDUCE](x, out, op, stream)


@pytest.fixture
def side() -> Side:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError)
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"tensors of PyTorch {torch.__version__} have no interface for compiled code")
    return Side()


def test_doors_find_the_launch(side: Side) -> None:
    import torch

    x, out, both = torch.zeros(4, 3), torch.zeros(12), torch.zeros(24)
    assert side.all_reduce(x) == 1  # nothing is remembered yet
    made = side.remember(Collective.ALL_REDUCE, DType.FLOAT32, 12)
    side.remember(Collective.ALL_GATHER, DType.FLOAT32, 12)
    side.remember(Collective.REDUCE_SCATTER, DType.FLOAT32, 12, RedOp.MAX)
    assert side.all_reduce(x) == 0
    assert side.driver.seen == [(12, 0, *SHAPE, 0, x.data_ptr(), x.data_ptr())]
    assert side.doors.last is made
    assert side.all_reduce(x[1:], out[3:]) == 1  # 9 elements
    assert side.all_reduce(x, out) == 0
    assert side.driver.seen[-1][-2:] == (x.data_ptr(), out.data_ptr())
    assert side.door[Collective.ALL_GATHER](x, both, None, None) == 0
    assert side.door[Collective.REDUCE_SCATTER](both, x, RedOp.MAX, None) == 0
    assert side.driver.seen[-1][-2:] == (both.data_ptr(), x.data_ptr())
    assert side.door[Collective.REDUCE_SCATTER](both, x, RedOp.MIN, None) == 1
    assert side.door[Collective.ALL_GATHER](x, out, None, None) == 1
    side.doors.went_another_way()
    assert side.doors.last is None
    side.remember(Collective.BROADCAST, DType.FLOAT32, 12, root=1)
    assert side.door[Collective.BROADCAST](x, None, 1, None) == 0
    for root in (0, 2, -1, 1 << 70, True, 1.0, None):
        assert side.door[Collective.BROADCAST](x, None, root, None) == 1
    assert len(side.driver.seen) == 5


def test_what_goes_the_long_way(side: Side) -> None:
    import torch

    side.remember(Collective.ALL_REDUCE, DType.FLOAT32, 12)
    side.remember(Collective.ALL_GATHER, DType.FLOAT32, 12)
    side.remember(Collective.ALL_REDUCE, DType.FLOAT32, 8, fills=True)
    side.remember(Collective.ALL_REDUCE, DType.FLOAT32, 7, PreMulSum(2.0))
    x, whole = torch.zeros(12), torch.zeros(36)
    for thing in (
        np.zeros(12, np.float32),
        [0.0] * 12,
        None,
        torch.zeros(12, dtype=torch.float64),
        torch.zeros(24)[::2],
        torch.zeros(3, 4).T,
        torch.zeros(0),
        torch.nn.Parameter(torch.zeros(12)),
        torch.zeros(12, device="meta"),
        torch.zeros(12, dtype=torch.complex64).conj(),
        torch.zeros(12).to_sparse(),
    ):
        assert side.all_reduce(thing) == 1
        assert side.all_reduce(x, thing) == 1 or thing is None
    side.driver.seen.clear()
    assert side.all_reduce(x, op=PreMulSum(2.0)) == 1
    assert side.all_reduce(torch.zeros(7), op=PreMulSum(2.0)) == 1
    assert side.all_reduce(x, op=0) == 1  # the number of the operator
    assert side.door[Collective.ALL_GATHER](x, None, None, None) == 1
    assert side.door[Collective.ALL_GATHER](whole[12:24], whole[12:], None, None) == 1
    assert side.door[Collective.ALL_GATHER](whole[11:23], whole[12:], None, None) == 1
    assert side.door[Collective.ALL_GATHER](whole[:12], whole[12:], None, None) == 0
    assert side.all_reduce(torch.zeros(8)) == 0
    side.order.value = 8  # another communicator has filled the GPU since
    assert side.all_reduce(torch.zeros(8)) == 1
    assert side.all_reduce(x) == 0
    for stream in (1, -1, 1 << 70, 0.0, torch.Stream(device="cpu")):
        assert side.all_reduce(x, stream=stream) == 1
    side.doors.stream = 5
    assert side.all_reduce(x) == 1
    assert side.all_reduce(x, stream=5) == 0
    assert side.driver.seen[-1][-3] == 5
    side.doors.stream = -1  # before the first operation
    assert side.all_reduce(x, stream=-1) == 1
    side.doors.stream = 0
    assert side.all_reduce(x, stream=0) == 0
    side.abort.value = 1
    assert side.all_reduce(x) == 1
    side.abort.value = 0
    side.doors.forget()
    assert side.all_reduce(x) == 1
    assert len(side.driver.seen) == 5


def test_more_launches_than_the_table_holds(side: Side) -> None:
    import torch

    x, counts = torch.zeros(2 * at.TABLE_SLOTS), range(1, 2 * at.TABLE_SLOTS)
    for count in counts:
        side.remember(Collective.ALL_REDUCE, DType.FLOAT32, count)
        assert side.all_reduce(x[:count]) == 0
        assert side.driver.seen[-1][0] == count
    assert len(side.doors._launches) <= at.TABLE_SLOTS
    found = [count for count in counts if side.all_reduce(x[:count]) == 0]
    assert [row[0] for row in side.driver.seen[-len(found) :]] == found


def test_powers_of_two_find_places_of_their_own(side: Side) -> None:
    """What a program uses: sizes that differ by factors of two, of several collectives, types and operators."""
    kinds = [(collective, op) for collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER) for op in (RedOp.SUM, RedOp.MAX)]
    dtypes = (DType.FLOAT32, DType.BFLOAT16, DType.INT64)
    for collective, op in kinds:
        for dtype in dtypes:
            for bits in range(30):
                side.remember(collective, dtype, 1 << bits, op)
    assert len(side.doors._launches) == len(kinds) * len(dtypes) * 30
