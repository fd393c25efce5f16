"""Public collectives with counts per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miraccl.ops import spec
from miraccl.ops.prepare import new_flat
from miraccl.runtime.dispatch import Dispatcher
from miraccl.types import Operator, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.work import Work

SUM = RedOp.SUM
#: Array type: NumPy array, PyTorch tensor, CuPy array and so on.
A = TypeVar("A")


class UnevenCollectives(Dispatcher):
    """Collectives with a count for each rank."""

    @overload
    def all_gather_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def all_gather_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def all_gather_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = None,
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
        target = out if out is not None or async_op else new_flat(x, counts)
        if target is not None and not (
            code := self._fast.all_gather_v(x, target, None, None, counts, async_op, stream)
        ):
            return target
        return self._slow_path(spec.ALL_GATHER_V, (x, counts, out), async_op, stream, code)

    @overload
    def reduce_scatter_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def reduce_scatter_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = ...,
        op: Operator = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def reduce_scatter_v(
        self,
        x: A,
        counts: Sequence[int],
        out: A | None = None,
        op: Operator = SUM,
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
        if not (code := self._fast.reduce_scatter_v(x, out, op, async_op, stream, counts)):
            return out
        return self._slow_path(spec.REDUCE_SCATTER_V, (x, counts, out, op), async_op, stream, code)

    @overload
    def all_to_all_v(
        self,
        x: A,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def all_to_all_v(
        self,
        x: A,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def all_to_all_v(
        self,
        x: A,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: A | None = None,
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
        target = out if out is not None or async_op else new_flat(x, recv_counts)
        if target is not None and not (
            code := self._fast.all_to_all_v(
                x, target, None, send_counts, recv_counts, async_op, stream
            )
        ):
            return target
        return self._slow_path(
            spec.ALL_TO_ALL_V, (x, send_counts, recv_counts, out), async_op, stream, code
        )

    @overload
    def gather_v(
        self,
        x: A,
        counts: Sequence[int],
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def gather_v(
        self,
        x: A,
        counts: Sequence[int],
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def gather_v(
        self,
        x: A,
        counts: Sequence[int],
        root: int = 0,
        out: A | None = None,
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
        if not (code := self._fast.gather_v(x, out, root, None, counts, async_op, stream)):
            return out if root == self.rank else None
        return self._slow_path(spec.GATHER_V, (x, counts, root, out), async_op, stream, code)

    @overload
    def scatter_v(
        self,
        x: A | None,
        counts: Sequence[int],
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> Any: ...
    @overload
    def scatter_v(
        self,
        x: A | None,
        counts: Sequence[int],
        root: int = ...,
        out: A | None = ...,
        *,
        async_op: Literal[True],
        stream: Any = ...,
    ) -> Work: ...
    def scatter_v(
        self,
        x: A | None,
        counts: Sequence[int],
        root: int = 0,
        out: A | None = None,
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
        if not (code := self._fast.scatter_v(x, out, root, counts, None, async_op, stream)):
            return out
        return self._slow_path(spec.SCATTER_V, (x, counts, root, out), async_op, stream, code)
