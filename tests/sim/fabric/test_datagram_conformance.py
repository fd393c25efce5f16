"""The transports' conformance kit over the simulated fabric: UDP's transport in virtual time."""

from __future__ import annotations

import pytest

from miraccl.proxy import datagram_driver
from miraccl.sim.fabric.events import US
from miraccl.sim.fabric.topology import LinkProfile
from miraccl.transport.base import DatagramOptions
from miraccl.transport.registry import UDP
from tests.sim.fabric.datagram_ranks import FabricNetwork, FabricProxy, FabricTransport
from tests.transport.conformance import TransportConformance, World

FAST = LinkProfile(rate=10**10)
HOSTILE = LinkProfile(
    rate=10**9, loss=0.01, jitter=200 * US, duplicate=0.01, corrupt=0.01, queue=60_000
)


class TestDatagramOnFabric(TransportConformance):
    """Two paths without loss; every rank admits by grants."""

    spec = UDP
    profile = FAST
    options = DatagramOptions(admission="credit", credit_bytes=1 << 16)

    @pytest.fixture(autouse=True)
    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch = monkeypatch

    def build(self, nranks: int) -> World:
        network = FabricNetwork(nranks, 2, self.profile)
        self.patch.setattr(datagram_driver, "now_ns", network.now_ns)
        world = World(transports={}, news=network.news)
        for rank in range(nranks):
            proxy = FabricProxy(network, world.losses.setdefault(rank, []))
            world.cleanup.callback(proxy.close)
            transport = FabricTransport(network, rank, proxy, self.options)
            world.cleanup.callback(transport.abort, "the test is over")
            world.transports[rank] = transport
        return world


class TestDatagramOnHostileFabric(TestDatagramOnFabric):
    """Packets are lost, delayed, reordered, duplicated and changed."""

    profile = HOSTILE
    options = DatagramOptions()
