"""The complete flow: NCCL's results, requests, cache and explanations."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.plan import PlanRequest, make_plan, plan
from miraccl.graph.plan_bound import bound_section
from miraccl.graph.plan_cache import MAX_FILES, cached_document, plan_key
from miraccl.graph.plan_explain import CURVE_SIZES, explain_plan
from miraccl.graph.plan_json import plan_to_json
from miraccl.graph.plan_offload import find_offloads
from miraccl.topo.explain import PathChangeLog
from miraccl.topo.records import NodeType, System
from tests.graph.golden import differences, sample
from tests.topo.golden import TOPOLOGIES, GoldenCase

SECTIONS = (
    "nranks",
    "gpus_per_node",
    "domains",
    "system",
    "paths",
    "graphs",
    "other_domain_graphs",
    "comm",
    "tuning",
)
H100 = TOPOLOGIES / "nvidia-dgxh100.xml"
PCIE = TOPOLOGIES / "pcie8-2s-2nic.xml"


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(7, 2))
def test_plans_match_nccl(case: GoldenCase) -> None:
    want = case.load()
    options = case.options
    got = plan_to_json(
        plan(case.topology, options.nodes, options.gpus, options.collnet, options.fuse, case.env)
    )
    assert [
        line
        for name in SECTIONS
        if name in want
        for line in differences(want[name], got.get(name), name)
    ] == []
    assert got["env"] == want["env"]


def test_a_system_gives_the_plan_of_its_file() -> None:
    from_file = plan(PCIE, nodes=2)
    again = plan(from_file.topology.whole, nodes=2)
    a, b = plan_to_json(from_file), plan_to_json(again)
    assert [name for name in SECTIONS if a.get(name) != b.get(name)] == []


def test_nodes_of_a_host_are_numbered_by_rank() -> None:
    """NCCL numbers nodes in rank order; the system shown is that of rank 0."""
    there, back = plan(PCIE, 2), plan(PCIE, 2, gpus=(4, 5, 6, 7, 0, 1, 2, 3))
    first, second = plan_to_json(there), plan_to_json(back)
    assert [gpu.dev for gpu in back.topology.system.gpus] == [4, 5, 6, 7]
    assert [second[key] for key in ("domains", "comm", "tuning")] == [
        first[key] for key in ("domains", "comm", "tuning")
    ]
    mixed = plan_to_json(plan(PCIE, 2, gpus=(7, 1, 6, 0)))
    assert (mixed["domains"], mixed["comm"]["rankToNode"]) == (
        [[2, 0], [3, 1]],
        [0, 1, 0, 1, 2, 3, 2, 3],
    )


def test_a_file_that_lists_ranks_in_another_order_can_be_split() -> None:
    alone = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    result = plan_to_json(plan(TOPOLOGIES / "pcie8-amd-direct-1nic.xml", env=alone))
    assert result["domains"] == [
        [rank] for rank in range(8)
    ]  # in the file they are 0 1 6 7 2 3 4 5


def test_gpu_selection_needs_a_file() -> None:
    whole = plan(PCIE).topology.whole
    assert isinstance(whole, System)
    with pytest.raises(InvalidUsage, match="topology file"):
        plan(whole, gpus=[0, 1])


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"nodes": 0}, InvalidUsage),
        ({"gpus": [99]}, TopologyError),
        ({"env": {"NCCL_ALGO": "rong"}}, InvalidUsage),
    ],
)
def test_invalid_requests_are_rejected(changes: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(PCIE, **changes)  # type: ignore[arg-type]


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(TopologyError):
        plan(tmp_path / "nothing.xml")


def test_only_relevant_variables_are_recorded() -> None:
    environ = {"NCCL_ALGO": "ring", "NCCL_DEBUG": "INFO", "HOME": "/root", "NCCL_PROTO": " "}
    assert PlanRequest.read(environ).variables == (("NCCL_ALGO", "ring"),)


def test_our_algorithm_names_do_not_constrain_the_model() -> None:
    ours = {"MIRACCL_ALGO": "recursive_doubling"}
    assert plan_to_json(plan(PCIE, env=ours)) == plan_to_json(plan(PCIE))


def test_settings_reach_their_stage() -> None:
    settings = {"NCCL_MAX_NCHANNELS": "3", "NCCL_NTHREADS": "128", "NCCL_P2P_DISABLE": "1"}
    limited = plan_to_json(plan(PCIE, env=settings))
    assert limited["comm"]["nChannels"] <= 3
    assert limited["tuning"]["maxThreads"]["Ring"][0] == 128
    assert limited != plan_to_json(plan(PCIE))


def test_a_thousand_nodes() -> None:
    result = plan(H100, nodes=1024)
    assert result.connections.rings.shape == (result.connections.channels, 8192)
    assert result.connections.nvls is not None
    assert plan_to_json(result)["tuning"]["choice"]["AllReduce"][-1][1] in (
        "NVLSTree",
        "Tree",
        "Ring",
    )


# Kept plans


def key(**changes: object) -> str:
    return plan_key(b"<system/>", PlanRequest(**changes))  # type: ignore[arg-type]


def test_keys_follow_content_settings_and_kind() -> None:
    keys = {
        key(),
        key(nodes=2),
        key(gpus=(0, 1)),
        PlanRequest.read({"NCCL_ALGO": "ring"})
        and plan_key(b"<system/>", PlanRequest.read({"NCCL_ALGO": "ring"})),
        plan_key(b"<system />", PlanRequest()),
        plan_key(b"<system/>", PlanRequest(), variant="explain"),
    }
    assert len(keys) == 6
    assert key() == key()


def test_cached_plan_is_reused(tmp_path: Path) -> None:
    result = []

    def make() -> dict[str, object]:
        result.append(1)
        return {"answer": 42}

    first, second = (cached_document(tmp_path, "k", make) for _ in range(2))
    assert (len(result), first.hit, second.hit) == (1, False, True)
    assert first.text == second.text
    assert second.data == {"answer": 42}


@pytest.mark.parametrize(
    "damage",
    [
        lambda t: b"",
        lambda t: t[:-4],
        lambda t: b"garbage",
        lambda t: t.replace(b"42", b"43"),
        lambda t: b"{}\n",
    ],
)
def test_damaged_cache_file_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept = tmp_path / "plan-k"
    cached_document(tmp_path, "k", lambda: {"answer": 42})
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    again = cached_document(tmp_path, "k", lambda: {"answer": 42})
    assert (again.hit, again.data) == (False, {"answer": 42})
    assert kept.read_bytes() == whole


def test_missing_cache_folder_is_ignored(tmp_path: Path) -> None:
    assert not cached_document(tmp_path / "none", "k", dict).hit
    assert not cached_document(None, "k", dict).hit


def test_oldest_plans_are_evicted(tmp_path: Path) -> None:
    for i in range(MAX_FILES + 3):
        (tmp_path / f"plan-{i}").write_bytes(b"{}\n")
    cached_document(tmp_path, "new", dict)
    assert len(list(tmp_path.glob("plan-*"))) == MAX_FILES
    assert (tmp_path / "plan-new").exists()
    assert not list(tmp_path.glob(".plan-*"))


# Reasons


Explained = dict[str, Any]
"""A plan, its JSON and its sections ``explain`` and ``bound``."""


@pytest.fixture(scope="module")
def explained() -> Explained:
    notes = PathChangeLog()
    result = make_plan(H100, PlanRequest.read({}, nodes=2), recorder=notes)
    return {
        "plan": result,
        "json": plan_to_json(result),
        "explain": explain_plan(result, notes),
        "bound": bound_section(result),
    }


def test_reasons_are_plain_data(explained: Explained) -> None:
    assert json.loads(json.dumps(explained["explain"])) == explained["explain"]


def test_every_path_has_a_reason(explained: Explained) -> None:
    paths = explained["json"]["paths"]
    count = sum(
        len(row[kind])
        for source in ("GPU", "NET")
        for row in paths[source]
        for kind in ("GPU", "NET", "CPU", "NVS")
        if kind in row
    )
    assert len(explained["explain"]["paths"]) == count
    assert all(path["type_reason"] for path in explained["explain"]["paths"])


def test_winners_equal_the_choices(explained: Explained) -> None:
    choices = explained["json"]["tuning"]["choice"]
    for name, duels in explained["explain"]["tuning"]["choices"].items():
        for choice, duel in zip(choices[name], duels):
            assert duel["winner"] == f"{choice[1]}/{choice[2]}"
            assert duel["advantage"] >= 0
            assert duel["ranking"] == sorted(duel["ranking"], key=lambda one: one[1])
            assert duel["winner"] in duel["why"]


def test_curves_have_all_sizes(explained: Explained) -> None:
    for curves in explained["explain"]["tuning"]["curves"].values():
        assert curves
        assert all(len(curve) == len(CURVE_SIZES) for curve in curves.values())


def test_summary_contains_counts_and_reasons(explained: Explained) -> None:
    stories = explained["explain"]["sentences"]
    assert (
        "8 channels become 16: each searched channel carries both trees of a double binary tree"
        in stories["Channels"]
    )
    assert any("collectives run on 16 channels" in line for line in stories["Channels"])
    assert any("CollNet is not in use" in line for line in stories["Choice"])
    nvls, collnet = stories["Reduction in switches"]
    assert nvls.startswith("NVLS: ")
    assert collnet.startswith("CollNet (SHARP): not possible: no CollNet plugin is assumed")
    assert any("PXN" in line for line in stories["Paths"])
    assert stories["Search"]


def test_switches_that_reduce() -> None:
    """Each gain is the quotient of the model's best times without and with the switches."""
    with_collnet = find_offloads(plan(H100, nodes=4, collnet=True).model)
    without = find_offloads(plan(H100, nodes=4).model)
    assert [one.possible for one in with_collnet] == [True, True]
    assert [one.possible for one in without] == [True, False]
    # NVLS between nodes goes through CollNet: it counts for both.
    nvls, collnet = with_collnet
    assert set(collnet.used) >= set(nvls.used) - set(without[0].used)
    for one in with_collnet:
        assert one.used
        for size, slow, fast in one.gains:
            assert (fast < slow) == (size in one.used)
            assert f"{slow / fast:.2f} times as fast" in one.describe()
    alone = find_offloads(plan(H100).model)
    assert alone[1].describe() == "CollNet (SHARP): not possible: all ranks are on one node"


