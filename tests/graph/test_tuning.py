"""The model and the choices: NCCL's numbers, and invariants for any inputs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest

from miraccl.errors import InvalidUsage
from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.connect import connect
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.plan_settings import ConnectSettings, TuningSettings
from miraccl.graph.tuning import TuningModel, build_model
from miraccl.graph.tuning_choice import (
    TABLE_SIZES,
    candidates,
    choose,
    predict_time,
    tuning_to_json,
)
from miraccl.graph.tuning_constants import TUNED, NcclAlgorithm
from miraccl.graph.tuning_filter import Constraint, parse_constraints
from miraccl.graph.tuning_inputs import TuningInputs
from miraccl.topo.records import PathType
from miraccl.types import Collective, Protocol
from tests.graph.golden import differences, recorded_domains, sample
from tests.topo.golden import GoldenCase

ALL_REDUCE = Collective.ALL_REDUCE


def recorded_model(case: GoldenCase) -> TuningModel:
    want = case.load()
    domains = recorded_domains(want)
    plan = connect(
        domains,
        hosts=case.options.nodes,
        gpus_per_host=want["gpus_per_node"],
        collnet=case.options.collnet,
        settings=ConnectSettings.read(case.env),
    )
    return build_model(TuningInputs.of(plan, domains[0].system), TuningSettings.read(case.env))


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(3))
def test_model_and_choices_match_nccl(case: GoldenCase) -> None:
    assert differences(case.load()["tuning"], tuning_to_json(recorded_model(case)), "tuning") == []


def evaluate_limits(limits: tuple[str, ...]) -> float:
    """Compute the bandwidth that the listed factors imply."""
    value = 0.0
    for words in limits:
        numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", words)]
        match words.split()[0]:
            case "half":
                value /= 2
            case "divided":
                value /= numbers[0]
            case "times":
                value *= numbers[0]
            case _ if " % of it: " in words:
                value *= numbers[0] / 100
            case _ if " at most " in words:
                value = numbers[-1]
            case _:
                value = numbers[0] * numbers[1]
    return value


@pytest.mark.golden
@pytest.mark.parametrize("case", sample(4, offset=1))
def test_limits_multiply_to_the_bandwidth(case: GoldenCase) -> None:
    for key, estimate in recorded_model(case).estimates.items():
        if estimate.bandwidth:
            assert evaluate_limits(estimate.limits) == pytest.approx(
                estimate.bandwidth, rel=0.01
            ), (
                key,
                estimate,
            )


def graph(kind: GraphKind, pattern: Pattern, **changes: object) -> ChannelGraph:
    values: dict[str, object] = {
        "kind": kind,
        "pattern": pattern,
        "bw_intra": 20.0,
        "bw_inter": 20.0,
        "type_intra": PathType.NVL,
        "type_inter": PathType.PIX,
        "intra": tuple((0, 1, 2, 3) for _ in range(8)),
    }
    return ChannelGraph(**(values | changes))  # type: ignore[arg-type]


def inputs(**changes: object) -> TuningInputs:
    """Two nodes of four A100."""
    none = {"computed": False, "intra": (), "bw_intra": 0.0, "bw_inter": 0.0}
    values: dict[str, object] = {
        "graphs": {
            GraphKind.RING: graph(GraphKind.RING, Pattern.RING),
            GraphKind.TREE: graph(GraphKind.TREE, Pattern.TREE),
            GraphKind.COLLNET_CHAIN: graph(GraphKind.COLLNET_CHAIN, Pattern.TREE, **none),
            GraphKind.NVLS: graph(GraphKind.NVLS, Pattern.NVLS, **none),
            GraphKind.COLLNET_DIRECT: graph(
                GraphKind.COLLNET_DIRECT, Pattern.COLLNET_DIRECT, **none
            ),
        },
        "nnodes": 2,
        "nranks": 8,
        "max_local_ranks": 4,
        "channels": 16,
        "min_sm": 80,
        "max_sm": 80,
        "max_tree_pattern": Pattern.TREE,
        "cpu_arch": 1,
        "cpu_vendor": 1,
        "nvswitch": False,
        "nvls_support": False,
        "nvls_channels": 0,
        "collnet_enabled": False,
        "collnet_heads": 0,
        "collnet_direct_heads": 1,
    }
    return TuningInputs(**(values | changes))  # type: ignore[arg-type]


def test_the_choice_is_the_fastest_candidate() -> None:
    model = build_model(inputs())
    for coll in TUNED:
        for nbytes in TABLE_SIZES:
            choice = choose(model, coll, nbytes)
            assert choice is not None
            assert choice.time == min(
                c.time for c in candidates(model, coll, nbytes) if c.time is not None
            )


def test_time_never_falls_with_size_of_a_ring() -> None:
    model = build_model(inputs())
    times = [
        predict_time(model, ALL_REDUCE, NcclAlgorithm.RING, Protocol.LL, nbytes)
        for nbytes in TABLE_SIZES
    ]
    assert all(a is not None and b is not None and a < b for a, b in itertools.pairwise(times))


def test_channels_shrink_for_small_sizes() -> None:
    model = build_model(inputs())
    counts = [
        choice.channels
        for nbytes in TABLE_SIZES
        if (choice := choose(model, Collective.ALL_GATHER, nbytes))
    ]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 16)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (TuningSettings(algo="ring"), {NcclAlgorithm.RING}),
        (TuningSettings(algo="^ring"), {NcclAlgorithm.TREE}),
        (TuningSettings(algo="ring;allreduce:tree"), {NcclAlgorithm.TREE}),
        (TuningSettings(algo="allgather:ring"), {NcclAlgorithm.TREE, NcclAlgorithm.RING}),
    ],
)
def test_algorithms_can_be_excluded(setting: TuningSettings, allowed: set[NcclAlgorithm]) -> None:
    model = build_model(inputs(), setting)
    usable = {c.algorithm for c in candidates(model, ALL_REDUCE, 1 << 20) if c.time is not None}
    assert usable == allowed


def test_no_candidates_means_no_choice() -> None:
    model = build_model(inputs(), TuningSettings(algo="nvls"))
    assert choose(model, ALL_REDUCE, 1024) is None
    assert all(c.disabled_reason for c in candidates(model, ALL_REDUCE, 1024))
    assert tuning_to_json(model)["choice"]["AllReduce"][0] == [8, None, None, 0, 0, 0]


def test_ll128_is_disabled_on_far_paths_unless_requested() -> None:
    far = dict(inputs().graphs)
    far[GraphKind.RING] = graph(GraphKind.RING, Pattern.RING, type_inter=PathType.PHB)
    by_default = build_model(inputs(graphs=far)).estimate(
        ALL_REDUCE, NcclAlgorithm.RING, Protocol.LL128
    )
    assert by_default.bandwidth == 0
    assert "PHB" in by_default.disabled_reason
    asked = build_model(inputs(graphs=far), TuningSettings(proto="ll128")).estimate(
        ALL_REDUCE, NcclAlgorithm.RING, Protocol.LL128
    )
    assert asked.bandwidth > 0


def test_ll128_needs_equal_gpus() -> None:
    assert (
        "sm 80 to 90"
        in build_model(inputs(max_sm=90))
        .estimate(ALL_REDUCE, NcclAlgorithm.RING, Protocol.LL128)
        .disabled_reason
    )


@pytest.mark.parametrize(
    ("threads", "got"), [(0, 512), (96, 96), (100, 512), (32, 64), (4096, 512)]
)
def test_thread_settings_are_clamped(threads: int, got: int) -> None:
    assert (
        build_model(inputs(), TuningSettings(threads=threads)).max_threads[NcclAlgorithm.RING][
            Protocol.LL
        ]
        == got
    )


def test_settings_come_from_the_environment() -> None:
    read = TuningSettings.read(
        {
            "NCCL_THREAD_THRESHOLDS": "1 -2 3 4 x 9",
            "NCCL_NET_OVERHEAD": "2500",
            "NCCL_PAT_ENABLE": "0",
        }
    )
    assert read.thread_thresholds == (1, -2, 3, 4)
    assert read.net_overhead_us == pytest.approx(2.5)
    assert read.pat == 0
    table = build_model(inputs(), read).thread_thresholds
    assert table[NcclAlgorithm.TREE] == (1, 8, 3)
    assert table[NcclAlgorithm.RING] == (4, 8, 64)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1-2", (1, -2)),
        ("1+2 3", (1, 2, 3)),
        ("5 - 3", (5,)),
        ("9" * 5000, ((1 << 63) - 1,)),
        ("x", ()),
    ],
)
def test_thread_thresholds_are_read_as_nccl_scans_them(text: str, numbers: tuple[int, ...]) -> None:
    assert TuningSettings.read({"NCCL_THREAD_THRESHOLDS": text}).thread_thresholds == numbers


@pytest.mark.parametrize("text", ["1" + "0" * 400, "-" + "9" * 40])
def test_overhead_out_of_range_is_rejected(text: str) -> None:
    with pytest.raises(
        InvalidUsage,
        match="NCCL_NET_OVERHEAD: allowed are -1000000000000000 to 1000000000000000 ns",
    ):
        TuningSettings.read({"NCCL_NET_OVERHEAD": text})


def test_pat_needs_one_rank_per_node() -> None:
    one = inputs(nnodes=8, nranks=8, max_local_ranks=1)
    assert (
        build_model(one)
        .estimate(Collective.ALL_GATHER, NcclAlgorithm.PAT, Protocol.SIMPLE)
        .bandwidth
        > 0
    )
    assert (
        build_model(inputs())
        .estimate(Collective.ALL_GATHER, NcclAlgorithm.PAT, Protocol.SIMPLE)
        .bandwidth
        == 0
    )


def test_amd_hosts_have_a_larger_network_overhead() -> None:
    intel, amd = (build_model(inputs(cpu_vendor=vendor)) for vendor in (1, 2))
    key = (Collective.ALL_GATHER, NcclAlgorithm.RING, Protocol.SIMPLE)
    assert amd.estimate(*key).latency > intel.estimate(*key).latency


def test_a_single_rank_has_no_model() -> None:
    model = build_model(replace(inputs(), nranks=1, nnodes=1))
    choice = choose(model, ALL_REDUCE, 1 << 30)
    assert choice is not None
    assert (choice.algorithm, choice.protocol, choice.time) == (
        NcclAlgorithm.RING,
        Protocol.SIMPLE,
        0,
    )


LABELS = {algo: algo.label for algo in NcclAlgorithm}


def test_a_later_entry_replaces_an_earlier_one_for_its_collective() -> None:
    constraints = parse_constraints("ring,COLLNETdirect;allreduce:^tree", LABELS, "NCCL_ALGO")
    assert [a for a, w in constraints[Collective.BROADCAST].items() if w == Constraint.ALLOWED] == [
        NcclAlgorithm.RING,
        NcclAlgorithm.COLLNET_DIRECT,
    ]
    assert [a for a, w in constraints[ALL_REDUCE].items() if w == Constraint.EXCLUDED] == [
        NcclAlgorithm.TREE
    ]
    assert set(parse_constraints("", LABELS, "NCCL_ALGO")[ALL_REDUCE].values()) == {
        Constraint.UNCONSTRAINED
    }


@pytest.mark.parametrize("text", ["rong", "ring;tree", "allsum:ring", "allreduce:ring;tree"])
def test_invalid_list_is_rejected_with_its_variable(text: str) -> None:
    with pytest.raises(InvalidUsage, match="NCCL_ALGO"):
        parse_constraints(text, LABELS, "NCCL_ALGO")
