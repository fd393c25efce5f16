"""The operations of a communicator: every public one, each a few lines.

An operation takes one of two ways.  The door (``executor.cpu.kernels.engine``) reads the arrays' headers and runs the plan in compiled
code; that is every call whose like has been seen.  The long way (``comm.ways``) checks the arguments, makes the plan, and handles groups,
background work and everything else that is not an everyday call.  Once there is a GPU side, its doors (``executor.cuda.doors``) stand
before those of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miraccl.fastpath.disabled import FastPathDisabled
from miraccl.ops import calls
from miraccl.runtime.dispatch import Dispatcher
from miraccl.runtime.gpu.memory import current_ordinal
from miraccl.runtime.persistent import Persistent
from miraccl.types import RedOp

if TYPE_CHECKING:
    from miraccl.runtime.gpu.persistent import DevicePersistent

SUM = RedOp.SUM


class Operations(FastPathDisabled, Dispatcher):
    """Collectives, uneven ones, sends and receives, and prepared operations; what arrays may be, ``Communicator`` says."""

    _barrier: Callable[[], int]

    # ---- collectives

    def all_reduce(
        self, x: Any, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result, in ``x`` itself or in ``out`` (same count and dtype)."""
        if not (code := self._all_reduce(x, out, op, async_op, stream)):
            return x if out is None else out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_reduce(x, out, op, stream=stream)
        return self._slow_path(calls.all_reduce, (x, out, op), "all_reduce", async_op, code)

    def all_gather(
        self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """All ranks' ``x`` (equal counts), one after another along the first axis, on every rank."""
        code = 0
        target = out if out is not None or async_op else calls.new_stacked(x, self.nranks)
        if target is not None and not (code := self._all_gather(x, target, 0, async_op, stream)):
            return target
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_gather(x, out, stream=stream)
        return self._slow_path(calls.all_gather, (x, out), "all_gather", async_op, code)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Reduce ``x`` over all ranks; rank r gets the r-th of nranks equal shares (cut along the first axis)."""
        code = 0
        target = out if out is not None or async_op else calls.new_share(x, self.nranks)
        if target is not None and not (
            code := self._reduce_scatter(x, target, op, async_op, stream)
        ):
            return target
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.reduce_scatter(x, out, op, stream=stream)
        return self._slow_path(calls.reduce_scatter, (x, out, op), "reduce_scatter", async_op, code)

    def broadcast(
        self, x: Any, root: int = 0, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """``x`` of rank ``root`` into ``x`` of every rank."""
        if not (code := self._broadcast(x, None, root, async_op, stream)):
            return x
        if (gpu := self._gpu_target(async_op, stream, x)) is not None:
            return gpu.broadcast(x, root, stream=stream)
        return self._slow_path(calls.broadcast, (x, root), "broadcast", async_op, code)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        out: Any = None,
        op: Any = SUM,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Reduce ``x`` over all ranks into ``x`` (or ``out``) of rank ``root``; the others' ``x`` stays as it is."""
        if not (code := self._reduce(x, out, op, async_op, stream, root)):
            return x if out is None or root != self.rank else out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.reduce(x, root, out, op, stream=stream)
        return self._slow_path(calls.reduce, (x, root, out, op), "reduce", async_op, code)

    def all_to_all(
        self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Block j of rank i's ``x`` becomes block i of rank j's result; ``x`` has nranks equal blocks."""
        code = 0
        target = out if out is not None or async_op else calls.new_like(x)
        if target is not None and not (code := self._all_to_all(x, target, 0, async_op, stream)):
            return target
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_to_all(x, out, stream=stream)
        return self._slow_path(calls.all_to_all, (x, out), "all_to_all", async_op, code)

    def gather(
        self, x: Any, root: int = 0, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """All ranks' ``x`` on rank ``root``, as ``all_gather`` puts them; the others get None."""
        if not (code := self._gather(x, out, root, None, None, async_op, stream)):
            return out if root == self.rank else None
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.gather(x, root, out, stream=stream)
        return self._slow_path(calls.gather, (x, root, out), "gather", async_op, code)

    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Rank r gets the r-th of nranks equal shares of the root's ``x``; the other ranks give ``out`` (``x`` is not looked at)."""
        if not (code := self._scatter(x, out, root, None, None, async_op, stream)):
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.scatter(x, root, out, stream=stream)
        return self._slow_path(calls.scatter, (x, root, out), "scatter", async_op, code)

    def barrier(self, *, async_op: bool = False, stream: Any = None) -> Any:
        """Return once every rank has come. With ``stream``, what follows there on the GPU begins once every rank's stream has come."""
        if stream is not None:
            return self._gpu_receiver(async_op, current_ordinal()).barrier(stream=stream)
        if not async_op and not (code := self._barrier()):
            return None
        return self._slow_path(calls.barrier, (), "barrier", async_op, 0 if async_op else code)

    # ---- uneven collectives: counts in elements, one a rank, the same list on every rank unless said

    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``all_gather``; rank r contributes ``counts[r]`` elements. The result is flat."""
        code = 0
        target = out if out is not None or async_op else calls.new_flat(x, counts)
        if target is not None and not (
            code := self._all_gather_v(x, target, None, None, counts, async_op, stream)
        ):
            return target
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_gather_v(x, counts, out, stream=stream)
        return self._slow_path(calls.all_gather_v, (x, counts, out), "all_gather_v", async_op, code)

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        op: Any = SUM,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``reduce_scatter``; rank r gets ``counts[r]`` elements."""
        if not (code := self._reduce_scatter_v(x, out, op, async_op, stream, counts)):
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.reduce_scatter_v(x, counts, out, op, stream=stream)
        return self._slow_path(
            calls.reduce_scatter_v, (x, counts, out, op), "reduce_scatter_v", async_op, code
        )

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``all_to_all``; block j of ``x`` has ``send_counts[j]`` elements, block j of the result ``recv_counts[j]`` (own counts)."""
        code = 0
        target = out if out is not None or async_op else calls.new_flat(x, recv_counts)
        if target is not None and not (
            code := self._all_to_all_v(x, target, None, send_counts, recv_counts, async_op, stream)
        ):
            return target
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_to_all_v(x, send_counts, recv_counts, out, stream=stream)
        return self._slow_path(
            calls.all_to_all_v, (x, send_counts, recv_counts, out), "all_to_all_v", async_op, code
        )

    def gather_v(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``gather``; rank r contributes ``counts[r]`` elements."""
        if not (code := self._gather_v(x, out, root, None, counts, async_op, stream)):
            return out if root == self.rank else None
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.gather_v(x, counts, root, out, stream=stream)
        return self._slow_path(calls.gather, (x, root, out, counts), "gather_v", async_op, code)

    def scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        root: int = 0,
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """As ``scatter``; rank r gets ``counts[r]`` elements."""
        if not (code := self._scatter_v(x, out, root, counts, None, async_op, stream)):
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.scatter_v(x, counts, root, out, stream=stream)
        return self._slow_path(calls.scatter, (x, root, out, counts), "scatter_v", async_op, code)

    # ---- point to point

    def send(self, x: Any, dst: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Send ``x`` to rank ``dst``; returns when ``x`` may be changed. Matches one ``recv`` of the same count and dtype, in order."""
        code = self._send(x, dst, async_op, stream)
        if not code:
            return None
        if (gpu := self._gpu_target(async_op, stream, x)) is not None:
            return gpu.send(x, dst, stream=stream)
        return self._transfer(x, dst, False, "send", async_op, code)

    def recv(self, x: Any, src: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Receive from rank ``src`` into ``x``."""
        code = self._recv(x, src, async_op, stream)
        if not code:
            return x
        if (gpu := self._gpu_target(async_op, stream, x)) is not None:
            return gpu.recv(x, src, stream=stream)
        return self._transfer(x, src, True, "recv", async_op, code)

    def sendrecv(
        self, x: Any, dst: int, out: Any, src: int, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Send ``x`` to ``dst`` and receive ``out`` from ``src`` at the same time."""
        code = self._sendrecv(x, dst, out, src, async_op, stream)
        if not code:
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.sendrecv(x, dst, out, src, stream=stream)
        self._core.check(code, "sendrecv")
        pair = [
            self._checked_transfer(x, dst, False, "sendrecv"),
            self._checked_transfer(out, src, True, "sendrecv", "out"),
        ]
        calls.check_overlap(pair[0].memory, pair[1].memory, None, self._call_site("sendrecv"))
        group = self._open_group("sendrecv", async_op)
        if group is not None:
            for transfer in pair:
                group.transfer(self._core, transfer)
            return out
        return self._core.exchange(pair, out, "sendrecv", async_op)

    # ---- persistent operations: everything is checked and planned once

    def all_reduce_init(
        self, x: Any, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """A prepared ``all_reduce``: ``op = comm.all_reduce_init(x); op()``. Buffers are bound; call it on all ranks alike."""
        return self._make_persistent(calls.all_reduce, "all_reduce", x, out, op)

    def all_gather_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``all_gather``."""
        return self._make_persistent(calls.all_gather, "all_gather", x, out)

    def reduce_scatter_init(
        self, x: Any, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """A prepared ``reduce_scatter``."""
        return self._make_persistent(calls.reduce_scatter, "reduce_scatter", x, out, op)

    def broadcast_init(self, x: Any, root: int = 0) -> Persistent | DevicePersistent:
        """A prepared ``broadcast``."""
        return self._make_persistent(calls.broadcast, "broadcast", x, root)

    def reduce_init(
        self, x: Any, root: int = 0, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """A prepared ``reduce``."""
        return self._make_persistent(calls.reduce, "reduce", x, root, out, op)

    def all_to_all_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``all_to_all``."""
        return self._make_persistent(calls.all_to_all, "all_to_all", x, out)

    def gather_init(self, x: Any, root: int = 0, out: Any = None) -> Persistent | DevicePersistent:
        """A prepared ``gather``."""
        return self._make_persistent(calls.gather, "gather", x, root, out)

    def scatter_init(
        self, x: Any = None, root: int = 0, out: Any = None
    ) -> Persistent | DevicePersistent:
        """A prepared ``scatter``."""
        return self._make_persistent(calls.scatter, "scatter", x, root, out)
