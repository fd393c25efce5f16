"""Small operations over hosts that come again, as CUDA graphs: one call of the driver instead of a dozen.

The kernels of a host, copies, words and waits of a small operation take less time on the GPU than their calls take on the host.  The
second time that an operation comes with the same arrays, it is captured; from then on its graph is launched in the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.multinode.runtime import MultiNodePlan, MultiNodeRuntime
from miraccl.runtime.multinode.staging import StagedJob

MAX_CACHED_BYTES = 1 << 20  # bytes: beyond, the network takes longer than the calls
MAX_GRAPHS = 64  # graphs of a communicator
Enqueue = Callable[[int, bool], None]
"""``enqueue(stream, captured)``"""


@dataclass(frozen=True, slots=True)
class _CachedGraph:
    """A graph, and what its lanes are to be told before it is launched."""

    graph: Any
    staged_jobs: tuple[StagedJob, ...]
    plan: MultiNodePlan | None


class GraphCache:
    """The graphs of one communicator."""

    def __init__(self, gpu: Gpu, runtime: MultiNodeRuntime) -> None:
        self._gpu, self._runtime = gpu, runtime
        self._stream: int | None = None
        self._graphs: dict[tuple[Any, ...], _CachedGraph | None] = {}  # None: came once

    def run(
        self, key: tuple[Any, ...], nbytes: int, stream: int, captured: bool, enqueue: Enqueue
    ) -> bool:
        """Do what ``enqueue`` does; says whether by a graph.  ``key`` is all that makes a difference, addresses included, ``nbytes`` how
        much the operation moves."""
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
        self._graphs[key] = cached  # the one used last comes last
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
        """When the GPU has done with them."""
        for key in list(self._graphs):
            self._drop(key)
        if self._stream is not None:
            self._gpu.destroy_stream(self._stream)
            self._stream = None
