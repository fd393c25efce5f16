"""Plans written and read again, and rejected documents with place and allowed values."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from miraccl.errors import InvalidUsage, MiracclError, TopologyError
from miraccl.graph.channel_graph import graphs_to_xml
from miraccl.graph.plan import Plan, PlanRequest, make_plan, plan
from miraccl.graph.plan_bound import bound_section
from miraccl.graph.plan_json import plan_from_json, plan_to_json
from tests.graph.golden import sample
from tests.topo.golden import TOPOLOGIES, GoldenCase

APART = TOPOLOGIES / "pcie8-2s-2nic.xml"  # its sockets' GPUs reach each other over the network only
PAIRS = TOPOLOGIES / "pcie4-1s-2nic-perpair.xml"
SMALL = TOPOLOGIES / "single-h100-1nic.xml"


def written(result: Plan) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(plan_to_json(result)))
    return document


def assert_same(loaded: Plan, result: Plan) -> None:
    """Compare everything except unwritten parts: reports, the file's tree, labels."""
    assert written(loaded) == written(result)
    assert (loaded.request, loaded.name) == (result.request, result.name)
    assert loaded.topology.nranks == result.topology.nranks
    for ours, theirs in zip(loaded.topology.domains, result.topology.domains, strict=True):
        assert (ours.ranks, ours.paths) == (theirs.ranks, theirs.paths)
    assert [search.graphs for search in loaded.searches] == [
        search.graphs for search in result.searches
    ]
    assert loaded.model == result.model
    for name in ("graphs", "count", "p2p", "per_domain", "tree_depth", "min_sm", "max_sm"):
        assert getattr(loaded.connections, name) == getattr(result.connections, name)
    np.testing.assert_array_equal(loaded.connections.rings, result.connections.rings)
    assert bound_section(loaded) == bound_section(result)


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(9, 4))
def test_plan_round_trip(case: GoldenCase) -> None:
    options = case.options
    result = plan(
        case.topology, options.nodes, options.gpus, options.collnet, options.fuse, case.env
    )
    assert_same(plan_from_json(written(result)), result)


@pytest.mark.parametrize("nodes", [1, 3])
def test_round_trip_of_one_gpu_with_collnet(nodes: int) -> None:
    result = plan(SMALL, nodes, collnet=True)
    assert_same(plan_from_json(written(result)), result)


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(15, 6))
def test_reference_results_can_be_read(case: GoldenCase) -> None:
    recorded = case.load()
    if len(recorded["domains"]) > 1:
        with pytest.raises(
            TopologyError, match="whole: it is missing; a plan of several domains has it"
        ):
            plan_from_json(recorded)
    else:
        assert plan_to_json(plan_from_json(recorded)) == recorded


def test_round_trip_of_domains_and_settings() -> None:
    result = plan(APART, nodes=2, env={"NCCL_MAX_NCHANNELS": "3"})
    assert len(result.topology.domains) == 2
    loaded = plan_from_json(written(result))
    assert_same(loaded, result)
    assert loaded.request.connect.max_channels == 3


def test_round_trip_of_graphs_from_a_file() -> None:
    first = plan(PAIRS)
    xml = graphs_to_xml(first.searches[0].graphs, first.topology.system)
    result = make_plan(PAIRS, PlanRequest.read({"NCCL_CROSS_NIC": "0"}, graph_xml=xml))
    assert_same(plan_from_json(written(result)), result)


def test_unknown_keys_are_ignored() -> None:
    result = plan(SMALL)
    assert_same(plan_from_json(written(result) | {"bound": {}, "explain": None}), result)


# Refusals


GONE = object()


@cache
def documents() -> dict[str, dict[str, Any]]:
    result = {
        "single": plan(SMALL, nodes=2),
        "pairs": plan(PAIRS, nodes=2),
        "apart": plan(APART, nodes=2),
    }
    return {name: written(one) for name, one in result.items()}


def edited(name: str, path: str, to: Any) -> dict[str, Any]:
    """Return a document with another value at ``path`` (``graphs/0/id``), or without it."""
    document = copy.deepcopy(documents()[name])
    *way, last = (int(word) if word.isdecimal() else word for word in path.split("/"))
    place: Any = document
    for step in way:
        place = place[step]
    if to is GONE:
        del place[last]
    else:
        place[last] = to
    return document


