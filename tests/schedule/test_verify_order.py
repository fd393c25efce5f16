"""Schedules that claim rank order add in that order, bit for bit, or are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.interpret import interpret
from miraccl.schedule.ir import Schedule
from miraccl.schedule.passes import interleave
from miraccl.schedule.reduction import reference
from miraccl.schedule.steps import (
    barrier,
    inp,
    out,
    put,
    recv_reduce,
    recv_reduce_all,
    recv_reduce_copy,
    recv_reduce_send,
    reduce_from_peers,
    send,
)
from miraccl.schedule.verify import verify
from miraccl.types import Collective, RedOp
from tests.schedule.helpers import hand_made

C = Collective


def fold(*peers: int, root: int = 0) -> Schedule:
    """``root`` adds all contributions in one step, in the order of ``peers``."""
    ranks = (
        [recv_reduce_all(inp(0), out(0), peers)] if rank == root else [send(inp(0), root)]
        for rank in range(len(peers))
    )
    return hand_made(C.REDUCE, *ranks, root=root)


def one_by_one(first: int, *rest: int) -> Schedule:
    """Rank 0 adds the contributions of the other ranks one by one."""
    steps = [recv_reduce_copy(inp(0), out(0), first), *(recv_reduce(out(0), peer) for peer in rest)]
    return hand_made(C.REDUCE, steps, *([send(inp(0), 0)] for _ in (first, *rest)))


def from_memory(*peers: int) -> Schedule:
    steps = [
        barrier(),
        reduce_from_peers(inp(0), out(0), peers),
        *(put(out(0), out(0), rank) for rank in range(1, len(peers))),
        barrier(),
    ]
    return hand_made(C.ALL_REDUCE, steps, *([barrier(), barrier()] for _ in peers[1:]))


def forwarded_sum() -> Schedule:
    """Rank 0 sends x0 + x1 to rank 2, which adds its own contribution on the right."""
    return hand_made(
        C.REDUCE,
        [recv_reduce_send(inp(0), 1, 2)],
        [send(inp(0), 0)],
        [recv_reduce_all(inp(0), out(0), (0, 2))],
        root=2,
    )


def tree() -> Schedule:
    """(x0 + x1) + (x2 + x3)"""
    top = [recv_reduce_copy(inp(0), out(0), 1), recv_reduce(out(0), 2)]
    return hand_made(
        C.REDUCE, top, [send(inp(0), 0)], [recv_reduce_send(inp(0), 3, 0)], [send(inp(0), 2)]
    )


def chain() -> Schedule:
    """x2 + (x1 + x0): each rank adds its own contribution on the left."""
    return hand_made(
        C.REDUCE,
        [send(inp(0), 1)],
        [recv_reduce_send(inp(0), 0, 2)],
        [recv_reduce_copy(inp(0), out(0), 1)],
        root=2,
    )


def inputs_of(schedule: Schedule) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
    rng = np.random.default_rng(schedule.nranks)
    return [
        (rng.standard_normal(200) * 10.0 ** rng.integers(-4, 4, 200)).astype(np.float32)
        for _ in range(schedule.nranks)
    ]


def adds_in_order(schedule: Schedule) -> bool:
    """Return True if the interpreter's result has the bits of ((x0 + x1) + x2) + ..."""
    inputs = inputs_of(schedule)
    return all(
        np.array_equal(result, reference(inputs, RedOp.SUM))
        for result in interpret(schedule, inputs)
        if result is not None
    )


@pytest.mark.parametrize(
    "schedule",
    [
        fold(0, 1, 2, 3),
        fold(0, 1, 2, 3, root=2),
        one_by_one(1, 2, 3),
        from_memory(0, 1, 2, 3),
        forwarded_sum(),
        fold(0),
    ],
    ids=["fold", "fold_at_other_root", "one_by_one", "from_memory", "forwarded_sum", "alone"],
)
def test_rank_order_is_verified(schedule):
    verify(schedule, rank_ordered=True)
    assert adds_in_order(schedule)


