"""Public collectives on GPU memory, shared by the one-host and the multi-node communicator.

The methods check arguments; the subclass's ``_run`` moves the data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miraccl.fastpath.cuda.table import FastCall
from miraccl.fastpath.disabled import FastPathDisabled
from miraccl.runtime.gpu.arguments import DeviceArguments
from miraccl.runtime.gpu.memory import DeviceMemory, device_view, empty_like
from miraccl.types import Collective, Operator, RedOp

SUM = RedOp.SUM


class DeviceCollectives(FastPathDisabled, DeviceArguments):
    """Collectives on GPU memory.

    A method first tries its fast path (``fastpath.cuda``), which returns 0 if it handled the call.
    """

    def install_before(
        self, fallback: Callable[[str], FastCall | None], cpu_plan: int
    ) -> dict[str, Callable[..., Any]]:
        """Return this GPU's fast-path entry points by operation name; empty if there are none.

        ``fallback(name)`` gives the entry point that an unhandled call goes to. ``cpu_plan`` is the
        address of a word that each call sets to 0.
        """
        return {}

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
        """Run a collective in ``stream``; ``count``: elements per block.

        Implementations check that ``target`` is writable and ``op`` valid for the dtype.
        """
        raise NotImplementedError

    def all_reduce(self, x: Any, out: Any = None, op: Operator = SUM, *, stream: Any = None) -> Any:
        """Reduce ``x`` over all ranks into ``out``, or into ``x`` itself."""
        if not self._all_reduce(x, out, op, False, stream):
            return x if out is None else out
        source = device_view(x, "x", "all_reduce", stream, self.gpu)
        target = (
            source
            if out is None
            else self._check_out(out, source, source.count, "all_reduce", stream)
        )
        self._check_in_place(source, target, 0, "all_reduce")
        self._run(Collective.ALL_REDUCE, source, target, source.count, op, 0, stream)
        return x if out is None else out

    def reduce_scatter(
        self, x: Any, out: Any = None, op: Operator = SUM, *, stream: Any = None
    ) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of nranks equal shares in ``out``."""
        if out is not None and not self._reduce_scatter(x, out, op, False, stream):
            return out
        source = device_view(x, "x", "reduce_scatter", stream, self.gpu)
        count = self._equal_share(source, "reduce_scatter")
        out = empty_like(x, count, "reduce_scatter") if out is None else out
        target = self._check_out(out, source, count, "reduce_scatter", stream)
        self._check_in_place(source, target, self.rank * count, "reduce_scatter")
        self._run(Collective.REDUCE_SCATTER, source, target, count, op, 0, stream)
        return out

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Concatenate ``x`` of all ranks on every rank."""
        if out is not None and not self._all_gather(x, out, None, False, stream):
            return out
        source = device_view(x, "x", "all_gather", stream, self.gpu)
        out = empty_like(x, source.count * self.nranks, "all_gather") if out is None else out
        target = self._check_out(out, source, source.count * self.nranks, "all_gather", stream)
        self._check_in_place(target, source, self.rank * source.count, "all_gather")
        self._run(Collective.ALL_GATHER, source, target, source.count, SUM, 0, stream)
        return out

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Send block j of ``x`` to rank j; block i of ``out`` comes from rank i."""
        if out is not None and not self._all_to_all(x, out, None, False, stream):
            return out
        source = device_view(x, "x", "all_to_all", stream, self.gpu)
        count = self._equal_share(source, "all_to_all")
        out = empty_like(x, source.count, "all_to_all") if out is None else out
        target = self._check_out(out, source, source.count, "all_to_all", stream)
        self._check_disjoint(source, target, "all_to_all")
        self._run(Collective.ALL_TO_ALL, source, target, count, SUM, 0, stream)
        return out

    def broadcast(self, x: Any, root: int = 0, *, stream: Any = None) -> Any:
        """Copy ``x`` of rank ``root`` into ``x`` of every rank."""
        if not self._broadcast(x, None, root, False, stream):
            return x
        root = self._check_root(root, "broadcast")
        source = device_view(x, "x", "broadcast", stream, self.gpu)
        self._run(Collective.BROADCAST, source, source, source.count, SUM, root, stream)
        return x

    def reduce(
        self, x: Any, root: int = 0, out: Any = None, op: Operator = SUM, *, stream: Any = None
    ) -> Any:
        """Reduce ``x`` over all ranks into ``x`` or ``out`` of rank ``root``; other ranks' stay
        unchanged.
        """
        if not self._reduce(x, out, op, False, stream, root):
            return x if out is None or root != self.rank else out
        root = self._check_root(root, "reduce")
        source = device_view(x, "x", "reduce", stream, self.gpu)
        target = (
            source
            if out is None or self.rank != root
            else self._check_out(out, source, source.count, "reduce", stream)
        )
        self._check_in_place(source, target, 0, "reduce")
        self._run(Collective.REDUCE, source, target, source.count, op, root, stream)
        return x if target is source else out
