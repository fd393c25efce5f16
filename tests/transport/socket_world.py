"""Socket transports with their proxies, all in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from miraccl.deadline import Deadline
from miraccl.proxy.stream_engine import ProgressEngine
from miraccl.transport.base import Endpoint
from miraccl.transport.socket import SocketOptions, SocketTransport
from tests.transport.conformance import WAIT_S, World

SLOT = 16384


def build_rank(
    world: World,
    rank: int,
    *,
    addresses: Sequence[str] = ("127.0.0.1",),
    secret: bytes = b"secret",
    nstreams: int = 2,
    slot_bytes: int = SLOT,
    timeout: float | Deadline = WAIT_S,
    linger: float = 1.0,
    proxy_type: Any = ProgressEngine,
) -> SocketTransport:
    """Add a rank on a host of its own to the world."""
    losses = world.losses.setdefault(rank, [])

    def on_lost(peer, loss):
        losses.append((peer, loss))
        world.news.set()

    proxy = proxy_type(
        rank=rank, wake=lambda _: world.news.set(), on_lost=on_lost, segment_bytes=1 << 17
    )
    world.cleanup.callback(proxy.close)
    transport = SocketTransport(
        Endpoint(rank=rank, hostid=f"host{rank}", pid=os.getpid(), addresses=tuple(addresses)),
        proxy=proxy,
        secret=secret,
        job=b"test",
        slot_bytes=slot_bytes,
        options=SocketOptions(nstreams=nstreams),
        timeout=timeout,
        linger=linger,
    )
    world.cleanup.callback(transport.abort, "the test is over")
    world.transports[rank] = transport
    return transport


def build_world(nranks: int, **options: Any) -> World:
    world = World(transports={})
    for rank in range(nranks):
        build_rank(world, rank, **options)
    return world
