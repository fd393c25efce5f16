"""Exchange of rows between emulated GPUs: the bits of the dense sum in the order of ranks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout, lower, schedules
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.row_exchange import (
    ExchangeResult,
    Workspace,
    WorkspaceShape,
    check_schedule,
    kernel_specs,
    pack_exchange,
    signature,
)
from miraccl.executor.cuda.source import KernelSpec, write_source
from miraccl.schedule import row_schedules
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.schedule.verify import verify
from miraccl.types import Collective, DType, RedOp
from tests.gpu import emulator
from tests.gpu.emulator import EmulatedMachine, needs_compiler, weak_memory
from tests.gpu.emulator.collective import make_request

pytestmark = needs_compiler
THREADS, BLOCKS = 64, 3
ROW, CHUNK = layout.SPARSE_ROW_BYTES, layout.SPARSE_CHUNK_BYTES


class EmulatedExchange:
    """Workspaces of ``nranks`` emulated GPUs for arrays of up to ``nbytes``."""

    def __init__(self, nranks: int, nbytes: int, rows: int, timeout_s: float = 20.0) -> None:
        self.machine = EmulatedMachine(nranks, timeout_s)
        self.shape = WorkspaceShape(nranks=nranks, nbytes=nbytes, rows=rows)
        self.boxes = [np.zeros(self.shape.total_bytes + 16, np.uint8) for _ in range(nranks)]
        addresses = [-(-box.ctypes.data // 16) * 16 for box in self.boxes]
        self.workspace = Workspace(shape=self.shape, addresses=addresses)

    def result(self, rank: int) -> ExchangeResult:
        box, address = self.boxes[rank], self.workspace.addresses[rank]
        start = address - box.ctypes.data + layout.SPARSE_RESULT_OFFSET
        size = struct.calcsize(layout.SPARSE_RESULT)
        return ExchangeResult.unpack(box[start : start + size].tobytes(), self.shape.nranks)

    def is_cleared(self) -> bool:
        """Return True if no index has a word of rows that were not read."""
        start, end = layout.SPARSE_HEAD_BYTES, self.shape.nranks * self.shape.index_bytes
        return not any(
            box[(at := address - box.ctypes.data) + start : at + start + end].any()
            for box, address in zip(self.boxes, self.workspace.addresses, strict=True)
        )

    def launches(
        self,
        sources: Sequence[np.ndarray],
        targets: Sequence[np.ndarray],
        dtype: DType,
        op: RedOp = RedOp.SUM,
        *,
        limit: int | None = None,
        scalars: Sequence[float] = (),
    ) -> list[Any]:
        """Return the three launches of a call on all ranks: (kernel, arguments by rank, blocks)."""
        nranks = self.shape.nranks
        limit = self.shape.rows if limit is None else limit
        asked = make_request(
            Collective.ALL_REDUCE, dtype, sources[0].size, nranks, "two_shot", "simple"
        )
        requests = [
            replace(asked, op=op, scalar=scalars[rank] if scalars else 1.0)
            for rank in range(nranks)
        ]
        plan = replace(choose(asked), blocks=2, threads=THREADS)
        schedule = schedules.schedule_of(plan, asked, ())
        dense = schedules.kernel_for(plan, requests[0], schedule)
        found = []
        for spec in (*kernel_specs(nranks, dtype, op), replace(dense, gated=True)):
            args = []
            for rank, request in enumerate(requests):
                comm_args = self.machine.comm_args(rank)
                if spec.gated:
                    each = schedules.lower_plan(schedule, plan, request, comm_args)
                else:
                    each = pack_exchange(
                        comm_args,
                        self.workspace,
                        count=request.count if spec.reduces else request.block_bytes,
                        limit=limit,
                        scalar=lower.scalar_bits(request),
                        signature=signature(request, limit, 0),
                    )
                pointers = sources[rank].ctypes.data, targets[rank].ctypes.data
                struct.pack_into("<QQ", each, 0, *pointers)
                args.append(each)
            blocks = schedules.grid_blocks(plan, schedule) if spec.gated else BLOCKS
            found.append((replace(spec, threads=THREADS), args, blocks))
        return found


def placed(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """Return a copy that starts ``offset`` elements after a multiple of 16 bytes."""
    skip = offset * array.itemsize
    room = np.zeros(array.nbytes + 16 + skip, np.uint8)
    start = -room.ctypes.data % 16 + skip
    copy = room[start : start + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def sparse_inputs(
    nranks: int, count: int, dtype: DType, density: float, seed: int = 1
) -> list[np.ndarray]:
    """Return arrays of which ``density`` of the rows have one value, or are -0.0 or NaN."""
    rng, kind = np.random.default_rng(seed), NUMPY_DTYPE[dtype]
    per_row = ROW // kind.itemsize
    found = []
    for _ in range(nranks):
        x = np.zeros(count, kind)
        for start in range(0, count, per_row):
            if rng.random() < density:
                at = int(rng.integers(start, min(count, start + per_row)))
                x[at] = rng.integers(1, 9) / 4 if dtype.is_float else rng.integers(1, 9)
                if dtype.is_float and rng.random() < 0.3:
                    x[at] = rng.choice([-0.0, np.nan, 1e-40])
        found.append(x)
    return found


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.tobytes() == want.tobytes()


def check(
    exchange: EmulatedExchange,
    inputs: list[np.ndarray],
    dtype: DType,
    op: RedOp = RedOp.SUM,
    *,
    offset: int = 0,
    in_place: bool = True,
    **options: Any,
) -> None:
    """Run one call and compare with the dense sum in the order of ranks."""
    wants = [placed(x) for x in inputs]
    dense, args, blocks = exchange.launches(wants, wants, dtype, op, **options)[-1]
    exchange.machine.launch(replace(dense, gated=False), args, blocks)
    sources = [placed(x, offset) for x in inputs]
    targets = sources if in_place else [placed(np.full_like(x, 7), offset) for x in inputs]
    exchange.machine.launch_in_a_row(exchange.launches(sources, targets, dtype, op, **options))
    assert exchange.machine.errors() == [0] * len(inputs)
    for got, want in zip(targets, wants, strict=True):
        assert same_bits(got, want)
    assert exchange.is_cleared()


CASES = [
    (2, DType.FLOAT32, RedOp.SUM),
    (3, DType.BFLOAT16, RedOp.AVG),
    (2, DType.INT32, RedOp.MIN),
    (4, DType.FLOAT64, RedOp.MAX),
    (2, DType.UINT8, RedOp.PROD),
    (2, DType.FLOAT16, RedOp.SUM),
]


@pytest.mark.parametrize(("nranks", "dtype", "op"), CASES)
def test_same_bits(nranks: int, dtype: DType, op: RedOp) -> None:
    """Densities, ends within rows and vectors, addresses, and outputs follow one another."""
    exchange = EmulatedExchange(nranks, 10 * CHUNK, 160)
    for number, (density, nbytes, offset, in_place) in enumerate(
        (
            (0.0, 8 * CHUNK, 0, True),
            (0.1, 8 * CHUNK, 0, True),
            (0.1, 7 * CHUNK + 5 * ROW + 8, 1, False),
            (1.0, 2 * CHUNK + 40, 0, False),
            (0.5, 40, 0, True),
        )
    ):
        count = nbytes // NUMPY_DTYPE[dtype].itemsize
        inputs = sparse_inputs(nranks, count, dtype, density, number)
        check(exchange, inputs, dtype, op, offset=offset, in_place=in_place)
        results = {exchange.result(rank) for rank in range(nranks)}
        assert len(results) == 1
        (result,) = results
        assert (result.number, result.by_rows) == (number + 1, True)
        rows = [
            np.pad(x.view(np.uint8), (0, -x.nbytes % ROW)).reshape(-1, ROW).any(axis=1)
            for x in inputs
        ]
        assert result.sent == tuple(int(each.sum()) for each in rows)
        assert result.union == int(np.any(rows, axis=0).sum())


@pytest.mark.parametrize("scalars", [(-1.0, 2.0), (0.0, 0.5)])
def test_factors(scalars: tuple[float, float]) -> None:
    """Factors turn zeros into -0.0, and values into zeros that must be written."""
    exchange = EmulatedExchange(2, 4 * CHUNK, 64)
    inputs = sparse_inputs(2, 4 * CHUNK // 4 - 3, DType.FLOAT32, 0.2)
    check(exchange, inputs, DType.FLOAT32, RedOp.PREMUL_SUM, scalars=scalars)


@pytest.mark.parametrize("one_rank", [True, False])
def test_too_many_rows_open_the_gate(one_rank: bool) -> None:
    """The dense sum runs on all ranks if one has more rows than allowed, and only then."""
    exchange = EmulatedExchange(2, 8 * CHUNK, 40)
    count = 8 * CHUNK // 4
    for number, (density, by_rows) in enumerate(((0.1, True), (0.9, False), (0.1, True))):
        inputs = sparse_inputs(2, count, DType.FLOAT32, density, number)
        if one_rank:
            inputs[1] = sparse_inputs(2, count, DType.FLOAT32, 0.05, number)[1]
        check(exchange, inputs, DType.FLOAT32, in_place=number != 1)
        assert exchange.result(0).by_rows is exchange.result(1).by_rows is by_rows
    # a dense launch counts, one behind a closed gate does not; ``check`` adds one to each call
    assert [exchange.machine.launches(rank) for rank in range(2)] == [7, 7]


@pytest.mark.parametrize("density", [0.1, 0.95])
def test_sample(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose sample has too many rows stops early; that is no error of the estimate."""

    def changed(spec: KernelSpec, arch: int, machine: str | None = None) -> str:
        text = write_source(spec, arch, machine)
        return text.replace("MIN_SAMPLES 64", "MIN_SAMPLES 1").replace("SHARE 16", "SHARE 4")

    monkeypatch.setitem(vars(emulator), "write_source", changed)
    exchange = EmulatedExchange(2, 16 * CHUNK, 128)
    for number in range(3):
        inputs = sparse_inputs(2, 16 * CHUNK // 4, DType.FLOAT32, density, number)
        check(exchange, inputs, DType.FLOAT32)
        assert exchange.result(0).by_rows is (density < 0.5)
        # far from all rows were found, and the count is above the limit
        if density > 0.5:
            assert min(exchange.result(0).sent) > 128


def many_errors(seed: int, calls: int = 4) -> list[str]:
    """Run calls in a row, ranks unsynchronised, and return their differences."""
    exchange = EmulatedExchange(2, 4 * CHUNK, 64, timeout_s=60.0)
    launches, held = [], []
    for number in range(calls):
        inputs = sparse_inputs(2, 4 * CHUNK // 4, DType.INT32, 0.4, number)
        sources = [placed(x) for x in inputs]
        launches += exchange.launches(sources, sources, DType.INT32)
        held.append((sources, inputs[0] + inputs[1]))
    with weak_memory(seed):
        exchange.machine.launch_in_a_row(launches)
    wrong = [
        f"call {number}, rank {rank}"
        for number, (sources, want) in enumerate(held)
        for rank, got in enumerate(sources)
        if not same_bits(got, want)
    ]
    return wrong + [f"error {error}" for error in exchange.machine.errors() if error]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_weak_memory(seed: int) -> None:
    assert many_errors(seed) == []


def test_missing_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait for workspaces a rank overwrites rows that a peer has not read."""

    def changed(spec: KernelSpec, arch: int, machine: str | None = None) -> str:
        text = write_source(spec, arch, machine)
        return text.replace("if (await_workspaces(x)) return;", "")

    monkeypatch.setitem(vars(emulator), "write_source", changed)
    assert any(many_errors(seed) for seed in range(1, 400))


def test_schedule_is_proved() -> None:
    for nranks in (2, 3, 8):
        verify(row_schedules.build_one_shot(nranks))
        assert check_schedule(nranks) == "sparse_one_shot"


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_schedules, "build_one_shot", row_schedules.build)
    with pytest.raises(InvalidUsage, match="allowed is one message to each peer"):
        check_schedule.__wrapped__(3)
