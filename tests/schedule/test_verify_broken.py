"""Each check of the verifier refuses a schedule that is broken in that way and says where; the unbroken one passes."""

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


def refused(schedule: Schedule, *words: str, **options: Any) -> str:
    """The message of the refusal, which holds all ``words``."""
    with pytest.raises(ScheduleError) as caught:
        verify(schedule, **options)
    text = str(caught.value)
    for word in words:
        assert word in text, f"{word!r} is not in {text!r}"
    return text


def step_number(schedule: Schedule, rank: int, op: Op) -> int:
    return next(number for number, step in enumerate(schedule.channels[0][rank]) if step.op is op)


# messages


def test_missing_receive_is_a_message_left_over():
    last = len(RING.channels[0][2]) - 1
    refused(
        edited(RING, 2, last),
        "channel 0, rank 1, step",
        "rank 2 never receives this message",
        "1 are left over",
    )


def test_missing_send_is_a_rank_stuck():
    number = len(GATHER.channels[0][1]) - 1
    forwards = recv(out(0), 0)  # instead of receiving and passing on
    broken = edited(GATHER, 1, number - 1, forwards)
    refused(
        broken,
        f"channel 0, rank 2, step {number} (recv -> output[0] from 1)",
        "waits for a message from rank 1, but rank 1 has ended",
    )


def test_swapped_peer():
    broken = edited(GATHER, 0, 0, send(inp(0), 2))
    refused(
        broken,
        "channel 0, rank 1, step 2 (recv_copy_send -> output[0] from 0",
        "puts input[0] of ranks 2",
        "sent by rank 0 in its step 2",
    )


def test_message_of_another_size():
    right = hand_made(
        C.BROADCAST, [send(inp(0, 2), 1), copy(inp(0, 2), out(0, 2))], [recv(out(0, 2), 0)], parts=2
    )
    verify(right)
    broken = edited(right, 1, 0, recv(out(0), 0))
    refused(
        broken,
        "channel 0, rank 1, step 0 (recv -> output[0] from 0)",
        "expects 1 chunks",
        "message has 2",
        "sent by rank 0 in its step 0",
    )


