"""Operations on GPU memory, shared by the one-host and the multi-node communicator.

``run`` runs, records or starts a call as its ``CallContext`` says; ``execute`` runs it at once. The
fast path (``fastpath.cuda``) comes first; else the arguments are checked (``ops.check``) and the
subclass moves the data.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.gpu import Gpu
from miraccl.fastpath.fast_calls import FastCalls
from miraccl.ops import spec
from miraccl.ops.check import CheckedCall, CheckedTransfer, check, check_transfers
from miraccl.ops.device_arrays import DeviceMemory, DeviceReader
from miraccl.ops.spec import FastForm, OpSpec
from miraccl.runtime.gpu.call_context import CallContext
from miraccl.runtime.group import Group
from miraccl.types import Collective, DType, Operator, RedOp

if TYPE_CHECKING:
    from miraccl.planning.sparse_planner import SparseCandidate

SUM = RedOp.SUM
CheckedDeviceCall = CheckedCall[DeviceMemory]
DeviceTransfer = CheckedTransfer[DeviceMemory]


class DeviceOperations:
    """Operations on GPU memory; the subclass executes checked calls.

    Attributes:
        fast: Compiled entry points of this GPU's operations.
        closed: True after ``close``, and in a forked child.
    """

    rank: int
    nranks: int
    gpu: Gpu
    reader: DeviceReader
    fast: FastCalls

    if TYPE_CHECKING:

        @property
        def closed(self) -> bool: ...
        @property
        def stream(self) -> int:
            """Driver handle of the last operation's stream; -1 before the first operation."""

    def fast_calls_before(self, fallback: FastCalls, cpu_plan: int) -> FastCalls:
        """Return entry points for GPU memory whose unhandled calls go to ``fallback``.

        ``cpu_plan`` is the address of a word that each call sets to 0. ``fallback`` itself if this
        communicator has no fast path.
        """
        return fallback

    def device_guard(self) -> contextlib.AbstractContextManager[object]:
        """Make the communicator's context current for the block if another device is current.

        The driver resolves default streams and allocates for the current context. Afterwards the
        application's context is current again, as with NCCL.
        """
        # A closed communicator needs no guard: a forked child has no CUDA driver to query.
        if self.closed or not self.gpu.is_wrong_device():
            return contextlib.nullcontext()
        return self.gpu.device_guard()

    # ---- calls

    def run(self, op: OpSpec, args: Sequence[Any], context: CallContext) -> Any:
        """Run a call, record it in a group, or start it in the background.

        Args:
            args: Arguments in the order of ``op.arguments``.

        Returns:
            The result, which is valid when the stream gets there; a ``DeviceWork`` in the
            background.
        """
        if context.group is not None:
            return self.recorder(context.group).record(op, args, context.own_stream)
        if context.background is not None:
            return context.background.start(op, args, context)
        if not self.closed and self.gpu.is_wrong_device():
            with self.gpu.device_guard():
                return self.execute(op, args, context.own_stream)
        if context.current_stream is not None:
            return self.execute(op, args, context.own_stream)
        # The communicator's fast path, which calls that of this object, has refused the same call.
        return self._run_checked(op, args, context.stream)

    def execute(self, op: OpSpec, args: Sequence[Any], stream: Any = None) -> Any:
        """Run a call in ``stream`` at once: by its fast path, or else checked."""
        fast = op.fast_form is not FastForm.NONE
        if fast and not self.fast.entry(op.name)(*op.fast_call_arguments(args, False, stream)):
            return op.result(args, self.rank)
        return self._run_checked(op, args, stream)

    def _run_checked(self, op: OpSpec, args: Sequence[Any], stream: Any) -> Any:
        """Check and run a call in ``stream``; return its result."""
        if op.is_message:
            self.exchange(self.transfers(op, args, stream), stream=stream, name=op.name)
            return op.result(args, self.rank)
        if op is spec.BARRIER:
            return self.barrier(stream=stream)
        try:
            call = check(op, self.reader, args, stream)
        except InvalidUsage as error:
            error.rank = self.rank
            raise
        if op is spec.ALL_REDUCE_SPARSE:
            self._reduce_rows(call, op.get(args, "block"), op.get(args, "density"), stream)
        else:
            self._execute(call, stream)
        return call.result

    def check_call(self, op: OpSpec, args: Sequence[Any]) -> CheckedDeviceCall:
        """Check the arguments of a collective and allocate its result, without running it."""
        try:
            return check(op, self.reader, args)
        except InvalidUsage as error:
            error.rank = self.rank
            raise

    def transfers(
        self, op: OpSpec, args: Sequence[Any], stream: Any = None
    ) -> list[DeviceTransfer]:
        """Check the arguments of a send, a receive or both."""
        try:
            return check_transfers(op, self.reader, args, stream)
        except InvalidUsage as error:
            error.rank = self.rank
            raise

    # ---- what a subclass implements

    def _execute(self, call: CheckedDeviceCall, stream: Any) -> None:
        """Run a checked collective in ``stream``."""
        raise NotImplementedError

    def _reduce_rows(
        self, call: CheckedDeviceCall, block: int | None, density: float | None, stream: Any
    ) -> None:
        """Run a checked sparse all-reduce in ``stream``; other arguments as for the call."""
        raise NotImplementedError

    def explain_rows(self, nbytes: int, dtype: DType, density: float) -> list[SparseCandidate]:
        """Return rows and the dense sum for a sparse all-reduce, the chosen one first."""
        raise NotImplementedError

    def stream_handle(self, stream: Any) -> int:
        """Return the driver handle of a stream argument; None means the current stream."""
        raise NotImplementedError

    def check(self, name: str = "") -> None:
        """Raise if the communicator is closed or has a fault. Does not wait for kernels."""
        raise NotImplementedError

    def exchange(
        self,
        transfers: Sequence[DeviceTransfer],
        *,
        stream: Any = None,
        name: str = "group",
        signature: int = 0,
    ) -> None:
        """Run sends and receives concurrently; between two ranks they match in order.

        ``signature``: that of the collective which they form on one host, if any.
        """
        raise NotImplementedError

    def barrier(self, *, stream: Any = None) -> None:
        """Delay later work in the stream until every rank's stream has arrived here."""
        raise NotImplementedError

    def recorder(self, group: Group) -> Any:
        """Return the ``grouped.Recorder`` of an open group."""
        raise NotImplementedError

    # ---- operations in a stream; see ``api.operations``

    def all_reduce(self, x: Any, out: Any = None, op: Operator = SUM, *, stream: Any = None) -> Any:
        return self.execute(spec.ALL_REDUCE, (x, out, op), stream)

    def reduce(
        self, x: Any, root: int = 0, out: Any = None, op: Operator = SUM, *, stream: Any = None
    ) -> Any:
        return self.execute(spec.REDUCE, (x, root, out, op), stream)

    def broadcast(self, x: Any, root: int = 0, *, stream: Any = None) -> Any:
        return self.execute(spec.BROADCAST, (x, root), stream)

    def all_gather(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self.execute(spec.ALL_GATHER, (x, out), stream)

    def reduce_scatter(
        self, x: Any, out: Any = None, op: Operator = SUM, *, stream: Any = None
    ) -> Any:
        return self.execute(spec.REDUCE_SCATTER, (x, out, op), stream)

    def all_to_all(self, x: Any, out: Any = None, *, stream: Any = None) -> Any:
        return self.execute(spec.ALL_TO_ALL, (x, out), stream)

    def gather(self, x: Any, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        return self.execute(spec.GATHER, (x, root, out), stream)

    def scatter(self, x: Any = None, root: int = 0, out: Any = None, *, stream: Any = None) -> Any:
        return self.execute(spec.SCATTER, (x, root, out), stream)

    def all_gather_v(
        self, x: Any, counts: Sequence[int], out: Any = None, *, stream: Any = None
    ) -> Any:
        return self.execute(spec.ALL_GATHER_V, (x, counts, out), stream)

    def reduce_scatter_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        op: Operator = SUM,
        *,
        stream: Any = None,
    ) -> Any:
        return self.execute(spec.REDUCE_SCATTER_V, (x, counts, out, op), stream)

    def all_to_all_v(
        self,
        x: Any,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Any = None,
        *,
        stream: Any = None,
    ) -> Any:
        return self.execute(spec.ALL_TO_ALL_V, (x, send_counts, recv_counts, out), stream)

    def gather_v(
        self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None
    ) -> Any:
        return self.execute(spec.GATHER_V, (x, counts, root, out), stream)

    def scatter_v(
        self, x: Any, counts: Sequence[int], root: int = 0, out: Any = None, *, stream: Any = None
    ) -> Any:
        return self.execute(spec.SCATTER_V, (x, counts, root, out), stream)

    def send(self, x: Any, dst: int, *, stream: Any = None) -> None:
        self.execute(spec.SEND, (x, dst), stream)

    def recv(self, x: Any, src: int, *, stream: Any = None) -> Any:
        return self.execute(spec.RECV, (x, src), stream)

    def sendrecv(self, x: Any, dst: int, out: Any, src: int, *, stream: Any = None) -> Any:
        return self.execute(spec.SENDRECV, (x, dst, out, src), stream)


def bind_result(
    op: OpSpec, args: Sequence[Any], gpu: DeviceOperations
) -> tuple[Any, tuple[Any, ...]]:
    """Check a collective that runs later; return its result, and arguments that contain it.

    The later run writes to the same result array and may read iterators of counts again.
    """
    if op is spec.BARRIER:
        return None, ()
    given = [list(x) if isinstance(x, Iterator) else x for x in args]
    result = gpu.check_call(op, given).result
    if op.out_at and given[op.out_at] is None and not op.defaults_to_x:
        given[op.out_at] = result
    return result, tuple(given)


# ---- collectives as messages

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
    call: CheckedDeviceCall, rank: int, nranks: int
) -> tuple[RankBlocks, RankBlocks]:
    """Return the blocks that ``rank`` sends and receives in a collective that only moves data.

    Empty blocks, which both sides omit, and a block that stays in place are left out.
    """
    collective, root = call.spec.collective, call.root
    sent, received = (
        split_by_rank(call.source, call.in_counts(rank, nranks)),
        split_by_rank(call.target, call.out_counts(rank, nranks)),
    )
    if collective is Collective.ALL_GATHER:
        sent = [(peer, memory) for peer in range(nranks) for _, memory in sent]
    elif collective is Collective.GATHER:
        sent = [(root, memory) for _, memory in sent]
    elif collective is Collective.SCATTER:
        received = [(root, memory) for _, memory in received]
    mine, here = dict(sent).get(rank), dict(received).get(rank)
    if mine is not None and here is not None and mine.address == here.address:
        sent = [part for part in sent if part[0] != rank]
        received = [part for part in received if part[0] != rank]
    return sent, received
