"""The virtual clock: times computed by hand, bounds on every run, and deadlocks."""

from __future__ import annotations

import math

import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.cost import compute_cost
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    barrier,
    copy,
    get,
    inp,
    one_channel,
    out,
    put,
    recv,
    recv_reduce,
    send,
    signal,
    wait,
)
from miraccl.sim.clock import simulate
from miraccl.sim.links import Links, Route, mesh, switch
from miraccl.types import Collective

MB = 1e6  # at 100 GB/s: 10 us


def pipe(*bandwidths: float, latency_us: float = 0.0) -> Links:
    """Return links of two ranks: links in series from 0 to 1, and one from 1 to 0."""
    names = tuple(f"hop {number}" for number in range(len(bandwidths)))
    there = Route(tuple(range(len(bandwidths))), latency_us)
    return Links(
        nranks=2,
        names=(*names, "back"),
        bandwidths=(*bandwidths, 100.0),
        routes={(0, 1): there, (1, 0): Route((2,), latency_us)},
    )


def broadcast(*ranks: list[Step], parts: int = 1) -> Schedule:
    return one_channel("test", Collective.BROADCAST, ranks, parts=parts)


MESSAGE = broadcast([send(inp(0), 1), copy(inp(0), out(0))], [recv(out(0), 0)])


# By hand


def test_message_time_is_transfer_plus_latency() -> None:
    run = simulate(MESSAGE, switch(2, 100.0, 1.5), MB)
    assert run.time_us == pytest.approx(10 + 1.5)
    assert sum(run.carried) == pytest.approx(2 * MB)  # out of one rank, into the other


def test_the_narrowest_link_limits_a_route() -> None:
    assert simulate(MESSAGE, pipe(100.0, 25.0), MB).time_us == pytest.approx(40)


@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_a_ring_takes_2_n_minus_2_steps(nranks: int) -> None:
    ring = catalog.build("ring", Collective.ALL_REDUCE, nranks)
    time_us = simulate(ring, mesh(nranks, 100.0, 2.0), MB).time_us
    assert time_us == pytest.approx(2 * (nranks - 1) * (10 / nranks + 2))


@pytest.mark.parametrize("nranks", [2, 3, 5, 8])
def test_one_shot_serialises_the_messages_of_a_rank(nranks: int) -> None:
    shot = catalog.build("one_shot", Collective.ALL_REDUCE, nranks)
    assert simulate(shot, switch(nranks, 100.0, 3.0), MB).time_us == pytest.approx(
        (nranks - 1) * 10 + 3
    )


@pytest.mark.parametrize("nranks", [1, 2, 3, 7, 8])
def test_a_dissemination_barrier_takes_log_n_latencies(nranks: int) -> None:
    schedule = catalog.build("dissemination", Collective.BARRIER, nranks)
    assert simulate(schedule, switch(nranks, 100.0, 2.0), 0).time_us == pytest.approx(
        2 * math.ceil(math.log2(nranks))
    )


def two_senders() -> Schedule:
    """Ranks 1 and 2 send to rank 0 at the same time."""
    one, two = [send(inp(0), 0)], [send(inp(0), 0)]
    root = [copy(inp(0), out(0)), recv_reduce(out(0), 1), recv_reduce(out(0), 2)]
    return one_channel("two", Collective.REDUCE, [root, one, two])


def test_concurrent_messages_share_a_link() -> None:
    assert simulate(two_senders(), switch(3, 100.0, 0.0), MB).time_us == pytest.approx(20)
    assert simulate(two_senders(), mesh(3, 100.0, 0.0), MB).time_us == pytest.approx(10)


def test_sharing_is_max_min_fair() -> None:
    """Ranks 0 and 1 send to 2, rank 1 also to 3, which gets what the limited flow leaves."""
    names = ("out of 1", "into 2", "out of 0")
    routes = {(1, 2): Route((0, 1), 0.0), (1, 3): Route((0,), 0.0), (0, 2): Route((2, 1), 0.0)}
    links = Links(nranks=4, names=names, bandwidths=(100.0, 60.0, 100.0), routes=routes)
    steps = (
        ((send(inp(0), 2),), (send(inp(0), 2),), (recv(out(0), 0), recv(out(1), 1)), ()),
        ((), (send(inp(0), 3),), (), (recv(out(1), 1),)),
    )
    run = simulate(
        Schedule(name="fair", collective=Collective.ALL_GATHER, nranks=4, parts=1, channels=steps),
        links,
        MB,
    )
    ends = {(step.channel, step.rank): step.end for step in run.steps}
    assert ends[1, 1] == pytest.approx(MB / 70e3)  # 100 - 30 of the other flow
    assert ends[0, 0] == ends[0, 1] == pytest.approx(MB / 30e3)


def test_rounds_overlap_along_a_chain() -> None:
    chain = broadcast([send(inp(0), 1)], [recv(out(0), 0), send(out(0), 2)], [recv(out(0), 1)])
    whole = simulate(chain, mesh(3, 100.0, 0.0), MB)
    sliced = simulate(chain, mesh(3, 100.0, 0.0), MB, slot_bytes=MB / 10)
    assert whole.time_us == pytest.approx(20)
    assert sliced.time_us == pytest.approx(11)  # ten slices, and one more for the second hop
    assert sliced.rounds == 10


