"""Sums of arrays that are mostly zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from miraccl.errors import InvalidUsage
from miraccl.ops.device_arrays import is_gpu_array
from miraccl.ops.spec import ALL_REDUCE_COO, ALL_REDUCE_SPARSE, OpSpec
from miraccl.runtime import group as groups
from miraccl.runtime.dispatch import Dispatcher
from miraccl.runtime.work import Work
from miraccl.types import Operator, RedOp

if TYPE_CHECKING:
    from miraccl.planning.sparse_planner import SparseCandidate
    from miraccl.runtime.coo import CooReducer
    from miraccl.runtime.sparse import SparseReducer

SUM = RedOp.SUM
A = TypeVar("A")


class SparseCollectives(Dispatcher):
    """Sparse collectives of a communicator."""

    _sparse_reducer: SparseReducer | None = None
    _coo_reducer: CooReducer | None = None

    @overload
    def all_reduce_sparse(
        self,
        x: A,
        op: Operator = ...,
        *,
        out: A | None = ...,
        block: int | None = ...,
        density: float | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...
    @overload
    def all_reduce_sparse(
        self,
        x: A,
        op: Operator = ...,
        *,
        out: A | None = ...,
        block: int | None = ...,
        density: float | None = ...,
        async_op: Literal[True],
    ) -> Work: ...
    def all_reduce_sparse(
        self,
        x: A,
        op: Operator = SUM,
        *,
        out: A | None = None,
        block: int | None = None,
        density: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce ``x``, in which most blocks are zero, over all ranks; every rank gets the result.

        Blocks in which no bit is set stay where they are, all others are summed in rank order. The
        result has the same bits as ``all_reduce`` with ``deterministic=True``, -0.0 and NaN
        included. ``last_plan`` says the size of the blocks, their density, and why the dense
        schedule was chosen if it was.

        Args:
            x: Input, contiguous, in CPU or GPU memory, the same count and dtype on all ranks. On
                GPUs it runs in the current stream; those of several hosts sum rows on the CPU.
            op: Reduction: a ``RedOp`` or a ``PreMulSum``.
            out: Output of the same count and dtype; None reduces in place.
            block: Elements of a block; None chooses among 256 bytes to 16 KiB. The same on all
                ranks. GPUs of one host always use blocks of 256 bytes.
            density: Expected share of blocks that are not zero, from 0 to 1; None takes a sample,
                or on GPUs scans. The same on all ranks.
            async_op: Return a ``Work`` at once and run in the background.

        Returns:
            ``out`` if given, else ``x``; a ``Work`` with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations or passed different arguments.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        args = (x, op, out, block, density)
        self._check_no_group(ALL_REDUCE_SPARSE)
        for array in (x, out):
            if array is not None and is_gpu_array(array):
                self._sparse().check_options(block, density)
                return self._run_on_gpu(ALL_REDUCE_SPARSE, args, async_op, None, array)
        return self._sparse().reduce(args, async_op)

    def all_reduce_coo(
        self, indices: Any, values: Any, size: int, *, async_op: bool = False
    ) -> Any:
        """Add rows named by indices over all ranks; every rank gets the union.

        Rows are added in the order of ranks, a rank's duplicates before that in the order given.
        16- and 8-bit floats are rounded after the duplicates and once at the end.

        Args:
            indices: Row of each entry of ``values``, int32 or int64, from 0 to size - 1; unsorted,
                with duplicates, and empty if this rank has none.
            values: ``len(indices)`` rows of any shape, the same on all ranks.
            size: Rows of the whole array, up to 2^62; the same on all ranks.
            async_op: Return a ``Work`` at once and run in the background.

        Returns:
            (indices, values) as NumPy arrays: ascending indices without duplicates, and their sums;
            a ``Work`` of them with ``async_op``.

        Raises:
            InvalidUsage: An argument is not allowed; nothing was sent.
            CollectiveMismatch: Ranks called different operations or passed different arguments.
            CollectiveTimeout, PeerDied, CommunicatorAborted: The operation failed; the communicator
                is broken.
        """
        for array in (indices, values):
            if is_gpu_array(array):
                raise InvalidUsage(
                    f"cannot run {ALL_REDUCE_COO.name}: an array is in GPU memory; allowed is CPU"
                    " memory",
                    rank=self.rank,
                    hint="all_reduce and all_reduce_sparse take GPU memory",
                )
        self._check_no_group(ALL_REDUCE_COO)
        if self._coo_reducer is None:
            from miraccl.runtime.coo import CooReducer  # late: few programs need it

            self._coo_reducer = CooReducer(self._core)
        return self._coo_reducer.reduce(indices, values, size, async_op)

    def _check_no_group(self, spec: OpSpec) -> None:
        if groups.current() is not None:
            raise InvalidUsage(
                f"cannot run {spec.name} inside a group: it is more than one operation",
                rank=self.rank,
            )

    def explain_sparse(
        self,
        nbytes: int,
        dtype: Any = "float32",
        *,
        density: float = 0.01,
        block: int = 256,
        in_window: bool = False,
    ) -> list[SparseCandidate]:
        """Return rows and the dense schedule for ``all_reduce_sparse``, the chosen one first.

        Args:
            nbytes: Bytes of the array.
            dtype: Element type.
            density: Share of blocks that are not zero on each rank, from 0 to 1.
            block: Elements of a block.
            in_window: All ranks pass window memory (``comm.empty``).

        Returns:
            Two ``SparseCandidate`` records with predicted times and the break-even density.

        Raises:
            InvalidUsage: An argument is not allowed.
        """
        return self._sparse().explain(nbytes, dtype, density, block, in_window)

    def _explain_if_sparse(
        self,
        collective: Any,
        nbytes: int,
        dtype: Any,
        density: float,
        block: int,
        device: Any,
    ) -> list[SparseCandidate]:
        """Return the candidates if ``collective`` is the sparse sum, else an empty list."""
        if collective != ALL_REDUCE_SPARSE.name:
            return []
        if str(device) == "cpu":
            return self.explain_sparse(nbytes, dtype, density=density, block=block)
        self._sparse().check_options(block, density)
        _, nbytes, element = self._core.parse_explain_request("all_reduce", nbytes, dtype)
        gpu = self._gpu_by_name(device, "explain")
        with gpu.device_guard():
            return gpu.explain_rows(nbytes, element, density)

    def _sparse(self) -> SparseReducer:
        if self._sparse_reducer is None:
            from miraccl.runtime.sparse import SparseReducer  # late: few programs need it

            self._sparse_reducer = SparseReducer(self._core)
        return self._sparse_reducer
