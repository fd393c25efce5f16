"""Comparison of plans: equal ones, changed machines and changed settings."""

from __future__ import annotations

import json
from functools import cache

import pytest

from miraccl.graph.plan import Plan, plan
from miraccl.graph.plan_diff import PlanDiff, compare_plans, diff_to_json, summarize_diff
from miraccl.graph.tuning_choice import TABLE_SIZES
from miraccl.topo.analyse import analyse_topology
from miraccl.topo.modify import modify_system
from miraccl.topo.xmlfile import read_topology
from miraccl.types import Collective
from tests.topo.golden import TOPOLOGIES

H100 = TOPOLOGIES / "nvidia-dgxh100.xml"


@cache
def planned(nodes: int = 2, without: tuple[str, ...] = (), **env: str) -> Plan:
    machine = analyse_topology(read_topology(H100).root).whole
    return plan(modify_system(machine, without=without, scale={}), nodes=nodes, env=env)


def test_a_plan_equals_itself() -> None:
    diff = compare_plans(planned(), planned())
    assert diff.equal
    assert (diff.machine, diff.settings, diff.channels, diff.rings) == ((), (), (), ())
    assert len(diff.choices) == 5 * len(TABLE_SIZES)
    assert all(row.ratio == 1 for row in diff.choices)
    assert summarize_diff(diff) == []


def test_without_a_net_large_operations_are_slower() -> None:
    diff = compare_plans(planned(), planned(without=("NET/3",)))
    assert not diff.equal
    assert {d.where for d in diff.machine} >= {"number of NET nodes"}
    names = {d.name: d for d in diff.channels}
    assert names["ring graph"].left.startswith("8 x 48 GB/s")
    assert names["ring graph"].right.startswith("7 x 48 GB/s")
    assert "no capacity for another channel" in names["ring graph"].reason
    assert diff.rings
    last = [row for row in diff.choices if row.collective is Collective.ALL_REDUCE][-1]
    assert last.ratio is not None
    assert last.ratio > 1.05
    assert "(8 channels of 57.7 GB/s" in last.reason
    assert "-> 7 channels of 57.7 GB/s" in last.reason
    assert any(line.startswith("AllReduce of") for line in summarize_diff(diff))


def test_a_setting_that_excludes_the_winner_is_the_reason() -> None:
    diff = compare_plans(planned(), planned(NCCL_ALGO="ring"))
    assert [(d.name, d.left, d.right) for d in diff.settings] == [("NCCL_ALGO", "not set", "ring")]
    assert not diff.channels
    assert not diff.rings
    small = next(row for row in diff.choices if row.collective is Collective.ALL_REDUCE)
    assert small.left is not None
    assert small.left.algorithm.label == "Tree"
    assert "Tree/LL on the right: NCCL_ALGO excludes it" in small.reason
    assert "Ring/LL on the left would take" in small.reason


def test_a_side_without_an_algorithm() -> None:
    diff = compare_plans(planned(), planned(NCCL_ALGO="tree"))
    broadcast = next(row for row in diff.choices if row.collective is Collective.BROADCAST)
    assert broadcast.right is None
    assert broadcast.ratio is None
    assert broadcast.reason == "no algorithm is available on the right"
    assert diff_to_json(diff)["choices"][0]["right"] is None


def test_jobs_of_different_size() -> None:
    diff = compare_plans(planned(2), planned(4))
    assert ("nodes", "2", "4") in {(d.name, d.left, d.right) for d in diff.settings}
    assert all(len(ring.left) in (0, 16) and len(ring.right) in (0, 32) for ring in diff.rings)


@pytest.mark.parametrize("env", [{}, {"NCCL_MAX_NCHANNELS": "4"}])
def test_json_is_plain_data(env: dict[str, str]) -> None:
    diff = compare_plans(planned(), planned(**env))
    data = json.loads(json.dumps(diff_to_json(diff)))
    assert set(data) == {"equal", "machine", "settings", "channels", "rings", "choices"}
    assert data["equal"] == (not env)
    row = data["choices"][-1]
    assert set(row) == {"collective", "bytes", "left", "right", "ratio", "reason"}


def test_channels_that_one_side_lacks() -> None:
    diff: PlanDiff = compare_plans(planned(), planned(NCCL_MAX_NCHANNELS="4"))
    count = next(d for d in diff.channels if d.name == "channels of collectives")
    assert (count.left, count.right) == ("16", "4")
    assert "right: the setting for the maximum channels is 4" in count.reason
    assert all(ring.right == () for ring in diff.rings)
