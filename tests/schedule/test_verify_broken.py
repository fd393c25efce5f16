"""Each check of the verifier rejects a broken schedule with its location."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.ir import Op, Schedule, Step
from miraccl.schedule.steps import (
    barrier,
    copy,
    get,
    inp,
    out,
    put,
    recv,
    recv_copy_send,
    recv_reduce,
    recv_reduce_all,
    recv_reduce_copy,
    recv_reduce_send,
    reduce_from_peers,
    scratch,
    send,
    signal,
    wait,
)
from miraccl.schedule.verify import is_direct_safe, verify
from miraccl.types import Collective
from tests.schedule.helpers import edited, hand_made

C = Collective
RING = catalog.build("ring", C.ALL_REDUCE, 4)
GATHER = catalog.build("ring", C.ALL_GATHER, 3)
PUTS = catalog.build("two_shot_put", C.ALL_REDUCE, 3)


def rejected(schedule: Schedule, *words: str, **options: Any) -> str:
    """Return the error message, which must contain all ``words``."""
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, **options)
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"
    return text


def step_number(schedule: Schedule, rank: int, op: Op) -> int:
    return next(number for number, step in enumerate(schedule.channels[0][rank]) if step.op is op)


# messages


def test_missing_receive():
    last = len(RING.channels[0][2]) - 1
    rejected(
        edited(RING, 2, last),
        "channel 0, rank 1, step",
        "rank 2 does not receive this message",
        "1 remain",
    )


def test_missing_send():
    number = len(GATHER.channels[0][1]) - 1
    forwards = recv(out(0), 0)  # instead of recv_copy_send
    broken = edited(GATHER, 1, number - 1, forwards)
    rejected(
        broken,
        f"channel 0, rank 2, step {number} (recv -> output[0] from 1)",
        "waits for a message from rank 1, but rank 1 has finished",
    )


def test_swapped_peer():
    broken = edited(GATHER, 0, 0, send(inp(0), 2))
    rejected(
        broken,
        "channel 0, rank 1, step 2 (recv_copy_send -> output[0] from 0",
        "stores input[0] of ranks 2",
        "sent by rank 0 in its step 2",
    )


def test_message_of_another_size():
    right = hand_made(
        C.BROADCAST, [send(inp(0, 2), 1), copy(inp(0, 2), out(0, 2))], [recv(out(0, 2), 0)], parts=2
    )
    verify(right)
    broken = edited(right, 1, 0, recv(out(0), 0))
    rejected(
        broken,
        "channel 0, rank 1, step 0 (recv -> output[0] from 0)",
        "expects 1 chunks",
        "message has 2",
        "sent by rank 0 in its step 0",
    )


def test_circular_wait_names_the_cycle():
    broken = hand_made(
        C.ALL_GATHER,
        *([recv(out(1 - r), 1 - r), send(inp(0), 1 - r), copy(inp(0), out(r))] for r in range(2)),
    )
    rejected(
        broken,
        "deadlock",
        "rank 0, step 0",
        "waits for a message from rank 1;",
        "rank 1, step 0",
        "waits for a message from rank 0",
    )


def two_messages_each() -> Schedule:
    both = (
        [send(inp(p), 1 - r) for p in range(2)]
        + [recv_reduce_copy(inp(p), out(p), 1 - r) for p in range(2)]
        for r in range(2)
    )
    return hand_made(C.ALL_REDUCE, *both, parts=2)


def test_deadlock_with_a_shallow_fifo():
    verify(two_messages_each(), fifo_depth=2)
    rejected(
        two_messages_each(),
        "deadlock",
        "channel 0, rank 0, step 1",
        "a free slot in the FIFO to rank 1 (1 messages)",
        fifo_depth=1,
    )


def test_unmatched_signals():
    number = len(PUTS.channels[0][1]) - 1
    rejected(
        edited(PUTS, 1, number, wait([0])), "channel 0, rank 2", "rank 1 does not consume 1 signals"
    )
    rejected(
        edited(PUTS, 1, number - 1, signal([2])),
        "channel 0, rank 0, step",
        "waits for a signal from rank 1, but rank 1 has finished",
    )


def test_skipped_barrier_step():
    right = hand_made(C.BARRIER, [barrier()], [barrier()], [barrier()])
    verify(right)
    rejected(
        edited(right, 1, 0),
        "channel 0, rank 0, step 0 (barrier)",
        "waits for rank 1 to reach the barrier, but rank 1 has finished",
    )


def test_barrier_left_too_early():
    right = catalog.build("dissemination", C.BARRIER, 5)
    short = replace(right, channels=(tuple(steps[:4] for steps in right.channels[0]),))
    rejected(short, "rank 0 may leave the barrier before rank 1 has arrived")


# contents


def test_receive_into_the_wrong_chunk():
    number = step_number(GATHER, 0, Op.RECV_COPY_SEND)
    broken = edited(GATHER, 0, number, recv_copy_send(out(1), 2, 1))
    rejected(
        broken,
        f"channel 0, rank 0, step {number} (recv_copy_send",
        "stores input[0] of ranks 2 in output[1] of rank 0",
    )


def test_contribution_added_twice():
    own_twice = hand_made(
        C.ALL_REDUCE,
        [send(inp(0), 1), copy(inp(0), out(0)), recv_reduce(out(0), 1)],
        [copy(inp(0), out(0)), recv_reduce_send(inp(0), 0, 0)],
    )
    rejected(
        own_twice,
        "channel 0, rank 0, step 2 (recv_reduce -> output[0] from 1)",
        "contribution of rank 0 to input[0] twice",
    )


def test_different_chunks_added():
    broken = edited(RING, 2, 1, recv_reduce_send(inp(3), 1, 3))
    rejected(
        broken,
        "channel 0, rank 2, step 1 (recv_reduce_send input[3] from 1 to 3)",
        "reduces input[3] with input[0]",
    )


def test_incomplete_sum():
    short = hand_made(C.REDUCE, [recv_reduce_all(inp(0), out(0), (0, 1))], [send(inp(0), 0)], [])
    rejected(
        short,
        "channel 0, rank 0, step 0",
        "at the end output[0] of rank 0 holds input[0] of ranks 0,1",
        "expected input[0] of ranks 0,1,2",
    )


def test_unwritten_output():
    number = step_number(GATHER, 1, Op.COPY)
    rejected(edited(GATHER, 1, number), "rank 1: output[1] of rank 1 is not written")
    verify(edited(GATHER, 1, number), in_place=True)  # the copy is not needed in place
    rejected(hand_made(C.ALL_REDUCE, [], []), "output[0] of rank 0 is not written")
    rejected(
        hand_made(C.ALL_REDUCE, [], []),
        "no channel",
        "output[0] of rank 0 holds input[0] of ranks 0",
        in_place=True,
    )


def test_read_of_undefined_memory():
    broken = hand_made(C.ALL_REDUCE, [copy(scratch(0), out(0))], scratch=1)
    rejected(
        broken,
        "channel 0, rank 0, step 0 (copy scratch[0] -> output[0])",
        "reads scratch[0] of rank 0 before it is written",
    )
    rejected(
        edited(GATHER, 0, 0, send(out(0), 1)),
        "channel 0, rank 0, step 0",
        "reads output[0] of rank 0 before it is written",
    )


def test_reduction_in_all_gather():
    broken = hand_made(
        C.ALL_GATHER,
        *(
            [send(inp(0), 1 - r), copy(inp(0), out(r)), recv_reduce(out(r), 1 - r)]
            for r in range(2)
        ),
    )
    rejected(broken, "channel 0, rank 1, step 2", "all_gather does not reduce")


def test_parts_keep_their_size():
    """Part 0 may have one element more than part 1."""
    broken = hand_made(
        C.ALL_REDUCE,
        [copy(inp(0), scratch(1)), copy(scratch(1), out(0)), copy(inp(1), out(1))],
        parts=2,
        scratch=2,
    )
    rejected(
        broken,
        "channel 0, rank 0, step 0",
        "scratch[1] of rank 0 holds part 1, input[0] is another part",
    )


def test_partially_overlapping_copy():
    steps = [
        copy(inp(0, 2), scratch(0, 2)),
        copy(scratch(0, 2), scratch(1, 2)),
        copy(inp(0), out(0)),
    ]
    rejected(hand_made(C.ALL_REDUCE, steps, scratch=3), "channel 0, rank 0, step 0", "out of range")
    two = hand_made(
        C.REDUCE_SCATTER,
        *([copy(inp(0, 2), scratch(0, 2)), copy(scratch(0, 2), scratch(1, 2))] for _ in range(2)),
        scratch=3,
    )
    rejected(two, "channel 0, rank 0, step 1", "scratch[0+2] and scratch[1+2] overlap partially")


def test_correct_out_of_place_only():
    one_after_the_other = hand_made(
        C.ALL_REDUCE,
        [recv_reduce_copy(inp(0), out(0), 1), send(inp(0), 1)],
        [send(inp(0), 0), recv_reduce_copy(inp(0), out(0), 0)],
    )
    verify(one_after_the_other)
    rejected(
        one_after_the_other,
        "channel 0, rank 1, step 1",
        "contribution of rank 1 to input[0] twice",
        in_place=True,
    )
    with pytest.raises(InvalidUsage, match="no in-place form"):
        verify(catalog.build("pairwise", C.ALL_TO_ALL, 3), in_place=True)


# references


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([send(inp(4), 1)], "input[4] is out of range: the input of rank 0 has 4 chunks"),
        ([send(inp(3, 2), 1)], "input[3+2] is out of range"),
        ([recv(out(1), 1)], "output[1] is out of range: the output of rank 0 has 1 chunks"),
        (
            [copy(inp(0), scratch(2))],
            "scratch[2] is out of range: the scratch of rank 0 has 2 chunks",
        ),
        ([copy(inp(0), inp(1))], "input[1] is written, but the input is read only"),
        ([send(inp(0), 4)], "rank 4 is not in 0..3"),
        ([recv(out(0), -1)], "rank -1 is not in 0..3"),
        ([send(inp(0), 0)], "a rank cannot send to itself"),
        ([recv_reduce_all(inp(0), out(0), (0, 1, 1))], "a peer is listed twice"),
        ([signal((0, 1))], "a rank cannot signal itself"),
        ([wait((1, 7))], "rank 7 is not in 0..3"),
        ([put(inp(0), out(1), 1)], "output[1] is out of range: the output of rank 1"),
        ([get(inp(4), out(0), 1)], "input[4] is out of range: the input of rank 1"),
        ([reduce_from_peers(inp(0), out(1), (0, 1))], "output[1] is out of range"),
    ],
)
def test_references_and_peers_in_range(steps, words):
    rejected(
        hand_made(C.REDUCE_SCATTER, steps, [], [], [], scratch=2),
        "channel 0, rank 0, step 0",
        words,
    )


def test_root_only_buffers():
    rejected(
        hand_made(C.REDUCE, [], [copy(inp(0), out(0))]),
        "channel 0, rank 1, step 0",
        "the output of rank 1 has 0 chunks",
    )
    rejected(
        hand_made(C.SCATTER, [send(inp(0), 1)], [recv(out(0), 0)], root=1),
        "rank 0, step 0",
        "the input of rank 0 has 0 chunks",
    )


def test_too_large_to_verify():
    huge = hand_made(C.ALL_REDUCE, [copy(inp(0), out(0))], parts=10**9)
    rejected(huge, "cannot verify more than")


# order


def two_channels(
    first: list[Step],
    second: list[Step],
    collective: Collective = C.BROADCAST,
    parts: int = 2,
    scratch: int = 0,
) -> Schedule:
    return Schedule(
        name="two",
        collective=collective,
        nranks=1,
        parts=parts,
        scratch_chunks=scratch,
        channels=((tuple(first),), (tuple(second),)),
    )


def test_race_between_channels():
    verify(two_channels([copy(inp(0), out(0))], [copy(inp(1), out(1))]))
    broken = two_channels([copy(inp(0), out(0))], [copy(inp(1), out(1)), copy(inp(0), out(0))])
    rejected(
        broken,
        "channel 1, rank 0, step 1",
        "writes output[0] of rank 0, which two: channel 0, rank 0, step 0",
        "channels are unordered",
    )
    reads = two_channels(
        [copy(inp(0), scratch(0))], [copy(scratch(0), out(0)), copy(inp(1), out(1))], scratch=2
    )
    rejected(
        reads,
        "channel 1, rank 0, step 0",
        "reads scratch[0] of rank 0, which two: channel 0",
        "writes: channels are unordered",
    )
    over = two_channels(
        [copy(inp(0), scratch(0)), copy(scratch(0), out(0))],
        [copy(inp(0), scratch(0)), copy(inp(1), out(1))],
        scratch=2,
    )
    rejected(
        over,
        "channel 1, rank 0, step 0",
        "writes scratch[0] of rank 0, which two: channel 0, rank 0, step 0",
        "channels are unordered",
    )


def test_race_between_channels_in_place():
    """The output of one channel is input that another one still sends."""

    def program(rank: int, part: int) -> tuple[Step, Step]:
        return send(inp(part), 1 - rank), recv_reduce_copy(inp(part), out(part), 1 - rank)

    right = Schedule(
        name="cross",
        collective=C.ALL_REDUCE,
        nranks=2,
        parts=2,
        channels=tuple(tuple(program(rank, part) for rank in range(2)) for part in range(2)),
    )
    verify(right, in_place=True)
    extra = replace(right, scratch_chunks=2)
    extra = edited(extra, 0, 0, copy(inp(1), scratch(1)), send(inp(0), 1), channel=0)
    verify(extra)
    rejected(
        extra,
        "channel 1, rank 0, step 1",
        "writes output[1] of rank 0, which cross: channel 0, rank 0, step 0",
        "reads",
        in_place=True,
    )


def test_put_before_the_peer_has_started():
    broken = replace(
        PUTS,
        channels=(
            tuple(tuple(s for i, s in enumerate(steps) if i > 1) for steps in PUTS.channels[0]),
        ),
    )
    rejected(
        broken,
        "channel 0, rank 0, step 0 (reduce_from_peers",
        "accesses input[0] of rank 1 before a signal shows that rank 1 has started",
    )


def test_put_that_the_peer_does_not_wait_for():
    broken = replace(PUTS, channels=(tuple(steps[:-2] for steps in PUTS.channels[0]),))
    rejected(
        broken,
        "channel 0, rank 2, step 2 (reduce_from_peers",
        "rank 0 may finish before input[2] of rank 0 has been accessed",
    )


def test_get_that_its_owner_does_not_wait_for():
    def gets(rank: int, ends: bool) -> Iterator[Step]:
        yield from (
            signal([1 - rank]),
            wait([1 - rank]),
            copy(inp(0), out(rank)),
            get(inp(0), out(1 - rank), 1 - rank),
        )
        if ends:
            yield from (signal([1 - rank]), wait([1 - rank]))

    verify(hand_made(C.ALL_GATHER, *(gets(rank, True) for rank in range(2))))
    rejected(
        hand_made(C.ALL_GATHER, *(gets(rank, False) for rank in range(2))),
        "rank 1, step 3 (get",
        "rank 0 may finish before input[0]",
    )


def test_unordered_puts():
    def program(rank: int) -> Iterator[Step]:
        yield from (
            signal([r for r in range(3) if r != rank]),
            wait([r for r in range(3) if r != rank]),
        )
        if rank < 2:
            yield put(inp(0), scratch(0), 2)
        yield from (
            signal([r for r in range(3) if r != rank]),
            wait([r for r in range(3) if r != rank]),
        )
        yield from (copy(inp(0), out(0)), recv_reduce_all(inp(0), out(0), (rank,)))

    broken = hand_made(C.ALL_REDUCE, *(program(rank) for rank in range(3)), scratch=1)
    rejected(
        broken,
        "channel 0, rank 1, step 2 (put",
        "writes scratch[0] of rank 2, which",
        "rank 0, step 2",
        "the two accesses are unordered",
    )


def test_put_into_a_buffer_the_peer_still_reads():
    """Rank 0 puts into the output of rank 1, which may be forwarding it."""

    def program(waits: bool) -> Schedule:
        zero = [
            wait([1]),
            put(inp(0), out(0), 1),
            signal([1]),
            *([wait([1])] if waits else []),
            put(inp(0), out(0), 1),
            copy(inp(0), out(0)),
            signal([1]),
        ]
        one = [
            signal([0]),
            wait([0]),
            copy(out(0), scratch(0)),
            *([signal([0])] if waits else []),
            wait([0]),
        ]
        return hand_made(C.BROADCAST, zero, one, scratch=1)

    verify(program(True))
    rejected(program(False), "output[0] of rank 1", "the two accesses are unordered")


def test_barrier_orders_puts():
    def program(rank: int, with_barrier: bool) -> Iterator[Step]:
        yield barrier()
        yield put(inp(0), out(rank), 1 - rank)
        yield copy(inp(0), out(rank))
        if with_barrier:
            yield barrier()

    verify(hand_made(C.ALL_GATHER, *(program(rank, True) for rank in range(2))))
    rejected(
        hand_made(C.ALL_GATHER, *(program(rank, False) for rank in range(2))),
        "rank 1, step 1 (put",
        "rank 0 may finish before output[1]",
    )


# direct


def overwriting(acknowledged: bool) -> Schedule:
    """Rank 0 overwrites the chunk it has sent, with or without an acknowledgement of rank 1."""
    zero = [
        copy(inp(0), scratch(0)),
        send(scratch(0), 1),
        *([recv(scratch(1), 1)] if acknowledged else []),
    ]
    zero += [copy(inp(0), scratch(0)), copy(inp(0), out(0))]
    one = [recv(out(0), 0), *([send(out(0), 0)] if acknowledged else [])]
    return hand_made(C.BROADCAST, zero, one, scratch=2)


def test_overwritten_source_of_a_direct_send():
    verify(overwriting(False))
    assert not is_direct_safe(overwriting(False), in_place=False)
    text = rejected(
        overwriting(False), "scratch[0] of rank 0", "the two accesses are unordered", direct=True
    )
    assert re.search(
        r"rank 0, step 2 \(copy.*\): writes .* rank 1, step 0 \(recv|rank 1, step 0 \(recv.*\):"
        r" reads .* rank 0, step 2 \(copy",
        text,
    )
    assert is_direct_safe(overwriting(True), in_place=False)


def test_one_shot_in_place_is_not_direct():
    schedule = catalog.build("one_shot", C.ALL_REDUCE, 3)
    assert is_direct_safe(schedule, in_place=False)
    assert not is_direct_safe(schedule, in_place=True)
    rejected(
        schedule, "output[0] of rank", "the two accesses are unordered", in_place=True, direct=True
    )


def test_a_free_fifo_slot_is_not_an_ordering():
    """With one slot the second send follows the first receive; deeper FIFOs do not guarantee it."""
    zero = [
        send(scratch(0), 1),
        copy(inp(0), scratch(0)),
        send(scratch(0), 1),
        copy(inp(0), out(0)),
    ]
    schedule = hand_made(
        C.BROADCAST,
        [copy(inp(0), scratch(0)), *zero],
        [recv(out(0), 0), recv(out(0), 0)],
        scratch=1,
    )
    verify(schedule, fifo_depth=1)
    assert not is_direct_safe(schedule, in_place=False)
