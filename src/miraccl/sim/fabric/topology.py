"""Hosts, switches and links of a fabric as a record, and builders of common shapes.

Hosts have numbers from 0, switches follow. A link is one direction of a cable and belongs to the
output port at its source. Routes are equal-cost groups: which links of a switch lead to a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from miraccl.errors import InvalidUsage

SECOND = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """Properties of a link and of the output port that feeds it.

    Args:
        rate: Bits per second.
        latency: Propagation delay in ns.
        queue: Bytes of data that the port stores; control packets have twice as much of their own.
        mark_above: Bytes of queued data above which arriving data get ECN's CE mark; 0 never marks.
        trimming: Cut data that do not fit to their header instead of dropping them.
        loss: Probability that a packet is lost on the wire.
        jitter: Largest random addition to the latency in ns; packets may overtake each other.
        duplicate: Probability that a packet arrives twice.
        corrupt: Probability that a packet arrives with a changed byte.
    """

    rate: int = 100 * SECOND
    latency: int = 1_000
    queue: int = 145_250
    mark_above: int = 0
    trimming: bool = False
    loss: float = 0.0
    jitter: int = 0
    duplicate: float = 0.0
    corrupt: float = 0.0

    def __post_init__(self) -> None:
        if self.rate < 1 or self.latency < 0 or self.queue < 1 or self.jitter < 0:
            raise InvalidUsage(
                f"cannot model a link of {self.rate} bit/s, {self.latency} ns latency, "
                f"{self.queue} bytes of queue, {self.jitter} ns jitter: rate and queue must be "
                "at least 1, times at least 0"
            )
        for name in ("loss", "duplicate", "corrupt"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; allowed are 0 to 1")

    def transmission_time(self, size: int) -> int:
        """Time in ns to put ``size`` bytes on the link, rounded up."""
        return -(-size * 8 * SECOND // self.rate)


@dataclass(frozen=True)
class LinkSpec:
    """A link from node ``source`` to node ``target``."""

    source: int
    target: int
    profile: LinkProfile


@dataclass
class FabricTopology:
    """Nodes and links.

    Attributes:
        hosts: Number of hosts; they are nodes 0 to ``hosts - 1``.
        switches: Number of switches; they are the nodes after the hosts.
        links: All links; their positions are their numbers.
        routes: ``routes[switch][host]`` are the numbers of the links towards the host, of equal
            cost. Switches count from 0 here.
    """

    hosts: int
    switches: int
    links: list[LinkSpec] = field(default_factory=list)
    routes: list[list[tuple[int, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.routes = [[()] * self.hosts for _ in range(self.switches)]

    def connect(self, source: int, target: int, profile: LinkProfile) -> int:
        """Add one direction of a cable; return the number of the link."""
        self.links.append(LinkSpec(source, target, profile))
        return len(self.links) - 1

    def links_from(self, node: int) -> list[int]:
        """Numbers of the links that leave a node, in the order in which they were added."""
        return [i for i, link in enumerate(self.links) if link.source == node]

    def validate(self) -> None:
        """Raise ``InvalidUsage`` unless every host has a link and every route leads on."""
        nodes = self.hosts + self.switches
        for number, link in enumerate(self.links):
            if not (0 <= link.source < nodes and 0 <= link.target < nodes):
                raise InvalidUsage(
                    f"link {number} joins nodes {link.source} and {link.target}; there are {nodes}"
                )
        starts = {link.source for link in self.links}
        for host in range(self.hosts):
            if host not in starts:
                raise InvalidUsage(f"host {host} has no link")
        for switch, groups in enumerate(self.routes):
            for host, group in enumerate(groups):
                for number in group:
                    if self.links[number].source != self.hosts + switch:
                        raise InvalidUsage(
                            f"switch {switch} routes to host {host} over link {number}, "
                            f"which leaves node {self.links[number].source}"
                        )


def fat_tree(k: int, profile: LinkProfile, host_queue: int = 1 << 40) -> FabricTopology:
    """Build a k-ary fat tree (Al-Fares et al., SIGCOMM 2008): k^3/4 hosts, full bisection.

    Args:
        k: Ports of a switch, even.
        profile: Every link. Hosts queue ``host_queue`` bytes and neither mark nor trim.
    """
    if k < 2 or k % 2:
        raise InvalidUsage(f"fat tree of {k}-port switches; the number of ports must be even")
    half = k // 2
    nhosts, nedges = k * half * half, k * half
    tree = FabricTopology(nhosts, 2 * nedges + half * half)
    nic = replace(profile, queue=host_queue, mark_above=0, trimming=False)

    def edge(pod: int, i: int) -> int:
        return nhosts + pod * half + i

    def aggregation(pod: int, i: int) -> int:
        return nhosts + nedges + pod * half + i

    def core(group: int, i: int) -> int:
        return nhosts + 2 * nedges + group * half + i

    up: dict[int, list[int]] = {}
    down: dict[tuple[int, int], int] = {}
    for host in range(nhosts):
        switch = edge(host // (half * half), host // half % half)
        tree.connect(host, switch, nic)
        down[switch, host] = tree.connect(switch, host, profile)
    for pod in range(k):
        for i in range(half):
            for j in range(half):
                low, high = edge(pod, i), aggregation(pod, j)
                up.setdefault(low, []).append(tree.connect(low, high, profile))
                down[high, low] = tree.connect(high, low, profile)
        for j in range(half):
            for c in range(half):
                low, high = aggregation(pod, j), core(j, c)
                up.setdefault(low, []).append(tree.connect(low, high, profile))
                down[high, low] = tree.connect(high, low, profile)
    for host in range(nhosts):
        pod, i = host // (half * half), host // half % half
        for node in range(nhosts, nhosts + tree.switches):
            if (node, host) in down:
                group: tuple[int, ...] = (down[node, host],)
            elif (node, edge(pod, i)) in down:
                group = (down[node, edge(pod, i)],)
            elif node >= core(0, 0):
                group = (down[node, aggregation(pod, (node - core(0, 0)) // half)],)
            else:
                group = tuple(up[node])
            tree.routes[node - nhosts][host] = group
    return tree


def star(nhosts: int, access: LinkProfile, output: LinkProfile | None = None) -> FabricTopology:
    """Build one switch with ``nhosts`` hosts.

    Args:
        nhosts: Number of hosts.
        access: Links from hosts to the switch.
        output: Links from the switch to hosts; those of ``access`` by default.
    """
    result = FabricTopology(nhosts, 1)
    for host in range(nhosts):
        result.connect(host, nhosts, access)
        link = result.connect(nhosts, host, output or access)
        result.routes[0][host] = (link,)
    return result


def parallel_paths(profiles: Sequence[LinkProfile]) -> FabricTopology:
    """Build two hosts joined by one cable per profile; link 2 i leads from host 0 to host 1."""
    result = FabricTopology(2, 0)
    for profile in profiles:
        result.connect(0, 1, profile)
        result.connect(1, 0, profile)
    return result
