"""The catalog lists algorithms, builds each schedule once, and verifies registered ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.registry import Registry
from miraccl.schedule import catalog
from miraccl.schedule.steps import copy, inp, one_channel, out, recv, recv_reduce_copy, send, signal
from miraccl.schedule.text import dump, parse
from miraccl.types import Collective
from tests.schedule.helpers import COLLECTIVES

C = Collective


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm_without_addressable_memory(collective):
    for nranks in (*range(1, 34), 1000):
        assert [
            a for a in catalog.algorithms_for(collective, nranks) if not a.needs_addressable_memory
        ]


def test_every_reduction_has_a_deterministic_algorithm():
    for collective in (c for c in COLLECTIVES if c.reduces):
        assert [
            a
            for a in catalog.algorithms_for(collective, 7)
            if a.rank_ordered and a.rounds_once and not a.needs_addressable_memory
        ]


def test_names_match_files():
    for name in catalog.names():
        algorithm = catalog.get(name)
        assert algorithm.builtin
        assert algorithm.builder.__module__.endswith(f".{name}")
        assert algorithm.description.endswith(".")
        assert algorithm.build(min(algorithm.collectives), 2).name == name
    assert {
        "ring",
        "double_binary_tree",
        "pat",
        "one_shot",
        "two_shot",
        "two_shot_put",
        "bruck",
        "chain",
    } <= set(catalog.names())


def test_unsupported():
    with pytest.raises(
        InvalidUsage,
        match=r"unknown algorithm 'rnig'; known are: .*ring.* \(did you mean 'ring'\?\)",
    ):
        catalog.get("rnig")
    with pytest.raises(
        InvalidUsage, match=r"'ring' has no broadcast over 3 ranks \(available: chain, .*one_shot\)"
    ):
        catalog.build("ring", C.BROADCAST, 3)
    with pytest.raises(InvalidUsage, match="has no all_gather over 6 ranks"):
        catalog.build("recursive_halving_doubling", C.ALL_GATHER, 6)
    with pytest.raises(InvalidUsage, match=r"root 3 is not in 0\.\.2"):
        catalog.build("chain", C.BROADCAST, 3, 3)
    assert "recursive_halving_doubling" not in [
        a.name for a in catalog.algorithms_for(C.ALL_GATHER, 6)
    ]


def test_schedules_are_cached_by_root_if_rooted():
    assert catalog.build("ring", C.ALL_REDUCE, 6) is catalog.build("ring", C.ALL_REDUCE, 6, 3)
    assert catalog.build("chain", C.REDUCE, 6, 3).root == 3


@pytest.fixture
def mine() -> Iterator[list[int]]:
    """Register an all-reduce of two ranks that is correct out of place only; yield its builds."""
    built: list[int] = []

    @catalog.register(
        "mine",
        collectives=[C.ALL_REDUCE],
        description="For tests.",
        condition=lambda collective, nranks: nranks == 2,
    )
    def build(collective, nranks, root):
        built.append(nranks)
        late = [recv_reduce_copy(inp(0), out(0), 1), send(inp(0), 1)]
        return one_channel(
            "mine", collective, [late, [send(inp(0), 0), recv_reduce_copy(inp(0), out(0), 0)]]
        )

    yield built
    catalog.unregister("mine")


def test_registered_schedules_are_verified_before_use(mine):
    assert not catalog.get("mine").builtin
    assert "mine" in [a.name for a in catalog.algorithms_for(C.ALL_REDUCE, 2)]
    assert "mine" not in [a.name for a in catalog.algorithms_for(C.ALL_REDUCE, 3)]
    for _ in range(2):
        assert catalog.build("mine", C.ALL_REDUCE, 2).name == "mine"
        with pytest.raises(ScheduleError, match=r"input\[0\] twice"):
            catalog.build("mine", C.ALL_REDUCE, 2, in_place=True)
    assert len(mine) == 1
    assert catalog.supports_direct("mine", C.ALL_REDUCE, 2)
    assert not catalog.supports_direct("mine", C.ALL_REDUCE, 2, in_place=True)


def test_a_name_is_registered_once(mine):
    with pytest.raises(InvalidUsage, match="cannot register algorithm 'mine': the name is taken"):
        catalog.register("mine", collectives=[C.BROADCAST], description="Again.")(
            lambda collective, nranks, root: None  # type: ignore[arg-type,return-value]
        )


def test_names_of_built_in_algorithms_are_reserved():
    program = """
from miraccl.schedule import catalog
try:
    catalog.register("ring", collectives=[], description="Mine.")(print)
except ValueError as error:
    print(error)
catalog.unregister("chain")
catalog.register("chain", collectives=[], description="Mine.")(print)
print(catalog.get("ring").builtin, catalog.get("chain").builtin)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    taken = "cannot register algorithm 'ring': the name is taken"
    assert done.stdout.splitlines() == [taken, "True False"]


