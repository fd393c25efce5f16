"""Collectives on GPU memory by copy engines: selection, and the cache of their launches.

The launches are those of ``executor.cuda.copies`` and ``staged_copies``; NCCL's counterpart is
``src/ce_coll.cc``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from miraccl.errors import MiracclError
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.copies import (
    CopyLaunch,
    SideStream,
    WindowPosition,
    faster_min_bytes,
    is_supported,
)
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.launch import Kernels
from miraccl.executor.cuda.lower import CommArgs
from miraccl.executor.cuda.plan import Request
from miraccl.executor.cuda.staged_copies import ALGORITHMS, Directions, StagedLaunch
from miraccl.planning.cta_limits import CtaLimits
from miraccl.transport.cuda_p2p import SymmetricMemory
from miraccl.types import Collective, DType, RedOp

#: cached launches; scalars of pre-multiplied sums and window offsets may differ with every call
MAX_LAUNCHES = 4096


class CopyEngines:
    """Copy-engine collectives of one communicator.

    They run where they are faster than kernels, or where SMs are not to be used.
    """

    def __init__(
        self,
        gpu: Gpu,
        kernels: Kernels,
        comm_args: CommArgs,
        memory: SymmetricMemory,
        ctas: CtaLimits,
    ) -> None:
        self._gpu, self._kernels, self._comm_args, self._memory, self._ctas = (
            gpu,
            kernels,
            comm_args,
            memory,
            ctas,
        )
        self._launches: dict[tuple[Any, ...], CopyLaunch | StagedLaunch] = {}
        self._sides: list[SideStream] = []
        self._directions: Directions = {}

    def may_handle(self, collective: Collective, windows: bool, block_bytes: int) -> bool:
        """Return True if ``find_launch`` must be called, whose answer depends on the addresses.

        ``windows``: the communicator has window memory.
        """
        nranks = self._memory.nranks
        if self._ctas.copy_engines_only:
            return collective in ALGORITHMS
        return (
            windows
            and is_supported(collective, nranks)
            and block_bytes * (nranks - 1) >= faster_min_bytes(collective, nranks)
        )

    def find_launch(
        self,
        collective: Collective,
        dtype: DType,
        count: int,
        root: int,
        place: WindowPosition | None,
        request: Callable[[], Request],
    ) -> CopyLaunch | StagedLaunch | None:
        """Return the launch of an operation, created on first use; None if kernels run it.

        ``place``: location of the output in a window, if it is in one.
        """
        key: tuple[Any, ...] = (
            collective,
            dtype,
            count,
            RedOp.SUM,
            root,
        )  # same form as for the communicator's own launches
        if place is not None and is_supported(collective, self._memory.nranks):
            key += (place.window, place.offset)
        elif self._ctas.copy_engines_only and self._memory.all_direct:
            place = None
        else:
            return None
        if key not in self._launches:
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            with self._gpu.device_guard(), self._gpu.relaxed_capture():
                self._launches[key] = (
                    CopyLaunch(
                        self._gpu, self._kernels, request(), self._comm_args, place, self._sides
                    )
                    if place is not None
                    else StagedLaunch(
                        self._gpu, self._kernels, request(), self._comm_args, self._directions
                    )
                )
        return self._launches[key]

    def launches(self) -> list[tuple[tuple[Any, ...], CopyLaunch | StagedLaunch]]:
        """Return all launches by (collective, dtype, count, operator, root)."""
        return [(key[:5], launch) for key, launch in list(self._launches.items())]

    def awaited_peer(self) -> int | None:
        """Return a peer whose data, or else whose credit, a stream waits for; None if unknown.

        Waits inside graphs are not visible.
        """
        for (peer, _), side in sorted(
            self._directions.items(), key=lambda item: (not item[0][1], item[0][0])
        ):
            with contextlib.suppress(MiracclError):
                self._gpu.make_current()
                if not self._gpu.has_completed(side.event):
                    return peer
        return None

    def release_waits(self) -> None:
        """Release streams that wait for flags that will not be written."""
        self._gpu.make_current()
        with self._gpu.relaxed_capture():
            self._gpu.fill(self._memory.own + layout.COPY_FLAGS_OFFSET, layout.COPY_FLAGS_BYTES, 1)

    def close(self) -> None:
        """Free the streams; the GPU has finished its work."""
        for side in (*self._sides, *self._directions.values()):
            side.close()
