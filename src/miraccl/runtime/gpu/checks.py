"""Argument checks of a GPU collective without running it, for prepared and grouped operations."""

from __future__ import annotations

from typing import Any

from miraccl.ops.arguments import resolve_operator
from miraccl.runtime.gpu.collectives import DeviceCollectives
from miraccl.runtime.gpu.memory import DeviceMemory
from miraccl.runtime.gpu.uneven import UnevenCollectives, UnevenRequest
from miraccl.types import Collective, Operator


class ArgumentChecks(DeviceCollectives, UnevenCollectives):
    """Collectives that check their arguments and return their result array, but run nothing.

    A result array is allocated where the caller gives none.
    """

    def __init__(self, gpu: Any) -> None:
        self.rank, self.nranks, self.gpu = gpu.rank, gpu.nranks, gpu.gpu

    def _run(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Operator,
        root: int,
        stream: Any,
    ) -> None:
        resolve_operator(op, source.dtype, collective.label)
        self._check_writable(target, collective, root, collective.label)

    _run_rooted = _run

    def _run_uneven(self, request: UnevenRequest, stream: Any) -> None:
        if any(request.receives):
            self._check_writable(request.target, request.collective, request.root, request.name)