def test_circular_wait_is_named_around_the_circle():
    broken = hand_made(
        C.ALL_GATHER,
        *([recv(out(1 - r), 1 - r), send(inp(0), 1 - r), copy(inp(0), out(r))] for r in range(2)),
    )
    refused(
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


def test_deadlock_where_the_fifo_is_shallow():
    verify(two_messages_each(), fifo_depth=2)
    refused(
        two_messages_each(),
        "deadlock",
        "channel 0, rank 0, step 1",
        "room in the FIFO to rank 1 (1 messages)",
        fifo_depth=1,
    )


def test_signals_are_matched():
    number = len(PUTS.channels[0][1]) - 1
    refused(
        edited(PUTS, 1, number, wait([0])), "channel 0, rank 2", "rank 1 never waits for 1 signals"
    )
    refused(
        edited(PUTS, 1, number - 1, signal([2])),
        "channel 0, rank 0, step",
        "waits for a signal from rank 1, but rank 1 has ended",
    )


def test_rank_that_skips_a_barrier_op():
    right = hand_made(C.BARRIER, [barrier()], [barrier()], [barrier()])
    verify(right)
    refused(
        edited(right, 1, 0),
        "channel 0, rank 0, step 0 (barrier)",
        "waits for rank 1 to come to the barrier, but rank 1 has ended",
    )


def test_barrier_that_somebody_leaves_too_early():
    right = catalog.build("dissemination", C.BARRIER, 5)
    short = replace(right, channels=(tuple(steps[:4] for steps in right.channels[0]),))
    refused(short, "rank 0 may leave before rank 1 has come")


# contents


def test_receive_into_the_wrong_chunk():
    number = step_number(GATHER, 0, Op.RECV_COPY_SEND)
    broken = edited(GATHER, 0, number, recv_copy_send(out(1), 2, 1))
    refused(
        broken,
        f"channel 0, rank 0, step {number} (recv_copy_send",
        "puts input[0] of ranks 2 into output[1] of rank 0",
    )


def test_contribution_added_twice():
    own_twice = hand_made(
        C.ALL_REDUCE,
        [send(inp(0), 1), copy(inp(0), out(0)), recv_reduce(out(0), 1)],
        [copy(inp(0), out(0)), recv_reduce_send(inp(0), 0, 0)],
    )
    refused(
        own_twice,
        "channel 0, rank 0, step 2 (recv_reduce -> output[0] from 1)",
        "contribution of rank 0 to input[0] a second time",
    )


def test_different_chunks_added():
    broken = edited(RING, 2, 1, recv_reduce_send(inp(3), 1, 3))
    refused(
        broken,
        "channel 0, rank 2, step 1 (recv_reduce_send input[3] from 1 to 3)",
        "reduces input[3] with input[0]",
    )


def test_sum_that_lacks_somebody():
    short = hand_made(C.REDUCE, [recv_reduce_all(inp(0), out(0), (0, 1))], [send(inp(0), 0)], [])
    refused(
        short,
        "channel 0, rank 0, step 0",
        "at the end output[0] of rank 0 holds input[0] of ranks 0,1",
        "wanted is input[0] of ranks 0,1,2",
    )


def test_output_never_written():
    number = step_number(GATHER, 1, Op.COPY)
    refused(edited(GATHER, 1, number), "rank 1: output[1] of rank 1 is never written")
    verify(edited(GATHER, 1, number), in_place=True)  # where the copy is not needed
    refused(hand_made(C.ALL_REDUCE, [], []), "output[0] of rank 0 is never written")
    refused(
        hand_made(C.ALL_REDUCE, [], []),
        "no channel",
        "output[0] of rank 0 holds input[0] of ranks 0",
        in_place=True,
    )


def test_read_of_undefined_memory():
    broken = hand_made(C.ALL_REDUCE, [copy(scratch(0), out(0))], scratch=1)
    refused(
        broken,
        "channel 0, rank 0, step 0 (copy scratch[0] -> output[0])",
        "reads scratch[0] of rank 0, which nothing has written",
    )
    refused(
        edited(GATHER, 0, 0, send(out(0), 1)),
        "channel 0, rank 0, step 0",
        "reads output[0] of rank 0, which nothing has written",
    )


def test_reduction_in_a_collective_without():
    broken = hand_made(
        C.ALL_GATHER,
        *(
            [send(inp(0), 1 - r), copy(inp(0), out(r)), recv_reduce(out(r), 1 - r)]
            for r in range(2)
        ),
    )
    refused(broken, "channel 0, rank 1, step 2", "all_gather does not reduce")


def test_parts_keep_their_size():
    """Part 0 may be one element longer than part 1."""
    broken = hand_made(
        C.ALL_REDUCE,
        [copy(inp(0), scratch(1)), copy(scratch(1), out(0)), copy(inp(1), out(1))],
        parts=2,
        scratch=2,
    )
    refused(
        broken, "channel 0, rank 0, step 0", "scratch[1] of rank 0 is a part 1, input[0] is not"
    )


def test_copy_that_overlaps_itself():
    steps = [
        copy(inp(0, 2), scratch(0, 2)),
        copy(scratch(0, 2), scratch(1, 2)),
        copy(inp(0), out(0)),
    ]
    refused(hand_made(C.ALL_REDUCE, steps, scratch=3), "channel 0, rank 0, step 0", "out of range")
    two = hand_made(
        C.REDUCE_SCATTER,
        *([copy(inp(0, 2), scratch(0, 2)), copy(scratch(0, 2), scratch(1, 2))] for _ in range(2)),
        scratch=3,
    )
    refused(two, "channel 0, rank 0, step 1", "scratch[0+2] and scratch[1+2] overlap in part")


def test_what_is_right_out_of_place_only():
    one_after_the_other = hand_made(
        C.ALL_REDUCE,
        [recv_reduce_copy(inp(0), out(0), 1), send(inp(0), 1)],
        [send(inp(0), 0), recv_reduce_copy(inp(0), out(0), 0)],
    )
    verify(one_after_the_other)
    refused(
        one_after_the_other,
        "channel 0, rank 1, step 1",
        "contribution of rank 1 to input[0] a second time",
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
        ([send(inp(0), 4)], "rank 4 is out of range, there are 4 ranks"),
        ([recv(out(0), -1)], "rank -1 is out of range"),
        ([send(inp(0), 0)], "a rank has no FIFO to itself"),
        ([recv_reduce_all(inp(0), out(0), (0, 1, 1))], "a peer is listed twice"),
        ([signal((0, 1))], "a rank does not signal itself"),
        ([wait((1, 7))], "rank 7 is out of range"),
        ([put(inp(0), out(1), 1)], "output[1] is out of range: the output of rank 1"),
        ([get(inp(4), out(0), 1)], "input[4] is out of range: the input of rank 1"),
        ([reduce_from_peers(inp(0), out(1), (0, 1))], "output[1] is out of range"),
    ],
)
def test_references_and_peers_in_range(steps, words):
    refused(
        hand_made(C.REDUCE_SCATTER, steps, [], [], [], scratch=2),
        "channel 0, rank 0, step 0",
        words,
    )


