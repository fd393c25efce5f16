"""GPU collectives on real GPUs, bit by bit; ranks share a GPU if there is only one."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.cases import CASES, name_of
from tests.gpu.gpus import GPUS, ON_GPUS
from tests.gpu.ranks import run_cases

pytestmark = ON_GPUS
RANKS = sorted({2, min(4, GPUS)} - {0, 1})


@functools.cache
def answers(nranks: int) -> list[list[str]]:
    """Results of all cases from one set of processes, since starting them takes longer than the
    cases.
    """
    return run_cases(CASES, nranks)


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_result(number: int, nranks: int) -> None:
    got = answers(nranks)[number]
    assert not any(got), "\n".join(f"rank {rank}: {answer}" for rank, answer in enumerate(got))


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_a_rank_that_waits_alone_gets_an_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TIMEOUT", "2" if how == "timeout" else "60")
    assert run_cases([{"failure": how}], 2) == [["", ""]]


@pytest.mark.parametrize("how", ["death", "death while it works"])
def test_a_rank_survives_the_death_of_a_peer(how: str) -> None:
    assert run_cases([{"failure": how}], 2) == [["", ""]]


@pytest.mark.parametrize("how", ["copies stop", "copies stop in a graph"])
def test_a_rank_that_waits_for_copies_gets_an_error(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIRACCL_SMS", "0")
    assert run_cases([{"failure": how}], 2) == [["", ""]]


def test_different_operations_are_a_mismatch() -> None:
    assert run_cases([{"failure": "mismatch"}], 2) == [["", ""]]


@pytest.mark.parametrize("nranks", RANKS)
def test_streams_communicators_and_windows(nranks: int) -> None:
    scenes = ["streams", "windows", "one_sided"]
    if nranks <= GPUS:  # ranks that share a GPU cannot both fill it
        scenes.append("communicators")
    assert run_cases([{"scene": scene} for scene in scenes], nranks) == [[""] * nranks] * len(
        scenes
    )


def test_communicator_accepts_tensors() -> None:
    assert run_cases([{"communicator": True}], 2) == [["", ""]]