@pytest.mark.parametrize(
    ("schedule", "place", "problem"),
    [
        (
            fold(0, 2, 1, 3),
            "hand: channel 0, rank 0, step 0 (recv_reduce_all",
            "adds input[0] of ranks 2 to input[0] of ranks 0; in rank order rank 1 alone is next",
        ),
        (
            fold(1, 2, 3, 0, root=3),
            "channel 0, rank 3, step 0 (recv_reduce_all",
            (
                "adds input[0] of ranks 2 to input[0] of ranks 1; in rank order a sum starts with"
                " rank 0 and includes every rank in between"
            ),
        ),
        (
            one_by_one(1, 3, 2),
            "channel 0, rank 0, step 1 (recv_reduce -> output[0] from 3)",
            (
                "adds input[0] of ranks 3 to input[0] of ranks 0,1; in rank order rank 2 alone is"
                " next; the message was sent by rank 3 in its step 0"
            ),
        ),
        (
            from_memory(0, 1, 3, 2),
            "channel 0, rank 0, step 1 (reduce_from_peers",
            "rank 2 alone is next",
        ),
        (
            tree(),
            "channel 0, rank 2, step 0 (recv_reduce_send",
            "adds input[0] of ranks 3 to input[0] of ranks 2",
        ),
    ],
    ids=["fold", "fold_at_other_root", "one_by_one", "from_memory", "tree"],
)
def test_other_orders_are_rejected_with_the_location(schedule, place, problem):
    verify(schedule)
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, rank_ordered=True)
    assert place in str(caught.value)
    assert problem in str(caught.value)
    assert not adds_in_order(schedule)


def test_operand_sides_matter():
    verify(chain())
    with pytest.raises(
        ScheduleError,
        match=r"rank 1, step 0 .*adds input\[0\] of ranks 0 to input\[0\] of ranks 1; .*starts",
    ):
        verify(chain(), rank_ordered=True)


def test_only_one_permutation_is_rank_order():
    for order in permutations(range(4)):
        for schedule in (fold(*order, root=order[0]), from_memory(*order)):
            if order == (0, 1, 2, 3):
                verify(schedule, rank_ordered=True)
            else:
                with pytest.raises(ScheduleError, match="in rank order"):
                    verify(schedule, rank_ordered=True)


def test_every_chunk_and_channel_is_checked():
    both = interleave([fold(0, 1, 2), one_by_one(2, 1)])
    with pytest.raises(
        ScheduleError,
        match=r"channel 1, rank 0, step 0 .*adds input\[1\] of ranks 2 to input\[1\] of ranks 0;",
    ):
        verify(both, rank_ordered=True)
    verify(interleave([fold(0, 1, 2), one_by_one(1, 2)]), rank_ordered=True)


def test_collectives_without_reduction_are_rank_ordered():
    verify(catalog.build("chain", C.BROADCAST, 4, 2), rank_ordered=True)


@pytest.fixture
def claims() -> Iterator[None]:
    """Register algorithms of three ranks that claim rank order rightly, wrongly, or not at all."""
    made = {
        "ordered": (fold(0, 1, 2), True),
        "disordered": (fold(0, 2, 1), True),
        "silent": (fold(0, 2, 1), False),
    }

    def build(name: str, schedule: Schedule) -> catalog.Build:
        return lambda collective, nranks, root: replace(schedule, name=name)

    for name, (schedule, claim) in made.items():
        catalog.register(
            name, collectives=[C.REDUCE], description="For tests.", rank_ordered=claim
        )(build(name, schedule))
    yield
    for name in made:
        catalog.unregister(name)


@pytest.mark.usefixtures("claims")
def test_registered_algorithms_with_false_claims_are_rejected():
    assert catalog.build("ordered", C.REDUCE, 3).name == "ordered"
    assert catalog.build("silent", C.REDUCE, 3).name == "silent"
    for in_place in (False, True):
        with pytest.raises(
            ScheduleError, match=r"disordered: channel 0, rank 0, step 0 .*rank 1 alone is next"
        ):
            catalog.build("disordered", C.REDUCE, 3, in_place=in_place)
