"""Uneven collectives on GPU memory over hosts: counts in elements, one a rank. All go through the CPU communicator of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from miraccl.comm.arguments import counts_of, operator
from miraccl.comm.device.arguments import DeviceArguments
from miraccl.comm.device.hosts.jobs import HostsJobs
from miraccl.comm.device.hosts.pieces import Shape
from miraccl.comm.device.memory import DeviceMemory, device_view, empty_like
from miraccl.errors import InvalidUsage
from miraccl.types import Collective, RedOp

SUM = RedOp.SUM


class UnevenCollectives(DeviceArguments):
    """Their methods and checks, for ``HostsCommunicator``."""

    jobs: HostsJobs

    def _operation(self, name: str, stream: Any, views: Sequence[DeviceMemory]) -> contextlib.AbstractContextManager[tuple[int, bool]]:
        raise NotImplementedError

    def all_gather_v(self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_gather``; rank r contributes ``counts[r]`` elements."""
        sizes, source = self._counts(counts, "all_gather_v"), self._sized(x, "x", counts, "all_gather_v", stream)
        out = empty_like(x, sum(sizes), "all_gather_v") if out is None else out
        target = self._like(out, source, sum(sizes), "all_gather_v")
        self._uneven(Collective.ALL_GATHER, source, target, (source.count,), sizes, sizes, stream)
        return out

    def reduce_scatter_v(self, x: Any, counts: Sequence[int], out: Any = None, op: Any = SUM, *, stream: Any = None) -> Any:
        """As ``reduce_scatter``; rank r gets ``counts[r]`` elements."""
        sizes, source = self._counts(counts, "reduce_scatter_v"), device_view(x, "x", "reduce_scatter_v", stream, self.gpu)
        self._expect(source, sum(sizes), "x", "reduce_scatter_v")
        operator(op, source.dtype, "reduce_scatter_v")
        out = empty_like(x, sizes[self.rank], "reduce_scatter_v") if out is None else out
        target = self._like(out, source, sizes[self.rank], "reduce_scatter_v")
        self._uneven(Collective.REDUCE_SCATTER, source, target, sizes, (target.count,), sizes, stream, op=op)
        return out

    def all_to_all_v(self, x: Any, send_counts: Sequence[int], recv_counts: Sequence[int], out: Any = None, *, stream: Any = None) -> Any:
        """As ``all_to_all``; block j of ``x`` has ``send_counts[j]`` elements, block j of the result ``recv_counts[j]``."""
        sends, receives = self._counts(send_counts, "all_to_all_v"), self._counts(recv_counts, "all_to_all_v")
        source = device_view(x, "x", "all_to_all_v", stream, self.gpu)
        self._expect(source, sum(sends), "x", "all_to_all_v")
        if sends[self.rank] != receives[self.rank]:
            text = f"all_to_all_v: a rank sends itself what it receives, not {sends[self.rank]} and {receives[self.rank]} elements"
            raise InvalidUsage(text, rank=self.rank)
        out = empty_like(x, sum(receives), "all_to_all_v") if out is None else out
        target = self._like(out, source, sum(receives), "all_to_all_v")
        self._apart(source, target, "all_to_all_v")
        self._uneven(Collective.ALL_TO_ALL, source, target, sends, receives, (), stream)
        return out

    def gather_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``gather``; rank r contributes ``counts[r]`` elements."""
        chief, sizes = self._root(root, "gather_v"), self._counts(counts, "gather_v")
        source = self._sized(x, "x", counts, "gather_v", stream)
        if self.rank != chief:
            out = None
        elif out is None:
            out = empty_like(x, sum(sizes), "gather_v")
        target = source if out is None else self._like(out, source, sum(sizes), "gather_v")
        receives = sizes if self.rank == chief else ()
        self._uneven(Collective.GATHER, source, target, (source.count,), receives, sizes, stream, root=chief)
        return out

    def scatter_v(self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """As ``scatter``; rank r gets ``counts[r]`` elements."""
        chief, sizes = self._root(root, "scatter_v"), self._counts(counts, "scatter_v")
        if self.rank == chief:
            source = device_view(x, "x", "scatter_v", stream, self.gpu)
            self._expect(source, sum(sizes), "x", "scatter_v")
            out = empty_like(x, sizes[chief], "scatter_v") if out is None else out
            target = self._like(out, source, sizes[chief], "scatter_v")
        else:
            source = target = self._sized(out, "out", counts, "scatter_v", stream)
        sends = sizes if self.rank == chief else ()
        self._uneven(Collective.SCATTER, source, target, sends, (target.count,), sizes, stream, root=chief)
        return out

    def _uneven(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        sends: Sequence[int],
        receives: Sequence[int],
        counts: Sequence[int],
        stream: Any,
        *,
        op: Any = SUM,
        root: int = 0,
    ) -> None:
        if counts and not any(counts):
            return
        shape = Shape(
            collective=collective,
            itemsize=source.dtype.itemsize,
            rank=self.rank,
            nranks=self.nranks,
            root=root,
            sends=tuple(sends),
            receives=tuple(receives),
            counts=tuple(counts),
            uneven=True,
        )
        if target.read_only and target is not source:
            raise self._constant(f"{collective.label}_v")
        with self._operation(f"{collective.label}_v", stream, [source, target]) as (number, captured):
            self.jobs.enqueue((self.jobs.world,), shape, source.dtype, op, (source.address, target.address), number, captured)

    def _counts(self, counts: Any, where: str) -> tuple[int, ...]:
        return tuple(counts_of(counts, "counts", self.nranks, where))

    def _sized(self, x: Any, name: str, counts: Sequence[int], where: str, stream: Any) -> DeviceMemory:
        memory = device_view(x, name, where, stream, self.gpu)
        self._expect(memory, counts[self.rank], name, where)
        return memory

    def _expect(self, memory: DeviceMemory, count: int, name: str, where: str) -> None:
        if memory.count != count:
            raise InvalidUsage(f"{where}: {name} has {memory.count} elements, but needs {count}", rank=self.rank)
