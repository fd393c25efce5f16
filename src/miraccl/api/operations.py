"""Public operations of a communicator.

An operation first calls its fast path: compiled code (``executor.cpu.kernels.engine``) that reads
the array headers and runs the plan of an equal earlier call. Otherwise the slow path
(``runtime.dispatch``) validates the arguments, makes the plan, and handles groups and background
work. Once there is a GPU side, its fast path (``fastpath.cuda``) runs before that of the CPU.
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
    """Collectives, sends and receives, and persistent operations of a ``Communicator``."""

    _barrier: Callable[[], int]

    # ---- collectives

    def all_reduce(
        self, x: Any, out: Any = None, op: Any = SUM, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Reduce ``x`` over all ranks; every rank gets the result.

        Args:
            x: Input, contiguous, the same count and dtype on all ranks.
            out: Output of the same count and dtype; None reduces in place.
            op: Reduction: a ``RedOp`` or a ``PreMulSum``.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            ``out`` if given, else ``x``; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        if not (code := self._all_reduce(x, out, op, async_op, stream)):
            return x if out is None else out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.all_reduce(x, out, op, stream=stream)
        return self._slow_path(calls.all_reduce, (x, out, op), "all_reduce", async_op, code)

    def all_gather(
        self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Concatenate ``x`` of all ranks along the first axis, on every rank.

        Args:
            x: Input, contiguous, the same count and dtype on all ranks.
            out: Output of nranks times the count; ``x`` may be its part r on rank r. None allocates
                it.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Reduce ``x`` over all ranks and give rank r the r-th of nranks equal parts.

        Args:
            x: Input, contiguous; its count is a multiple of nranks, cut along the first axis.
            out: Output of one part; it may be part r of ``x`` on rank r. None allocates it.
            op: Reduction: a ``RedOp`` or a ``PreMulSum``.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Copy ``x`` of rank ``root`` to ``x`` of every rank.

        Args:
            x: Input on the root, output on other ranks; contiguous, the same count and dtype on all
                ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            ``x``; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Reduce ``x`` over all ranks; rank ``root`` gets the result.

        Args:
            x: Input, contiguous, the same count and dtype on all ranks; unchanged on non-root
                ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            out: Output on the root; None reduces in place. Ignored on other ranks.
            op: Reduction: a ``RedOp`` or a ``PreMulSum``.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            On the root ``out`` if given, else ``x``; ``x`` on other ranks; a ``Work`` with
            ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        if not (code := self._reduce(x, out, op, async_op, stream, root)):
            return x if out is None or root != self.rank else out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.reduce(x, root, out, op, stream=stream)
        return self._slow_path(calls.reduce, (x, root, out, op), "reduce", async_op, code)

    def all_to_all(
        self, x: Any, out: Any = None, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Send block j of ``x`` to rank j; block i of the result is from rank i.

        Args:
            x: Input, contiguous; nranks blocks of equal count.
            out: Output of the same count and dtype, without overlap. None allocates it.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Concatenate ``x`` of all ranks along the first axis, on rank ``root``.

        Args:
            x: Input, contiguous, the same count and dtype on all ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            out: Output on the root, of nranks times the count; None allocates it. Ignored
                elsewhere.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output on the root, None on other ranks; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Give rank r the r-th of nranks equal parts of ``x`` of rank ``root``.

        Args:
            x: Input on the root, contiguous; its count is a multiple of nranks. Ignored on other
                ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            out: Output of one part. Required on non-root ranks; None allocates it on the root.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        if not (code := self._scatter(x, out, root, None, None, async_op, stream)):
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.scatter(x, root, out, stream=stream)
        return self._slow_path(calls.scatter, (x, root, out), "scatter", async_op, code)

    def barrier(self, *, async_op: bool = False, stream: Any = None) -> Any:
        """Return when all ranks have called it.

        Args:
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream: later work in it starts when the streams of all ranks have arrived;
                the host does not wait. None: a barrier of the hosts.

        Returns:
            None; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        if stream is not None:
            return self._gpu_receiver(async_op, current_ordinal()).barrier(stream=stream)
        if not async_op and not (code := self._barrier()):
            return None
        return self._slow_path(calls.barrier, (), "barrier", async_op, 0 if async_op else code)

    # ---- uneven collectives (counts in elements)

    def all_gather_v(
        self,
        x: Any,
        counts: Sequence[int],
        out: Any = None,
        *,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Concatenate ``counts[r]`` elements of each rank r, on every rank.

        Args:
            x: Input of ``counts[rank]`` elements, contiguous.
            counts: Elements of each rank, the same list on all ranks.
            out: Output of ``sum(counts)`` elements; None allocates a flat array.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Reduce ``x`` over all ranks and give rank r its part of ``counts[r]`` elements.

        Args:
            x: Input of ``sum(counts)`` elements, contiguous.
            counts: Elements of each rank's part, the same list on all ranks.
            out: Output of ``counts[rank]`` elements; None allocates a flat array.
            op: Reduction: a ``RedOp`` or a ``PreMulSum``.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Send ``send_counts[j]`` elements to each rank j, receive ``recv_counts[i]`` from each
        rank
        i.

        Args:
            x: Input of ``sum(send_counts)`` elements, contiguous.
            send_counts: Elements for each rank; this rank's own list.
            recv_counts: Elements from each rank; this rank's own list.
            out: Output of ``sum(recv_counts)`` elements; None allocates a flat array.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Concatenate ``counts[r]`` elements of each rank r, on rank ``root``.

        Args:
            x: Input of ``counts[rank]`` elements, contiguous.
            counts: Elements of each rank, the same list on all ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            out: Output on the root, of ``sum(counts)`` elements; None allocates a flat array.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output on the root, None on other ranks; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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
        """Give each rank r its part, ``counts[r]`` elements, of ``x`` of rank ``root``.

        Args:
            x: Input on the root, of ``sum(counts)`` elements, contiguous. Ignored on other ranks.
            counts: Elements of each rank's part, the same list on all ranks.
            root: Rank from 0 to nranks - 1, the same on all ranks.
            out: Output of ``counts[rank]`` elements. Required on non-root ranks.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            The output; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        if not (code := self._scatter_v(x, out, root, counts, None, async_op, stream)):
            return out
        if (gpu := self._gpu_target(async_op, stream, x, out)) is not None:
            return gpu.scatter_v(x, counts, root, out, stream=stream)
        return self._slow_path(calls.scatter, (x, root, out, counts), "scatter_v", async_op, code)

    # ---- point to point

    def send(self, x: Any, dst: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Send ``x`` to rank ``dst``; returns when ``x`` may be changed.

        Matches one ``recv`` of the same count and dtype; messages between two ranks keep their
        order.

        Args:
            x: Contiguous array.
            dst: Rank from 0 to nranks - 1. A rank may send to itself inside a group.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            None; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        code = self._send(x, dst, async_op, stream)
        if not code:
            return None
        if (gpu := self._gpu_target(async_op, stream, x)) is not None:
            return gpu.send(x, dst, stream=stream)
        return self._transfer(x, dst, False, "send", async_op, code)

    def recv(self, x: Any, src: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Receive a message from rank ``src`` into ``x``.

        Args:
            x: Contiguous array of the count and dtype of the message.
            src: Rank from 0 to nranks - 1.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            ``x``; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        code = self._recv(x, src, async_op, stream)
        if not code:
            return x
        if (gpu := self._gpu_target(async_op, stream, x)) is not None:
            return gpu.recv(x, src, stream=stream)
        return self._transfer(x, src, True, "recv", async_op, code)

    def sendrecv(
        self, x: Any, dst: int, out: Any, src: int, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Send ``x`` to rank ``dst`` and receive ``out`` from rank ``src`` at the same time.

        Args:
            x: Contiguous array to send.
            dst: Rank from 0 to nranks - 1.
            out: Contiguous array to receive into, without overlap with ``x``.
            src: Rank from 0 to nranks - 1.
            async_op: Return a ``Work`` at once and run in the background.
            stream: CUDA stream (GPU memory only): a handle, or a stream of PyTorch or CuPy.
                Default: the current stream.

        Returns:
            ``out``; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations, counts, dtypes or roots.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
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

    # ---- persistent operations

    def all_reduce_init(
        self, x: Any, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_reduce`` with these arguments.

        ``op = comm.all_reduce_init(x)`` checks and plans once; each ``op()`` runs on the same
        buffers. All ranks create and call persistent operations in the same order.
        """
        return self._make_persistent(calls.all_reduce, "all_reduce", x, out, op)

    def all_gather_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_gather`` with these arguments."""
        return self._make_persistent(calls.all_gather, "all_gather", x, out)

    def reduce_scatter_init(
        self, x: Any, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``reduce_scatter`` with these arguments."""
        return self._make_persistent(calls.reduce_scatter, "reduce_scatter", x, out, op)

    def broadcast_init(self, x: Any, root: int = 0) -> Persistent | DevicePersistent:
        """Prepare a persistent ``broadcast`` with these arguments."""
        return self._make_persistent(calls.broadcast, "broadcast", x, root)

    def reduce_init(
        self, x: Any, root: int = 0, out: Any = None, op: Any = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``reduce`` with these arguments."""
        return self._make_persistent(calls.reduce, "reduce", x, root, out, op)

    def all_to_all_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_to_all`` with these arguments."""
        return self._make_persistent(calls.all_to_all, "all_to_all", x, out)

    def gather_init(self, x: Any, root: int = 0, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``gather`` with these arguments."""
        return self._make_persistent(calls.gather, "gather", x, root, out)

    def scatter_init(
        self, x: Any = None, root: int = 0, out: Any = None
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``scatter`` with these arguments."""
        return self._make_persistent(calls.scatter, "scatter", x, root, out)
