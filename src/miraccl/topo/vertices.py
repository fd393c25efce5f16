"""The graph of a machine while it is built: vertices whose links are still added, merged and moved.

Link storage behaves like NCCL's array (``ncclTopoNode.links``): removing an entry leaves the last one behind the end, where sorting sees
it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miraccl.topo.records import LinkType, NodeType, TopoNode, f32


@dataclass(slots=True, eq=False)
class Edge:
    type: LinkType
    bw: float
    target: Vertex


@dataclass(slots=True, eq=False)
class Vertex:
    record: TopoNode
    store: list[Edge] = field(default_factory=list)
    count: int = 0
    parent: Vertex | None = None

    @property
    def edges(self) -> list[Edge]:
        return self.store[: self.count]

    def connect(self, target: Vertex, type: LinkType, bw: float) -> None:
        """Add ``bw`` to the link of this type, made if need be, and move it before those with less."""
        at = next(
            (i for i, edge in enumerate(self.store) if edge.target is target and edge.type == type),
            len(self.store),
        )
        if at == len(self.store):
            self.store.append(Edge(type, 0.0, target))
            self.count += 1
        edge = self.store[at]
        edge.bw = f32(edge.bw + bw)
        while at and self.store[at - 1].bw < edge.bw:
            self.store[at] = self.store[at - 1]
            at -= 1
        self.store[at] = edge

    def remove(self, at: int) -> None:
        self.store[at : self.count - 1] = [
            Edge(e.type, e.bw, e.target) for e in self.store[at + 1 : self.count]
        ]
        self.count -= 1

    def append(self, edge: Edge) -> None:
        copy = Edge(edge.type, edge.bw, edge.target)
        if self.count < len(self.store):
            self.store[self.count] = copy
        else:
            self.store.append(copy)
        self.count += 1

    def put_last(self, target: Vertex) -> None:
        """Move the link to ``target`` behind all others."""
        for at, edge in enumerate(self.store):
            if edge.target is target:
                self.store.append(self.store.pop(at))
                return


def join(one: Vertex, other: Vertex, type: LinkType, bw: float) -> None:
    one.connect(other, type, bw)
    other.connect(one, type, bw)


def cpu_of(vertex: Vertex) -> Vertex | None:
    """The CPU at the root of the PCI tree."""
    at: Vertex | None = vertex
    while at is not None and at.record.type != NodeType.CPU:
        at = at.parent
    return at
