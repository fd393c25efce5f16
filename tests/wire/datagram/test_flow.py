"""Flows over virtual paths: delivery, goodput, failing paths, adversaries, determinism."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miraccl.wire.datagram.control import CONTROLLERS, WINDOW, controller
from miraccl.wire.datagram.flow import HEADED_PACKETS, DatagramFlow
from miraccl.wire.datagram.flow_records import FlowConfig
from miraccl.wire.datagram.packets import MIN_MTU
from miraccl.wire.datagram.path import FlowPath
from miraccl.wire.datagram.rtt import RttEstimator
from tests.wire.datagram.network import MS, SECOND, US, Network, PathModel

MEBI = 1 << 20


def transfer(net: Network, nbytes: int, frame: int = MEBI // 4) -> None:
    """Send ``nbytes`` from side 0 in frames over all streams; check every byte and frame."""
    payload = random.Random(7).randbytes(nbytes)
    frames = [payload[i : i + frame] for i in range(0, nbytes, frame)]
    for i, part in enumerate(frames):
        net.submit(0, i % 16, part, i)
    net.run()
    by_stream: dict[int, list[bytes]] = {}
    for _, stream, data in net.sides[1].received:
        by_stream.setdefault(stream, []).append(data)
    for stream in range(min(16, len(frames))):
        assert by_stream[stream] == frames[stream::16], "each frame once, in order, byte-equal"


@pytest.mark.parametrize(("loss", "share"), [(0.0, 0.98), (0.01, 0.97), (0.05, 0.95)])
def test_one_path_is_filled_whatever_the_loss(loss: float, share: float) -> None:
    net = Network([PathModel(loss=loss)])
    transfer(net, 4 * MEBI)
    assert net.goodput_share(4 * MEBI) >= share
    resent = net.sent[0] - 4 * MEBI / (1472 - 16 - 12 - 16)
    assert resent <= 1.3 * net.dropped[0] + 120


def test_one_packet_is_admitted_whatever_the_window() -> None:
    path = FlowPath(0, controller("swift"), 9000)
    path.control[WINDOW] = 4 * MIN_MTU  # its packets had shrunk
    assert path.has_room(9000)
    path.on_sent(0, 9000, [], probe=False, grant=False, limited=False)
    assert not path.has_room(9000)


def test_a_round_trip_of_an_hour_is_not_believed() -> None:
    rtt = RttEstimator()
    rtt.add(3600 * SECOND, 0)
    assert rtt.smoothed <= 2 * SECOND


def test_a_header_travels_in_few_packets_of_a_frame() -> None:
    flow = DatagramFlow(FlowConfig(connection=1, peer_connection=2, npaths=2, nstreams=1, mtu=1472))
    flow.submit(0, bytes(48), 20_000)
    headed = [0, 0]
    for now in range(SECOND, 2 * SECOND, 5 * MS):
        if (packet := flow.next_packet(now)) is not None:
            headed[packet.path] += sum(bool(s.header) for s in packet.segments)
    assert headed == [HEADED_PACKETS, HEADED_PACKETS]


def test_four_paths_carry_the_sum_of_their_rates() -> None:
    net = Network([PathModel(loss=0.01) for _ in range(3)] + [PathModel(rate=50e6, loss=0.01)])
    transfer(net, 8 * MEBI)
    assert net.goodput_share(8 * MEBI) >= 0.9


def test_a_long_path_with_loss_is_filled() -> None:
    net = Network([PathModel(rate=100e6, delay=5 * MS, loss=0.01)])
    transfer(net, 8 * MEBI)
    assert net.goodput_share(8 * MEBI) >= 0.9


@pytest.mark.parametrize("sides", [(0, 1), (0,), (1,)], ids=["both", "forward", "backward"])
def test_a_dead_path_is_left_and_used_again(sides: tuple[int, ...]) -> None:
    dead = PathModel(dead=(20 * MS, 60 * MS), dead_sides=frozenset(sides))
    net = Network([PathModel(rate=100e6), dead])
    transfer(net, 4 * MEBI)
    gaps = [b - a for a, b in zip(net.sides[1].arrivals, net.sides[1].arrivals[1:], strict=False)]
    assert max(gaps) <= 20 * MS
    states = [change.after for at, change in net.sides[0].changes if change.path == 1]
    if 0 in sides:
        assert "suspect" in states
        assert states[-1] == "open", "the path heals"


def test_all_paths_dead_for_ten_seconds_lose_nothing() -> None:
    models = [PathModel(dead=(5 * MS, 10 * SECOND)) for _ in range(2)]
    net = Network(models)
    transfer(net, MEBI)
    assert 10 * SECOND < net.now < 11 * SECOND


@pytest.mark.parametrize("name", sorted(CONTROLLERS))
def test_every_controller_delivers(name: str) -> None:
    net = Network([PathModel(loss=0.01), PathModel(delay=MS, loss=0.02)], congestion=name)
    transfer(net, MEBI)


def test_data_are_held_back_until_granted() -> None:
    net = Network([PathModel()], granted=0)
    granted = 0

    def grant_more(side: int, now: int) -> None:
        nonlocal granted
        granted += 10_000
        net.sides[1].flow.grant(granted)

    payload = random.Random(3).randbytes(200_000)
    net.submit(0, 0, payload)
    net.submit(0, 1, b"")  # a control frame is exempt
    net.on_receive = grant_more
    net.sides[1].flow.grant(1)
    net.run()
    assert sorted(len(d) for _, _, d in net.sides[1].received) == [0, 200_000]
    assert net.sides[0].flow.new_bytes == 200_000


def test_the_same_seed_gives_the_same_run() -> None:
    def run() -> tuple[object, ...]:
        net = Network([PathModel(loss=0.03, jitter=300 * US) for _ in range(3)], seed=5)
        transfer(net, MEBI)
        return net.now, net.sent, net.sides[1].received[-1][0]

    assert run() == run()


def test_a_log_replays_to_the_same_decisions() -> None:
    net = Network([PathModel(loss=0.05) for _ in range(2)], log=True)
    transfer(net, MEBI // 2)
    flow = net.sides[0].flow
    log = flow._log
    assert log is not None
    again = DatagramFlow(flow.config)
    for name, *args in log:
        if name == "receive":
            now, packet, path, marked = args
            again.receive(now, packet, path=path, marked=marked)
        else:
            getattr(again, name)(*args)
    for one, other in zip(flow.paths, again.paths, strict=True):
        assert one.control == other.control
        assert (one.next_number, one.in_flight, one.rtt) == (
            other.next_number,
            other.in_flight,
            other.rtt,
        )


PROBABILITY = st.sampled_from((0.0, 0.02, 0.2, 0.5))
MODEL = st.builds(
    PathModel,
    rate=st.sampled_from((20e6, 500e6, 10e9)),
    delay=st.sampled_from((0, 50 * US, 5 * MS)),
    queue=st.sampled_from((20_000, 300_000)),
    loss=PROBABILITY,
    jitter=st.sampled_from((0, 200 * US, 20 * MS)),
    duplicate=PROBABILITY,
    corrupt=PROBABILITY,
    dead=st.sampled_from(((0, 0), (0, 300 * MS), (1 * MS, 2 * SECOND))),
    dead_sides=st.sampled_from((frozenset((0,)), frozenset((1,)), frozenset((0, 1)))),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(MODEL, min_size=1, max_size=3),
    st.integers(0, 1 << 30),
    st.lists(st.integers(0, 60_000), min_size=1, max_size=12),
)
def test_any_network_that_delivers_now_and_then_finishes(
    models: list[PathModel], seed: int, sizes: list[int]
) -> None:
    """Check delivery of every frame once and in order per stream, both ways, with valid states."""
    net = Network(models, seed=seed, check=True, nstreams=4)
    draw = random.Random(seed)
    frames: dict[tuple[int, int], list[bytes]] = {}
    for i, size in enumerate(sizes):
        side, stream, payload = i % 2, draw.randrange(4), draw.randbytes(size)
        frames.setdefault((side, stream), []).append(payload)
        net.submit(side, stream, payload, i)
    net.run(limit=3600 * SECOND)
    for (side, stream), sent in frames.items():
        got = [d for _, s, d in net.sides[1 - side].received if s == stream]
        assert got == sent
    assert sum(s.acknowledged for s in net.sides) == len(sizes)


def test_packets_shrink_on_a_path_that_swallows_large_ones_and_grow_again() -> None:
    network = Network([PathModel(mtu=1300, mtu_until=1 * SECOND)])
    network.submit(0, 0, bytes(range(256)) * 4000)
    network.run()
    path = network.sides[0].flow.paths[0]
    assert path.mtu == MIN_MTU
    assert network.sides[1].received[0][2] == bytes(range(256)) * 4000
    network.now = max(network.now, 2 * SECOND)
    network.submit(0, 0, bytes(300_000))
    network.run()
    assert path.mtu == network.sides[0].flow.config.mtu
