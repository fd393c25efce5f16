"""Public operations of a communicator.

An operation first calls its fast path: compiled code (``executor.cpu.kernels.engine``) that reads
the array headers and runs the plan of an equal earlier call. Otherwise the slow path
(``runtime.dispatch``) validates the arguments, makes the plan, and handles groups and background
work. Once there is a GPU side, its fast path (``fastpath.cuda``) runs before that of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miraccl.ops import spec
from miraccl.ops.prepare import new_like, new_share, new_stacked
from miraccl.runtime.dispatch import Dispatcher
from miraccl.types import Operator, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.work import Work

SUM = RedOp.SUM
#: Array type: NumPy array, PyTorch tensor, CuPy array and so on.
A = TypeVar("A")


class Collectives(Dispatcher):
    """Collectives with equal counts on all ranks."""

    @overload
    def all_reduce(
        self,
        x: A,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> A: ...
    @overload
    def all_reduce(
        self,
        x: A,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def all_reduce(
        self,
        x: A,
        out: A | None = None,
        op: Operator = SUM,
        *,
        async_op: bool = False,
        stream: Any = None,
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
        if not (code := self._fast.all_reduce(x, out, op, async_op, stream)):
            return x if out is None else out
        return self._slow_path(spec.ALL_REDUCE, (x, out, op), async_op, stream, code)

    @overload
    def reduce(
        self,
        x: A,
        root: int = ...,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> A: ...
    @overload
    def reduce(
        self,
        x: A,
        root: int = ...,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def reduce(
        self,
        x: A,
        root: int = 0,
        out: A | None = None,
        op: Operator = SUM,
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
        if not (code := self._fast.reduce(x, out, op, async_op, stream, root)):
            return x if out is None or root != self.rank else out
        return self._slow_path(spec.REDUCE, (x, root, out, op), async_op, stream, code)

    @overload
    def broadcast(
        self, x: A, root: int = ..., *, async_op: Literal[False] = ..., stream: Any = ...
    ) -> A: ...
    @overload
    def broadcast(
        self, x: A, root: int = ..., *, async_op: Literal[True], stream: Any = ...
    ) -> Work: ...
    def broadcast(self, x: A, root: int = 0, *, async_op: bool = False, stream: Any = None) -> Any:
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
        if not (code := self._fast.broadcast(x, None, root, async_op, stream)):
            return x
        return self._slow_path(spec.BROADCAST, (x, root), async_op, stream, code)

    @overload
    def all_gather(
        self, x: A, out: A | None = ..., *, async_op: Literal[False] = ..., stream: Any = ...
    ) -> A: ...
    @overload
    def all_gather(
        self, x: A, out: A | None = ..., *, async_op: Literal[True], stream: Any = ...
    ) -> Work: ...
    def all_gather(
        self, x: A, out: A | None = None, *, async_op: bool = False, stream: Any = None
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
        target = out if out is not None or async_op else new_stacked(x, self.nranks)
        if target is not None and not (
            code := self._fast.all_gather(x, target, 0, async_op, stream)
        ):
            return target
        return self._slow_path(spec.ALL_GATHER, (x, out), async_op, stream, code)

    @overload
    def reduce_scatter(
        self,
        x: A,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> A: ...
    @overload
    def reduce_scatter(
        self,
        x: A,
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def reduce_scatter(
        self,
        x: A,
        out: A | None = None,
        op: Operator = SUM,
        *,
        async_op: bool = False,
        stream: Any = None,
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
        target = out if out is not None or async_op else new_share(x, self.nranks)
        if target is not None and not (
            code := self._fast.reduce_scatter(x, target, op, async_op, stream)
        ):
            return target
        return self._slow_path(spec.REDUCE_SCATTER, (x, out, op), async_op, stream, code)

    @overload
    def all_to_all(
        self, x: A, out: A | None = ..., *, async_op: Literal[False] = ..., stream: Any = ...
    ) -> A: ...
    @overload
    def all_to_all(
        self, x: A, out: A | None = ..., *, async_op: Literal[True], stream: Any = ...
    ) -> Work: ...
    def all_to_all(
        self, x: A, out: A | None = None, *, async_op: bool = False, stream: Any = None
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
        target = out if out is not None or async_op else new_like(x)
        if target is not None and not (
            code := self._fast.all_to_all(x, target, 0, async_op, stream)
        ):
            return target
        return self._slow_path(spec.ALL_TO_ALL, (x, out), async_op, stream, code)

    @overload
    def gather(
        self,
        x: A,
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def gather(
        self,
        x: A,
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def gather(
        self,
        x: A,
        root: int = 0,
        out: A | None = None,
        *,
        async_op: bool = False,
        stream: Any = None,
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
        if not (code := self._fast.gather(x, out, root, None, None, async_op, stream)):
            return out if root == self.rank else None
        return self._slow_path(spec.GATHER, (x, root, out), async_op, stream, code)

    @overload
    def scatter(
        self,
        x: A | None = ...,
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> A: ...
    @overload
    def scatter(
        self,
        x: A | None = ...,
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def scatter(
        self,
        x: A | None = None,
        root: int = 0,
        out: A | None = None,
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
        if not (code := self._fast.scatter(x, out, root, None, None, async_op, stream)):
            return out
        return self._slow_path(spec.SCATTER, (x, root, out), async_op, stream, code)

    @overload
    def barrier(self, *, async_op: Literal[False] = ..., stream: Any = ...) -> None: ...
    @overload
    def barrier(self, *, async_op: Literal[True], stream: Any = ...) -> Work: ...
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
            return self._run_on_gpu(spec.BARRIER, (), async_op, stream)
        if not async_op and not (code := self._fast.barrier()):
            return None
        return self._slow_path(spec.BARRIER, (), async_op, stream, 0 if async_op else code)
