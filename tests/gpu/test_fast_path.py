"""Fast calls on GPU memory: the calls they handle, their launches, and the calls left to Python.

PyTorch tensors are in CPU memory here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.executor.cuda import fast_call_layout
from miraccl.ops.spec import OPS
from miraccl.runtime import group as groups
from miraccl.types import Collective, DType, PreMulSum, RedOp
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank, torch_with_exchange_api

torch = torch_with_exchange_api()
F32, I64 = DType.FLOAT32, DType.INT64


@pytest.fixture
def side() -> FastPathRank:
    return FastPathRank()


def test_fast_calls_find_the_launch(side: FastPathRank) -> None:
    x, out, both = torch.zeros(4, 3), torch.zeros(12), torch.zeros(24)
    assert side.all_reduce(x) == 1  # nothing is remembered yet
    made = side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, 12)
    side.add_collective(Collective.ALL_GATHER, DType.FLOAT32, 12)
    side.add_collective(Collective.REDUCE_SCATTER, DType.FLOAT32, 12, RedOp.MAX)
    assert side.all_reduce(x) == 0
    assert side.driver.seen == [(12, 0, *SHAPE, 0, x.data_ptr(), x.data_ptr())]
    assert side.fast_path.last is made
    assert side.all_reduce(x[1:], out[3:]) == 1  # 9 elements
    assert side.all_reduce(x, out) == 0
    assert side.driver.seen[-1][-2:] == (x.data_ptr(), out.data_ptr())
    assert side.all_gather(x, both) == 0
    assert side.reduce_scatter(both, x, RedOp.MAX) == 0
    assert side.driver.seen[-1][-2:] == (both.data_ptr(), x.data_ptr())
    assert side.reduce_scatter(both, x, RedOp.MIN) == 1
    assert side.all_gather(x, out) == 1
    side.fast_path.clear_last()
    assert side.fast_path.last is None
    side.add_collective(Collective.BROADCAST, DType.FLOAT32, 12, root=1)
    assert side.broadcast(x, 1) == 0
    for root in (0, 2, -1, 257, 1 << 70, True, 1.0, None):
        assert side.broadcast(x, root) == 1
    assert len(side.driver.seen) == 5


def test_calls_left_to_the_slow_path(side: FastPathRank) -> None:
    side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, 12)
    side.add_collective(Collective.ALL_GATHER, DType.FLOAT32, 12)
    side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, 8, fills=True)
    side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, 7, PreMulSum(2.0))
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
    assert side.all_gather(x, None) == 1
    assert side.all_gather(whole[11:23], whole[12:]) == side.all_gather(whole[24:], whole[12:]) == 1
    assert side.all_gather(whole[:12], whole[12:]) == 0
    assert side.all_reduce(torch.zeros(8)) == 0
    side.order.value = 8  # another communicator has filled the GPU since
    assert side.all_reduce(torch.zeros(8)) == 1
    assert side.all_reduce(x) == 0
    for stream in (1, -1, 1 << 70, 0.0, False, True, torch.Stream(device="cpu")):
        assert side.all_reduce(x, stream=stream) == 1
    side.fast_path.stream = 5
    assert side.all_reduce(x) == 1
    assert side.all_reduce(x, stream=5) == 0
    assert side.driver.seen[-1][-3] == 5
    side.fast_path.stream = -1  # before the first operation
    assert side.all_reduce(x, stream=-1) == 1
    side.fast_path.stream = 0
    assert side.all_reduce(x, stream=0) == 0
    side.abort.value = 1
    assert side.all_reduce(x) == 1
    side.abort.value = 0
    side.fast_path.remove_collectives()
    assert side.all_reduce(x) == 1
    assert len(side.driver.seen) == 5


def test_tensors_with_freed_storage_take_the_slow_path(side: FastPathRank) -> None:
    """Including slices, whose address is their offset; empty tensors need no memory."""
    for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST):
        side.add_collective(collective, F32, 12)
    side.add_messages(1, (False, 1, 12, F32))
    side.add_messages(2, (False, 1, 12, F32), (True, 1, 12, F32))
    side.add_messages(3, (False, 1, 0, F32))
    x, both, freed = torch.zeros(12), torch.zeros(24), torch.zeros(36)
    parts, wholes, empty = (freed[:12], freed[12:24]), (freed[:24], freed[12:]), freed[:0]
    freed.untyped_storage().resize_(0)
    answers = []  # pytest reads the elements of objects in an assertion
    for thing, whole in zip(parts, wholes, strict=True):
        answers += [side.all_reduce(thing), side.all_reduce(x, thing), side.broadcast(thing, 0)]
        answers += [side.all_gather(thing, both), side.all_gather(x, whole)]
        answers += [side.send(thing), side.sendrecv(thing, x), side.sendrecv(x, thing)]
    assert answers == [1] * len(answers)
    assert not side.driver.seen
    assert side.send(empty) == side.all_reduce(x) == side.sendrecv(x, torch.zeros(12)) == 0


def test_more_launches_than_the_table_holds(side: FastPathRank) -> None:
    x, counts = (
        torch.zeros(2 * fast_call_layout.TABLE_ENTRIES),
        range(1, 2 * fast_call_layout.TABLE_ENTRIES),
    )
    for count in counts:
        side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, count)
        assert side.all_reduce(x[:count]) == 0
        assert side.driver.seen[-1][0] == count
    assert len(side.fast_path._launches) <= fast_call_layout.TABLE_ENTRIES
    found = [count for count in counts if side.all_reduce(x[:count]) == 0]
    assert [row[0] for row in side.driver.seen[-len(found) :]] == found


def test_powers_of_two_do_not_collide(side: FastPathRank) -> None:
    """Typical programs: sizes that differ by factors of two, several collectives, types and
    operators.
    """
    kinds = [
        (collective, op)
        for collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
        for op in (RedOp.SUM, RedOp.MAX)
    ]
    dtypes = (DType.FLOAT32, DType.BFLOAT16, DType.INT64)
    for collective, op in kinds:
        for dtype in dtypes:
            for bits in range(30):
                side.add_collective(collective, dtype, 1 << bits, op)
    assert len(side.fast_path._launches) == len(kinds) * len(dtypes) * 30


def test_the_first_operation_after_a_capture_takes_the_slow_path(side: FastPathRank) -> None:
    """Python knows what it has to wait for."""
    x = torch.zeros(12)
    side.add_collective(Collective.ALL_REDUCE, DType.FLOAT32, 12)
    side.fast_path.stream, side.fast_path.captured = 5, True
    side.driver.capturing = {5}
    assert (side.all_reduce(x, stream=5), side.all_reduce(x, stream=6)) == (0, 1)
    side.driver.capturing = set()
    assert (side.all_reduce(x, stream=5), side.all_reduce(x, stream=6)) == (1, 1)
    side.fast_path.captured = False
    assert side.all_reduce(x, stream=5) == 0


def test_reduce_checks_the_root(side: FastPathRank) -> None:
    x, out, odd = torch.zeros(12), torch.zeros(3, 4), torch.zeros(24)[::2]
    for op in (RedOp.SUM, RedOp.MAX):
        for root in (0, 1):
            side.add_collective(Collective.REDUCE, F32, 12, op, root).op = (op, root)
    for op in (RedOp.SUM, RedOp.MAX):
        assert [side.reduce(x, root, op=op) for root in (0, 1)] == [0, 0]
        assert side.fast_path.last.op == (op, 1)  # type: ignore[union-attr]
    assert side.reduce(x, 0, out) == 0
    assert side.driver.seen[-1][-2:] == (x.data_ptr(), out.data_ptr())
    assert side.reduce(x, 0, odd) == 1
    assert side.reduce(x, 1, odd) == 0  # another rank is the root: out is ignored
    assert side.driver.seen[-1][-2:] == (x.data_ptr(), x.data_ptr())
    assert side.reduce(x, 0, op=RedOp.MIN) == 1
    for bad in (2, -1, 51, 1 << 70, True, None):
        assert side.reduce(x, bad) == 1
    assert len(side.driver.seen) == 6


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_in_place(rank: int) -> None:
    """Each operation in its in-place form; any other overlap is left to Python."""
    side = FastPathRank(rank, 3)
    for collective in (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    ):
        side.add_collective(collective, F32, 4)
    side.add_collective(Collective.REDUCE, F32, 4, root=rank)
    room = torch.zeros(36)
    whole = room[12:24]
    for first in range(8, 25):
        part = room[first : first + 4]
        fits = first == 12 + 4 * rank or first == 8 or first == 24
        assert (
            side.all_gather(part, whole)
            == side.reduce_scatter(whole, part, RedOp.SUM)
            == int(not fits)
        )
        same = first == 12 or not 8 < first < 16
        assert (
            side.all_reduce(part, whole[:4]) == side.reduce(part, rank, whole[:4]) == int(not same)
        )
        if fits:
            side.all_gather(part, whole)
            assert side.driver.seen[-1][-2:] == (part.data_ptr(), whole.data_ptr())
    for first in range(25):
        assert side.calls["all_to_all"](whole, room[first : first + 12], None, False, None) == int(
            0 < first < 24
        )


def test_every_call_resets_the_cpu_plan(side: FastPathRank) -> None:
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    assert side.all_reduce(torch.zeros(11)) == 1
    assert side.cpu_plan.value == 9
    assert side.all_reduce(torch.zeros(12)) == 0
    assert side.cpu_plan.value == 0


def test_unhandled_calls_go_to_the_fallback(side: FastPathRank) -> None:
    """The fallback gets the same arguments, as on the CPU, and provides the result."""
    other = FastPathRank()
    first = {name: side.fast_path.fast_call(OPS[name], call) for name, call in other.calls.items()}
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    other.add_collective(Collective.ALL_REDUCE, F32, 13)
    other.add_messages(5, (False, 1, 13, F32))
    other.add_messages(6, (False, 1, 13, F32), (True, 0, 4, F32))
    x, y = torch.zeros(13), torch.zeros(4)
    assert first["all_reduce"](x, None, RedOp.SUM, False, None) == 0
    assert first["send"](x, 1, False, None) == 0
    assert first["sendrecv"](x, 1, y, 0, False, None) == 0
    assert (
        first["recv"](x, 1, False, None)
        == first["all_reduce"](y, None, RedOp.SUM, False, None)
        == 1
    )
    assert not side.driver.seen
    assert [row[0] for row in other.driver.seen] == [13, 5, 6]
    assert other.driver.seen[-1][-2:] == (y.data_ptr(), x.data_ptr())
    assert first["all_reduce"](x[:12], None, RedOp.SUM, False, None) == 0
    assert side.driver.seen[-1][0] == 12
    other.calls.clear()  # the first calls keep their fallback
    gc.collect()
    assert first["all_reduce"](x, None, RedOp.SUM, False, None) == 0


def test_a_failed_launch_is_left_to_python(side: FastPathRank) -> None:
    side.driver._codes = (700, 0)
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    assert side.all_reduce(torch.zeros(12)) == 1  # launches again and returns CUDA's code
    assert side.all_reduce(torch.zeros(12)) == 0


# ---- sends and receives


def test_messages_find_their_launch(side: FastPathRank) -> None:
    x, y = torch.zeros(3, 4), torch.zeros(7, dtype=torch.int64)
    assert side.send(x) == side.recv(x) == side.sendrecv(x, y) == 1
    one = side.add_messages(1, (False, 1, 12, F32))
    side.add_messages(2, (True, 1, 12, F32))
    side.add_messages(3, (False, 1, 12, F32), (True, 0, 7, I64))
    assert side.send(x) == 0
    assert side.driver.seen[-1] == (1, 0, *SHAPE, 0, x.data_ptr())
    assert side.fast_path.last is one
    assert side.recv(x) == 0
    assert side.driver.seen[-1] == (2, 0, *SHAPE, 0, x.data_ptr())
    assert side.sendrecv(x, y, 1, 0) == 0
    assert side.driver.seen[-1] == (3, 0, *SHAPE, 0, y.data_ptr(), x.data_ptr())
    assert side.send(x.view(-1)[:12]) == 0
    assert side.driver.seen[-1][-1] == x.data_ptr()
    before = len(side.driver.seen)
    assert side.sendrecv(x, y, 0, 1) == side.sendrecv(x, x, 1, 0) == side.sendrecv(y, x, 1, 0) == 1
    for peer in (0, 2, -1, 1 << 32, 1 << 70, True, 1.0, None):
        assert side.send(x, peer) == side.recv(x, peer) == 1
    assert len(side.driver.seen) == before


def test_collected_messages_may_be_a_collective(grouping: FastPathRank) -> None:
    side = grouping
    x, y = torch.zeros(12), torch.zeros(12)
    rows = (False, 1, 12, F32), (True, 1, 12, F32)
    side.add_messages(1, *rows)
    side.add_messages(2, *rows, signature=77)
    for signature in (77, 0, 77):
        with miraccl.group():
            assert side.send(x) == side.recv(y) == 0
            assert groups.is_single_compiled_block()
            assert not side.fast_path.mark_collective(signature, 3)  # others are among them
            assert side.fast_path.mark_collective(signature, 2)
        assert side.driver.seen.pop()[0] == (2 if signature else 1)
    with miraccl.group(), miraccl.group():
        assert not groups.is_single_compiled_block()
    with miraccl.group():
        assert side.send(x) == side.recv(y) == 0
        assert side.fast_path.mark_collective(77, 2)
        groups.current()
    assert side.signatures == [77]
    assert side.sendrecv(x, y) == 0
    assert side.driver.seen.pop()[0] == 1


def test_messages_left_to_the_slow_path(side: FastPathRank) -> None:
    x, whole = torch.zeros(12), torch.zeros(24)
    for receives in (False, True):
        side.add_messages(1, (receives, 1, 12, F32))
        side.add_messages(2, (receives, 1, 8, F32), fills=True)
    side.add_messages(3, (False, 1, 12, F32), (True, 1, 12, F32))
    for thing in (
        np.zeros(12, np.float32),
        None,
        torch.zeros(11),
        torch.zeros(12, dtype=torch.int32),
        torch.zeros(12, dtype=torch.bool),
        whole[::2],
        torch.nn.Parameter(torch.zeros(12)),
        torch.zeros(12, device="meta"),
    ):
        assert (
            side.send(thing)
            == side.recv(thing)
            == side.sendrecv(x, thing)
            == side.sendrecv(thing, x)
            == 1
        )
    for first, second in ((0, 0), (0, 11), (11, 0), (5, 7)):
        assert side.sendrecv(whole[first : first + 12], whole[second : second + 12]) == 1
    assert not side.driver.seen
    assert side.sendrecv(whole[:12], whole[12:]) == side.sendrecv(whole[12:], whole[:12]) == 0
    assert side.send(x, async_op=True) == side.send(x, async_op=0) == side.send(x, stream=1) == 1
    assert side.send(x, stream=0) == 0
    assert side.send(torch.zeros(8)) == 0
    side.order.value = 8  # another communicator has filled the GPU since
    assert side.send(torch.zeros(8)) == 1
    assert side.send(x) == 0
    side.abort.value = 1
    assert side.send(x) == side.sendrecv(whole[:12], whole[12:]) == 1
    side.abort.value = 0
    side.fast_path.remove_collectives()
    assert side.send(x) == 0
    side.fast_path.remove_messages()
    assert side.send(x) == side.recv(x) == 1
    assert len(side.driver.seen) == 6


def test_messages_of_many_kinds_do_not_collide(side: FastPathRank) -> None:
    x, counts = (
        torch.zeros(1 << 12),
        sorted({(1 << bits) + more for bits in range(12) for more in range(3)}),
    )
    kinds = [
        (receives, peer, count, F32)
        for receives in (False, True)
        for peer in range(2)
        for count in counts
    ]
    for number, kind in enumerate(kinds, 1):
        side.add_messages(number, kind)
    for number, (receives, peer, count, _) in enumerate(kinds, 1):
        assert (side.recv if receives else side.send)(x[:count], peer) == 0
        assert side.driver.seen[-1][0] == number


# ---- groups


@pytest.fixture
def grouping(side: FastPathRank) -> FastPathRank:
    """A rank that knows the launch of a send and two receives."""
    side.add_messages(4, (False, 1, 12, F32), (True, 1, 7, I64), (True, 0, 12, F32))
    return side


def addresses(notes: list[tuple[Any, int, bool]]) -> list[tuple[int, int, bool]]:
    return [(x.data_ptr(), peer, receives) for x, peer, receives in notes]


def test_a_group_is_collected_and_launched(grouping: FastPathRank) -> None:
    x, y, z = torch.zeros(12), torch.zeros(7, dtype=torch.int64), torch.zeros(12)
    grouping.add_collective(Collective.ALL_REDUCE, F32, 12)
    for _ in range(2):
        with miraccl.group() as nothing:
            assert nothing is None
            assert grouping.send(x) == 0
            with miraccl.group():
                assert grouping.all_reduce(x) == 1  # which Python notes
                assert grouping.recv(y) == 0
            assert grouping.recv(z, 0) == 0
            assert not grouping.driver.seen
        assert grouping.driver.seen.pop() == (
            4,
            0,
            *SHAPE,
            0,
            z.data_ptr(),
            y.data_ptr(),
            x.data_ptr(),
        )
        assert grouping.all_reduce(x) == 0
        grouping.driver.seen.clear()
    assert not grouping.handed_over


def test_collected_arrays_live_until_the_launch(grouping: FastPathRank) -> None:
    arrays = [torch.zeros(12), torch.zeros(7, dtype=torch.int64), torch.zeros(12)]
    alive = [weakref.ref(array) for array in arrays]
    with miraccl.group():
        assert (
            grouping.send(arrays[0]) == grouping.recv(arrays[1]) == grouping.recv(arrays[2], 0) == 0
        )
        del arrays
        assert all(array() is not None for array in alive)
    assert len(grouping.driver.seen) == 1
    assert all(array() is None for array in alive)


def test_a_group_that_python_inspects_is_handed_over(grouping: FastPathRank) -> None:
    x, y = torch.zeros(12), torch.zeros(7, dtype=torch.int64)
    with miraccl.group():
        assert grouping.sendrecv(x, y) == 0
        with miraccl.group():
            assert grouping.recv(x, 0) == 0
            whole = groups.current()
            assert whole is not None
            assert whole.depth == 2
            ((stream, notes),) = grouping.handed_over
            assert (stream, addresses(notes)) == (
                0,
                [(x.data_ptr(), 1, False), (y.data_ptr(), 1, True), (x.data_ptr(), 0, True)],
            )
            assert grouping.send(x) == 1
        assert groups.current() is whole
        with miraccl.group():
            assert whole.depth == 2
    assert groups.current() is None
    assert not grouping.driver.seen
    assert grouping.send(x) == 1  # which no launch is known for
    with miraccl.group():
        assert grouping.send(x) == 0
        assert grouping.recv(y) == grouping.recv(x, 0) == 0
    assert len(grouping.driver.seen) == 1


@pytest.mark.parametrize("why", ["unknown", "stream", "abort", "failed", "exception", "closed"])
def test_a_group_without_a_launch_is_handed_over(grouping: FastPathRank, why: str) -> None:
    x, y = torch.zeros(12), torch.zeros(7, dtype=torch.int64)
    try:
        with miraccl.group():
            assert grouping.send(x) == grouping.recv(y) == grouping.recv(x, 0) == 0
            match why:
                case "unknown":
                    assert grouping.recv(x) == 0
                case "stream":
                    grouping.fast_path.stream = 5
                case "abort":
                    grouping.abort.value = 1
                case "failed":
                    grouping.driver._codes = (700,)
                case "exception":
                    raise ZeroDivisionError
                case "closed":
                    grouping.fast_path.close()
    except ZeroDivisionError:
        assert why == "exception"
    ((stream, notes),) = grouping.handed_over
    assert (stream, addresses(notes[:2])) == (
        0,
        [(x.data_ptr(), 1, False), (y.data_ptr(), 1, True)],
    )
    assert len(grouping.driver.seen) == (why == "failed")
    assert groups.current() is None
    with miraccl.group():
        pass
    assert len(grouping.handed_over) == 1


def test_calls_that_are_not_collected(grouping: FastPathRank) -> None:
    """Python checks these calls and reports the error."""
    x, whole = torch.zeros(12), torch.zeros(24)
    wrong = (
        torch.zeros(3, dtype=torch.bool),
        torch.zeros(2, dtype=torch.complex64),
        whole[::2],
        None,
        np.zeros(12, np.float32),
    )
    inner = {
        name: grouping.fast_path.fast_call(OPS[name]) for name in ("send", "recv", "sendrecv")
    }  # for calls that are to be made at once
    with miraccl.group():
        for _ in range(2):
            for thing in wrong:
                assert (
                    grouping.send(thing)
                    == grouping.recv(thing)
                    == grouping.sendrecv(x, thing)
                    == grouping.sendrecv(thing, x)
                    == 1
                )
            for peer in (-1, 2, True):
                assert grouping.send(x, peer) == 1
            assert (
                grouping.sendrecv(whole[:12], whole[11:23])
                == grouping.send(x, async_op=True)
                == grouping.send(x, stream=3)
                == 1
            )
            grouping.abort.value = 1
            assert grouping.send(x) == 1
            grouping.abort.value = 0
        assert (
            inner["send"](x, 1, False, None)
            == inner["sendrecv"](whole[:12], 1, whole[12:], 1, False, None)
            == 1
        )
        groups.current()
        assert not grouping.handed_over
    with miraccl.group():
        assert grouping.sendrecv(whole[:12], whole[12:]) == 0
    assert [len(notes) for _, notes in grouping.handed_over] == [2]


def test_another_stream_thread_or_communicator_does_not_join(grouping: FastPathRank) -> None:
    x, other, answers = torch.zeros(12), FastPathRank(), list[Any]()

    def beside() -> None:
        answers.append(grouping.send(x))
        with miraccl.group():
            answers.append(grouping.send(x))
            answers.append(groups.current())
        answers.append(groups.current())

    with miraccl.group():
        assert grouping.send(x) == 0
        assert other.send(x) == 1
        grouping.fast_path.stream = 5
        assert grouping.send(x, stream=5) == 1
        grouping.fast_path.stream = 0
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert answers[:2] == [1, 1]
        assert answers[2] is not None
        assert answers[3] is None
        assert grouping.recv(torch.zeros(7, dtype=torch.int64)) == grouping.recv(x, 0) == 0
    assert len(grouping.driver.seen) == 1
    with miraccl.group():
        assert other.send(x) == 0
        assert grouping.send(x) == 1


def test_no_thread_inherits_an_open_group(grouping: FastPathRank) -> None:
    """Thread ids are not reused, unlike those of the operating system."""
    answers: list[Any] = []

    def leave_open() -> None:
        miraccl.group().__enter__()

    def beside() -> None:
        answers.append(groups.current())
        answers.append(grouping.send(torch.zeros(12)))

    before = groups._record[fast_call_layout.GROUPS_OPEN // 8]
    try:
        for target in (leave_open, beside):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
        assert answers == [None, 1]
    finally:
        groups._record[fast_call_layout.GROUPS_OPEN // 8] = before


def test_groups_in_an_exit_stack(grouping: FastPathRank) -> None:
    """ExitStack passes the object to class attributes as well."""
    x, y = torch.zeros(12), torch.zeros(7, dtype=torch.int64)
    for kind in (None, ZeroDivisionError):
        with contextlib.suppress(ZeroDivisionError), contextlib.ExitStack() as stack:
            stack.enter_context(miraccl.group())
            assert grouping.send(x) == grouping.recv(y) == grouping.recv(x, 0) == 0
            if kind is not None:
                raise kind
    assert len(grouping.driver.seen) == len(grouping.handed_over) == 1


def test_groups_collect_a_bounded_number_of_messages(side: FastPathRank) -> None:
    x = torch.zeros(2 * fast_call_layout.MAX_MESSAGES)
    rows = [(False, 1, 1 + place, F32) for place in range(fast_call_layout.MAX_MESSAGES)]
    side.add_messages(8, *rows)
    side.add_messages(9, *rows, (False, 1, 1, F32))
    with miraccl.group():
        for place in range(fast_call_layout.MAX_MESSAGES - 1):
            assert side.send(x[: 1 + place]) == 0
        assert (
            side.sendrecv(x[: fast_call_layout.MAX_MESSAGES], x[fast_call_layout.MAX_MESSAGES :])
            == 1
        )
        assert side.send(x[: fast_call_layout.MAX_MESSAGES]) == 0
        assert side.send(x[:1]) == 1
    assert [row[0] for row in side.driver.seen] == [8]


# ---- the end


def test_closed_fast_calls_read_nothing(side: FastPathRank) -> None:
    """The words in host memory have been freed."""
    side.add_collective(Collective.ALL_REDUCE, F32, 12)
    side.add_messages(1, (False, 1, 12, F32))
    side.fast_path.close()
    side.abort.value = 0
    assert side.all_reduce(torch.zeros(12)) == side.send(torch.zeros(12)) == 1
    assert side.fast_path._state[fast_call_layout.STATE_ABORT // 8] != ctypes.addressof(side.abort)
    assert not side.fast_path._launches
