"""Public sends and receives, and persistent operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miraccl.ops import spec
from miraccl.runtime.dispatch import Dispatcher
from miraccl.types import Operator, RedOp

if TYPE_CHECKING:
    from miraccl.runtime.gpu.persistent import DevicePersistent
    from miraccl.runtime.persistent import Persistent
    from miraccl.runtime.work import Work

SUM = RedOp.SUM
#: Array type: NumPy array, PyTorch tensor, CuPy array and so on.
A = TypeVar("A")


class Messages(Dispatcher):
    """Sends and receives."""

    @overload
    def send(
        self, x: Any, dst: int, *, async_op: Literal[False] = ..., stream: Any = ...
    ) -> None: ...
    @overload
    def send(self, x: Any, dst: int, *, async_op: Literal[True], stream: Any = ...) -> Work: ...
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
        code = self._fast.send(x, dst, async_op, stream)
        if not code:
            return None
        return self._slow_path(spec.SEND, (x, dst), async_op, stream, code)

    @overload
    def recv(self, x: A, src: int, *, async_op: Literal[False] = ..., stream: Any = ...) -> A: ...
    @overload
    def recv(self, x: A, src: int, *, async_op: Literal[True], stream: Any = ...) -> Work: ...
    def recv(self, x: A, src: int, *, async_op: bool = False, stream: Any = None) -> Any:
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
        code = self._fast.recv(x, src, async_op, stream)
        if not code:
            return x
        return self._slow_path(spec.RECV, (x, src), async_op, stream, code)

    @overload
    def sendrecv(
        self,
        x: Any,
        dst: int,
        out: A,
        src: int,
        *,
        async_op: Literal[False] = ...,
        stream: Any = ...,
    ) -> A: ...
    @overload
    def sendrecv(
        self, x: Any, dst: int, out: A, src: int, *, async_op: Literal[True], stream: Any = ...
    ) -> Work: ...
    def sendrecv(
        self, x: Any, dst: int, out: A, src: int, *, async_op: bool = False, stream: Any = None
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
        code = self._fast.sendrecv(x, dst, out, src, async_op, stream)
        if not code:
            return out
        return self._slow_path(spec.SENDRECV, (x, dst, out, src), async_op, stream, code)


class PersistentOperations(Dispatcher):
    """Operations whose arguments are checked and planned once."""

    def all_reduce_init(
        self, x: Any, out: Any = None, op: Operator = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_reduce``: ``op = comm.all_reduce_init(x)`` checks and plans
        once.

        Each ``op()`` runs on the same buffers.  All ranks create and call persistent operations in
        the same order.

        Args:
            x: Array to reduce, of any shape; reduced in place without ``out``.
            out: Array of the same size for the result.
            op: Reduction operator.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``all_reduce``
                does.
        """
        return self._make_persistent(spec.ALL_REDUCE, (x, out, op))

    def all_gather_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_gather`` (see ``all_reduce_init``).

        Args:
            x: This rank's block.
            out: Array of ``nranks`` blocks; created if it is None.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``all_gather``
                does.
        """
        return self._make_persistent(spec.ALL_GATHER, (x, out))

    def reduce_scatter_init(
        self, x: Any, out: Any = None, op: Operator = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``reduce_scatter`` (see ``all_reduce_init``).

        Args:
            x: Array of ``nranks`` blocks.
            out: Array for this rank's block; created if it is None.
            op: Reduction operator.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what
                ``reduce_scatter`` does.
        """
        return self._make_persistent(spec.REDUCE_SCATTER, (x, out, op))

    def broadcast_init(self, x: Any, root: int = 0) -> Persistent | DevicePersistent:
        """Prepare a persistent ``broadcast`` (see ``all_reduce_init``).

        Args:
            x: Array that the root sends and the other ranks receive into.
            root: Rank that sends.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``broadcast``
                does.
        """
        return self._make_persistent(spec.BROADCAST, (x, root))

    def reduce_init(
        self, x: Any, root: int = 0, out: Any = None, op: Operator = SUM
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``reduce`` (see ``all_reduce_init``).

        Args:
            x: Array to reduce.
            root: Rank that gets the result.
            out: Array for the result, on the root only; in place without it.
            op: Reduction operator.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``reduce`` does.
        """
        return self._make_persistent(spec.REDUCE, (x, root, out, op))

    def all_to_all_init(self, x: Any, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``all_to_all`` (see ``all_reduce_init``).

        Args:
            x: Array of ``nranks`` blocks, one for each rank.
            out: Array for the blocks of all ranks; created if it is None.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``all_to_all``
                does.
        """
        return self._make_persistent(spec.ALL_TO_ALL, (x, out))

    def gather_init(self, x: Any, root: int = 0, out: Any = None) -> Persistent | DevicePersistent:
        """Prepare a persistent ``gather`` (see ``all_reduce_init``).

        Args:
            x: This rank's block.
            root: Rank that gets all blocks.
            out: Array of ``nranks`` blocks, on the root only; created if it is None.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``gather`` does.
        """
        return self._make_persistent(spec.GATHER, (x, root, out))

    def scatter_init(
        self, x: Any = None, root: int = 0, out: Any = None
    ) -> Persistent | DevicePersistent:
        """Prepare a persistent ``scatter`` (see ``all_reduce_init``).

        Args:
            x: Array of ``nranks`` blocks, on the root only.
            root: Rank that has all blocks.
            out: Array for this rank's block.

        Raises:
            InvalidUsage: An argument is wrong; a call of the operation raises what ``scatter``
                does.
        """
        return self._make_persistent(spec.SCATTER, (x, root, out))
