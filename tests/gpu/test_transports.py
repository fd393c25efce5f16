"""GPU collectives over every kind of connection and over several hosts, on real GPUs; ranks may
share
one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest

from tests.gpu.cases import CASES
from tests.gpu.gpus import GPUS, ON_GPUS
from tests.gpu.ranks import run_cases

pytestmark = ON_GPUS
WORKER = "tests.gpu.transport_worker"
WAYS = {
    "vmm": {"MIRACCL_CUMEM": "1"},
    "ipc": {"MIRACCL_CUMEM": "0"},
    "host": {"MIRACCL_P2P_DISABLE": "1"},
}
RANKS = sorted({2, min(4, GPUS)} - {0, 1})


def _small(case: dict[str, Any]) -> bool:
    return bool(case.get("count", 0) <= 400_000 and case.get("repeat", 0) <= 20)


#: Every third small case, and a few with reused slots.
SOME = [case for case in CASES if "collective" in case and _small(case)][::3]
SOME += [{"collective": "all_reduce", "dtype": "bfloat16", "count": (6 << 20) + 5, "repeat": 3}]
SOME += [{"collective": "all_gather", "dtype": "float32", "count": 1 << 20, "repeat": 3}]


@functools.cache
def answers(kind: str, nranks: int) -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[kind].items():
            patch.setenv(name, value)
        return run_cases([{"kinds": [kind]}, *SOME, {"window": 3 << 20}], nranks, module=WORKER)


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("kind", list(WAYS))
def test_collectives_over_every_kind_of_connection(kind: str, nranks: int) -> None:
    rows = answers(kind, nranks)
    assert rows[0] == [""] * nranks, "the communicator uses another way"
    assert rows[-1] == [""] * nranks, "window memory"
    wrong = [(case, row) for case, row in zip(SOME, rows[1:-1], strict=True) if any(row)]
    assert not wrong, wrong[:3]


def test_threads_of_one_process() -> None:
    assert run_cases([{"threads": True}], 2, module=WORKER) == [["", ""]]


@pytest.mark.skipif(GPUS < 3, reason="needs three GPUs")
def test_the_nccl_p2p_level_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_P2P_LEVEL", "LOC")
    case = {"collective": "all_reduce", "dtype": "float32", "count": 1000}
    assert run_cases([{"kinds": ["host"]}, case], 3, module=WORKER) == [[""] * 3] * 2


def hosts_cases(two_steps: bool) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for count in (1, 1001, 300_007, 5_000_000):
        cases += [
            {"collective": "all_reduce", "dtype": dtype, "count": count}
            for dtype in ("float32", "bfloat16")
        ]
        cases += [
            {"collective": c, "dtype": "float32", "count": count // 3 + 1}
            for c in ("all_gather", "reduce_scatter", "all_to_all")
        ]
    for collective in ("broadcast", "reduce", "gather", "scatter"):
        cases += [
            {"collective": collective, "dtype": "float16", "count": 100_003, "root": root}
            for root in (0, 1)
        ]
    cases += [
        {"collective": "all_reduce", "dtype": "int64", "count": 9999, "op": op}
        for op in ("MAX", "MIN", "PROD")
    ]
    cases += [{"collective": "all_reduce", "dtype": "float8_e4m3", "count": 999}]
    cases += [{"collective": "all_reduce", "dtype": "float32", "count": 70_001, "in_place": True}]
    cases += [
        {"collective": "all_reduce", "dtype": "bfloat16", "count": count, "graph": 5}
        for count in (1000, 6_000_000)
    ]
    cases += [
        {"collective": "all_gather", "dtype": "float32", "count": 70_000, "graph": 5},
        {"transfers": 1_000_000},
        {"communicator": True},
    ]
    cases += [
        {
            "collective": "all_reduce",
            "dtype": "float32",
            "count": 4096,
            "algo": "hierarchical" if two_steps else "staged",
        }
    ]
    return cases


@pytest.mark.parametrize(
    "hosts",
    ["AB", *(["AABB", "ABAB", "AAB"] if GPUS >= 4 or os.environ.get("TEST_GPU_SHARED") else [])],
)
def test_collectives_over_hosts(hosts: str) -> None:
    cases = [{"hosts": hosts}, *hosts_cases(hosts in ("AABB", "ABAB"))]
    rows = run_cases(cases, len(hosts), module=WORKER)
    wrong = [(case, row) for case, row in zip(cases, rows, strict=True) if any(row)]
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("how", ["timeout", "abort", "death"])
def test_a_stream_that_waits_for_another_host_is_released(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TIMEOUT", "2" if how == "timeout" else "60")
    rows = run_cases([{"hosts": "AB"}, {"failure": how}], 2, module=WORKER)
    assert rows == [["", ""], ["", ""]]
