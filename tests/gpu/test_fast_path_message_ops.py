"""Fast calls of message collectives: gather, scatter, and those with counts; CPU tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.executor.cuda import fast_call_layout
from miraccl.executor.cuda.message_collectives import op_signature
from miraccl.executor.cuda.message_lowering import P2pMessage, WarpQueueRules
from miraccl.ops.check import CheckedCall
from miraccl.ops.device_arrays import DeviceMemory
from miraccl.ops.spec import OPS
from miraccl.runtime.gpu.operations import sends_and_receives
from miraccl.types import Collective, DType, RedOp
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank, torch_with_exchange_api
from tests.gpu.test_fast_path_templates import launched
from tests.gpu.test_messages import comm_args

torch = torch_with_exchange_api()

F32, I64 = DType.FLOAT32, DType.INT64
COLLECTIVES = {
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "gather_v": Collective.GATHER,
    "scatter_v": Collective.SCATTER,
    "all_gather_v": Collective.ALL_GATHER,
    "all_to_all_v": Collective.ALL_TO_ALL,
}
counts = st.lists(
    st.integers(0, 3), min_size=fast_call_layout.MAX_RANKS, max_size=fast_call_layout.MAX_RANKS
)


def memory(tensor: Any) -> DeviceMemory:
    return DeviceMemory(tensor.data_ptr(), tensor.numel(), F32)


@settings(deadline=None, max_examples=300)
@given(
    name=st.sampled_from(list(COLLECTIVES)),
    nranks=st.integers(2, fast_call_layout.MAX_RANKS),
    place=st.integers(0, fast_call_layout.MAX_RANKS**2 - 1),
    first=counts,
    second=counts,
    kind=st.sampled_from([list, tuple]),
    shift=st.sampled_from([None, None, 0, 0, 1, -1]),
)
def test_fast_calls_send_what_python_would(
    name: str, nranks: int, place: int, first: Any, second: Any, kind: Any, shift: int | None
) -> None:
    """``shift``: distance of overlapping arrays from the in-place form."""
    rank, root = place // fast_call_layout.MAX_RANKS % nranks, place % nranks
    collective = COLLECTIVES[name]
    sends, receives = first[:nranks], second[:nranks]
    if not name.endswith("_v"):
        sends = receives = [first[0]] * nranks
    if collective is Collective.ALL_TO_ALL:
        receives[rank] = sends[rank]
    splits_in, splits_out = (
        collective in (Collective.SCATTER, Collective.ALL_TO_ALL),
        collective is not Collective.SCATTER,
    )
    gives, takes = (
        collective is not Collective.SCATTER or rank == root,
        collective is not Collective.GATHER or rank == root,
    )
    x, out = (
        torch.zeros(sum(sends) if splits_in else receives[rank]),
        torch.zeros(sum(receives) if splits_out else sends[rank]),
    )
    apart = True
    if shift is not None and gives and takes:
        whole, part, sizes = (x, out, sends) if splits_in else (out, x, receives)
        room = torch.zeros(64 + whole.numel())
        whole, start = room[32 : 32 + whole.numel()], 32 + sum(sizes[:rank]) + shift
        part = room[start : start + part.numel()]
        x, out = (whole, part) if splits_in else (part, whole)
        apart = (
            part.data_ptr() >= whole.data_ptr() + 4 * whole.numel()
            or whole.data_ptr() >= part.data_ptr() + 4 * part.numel()
        )
        apart = apart or not part.numel() or not whole.numel()
    counts = () if collective is Collective.ALL_TO_ALL else sends if splits_in else receives
    asked = CheckedCall(
        OPS[name],
        memory(x),
        memory(out),
        count=x.numel(),
        sends=sends if collective is Collective.ALL_TO_ALL else counts,
        receives=receives if collective is Collective.ALL_TO_ALL else counts,
        operator=RedOp.SUM,
        root=root,
        in_place=False,
        result=None,
    )
    sent, received = sends_and_receives(asked, rank, nranks)
    side = FastPathRank(rank, nranks)
    parts = [(False, *part) for part in sent] + [(True, *part) for part in received]
    if parts:
        rows = [(receive, peer, part.count, F32) for receive, peer, part in parts]
        side.add_messages(1, *rows, signature=op_signature(collective, root, counts))
        side.add_messages(
            2, *rows
        )  # the same messages as a group of sends and receives, and of another collective
        side.add_messages(3, *rows, signature=op_signature(collective, root, [*counts, 1]))
    uneven = name.endswith("_v")
    arrays = x if gives else None, out if takes else None
    sizes = (
        kind(sends) if uneven and splits_in else None,
        kind(receives) if uneven and splits_out else None,
    )
    code = side.calls[name](*arrays, root if collective.rooted else None, *sizes, False, None)
    right = apart or (shift == 0 and collective is not Collective.ALL_TO_ALL)
    assert code == int(not parts or not right)
    if parts and right:
        assert side.driver.seen == [
            (1, 0, *SHAPE, 0, *(part.address for _, _, part in reversed(parts)))
        ]


def test_calls_left_to_the_slow_path() -> None:
    side = FastPathRank()
    x, out, whole = torch.zeros(5), torch.zeros(4), torch.zeros(9)
    varying, even = (
        op_signature(Collective.ALL_TO_ALL),
        op_signature(Collective.SCATTER, 0, (2, 2)),
    )
    side.add_messages(
        1,
        (False, 0, 2, F32),
        (False, 1, 3, F32),
        (True, 0, 2, F32),
        (True, 1, 2, F32),
        signature=varying,
    )
    side.add_messages(2, (False, 0, 2, F32), (False, 1, 2, F32), (True, 0, 2, F32), signature=even)
    door = side.calls["all_to_all_v"]

    def call(
        x: Any = x,
        out: Any = out,
        sends: Any = (2, 3),
        receives: Any = (2, 2),
        async_op: Any = False,
        stream: Any = None,
    ) -> int:
        return door(x, out, None, sends, receives, async_op, stream)

    assert call() == call(sends=[2, 3]) == call(stream=0) == 0
    for wrong in (
        (2, 4),
        (2,),
        (2, 3, 0),
        (-2, 7),
        (2.0, 3),
        (True, 4),
        np.array([2, 3]),
        torch.tensor([2, 3]),
        None,
        5,
        {2: 1, 3: 1},
    ):
        assert call(sends=wrong) == call(receives=wrong) == 1
    for thing in (
        None,
        torch.zeros(6),
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(10)[::2],
        np.zeros(5, np.float32),
    ):
        assert call(x=thing) == call(out=thing) == 1
    for first in range(9 - 4):
        assert call(whole[:5], whole[first : first + 4]) == 1
    assert call(whole[:5], whole[5:]) == call(whole[4:], whole[:4]) == 0
    assert call(async_op=True) == call(stream=5) == 1
    with miraccl.group():
        assert call() == 1
    side.abort.value = 1
    assert call() == 1
    side.abort.value = 0
    assert call() == 0

    scatter = side.calls["scatter"]
    assert scatter(whole[:4], out[:2], 0, None, None, False, None) == 0
    assert (
        scatter(whole[:5], out[:2], 0, None, None, False, None) == 1
    )  # which two ranks cannot share
    assert scatter(whole[:4], out[:3], 0, None, None, False, None) == 1
    for root in (2, -1, True, None):
        assert scatter(whole[:4], out[:2], root, None, None, False, None) == 1
    assert (
        scatter(None, None, 1, None, None, False, None)
        == scatter(whole[:4], None, 0, None, None, False, None)
        == 1
    )
    assert len(side.driver.seen) == 7


def test_sizes_and_signatures_are_written_together() -> None:
    """A launch of this template with another size; plain messages of the same kinds do not match
    it.
    """
    side, place, rules = (
        FastPathRank(1, 3),
        comm_args(3, 1),
        WarpQueueRules(nranks=3, multiprocessors=132),
    )

    def made(x: Any, root: int) -> list[P2pMessage]:
        return [P2pMessage(False, root, x.data_ptr(), 4 * x.numel(), int(F32))]

    first, x = torch.zeros(7), torch.zeros(900)
    side.add_template(1, made(first, 2), place, rules)
    gather = side.calls["gather"]
    assert gather(x, None, 2, None, None, False, None) == 1
    side.add_template(2, made(first, 2), place, rules, op_signature(Collective.GATHER, 2, [7] * 3))
    assert gather(x, None, 2, None, None, False, None) == 0
    assert side.driver.seen.pop() == launched(
        2, made(x, 2), place, rules, op_signature(Collective.GATHER, 2, [900] * 3)
    )
    assert side.calls["gather_v"](x, None, 2, None, [5, 900, 0], False, None) == 0
    assert side.driver.seen.pop() == launched(
        2, made(x, 2), place, rules, op_signature(Collective.GATHER, 2, [5, 900, 0])
    )
    assert gather(x, None, 0, None, None, False, None) == 1
    assert side.calls["send"](x, 2, False, None) == 0
    assert side.driver.seen.pop() == launched(1, made(x, 2), place, rules)