@pytest.mark.parametrize("wrong", ["all_reduce", 0])
def test_collectives_are_checked(wrong):
    with pytest.raises(
        InvalidUsage, match=f"'named': {wrong!r} is not a member of miraccl.Collective"
    ):
        catalog.register("named", collectives=[C.REDUCE, wrong], description="For tests.")(
            catalog.get("ring").builder
        )
    assert "named" not in catalog.names()


@pytest.mark.parametrize(("made", "name"), [(None, "NoneType"), ("ring", "str"), ([[]], "list")])
def test_a_builder_must_return_a_schedule(made, name):
    catalog.register("odd", collectives=[C.BROADCAST], description="For tests.")(
        lambda collective, nranks, root: made
    )
    try:
        with pytest.raises(
            ScheduleError, match=f"algorithm 'odd' returned a {name}, not a Schedule"
        ):
            catalog.build("odd", C.BROADCAST, 2)
    finally:
        catalog.unregister("odd")


def test_a_failing_builder_is_named_with_a_hint():
    @catalog.register("picky", collectives=[C.BARRIER], description="For tests.")
    def build(collective, nranks, root):
        if nranks & (nranks - 1):
            raise ValueError("powers of two only")
        return one_channel("picky", collective, ([signal([])] for _ in range(nranks)))

    try:
        with pytest.raises(
            ScheduleError,
            match=(
                r"'picky' failed to build barrier over 3 ranks: ValueError: powers of two"
                r" .*condition="
            ),
        ):
            catalog.build("picky", C.BARRIER, 3)
        with pytest.raises(
            ScheduleError,
            match="'picky' failed to build barrier over 4 ranks: ValueError: SIGNAL needs peers",
        ):
            catalog.build("picky", C.BARRIER, 4)
    finally:
        catalog.unregister("picky")


def test_a_replacement_of_a_built_in_algorithm_is_verified(monkeypatch):
    """Verified even if ranks have an order, which built-in algorithms of that name follow."""
    catalog.names()  # loads those that are built in
    monkeypatch.setattr(catalog, "_ALGORITHMS", Registry("algorithm"))
    catalog.register("ring", collectives=[C.BROADCAST], description="For tests.")(
        lambda collective, nranks, root: one_channel(
            "ring", collective, [[] for _ in range(nranks)]
        )
    )
    try:
        with pytest.raises(ScheduleError, match="is not written"):
            catalog.build("ring", C.BROADCAST, 2, order=(1, 0))
    finally:
        catalog._built.cache_clear()  # keyed by name


def test_a_builder_must_return_the_requested_schedule():
    @catalog.register("off", collectives=[C.BROADCAST], description="For tests.")
    def build(collective, nranks, root):
        return one_channel(
            "off", collective, [[copy(inp(0), out(0)), send(inp(0), 1)], [recv(out(0), 0)]]
        )

    try:
        assert catalog.build("off", C.BROADCAST, 2).nranks == 2
        with pytest.raises(
            ScheduleError,
            match=(
                "returned a schedule for broadcast over 2 ranks, root 0; requested: broadcast over"
                " 3 ranks, root 1"
            ),
        ):
            catalog.build("off", C.BROADCAST, 3, 1)
    finally:
        catalog.unregister("off")


def test_a_schedule_from_text_is_an_algorithm():
    text = dump(catalog.build("ring", C.ALL_REDUCE, 4)).replace('"ring"', '"from_text"')
    catalog.register_schedule(parse(text))
    try:
        assert catalog.build("from_text", C.ALL_REDUCE, 4, in_place=True).nranks == 4
        assert not catalog.get("from_text").supports(C.ALL_REDUCE, 5)
    finally:
        catalog.unregister("from_text")
    wrong = text.replace("send input[3] to 1", "send input[2] to 1")
    catalog.register_schedule(parse(wrong))
    try:
        with pytest.raises(ScheduleError, match="channel 0, rank 1, step 1"):
            catalog.build("from_text", C.ALL_REDUCE, 4)
    finally:
        catalog.unregister("from_text")


def test_a_schedule_for_one_root_supports_that_root_only():
    schedule = replace(catalog.build("chain", C.BROADCAST, 3, 2), name="for_root_2")
    catalog.register_schedule(schedule)
    try:
        assert catalog.build("for_root_2", C.BROADCAST, 3, 2) is schedule
        assert catalog.get("for_root_2") in catalog.algorithms_for(C.BROADCAST, 3, 2)
        assert catalog.get("for_root_2") not in catalog.algorithms_for(C.BROADCAST, 3, 1)
        with pytest.raises(InvalidUsage, match="'for_root_2' supports root 2 only, not 1"):
            catalog.build("for_root_2", C.BROADCAST, 3, 1)
    finally:
        catalog.unregister("for_root_2")