def test_buffers_that_only_the_root_has():
    refused(
        hand_made(C.REDUCE, [], [copy(inp(0), out(0))]),
        "channel 0, rank 1, step 0",
        "the output of rank 1 has 0 chunks",
    )
    refused(
        hand_made(C.SCATTER, [send(inp(0), 1)], [recv(out(0), 0)], root=1),
        "rank 0, step 0",
        "the input of rank 0 has 0 chunks",
    )


def test_too_large_to_verify():
    huge = hand_made(C.ALL_REDUCE, [copy(inp(0), out(0))], parts=10**9)
    refused(huge, "too many to verify")


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
    refused(
        broken,
        "channel 1, rank 0, step 1",
        "writes output[0] of rank 0, which two: channel 0, rank 0, step 0",
        "channels keep no order",
    )
    reads = two_channels(
        [copy(inp(0), scratch(0))], [copy(scratch(0), out(0)), copy(inp(1), out(1))], scratch=2
    )
    refused(
        reads,
        "channel 1, rank 0, step 0",
        "reads scratch[0] of rank 0, which two: channel 0",
        "writes, and channels keep no order",
    )
    over = two_channels(
        [copy(inp(0), scratch(0)), copy(scratch(0), out(0))],
        [copy(inp(0), scratch(0)), copy(inp(1), out(1))],
        scratch=2,
    )
    refused(
        over,
        "channel 1, rank 0, step 0",
        "writes scratch[0] of rank 0, which two: channel 0, rank 0, step 0",
        "channels keep no order",
    )


def test_race_between_channels_in_place():
    """The output of one channel is the input that another still sends."""

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
    refused(
        extra,
        "channel 1, rank 0, step 1",
        "writes output[1] of rank 0, which cross: channel 0, rank 0, step 0",
        "reads",
        in_place=True,
    )


def test_put_before_the_peer_has_come():
    broken = replace(
        PUTS,
        channels=(
            tuple(tuple(s for i, s in enumerate(steps) if i > 1) for steps in PUTS.channels[0]),
        ),
    )
    refused(
        broken,
        "channel 0, rank 0, step 0 (reduce_from_peers",
        "touches input[0] of rank 1 before a signal says that rank 1 has come",
    )


def test_put_that_the_peer_does_not_wait_for():
    broken = replace(PUTS, channels=(tuple(steps[:-2] for steps in PUTS.channels[0]),))
    refused(
        broken,
        "channel 0, rank 2, step 2 (reduce_from_peers",
        "rank 0 may end before input[2] of rank 0 has been touched",
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
    refused(
        hand_made(C.ALL_GATHER, *(gets(rank, False) for rank in range(2))),
        "rank 1, step 3 (get",
        "rank 0 may end before input[0]",
    )


def test_two_puts_nobody_orders():
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
    refused(
        broken,
        "channel 0, rank 1, step 2 (put",
        "writes scratch[0] of rank 2, which",
        "rank 0, step 2",
        "nothing orders the two",
    )


def test_put_into_what_the_peer_still_reads():
    """Rank 0 puts into the output of rank 1, which may be forwarding it at this moment."""

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
    refused(program(False), "output[0] of rank 1", "nothing orders the two")


def test_barrier_orders_puts():
    def program(rank: int, with_barrier: bool) -> Iterator[Step]:
        yield barrier()
        yield put(inp(0), out(rank), 1 - rank)
        yield copy(inp(0), out(rank))
        if with_barrier:
            yield barrier()

    verify(hand_made(C.ALL_GATHER, *(program(rank, True) for rank in range(2))))
    refused(
        hand_made(C.ALL_GATHER, *(program(rank, False) for rank in range(2))),
        "rank 1, step 1 (put",
        "rank 0 may end before output[1]",
    )


# direct


def overwriting(acknowledged: bool) -> Schedule:
    """Rank 0 reuses the chunk that it has sent, with or without hearing that rank 1 has read it."""
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
    text = refused(
        overwriting(False), "scratch[0] of rank 0", "nothing orders the two", direct=True
    )
    assert re.search(
        r"rank 0, step 2 \(copy.*\): writes .* rank 1, step 0 \(recv|rank 1, step 0 \(recv.*\): reads .* rank 0, step 2 \(copy",
        text,
    )
    assert is_direct_safe(overwriting(True), in_place=False)


def test_one_shot_in_place_is_not_direct():
    schedule = catalog.build("one_shot", C.ALL_REDUCE, 3)
    assert is_direct_safe(schedule, in_place=False)
    assert not is_direct_safe(schedule, in_place=True)
    refused(schedule, "output[0] of rank", "nothing orders the two", in_place=True, direct=True)


def test_room_in_the_fifo_is_no_order():
    """With a FIFO of one message the second send would follow the first receive; a deeper one does not promise that."""
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
