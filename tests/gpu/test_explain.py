"""Explanations of plans on GPU memory."""

from __future__ import annotations

from typing import Any

import pytest

from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import ALGORITHMS, Request
from miraccl.planning.device_candidates import DeviceCandidate, candidates
from miraccl.types import Collective, DType, RedOp
from tests.gpu import emulated_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

WAYS = (((0, 1), "vmm", "NVL"),)


def explained(
    collective: Collective, count: int, nranks: int = 4, dtype: DType = DType.FLOAT32, **more: Any
) -> list[DeviceCandidate]:
    request = {name: more.pop(name) for name in ("algo", "proto", "why") if name in more}
    asked = Request(
        collective=collective, dtype=dtype, op=RedOp.SUM, count=count, nranks=nranks, **request
    )
    return candidates(
        asked, order=tuple(range(nranks))[::-1], order_reason="a ring", connections=WAYS, **more
    )


@pytest.mark.parametrize("collective", ALGORITHMS)
@pytest.mark.parametrize("count", [1, 3000, 1 << 22])
def test_the_chosen_candidate_is_first_and_runs(collective: Collective, count: int) -> None:
    found = explained(collective, count)
    plan = choose(
        Request(collective=collective, dtype=DType.FLOAT32, op=RedOp.SUM, count=count, nranks=4)
    )
    first = found[0]
    assert (first.algo, first.proto, first.blocks, first.threads, first.unroll) == (
        plan.algo,
        plan.proto,
        plan.blocks,
        plan.threads,
        plan.unroll,
    )
    assert [candidate.chosen for candidate in found] == [True, *[False] * (len(found) - 1)]
    assert {candidate.algo for candidate in found if candidate.proto != "copy"} == set(
        ALGORITHMS[collective]
    )
    assert all(candidate.reason and candidate.connections == WAYS for candidate in found)
    assert len({candidate.reason for candidate in found}) == len(found)


def test_reasons() -> None:
    small, large = (
        explained(Collective.ALL_REDUCE, 32 << 10),
        explained(Collective.ALL_REDUCE, 33 << 10),
    )
    assert small[0].reason.startswith("blocks of up to 128 KiB on 4 GPUs; ll128: words of")
    assert [(c.algo, c.reason) for c in large[1:]] == [
        ("one_shot", "two_shot is taken for blocks of more than 128 KiB on 4 GPUs"),
        ("ring", "from 64 MiB on: sums are rounded at every hop"),
        ("double_binary_tree", "on request only: no size is known at which it wins"),
    ]
    floats8 = explained(Collective.ALL_REDUCE, 1 << 20, dtype=DType.FLOAT8_E5M2)
    assert floats8[2].reason == "on request only: sums are rounded at every hop"
    assert (large[0].frame, large[2].order, large[2].order_reason) == (
        "word",
        (3, 2, 1, 0),
        "a ring",
    )
    assert (large[0].order, large[0].order_reason) == ((), "")
    moved = explained(Collective.ALL_GATHER, 100)
    assert [(c.algo, c.proto, c.frame) for c in moved] == [
        ("one_shot", "ll", "pair"),
        ("ring", "simple", ""),
        ("one_shot", "copy", ""),
    ]
    assert moved[1].reason == "from 64 MiB on"
    assert "taken into windows (comm.empty), from 48 MiB" in moved[2].reason
    asked = explained(
        Collective.BROADCAST, 100, algo="chain", proto="ll128", why="asked for (NCCL_ALGO)"
    )
    assert (asked[0].reason, asked[0].frame) == ("asked for (NCCL_ALGO); ll128: asked for", "mask")
    assert asked[1].reason == "chain was asked for (NCCL_ALGO)"
    tree = explained(Collective.ALL_REDUCE, 100, algo="double_binary_tree")
    assert (tree[0].proto, tree[0].frame, tree[0].order) == ("ll128", "word", (3, 2, 1, 0))
    assert tree[0].reason == "asked for; ll128: words of float sums are their own flags"
    other = explained(Collective.ALL_GATHER, 100, algo="ring")
    assert (other[0].proto, other[0].frame) == ("simple", "")
    assert other[0].reason == "asked for; simple: ring has no packet kernel for this size"


def test_without_kernels() -> None:
    engines = explained(Collective.BROADCAST, 1 << 20, no_multiprocessors=True)
    assert [(c.proto, c.chosen) for c in engines][:2] == [("copy", True), ("ll128", False)]
    assert (
        explained(Collective.BROADCAST, 1 << 20, no_multiprocessors=True, all_direct=False)[0].proto
        == "ll128"
    )
    assert (
        explained(Collective.ALL_REDUCE, 1 << 20, nranks=1)[0].reason
        == "one rank: the result is the input"
    )
    assert explained(Collective.SCATTER, 1 << 20)[0].algo == "p2p"


@pytest.mark.multiprocess
@needs_compiler
def test_explanations_of_communicators() -> None:
    env = {"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())}
    run_ranks(emulated_ranks.explanations, 3, env=env, timeout=100.0)
