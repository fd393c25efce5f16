"""Graph of a machine under construction: vertices whose links are added, merged and moved.

Link storage behaves like NCCL's array (``ncclTopoNode.links``): removing an entry leaves the last
one past the end, where sorting sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from miraccl.topo.records import LinkType, NodeType, TopoNode, f32


@dataclass(slots=True, eq=False)
class Edge:
    """A directed link of a vertex; ``bw`` is GB/s."""

    type: LinkType
    bw: float
    target: Vertex


@dataclass(slots=True, eq=False)
class Vertex:
    """A node under construction; the first ``count`` entries of ``store`` are its links."""

    record: TopoNode
    store: list[Edge] = field(default_factory=list)
    count: int = 0
    parent: Vertex | None = None

    @property
    def edges(self) -> list[Edge]:
        """The links."""
        return self.store[: self.count]

    def connect(self, target: Vertex, type: LinkType, bw: float) -> None:
        """Add ``bw`` to the link of this type (created if needed); keep links sorted."""
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
        """Remove the link at a position."""
        self.store[at : self.count - 1] = [
            Edge(e.type, e.bw, e.target) for e in self.store[at + 1 : self.count]
        ]
        self.count -= 1

    def append(self, edge: Edge) -> None:
        """Append a copy of a link without sorting."""
        copy = Edge(edge.type, edge.bw, edge.target)
        if self.count < len(self.store):
            self.store[self.count] = copy
        else:
            self.store.append(copy)
        self.count += 1

    def put_last(self, target: Vertex) -> None:
        """Move the link to ``target`` to the end."""
        for at, edge in enumerate(self.store):
            if edge.target is target:
                self.store.append(self.store.pop(at))
                return


def join(one: Vertex, other: Vertex, type: LinkType, bw: float) -> None:
    """Connect two vertices in both directions."""
    one.connect(other, type, bw)
    other.connect(one, type, bw)


def cpu_of(vertex: Vertex) -> Vertex | None:
    """Return the CPU at the root of the PCI tree, or None."""
    at: Vertex | None = vertex
    while at is not None and at.record.type != NodeType.CPU:
        at = at.parent
    return at
