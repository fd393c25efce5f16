"""Maximum flow between two vertices of a graph with integer capacities."""

from __future__ import annotations

from collections.abc import Sequence


class MaxFlow:
    """Dinic's algorithm on a fixed set of edges, reusable with other capacities."""

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        # Arcs by vertex; arc a ^ 1 is the reverse of arc a.
        self.arcs: list[list[int]] = [[] for _ in range(size)]
        self.head: list[int] = []
        self.residual: list[int] = []
        for start, end in edges:
            for vertex, other in ((start, end), (end, start)):
                self.arcs[vertex].append(len(self.head))
                self.head.append(other)

    def push(self, source: int, sink: int, capacities: Sequence[int]) -> int:
        """Compute a maximum flow and return its value; ``capacities`` are by edge."""
        self.residual = [0] * len(self.head)
        self.residual[::2] = capacities
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            next_arc = [0] * len(self.arcs)
            while amount := self._augment(source, sink, level, next_arc):
                total += amount
        return total

    def reachable(self, source: int) -> frozenset[int]:
        """Return the source side of a minimum cut, after :meth:`push`."""
        return frozenset(vertex for vertex, level in enumerate(self._levels(source)) if level >= 0)

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.arcs)
        level[source] = 0
        queue = [source]
        for vertex in queue:
            for arc in self.arcs[vertex]:
                if self.residual[arc] and level[self.head[arc]] < 0:
                    level[self.head[arc]] = level[vertex] + 1
                    queue.append(self.head[arc])
        return level

    def _augment(self, source: int, sink: int, level: list[int], next_arc: list[int]) -> int:
        """Augment one shortest path; ``next_arc`` records the exhausted arcs of each vertex."""
        path: list[int] = []
        vertex = source
        while vertex != sink:
            arcs = self.arcs[vertex]
            while next_arc[vertex] < len(arcs):
                arc = arcs[next_arc[vertex]]
                if self.residual[arc] and level[self.head[arc]] == level[vertex] + 1:
                    break
                next_arc[vertex] += 1
            else:
                if not path:
                    return 0
                vertex = self.head[path.pop() ^ 1]
                next_arc[vertex] += 1
                continue
            path.append(arc)
            vertex = self.head[arc]
        amount = min(self.residual[arc] for arc in path)
        for arc in path:
            self.residual[arc] -= amount
            self.residual[arc ^ 1] += amount
        return amount
