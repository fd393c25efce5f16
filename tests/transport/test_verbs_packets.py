"""UD and UC queue pairs under the datagram machine: the conformance kit on simulated devices that
lose, delay, repeat and reorder packets, and faults.
"""

from __future__ import annotations

import os
import random

import pytest

from miraccl.errors import BootstrapError, InvalidUsage, PlanMismatch, ProtocolError
from miraccl.native import verbs_abi as abi
from miraccl.sim.verbs_wire import Wire
from miraccl.transport.base import DatagramOptions
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.registry import VERBS
from miraccl.transport.verbs import VerbsOptions
from miraccl.transport.verbs_datagram import kind_of
from miraccl.transport.verbs_datagram_info import VerbsDatagramInfo
from miraccl.transport.verbs_packets import PairKind
from miraccl.wire.proxy_records import LossKind
from tests.transport.conformance import TransportConformance, pattern
from tests.transport.verbs_world import build_verbs_world

SLOW = pytest.mark.skipif(
    not os.environ.get("TEST_SLOW"), reason="TEST_SLOW=1 runs the kit on a good network too"
)


@SLOW
class TestUd(TransportConformance):
    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(nranks, kind=PairKind.UD)


@SLOW
class TestUc(TransportConformance):
    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(nranks, kind=PairKind.UC)


def bad_network(seed):
    """Return the fate of packets: 5 % lost, 5 % late, 2 % twice, one of them late."""
    rng = random.Random(seed)

    def fate(pair, request):
        draw = rng.random()
        if draw < 0.05:
            return ()
        if draw < 0.1:
            return (rng.randrange(1, 40),)
        return (0, rng.randrange(1, 40)) if draw < 0.12 else (0,)

    return fate


class TestUdBadNetwork(TransportConformance):
    """Two ports on each side, packets that are lost, late, repeated and out of order."""

    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(
            nranks,
            kind=PairKind.UD,
            devices=[2] * nranks,
            datagram=DatagramOptions(protection="none"),
            wire=Wire(order=random.Random(nranks).randrange, fate=bad_network(nranks)),
        )


class TestUcBadNetwork(TransportConformance):
    spec = VERBS

    def build(self, nranks):
        return build_verbs_world(
            nranks,
            kind=PairKind.UC,
            devices=[2] + [1] * (nranks - 1),
            options=VerbsOptions(qps_per_connection=1),
            wire=Wire(order=random.Random(nranks).randrange, fate=bad_network(nranks)),
        )


@pytest.fixture(params=list(PairKind), ids=lambda kind: kind.value)
def make(request):
    worlds = []

    def make(nranks=2, **options):
        world = build_verbs_world(nranks, kind=request.param, **options)
        worlds.append(world)
        world.connect()
        return world

    yield make
    for world in worlds:
        world.close()


def transfer(world, nbytes, count=1, seed=0):
    """Send large messages in place and check every byte."""
    way = world.only_way(0, 1)
    memory, target = PrivateMemory(nbytes), PrivateMemory(nbytes)
    for i in range(count):
        memory_at(memory.address, nbytes)[:] = pattern(nbytes, seed + i)
        way.recv.clear_to_send(target.address, nbytes)
        assert way.send.post_address(memory.address, nbytes, signature=i)
        data, _ = way.take()
        assert data == pattern(nbytes, seed + i)
        world.wait(lambda: way.send.released == way.send.posted, "memory was not given back")


def test_no_memory_of_the_application_is_registered(make):
    world = make()
    regions = len(world.verbs.wire.regions)
    transfer(world, 1 << 19, count=2)
    assert len(world.verbs.wire.regions) == regions
    access = {region.access for region in world.verbs.wire.regions.values()}
    assert {each & ~abi.ACCESS_RELAXED_ORDERING for each in access} == {abi.ACCESS_LOCAL_WRITE}


def test_failed_queue_pair_is_used_again(make):
    world = make(devices=(2, 2))
    transfer(world, 1 << 16)
    wire = world.verbs.wire
    for pair in list(wire.pairs.values()):
        wire.fail_request(pair.number, 2)
    transfer(world, 1 << 19, seed=1)
    world.wait(
        lambda: not any(engine.failed_pairs() for engine in world.packet_engines.values()),
        "a queue pair stays unused",
    )
    transfer(world, 1 << 19, seed=2)
    assert not world.losses[0] + world.losses[1]


def test_device_that_vanishes(make):
    world = make(devices=(2, 2))
    transfer(world, 1 << 16)
    world.verbs.wire.kill_device("sim0")
    transfer(world, 1 << 19, seed=1)
    assert not world.losses[0] + world.losses[1]
    assert world.packet_engines[0].failed_pairs()


def test_port_that_is_down_for_a_while(make):
    world = make(devices=(2, 2))
    transfer(world, 1 << 16)
    world.verbs.wire.port_down("sim1", quietly=True)
    transfer(world, 1 << 19, seed=1)
    world.verbs.wire.mend()
    transfer(world, 1 << 19, seed=2)
    assert not world.losses[0] + world.losses[1]


def test_peer_without_a_path_is_named_at_the_deadline():
    for kind in PairKind:
        world = build_verbs_world(2, kind=kind, deadline=0.2)
        try:
            world.verbs.wire.port_down("sim1", quietly=True)
            with pytest.raises(BootstrapError, match=r"over U[CD]: no answer from rank\(s\) \d"):
                world.connect()
        finally:
            world.close()


def test_peer_that_ends_is_reported(make):
    world = make()
    world.transports[1].abort("out of memory")
    world.wait(lambda: world.losses[0], "the loss was not reported")
    (peer, loss), *_ = world.losses[0]
    assert peer == 1
    assert loss.kind is LossKind.ABORTED
    assert "out of memory" in str(loss)


def test_different_kinds_are_named():
    infos = []
    for kind in PairKind:
        world = build_verbs_world(2, kind=kind)
        try:
            infos.append(world.transports[0].setup())
            if len(infos) == 2:
                with pytest.raises(PlanMismatch, match="ud on rank 0"):
                    world.transports[1].connect({0: infos[0]})
        finally:
            world.close()
    with pytest.raises(ProtocolError, match="cannot read the connect info"):
        VerbsDatagramInfo.decode(infos[0].replace(b'"qkey"', b'"q"'))
    with pytest.raises(InvalidUsage, match="allowed are rc, uc, ud"):
        kind_of("xrc")


def test_paths_are_reported(make):
    world = make(devices=(2, 1))
    transfer(world, 1 << 16)
    paths = world.transports[0].paths()
    assert len(paths) == 4
    assert {path.transport for path in paths} == {"verbs"}
    assert "packets of" in world.transports[0].describe(1)


def test_silent_peer_shows_in_the_paths(make):
    """The deadline of the operation ends it; until then every path says that nothing answers."""
    world = make()
    transfer(world, 1 << 16)
    world.verbs.wire.port_down("sim1", quietly=True)
    memory = PrivateMemory(1 << 16)
    assert world.only_way(0, 1).send.post_address(memory.address, 1 << 16, signature=0)
    world.wait(
        lambda: all(path.state != "OPEN" for path in world.transports[0].paths()),
        "a path counts as open",
    )
    assert not world.losses[0]
