"""Kernels on rows of sparse sums, on the emulated GPU: the same bits as the interpreter's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu import row_lists
from miraccl.executor.cuda.row_lowering import RowKernel, kernel_spec, lower_rows, pack_args
from miraccl.schedule import catalog, row_schedules
from miraccl.schedule.ir import Buffer
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.schedule.rows import interpret_rows, select_rows
from miraccl.types import Collective, DType, RedOp
from tests.gpu.emulator import launch, needs_compiler

pytestmark = needs_compiler
BLOCKS = 2


def run(kernel: RowKernel, nranks: int, dtype: DType = DType.UINT8, **args: Any) -> None:
    spec = kernel_spec(kernel, nranks, dtype, args.pop("op", RedOp.SUM))
    blocks = 1 if kernel is RowKernel.LIST else BLOCKS
    launch(spec, [pack_args(nranks, **args)], [blocks])


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def rows_of(table: np.ndarray) -> tuple[int, int]:
    return address(table), len(table)


def scan_and_list(x: np.ndarray, row_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bitmap and the list of the rows of ``x``."""
    words = row_lists.words_for(-(-x.nbytes // row_bytes))
    bitmap = np.full(words, -1, np.int64)
    size: dict[str, Any] = {
        "row_bytes": row_bytes,
        "total_bytes": x.nbytes,
        "bitmap": (address(bitmap), words),
    }
    run(RowKernel.SCAN, 2, source=address(x), **size)
    rows, found = np.full(64 * words, -1, np.int64), np.zeros(1, np.uint64)
    run(RowKernel.LIST, 2, rows=(address(rows), 0), found=address(found), **size)
    assert (rows[int(found[0]) :] == -1).all()
    return bitmap, rows[: int(found[0])]


@pytest.mark.parametrize(
    ("nbytes", "row_bytes", "offset"),
    [(256 * 200 - 12, 256, 0), (1, 4, 0), (48 * 65, 48, 4), (7 * 130 + 3, 7, 1), (4096, 8192, 0)],
)
def test_scan_and_list(nbytes: int, row_bytes: int, offset: int) -> None:
    rng = np.random.default_rng(nbytes)
    for density in (0.0, 0.1, 1.0):
        x = np.zeros(nbytes + 64, np.uint8)
        x = x[-address(x) % 16 + offset :][:nbytes]
        for start in range(0, nbytes, row_bytes):
            if rng.random() < density:
                end = min(nbytes, start + row_bytes)
                x[rng.integers(start, end)] = 1 << rng.integers(8)
        want = np.empty(row_lists.words_for(-(-nbytes // row_bytes)) + 1, np.int64)
        row_lists.scan(address(x), nbytes, row_bytes, want)
        bitmap, rows = scan_and_list(x, row_bytes)
        assert np.array_equal(bitmap, want[:-1])
        bits = np.unpackbits(bitmap.view(np.uint8), bitorder="little")
        assert np.array_equal(rows, np.flatnonzero(bits))


@pytest.mark.parametrize(
    ("nranks", "segments", "dtype", "op"),
    [
        (2, 1, DType.FLOAT32, RedOp.SUM),
        (3, 4, DType.BFLOAT16, RedOp.AVG),
        (2, 4, DType.INT32, RedOp.MIN),
    ],
)
def test_schedule(nranks: int, segments: int, dtype: DType, op: RedOp) -> None:
    """Run every launch of a schedule, messages being arrays, and compare with the interpreter."""
    schedule = row_schedules.build(nranks, segments)
    rng, kind, row, count = np.random.default_rng(7), NUMPY_DTYPE[dtype], 24, 24 * 90 - 5
    inputs = []
    for _ in range(nranks):
        mask = np.repeat(rng.random(90) < 0.3, row)[:count]
        values = rng.integers(-9, 9, count) if dtype is DType.INT32 else rng.normal(size=count)
        inputs.append(np.where(mask, values, -0.0 if dtype.is_float else 0).astype(kind))
    size: dict[str, Any] = {
        "row_bytes": row * kind.itemsize,
        "total_bytes": count * kind.itemsize,
    }
    bitmaps = []
    for x in inputs:
        bits, rows = np.zeros(90, bool), scan_and_list(x, size["row_bytes"])[1]
        bits[rows] = True
        bitmaps.append(bits)
    tables = select_rows(schedule, np.array(bitmaps), row, count)
    lists = [[np.ascontiguousarray(part) for part in parts] for parts in tables.lists]
    outputs = [np.zeros(count, kind) for _ in range(nranks)]
    messages: dict[tuple[int, int], list[np.ndarray]] = {}
    programs = [list(lower_rows(schedule, rank)) for rank in range(nranks)]

    def advance(rank: int) -> bool:
        """Run the next launch of a rank if its messages are there."""
        step = programs[rank][0]
        rows = lists[step.table][step.part]
        senders = [] if step.kernel is RowKernel.GATHER else [p for p in step.peers if p != rank]
        if not all(messages.get((peer, rank)) for peer in senders):
            return False
        programs[rank].pop(0)
        got = {peer: messages[peer, rank].pop(0) for peer in senders}
        if step.kernel is RowKernel.GATHER:
            source = (inputs if step.source is Buffer.INPUT else outputs)[rank]
            packed = np.zeros(max(1, len(rows) * row), kind)
            run(
                RowKernel.GATHER,
                nranks,
                source=address(source),
                target=address(packed),
                rows=rows_of(rows),
                **size,
            )
            messages.setdefault((rank, step.peers[0]), []).append(packed)
        elif step.kernel is RowKernel.SCATTER:
            run(
                RowKernel.SCATTER,
                nranks,
                source=address(got[step.peers[0]]),
                target=address(outputs[rank]),
                rows=rows_of(rows),
                **size,
            )
        else:
            operands = [
                (
                    address(inputs[rank] if peer == rank else got[peer]),
                    *rows_of(lists[table][step.part]),
                )
                for peer, table in zip(step.peers, step.operand_tables, strict=True)
            ]
            run(
                RowKernel.FOLD,
                nranks,
                dtype,
                op=op,
                target=address(outputs[rank]),
                rows=rows_of(rows),
                own=step.peers.index(rank),
                operands=operands,
                **size,
            )
        return True

    while any(programs):
        moved = [bool(programs[rank]) and advance(rank) for rank in range(nranks)]
        assert any(moved), "deadlock"
    for got, want in zip(outputs, interpret_rows(schedule, inputs, tables, op=op), strict=True):
        assert np.array_equal(got.view(np.uint8), want.view(np.uint8))


def test_refused() -> None:
    dense = catalog.build("two_shot", Collective.ALL_REDUCE, 2)
    with pytest.raises(InvalidUsage, match="needs tables and one channel"):
        lower_rows(dense, 0)
    with pytest.raises(ValueError, match="cannot fold 3 operands of 2 ranks"):
        pack_args(2, row_bytes=4, total_bytes=4, operands=[(0, 0, 0)] * 3)