def test_bound_is_compared_with_the_plan(explained: Explained) -> None:
    bound = explained["bound"]
    gather = bound["plan"]["AllGather"]
    assert gather["share"] == pytest.approx(gather["busBw"] / bound["allGather"], rel=1e-6)
    assert 0 < gather["share"] <= 1
    assert len(bound["sentences"]) >= 4


def test_reducing_switch_exceeds_only_the_all_reduce_bound() -> None:
    bound = bound_section(plan(H100, env={"NCCL_ALGO": "NVLS"}))
    assert bound is not None
    assert bound["reached"] == {"allGather": True, "reduceScatter": True, "allReduceByTwo": True}
    assert [bound["plan"][name]["with"] for name in ("ReduceScatter", "AllReduce")] == [
        "NVLS/Simple"
    ] * 2
    assert [
        bound["plan"][name]["switchReduces"] for name in ("AllGather", "ReduceScatter", "AllReduce")
    ] == [False, True, True]
    assert [line for line in bound["sentences"] if "may exceed" in line] == bound["sentences"][-1:]


def test_bound_of_more_than_16_nodes() -> None:
    bound, at_16 = (bound_section(plan(PCIE, nodes=nodes)) for nodes in (40, 16))
    assert bound is not None
    assert at_16 is not None
    assert [bound[key] for key in ("nodes", "allGather", "allReduce")] == [
        16,
        at_16["allGather"],
        at_16["allReduce"],
    ]
    assert bound["sentences"][0] == (
        "the bound is that of 16 nodes or more; the exact number of nodes may have a slightly "
        "lower one"
    )
    assert bound["sentences"][1] == at_16["sentences"][0]


def test_unbalanced_machine_has_a_caveat() -> None:
    """Its PCI switches receive 24 GB/s from a NIC and send 6: they narrow, and the NICs widen."""
    whole = plan(PCIE, nodes=2).topology.whole
    nodes = list(whole.nodes)
    for index, node in enumerate(whole.nodes):
        if node.type == NodeType.PCI:
            to_nic = [whole.nodes[link.target].type == NodeType.NIC for link in node.links]
            narrowed = (
                replace(link, bw=6.0) if nic else link
                for link, nic in zip(node.links, to_nic, strict=True)
            )
            nodes[index] = replace(node, links=tuple(narrowed))
    bound = bound_section(plan(System(nodes=tuple(nodes)), nodes=40))
    assert bound is not None
    assert bound["reached"] == {"allGather": False, "reduceScatter": False, "allReduceByTwo": False}
    assert "more nodes may exceed it" in bound["sentences"][0]
    lines = [line for line in bound["sentences"] if "may be out of reach" in line]
    assert [("NIC/0-20000@0" in line, "PCI/0-18000@0" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_one_gpu_has_no_bound() -> None:
    assert bound_section(plan(TOPOLOGIES / "single-h100-1nic.xml")) is None
