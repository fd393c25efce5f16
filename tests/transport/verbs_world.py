"""Verbs transports in this process, on simulated devices or on those of the kernel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.proxy.verbs.engine import VerbsEngine
from miraccl.proxy.verbs.packet_engine import VerbsDatagramEngine
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.topo.hca import Hca, Port
from miraccl.transport.base import DatagramOptions, Endpoint, TransportContext
from miraccl.transport.verbs import VerbsOptions, VerbsTransport
from miraccl.transport.verbs_datagram import VerbsDatagramTransport
from miraccl.transport.verbs_packets import PairKind
from tests.transport.conformance import WAIT_S, Way, World

SLOT = 16384


@dataclass
class VerbsWorld(World):
    """World with the engines of its ranks, and its simulated devices if it has some."""

    engines: dict[int, VerbsEngine] = field(default_factory=dict)
    packet_engines: dict[int, VerbsDatagramEngine] = field(default_factory=dict)
    devices: SimulatedVerbs | None = None
    ways: dict[tuple[int, int], Way] = field(default_factory=dict)

    @property
    def verbs(self) -> SimulatedVerbs:
        assert self.devices is not None
        return self.devices

    def only_way(self, source: int, destination: int) -> Way:
        """Return the one way between two ranks: its ends count messages."""
        route = (source, destination)
        if route not in self.ways:
            self.ways[route] = self.way(*route)
        return self.ways[route]


def build_ranks(
    world: VerbsWorld,
    library: VerbsLibrary,
    ports: Sequence[Sequence[tuple[Hca, Port]]],
    *,
    slot_bytes: int = SLOT,
    options: VerbsOptions | None = None,
    spin_ns: int = 0,
    deadline: float = WAIT_S,
    kind: PairKind | None = None,
    datagram: DatagramOptions | None = None,
) -> None:
    """Add ranks on hosts of their own; rank r has ``ports[r]``. ``kind`` None: reliable."""
    endpoints = {
        rank: Endpoint(
            rank=rank,
            hostid=f"host{rank}",
            pid=os.getpid(),
            hcas=tuple(port.kind for _, port in each),
        )
        for rank, each in enumerate(ports)
    }
    for rank, each in enumerate(ports):
        losses = world.losses.setdefault(rank, [])

        def on_lost(peer: int, loss: Any, losses: list[Any] = losses) -> None:
            losses.append((peer, loss))
            world.news.set()

        def engine(rank: int = rank, on_lost: Any = on_lost) -> Any:
            shared: dict[str, Any] = {
                "rank": rank,
                "library": library,
                "wake": lambda _: world.news.set(),
                "on_lost": on_lost,
            }
            if kind is None:
                world.engines[rank] = VerbsEngine(spin_ns=spin_ns, **shared)
                return world.engines[rank]
            world.packet_engines[rank] = VerbsDatagramEngine(**shared)
            return world.packet_engines[rank]

        context = TransportContext(
            endpoint=endpoints[rank],
            peers={r: e for r, e in endpoints.items() if r != rank},
            budget=slot_bytes * 8 * max(1, len(ports) - 1),
            max_slot_bytes=slot_bytes,
            deadline=deadline,
            wake=lambda _: world.news.set(),
            on_lost=on_lost,
        )
        transport: Any
        if kind is None:
            transport = VerbsTransport(
                context, library=library, ports=each, engine=engine, options=options, linger=1.0
            )
        else:
            transport = VerbsDatagramTransport(
                context,
                library=library,
                ports=each,
                engine=engine,
                kind=kind,
                options=options or VerbsOptions(),
                datagram=datagram or DatagramOptions(),
                linger=0.3,
            )
        world.cleanup.callback(transport.abort, "the test is over")
        world.transports[rank] = transport


def build_verbs_world(
    nranks: int,
    *,
    devices: Sequence[int] | None = None,
    slot_bytes: int = SLOT,
    options: VerbsOptions | None = None,
    spin_ns: int = 0,
    deadline: float = WAIT_S,
    kind: PairKind | None = None,
    datagram: DatagramOptions | None = None,
    **simulated: Any,
) -> VerbsWorld:
    """Return ranks on simulated devices; rank r has ``devices[r]`` of them."""
    names = [
        [f"sim{rank}" + (f"r{i}" if i else "") for i in range(count)]
        for rank, count in enumerate(devices or [1] * nranks)
    ]
    verbs = SimulatedVerbs([name for each in names for name in each], **simulated)
    world = VerbsWorld(transports={}, devices=verbs)
    world.cleanup.callback(verbs.close)
    ports = [verbs.ports(*each) for each in names]
    build_ranks(
        world,
        verbs.library,
        ports,
        slot_bytes=slot_bytes,
        options=options,
        spin_ns=spin_ns,
        deadline=deadline,
        kind=kind,
        datagram=datagram,
    )
    return world
