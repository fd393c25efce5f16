"""Fast calls for messages of new sizes: compiled code writes what Python would have lowered."""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.message_lowering import P2pMessage, WarpQueueRules, lower_messages
from miraccl.executor.cuda.source import Framing
from miraccl.executor.cuda.warp_queues import COPY_BYTES
from miraccl.types import DType
from tests.gpu.fake_launch import SHAPE
from tests.gpu.fast_path_rank import FastPathRank, torch_with_exchange_api

torch = torch_with_exchange_api()

NRANKS = 4
TYPES = {torch.float32: DType.FLOAT32, torch.int64: DType.INT64, torch.uint8: DType.UINT8}
counts = st.sampled_from([0, 1, 3, 400, 440, 448, 449, 1000, 5000, 3 * COPY_BYTES, 10 * COPY_BYTES])
kinds = st.tuples(st.booleans(), st.integers(0, NRANKS - 1), st.sampled_from(list(TYPES)))


def comm_args(rank: int) -> CommArgs:
    boxes = tuple(1 << 40 | r << 20 for r in range(NRANKS))
    return CommArgs(
        rank=rank, own=1 << 41, inboxes=boxes, outboxes=boxes, host=4096, timeout_ns=10**9
    )


def tensors(shape: Any, sizes: Any) -> list[Any]:
    return [
        torch.zeros(size, dtype=dtype) for (_, _, dtype), size in zip(shape, sizes, strict=True)
    ]


def messages(shape: Any, arrays: Any) -> list[P2pMessage]:
    return [
        P2pMessage(receives, peer, x.data_ptr(), x.nbytes, int(TYPES[dtype]))
        for (receives, peer, dtype), x in zip(shape, arrays, strict=True)
    ]


def call(side: FastPathRank, shape: Any, arrays: Any) -> None:
    with miraccl.group():
        for (receives, peer, _), x in zip(shape, arrays, strict=True):
            assert (side.recv if receives else side.send)(x, peer) == 0


def launched(
    number: int, made: list[P2pMessage], place: CommArgs, rules: WarpQueueRules, signature: int = 0
) -> tuple[int, ...]:
    lowered = lower_messages(made, place, rules, signature)
    words = struct.unpack(f"<{len(lowered.args) // 8}Q", lowered.args)
    return (number, 0, lowered.blocks, *SHAPE[1:3], lowered.threads, *SHAPE[4:], 0, *words)


@settings(deadline=None, max_examples=300)
@given(
    shape=st.lists(kinds, min_size=1, max_size=12),
    to_self=st.integers(0, 2),
    rank=st.integers(0, NRANKS - 1),
    frame=st.sampled_from([Framing.LINE, Framing.PAIR]),
    multiprocessors=st.sampled_from([4, 132]),
    data=st.data(),
)
def test_templates_match_what_python_lowers(
    shape: Any, to_self: int, rank: int, frame: Framing, multiprocessors: int, data: Any
) -> None:
    """Same arguments and grid for several messages per queue, queues in any order, messages to the
    own
    rank.
    """
    own = [(False, rank, torch.float32)] * to_self
    mixed = [
        *own,
        *[kind for kind in shape if kind[1] != rank],
        *[(True, *kind[1:]) for kind in own],
    ]
    side, place, rules = (
        FastPathRank(rank, NRANKS),
        comm_args(rank),
        WarpQueueRules(nranks=NRANKS, multiprocessors=multiprocessors, frame=frame),
    )
    if not mixed:
        return
    side.add_template(5, messages(mixed, tensors(mixed, [7] * len(mixed))), place, rules)
    for _ in range(2):
        middle = data.draw(
            st.lists(counts, min_size=len(mixed) - 2 * to_self, max_size=len(mixed) - 2 * to_self)
        )
        mine = data.draw(st.lists(counts, min_size=to_self, max_size=to_self))
        arrays = tensors(mixed, [*mine, *middle, *mine])
        call(side, mixed, arrays)
        assert side.driver.seen.pop() == launched(5, messages(mixed, arrays), place, rules)
        assert not side.handed_over


def test_other_kinds_use_another_template() -> None:
    side, place, rules = (
        FastPathRank(0, NRANKS),
        comm_args(0),
        WarpQueueRules(nranks=NRANKS, multiprocessors=132),
    )
    there, back, both = (
        [(False, 1, torch.float32)],
        [(True, 1, torch.float32)],
        [(False, 1, torch.float32), (True, 2, torch.float32)],
    )
    assert not side.fast_path.has_template(messages(there, tensors(there, [1])))
    for number, shape in enumerate((there, both), 1):
        side.add_template(number, messages(shape, tensors(shape, [1] * len(shape))), place, rules)
        assert side.fast_path.has_template(messages(shape, tensors(shape, [9] * len(shape))))
    assert not side.fast_path.has_template(messages(back, tensors(back, [1])))
    assert not side.fast_path.has_template(
        messages([(False, 1, torch.int64)], [torch.zeros(1, dtype=torch.int64)])
    )
    x = torch.zeros(3)
    assert side.recv(x) == side.send(x, 2) == side.send(torch.zeros(3, dtype=torch.int64)) == 1
    assert side.send(x) == side.sendrecv(x, torch.zeros(4), 1, 2) == 0
    assert [row[0] for row in side.driver.seen] == [1, 2]
    side.fast_path.remove_messages()
    assert side.send(x) == 1


def test_messages_left_to_python() -> None:
    """Unequal halves of a self message, messages in chunks, launches that use the whole GPU out of
    order.
    """
    side, place = FastPathRank(0, NRANKS), comm_args(0)
    rules = WarpQueueRules(nranks=NRANKS, multiprocessors=132)
    own = [(False, 0, torch.uint8), (True, 0, torch.uint8)]
    side.add_template(1, messages(own, tensors(own, [8, 8])), place, rules)
    side.add_template(
        2, messages([(False, 1, torch.uint8)], [torch.zeros(8, dtype=torch.uint8)]), place, rules
    )
    call(side, own, tensors(own, [9, 9]))
    assert len(side.driver.seen) == 1
    call(side, own, tensors(own, [9, 10]))
    assert len(side.handed_over) == 1
    large = torch.empty(rules.bulk_min_bytes, dtype=torch.uint8)
    assert side.send(large[:-1]) == 0
    assert side.send(large) == 1
    side.order.value = 3  # another communicator filled the GPU last
    assert side.send(large[:1000]) == 0
    assert side.send(large[: 1 << 20]) == 1
    assert [row[0] for row in side.driver.seen] == [1, 2, 2]
