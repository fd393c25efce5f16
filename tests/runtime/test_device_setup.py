"""Setup of the GPU side and of windows: one deadline, and failures are reported to all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gpu import setup_ranks
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess
SOON_S = 20.0
ONE_HOST_PHASES = ["gpu hosts", "gpu facts", "gpu views", "gpu memory", "gpu mapped", "gpu ready"]
MULTI_NODE_PHASES = [
    "gpu hosts",
    "gpu staging",
    "fabric hello",
    "fabric ready",
    "direct",
    "gpu messages",
    "gpu staging ready",
]


@pytest.mark.parametrize(
    ("apart", "what"), [(False, "set-up"), (True, "set-up"), (False, "window")]
)
def test_all_phases_share_the_deadline(apart: bool, what: str) -> None:
    first, second = run_ranks(setup_ranks.deadline_in_phases, 2, apart, what, timeout=90)
    assert first["type"] == "CollectiveTimeout", first
    assert (
        "rank 1 of 2 did not arrive within 25 s: timed out (all of its phases share one deadline)"
        in first["text"]
    )
    assert first["peer"] == 1
    assert "' of " in first["op"]
    assert second["type"] in ("CollectiveTimeout", "BootstrapError", "CommunicatorAborted"), second
    assert first["deadlines"] == second["deadlines"] == 1
    assert first["of the call"]
    assert second["of the call"]
    assert first["seconds"] < SOON_S


@pytest.mark.parametrize(
    ("apart", "stage"),
    [
        *((False, stage) for stage in ONE_HOST_PHASES),
        *((True, stage) for stage in MULTI_NODE_PHASES),
    ],
)
def test_rank_missing_in_a_phase_is_named(apart: bool, stage: str) -> None:
    first, second = run_ranks(setup_ranks.absent, 2, apart, stage)
    assert first["type"] == "CollectiveTimeout", first
    assert first["op"].startswith(f"{stage!r} of "), first
    assert "rank 1 of 2 did not arrive within 25 s" in first["text"]
    assert first["seconds"] < SOON_S
    assert second["type"] == "BootstrapError", second
    assert re.search(
        "rank 0( of 2)? left: gave up the first operation on GPU memory: rank 0, ", second["text"]
    )


def test_rank_with_missing_descriptors_is_named() -> None:
    first, second = run_ranks(setup_ranks.absent, 2, False, "door")
    assert first["type"] == "CollectiveTimeout", first
    assert first["op"] == "'gpu mapped' of the first operation on GPU memory"
    assert first["peer"] == 1
    assert first["seconds"] < SOON_S
    assert second["type"] == "BootstrapError", second


@pytest.mark.parametrize(
    ("apart", "call"),
    [(False, "cuMemHostAlloc"), (True, "cuMemHostAlloc"), (True, "cuMemHostRegister")],
)
def test_driver_failure_is_reported_and_recoverable(apart: bool, call: str) -> None:
    for rank, (outcome, again, window) in enumerate(
        run_ranks(setup_ranks.fails_alone, 3, apart, call)
    ):
        assert outcome["type"] == ("SystemFailure" if rank == 1 else "BootstrapError"), outcome
        assert call in outcome["text"]
        assert rank == 1 or re.search(
            "rank 1( of 3)? left: gave up the first operation on GPU memory", outcome["text"]
        )
        assert outcome["seconds"] < SOON_S
        assert again["type"] == window["type"] == "none", (again, window)


@pytest.mark.parametrize("fails", [False, True])
def test_second_thread_waits_and_retries_setup(
    fails: bool,
) -> None:
    for rank, (begun, outcome) in enumerate(run_ranks(setup_ranks.two_threads, 2, fails)):
        failure = "SystemFailure" if rank == 1 else "BootstrapError"
        assert (begun, [each["type"] for each in outcome]) == (
            (2, [failure, "none"]) if fails else (1, ["none"] * 2)
        ), outcome


def test_memory_failure_is_reported_and_recoverable() -> None:
    for rank, (outcome, again) in enumerate(run_ranks(setup_ranks.no_memory, 3)):
        assert outcome["type"] == ("SystemFailure" if rank == 1 else "BootstrapError"), outcome
        assert "cuMemAlloc" in outcome["text"]
        assert outcome["seconds"] < SOON_S
        assert again["type"] == "none", again


@pytest.mark.parametrize("access", [True, False])
def test_window_failure_is_reported_and_recoverable(
    access: bool,
) -> None:
    for rank, (outcome, again) in enumerate(run_ranks(setup_ranks.no_window, 3, access)):
        assert outcome["type"] == "SystemFailure", outcome
        call = "cuMemCreate" if access else "cuMemAlloc"
        assert (
            f"{'' if rank == 1 else 'rank 1 cannot allocate window memory: '}{call}"
            in outcome["text"]
        )
        assert outcome["seconds"] < SOON_S
        assert again["type"] == "none", again


def test_death_ends_wait_for_descriptors() -> None:
    outcome = rank_outcomes(setup_ranks.dies_before_descriptors, 2)[0].value
    assert outcome["type"] == "PeerDied", outcome
    assert "rank 1 died" in outcome["text"]
    assert outcome["seconds"] < SOON_S


@pytest.mark.parametrize("stage", ["gpu ready", "fabric connect", "direct"])
@pytest.mark.parametrize("how", [setup_ranks.aborted, setup_ranks.aborts_late])
def test_abort_ends_multi_node_setup(how: Callable[[str], object], stage: str) -> None:
    for outcome in run_ranks(how, 2, stage):
        assert outcome["type"] == "CommunicatorAborted", outcome
        assert "for a test" in outcome["text"]
        assert outcome["seconds"] < SOON_S


@pytest.mark.parametrize("which", ["direct", "gpu messages"])
def test_stream_cut_before_welcome_is_reported(which: str) -> None:
    got = run_ranks(setup_ranks.cut_before_welcome, 2, which)
    assert got[1]["type"] == "PeerDied", got
    assert "rank 1 has lost its connection to rank 0" in got[1]["text"]
    assert got[0]["type"] == "BootstrapError", got
    assert re.search(
        "rank 1( of 2)? left: gave up the first operation on GPU memory: rank 1", got[0]["text"]
    )
    assert max(outcome["seconds"] for outcome in got) < SOON_S