@pytest.mark.parametrize(
    ("name", "path", "to", "message"),
    [
        ("pairs", "graphs", GONE, "graphs: it is missing"),
        ("pairs", "format", 2, "format: it is 2; allowed is 1"),
        ("pairs", "nccl_version", "2.27", "nccl_version: it is '2.27'; allowed is '2.28.9-1'"),
        ("pairs", "nodes", 0, "nodes: it is 0; allowed is a whole number from 1 to"),
        (
            "pairs",
            "nodes",
            2_000_000_000,
            "nranks: it is 8; allowed is nodes times gpus_per_node, 8000000000",
        ),
        ("pairs", "collnet", True, "collnet: it is True; allowed is 0 or 1"),
        (
            "pairs",
            "comm/rankToNode",
            [0],
            "comm.rankToNode: 1 entries for 8 ranks; allowed is one per rank",
        ),
        ("pairs", "env/NCCL_ALGO", 1, "env.NCCL_ALGO: it is 1; allowed is a text"),
        (
            "pairs",
            "env/NCCL_HOME",
            "x",
            "env.NCCL_HOME: it is 'x'; the rest of the document implies nothing",
        ),
        (
            "pairs",
            "system/GPU/1/sm",
            "90",
            r"system.GPU\[1\].sm: it is '90'; allowed is a whole number",
        ),
        (
            "pairs",
            "system/GPU/1/rank",
            0,
            r"cannot read system: its GPUs have ranks \[0, 0, 2, 3\]; allowed is each from 0 "
            r"to 3 once",
        ),
        (
            "pairs",
            "system/GPU/0/name",
            "CPU/0-0",
            r"system.GPU\[0\].name: it is 'CPU/0-0'; allowed is a name such as GPU/0-1a000",
        ),
        (
            "pairs",
            "system/GPU/0/links/0/0",
            "PIC",
            r"system.GPU\[0\].links\[0\]\[0\]: it is 'PIC'; allowed is 'LOC' or 'NVL' or",
        ),
        (
            "pairs",
            "system/GPU/0/links/0/2",
            "PCI/0-1",
            "system: a link of GPU/0-32000 leads to PCI/0-1, which is not in it",
        ),
        (
            "pairs",
            "graphs/0/typeIntra",
            "XYZ",
            r"graphs\[0\].typeIntra: it is 'XYZ'; allowed is 'LOC' or 'NVL'",
        ),
        (
            "pairs",
            "graphs/0/bwIntra",
            float("nan"),
            r"graphs\[0\].bwIntra: it is nan; allowed is a finite number",
        ),
        ("pairs", "graphs/1/id", 0, r"graphs\[1\].id: it is 0; allowed is 1"),
        (
            "pairs",
            "graphs/0/intra",
            [],
            r"graphs\[0\].intra: it is \[\]; allowed is a list of 1 to 64",
        ),
        (
            "pairs",
            "graphs/0/intra/0",
            [0, 2, 4],
            r"graphs\[0\].intra\[0\]: it is \[0, 2, 4\]; allowed is an order of the ranks "
            r"\[0, 1, 2, 3\]",
        ),
        (
            "pairs",
            "graphs/3/intra",
            [[7]],
            r"graphs\[3\].intra\[0\]: it is \[7\]; allowed is some of the ranks \[0, 1, 2, 3\]",
        ),
        (
            "pairs",
            "comm/rings/0/3",
            99,
            r"comm.rings\[0\]\[3\]: it is 99; the rest of the document implies \d+",
        ),
        (
            "pairs",
            "paths/GPU/0/GPU/1/1",
            3.5,
            r"paths.GPU\[0\].GPU\[1\]\[1\]: it is 3.5; the rest of the document implies",
        ),
        (
            "pairs",
            "tuning/maxThreads",
            GONE,
            "tuning.maxThreads: it is missing; the rest of the document implies dict of",
        ),
        (
            "pairs",
            "domains",
            [[0, 1], [2, 3]],
            "other_domain_graphs: it is missing; a plan of several domains has it",
        ),
        ("pairs", "whole", {}, "whole: it is allowed in plans of several domains only"),
        (
            "apart",
            "domains",
            [[0, 1], [2, 3], [4, 5, 6, 7]],
            "other_domain_graphs: 1 entries for 3 domains; allowed is 2",
        ),
        ("apart", "whole", GONE, "whole: it is missing; a plan of several domains has it"),
        (
            "pairs",
            "env",
            {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            "domains: 1 entries, but the GPUs of system form 4",
        ),
        (
            "single",
            "graphs/1/pattern",
            1,
            r"cannot connect a tree of pattern 1 \(balanced_tree\) on the GPUs \[0\] of a "
            r"node: it needs two or more; allowed is 3",
        ),
        (
            "apart",
            "other_domain_graphs/0/0/intra/0/0",
            0,
            r"other_domain_graphs\[0\]\[0\].intra\[0\]: it is \[0, .*; allowed is an order of",
        ),
    ],
)
def test_invalid_plan_is_rejected_with_the_place(
    name: str, path: str, to: Any, message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        plan_from_json(edited(name, path, to))


def test_a_document_is_an_object() -> None:
    with pytest.raises(TopologyError, match=r"the document: it is \[\]; allowed is an object"):
        plan_from_json([])  # type: ignore[arg-type]


def test_invalid_setting_is_rejected_by_name() -> None:
    with pytest.raises(InvalidUsage, match="NCCL_ALGO"):
        plan_from_json(edited("pairs", "env/NCCL_ALGO", "rong"))


def value_paths(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of all values inside."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield f"{path}{key}"
        yield from value_paths(value[key], f"{path}{key}/")


@pytest.mark.parametrize("name", ["single", "pairs", "apart"])
def test_changed_document_is_rejected_or_read_completely(name: str) -> None:
    """No other error is raised, and no value that is read is lost."""
    rng, refused, runs = random.Random(name), 0, 150
    sections = [
        list(value_paths({key: value})) for key, value in documents()[name].items()
    ]  # equally often, large and small
    for _ in range(runs):
        path = rng.choice(rng.choice([section for section in sections if section]))
        document = edited(
            name, path, rng.choice([GONE, None, True, -1, 1, 10**30, 0.5, "x", [], {}])
        )
        try:
            loaded = written(plan_from_json(document))
        except MiracclError:
            refused += 1
        else:
            assert loaded == document, path
    assert refused > runs / 2
