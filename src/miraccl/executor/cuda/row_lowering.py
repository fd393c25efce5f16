"""Lowering of schedules of rows to launches of the kernels of ``source/rows.cuh``.

A step of a schedule with tables becomes one launch: SEND gathers the rows of its table into a
message, RECV scatters a message, RECV_REDUCE_ALL folds the messages of its peers and its own array.
Rows are arguments of a run, as on CPUs (``schedule.rows``): a launch names table and part, and
``pack_args`` takes the lists of one run. Scan and list make these from the array itself.

Messages lie in memory that the receiver addresses; who waits for whom is not decided here.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.source import KernelSpec
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule
from miraccl.schedule.rows import operand_tables
from miraccl.types import DType, RedOp

THREADS, LIST_THREADS = 256, 1024


class RowKernel(enum.Enum):
    """Kernels on rows; the value is the family of ``KernelSpec``."""

    SCAN = "row_scan"
    LIST = "row_list"
    GATHER = "row_gather"
    SCATTER = "row_scatter"
    FOLD = "row_fold"


@dataclass(frozen=True, kw_only=True)
class RowLaunch:
    """Launch of one step.

    Attributes:
        table, part: Rows to handle.
        source, target: Buffer that is read or written; None is a message.
        peers: Of a gather the receiver, of a scatter the sender, of a fold all operands in order.
        operand_tables: Of a fold, the table of each operand.
    """

    kernel: RowKernel
    table: int
    part: int
    source: Buffer | None
    target: Buffer | None
    peers: tuple[int, ...]
    operand_tables: tuple[int, ...] = ()


def kernel_spec(kernel: RowKernel, nranks: int, dtype: DType, op: RedOp = RedOp.SUM) -> KernelSpec:
    """Return the kernel to compile; only a fold depends on type and operator."""
    folds = kernel is RowKernel.FOLD
    return KernelSpec(
        family=kernel.value,
        nranks=nranks,
        dtype=dtype if folds else DType.UINT8,
        op=op if folds else RedOp.SUM,
        reduces=folds,
        threads=LIST_THREADS if kernel is RowKernel.LIST else THREADS,
        # 64 registers hold the vectors in flight
        min_blocks=4 if kernel is RowKernel.SCAN else 1,
    )


def lower_rows(schedule: Schedule, rank: int) -> tuple[RowLaunch, ...]:
    """Return the launches of ``rank`` in program order.

    Raises:
        InvalidUsage: The schedule has no tables, several channels, or other steps.
    """
    if not schedule.tables or schedule.nchannels != 1:
        raise InvalidUsage(f"cannot lower {schedule.name} by rows: it needs tables and one channel")
    operands = operand_tables(schedule)
    found = []
    for number, step in enumerate(schedule.channels[0][rank]):
        if step.op is Op.SEND and step.src is not None and step.send_peer is not None:
            found.append(_move(RowKernel.GATHER, schedule, step.src, step.send_peer))
        elif step.op is Op.RECV and step.dst is not None and step.recv_peer is not None:
            found.append(_move(RowKernel.SCATTER, schedule, step.dst, step.recv_peer))
        elif step.op is Op.RECV_REDUCE_ALL and step.dst is not None:
            fold = _move(RowKernel.FOLD, schedule, step.dst, rank)
            found.append(
                RowLaunch(
                    kernel=RowKernel.FOLD,
                    table=fold.table,
                    part=fold.part,
                    source=step.src.buffer if step.src is not None else None,
                    target=step.dst.buffer,
                    peers=step.peers,
                    operand_tables=operands[0, rank, number],
                )
            )
        else:
            raise InvalidUsage(
                f"cannot lower {schedule.name} by rows: rank {rank}, step {number} is"
                f" {step.op.name}; allowed are SEND, RECV and RECV_REDUCE_ALL"
            )
    return tuple(found)


def _move(kernel: RowKernel, schedule: Schedule, ref: Ref, peer: int) -> RowLaunch:
    if ref.chunks != 1 or ref.table is None:
        raise InvalidUsage(
            f"cannot lower {schedule.name} by rows: {ref} is not one chunk of a table"
        )
    return RowLaunch(
        kernel=kernel,
        table=ref.table,
        part=ref.index % schedule.parts,
        source=ref.buffer if kernel is RowKernel.GATHER else None,
        target=ref.buffer if kernel is not RowKernel.GATHER else None,
        peers=(peer,),
    )


def pack_args(
    nranks: int,
    *,
    row_bytes: int,
    total_bytes: int,
    source: int = 0,
    target: int = 0,
    bitmap: tuple[int, int] = (0, 0),
    rows: tuple[int, int] = (0, 0),
    found: int = 0,
    own: int | None = None,
    operands: Sequence[tuple[int, int, int]] = (),
) -> bytes:
    """Return the argument of a kernel.

    Args:
        row_bytes, total_bytes: Bytes of a row and of the array.
        source, target: Addresses of what is read and written.
        bitmap: Address and words.
        rows: Address of a list of int64, and its length; of ``row_list`` the address alone counts.
        found: Address of a word for the length of the list that ``row_list`` writes.
        own: Position of the operand that is an array; None if all are messages.
        operands: Of a fold, (address, address of its rows, number of rows) of each.
    """
    if len(operands) > nranks:
        raise ValueError(f"cannot fold {len(operands)} operands of {nranks} ranks")
    columns = list(zip(*operands, strict=True)) or [()] * 3
    padded = [list(column) + [0] * (nranks - len(column)) for column in columns]
    head = (source, target, row_bytes, total_bytes, *bitmap, *rows, found)
    words = [*head, nranks if own is None else own, *padded[0], *padded[1], *padded[2]]
    return struct.pack(f"<{len(words)}Q", *words)
