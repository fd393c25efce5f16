"""Sum of arrays that are mostly zero over the GPUs of a host: workspace, launches and result.

Runs ``row_schedules.build_one_shot``: every rank sends its rows to every other, and each sums the
union in the order of ranks. The sends of a rank are one kernel, fused with the scan that finds the
rows; receipts and sum are another (source/row_exchange.cuh). A third launch, the dense sum, is
gated: it does nothing unless some rank had too many rows. Numbers of rows never pass through the
host, so a call neither waits nor allocates, and a CUDA graph may capture it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout, schedules
from miraccl.executor.cuda.launch import KernelLaunch, Kernels
from miraccl.executor.cuda.lower import CommArgs, pack_args, scalar_bits
from miraccl.executor.cuda.plan import DevicePlan, Request
from miraccl.executor.cuda.row_lowering import RowKernel, lower_rows
from miraccl.executor.cuda.source import KernelSpec
from miraccl.schedule import row_schedules
from miraccl.types import DType, RedOp

#: Threads of a block and blocks per multiprocessor: 64 registers, a warp's chunk of 4 KiB in each.
THREADS, BLOCKS_PER_SM = 512, 2
#: A sample must exceed the limit by this factor, as it may have found more rows than there are.
SAMPLE_MARGIN = 1.125


@dataclass(frozen=True, kw_only=True)
class WorkspaceShape:
    """Sizes of the workspaces, the same on all ranks.

    Attributes:
        nbytes: Bytes of the largest array.
        rows: Most rows that a rank may send.
    """

    nranks: int
    nbytes: int
    rows: int

    @property
    def index_bytes(self) -> int:
        """Bytes of the index of one rank's rows."""
        chunks = -(-self.nbytes // layout.SPARSE_CHUNK_BYTES)
        return -(-8 * chunks // layout.SPARSE_ROW_BYTES) * layout.SPARSE_ROW_BYTES

    @property
    def list_bytes(self) -> int:
        """Bytes of one rank's rows."""
        return self.rows * layout.SPARSE_ROW_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of the workspace of a rank."""
        lists = (self.nranks - 1) * self.list_bytes
        return layout.SPARSE_HEAD_BYTES + self.nranks * self.index_bytes + lists


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Workspaces of all ranks: their shape, and their addresses on this rank's GPU."""

    shape: WorkspaceShape
    addresses: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class ExchangeResult:
    """Result of an operation, as the GPU has found it.

    Attributes:
        number: Operations until now, this one included.
        by_rows: The rows were summed; else the gate was opened for the dense sum.
        union: Rows with any bit set on some rank; 0 unless ``by_rows``.
        sent: Such rows of each rank, or those found until there were too many.
    """

    number: int
    by_rows: bool
    union: int
    sent: tuple[int, ...]

    @classmethod
    def unpack(cls, data: bytes, nranks: int) -> ExchangeResult:
        number, by_rows, union, *sent = struct.unpack(layout.SPARSE_RESULT, data)
        return cls(number=number, by_rows=bool(by_rows), union=union, sent=tuple(sent[:nranks]))


RESULT_BYTES = struct.calcsize(layout.SPARSE_RESULT)


def kernel_specs(nranks: int, dtype: DType, op: RedOp) -> tuple[KernelSpec, KernelSpec]:
    """Return the kernels that send and that sum.

    What is sent depends on type and operator only if this rank's factor makes or clears bits.
    """
    scales = op is RedOp.PREMUL_SUM
    send, reduce = (
        KernelSpec(
            family=family,
            nranks=nranks,
            dtype=dtype if reduces else DType.UINT8,
            op=op if reduces else RedOp.SUM,
            reduces=reduces,
            threads=THREADS,
            min_blocks=BLOCKS_PER_SM,
        )
        for family, reduces in (("row_send", scales), ("row_reduce", True))
    )
    return send, reduce


@lru_cache(maxsize=64)
def check_schedule(nranks: int) -> str:
    """Return the name of the schedule that the kernels run.

    Raises:
        InvalidUsage: The kernels cannot run it: they send all rows of a rank to every other, and
            sum in the order of ranks.
    """
    schedule = row_schedules.build_one_shot(nranks)
    for rank in range(nranks):
        launches = lower_rows(schedule, rank)
        sends = [launch for launch in launches if launch.kernel is RowKernel.GATHER]
        peers = sorted(launch.peers[0] for launch in sends)
        others = [peer for peer in range(nranks) if peer != rank]
        sums = [launch for launch in launches if launch.kernel is RowKernel.FOLD]
        right = (
            len(launches) == len(sends) + len(sums)
            and peers == others
            and [launch.peers for launch in sums] == [tuple(range(nranks))]
        )
        if not right:
            raise InvalidUsage(
                f"cannot run {schedule.name} by an exchange of rows: rank {rank} sends to {peers}"
                f" and has {len(sums)} sums; allowed is one message to each peer and one sum in"
                " the order of ranks"
            )
    return schedule.name


def signature(request: Request, limit: int, agreed: int) -> int:
    """Return a 32-bit hash of the operation, on which all ranks must agree.

    ``agreed``: hash of further arguments of the call.
    """
    fields = (request.collective, request.dtype, request.op, request.count, limit, agreed)
    return zlib.crc32(repr(("rows", *map(int, fields))).encode())


def pack_exchange(
    comm_args: CommArgs,
    workspace: Workspace,
    *,
    count: int,
    limit: int,
    scalar: int,
    signature: int,
) -> bytearray:
    """Pack struct RowExchange; ``count``: elements of the kernel's type."""
    args = pack_args(
        comm_args, count=count, scalar=scalar, signature=signature, needs=layout.NEEDS_ALL
    )
    shape = workspace.shape
    words = (
        limit,
        shape.index_bytes,
        shape.list_bytes,
        int(limit * SAMPLE_MARGIN),
        *workspace.addresses,
    )
    return args + bytearray(struct.pack(f"<{len(words)}Q", *words))


def exchange_plan(request: Request) -> DevicePlan:
    """Return the plan of an exchange of rows."""
    return DevicePlan(
        algo=check_schedule(request.nranks),
        proto="rows",
        blocks=BLOCKS_PER_SM * request.multiprocessors,
        threads=THREADS,
        unroll=layout.SPARSE_CHUNK_BYTES // (32 * 16),
        min_blocks=BLOCKS_PER_SM,
    )


class RowExchangeLaunch:
    """Launches of one sparse sum of one size: scan and send, sum, and the gated dense sum.

    Args:
        limit: Most rows that a rank sends; with more, the dense sum runs.
        dense: Plan of the dense sum, in the order of ranks.
        agreed: Hash of arguments of the call that all ranks must share.
    """

    def __init__(
        self,
        kernels: Kernels,
        request: Request,
        comm_args: CommArgs,
        workspace: Workspace,
        *,
        limit: int,
        dense: DevicePlan,
        agreed: int,
    ) -> None:
        self.plan = exchange_plan(request)
        self.threads = self.plan.blocks * self.plan.threads
        number = signature(request, limit, agreed)
        self._launches = []
        for spec in kernel_specs(request.nranks, request.dtype, request.op):
            args = pack_exchange(
                comm_args,
                workspace,
                count=request.count if spec.reduces else request.block_bytes,
                limit=limit,
                scalar=scalar_bits(request),
                signature=number,
            )
            function = kernels.function(spec)
            self._launches.append(
                KernelLaunch(kernels.gpu, function, self.plan, self.plan.blocks, args)
            )
        self._dense = prepare_gated(kernels, dense, request, comm_args)

    @property
    def signatures(self) -> tuple[int, ...]:
        """Signatures of the launches in op records."""
        return (*self._launches[1].signatures, *self._dense.signatures)

    def run(self, source: int, target: int, stream: int) -> None:
        """Enqueue in ``stream``, reading at ``source`` and writing at ``target``."""
        for launch in (*self._launches, self._dense):
            launch.run(source, target, stream)


def prepare_gated(
    kernels: Kernels, plan: DevicePlan, request: Request, comm_args: CommArgs
) -> KernelLaunch:
    """Prepare a launch that does nothing unless the launch before it has opened the gate."""
    schedule = schedules.schedule_of(plan, request, comm_args.order)
    spec = replace(schedules.kernel_for(plan, request, schedule), gated=True)
    args = schedules.lower_plan(schedule, plan, request, comm_args)
    blocks = schedules.grid_blocks(plan, schedule)
    return KernelLaunch(kernels.gpu, kernels.function(spec), plan, blocks, args)


def read_result(gpu: Any, workspace: Workspace, rank: int) -> ExchangeResult:
    """Read the result of the last completed operation; waits for the copy only."""
    address = workspace.addresses[rank] + layout.SPARSE_RESULT_OFFSET
    return ExchangeResult.unpack(gpu.read(address, RESULT_BYTES), workspace.shape.nranks)
