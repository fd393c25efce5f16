"""Aggregators as processes: sums, the choice, death of one, and the command line."""

from __future__ import annotations

import pytest

from miraccl.runtime.aggregation import count_hosts, fit
from tests.runtime import aggregator_ranks
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(("aggregators", "per_host"), [(1, ""), (2, "x")])
def test_sums(aggregators: int, per_host: str) -> None:
    env = {"MIRACCL_AGGREGATORS": str(aggregators), "MIRACCL_AGGREGATION": "always"}
    results = run_ranks(aggregator_ranks.sums, 2 + aggregators, bool(per_host), env=env)
    assert results[:2] == [("star", True, [0, 1], 2)] * 2
    for served in results[2:]:
        assert len(served) == 12
        assert max(served) == 4 * 100_003


@pytest.mark.parametrize(("form", "per_host"), [("two_level", 0), ("rail_trees", 2)])
def test_trees(form: str, per_host: int) -> None:
    aggregators = 3 if form == "two_level" else 2
    env = {"MIRACCL_AGGREGATORS": str(aggregators), "MIRACCL_AGGREGATION": form}
    results = run_ranks(aggregator_ranks.sums, 4 + aggregators, False, per_host, env=env)
    for algo, right, gathered, _ in results[:4]:
        assert algo == form
        assert right
        assert gathered == [0, 1, 2, 3]
    # one at a time: the last operation of a rank is an all_gather
    assert {len(served) for served in results[4:]} == {12}


def test_tree_that_does_not_fit() -> None:
    env = {"MIRACCL_AGGREGATORS": "1", "MIRACCL_AGGREGATION": "two_level"}
    for outcome in rank_outcomes(aggregator_ranks.sums, 3, False, env=env)[:2]:
        assert "possible are star" in str(outcome), outcome


def test_not_used() -> None:
    env = {"MIRACCL_AGGREGATORS": "1", "MIRACCL_AGGREGATION": "never"}
    first, second, served = run_ranks(aggregator_ranks.sums, 3, False, env=env)
    assert first == second
    assert first[0] != "star"
    assert first[1:] == (True, [0, 1], 2)
    assert served == []


def test_death() -> None:
    env = {"MIRACCL_AGGREGATORS": "1", "MIRACCL_AGGREGATION": "always"}
    outcomes = rank_outcomes(aggregator_ranks.death, 3, env=env)
    for outcome in outcomes:
        if outcome.rank == 2:
            continue
        assert outcome.ok, outcome
        text, total, algo = outcome.value
        assert text.startswith("PeerDied")
        assert "aggregator 0 ended" in text
        assert total == [2.0] * 4
        assert algo != "star"


def test_line_through_two_sizes() -> None:
    low, high = 64 << 10, 8 << 20
    line = fit([low, 10 + low / 100, high, 10 + high / 100])
    assert line.latency_us == pytest.approx(10)
    assert line.predict_us(1 << 20) == pytest.approx(10 + (1 << 20) / 100)
    assert fit([low, 50, high, 40]).predict_us(1 << 20) > 0


def test_hosts() -> None:
    assert count_hosts(["a", "a", "b", "b"]) == 2
    assert count_hosts(["a", "b", "a", "b"]) == 1
    assert count_hosts(["a", "a", "b"]) == 1
    assert count_hosts(["a"]) == 1
