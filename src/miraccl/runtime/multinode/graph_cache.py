"""Small operations over hosts that come again, as CUDA graphs: one call of the driver instead of a dozen.

The kernels of a host, copies, words and waits of a small operation take less time on the GPU than their calls take on the host.  The
second time that an operation comes with the same arrays, it is captured; from then on its graph is launched in the caller's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miraccl.executor.cuda.gpu import Gpu
from miraccl.runtime.multinode.jobs import HostsJobs, HostsPlan
from miraccl.runtime.multinode.staging import StagedJob

LARGEST = 1 << 20  # bytes: beyond, the network takes longer than the calls
MOST = 64  # graphs of a communicator
Enqueue = Callable[[int, bool], None]
"""``enqueue(stream, captured)``"""


@dataclass(frozen=True, slots=True)
class _Replay:
    """A graph, and what its lanes are to be told before it is launched."""

    graph: Any
    jobs: tuple[StagedJob, ...]
    plan: HostsPlan | None


class Replays:
    """The graphs of one communicator."""

    def __init__(self, gpu: Gpu, jobs: HostsJobs) -> None:
        self._gpu, self._jobs = gpu, jobs
        self._stream: int | None = None
        self._replays: dict[tuple[Any, ...], _Replay | None] = {}  # None: came once

    def run(
        self, key: tuple[Any, ...], nbytes: int, stream: int, captured: bool, enqueue: Enqueue
    ) -> bool:
        """Do what ``enqueue`` does; says whether by a graph.  ``key`` is all that makes a difference, addresses included, ``nbytes`` how
        much the operation moves."""
        if captured or nbytes > LARGEST:
            enqueue(stream, captured)
            return False
        if key not in self._replays:
            if len(self._replays) == MOST:
                self._drop(next(iter(self._replays)))
            self._replays[key] = None
            enqueue(stream, captured)
            return False
        replay = self._replays.pop(key) or self._record(enqueue)
        self._replays[key] = replay  # the one used last comes last
        for job in replay.jobs:
            self._jobs.staging.announce(job)
        self._gpu.launch_graph(replay.graph, stream)
        self._jobs.last_plan = replay.plan
        return True

    def _record(self, enqueue: Enqueue) -> _Replay:
        if self._stream is None:
            with self._gpu.outside_of_capture():
                self._stream = self._gpu.make_stream()
        with self._jobs.staging.unannounced() as jobs:
            graph = self._gpu.capture(self._stream, lambda stream: enqueue(stream, False))
        return _Replay(graph, tuple(jobs), self._jobs.last_plan)

    def _drop(self, key: tuple[Any, ...]) -> None:
        replay = self._replays.pop(key)
        if replay is not None:
            self._gpu.destroy_graph(replay.graph)
            for job in replay.jobs:
                job.graphs -= 1

    def close(self) -> None:
        """When the GPU has done with them."""
        for key in list(self._replays):
            self._drop(key)
        if self._stream is not None:
            self._gpu.destroy_stream(self._stream)
            self._stream = None
