"""Widest-shortest routes from every node to the nodes of one type, before any correction.

The search is NCCL's (``src/graph/paths.cc`` ncclTopoSetPaths): breadth first from the target
outwards; a node's route is replaced if the new one has more bandwidth and the old one was longer
than the neighbour's. A GPU forwards traffic only to another GPU over NVLink, and only once. If
several nodes share an id (a net listed twice) only the first has routes, like in NCCL.
"""

from __future__ import annotations

from miraccl.topo.records import LOC_BW, LinkType, NodeType, Path, PathType, System

PATH_TYPES = tuple(PathType)
_LOC, _NVL, _NVB, _PXB, _PHB, _DIS = (
    PathType.LOC,
    PathType.NVL,
    PathType.NVB,
    PathType.PXB,
    PathType.PHB,
    PathType.DIS,
)

# Links of a node: (bandwidth, target, number of the reverse link, path type, GPU may forward).
_Edge = tuple[float, int, int, int, bool]


class Routes:
    """Routes to the nodes of one type.

    ``known[node]`` is True if NCCL stores routes for that node.
    """

    def __init__(
        self, system: System, type: NodeType, edges: list[list[_Edge]], *, nvb: bool
    ) -> None:
        self.system = system
        self.edges = edges
        self.nvb = nvb
        nodes = len(system.nodes)
        self.targets = range(system.starts[type], system.starts[type + 1])
        self.known = [False] * nodes
        self.bw = [[0.0] * nodes for _ in self.targets]
        self.type = [[int(_DIS)] * nodes for _ in self.targets]
        self.hops: list[list[tuple[int, ...]]] = [[()] * nodes for _ in self.targets]
        slots: dict[int, int] = {}
        for slot, target in enumerate(self.targets):
            self.flood(target, slots.setdefault(system.nodes[target].id, slot))

    def flood(self, base: int, slot: int) -> None:
        """Compute the routes to node ``base`` breadth first and store them in ``slot``."""
        bws, types, hops, known = self.bw[slot], self.type[slot], self.hops[slot], self.known
        edges, nvb, gpus = self.edges, self.nvb, self.system.starts[1]
        bws[base], types[base], hops[base], known[base] = LOC_BW, 0, (), True
        frontier = [base]
        while frontier:
            reached: dict[int, None] = {}
            for node in frontier:
                bw, type, route = bws[node], types[node], hops[node]
                count = len(route)
                relays = node < gpus and node != base
                blocked = relays and (not nvb or count > 1)
                for link_bw, to, back, link_type, passable in edges[node]:
                    known[to] = True
                    if blocked or (relays and not passable):
                        continue
                    new = bw if bw < link_bw else link_bw
                    old = bws[to]
                    if old < new and (old == 0 or len(hops[to]) > count) and back >= 0:
                        hops[to] = (back, *route)
                        bws[to] = new
                        if relays and type == _NVL and link_type == _NVL and count:
                            types[to] = _NVB
                        else:
                            types[to] = type if type > link_type else link_type
                        reached[to] = None
            frontier = list(reached)

    def row(self, source: int) -> list[Path]:
        """Return the routes of one node by position of the target; empty if none are known."""
        if not self.known[source]:
            return []
        return [
            Path(type=PATH_TYPES[types[source]], bw=bws[source], hops=hops[source])
            for bws, types, hops in zip(self.bw, self.type, self.hops)
        ]


def route_edges(system: System) -> list[list[_Edge]]:
    """Return the links in the form of the search, shared by all target types."""
    nodes, reverse = system.nodes, system.reverse_links
    edges: list[list[_Edge]] = []
    number = 0
    for node in nodes:
        out: list[_Edge] = []
        for link in node.links:
            far = nodes[link.target]
            type = int(_LOC) if link.type == LinkType.NET else int(link.type)
            if node.type == NodeType.PCI and far.type == NodeType.PCI:
                type = int(_PXB)
            if link.type == LinkType.PCI and NodeType.CPU in (node.type, far.type):
                type = int(_PHB)
            passable = link.type == LinkType.NVL and far.type == NodeType.GPU
            out.append((link.bw, link.target, reverse[number], type, passable))
            number += 1
        edges.append(out)
    return edges
