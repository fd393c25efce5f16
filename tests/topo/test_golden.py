"""System, paths and domains equal NCCL's, digit by digit, for every recorded decision."""

from __future__ import annotations

import pytest

from miraccl.topo.system_json import (
    paths_from_json,
    paths_to_json,
    system_from_json,
    system_to_json,
)
from tests.topo.golden import DATA, LARGER, GoldenCase, by_topology

OWN = by_topology(DATA / "golden")
MORE = {name: cases for name, cases in by_topology(LARGER).items() if name not in OWN}


def assert_same(case: GoldenCase) -> None:
    want, got = case.load(), case.analyse()
    assert [list(ranks) for ranks in got.local_ranks] == want["domains"], case.name
    assert system_to_json(got.system) == want["system"], case.name
    assert paths_to_json(got.paths, got.system) == want["paths"], case.name


@pytest.mark.parametrize("topology", OWN)
def test_stage_agrees_with_nccl(topology):
    for case in OWN[topology]:
        assert_same(case)


@pytest.mark.golden
@pytest.mark.skipif(
    LARGER is None, reason="no larger collection: MIRACCL_GOLDEN names no folder with an index.json"
)
@pytest.mark.parametrize("topology", MORE)
def test_stage_agrees_with_nccl_on_the_larger_collection(topology):
    for case in MORE[topology]:
        assert_same(case)


@pytest.mark.parametrize("topology", OWN)
def test_json_form_restores_records(topology):
    case = OWN[topology][0]
    got = case.analyse()
    system = system_from_json(system_to_json(got.system))
    assert system_to_json(system) == system_to_json(got.system)
    assert [node.links for node in system.nodes] == [node.links for node in got.system.nodes]
    paths = paths_from_json(paths_to_json(got.paths, got.system), system)
    assert {k: tuple(map(tuple, rows)) for k, rows in paths.rows.items() if any(rows)} == {
        k: rows for k, rows in got.paths.rows.items() if any(rows)
    }


def test_a_wrong_digit_is_noticed():
    """The comparison can fail: half a percent on one link changes the compared values."""
    case = OWN["nvidia-dgxh100.xml"][0]
    want = case.load()
    want["system"]["GPU"][0]["links"][0][1] *= 1.005
    assert system_to_json(case.analyse().system) != want["system"]
