"""Uneven collectives with new counts in every call: correct, planned once, mismatches reported."""

from __future__ import annotations

import re

import pytest

from miraccl.sim import World
from tests.runtime import uneven_ranks
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess

CALLS = 20_000


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_all_forms_of_counts(nranks: int) -> None:
    run_ranks(uneven_ranks.shapes, nranks)


@pytest.mark.parametrize("ranks_per_host", [0, 1])
def test_blocks_of_many_rounds(ranks_per_host: int) -> None:
    run_ranks(uneven_ranks.rounds, 3, ranks_per_host)


def test_new_counts_leave_no_cache_entries() -> None:
    most = 4 * uneven_ranks.PLANS
    for got in run_ranks(uneven_ranks.new_counts, 2, CALLS, timeout=120):
        assert (
            got["long ways"] < CALLS // 10 + most
        )  # the other calls of five collectives did not leave compiled code
        assert got["runs"] < most
        assert got["plans"] <= got["runs"] + 2
        assert got["private"] < 2 << 20
        assert got["grown"] < 1 << 20


DISAGREEMENTS = ("less", "nothing", "not expected", "slots", "list", "list of the same sum")


def expect_mismatch(kind: str, text: str, what: str) -> None:
    assert kind == "CollectiveMismatch", text
    pattern = "count" if what.startswith("list") else "message (count|size) mismatch"
    assert re.search(pattern, text), text


@pytest.mark.parametrize("then", ["barrier", "again"])
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_mismatching_counts_are_reported(what: str, then: str) -> None:
    world = World(1, 3, engine="compiled", timeout=4)
    for error in world.run(uneven_ranks.until_mismatch, what, then, return_exceptions=True):
        expect_mismatch(type(error).__name__, str(error), what)
    assert world.time_us < 2.5e6


@pytest.mark.parametrize("what", ["nothing", "slots"])
def test_mismatching_counts_of_processes_are_reported(what: str) -> None:
    then = "nothing" if what == "nothing" else "again"
    for outcome in rank_outcomes(uneven_ranks.mismatching_counts, 3, what, then, 0, timeout=30):
        assert outcome.ok, f"{outcome.error}\n{outcome.output}"
        expect_mismatch(outcome.value["type"], outcome.value["text"], what)
        assert outcome.value["seconds"] < 2.5, outcome.value


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_mismatching_counts_between_hosts_are_reported(what: str) -> None:
    for outcome in rank_outcomes(
        uneven_ranks.mismatching_counts, 3, what, "barrier", 1, timeout=30
    ):
        assert outcome.ok, f"{outcome.error}\n{outcome.output}"
        assert outcome.value["type"] == "CollectiveMismatch", outcome.value


def test_ended_rank_of_another_host_is_reported_at_the_deadline() -> None:
    for outcome in rank_outcomes(
        uneven_ranks.mismatching_counts, 2, "nothing", "nothing", 1, 1.0, timeout=30
    ):
        assert outcome.ok, f"{outcome.error}\n{outcome.output}"
        assert outcome.value["type"] == "CollectiveMismatch", outcome.value
        assert (
            "rank 1 still expects data from rank 0, but rank 0 has completed this operation"
            in outcome.value["text"]
        )
