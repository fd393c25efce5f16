"""NCCL's reference results as cases for the stages after the search.

``tests.topo.golden`` locates them. ``MIRACCL_GOLDEN_FULL=1`` runs every case where a test would
otherwise take a sample.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from miraccl.graph.channel_graph import graph_from_json
from miraccl.graph.connect import SearchedDomain
from miraccl.graph.kinds import GraphKind
from miraccl.topo.records import GpuNode, System
from miraccl.topo.system_json import paths_from_json, system_from_json
from tests.topo.golden import DATA, LARGER, GoldenCase, golden_cases

FULL = os.environ.get("MIRACCL_GOLDEN_FULL", "") == "1"


@cache
def all_cases() -> tuple[GoldenCase, ...]:
    """Return every case once, those inside the repository first."""
    found: dict[str, GoldenCase] = {}
    for folder in (DATA / "golden", LARGER):
        if folder and (folder / "index.json").is_file():
            for case in golden_cases(folder):
                if case.topology.is_file():
                    found.setdefault(case.name, case)
    return tuple(found.values())


def sample(every: int, offset: int = 0) -> list[Any]:
    """Return each ``every``-th case from ``offset`` as test parameters.

    All cases with ``MIRACCL_GOLDEN_FULL``, a skipped one if there are none.
    """
    chosen = all_cases() if FULL else all_cases()[offset::every]
    if not chosen:
        return [
            pytest.param(
                None,
                marks=pytest.mark.skip(
                    reason="no reference results; MIRACCL_GOLDEN names their folder"
                ),
            )
        ]
    return [pytest.param(case, id=case.name) for case in chosen]


def differences(want: Any, got: Any, where: str = "") -> list[str]:
    """Return the places where ``got`` differs from ``want``.

    Comparison is exact except for fractional numbers (relative 2e-6); extra keys are allowed.
    """
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return [f"{where}: not an object"]
        return [
            line
            for key, value in want.items()
            for line in (
                differences(value, got[key], f"{where}.{key}")
                if key in got
                else [f"{where}.{key}: missing"]
            )
        ]
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return [
                f"{where}: {len(got) if isinstance(got, list) else got!r} items, expected "
                f"{len(want)}"
            ]
        if want == got:
            return []
        return [
            line
            for i, (a, b) in enumerate(zip(want, got))
            for line in differences(a, b, f"{where}[{i}]")
        ]
    if isinstance(want, float) or isinstance(got, float):
        same = isinstance(got, int | float) and abs(want - got) <= 2e-6 * max(
            abs(want), abs(got), 1e-9
        )
        return [] if same else [f"{where}: {got!r}, expected {want!r}"]
    return [] if want == got else [f"{where}: {got!r}, expected {want!r}"]


def recorded_domains(want: dict[str, Any]) -> list[SearchedDomain]:
    """Return the domains of a case from its recorded sections.

    Systems of further domains are not recorded: the first one is used with other rank numbers.
    Skips the test if their sizes differ.
    """
    system = system_from_json(want["system"])
    paths = paths_from_json(want["paths"], system)
    result = []
    for ranks, graphs in zip(
        want["domains"], [want["graphs"], *want.get("other_domain_graphs", [])]
    ):
        if len(ranks) != len(system.gpus):
            pytest.skip(
                "the systems of further domains are not recorded; test_plan covers the case"
            )
        records = {graph.kind: graph for graph in map(graph_from_json, graphs)}
        assert set(records) == set(GraphKind)
        result.append(
            SearchedDomain(system=_renumbered(system, sorted(ranks)), paths=paths, graphs=records)
        )
    return result


def _renumbered(system: System, ranks: list[int]) -> System:
    names = dict(zip(sorted(gpu.rank for gpu in system.gpus), ranks))
    nodes = (
        replace(node, rank=names[node.rank]) if isinstance(node, GpuNode) else node
        for node in system.nodes
    )
    return replace(system, nodes=tuple(nodes))
