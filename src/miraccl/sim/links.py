"""Virtual links: routes between ranks with bandwidth and latency.

A route is a list of links with a latency. Links are unidirectional; concurrent transfers share a
link's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.topo.analyse import Topology
from miraccl.topo.records import PathType

#: default latency in us, from a store until another rank's load sees it: the order of NVLink and of
#: the cores of a host
LATENCY_US = 1.0
#: default latency in us between nodes: the order of RDMA through one switch
NETWORK_LATENCY_US = 5.0


@dataclass(frozen=True, slots=True)
class Route:
    """Route of messages between two ranks.

    - ``links``: link numbers in the order of travel.
    - ``latency_us``: time from the last byte sent until the receiver sees it.
    """

    links: tuple[int, ...]
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Links:
    """Links of a machine and the routes between its ranks.

    ``names[l]`` and ``bandwidths[l]`` (GB/s, one direction) describe link ``l``; ``routes[a, b]``
    leads from rank ``a`` to a different rank ``b``.
    """

    nranks: int
    names: tuple[str, ...]
    bandwidths: tuple[float, ...]
    routes: Mapping[tuple[int, int], Route]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.bandwidths):
            raise InvalidUsage(f"{len(self.names)} links have {len(self.bandwidths)} bandwidths")
        for name, bandwidth in zip(self.names, self.bandwidths, strict=True):
            if not 0 < bandwidth < math.inf:
                raise InvalidUsage(
                    f"the bandwidth of {name} is {bandwidth:g} GB/s; it must be finite and greater"
                    " than 0"
                )
        for (sender, receiver), route in self.routes.items():
            if not 0 <= route.latency_us < math.inf:
                raise InvalidUsage(
                    f"the latency from rank {sender} to rank {receiver} is {route.latency_us:g} us;"
                    " it must be finite and at least 0"
                )

    def route(self, sender: int, receiver: int) -> Route:
        found = self.routes.get((sender, receiver))
        if found is None:
            raise InvalidUsage(f"no route from rank {sender} to rank {receiver}")
        return found


def _pairs(nranks: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in range(nranks) for b in range(nranks) if a != b)


def switch(nranks: int, bandwidth: float, latency_us: float = LATENCY_US) -> Links:
    """Return links of ``bandwidth`` GB/s per rank and direction to a non-blocking switch.

    Models NVSwitch, or hosts around one switch.
    """
    names = [
        f"{direction} rank {rank}" for direction in ("out of", "into") for rank in range(nranks)
    ]
    routes = {(a, b): Route((a, nranks + b), latency_us) for a, b in _pairs(nranks)}
    return Links(
        nranks=nranks, names=tuple(names), bandwidths=(bandwidth,) * len(names), routes=routes
    )


def mesh(nranks: int, bandwidth: float, latency_us: float = LATENCY_US) -> Links:
    """Return links that join each ordered pair of ranks."""
    pairs = list(_pairs(nranks))
    routes = {pair: Route((number,), latency_us) for number, pair in enumerate(pairs)}
    return Links(
        nranks=nranks,
        names=tuple(f"rank {a} to rank {b}" for a, b in pairs),
        bandwidths=(bandwidth,) * len(pairs),
        routes=routes,
    )


def cluster(
    nodes: int,
    ranks_per_node: int,
    bandwidth: float = 100.0,
    network_bandwidth: float = 25.0,
    *,
    latency_us: float = LATENCY_US,
    network_latency_us: float = NETWORK_LATENCY_US,
) -> Links:
    """Return links of equal nodes: a switch in each, one NIC per node, and an ideal network.

    Rank ``r`` is on node ``r // ranks_per_node``. Bandwidths are in GB/s per direction, of a rank
    and of a NIC.
    """
    nranks = nodes * ranks_per_node
    if nodes < 1 or ranks_per_node < 1:
        raise InvalidUsage(
            f"cannot build {nodes} nodes of {ranks_per_node} ranks: both must be at least 1"
        )
    names = [
        f"{direction} rank {rank}" for direction in ("out of", "into") for rank in range(nranks)
    ]
    nics = [f"{direction} node {node}" for direction in ("out of", "into") for node in range(nodes)]
    routes: dict[tuple[int, int], Route] = {}
    for a, b in _pairs(nranks):
        x, y = a // ranks_per_node, b // ranks_per_node
        if x == y:
            routes[a, b] = Route((a, nranks + b), latency_us)
        else:
            out, into = 2 * nranks + x, 2 * nranks + nodes + y
            routes[a, b] = Route((a, out, into, nranks + b), network_latency_us)
    return Links(
        nranks=nranks,
        names=(*names, *nics),
        bandwidths=(bandwidth,) * len(names) + (network_bandwidth,) * len(nics),
        routes=routes,
    )


def machine(topology: Topology, latency_us: float = LATENCY_US) -> Links:
    """Return the links of a topology with the routes of NCCL's paths.

    The topology covers as many nodes as it was analysed for. Messages between nodes use the nearest
    net of the sender and that of the receiver, joined by an ideal network; their latency is that of
    the net in the topology plus ``latency_us``. Raise ``TopologyError`` if GPUs of one node are
    joined by the network only.
    """
    system, paths = topology.system, topology.paths
    if len(topology.domains) > 1:
        raise TopologyError(
            "cannot simulate this machine: only the network joins its"
            f" {len(topology.domains)} groups of GPUs; select one group"
        )
    size, gpus = len(system.links), len(system.gpus)
    nodes = topology.nranks // gpus
    names, bandwidths = [], []
    for node in range(nodes):
        tail = f"@{node}" if nodes > 1 else ""
        for source, link in zip(system.link_source, system.links, strict=True):
            names.append(
                f"{link.type.name} {system.nodes[source].name} to"
                f" {system.nodes[link.target].name}{tail}"
            )
            bandwidths.append(link.bw)
    place = {gpu.rank: position for position, gpu in enumerate(system.gpus)}
    positions = [place[rank] for rank in sorted(place)]
    nearest = [_nearest_net(topology, position) for position in positions] if nodes > 1 else []
    routes: dict[tuple[int, int], Route] = {}
    for a, b in _pairs(topology.nranks):
        (from_node, x), (to_node, y) = divmod(a, gpus), divmod(b, gpus)
        if from_node == to_node:
            path = paths.gpu_gpu(positions[x], positions[y])
            if path.type >= PathType.NET or not path.hops:
                raise TopologyError(
                    f"cannot simulate this machine: only the network joins GPUs {x} and {y}; select"
                    " one of them"
                )
            routes[a, b] = Route(tuple(from_node * size + hop for hop in path.hops), latency_us)
            continue
        out = [from_node * size + hop for hop in paths.gpu_net(positions[x], nearest[x]).hops]
        back = [to_node * size + hop for hop in paths.net_gpu(nearest[y], positions[y]).hops]
        net = max(system.nets[nearest[x]].latency, system.nets[nearest[y]].latency)
        routes[a, b] = Route((*out, *back), latency_us + net)
    used = sorted({link for route in routes.values() for link in route.links})
    number = {link: index for index, link in enumerate(used)}
    return Links(
        nranks=topology.nranks,
        names=tuple(names[link] for link in used),
        bandwidths=tuple(bandwidths[link] for link in used),
        routes={
            pair: Route(tuple(number[link] for link in route.links), route.latency_us)
            for pair, route in routes.items()
        },
    )


def _nearest_net(topology: Topology, gpu: int) -> int:
    """Return the position of the net closest to a GPU: by path type, then bandwidth, then index."""
    system, paths = topology.system, topology.paths
    reached = [
        (paths.gpu_net(gpu, net).type, -paths.gpu_net(gpu, net).bw, net)
        for net in range(len(system.nets))
    ]
    if not reached or min(reached)[0] >= PathType.DIS:
        raise TopologyError(f"cannot simulate several nodes: GPU {gpu} reaches no net")
    return min(reached)[2]
