"""The maximal flow between two vertices of a graph, in whole numbers."""

from __future__ import annotations

from collections.abc import Sequence


class MaxFlow:
    """Dinic's algorithm on whole numbers, again and again over the same edges."""

    def __init__(self, size: int, edges: Sequence[tuple[int, int]]) -> None:
        self.leaving: list[list[int]] = [
            [] for _ in range(size)
        ]  # arcs by vertex; arc a ^ 1 is arc a turned round
        self.end: list[int] = []
        self.left: list[int] = []
        for start, end in edges:
            for vertex, other in ((start, end), (end, start)):
                self.leaving[vertex].append(len(self.end))
                self.end.append(other)

    def push(self, source: int, sink: int, capacities: Sequence[int]) -> int:
        """Send as much as possible over edges of these capacities; returns how much."""
        self.left = [0] * len(self.end)
        self.left[::2] = capacities
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            begun = [0] * len(self.leaving)
            while amount := self._augment(source, sink, level, begun):
                total += amount
        return total

    def reachable(self, source: int) -> frozenset[int]:
        """After :meth:`push`: the side of the source in a least cut."""
        return frozenset(vertex for vertex, level in enumerate(self._levels(source)) if level >= 0)

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.leaving)
        level[source] = 0
        queue = [source]
        for vertex in queue:
            for arc in self.leaving[vertex]:
                if self.left[arc] and level[self.end[arc]] < 0:
                    level[self.end[arc]] = level[vertex] + 1
                    queue.append(self.end[arc])
        return level

    def _augment(self, source: int, sink: int, level: list[int], begun: list[int]) -> int:
        """One path that descends level by level; ``begun`` remembers which arcs of a vertex are spent."""
        path: list[int] = []
        at = source
        while at != sink:
            arcs = self.leaving[at]
            while begun[at] < len(arcs):
                arc = arcs[begun[at]]
                if self.left[arc] and level[self.end[arc]] == level[at] + 1:
                    break
                begun[at] += 1
            else:
                if not path:
                    return 0
                at = self.end[path.pop() ^ 1]
                begun[at] += 1
                continue
            path.append(arc)
            at = self.end[arc]
        amount = min(self.left[arc] for arc in path)
        for arc in path:
            self.left[arc] -= amount
            self.left[arc ^ 1] += amount
        return amount
