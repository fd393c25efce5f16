"""The channel search: NCCL's results, and invariants on any machine."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miraccl.errors import TopologyError
from miraccl.graph.channel_graph import ChannelGraph, graph_to_json, graphs_to_xml
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.search import End, Origin, SearchResult, SearchSettings, Stop, search_channels
from miraccl.graph.search.explain import explain_search
from miraccl.graph.search.kernel.state import ChannelSearchState
from miraccl.graph.search.report import Phase, Reason
from miraccl.graph.search.run import walk_compiled, walk_interpreted
from miraccl.topo.analyse import Domain
from miraccl.topo.records import PathTable, PathType, System
from miraccl.topo.system_json import paths_from_json, system_from_json
from tests.graph.golden import differences, sample
from tests.graph.machines import domains
from tests.topo.golden import DATA, GoldenCase, golden_cases

pytestmark = pytest.mark.filterwarnings("error")

SLOW = settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# NCCL's results


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(every=4, offset=1))
def test_graphs_match_nccl(case: GoldenCase) -> None:
    want = case.load()
    system = system_from_json(want["system"])
    result = search_channels(system, paths_from_json(want["paths"], system), _settings(case, want))
    assert (
        differences(want["graphs"], [graph_to_json(graph) for graph in result.graphs], "graphs")
        == []
    )
    if "other_domain_graphs" in want:  # their systems are not recorded
        others = [
            search_channels(domain.system, domain.paths, _settings(case, want))
            for domain in case.analyse().domains[1:]
        ]
        got = [[graph_to_json(graph) for graph in other.graphs] for other in others]
        assert differences(want["other_domain_graphs"], got, "other_domain_graphs") == []


def _machines() -> list[Any]:
    cases = json.loads(gzip.decompress((DATA / "search" / "machines.json.gz").read_bytes()))
    return [pytest.param(case, id=case["name"]) for case in cases]


@pytest.mark.golden
@pytest.mark.parametrize("case", _machines())
def test_graphs_of_unusual_machines_match_nccl(case: dict[str, Any]) -> None:
    system = system_from_json(case["system"])
    asked = SearchSettings(
        cross_nic=case["cross_nic"], net_per_gpu=case["net_per_gpu"], collnet=case["collnet"]
    )
    result = search_channels(system, paths_from_json(case["paths"], system), asked)
    assert (
        differences(case["graphs"], [graph_to_json(graph) for graph in result.graphs], "graphs")
        == []
    )


def _settings(case: GoldenCase, want: dict[str, Any]) -> SearchSettings:
    return SearchSettings.read(case.env, collnet=bool(want["collnet"]))


# What has to hold on any machine


@SLOW
@given(domains(), st.sampled_from((0, 1, 2)), st.booleans())
def test_channels_visit_each_gpu_once_and_stay_inside_the_links(
    domain: Domain, cross_nic: int, collnet: bool
) -> None:
    result = search_channels(
        domain.system, domain.paths, SearchSettings(cross_nic=cross_nic, collnet=collnet)
    )
    ranks = sorted(gpu.rank for gpu in domain.system.gpus)
    nets = {net.id for net in domain.system.nets}
    for graph, report in zip(result.graphs, result.reports):
        if report.origin is Origin.FALLBACK:
            continue
        for channel in graph.intra:
            assert len(channel) == 1 if graph.pattern is Pattern.NVLS else sorted(channel) == ranks
        assert all(set(ends) <= nets for ends in graph.inter)
        assert bool(graph.inter) == bool(domain.system.inter and graph.intra)
        if graph.kind is GraphKind.RING:
            _check_bandwidth(graph, domain.system, domain.paths)


def _check_bandwidth(graph: ChannelGraph, system: System, paths: PathTable) -> None:
    """Check that all rings together fit every link (each rounding may add half of 1/1000 GB/s)."""
    taken: dict[int, float] = defaultdict(float)
    position = {gpu.rank: i for i, gpu in enumerate(system.gpus)}
    by_id = {net.id: i for i, net in reversed(list(enumerate(system.nets)))}
    for c, channel in enumerate(graph.intra):
        order = [position[rank] for rank in channel]
        hops = [(paths.gpu_gpu(a, b), graph.bw_intra) for a, b in pairwise(order)]
        if graph.inter:
            first, last = (by_id[id] for id in graph.inter[c])
            hops += [
                (paths.net_gpu(first, order[0]), graph.bw_inter),
                (paths.gpu_net(order[-1], last), graph.bw_inter),
            ]
            assert all(path.type <= graph.type_inter for path, _ in hops[-2:])
        elif len(order) > 1:
            hops.append((paths.gpu_gpu(order[-1], order[0]), graph.bw_intra))
        for path, bw in hops:
            for link in path.hops:
                taken[link] += bw
    for link, bw in taken.items():
        assert bw <= system.links[link].bw + 0.001 * len(graph.intra), (link, graph)


@settings(SLOW, max_examples=15)
@given(domains(max_gpus=3), st.integers(1, 100), st.integers(0, 30))
def test_compiled_and_interpreted_walks_agree(domain: Domain, budget: int, skipped: int) -> None:
    """Graphs, visits and all arrays are bit-identical after walks from any point of a search."""
    boards: list[ChannelSearchState] = []

    def some_of(walk: Callable[[ChannelSearchState], None]) -> Callable[[ChannelSearchState], None]:
        walks = 0

        def run(state: ChannelSearchState) -> None:
            nonlocal walks
            walks += 1
            if walks == 1:
                boards.append(state)
            if skipped < walks <= skipped + 8:
                state.header[0].budget = min(int(state.header[0].budget), budget)
                walk(state)

        return run

    search = SearchSettings(collnet=True)
    results = [
        search_channels(domain.system, domain.paths, search, walk=some_of(w))
        for w in (walk_compiled, walk_interpreted)
    ]
    assert results[0] == results[1]
    for name, a, b in zip(ChannelSearchState._fields, boards[0], boards[1]):
        assert a.tobytes() == b.tobytes(), name


@SLOW
@given(domains())
def test_search_releases_all_bandwidth(domain: Domain) -> None:
    boards: list[ChannelSearchState] = []

    def walk(state: ChannelSearchState) -> None:
        boards[:] = [state]
        walk_compiled(state)
        assert not state.used.any()

    search_channels(domain.system, domain.paths, walk=walk)
    for link, left in zip(domain.system.links, boards[0].links["bw"]):
        assert abs(link.bw - float(left)) < 0.01
    for net, left in zip(domain.system.nets, boards[0].nets["bw"]):
        assert abs(net.bw - float(left)) < 0.01


@SLOW
@given(domains())
def test_reports_are_consistent(domain: Domain) -> None:
    result = search_channels(domain.system, domain.paths)
    for graph, report in zip(result.graphs, result.reports):
        assert report.graph == graph
        for t in report.tries:
            assert t.end is not End.BUDGET or t.visits >= t.budget
            assert t.found_channels <= 32
        if report.origin is Origin.SEARCH and graph.n_channels:
            assert any(t.improved for t in report.tries)
        if report.tries:
            assert report.tries[0].reason is Reason.START
            assert (report.stop is Stop.PERFECT) == any(
                t.end is End.PERFECT and t.phase is Phase.FIND for t in report.tries
            )
        assert all(0 <= link.left < link.bw for link in report.saturated_links)
        explained = explain_search(report)
        assert json.loads(json.dumps(explained)) == explained
        assert len(explained["tries"]) == len(report.tries)
        assert bool(explained["sentences"]) == (report.origin is not Origin.NOT_RUN)


@SLOW
@given(domains())
def test_a_graph_file_replaces_the_search(domain: Domain) -> None:
    found = search_channels(domain.system, domain.paths)
    text = graphs_to_xml(found.graphs, domain.system)
    again = search_channels(domain.system, domain.paths, SearchSettings(graph_xml=text))
    for before, after, report in zip(found.graphs, again.graphs, again.reports):
        if before.computed and before.n_channels:
            assert report.origin is Origin.FILE
            assert (after.intra, after.inter, after.type_intra, after.pattern) == (
                before.intra,
                before.inter,
                before.type_intra,
                before.pattern,
            )


# Single rules, on machines of the reference results


def _search(name: str, **changes: Any) -> SearchResult:
    want = _case(name).load()
    system = system_from_json(want["system"])
    return search_channels(
        system, paths_from_json(want["paths"], system), SearchSettings(**changes)
    )


def _case(name: str) -> GoldenCase:
    return next(case for case in golden_cases(DATA / "golden") if case.name == name)


def test_hopper_rings_are_doubled() -> None:
    result = _search("device-8xH200-vm.1n")
    report = result.reports[GraphKind.RING]
    assert report.duplication is not None
    assert (
        report.duplication.after
        == 2 * report.duplication.before
        == result.graph(GraphKind.RING).n_channels
    )
    assert any("became" in line for line in explain_search(report)["sentences"])


def test_saturated_links_of_the_ring_graph() -> None:
    result = _search("device-8xH200-vm.1n")
    full = result.reports[GraphKind.RING].saturated_links
    assert len(full) == 16  # every GPU to the NVSwitch and back: 12 channels of 30 GB/s on 370.8
    assert {(round(link.bw, 1), link.left) for link in full} == {(370.8, 10.8)}
    assert (
        "10.8 of 370.8 GB/s left" in explain_search(result.reports[GraphKind.RING])["sentences"][-1]
    )
    assert result.reports[GraphKind.NVLS].saturated_links == ()


def test_nvls_can_be_disabled_and_needs_a_switch() -> None:
    assert _search("device-8xH200-vm.1n").reports[GraphKind.NVLS].origin is Origin.SEARCH
    off = _search("device-8xH200-vm.1n", nvls=0)
    assert off.reports[GraphKind.NVLS].origin is Origin.NOT_RUN
    assert not off.graph(GraphKind.NVLS).computed
    mesh = _search("gh200-4gpu-mesh.1n").reports[GraphKind.NVLS]
    assert mesh.origin is Origin.NO_NVSWITCH
    assert mesh.graph.computed


def test_collnet_is_searched_on_demand() -> None:
    assert not _search("gh200-4gpu-mesh.2n.crossnic0").graph(GraphKind.COLLNET_CHAIN).computed
    assert (
        _search("gh200-4gpu-mesh.2n.crossnic0", collnet=True)
        .graph(GraphKind.COLLNET_CHAIN)
        .computed
    )


def test_cross_nic_can_be_disabled() -> None:
    for value, allowed in ((0, {0}), (1, {1}), (2, {0, 2})):
        result = _search("nvidia-dgx1v.2n", cross_nic=value)
        assert result.graph(GraphKind.RING).cross_nic in allowed


def test_two_nvlink_islands_need_two_channels() -> None:
    ring = _search("split-nvlink-2x4.1n.p2psys").graph(GraphKind.RING)
    assert ring.min_channels >= 2


def test_machine_without_gpus_is_rejected() -> None:
    with pytest.raises(TopologyError, match="no GPU"):
        search_channels(System(nodes=()), PathTable())


def test_fallback_without_paths() -> None:
    """With every path cut, the only channel is the order of the GPUs."""
    system = system_from_json(_case("hgx-a100-4gpu.1n").load()["system"])
    result = search_channels(system, PathTable())
    ring = result.reports[GraphKind.RING]
    assert ring.origin is Origin.FALLBACK
    assert ring.graph.intra == (tuple(gpu.rank for gpu in system.gpus),)
    assert ring.graph.bw_intra == float(np.float32(0.1))
    assert ring.graph.type_intra is PathType.SYS
