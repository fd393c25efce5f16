"""Fast call of reduce_scatter_v: one launch, or one per rank that gets anything.

PyTorch tensors are in CPU memory here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.executor.cuda import fast_call_layout
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.runtime.gpu.operations import split_by_rank
from miraccl.types import Collective, DType, PreMulSum, RedOp
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank, torch_with_exchange_api

torch = torch_with_exchange_api()

F32, SUM = DType.FLOAT32, RedOp.SUM


def call(
    side: FastPathRank,
    x: Any,
    out: Any,
    counts: Any,
    op: Any = SUM,
    async_op: Any = False,
    stream: Any = None,
) -> int:
    return side.calls["reduce_scatter_v"](x, out, op, async_op, stream, counts)


def remember_all(side: FastPathRank, counts: list[int], op: RedOp = SUM) -> None:
    """Enter launches: for equal counts the count and 1000, per rank its count and 100 times its
    root.
    """
    side.add_collective(Collective.REDUCE_SCATTER, F32, counts[0], op, number=1000 + counts[0])
    for root, count in enumerate(counts):
        side.add_collective(Collective.REDUCE, F32, count, op, root, number=100 * root + count)


@settings(deadline=None, max_examples=200)
@given(
    nranks=st.integers(2, fast_call_layout.MAX_RANKS),
    rank=st.integers(0, fast_call_layout.MAX_RANKS - 1),
    counts=st.lists(
        st.integers(0, 2), min_size=fast_call_layout.MAX_RANKS, max_size=fast_call_layout.MAX_RANKS
    ),
    kind=st.sampled_from([list, tuple]),
    op=st.sampled_from([RedOp.SUM, RedOp.MAX, RedOp.AVG]),
    shift=st.sampled_from([None, None, 0, 1, -1]),
)
def test_fast_calls_launch_what_python_would(
    nranks: int, rank: int, counts: Any, kind: Any, op: RedOp, shift: int | None
) -> None:
    """``shift``: distance of ``out``, which overlaps ``x``, from the in-place form."""
    rank, counts = rank % nranks, counts[:nranks]
    side = FastPathRank(rank, nranks)
    remember_all(side, counts, op)
    room = torch.zeros(64)
    x, first = room[32 : 32 + sum(counts)], 32 + sum(counts[:rank])
    out = (
        torch.zeros(counts[rank])
        if shift is None
        else room[first + shift : first + shift + counts[rank]]
    )
    apart = (
        shift is None or not counts[rank] or not 32 - counts[rank] < first + shift < 32 + x.numel()
    )
    right = sum(counts) > 0 and (apart or shift == 0)
    assert call(side, x, out, kind(counts), op) == int(not right)
    source, target = DeviceMemory(x.data_ptr(), x.numel(), F32), out.data_ptr()
    if len(set(counts)) == 1:
        want = [(1000 + counts[0], source.address, target)]
    else:
        parts = split_by_rank(source, counts)
        want = [
            (100 * root + p.count, p.address, target if root == rank else p.address)
            for root, p in parts
        ]
    assert [(row[0], *row[-2:]) for row in side.driver.seen] == (want if right else [])
    assert all(row[1:-2] == (0, *SHAPE, 0) for row in side.driver.seen)


def test_calls_left_to_the_slow_path() -> None:
    side = FastPathRank()
    remember_all(side, [2, 3])
    x, out = torch.zeros(5), torch.zeros(2)
    assert call(side, x, out, [2, 3]) == call(side, x, out, (2, 3), stream=0) == 0
    side.driver.seen.clear()
    for counts in (
        (2, 4),
        (3, 2),
        (2,),
        (2, 3, 0),
        (-2, 7),
        (2.0, 3),
        (True, 4),
        np.array([2, 3]),
        torch.tensor([2, 3]),
        None,
        5,
    ):
        assert call(side, x, out, counts) == 1
    for thing in (
        None,
        torch.zeros(6),
        torch.zeros(5, dtype=torch.int32),
        torch.zeros(10)[::2],
        np.zeros(5, np.float32),
    ):
        assert call(side, thing, out, [2, 3]) == 1
    for thing in (
        None,
        torch.zeros(3),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(4)[::2],
        np.zeros(2, np.float32),
        x[1:3],
    ):
        assert call(side, x, thing, [2, 3]) == 1
    for op in (RedOp.MAX, 0, None, PreMulSum(2.0)):
        assert call(side, x, out, [2, 3], op) == 1
    assert call(side, x, out, [2, 3], async_op=True) == call(side, x, out, [2, 3], stream=5) == 1
    with miraccl.group():
        assert call(side, x, out, [2, 3]) == 1
    side.abort.value = 1
    assert call(side, x, out, [2, 3]) == 1
    side.abort.value = 0
    assert not side.driver.seen
    assert call(side, x, x[:2], [2, 3]) == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_all_launches_or_none(missing: int) -> None:
    """Known launches do not run if one is missing."""
    side = FastPathRank()
    side.add_collective(Collective.REDUCE, F32, 2 + (1 - missing), SUM, 1 - missing)
    assert call(side, torch.zeros(5), torch.zeros(2), [2, 3]) == 1
    assert not side.driver.seen
    side.add_collective(Collective.REDUCE, F32, 2 + missing, SUM, missing, fills=True)
    side.order.value = 8  # another communicator has filled the GPU since
    assert call(side, torch.zeros(5), torch.zeros(2), [2, 3]) == 1
    side.order.value = 7
    assert call(side, torch.zeros(5), torch.zeros(2), [2, 3]) == 0
    assert len(side.driver.seen) == 2


def test_a_failed_launch() -> None:
    """If the first one fails, Python handles the call; a later failure is raised, since Python
    would
    repeat the others.
    """
    side = FastPathRank()
    told: list[int] = []

    def check(code: int) -> None:
        told.append(code)
        raise ZeroDivisionError

    for root in range(2):
        side.add_collective(Collective.REDUCE, F32, 2 + root, SUM, root).check = check
    side.driver._codes = (700, 0, 719)
    assert call(side, torch.zeros(5), torch.zeros(2), [2, 3]) == 1
    with pytest.raises(ZeroDivisionError):
        call(side, torch.zeros(5), torch.zeros(2), [2, 3])
    assert told == [719]
    assert call(side, torch.zeros(5), torch.zeros(2), [2, 3]) == 0
