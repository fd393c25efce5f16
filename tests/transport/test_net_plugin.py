"""Transport over a network plugin: the plugin that miraccl exports, loaded like any other."""

from __future__ import annotations

import os

import pytest

from miraccl import nccl_plugin, params
from miraccl.errors import BootstrapError, InvalidUsage
from miraccl.native.nccl_net_plugin import NetPlugin
from miraccl.proxy.thread import Proxy
from miraccl.transport import net_plugin
from miraccl.transport.base import Endpoint
from miraccl.transport.net_plugin import PluginTransport
from miraccl.transport.registry import PLUGIN
from tests.transport.conformance import WAIT_S, TransportConformance, World
from tests.transport.socket_world import SLOT


def build_rank(world: World, rank: int, nranks: int, timeout: float = WAIT_S) -> PluginTransport:
    """Add a rank to the world; all ranks load the plugin that this process exports."""
    losses = world.losses.setdefault(rank, [])

    def on_lost(peer, loss):
        losses.append((peer, loss))
        world.news.set()

    proxy = Proxy(
        rank=rank, wake=lambda _: world.news.set(), on_lost=on_lost, segment_bytes=1 << 17
    )
    world.cleanup.callback(proxy.close)
    endpoints = [Endpoint(rank=r, hostid=f"host{r}", pid=os.getpid()) for r in range(nranks)]
    transport = PluginTransport(
        endpoints[rank],
        {r: e for r, e in enumerate(endpoints) if r != rank},
        plugin=NetPlugin(nccl_plugin.export(set_environment=False).path),
        proxy=proxy,
        slot_bytes=SLOT,
        timeout=timeout,
        linger=1.0,
    )
    world.cleanup.callback(transport.abort, "the test is over")
    world.transports[rank] = transport
    return transport


class TestNetPlugin(TransportConformance):
    spec = PLUGIN

    def build(self, nranks):
        world = World(transports={})
        for rank in range(nranks):
            build_rank(world, rank, nranks)
        return world


def test_missing_peer_is_named() -> None:
    world = World(transports={})
    with world.cleanup:
        infos = {r: build_rank(world, r, 2, timeout=0.2).setup() for r in range(2)}
        with pytest.raises(BootstrapError, match=r"cannot connect to ranks \[1\]"):
            world.transports[0].connect({1: infos[1]})


def test_no_plugin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIRACCL_NET", "plugin")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    assert not params.NET_PLUGIN.read()
    with pytest.raises(InvalidUsage, match="write MIRACCL_NET=plugin:PATH"):
        net_plugin.plugin_paths()
    monkeypatch.setenv("MIRACCL_NET", "plugin:/a.so,b")
    assert net_plugin.plugin_paths() == ("/a.so", "b")