def test_a_full_fifo_blocks_the_sender() -> None:
    slow = Links(
        nranks=3,
        names=("fast", "slow"),
        bandwidths=(100.0, 10.0),
        routes={(0, 1): Route((0,), 0.0), (1, 2): Route((1,), 0.0)},
    )
    chain = broadcast([send(inp(0), 1)], [recv(out(0), 0), send(out(0), 2)], [recv(out(0), 1)])
    ends = {}
    for depth in (1, 4, 100):
        run = simulate(chain, slow, MB, slot_bytes=MB / 10, fifo_depth=depth)
        assert run.time_us == pytest.approx(101)
        ends[depth] = max(step.end for step in run.steps if step.rank == 0)
    assert ends[100] == pytest.approx(10)
    assert ends[1] > ends[4] > ends[100]


def test_operands_cross_the_memory_link() -> None:
    alone = broadcast([copy(inp(0), out(0))])
    assert simulate(alone, switch(1, 100.0), MB).time_us == 0
    assert simulate(alone, switch(1, 100.0), MB, memory_bandwidth=100.0).time_us == pytest.approx(
        20
    )  # read and written
    run = simulate(two_senders(), mesh(3, 100.0, 0.0), MB, memory_bandwidth=200.0)
    assert run.time_us == pytest.approx(
        40
    )  # the root's: a copy of 2, two additions of 3 operands of 5 us each


def test_puts_gets_signals_and_barriers() -> None:
    schedule = broadcast(
        [barrier(), put(inp(0), out(0), 1), signal([1]), wait([1])],
        [barrier(), wait([0]), get(inp(0), out(0), 0), signal([0])],
    )
    # barrier 2, put 10, signal 2, get 10, signal 2
    assert simulate(schedule, switch(2, 100.0, 2.0), MB).time_us == pytest.approx(26)


def test_a_barrier_waits_for_the_last_rank() -> None:
    schedule = one_channel(
        "late",
        Collective.BROADCAST,
        [[send(inp(0), 1), barrier()], [recv(out(0), 0), barrier()], [barrier()]],
    )
    run = simulate(schedule, switch(3, 100.0, 1.0), MB)
    assert {
        step.rank: step.end
        for step in run.steps
        if step.number == len(schedule.channels[0][step.rank]) - 1
    } == pytest.approx(
        {
            0: 12,
            1: 11,
            2: 12,
        }
    )


# Bounds on every schedule

EVERY = [
    (name, collective, nranks)
    for name in catalog.names()
    for collective in sorted(catalog.get(name).collectives)
    for nranks in (1, 2, 3, 5, 8)
    if catalog.get(name).supports(collective, nranks)
]


@pytest.mark.parametrize(("name", "collective", "nranks"), EVERY)
def test_no_run_is_faster_than_its_latency_and_bytes(
    name: str, collective: Collective, nranks: int
) -> None:
    schedule = catalog.build(name, collective, nranks)
    links, cost = mesh(nranks, 100.0, 2.0), compute_cost(schedule)
    block = 0.0 if collective is Collective.BARRIER else MB
    run = simulate(schedule, links, block, slot_bytes=MB / 3)
    assert run.time_us >= cost.latency_steps * 2.0 - 1e-9
    assert all(part <= 1 + 1e-9 for part, _ in run.link_utilisation(links))
    assert len(run.steps) == run.rounds * sum(
        len(steps) for channel in schedule.channels for steps in channel
    )
    assert all(step.ready <= step.start <= step.end <= run.time_us for step in run.steps)
    sent = [0.0] * nranks
    for nbytes, (sender, _) in zip(
        run.carried, ((a, b) for a in range(nranks) for b in range(nranks) if a != b), strict=True
    ):
        sent[sender] += nbytes
    if not schedule.needs_addressable_memory:  # a remote read is sent by the peer
        assert max(sent) == pytest.approx(float(cost.wire_blocks) * block)


@pytest.mark.parametrize(
    ("name", "collective", "nranks"), [entry for entry in EVERY if entry[2] == 5]
)
def test_time_scales_with_bandwidth_and_latency(
    name: str, collective: Collective, nranks: int
) -> None:
    schedule = catalog.build(name, collective, nranks)
    slow = simulate(schedule, switch(nranks, 50.0, 2.0), MB, slot_bytes=MB / 7)
    fast = simulate(schedule, switch(nranks, 100.0, 1.0), MB, slot_bytes=MB / 7)
    assert fast.time_us == pytest.approx(slow.time_us / 2)


# Errors


def test_deadlock_is_reported_with_its_location() -> None:
    with pytest.raises(
        ScheduleError,
        match=r"test: channel 0, rank 1, step 0 \(recv -> output\[0\] from 0\): deadlock",
    ):
        simulate(broadcast([copy(inp(0), out(0))], [recv(out(0), 0)]), switch(2, 100.0), MB)
    crossed = broadcast([send(inp(0), 1), send(inp(0), 1)], [wait([0])])
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(crossed, switch(2, 100.0), MB, fifo_depth=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_bytes": -1}, "block_bytes is -1"),
        ({"block_bytes": math.nan}, "block_bytes is nan"),
        ({"slot_bytes": 0}, "must be greater than 0"),
        ({"fifo_depth": 0}, "must be greater than 0"),
        ({"slot_bytes": 1e-3}, "use larger slots"),
    ],
)
def test_arguments_are_checked(changes: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidUsage, match=words):
        simulate(MESSAGE, switch(2, 100.0), **{"block_bytes": MB, **changes})  # type: ignore[arg-type]
    with pytest.raises(InvalidUsage, match="schedule of 2 ranks over links of 3"):
        simulate(MESSAGE, switch(3, 100.0), MB)
