"""Communicators of Ray actors, in a real cluster of two nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import miraccl  # noqa: E402
import miraccl.ray  # noqa: E402
from miraccl.errors import BootstrapError, CollectiveTimeout, InvalidUsage, PeerDied  # noqa: E402
from tests.ray.cluster import PATIENCE, Gate, Plain, actors, get  # noqa: E402

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("cluster")]


@pytest.fixture
def three() -> Iterator[list[Any]]:
    yield from _kept(actors(3))


@pytest.fixture
def gates() -> Iterator[list[Any]]:
    yield from _kept(actors(2, Gate))


def _kept(made: list[Any]) -> Iterator[list[Any]]:
    yield made
    for actor in made:
        ray.kill(actor)


def test_actors_on_two_nodes(three: list[Any]) -> None:
    assert len({node for node, _ in get([actor.where.remote() for actor in three])}) == 2
    with miraccl.ray.create_group(three) as group:
        assert (group.nranks, group.name) == (3, "default")
        assert get([actor.total.remote(5) for actor in three]) == [[6.0] * 5] * 3
        assert group.run(lambda comm: (comm.rank, comm.nranks)) == [(0, 3), (1, 3), (2, 3)]
        assert (
            group.run(
                lambda comm, k: comm.all_gather(np.array([comm.rank * k])).tolist(),
                7,
                timeout=PATIENCE,
            )
            == [[0, 7, 14]] * 3
        )
        constant = ray.put(np.full(4, 2.0))
        assert get([actor.read_only.remote(constant) for actor in three]) == [[6.0] * 4] * 3
    with pytest.raises(InvalidUsage, match=r"does not belong to group 'default' .*: none"):
        get(three[0].total.remote(5))


def test_torch_tensors(three: list[Any]) -> None:
    pytest.importorskip("torch")
    with miraccl.ray.create_group(three):
        assert get([actor.tensors.remote() for actor in three]) == [[3.0] * 5] * 3


def test_several_groups_of_the_same_actors(three: list[Any]) -> None:
    everyone = miraccl.ray.create_group(three, "all")
    pair = miraccl.ray.create_group([three[2], three[0]], "pair")
    assert get([actor.total.remote(1, "all") for actor in three]) == [[6.0]] * 3
    assert get([actor.total.remote(1, "pair") for actor in (three[0], three[2])]) == [[3.0]] * 2
    pids = [pid for _, pid in get([actor.where.remote() for actor in three])]
    assert pair.run(lambda comm: (comm.rank, os.getpid())) == [(0, pids[2]), (1, pids[0])]
    miraccl.ray.destroy_group("all")
    everyone.destroy()
    assert get([actor.total.remote(1, "pair") for actor in (three[0], three[2])]) == [[3.0]] * 2
    get([actor.leave.remote("pair") for actor in (three[0], three[2])])
    with pytest.raises(InvalidUsage, match="does not belong to group 'pair'"):
        get(three[0].total.remote(1, "pair"))
    pair.destroy()
    with pytest.raises(InvalidUsage, match="neither created a group 'nothing' nor belongs to one"):
        miraccl.ray.destroy_group("nothing")


def test_groups_that_threads_make_at_the_same_time_of_the_same_actors(three: list[Any]) -> None:
    """An actor that waits in one meeting is not awaited by one that waits in another."""
    get([actor.where.remote() for actor in three])
    orders = {f"group {i}": three if i % 2 else three[::-1] for i in range(6)}

    def make(name: str) -> Any:
        group = miraccl.ray.create_group(orders[name], name, meet_timeout=30.0)
        totals = group.run(lambda comm: comm.all_reduce(np.ones(1)).tolist(), timeout=PATIENCE)
        group.destroy(PATIENCE)
        return totals

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads overtake each other between two calls
    try:
        with ThreadPoolExecutor(len(orders)) as pool:
            assert list(pool.map(make, orders)) == [[[3.0]] * 3] * len(orders)
    finally:
        sys.setswitchinterval(before)


def test_a_name_that_is_taken(three: list[Any]) -> None:
    with miraccl.ray.create_group(three[:2], "all"):
        with pytest.raises(
            BootstrapError,
            match=r".*already belongs to group 'all'",
        ) as caught:
            miraccl.ray.create_group([three[2], three[1]], "all")
        assert caught.value.peer == 1
        assert get([actor.total.remote(1, "all") for actor in three[:2]]) == [[3.0]] * 2, (
            "the group that was there goes on"
        )
    with miraccl.ray.create_group([three[2], three[1]], "all") as group:
        assert group.run(lambda comm: comm.rank) == [0, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_an_actor(three: list[Any], victim: int) -> None:
    miraccl.ray.create_group(three)
    survivors = [actor for rank, actor in enumerate(three) if rank != victim]
    waiting = [actor.fail_when_alone.remote() for actor in survivors]
    ray.kill(three[victim])
    for call in waiting:
        with pytest.raises(PeerDied) as caught:  # Ray's error is one of ours, too
            get(call)
        assert f"rank {victim}" in str(caught.value)
        assert getattr(caught.value, "cause").peer == victim  # noqa: B009
    if victim != 0:  # the control plane lives with rank 0
        assert get([actor.total_of_the_living.remote() for actor in survivors]) == [
            [2.0, 0],
            [2.0, 1],
        ]
    miraccl.ray.destroy_group()
    with miraccl.ray.create_group(survivors) as group:
        assert group.run(lambda comm: comm.all_reduce(np.ones(1)).tolist()) == [[2.0]] * 2


def test_the_end_of_a_group_frees_actors_that_wait_for_one_that_raised(three: list[Any]) -> None:
    with miraccl.ray.create_group(three):
        waiting = [actor.fail_when_alone.remote() for actor in three[:2]]
        with pytest.raises(ZeroDivisionError):
            get(three[2].divide_by_zero.remote())
    for call in waiting:
        with pytest.raises(PeerDied, match="rank 2 has left"):
            get(call)


def test_the_death_of_an_actor_while_the_group_is_made_frees_the_others(three: list[Any]) -> None:
    get(three[2].die_when_told_to_meet.remote())
    with pytest.raises(BootstrapError, match="rank 2 could not join: ") as caught:
        miraccl.ray.create_group(three, meet_timeout=10 * PATIENCE)
    assert caught.value.peer == 2
    with miraccl.ray.create_group(three[:2], meet_timeout=PATIENCE) as group:
        assert group.run(lambda comm: comm.rank) == [0, 1]


def test_a_deadline(three: list[Any]) -> None:
    with (
        miraccl.ray.create_group(three[:2], timeout=1.0),
        pytest.raises(CollectiveTimeout, match="rank 1"),
    ):
        get(three[0].total.remote(3))


def _is_alive(actor: Any) -> bool:
    try:
        get(actor.where.remote())
    except ray.exceptions.ActorDiedError:
        return False
    return True


def test_an_actor_that_is_busy_or_dead(three: list[Any], gates: list[Any]) -> None:
    get([actor.where.remote() for actor in three])  # they have started
    busy = three[1].hold.remote(gates[0])
    with pytest.raises(BootstrapError, match=r"no reply from rank 1 of 3 by the deadline .*busy"):
        miraccl.ray.create_group(three, meet_timeout=2.0)
    get(gates[0].open.remote())
    get(busy)
    with miraccl.ray.create_group(three) as group:
        assert group.run(lambda comm: comm.rank) == [0, 1, 2]
    ray.kill(three[2])
    while _is_alive(three[2]):  # ray.kill does not wait for the end
        pass
    with pytest.raises(BootstrapError, match="rank 2 could not join: ActorDiedError") as caught:
        miraccl.ray.create_group(three)
    assert caught.value.peer == 2


def test_asynchronous_actors(gates: list[Any]) -> None:
    with miraccl.ray.create_group(gates):
        assert get([gate.total.remote() for gate in gates]) == [[3.0] * 3] * 2


@pytest.mark.parametrize("net", ["tcp", "udp"])
def test_actors_with_threads_and_nodes_that_share_no_memory(net: str) -> None:
    """Their names of hosts differ, as on two machines: all data goes over the network."""
    pair = [
        actors(1, max_concurrency=2, runtime_env={"env_vars": environ})[0]
        for environ in ({"MIRACCL_HOSTID": name, "MIRACCL_NET": net} for name in "ab")
    ]
    try:
        with miraccl.ray.create_group(pair) as group:
            assert group.run(lambda comm: comm.local_rank) == [0, 0]
            transports = group.run(lambda comm: comm.explain("all_reduce", 8)[0].transports)
            assert [text.split()[0] for text in transports] == [net, net]
            assert get([actor.total.remote(100_000) for actor in pair]) == [[3.0] * 100_000] * 2
    finally:
        for actor in pair:
            ray.kill(actor)


def test_without_a_driver(three: list[Any]) -> None:
    for _ in range(2):
        assert (
            get([actor.join.remote(3, rank) for rank, actor in enumerate(three)])
            == [[10, 11, 12]] * 3
        )
        get([actor.leave.remote("by hand") for actor in three])
    with pytest.raises(BootstrapError, match="rank 0 did not publish a unique id"):
        get(three[1].join.remote(2, 1, meet_timeout=0.5))
    with pytest.raises(BootstrapError, match="rank 1 of 2 did not join"):
        get(three[0].join.remote(2, 0, meet_timeout=0.5))
    with pytest.raises(InvalidUsage, match="rank is 2"):
        get(three[0].join.remote(2, 2))
    assert (
        get([actor.join.remote(3, rank) for rank, actor in enumerate(three)]) == [[10, 11, 12]] * 3
    )


def test_two_that_join_as_rank_0(three: list[Any]) -> None:
    calls = [actor.join.remote(2, 0, meet_timeout=2.0) for actor in three[:2]]
    texts = []
    for call in calls:
        with pytest.raises(BootstrapError, match="rank 1 of 2 did not join") as caught:
            get(call)
        texts.append(str(caught.value))
    assert sum("another process also joined this group as rank 0" in text for text in texts) == 1


def test_a_store_that_is_away_for_a_while(three: list[Any]) -> None:
    calls = [three[0].join.remote(2, 0), three[1].join_without_store.remote(2, 1, 5)]
    assert get(calls) == [[10, 11]] * 2
    get([actor.leave.remote("by hand") for actor in three[:2]])
    with pytest.raises(BootstrapError, match="cannot reach Ray's key-value store: UNAVAILABLE"):
        get(three[0].join_without_store.remote(2, 0, 2))
    assert not get(three[0].has_a_hub.remote())


def test_what_is_refused_before_anything_is_sent(three: list[Any]) -> None:
    for wrong, options, why in (
        ([], {}, "at least one actor"),
        ([three[0], 3], {}, r"actors\[1\] is a int"),
        ([three[0], three[0]], {}, "same actor twice"),
        (three, {"name": ""}, "name is ''"),
        (three, {"meet_timeout": 0}, "meet_timeout is 0"),
        (three, {"timeout": -1}, "timeout is -1"),
    ):
        with pytest.raises(InvalidUsage, match=why):
            miraccl.ray.create_group(wrong, **options)
    with pytest.raises(InvalidUsage, match="does not belong to group 'default'"):
        miraccl.ray.get_group()
    with pytest.raises(InvalidUsage, match="actors is a ActorHandle; pass a list of actor handles"):
        miraccl.ray.create_group(three[0])
    with miraccl.ray.create_group(actor for actor in three) as group:
        assert group.nranks == 3
    for place, options, why in (
        ((2, 2), {}, "rank is 2; allowed are 0 to 1"),
        (("2", 0), {}, "nranks is '2'; it must be 1 or more"),
        ((0, 0), {}, "nranks is 0; it must be 1 or more"),
        ((2, 0), {"meet_timeout": -1}, "meet_timeout is -1"),
    ):
        with pytest.raises(InvalidUsage, match=why):
            get(three[0].join.remote(*place, **options))


def test_an_actor_that_makes_a_group_with_itself(three: list[Any]) -> None:
    with pytest.raises(
        BootstrapError,
        match=r"no reply from rank 1 of 2 .*rank 1 is the actor that called .* join_group",
    ):
        get(three[0].make_group_with.remote([three[1]]))


def test_plain_actors_know_nothing_of_groups() -> None:
    assert Plain.__mro__ == (Plain, object)
