"""Sparse all-reduce on the GPUs of a host: choice, workspaces and launches of one communicator.

The host decides what follows from the size and the arguments alone; the GPUs decide between rows
and the dense sum (``executor.cuda.row_exchange``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.launch import KernelLaunch, Kernels
from miraccl.executor.cuda.row_exchange import (
    RowExchangeLaunch,
    Workspace,
    WorkspaceShape,
    read_result,
)
from miraccl.native.hashing import mix
from miraccl.ops.spec import ALL_REDUCE_SPARSE
from miraccl.planning import device_rows
from miraccl.runtime.gpu.engines import MAX_LAUNCHES

if TYPE_CHECKING:
    from miraccl.executor.cuda.lower import CommArgs
    from miraccl.executor.cuda.plan import DevicePlan, Request
    from miraccl.transport.cuda_p2p import WindowMemory

NAME = ALL_REDUCE_SPARSE.name
_ROWS = f"rows of {layout.SPARSE_ROW_BYTES} bytes that are not zero"


class DenseSum:
    """Launch of a dense sum in the order of ranks in place of an exchange of rows."""

    def __init__(self, launch: KernelLaunch, plan: DevicePlan) -> None:
        self._launch, self.plan = launch, plan
        self.threads, self.run = launch.threads, launch.run
        self.signatures = launch.signatures

    def last_plan(self) -> DevicePlan:
        """Return the plan of the last ``run``."""
        return self.plan


class RowSum:
    """Launch of an exchange of rows, and the plan that the GPU has chosen."""

    def __init__(
        self,
        launch: RowExchangeLaunch,
        request: Request,
        workspace: CountedWorkspace,
        gpu: Any,
        *,
        rank: int,
        limit: int,
    ) -> None:
        self._launch, self._request, self._workspace, self._gpu = launch, request, workspace, gpu
        self._rank, self._limit = rank, limit
        self.threads, self.signatures = launch.threads, launch.signatures
        self._rows = device_rows.count_rows(request.block_bytes)
        self.plan: DevicePlan = self._plan(self._open_choice("the GPU chooses"))

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream``, reading at ``source`` and writing at ``target``."""
        self._workspace.calls += 1
        self._launch.run(source, target, stream)

    def last_plan(self) -> DevicePlan:
        """Return the plan of the last completed operation, if that is the last one.

        It does not wait: while the operation runs, the plan says that the choice is open.
        """
        result = read_result(self._gpu, self._workspace.workspace, self._rank)
        if result.number < self._workspace.calls:
            return self._plan(self._open_choice("the GPU has not yet chosen"))
        density = sum(result.sent) / len(result.sent) / max(1, self._rows)
        if not result.by_rows:
            dense = device_rows.dense_plan(self._request)
            plan = self._plan(f"dense: {_ROWS}: more than {self._share:.1%} on a rank")
            return replace(plan, algo=dense.algo, proto=dense.proto, blocks=dense.blocks)
        union = result.union / max(1, self._rows)
        plan = self._plan(
            f"{_ROWS}: {density:.2%} on a rank, {union:.2%} on some rank; the dense sum runs from"
            f" {self._share:.1%} on"
        )
        return replace(plan, density=density, union=union)

    @property
    def _share(self) -> float:
        return self._limit / max(1, self._rows)

    def _open_choice(self, who: str) -> str:
        return (
            f"{who} between rows and the dense sum, which runs from {self._share:.1%} of {_ROWS} on"
        )

    def _plan(self, reason: str) -> device_rows.SparseDevicePlan:
        return device_rows.sparse_plan(
            self._launch.plan,
            reason=reason,
            block=layout.SPARSE_ROW_BYTES // self._request.dtype.itemsize,
            break_even=self._share,
        )


class CountedWorkspace:
    """Workspaces of all ranks in a window, and the calls enqueued that use them."""

    def __init__(self, shape: WorkspaceShape, window: WindowMemory) -> None:
        self.window, self.calls = window, 0
        self.workspace = Workspace(shape=shape, addresses=tuple(window.addresses))


