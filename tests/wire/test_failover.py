"""Succession of hubs: the survivors agree on the lowest living rank, whatever dies and when."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.wire.bootstrap_failover import (
    Dial,
    GiveUp,
    Outcome,
    SearchState,
    SuccessorSearch,
    TakeOver,
)
from miraccl.wire.bootstrap_hub import REJOIN_SECONDS
from miraccl.wire.bootstrap_messages import Gather
from tests.wire.failover_world import FailoverWorld, Process


def agree(world: FailoverWorld) -> None:
    """Assert that the living ranks are at one hub and know who is gone."""
    living = world.living
    dead = {process.rank for process in world.ranks if not process.alive}
    for process in living:
        assert process.up, (process.rank, process.failure)
        assert process.at is living[0].at
        assert set(process.gone) == dead
    if living and living[0].at is not None and living[0].at is not world.first:
        assert living[0].at.owner == living[0].rank


def gather(world: FailoverWorld, tag: str, group: int = 0) -> None:
    for process in world.living:
        send_gather(world, process, tag, group)


def send_gather(world: FailoverWorld, process: Process, tag: str, group: int = 0) -> None:
    data = bytes([process.rank])
    world.send(process, Gather(group=group, tag=tag, round=0, timeout=60.0, data=data))


@pytest.mark.parametrize("launcher", [False, True])
def test_job_survives_the_death_of_all_but_one_in_turn(launcher: bool) -> None:
    world = FailoverWorld(8, launcher=launcher)
    if launcher:
        world.kill_launcher()
        world.run()
        agree(world)
    for rank in range(7):
        world.kill(rank)
        world.run()
        agree(world)


def test_deaths_at_the_same_time() -> None:
    world = FailoverWorld(8)
    world.kill(0, 1, 5)
    world.run()
    agree(world)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(8)), st.lists(st.integers(1, 3), min_size=7, max_size=7), st.data())
def test_any_order_of_deaths(order: list[int], sizes: list[int], data: Any) -> None:
    """Several ranks may die at a time, also while the others look for a new hub."""
    world = FailoverWorld(8)
    victims = order[:7]
    while victims:
        size = sizes.pop()
        now, victims = victims[:size], victims[size:]
        world.kill(*now)
        if data.draw(st.booleans()):
            world.run(probes=data.draw(st.booleans()))
    world.run()
    agree(world)


def test_gathers_in_progress_complete_at_the_new_hub() -> None:
    world = FailoverWorld(4, launcher=True)
    send_gather(world, world.ranks[1], "x")
    world.run()
    world.kill_launcher()
    for rank in (0, 2, 3):
        send_gather(world, world.ranks[rank], "x")
    world.run()
    assert [[g.parts for g in p.results] for p in world.ranks] == [
        [(b"\0", b"\1", b"\2", b"\3")]
    ] * 4


@pytest.mark.parametrize("reached", [(), (2,), (0, 1, 3)])
def test_result_that_reached_only_some_ranks(reached: tuple[int, ...]) -> None:
    """The hub died while it sent the result; the others get it from the parts sent again."""
    world = FailoverWorld(4, launcher=True)
    for process in world.ranks:
        process.delivery = 1 << 30 if process.rank in reached else 0
    gather(world, "x")
    world.run()
    assert [len(p.results) for p in world.ranks] == [int(p.rank in reached) for p in world.ranks]
    world.kill_launcher()
    for process in world.ranks:
        process.delivery = 1 << 30
    world.run()
    agree(world)
    assert [len(p.results) for p in world.ranks] == [1] * 4


def test_stopped_candidate_is_passed_over_and_lost() -> None:
    world = FailoverWorld(4)
    world.ranks[1].stopped = True
    world.kill(0)
    world.run()
    assert not any(process.up for process in world.running)
    world.silent(1)
    world.tick(REJOIN_SECONDS)
    for process in world.running:
        assert process.up
        assert process.at is not None
        assert process.at.owner == 2
        assert set(process.gone) == {0, 1}
        assert "did not reach" in process.gone[1].reason
    world.ranks[1].stopped = False  # it takes over a job that has gone on without it
    world.run()
    world.tick(REJOIN_SECONDS)
    assert not world.ranks[1].up
    assert "gone on without rank 1" in world.ranks[1].failure


def test_slow_rank_is_rejected_by_the_new_hub() -> None:
    world = FailoverWorld(4)
    world.ranks[3].stopped = True
    world.kill(0)
    world.run()
    world.tick(REJOIN_SECONDS)
    assert {1, 2} == {p.rank for p in world.running if p.up}
    assert set(world.ranks[1].gone) == {0, 3}
    world.ranks[3].stopped = False
    world.run()
    assert "gone on without rank 3" in world.ranks[3].failure


def test_a_minority_gives_up() -> None:
    """On the wrong side of a partition there is no second job."""
    world = FailoverWorld(5, hosts=["a", "b", "c", "d", "e"])
    world.kill(0)
    world.unreachable = {(4, 1), (4, 2), (4, 3)}
    world.run()
    world.tick(REJOIN_SECONDS)
    for process in world.ranks[1:4]:
        assert process.up
        assert set(process.gone) == {0, 4}
    assert "only rank 4 of 4 living ranks" in world.ranks[4].failure


def test_host_without_power_is_passed_over_at_once() -> None:
    world = FailoverWorld(6, hosts=["a", "a", "a", "b", "b", "b"])
    world.down = {"a"}
    world.kill(0, 1, 2)
    world.run()
    world.tick(REJOIN_SECONDS)
    for process in world.ranks[3:]:
        assert process.up
        assert set(process.gone) == {0, 1, 2}


# --- the search by itself ---


def test_search_in_ascending_order() -> None:
    search = SuccessorSearch(rank=3, candidates={1: "a", 2: "a", 3: "b", 5: "b"})
    assert search.start() == Dial(rank=1)
    assert search.handle(Outcome.REFUSED) == Dial(rank=2)
    assert search.handle(Outcome.PROVED) is None
    assert search.handle(Outcome.LOST) == TakeOver(rank=3)
    assert search.handle(Outcome.PROVED) is None
    assert search.handle(Outcome.REJECTED, "no majority") == Dial(rank=5)
    action = search.handle(Outcome.SILENT)
    assert isinstance(action, GiveUp)
    assert "rank 3: no majority" in action.reason
    assert search.state is SearchState.FAILED


def test_unreachable_host_skips_its_other_ranks() -> None:
    search = SuccessorSearch(rank=4, candidates={1: "a", 2: "a", 3: "b", 4: "a"})
    search.start()
    assert search.handle(Outcome.UNREACHABLE) == Dial(rank=3)
    assert search.handle(Outcome.UNREACHABLE) == TakeOver(rank=4)


def test_search_without_candidates() -> None:
    action = SuccessorSearch(rank=0, candidates={}).start()
    assert action == GiveUp(reason="no living rank has a standby port")


def test_rejection_ends_the_search() -> None:
    search = SuccessorSearch(rank=2, candidates={1: "a", 2: "a"})
    search.start()
    search.handle(Outcome.PROVED)
    assert search.handle(Outcome.REJECTED, "lost") == GiveUp(reason="lost")
