"""Rooted and uneven collectives on GPU memory; counts are in elements, one per rank.

The methods check arguments; the subclass's ``_run_uneven`` moves the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.fastpath.disabled import FastPathDisabled
from miraccl.ops.arguments import counts_of, resolve_operator
from miraccl.runtime.gpu.arguments import DeviceArguments
from miraccl.runtime.gpu.collectives import SUM
from miraccl.runtime.gpu.memory import DeviceMemory, device_view, empty_like
from miraccl.types import Collective, Operator


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenRequest:
    """Checked uneven collective.

    ``sends`` are the blocks of ``source``, ``receives`` those of ``target``: one per rank, or one
    for all ranks or the root. ``counts``: the counts that all ranks know; empty for all_to_all.
    """

    collective: Collective
    source: DeviceMemory
    target: DeviceMemory
    sends: Sequence[int]
    receives: Sequence[int]
    counts: Sequence[int] = ()
    op: Operator = SUM
    root: int = 0

    @property
    def name(self) -> str:
        return f"{self.collective.label}_v"


class UnevenCollectives(FastPathDisabled, DeviceArguments):
    """Rooted and uneven collectives.

    A method first tries its fast path (``fastpath.cuda``), which returns 0 if it handled the call.
    """

    def _run_rooted(
        self,
        collective: Collective,
        source: DeviceMemory,
        target: DeviceMemory,
        count: int,
        op: Operator,
        root: int,
        stream: Any,
    ) -> None:
        """Run a gather or scatter of equal blocks in ``stream``.

        A rank without one of the two buffers passes the other one for it.
        """
        raise NotImplementedError

    def _run_uneven(self, request: UnevenRequest, stream: Any) -> None:
        """Run the request in ``stream``."""
        raise NotImplementedError

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """Concatenate all ranks' ``x`` on rank ``root``; other ranks return None."""
        if not self._gather(x, out, root, None, None, False, stream):
            return out if root == self.rank else None
        root, source = (
            self._check_root(root, "gather"),
            device_view(x, "x", "gather", stream, self.gpu),
        )
        out, target = self._gather_target(
            x, source, [source.count] * self.nranks, root, out, "gather", stream
        )
        self._run_rooted(Collective.GATHER, source, target, source.count, SUM, root, stream)
        return out

    def scatter(self, x: Any = None, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        """Send rank r the r-th equal share of the root's ``x``; other ranks pass ``out``."""
        if not self._scatter(x, out, root, None, None, False, stream):
            return out
        root = self._check_root(root, "scatter")
        if self.rank == root:
            source = device_view(x, "x", "scatter", stream, self.gpu)
            sizes = [self._equal_share(source, "scatter")] * self.nranks
            out, target = self._scatter_target(x, source, sizes, out, "scatter", stream)
        else:
            source = target = self._required_out(out, "scatter", stream)
        self._run_rooted(Collective.SCATTER, source, target, target.count, SUM, root, stream)
        return out

    def all_gather_v(
        self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None
    ) -> Any:
        """Concatenate ``x`` of all ranks; rank r contributes ``counts[r]`` elements."""
        if not self._all_gather_v(x, out, None, None, counts, False, stream):
            return out
        sizes = counts_of(counts, "counts", self.nranks, "all_gather_v")
        source = self._view_sized(
            x, sizes[self.rank], f"counts[{self.rank}]", "all_gather_v", stream
        )
        out = empty_like(x, sum(sizes), "all_gather_v") if out is None else out
        target = self._check_out(out, source, sum(sizes), "all_gather_v", stream)
        self._check_in_place(target, source, sum(sizes[: self.rank]), "all_gather_v")
        request = UnevenRequest(
            collective=Collective.ALL_GATHER,
            source=source,
            target=target,
            sends=(source.count,),
            receives=sizes,
            counts=sizes,
        )
        self._run_uneven(request, stream)
        return out

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        op: Operator = SUM,
        *,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks; rank r gets ``counts[r]`` elements."""
        if not self._reduce_scatter_v(x, out, op, False, stream, counts):
            return out
        sizes = counts_of(counts, "counts", self.nranks, "reduce_scatter_v")
        source = self._view_sized(x, sum(sizes), "the sum of counts", "reduce_scatter_v", stream)
        resolve_operator(op, source.dtype, "reduce_scatter_v")
        out = empty_like(x, sizes[self.rank], "reduce_scatter_v") if out is None else out
        target = self._check_out(out, source, sizes[self.rank], "reduce_scatter_v", stream)
        self._check_in_place(source, target, sum(sizes[: self.rank]), "reduce_scatter_v")
        collective, mine = Collective.REDUCE_SCATTER, (target.count,)
        request = UnevenRequest(
            collective=collective,
            source=source,
            target=target,
            sends=sizes,
            receives=mine,
            counts=sizes,
            op=op,
        )
        self._run_uneven(request, stream)
        return out

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        stream: Any = None,
    ) -> Any:
        """Exchange blocks: ``send_counts[j]`` elements to, ``recv_counts[j]`` from rank j."""
        if not self._all_to_all_v(x, out, None, send_counts, recv_counts, False, stream):
            return out
        sends = counts_of(send_counts, "send_counts", self.nranks, "all_to_all_v")
        receives = counts_of(recv_counts, "recv_counts", self.nranks, "all_to_all_v")
        if sends[self.rank] != receives[self.rank]:
            detail = (
                f"send_counts[{self.rank}] is {sends[self.rank]}, "
                f"recv_counts[{self.rank}] is {receives[self.rank]}"
            )
            raise InvalidUsage(
                f"all_to_all_v: counts of a rank to itself differ: {detail}", rank=self.rank
            )
        source = self._view_sized(x, sum(sends), "the sum of send_counts", "all_to_all_v", stream)
        out = empty_like(x, sum(receives), "all_to_all_v") if out is None else out
        target = self._check_out(out, source, sum(receives), "all_to_all_v", stream)
        self._check_disjoint(source, target, "all_to_all_v")
        request = UnevenRequest(
            collective=Collective.ALL_TO_ALL,
            source=source,
            target=target,
            sends=sends,
            receives=receives,
        )
        self._run_uneven(request, stream)
        return out

    def gather_v(
        self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None
    ) -> Any:
        """Concatenate ``x`` on rank ``root``; rank r contributes ``counts[r]`` elements."""
        if not self._gather_v(x, out, root, None, counts, False, stream):
            return out if root == self.rank else None
        root, sizes = (
            self._check_root(root, "gather_v"),
            counts_of(counts, "counts", self.nranks, "gather_v"),
        )
        source = self._view_sized(x, sizes[self.rank], f"counts[{self.rank}]", "gather_v", stream)
        out, target = self._gather_target(x, source, sizes, root, out, "gather_v", stream)
        collective, mine, receives = (
            Collective.GATHER,
            (source.count,),
            sizes if self.rank == root else (),
        )
        request = UnevenRequest(
            collective=collective,
            source=source,
            target=target,
            sends=mine,
            receives=receives,
            counts=sizes,
            root=root,
        )
        self._run_uneven(request, stream)
        return out

    def scatter_v(
        self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None
    ) -> Any:
        """Send rank r its ``counts[r]`` elements of the root's ``x``."""
        if not self._scatter_v(x, out, root, counts, None, False, stream):
            return out
        root, sizes = (
            self._check_root(root, "scatter_v"),
            counts_of(counts, "counts", self.nranks, "scatter_v"),
        )
        if self.rank == root:
            source = self._view_sized(x, sum(sizes), "the sum of counts", "scatter_v", stream)
            out, target = self._scatter_target(x, source, sizes, out, "scatter_v", stream)
        else:
            source = target = self._required_out(out, "scatter_v", stream)
            self._check_count(target, sizes[self.rank], "out", f"counts[{self.rank}]", "scatter_v")
        collective, mine, sends = (
            Collective.SCATTER,
            (target.count,),
            sizes if self.rank == root else (),
        )
        request = UnevenRequest(
            collective=collective,
            source=source,
            target=target,
            sends=sends,
            receives=mine,
            counts=sizes,
            root=root,
        )
        self._run_uneven(request, stream)
        return out

    # ---- helpers

    def _gather_target(
        self,
        x: Any,
        source: DeviceMemory,
        sizes: Sequence[int],
        root: int,
        out: Any,
        op_name: str,
        stream: Any,
    ) -> tuple[Any, DeviceMemory]:
        """Return a gather's result and its memory; (None, ``source``) on non-root ranks."""
        if self.rank != root:
            return None, source
        out = empty_like(x, sum(sizes), op_name) if out is None else out
        target = self._check_out(out, source, sum(sizes), op_name, stream)
        self._check_in_place(target, source, sum(sizes[:root]), op_name)
        return out, target

    def _scatter_target(
        self,
        x: Any,
        source: DeviceMemory,
        sizes: Sequence[int],
        out: Any,
        op_name: str,
        stream: Any,
    ) -> tuple[Any, DeviceMemory]:
        """Return the root's share of a scatter and its memory."""
        out = empty_like(x, sizes[self.rank], op_name) if out is None else out
        target = self._check_out(out, source, sizes[self.rank], op_name, stream)
        self._check_in_place(source, target, sum(sizes[: self.rank]), op_name)
        return out, target

    def _required_out(self, out: Any, op_name: str, stream: Any) -> DeviceMemory:
        if out is None:
            raise InvalidUsage(
                f"{op_name}: non-root ranks must pass out, the array for their share",
                rank=self.rank,
            )
        return device_view(out, "out", op_name, stream, self.gpu)

    def _view_sized(self, x: Any, count: int, why: str, op_name: str, stream: Any) -> DeviceMemory:
        memory = device_view(x, "x", op_name, stream, self.gpu)
        self._check_count(memory, count, "x", why, op_name)
        return memory

    def _check_count(
        self, memory: DeviceMemory, count: int, name: str, why: str, op_name: str
    ) -> None:
        if memory.count != count:
            raise InvalidUsage(
                f"{op_name}: {name} has {memory.count} elements, but needs {count} ({why})",
                rank=self.rank,
            )


RankBlocks = list[tuple[int, DeviceMemory]]
"""(rank, memory), without empty ones"""


def split_by_rank(memory: DeviceMemory, sizes: Sequence[int]) -> RankBlocks:
    """Split ``memory`` into consecutive blocks, one per rank."""
    firsts = itertools.accumulate(sizes, initial=0)
    return [
        (rank, memory.slice(first, size))
        for rank, (first, size) in enumerate(zip(firsts, sizes, strict=False))
        if size
    ]


def sends_and_receives(
    request: UnevenRequest, rank: int, nranks: int
) -> tuple[RankBlocks, RankBlocks]:
    """Return the blocks that ``rank`` sends and receives in a collective that only moves data.

    Empty blocks, which both sides omit, and a block that stays in place are left out.
    """
    sent, received = (
        split_by_rank(request.source, request.sends),
        split_by_rank(request.target, request.receives),
    )
    if request.collective is Collective.ALL_GATHER:
        sent = [(peer, memory) for peer in range(nranks) for _, memory in sent]
    elif request.collective is Collective.GATHER:
        sent = [(request.root, memory) for _, memory in sent]
    elif request.collective is Collective.SCATTER:
        received = [(request.root, memory) for _, memory in received]
    mine, here = dict(sent).get(rank), dict(received).get(rank)
    if mine is not None and here is not None and mine.address == here.address:
        sent = [part for part in sent if part[0] != rank]
        received = [part for part in received if part[0] != rank]
    return sent, received
