"""A fabric in virtual time: hosts, switches and ports of a topology, driven by one event queue.

The same topology, transfers and seed give the same run, event by event; ``compiled`` runs the
receiver-driven transfers of ``transfers`` on the same rules without the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from miraccl.errors import InvalidUsage
from miraccl.sim.fabric.events import SECOND, EventQueue
from miraccl.sim.fabric.faults import LinkChange
from miraccl.sim.fabric.hashing import choose, mix
from miraccl.sim.fabric.ports import FabricPacket, OutputPort, RandomDraws
from miraccl.sim.fabric.topology import FabricTopology


class Host(Protocol):
    """End of paths: receives packets and sends through its ports."""

    def receive(self, packet: FabricPacket) -> None:
        """Process a packet that has arrived."""
        ...


class PacketFabric:
    """Event loop over a topology.

    Args:
        topology: Nodes, links and routes.
        seed: Source of all random draws and of the salts of switches.

    Attributes:
        events: Virtual time.
        ports: Output port of each link.
        hosts: Host objects by number; set by ``attach``.
    """

    def __init__(self, topology: FabricTopology, *, seed: int = 0) -> None:
        topology.validate()
        self.topology, self.seed = topology, seed
        self.events = EventQueue()
        self.draws = RandomDraws(seed)
        self.ports = [
            OutputPort(i, link, self.events, self.draws, self._deliver)
            for i, link in enumerate(topology.links)
        ]
        self.hosts: dict[int, Host] = {}
        self._salts = [switch_salt(seed, i) for i in range(topology.switches)]

    @property
    def now(self) -> int:
        """Virtual time in ns."""
        return self.events.now

    def attach(self, number: int, host: Host) -> list[OutputPort]:
        """Make ``host`` the host ``number``; return its ports."""
        if not 0 <= number < self.topology.hosts or number in self.hosts:
            raise InvalidUsage(
                f"cannot attach host {number}: allowed are 0 to {self.topology.hosts - 1}, once"
            )
        self.hosts[number] = host
        return [self.ports[i] for i in self.topology.links_from(number)]

    def schedule_changes(self, changes: Iterable[LinkChange]) -> None:
        """Apply changes of links at their times."""
        for change in changes:
            if not 0 <= change.link < len(self.ports):
                raise InvalidUsage(
                    f"cannot change link {change.link}: there are {len(self.ports)} links"
                )
            self.events.schedule(change.time, self._apply, change)

    def run(self, until: int = 3600 * SECOND, stop: Callable[[], bool] = lambda: False) -> int:
        """Run until nothing is left to do, ``stop()`` is true, or time ``until``; return time."""
        self.events.run(until, stop)
        return self.now

    def total(self, counter: str) -> int:
        """Sum of one of the ``PortCounters`` over all ports."""
        return sum(getattr(port.counters, counter) for port in self.ports)

    def _apply(self, change: LinkChange) -> None:
        port = self.ports[change.link]
        if change.up is not None:
            port.up = change.up
        if change.rate is not None:
            port.profile = replace(port.profile, rate=change.rate)
        if change.loss is not None:
            port.profile = replace(port.profile, loss=change.loss)

    def _deliver(self, arrival: tuple[int, FabricPacket]) -> None:
        node, packet = arrival
        if node < self.topology.hosts:
            self.hosts[node].receive(packet)
            return
        switch = node - self.topology.hosts
        group = self.topology.routes[switch][packet.target]
        at = choose(self._salts[switch], packet.flow, packet.entropy, len(group))
        self.ports[group[at]].enqueue(packet)


def switch_salt(seed: int, switch: int) -> int:
    """Salt of a switch's ECMP hash, so that switches choose independently."""
    return mix(mix(seed) * 4096 + switch + 1)
