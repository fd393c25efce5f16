"""Compiled fast path: what it handles, and what it leaves to the slow path."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl import Communicator, DType, RedOp
from miraccl.errors import InvalidUsage
from miraccl.executor.cpu import arrays
from miraccl.executor.cpu.context import PLAN_SLOTS, _plan_key
from miraccl.executor.cpu.kernels import layout
from tests.runtime import reference as ref


@pytest.fixture(scope="module")
def comm() -> Iterator[Communicator]:
    with miraccl.init() as made:
        yield made


def entered(comm: Communicator, array: Any) -> int:
    """Return the answer of the fast call of all_reduce for an array."""
    return comm._fast.all_reduce(array, None, RedOp.SUM, False, None)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(0, 5000), dtype=st.sampled_from(list(DType)))
def test_a_call_enters_once_its_like_was_seen(comm: Communicator, count: int, dtype: DType) -> None:
    array = np.zeros(count, ref.DTYPES[dtype])
    comm.all_reduce(array)
    assert entered(comm, array) == layout.OK
    assert entered(comm, array.reshape(1, -1)) == layout.OK
    assert comm.last_plan is not None


@pytest.mark.parametrize("bits", [31, 32, 33, 36])
def test_the_hash_of_huge_counts_wraps_alike(comm: Communicator, bits: int) -> None:
    """Address space without memory: in place on one rank nothing is touched."""
    for extra in (0, 1, 4097):
        memory = mmap.mmap(
            -1,
            (1 << bits) + extra,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000),
        )
        array = np.frombuffer(memory, np.uint8)
        comm.all_reduce(array)
        assert entered(comm, array) == layout.OK
        del array


words = st.integers(0, 1 << 62)


@given(
    words, words, st.integers(0, 9), st.integers(0, 11), st.integers(0, 1 << 31), st.integers(0, 1)
)
def test_the_hash_is_a_word(
    count: int, out_count: int, coll: int, dtype: int, arg: int, in_place: int
) -> None:
    key = _plan_key(coll, count, out_count, dtype, arg, in_place)
    assert -(1 << 63) <= key < 1 << 63


def test_more_plans_than_the_table_has_room_for(comm: Communicator) -> None:
    array = np.arange(3 * PLAN_SLOTS, dtype=np.float32)
    for count in range(1, array.size, 2):
        assert comm.all_reduce(array[:count]).size == count
    hits = sum(entered(comm, array[:count]) == layout.OK for count in range(1, array.size, 2))
    assert 0 < hits <= PLAN_SLOTS
    assert (array == np.arange(array.size)).all()


def test_calls_that_cannot_enter_cost_no_memory(comm: Communicator) -> None:
    """A read-only root goes the long way every time; it must not leave something every time."""
    array = np.zeros(33, np.float32)
    array.setflags(write=False)
    comm.broadcast(array)
    before = comm.memory()["private"]
    for _ in range(50):
        comm.broadcast(array)
    assert comm.memory()["private"] == before


def test_prepared_operations_leave_with_their_last_reference(comm: Communicator) -> None:
    planner, x = comm._core.planner, np.zeros(10)
    gc.collect()
    plans, doors = len(planner._plans), len(comm._core.context._fast_calls)
    for _ in range(20):
        comm.all_reduce_init(x)()
    gc.collect()
    assert len(planner._plans) <= plans + 1
    assert len(comm._core.context._fast_calls) == doors


@pytest.mark.parametrize("root", [1 << 70, -(1 << 70), -1, 1, True, 0.0, None, "0"])
def test_strange_roots_and_peers(comm: Communicator, root: object) -> None:
    x = np.zeros(4)
    comm.broadcast(x)
    for _ in range(2):
        with pytest.raises(InvalidUsage, match="root is"):
            comm.broadcast(x, root)  # type: ignore[call-overload]
        with pytest.raises(InvalidUsage, match="dst is"):
            comm.send(x, root)  # type: ignore[call-overload]
    assert comm.broadcast(x) is x


@pytest.mark.parametrize("op", [0, 1, True, None, "sum", RedOp.PREMUL_SUM, 1 << 80])
def test_strange_operators(comm: Communicator, op: object) -> None:
    """The number of an operator is not the operator, also where its plan is known."""
    x = np.zeros(4)
    comm.all_reduce(x)
    comm.all_reduce(x, op=miraccl.PROD)
    comm.reduce_scatter(x, np.zeros(4))
    for _ in range(2):
        with pytest.raises(InvalidUsage, match="op is"):
            comm.all_reduce(x, op=op)  # type: ignore[call-overload]
        with pytest.raises(InvalidUsage, match="op is"):
            comm.reduce_scatter(x, np.zeros(4), op=op)  # type: ignore[call-overload]


def test_roots_may_be_of_any_integer_type(comm: Communicator) -> None:
    x = np.zeros(4)
    assert comm.broadcast(x, np.int64(0)) is x  # type: ignore[call-overload]
    assert comm.reduce(x, np.uint8(0)) is x  # type: ignore[call-overload]


def test_headers_are_read_as_numpy_has_them() -> None:
    assert arrays.headers_are_readable()
    base = np.arange(60.0)
    frozen = base[3:9]
    frozen.setflags(write=False)
    for array in (
        base,
        base[::3],
        base.reshape(3, 4, 5),
        base.reshape(3, 4, 5).T,
        frozen,
        np.zeros((0, 4)),
        np.array(5, np.int8),
    ):
        assert arrays._reads_right(array)
    assert [arrays.dtype_of(np.zeros(1, d)) for d in ref.DTYPES.values()] == list(DType)
    for other in (np.bool_, np.complex64, np.int16, ">f4", "S4", np.longdouble):
        assert arrays.dtype_of(np.zeros(1, other)) is None
    addresses = arrays.descriptor_addresses()
    assert len(set(addresses.tolist())) == len(DType)


def test_arrays_that_a_door_must_refuse(comm: Communicator) -> None:
    good = np.zeros(64, np.float32)
    comm.all_reduce(good)
    comm.all_reduce(np.zeros(32, np.float32))
    frozen = np.zeros(64, np.float32)
    frozen.setflags(write=False)
    odd = np.zeros(64 * 4 + 1, np.uint8)[1:].view(np.float32)
    for bad in (
        good[::2],
        frozen,
        odd,
        good.astype(">f4"),
        good.reshape(8, 8).T,
        good.astype(np.complex64),
        list(good),
        None,
        5,
        "x",
    ):
        assert entered(comm, bad) == layout.NOT_HANDLED
    # an overlap that is not "in place"
    assert (
        comm._fast.all_reduce(good[:32], good[1:33], RedOp.SUM, False, None) == layout.NOT_HANDLED
    )
    # a stream, work in the background, or what only Python can tell
    for options in (
        (True, None),
        (False, 0),
        (0, None),
        (None, None),
    ):
        assert comm._fast.all_reduce(good, None, RedOp.SUM, *options) == layout.NOT_HANDLED
    assert entered(comm, good) == layout.OK