class RowSums:
    """Sparse sums of one communicator.

    Args:
        open_window: Allocates memory on every rank, collectively; argument: bytes.
        direct: Every rank addresses every other's memory.
    """

    def __init__(
        self,
        kernels: Kernels,
        comm_args: CommArgs,
        open_window: Callable[[int], WindowMemory],
        direct: bool,
    ) -> None:
        self._kernels, self._comm_args = kernels, comm_args
        self._open_window, self._direct = open_window, direct
        # All live as long as the communicator: a graph may hold a workspace's address.
        self._workspaces: list[CountedWorkspace] = []
        self._launches: dict[tuple[Any, ...], DenseSum | RowSum] = {}

    def find_launch(
        self, request: Request, operator: Any, block: int, density: float | None, stream: int
    ) -> DenseSum | RowSum:
        """Return the launch of an operation, created on first use.

        Args:
            block, density: Arguments of the call that all ranks must share.
            stream: Stream of the call; workspaces cannot be made while it is captured.

        Raises:
            InvalidUsage: A workspace is needed during a capture.
            SystemFailure: A rank has no memory for a workspace.
        """
        key = (request.collective, request.dtype, request.count, operator, 0, block, density)
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            share = -1 if density is None else round(density * 1e6)
            launch = self._prepare(request, density, mix(block, share), stream)
            self._launches[key] = launch
        return launch

    def launches(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Return all launches by (collective, dtype, count, operator, root)."""
        return [(key[:5], launch) for key, launch in list(self._launches.items())]

    @property
    def nbytes(self) -> int:
        """Bytes of the workspaces of this rank."""
        return sum(each.window.nbytes for each in self._workspaces)

    def close(self) -> None:
        """Free the workspaces; no rank uses them."""
        workspaces, self._workspaces = self._workspaces, []
        for each in reversed(workspaces):
            each.window.close()

    def _prepare(
        self, request: Request, density: float | None, agreed: int, stream: int
    ) -> DenseSum | RowSum:
        rows = device_rows.count_rows(request.block_bytes)
        limit = device_rows.row_limit(request.block_bytes, request.nranks)
        share = limit / max(1, rows)
        if not self._direct:
            return self._prepare_dense(request, share, "ranks do not address each other's memory")
        if density is not None and density > share:
            return self._prepare_dense(request, share, f"a density of {density:.1%} is expected")
        if limit == 0:
            size = f"{request.block_bytes} bytes are too few for an exchange of rows"
            return self._prepare_dense(request, share, size)
        found = self._find_workspace(request, limit, stream)
        launch = RowExchangeLaunch(
            self._kernels,
            request,
            self._comm_args,
            found.workspace,
            limit=limit,
            dense=device_rows.dense_plan(request),
            agreed=agreed,
        )
        gpu, rank = self._kernels.gpu, self._comm_args.rank
        return RowSum(launch, request, found, gpu, rank=rank, limit=limit)

    def _prepare_dense(self, request: Request, share: float, why: str) -> DenseSum:
        asked = device_rows.dense_request(request)
        plan = device_rows.dense_plan(request)
        launch = self._kernels.prepare(plan, asked, self._comm_args)
        reason = f"dense: {why}; the break-even density is {share:.1%}"
        return DenseSum(launch, device_rows.sparse_plan(plan, reason=reason, break_even=share))

    def _find_workspace(self, request: Request, limit: int, stream: int) -> CountedWorkspace:
        """Return a workspace for the request; all ranks make or find the same one."""
        for each in self._workspaces:
            shape = each.workspace.shape
            if shape.nbytes >= request.block_bytes and shape.rows >= limit:
                return each
        if self._kernels.gpu.is_capturing(stream):
            raise InvalidUsage(
                f"cannot capture {NAME} of {request.block_bytes} bytes: ranks make its workspace"
                " in the first call",
                rank=self._comm_args.rank,
                hint="call it once before the capture",
            )
        shape = device_rows.workspace_shape(request.block_bytes, request.nranks)
        self._workspaces.append(CountedWorkspace(shape, self._open_window(shape.total_bytes)))
        return self._workspaces[-1]
