"""Cache of CUDA graphs for small multi-node operations: one driver call instead of a dozen.

The kernels, copies, flag writes and waits of a small operation take less time on the GPU than the
calls that enqueue them take on the host. An operation is captured when it recurs with the same
arrays; from then on its graph is launched in the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.multinode.runtime import MultiNodePlan, MultiNodeRuntime
from miraccl.runtime.multinode.staging import StagedJob

MAX_CACHED_BYTES = 1 << 20  # above, the network takes longer than the driver calls
MAX_GRAPHS = 64  # per communicator
Enqueue = Callable[[int, bool], None]
"""``enqueue(stream, captured)``"""


@dataclass(frozen=True, slots=True)
class _CachedGraph:
    """Graph, and the staging jobs to announce before each launch."""

    graph: Any
    staged_jobs: tuple[StagedJob, ...]
    plan: MultiNodePlan | None


class GraphCache:
    """Cached graphs of one communicator."""

    def __init__(self, gpu: Gpu, runtime: MultiNodeRuntime) -> None:
        self._gpu, self._runtime = gpu, runtime
        self._stream: int | None = None
        self._graphs: dict[tuple[Any, ...], _CachedGraph | None] = {}  # None: seen once

    def run(
        self, key: tuple[Any, ...], nbytes: int, stream: int, captured: bool, enqueue: Enqueue
    ) -> bool:
        """Run an operation by its graph or by ``enqueue``; return True for a graph.

        ``key``: everything that distinguishes the operation, addresses included. ``nbytes``: bytes
        moved.
        """
        if captured or nbytes > MAX_CACHED_BYTES:
            enqueue(stream, captured)
            return False
        if key not in self._graphs:
            if len(self._graphs) == MAX_GRAPHS:
                self._drop(next(iter(self._graphs)))
            self._graphs[key] = None
            enqueue(stream, captured)
            return False
        cached = self._graphs.pop(key) or self._capture(enqueue)
        self._graphs[key] = cached  # least recently used first
        for job in cached.staged_jobs:
            self._runtime.staging.announce(job)
        self._gpu.launch_graph(cached.graph, stream)
        self._runtime.last_plan = cached.plan
        return True

    def _capture(self, enqueue: Enqueue) -> _CachedGraph:
        if self._stream is None:
            with self._gpu.relaxed_capture():
                self._stream = self._gpu.make_stream()
        with self._runtime.staging.recording() as jobs:
            graph = self._gpu.capture(self._stream, lambda stream: enqueue(stream, False))
        return _CachedGraph(graph, tuple(jobs), self._runtime.last_plan)

    def _drop(self, key: tuple[Any, ...]) -> None:
        cached = self._graphs.pop(key)
        if cached is not None:
            self._gpu.destroy_graph(cached.graph)
            for job in cached.staged_jobs:
                job.graphs -= 1

    def close(self) -> None:
        """Destroy the graphs; the GPU has finished with them."""
        for key in list(self._graphs):
            self._drop(key)
        if self._stream is not None:
            self._gpu.destroy_stream(self._stream)
            self._stream = None
