"""Meaning of each primitive on symbols; errors of the interpreter; the reference reducer."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.interpret import completing_steps, expected_outputs, interpret, run
from miraccl.schedule.ir import Schedule
from miraccl.schedule.layout import rank_cells
from miraccl.schedule.reduction import NUMPY_DTYPE, divide_towards_zero, dtype_of, fold, reference
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
    recv_reduce_copy_send,
    recv_reduce_send,
    reduce_from_peers,
    scratch,
    send,
    signal,
    wait,
)
from miraccl.types import Collective, DType, RedOp
from tests.schedule.helpers import BUILTIN, hand_made, schedules

C = Collective


def on_letters(schedule: Schedule, **options: Any) -> list[list[str]]:
    """Return outputs for inputs a0, a1, ... on rank 0, b0, b1, ... on rank 1; addition is (x+y)."""
    memory: list[list[Any]] = []
    for rank in range(schedule.nranks):
        cells = rank_cells(schedule, rank, bool(options.get("in_place")))
        row: list[Any] = [None] * cells.cells
        for chunk in range(cells.sizes[0]):
            row[cells.bases[0] + chunk] = "abcdef"[rank] + str(chunk)
        memory.append(row)
    return run(schedule, memory, lambda values: "(" + "+".join(values) + ")", **options)


S = [send(inp(0), 0)]


@pytest.mark.parametrize(
    ("zero", "one", "want"),
    [
        ([recv(out(0), 1)], S, "b0"),
        ([copy(inp(0), out(0))], [], "a0"),
        ([copy(inp(0), out(0)), recv_reduce(out(0), 1)], S, "(a0+b0)"),
        ([recv_copy_send(out(0), 1, 1)], [*S, recv(scratch(0), 0)], "b0"),
        ([recv_reduce_copy(inp(0), out(0), 1)], S, "(a0+b0)"),
        (
            [recv_reduce_copy_send(inp(0), out(0), 1, 1), recv(out(0), 1)],
            [*S, recv_reduce_send(inp(0), 0, 0)],
            "(b0+(a0+b0))",
        ),
        (
            [recv_reduce_send(inp(0), 1, 1), recv(out(0), 1)],
            [*S, recv_reduce_send(inp(0), 0, 0)],
            "(b0+(a0+b0))",
        ),
        ([recv_reduce_all(inp(0), out(0), (1, 0))], S, "(b0+a0)"),
        ([recv_reduce_all(inp(0), out(0), (1,))], S, "(b0)"),
        ([wait([1])], [put(inp(0), out(0), 0), signal([0])], "b0"),
        ([get(inp(0), out(0), 1)], [], "b0"),
        ([reduce_from_peers(inp(0), out(0), (1, 0))], [], "(b0+a0)"),
        ([barrier(), get(scratch(0), out(0), 1)], [copy(inp(0), scratch(0)), barrier()], "b0"),
    ],
)
def test_primitives(zero, one, want):
    assert on_letters(hand_made(C.REDUCE, zero, one, scratch=1)) == [[want], []]


def test_a_message_is_a_copy_unless_direct():
    steps = [
        copy(inp(0), scratch(0)),
        send(scratch(0), 1),
        copy(inp(1), scratch(0)),
        copy(inp(0), out(0)),
        copy(inp(1), out(1)),
    ]
    schedule = hand_made(
        C.BROADCAST,
        [*steps, send(inp(1), 1)],
        [recv(out(0), 0), recv(out(1), 0)],
        parts=2,
        scratch=2,
    )
    late_receiver = {"shuffle": lambda turns: turns.sort()}
    assert on_letters(schedule, **late_receiver)[1] == ["a0", "a1"]
    slow = hand_made(
        C.BROADCAST,
        [*steps, send(inp(1), 1), signal([1])],
        [wait([0]), recv(out(0), 0), recv(out(1), 0)],
        parts=2,
        scratch=2,
    )
    assert on_letters(slow)[1] == ["a0", "a1"]
    assert on_letters(slow, direct=True)[1] == ["a1", "a1"]


def test_barrier_blocks_all_ranks():
    def program(rank: int) -> list[Any]:
        return [
            copy(inp(0), scratch(0)),
            barrier(),
            get(scratch(0), scratch(1), (rank + 1) % 3),
            barrier(),
            copy(scratch(1), out(0)),
        ]

    got = on_letters(hand_made(C.ALL_REDUCE, *(program(rank) for rank in range(3)), scratch=2))
    assert got == [["b0"], ["c0"], ["a0"]]


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        (([recv(out(0), 1)], []), "deadlock: channel 0, rank 0 waits at step 0 (RECV)"),
        (([], [send(inp(0), 0)]), "1 messages from rank 1 to rank 0 are not received"),
        (([], [signal([0])]), "1 signals from rank 1 to rank 0 are not consumed"),
        (
            ([copy(scratch(0), out(0))], []),
            "rank 0, step 0 (COPY): scratch[0] of rank 0 is read before it is written",
        ),
        (([copy(inp(1), out(0))], []), "input[1] is out of range on rank 0"),
        (([put(inp(0), out(0), 1)], []), "output[0] is out of range on rank 1"),
        (([recv(out(0), 1)], [send(scratch(0, 2), 0)]), "scratch[0+2] of rank 1 is read before"),
        (([barrier()], []), "deadlock: channel 0, rank 0"),
        (
            ([recv_reduce_all(inp(0), out(0), (1, 1))], [send(inp(0), 0)]),
            "several messages from rank 1 in one step",
        ),
    ],
)
def test_errors(programs, words):
    with pytest.raises(ScheduleError) as caught:
        on_letters(hand_made(C.REDUCE, *programs, scratch=2))
    assert words in str(caught.value)


def test_a_shallow_fifo_can_deadlock():
    both = (
        [send(inp(0), 1 - r), send(inp(0), 1 - r), recv(scratch(0), 1 - r), recv(scratch(0), 1 - r)]
        for r in range(2)
    )
    schedule = hand_made(C.ALL_REDUCE, *both, scratch=1)
    on_letters(schedule, fifo_depth=2)
    with pytest.raises(ScheduleError, match="deadlock"):
        on_letters(schedule, fifo_depth=1)


def test_unwritten_or_wrongly_sized_output():
    with pytest.raises(ScheduleError, match=r"output\[0\] of rank 0 is not written"):
        interpret(hand_made(C.ALL_REDUCE, []), [np.zeros(3)])
    shifted = hand_made(C.ALL_REDUCE, [copy(inp(0), out(1)), copy(inp(1), out(0))], parts=2)
    interpret(shifted, [np.zeros(4)])
    with pytest.raises(ScheduleError, match=r"output\[0\] of rank 0 has 1 elements, expected 2"):
        interpret(shifted, [np.zeros(3)])


def test_arguments():
    schedule = catalog.build("ring", C.ALL_REDUCE, 2)
    x = np.zeros(3)
    with pytest.raises(InvalidUsage, match="got 1 inputs"):
        interpret(schedule, [x])
    with pytest.raises(InvalidUsage, match="rank 1 needs an input"):
        interpret(schedule, [x, None])
    with pytest.raises(InvalidUsage, match="shape"):
        interpret(schedule, [x, np.zeros(4)])
    with pytest.raises(InvalidUsage, match="PREMUL_SUM"):
        interpret(schedule, [x, x], op=RedOp.PREMUL_SUM)
    with pytest.raises(InvalidUsage, match="cannot communicate arrays of complex128"):
        interpret(schedule, [x.astype(complex), x.astype(complex)])


def test_inputs_are_not_modified():
    inputs = [np.arange(4.0), np.arange(4.0)]
    interpret(catalog.build("ring", C.ALL_REDUCE, 2), inputs, in_place=True)
    np.testing.assert_array_equal(inputs[0], np.arange(4.0))


# the reducer


@pytest.mark.parametrize("dtype", list(DType))
def test_every_dtype_adds(dtype):
    inputs: list[Any] = [np.array([1, 2, 4]).astype(NUMPY_DTYPE[dtype]) for _ in range(3)]
    got: list[Any] = interpret(catalog.build("one_shot", C.ALL_REDUCE, 3), inputs)
    assert got[0].dtype == NUMPY_DTYPE[dtype]
    assert dtype_of(got[0]) is dtype
    np.testing.assert_array_equal(got[0].astype(float), [3, 6, 12])


def test_low_precision_is_rounded_once():
    values = [np.array([v], dtype=ml_dtypes.bfloat16) for v in (256, 1, 1, 1, 1)]
    assert fold(values, RedOp.SUM)[0] == 260
    total = values[0]
    for value in values[1:]:
        total = fold([total, value], RedOp.SUM)
    assert total[0] == 256


def test_operators():
    a, b = np.array([3, -5], np.int8), np.array([100, 7], np.int8)
    assert list(fold([a, b], RedOp.MIN)) == [3, -5]
    assert list(fold([a, b], RedOp.MAX)) == [100, 7]
    assert list(fold([a, b, b], RedOp.SUM)) == [203 - 256, 9]
    assert list(fold([a, b], RedOp.PROD)) == [300 - 256, -35]
    assert list(reference([a, np.array([4, -2], np.int8)], RedOp.AVG)) == [3, -3]
    np.testing.assert_array_equal(
        reference([np.array([1.5]), np.array([2.0])], RedOp.PREMUL_SUM, [2.0, 3.0]), [9.0]
    )
    assert np.isnan(fold([np.array([1.0]), np.array([np.nan])], RedOp.MAX)[0])
    with pytest.raises(InvalidUsage, match="one scalar per rank"):
        reference([a, b], RedOp.PREMUL_SUM)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_integer_division_truncates(dtype):
    info = np.iinfo(dtype)
    numbers = np.array([info.min, info.min + 1, 0, 1, 7, info.max], dtype=dtype)
    got = divide_towards_zero(numbers, 3)
    assert got.dtype == dtype
    assert [int(x) for x in got] == [abs(int(x)) // 3 * (1 if x >= 0 else -1) for x in numbers]


def test_definition_of_collectives():
    a, b = np.array([1, 2]), np.array([30, 40])
    as_lists = lambda result: [None if x is None else list(x) for x in result]  # noqa: E731
    assert as_lists(expected_outputs(C.ALL_REDUCE, [a, b])) == [[31, 42], [31, 42]]
    assert as_lists(expected_outputs(C.REDUCE, [a, b], root=1)) == [None, [31, 42]]
    assert as_lists(expected_outputs(C.REDUCE_SCATTER, [a, b])) == [[31], [42]]
    assert as_lists(expected_outputs(C.ALL_GATHER, [a, b])) == [[1, 2, 30, 40]] * 2
    assert as_lists(expected_outputs(C.GATHER, [a, b], root=1)) == [None, [1, 2, 30, 40]]
    assert as_lists(expected_outputs(C.ALL_TO_ALL, [a, b])) == [[1, 30], [2, 40]]
    assert as_lists(expected_outputs(C.BROADCAST, [None, b], root=1)) == [[30, 40]] * 2
    assert as_lists(expected_outputs(C.SCATTER, [None, b], root=1)) == [[30], [40]]
    assert expected_outputs(C.BARRIER, [None, None]) == [None, None]
    assert as_lists(expected_outputs(C.ALL_TO_ALL, [a, b], counts=[[2, 0], [1, 1]])) == [
        [1, 2, 30],
        [40],
    ]


@pytest.mark.parametrize(
    ("name", "collective", "primitives"),
    [
        ("ring", C.ALL_REDUCE, {"RECV_REDUCE_COPY_SEND"}),
        ("two_shot", C.ALL_REDUCE, {"RECV_REDUCE_ALL"}),
        ("chain", C.REDUCE, {"RECV_REDUCE_COPY"}),
        ("ring", C.ALL_GATHER, set()),
    ],
)
def test_completing_steps(name, collective, primitives):
    schedule = catalog.build(name, collective, 4)
    whole = completing_steps(schedule)
    steps = [
        (rank, schedule.channels[channel][rank][position]) for channel, rank, position in whole
    ]
    assert {step.op.name for _, step in steps} == primitives
    if collective is C.ALL_REDUCE:  # on every rank
        assert {rank for rank, _ in steps} == {0, 1, 2, 3}


@pytest.mark.parametrize(("name", "collective"), [case for case in BUILTIN if case[1].reduces])
def test_completing_steps_reduce(name, collective):
    """Averages divide in these steps; a single rank has none."""
    for schedule in schedules(name, collective, (1, 2, 5, 8)):
        steps = completing_steps(schedule)
        assert all(
            schedule.channels[channel][rank][number].op.reduces for channel, rank, number in steps
        )
        assert bool(steps) == (schedule.nranks > 1)
