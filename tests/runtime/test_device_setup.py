"""The GPU side of a communicator and its windows are made by one deadline; who fails or is gone is told to all at once."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.gpu import setup_ranks
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess
SOON_S = 20.0
ONE_HOST = ["gpu hosts", "gpu facts", "gpu views", "gpu memory", "gpu mapped", "gpu ready"]
HOSTS = [
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
def test_all_stages_end_by_the_deadline_of_the_call(apart: bool, what: str) -> None:
    first, second = run_ranks(setup_ranks.in_stages, 2, apart, what, timeout=90)
    assert first["type"] == "CollectiveTimeout", first
    assert (
        "rank 1 of 2 did not come within 25 s (all its stages share one deadline)" in first["text"]
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
    [*((False, stage) for stage in ONE_HOST), *((True, stage) for stage in HOSTS)],
)
def test_a_rank_that_does_not_come_to_a_stage_is_named_with_it(apart: bool, stage: str) -> None:
    first, second = run_ranks(setup_ranks.absent, 2, apart, stage)
    assert first["type"] == "CollectiveTimeout", first
    assert first["op"].startswith(f"{stage!r} of "), first
    assert "rank 1 of 2 did not come within 25 s" in first["text"]
    assert first["seconds"] < SOON_S
    assert second["type"] == "BootstrapError", second
    assert re.search(
        "rank 0( of 2)? left: gave the first operation on GPU memory up: rank 0, ", second["text"]
    )


def test_a_rank_whose_descriptors_do_not_come_is_named_at_the_deadline() -> None:
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
def test_a_rank_whose_driver_refuses_tells_the_others_and_all_may_go_on(
    apart: bool, call: str
) -> None:
    for rank, (told, again, window) in enumerate(
        run_ranks(setup_ranks.fails_alone, 3, apart, call)
    ):
        assert told["type"] == ("SystemFailure" if rank == 1 else "BootstrapError"), told
        assert call in told["text"]
        assert rank == 1 or re.search(
            "rank 1( of 3)? left: gave the first operation on GPU memory up", told["text"]
        )
        assert told["seconds"] < SOON_S
        assert again["type"] == window["type"] == "none", (again, window)


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_thread_waits_for_the_gpu_side_and_makes_it_anew_if_that_failed(
    fails: bool,
) -> None:
    for rank, (begun, told) in enumerate(run_ranks(setup_ranks.two_threads, 2, fails)):
        failure = "SystemFailure" if rank == 1 else "BootstrapError"
        assert (begun, [each["type"] for each in told]) == (
            (2, [failure, "none"]) if fails else (1, ["none"] * 2)
        ), told


def test_a_rank_without_memory_or_peer_access_tells_the_others_and_all_may_go_on() -> None:
    for rank, (told, again) in enumerate(run_ranks(setup_ranks.no_memory, 3)):
        assert told["type"] == ("SystemFailure" if rank == 1 else "BootstrapError"), told
        assert "cuMemAlloc" in told["text"]
        assert told["seconds"] < SOON_S
        assert again["type"] == "none", again


@pytest.mark.parametrize("access", [True, False])
def test_a_rank_without_memory_for_a_window_tells_the_others_and_all_may_go_on(
    access: bool,
) -> None:
    for rank, (told, again) in enumerate(run_ranks(setup_ranks.no_window, 3, access)):
        assert told["type"] == "SystemFailure", told
        assert (
            f"{'' if rank == 1 else 'rank 1 has no window memory: '}cuMem{'Create' if access else 'Alloc'}"
            in told["text"]
        )
        assert told["seconds"] < SOON_S
        assert again["type"] == "none", again


def test_a_death_ends_the_wait_for_descriptors() -> None:
    told = rank_outcomes(setup_ranks.dies_at_the_door, 2)[0].value
    assert told["type"] == "PeerDied", told
    assert "rank 1 died" in told["text"]
    assert told["seconds"] < SOON_S


@pytest.mark.parametrize("stage", ["gpu ready", "fabric connect", "direct"])
@pytest.mark.parametrize("how", [setup_ranks.aborted, setup_ranks.aborts_late])
def test_an_abort_ends_the_stages_among_hosts(how: Callable[[str], object], stage: str) -> None:
    for told in run_ranks(how, 2, stage):
        assert told["type"] == "CommunicatorAborted", told
        assert "for a test" in told["text"]
        assert told["seconds"] < SOON_S


@pytest.mark.parametrize("which", ["direct", "gpu messages"])
def test_a_stream_that_is_cut_before_the_welcome_is_told_to_all(which: str) -> None:
    got = run_ranks(setup_ranks.cut_before_the_welcome, 2, which)
    assert got[1]["type"] == "PeerDied", got
    assert "rank 1 has lost its connection to rank 0" in got[1]["text"]
    assert got[0]["type"] == "BootstrapError", got
    assert re.search(
        "rank 1( of 2)? left: gave the first operation on GPU memory up: rank 1", got[0]["text"]
    )
    assert max(told["seconds"] for told in got) < SOON_S
