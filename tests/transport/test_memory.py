"""The in-process transport in the conformance kit, and its own rules."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from miraccl import clock
from miraccl.errors import CommunicatorClosed, InvalidUsage, ProtocolError, SystemFailure
from miraccl.transport import memory, registry
from miraccl.transport.base import Capability, Endpoint, TransportContext
from miraccl.transport.fifo import PrivateMemory
from tests.transport.conformance import TransportConformance, World


def build_rank(world: World, rank: int, nranks: int, **limits: int) -> memory.MemoryTransport:
    endpoints = {r: Endpoint(rank=r, hostid="here", pid=os.getpid()) for r in range(nranks)}
    page = PrivateMemory(8192)
    transport = memory.open_transport(
        TransportContext(
            endpoint=endpoints.pop(rank),
            peers=endpoints,
            control=page.address,
            window=(page.address + 4096, 4096),
            memory=page,
            **limits,  # type: ignore[arg-type]
        )
    )
    world.transports[rank] = transport
    world.cleanup.callback(transport.close)
    return transport


class TestMemory(TransportConformance):
    spec = registry.MEMORY

    def build(self, nranks):
        world = World(transports={})
        for rank in range(nranks):
            build_rank(world, rank, nranks)
        return world


def test_a_pair_uses_the_smaller_slots():
    world = World(transports={})
    build_rank(world, 0, 2, max_slot_bytes=8192)
    build_rank(world, 1, 2, max_slot_bytes=65536)
    world.connect()
    assert world.way(0, 1).slot_bytes == world.way(1, 0).slot_bytes == 8192
    world.close()


def test_a_closed_peer_cannot_be_connected():
    world = World(transports={})
    first, second = build_rank(world, 0, 2), build_rank(world, 1, 2)
    info = second.setup()
    second.close()
    with pytest.raises(SystemFailure, match="cannot connect to rank 1: it is not in this process"):
        first.connect({1: info})
    with pytest.raises(CommunicatorClosed):
        second.connect({0: first.setup()})
    with pytest.raises(ProtocolError):
        first.connect({1: b"nonsense"})
    world.close()


def test_simulations_with_one_seed_share_no_memory():
    """Tokens are drawn, so a second run with the same seed draws those of the first."""
    worlds = []
    for _ in range(2):
        with clock.use(clock.VirtualClock(seed=1)):
            world = World(transports={})
            build_rank(world, 0, 2)
            build_rank(world, 1, 2)
            world.connect()
            worlds.append(world)
    first, second = ({w.pairs[0][1].send.slots, w.pairs[1][0].send.slots} for w in worlds)
    assert not first & second
    for world in worlds:
        world.close()


def test_memory_is_freed_with_the_last_pair():
    world = World(transports={})
    build_rank(world, 0, 2)
    build_rank(world, 1, 2)
    world.connect()
    world.close()
    fifos = weakref.ref(world.pairs[0][1].memory[0])
    assert fifos() is not None
    world.pairs.clear()
    gc.collect()
    assert fifos() is None
    assert not memory._transports


def test_the_pair_decides_which_transport_is_used():
    specs = registry.allowed("auto")
    a = Endpoint(rank=0, hostid="a", pid=1, machine="m", addresses=("10.0.0.1",))
    near = Endpoint(rank=1, hostid="a", pid=1, machine="m", addresses=("10.0.0.1",))
    far = Endpoint(rank=2, hostid="b", pid=1, machine="n", addresses=("10.0.0.2",))
    choice = registry.choose(a, near, specs)
    assert (choice.name, choice.reason) == ("shm", "same host")
    no_ports = "no usable InfiniBand or RoCE port (miraccl net devices says why)"
    assert choice.rejected == {"tcp": "shm is preferred", "verbs": no_ports}
    choice = registry.choose(a, far, specs)
    assert (choice.name, choice.rejected) == (
        "tcp",
        {"shm": "not on one host", "verbs": no_ports, "udp": registry.UDP.on_request},
    )
    choice = registry.choose(a, near, registry.allowed("memory"))
    assert (choice.name, choice.rejected) == ("memory", {"shm": "memory is preferred"})
    with pytest.raises(SystemFailure, match=r"cannot connect ranks 0 and 2: .*not in one process"):
        registry.choose(a, far, registry.allowed("memory"))


@pytest.mark.parametrize("net", ["ib", "shm", "TCP"])
def test_unknown_networks_are_rejected_with_the_allowed_ones(net):
    with pytest.raises(InvalidUsage, match=r"cannot use MIRACCL_NET=.*auto, tcp, .*memory"):
        registry.allowed(net)


def test_names_of_transports_are_unique():
    with pytest.raises(ValueError, match="the name is in use"):
        registry.register(
            registry.TransportSpec(
                name="tcp",
                capabilities=Capability.ORDERED,
                score=registry.TCP.score,
                module="miraccl.transport.memory",
            )
        )
    assert registry.register(registry.TCP) is registry.TCP
    with pytest.raises(ValueError, match="it is not ordered"):
        registry.TransportSpec(
            name="x", capabilities=Capability(0), score=registry.TCP.score, module="x"
        )
    with pytest.raises(ValueError, match="nothing opens it"):
        registry.TransportSpec(name="x", capabilities=Capability.ORDERED, score=registry.TCP.score)
