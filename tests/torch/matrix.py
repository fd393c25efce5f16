"""Every call on every type, against a plain computation and Gloo: the table of the PyTorch page."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from miraccl.errors import InvalidUsage
from miraccl.torch import BackendError
from miraccl.types import DType, RedOp
from tests.runtime.reference import compiled_operators
from tests.torch.worlds import LIMIT, equal, gloo, values, world

DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u64": torch.uint64,
    "u32": torch.uint32,
    "u16": torch.uint16,
    "u8": torch.uint8,
    "bool": torch.bool,
    "c64": torch.complex64,
    "c128": torch.complex128,
}
#: what NCCL has no type for. Not called: where a call is made of messages, its group stays open
#: after the error, and does nothing more
NOT_OF_NCCL = ("i16", "u64", "u32", "u16")
AS_GLOO, ALONE, OTHERWISE, REFUSED = "=", "✓", "≠", "–"
LEFT_OUT = ""  # a cell for TEST_SLOW=1
FACTOR = 2.0
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


#: Reductions that tests compile for some types only; AVG stands for all kernels with a scalar.
_COMPILED = {
    "PRODUCT": RedOp.PROD,
    "MIN": RedOp.MIN,
    "MAX": RedOp.MAX,
    "AVG": RedOp.AVG,
    "PREMUL_SUM": RedOp.AVG,
}
_TYPES = {
    "f64": DType.FLOAT64,
    "f32": DType.FLOAT32,
    "f16": DType.FLOAT16,
    "bf16": DType.BFLOAT16,
    "e4m3": DType.FLOAT8_E4M3,
    "e5m2": DType.FLOAT8_E5M2,
    "i64": DType.INT64,
    "i32": DType.INT32,
    "i8": DType.INT8,
    "u64": DType.UINT64,
    "u32": DType.UINT32,
    "u8": DType.UINT8,
    "c64": DType.FLOAT32,
    "c128": DType.FLOAT64,
}


def is_left_out(op: str, label: str) -> bool:
    """Return True if the kernel of a cell, a second of processor time, is for TEST_SLOW=1."""
    if op not in _COMPILED or label not in _TYPES:
        return False
    return _COMPILED[op] not in compiled_operators(_TYPES[label])


def reduce_op(name: str) -> Any:
    return (
        dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(dist.ReduceOp, name)
    )


def reduced(parts: list[Any], op: str) -> Any:
    """Compute a reduction in a wide type, rounded once; integers truncate, bools stay 0 and 1."""
    dtype = parts[0].dtype
    wide = (
        torch.complex128
        if dtype.is_complex
        else torch.float64
        if dtype.is_floating_point
        else torch.int64
    )
    total = functools.reduce(
        _FOLDS[op],
        [p.to(torch.float32).to(wide) if dtype.is_floating_point else p.to(wide) for p in parts],
    )
    if dtype is torch.bool:
        return total != 0
    if op == "AVG":
        total = (
            total / len(parts)
            if wide is not torch.int64
            else torch.div(total, len(parts), rounding_mode="trunc")
        )
    if op == "PREMUL_SUM":
        total = total * (FACTOR if wide is not torch.int64 else int(FACTOR))
    return (
        total.to(torch.float32) if dtype.is_floating_point and dtype.itemsize < 4 else total
    ).to(dtype)


class Cells:
    """Calls on one type: each takes the group and returns this rank's result; ``want`` is the
    reference.
    """

    def __init__(self, rank: int, nranks: int, dtype: Any, device: str = "cpu") -> None:
        self.rank, self.nranks = rank, nranks
        self.parts = [values(dtype, r) for r in range(nranks)]
        self.mine = self.parts[rank].to(device)

    def copy(self) -> Any:
        return self.mine.clone()

    def empties(self, count: int) -> list[Any]:
        return [
            torch.zeros(count, dtype=self.mine.dtype, device=self.mine.device)
            for _ in range(self.nranks)
        ]

    def halves(self) -> list[Any]:
        return list(self.copy().chunk(self.nranks))

    def share(self, whole: Any) -> Any:
        return whole.chunk(self.nranks)[self.rank]

    def all_reduce(self, group: Any, op: str) -> Any:
        x = self.copy()
        dist.all_reduce(x, op=reduce_op(op), group=group)
        return x

    def reduce(self, group: Any, op: str) -> Any:
        x = self.copy()
        dist.reduce(x, 1, op=reduce_op(op), group=group)
        return x if self.rank == 1 else self.mine

    def reduce_scatter(self, group: Any, op: str) -> Any:
        out = self.empties(self.mine.numel() // self.nranks)[0]
        dist.reduce_scatter(out, self.halves(), op=reduce_op(op), group=group)
        return out

    def reduce_scatter_tensor(self, group: Any, op: str) -> Any:
        out = self.empties(self.mine.numel() // self.nranks)[0]
        dist.reduce_scatter_tensor(out, self.copy(), op=reduce_op(op), group=group)
        return out

    def broadcast(self, group: Any) -> Any:
        x = self.copy()
        dist.broadcast(x, 1, group=group)
        return x

    def all_gather(self, group: Any) -> Any:
        outs = self.empties(self.mine.numel())
        dist.all_gather(outs, self.copy(), group=group)
        return torch.stack(outs)

    def all_gather_into_tensor(self, group: Any) -> Any:
        out = self.empties(self.nranks * self.mine.numel())[0]
        dist.all_gather_into_tensor(out, self.copy(), group=group)
        return out.view(self.nranks, -1)

    def all_to_all(self, group: Any) -> Any:
        outs = self.empties(self.mine.numel() // self.nranks)
        dist.all_to_all(outs, self.halves(), group=group)
        return torch.stack(outs)

    def all_to_all_single(self, group: Any) -> Any:
        out = torch.zeros_like(self.mine)
        dist.all_to_all_single(out, self.copy(), group=group)
        return out.view(self.nranks, -1)

    def gather(self, group: Any) -> Any:
        outs = self.empties(self.mine.numel()) if self.rank == 1 else None
        dist.gather(self.copy(), outs, dst=1, group=group)
        return self.mine if outs is None else torch.stack(outs)

    def scatter(self, group: Any) -> Any:
        out = self.empties(self.mine.numel() // self.nranks)[0]
        dist.scatter(out, self.halves() if self.rank == 1 else None, src=1, group=group)
        return out

    def send_recv(self, group: Any) -> Any:
        out = torch.zeros_like(self.mine)
        to, fro = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        ops = [
            dist.P2POp(dist.isend, self.copy(), to, group),
            dist.P2POp(dist.irecv, out, fro, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out

    def wanted(self, call: str, op: str) -> Any:
        if op:
            total = reduced(self.parts, op)
            return {
                "all_reduce": total,
                "reduce": total if self.rank == 1 else self.parts[self.rank],
            }.get(call, self.share(total))
        everything = torch.stack(self.parts)
        return {
            "broadcast": self.parts[1],
            "all_gather": everything,
            "all_gather_into_tensor": everything,
            "all_to_all": torch.stack([self.share(p) for p in self.parts]),
            "all_to_all_single": torch.stack([self.share(p) for p in self.parts]),
            "gather": everything if self.rank == 1 else self.parts[self.rank],
            "scatter": self.share(self.parts[1]),
            "send_recv": self.parts[(self.rank - 1) % self.nranks],
        }[call]


ROWS = [
    *(("all_reduce", op) for op in OPS),
    *(
        (call, op)
        for call in ("reduce", "reduce_scatter", "reduce_scatter_tensor")
        for op in ("SUM", "MAX", "BOR")
    ),
    *(
        (call, "")
        for call in (
            "broadcast",
            "all_gather",
            "all_gather_into_tensor",
            "all_to_all",
            "all_to_all_single",
        )
    ),
    *((call, "") for call in ("gather", "scatter", "send_recv")),
]


def measure_on_gpu(path: str) -> dict[str, dict[str, str]]:
    """Compute the table for GPU memory, beside NCCL if every rank has its own GPU."""
    with world(path) as (rank, nranks):
        count = torch.cuda.device_count()
        torch.cuda.set_device(rank % count)
        other = dist.new_group(backend="nccl", timeout=LIMIT) if count >= nranks else None
        return _table(rank, nranks, "cuda", other)


def measure(path: str) -> dict[str, dict[str, str]]:
    """Return the marks by row and column; raise on a wrong result."""
    with world(path) as (rank, nranks):
        return _table(rank, nranks, "cpu", gloo())


def _table(rank: int, nranks: int, device: str, other: Any) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for call, op in ROWS:
        row = table[f"{call} {op}".strip()] = {}
        for label, dtype in DTYPES.items():
            if device == "cpu" and is_left_out(op, label):
                row[label] = LEFT_OUT
                continue
            cells = Cells(rank, nranks, dtype, device)
            args = (op,) if op else ()
            peer = None if device == "cuda" and label in NOT_OF_NCCL else other
            row[label] = _mark(
                lambda group: getattr(cells, call)(group, *args).cpu(),  # noqa: B023
                lambda: cells.wanted(call, op),  # noqa: B023
                peer,
            )
    return table


def _mark(run: Callable[[Any], Any], wanted: Callable[[], Any], other: Any) -> str:
    try:
        got = run(None)
    except BackendError as error:
        if isinstance(error.error, InvalidUsage):
            return REFUSED
        raise
    except ValueError as error:
        if "complex" in str(error):  # c10d refuses these itself
            return REFUSED
        raise
    want = wanted()
    assert equal(got, want), f"got {got}, want {want}"
    if other is None:
        return ALONE
    try:
        theirs = run(other)
    except (
        RuntimeError,
        TypeError,
        ValueError,
    ):  # NCCL's group has a TypeError for types that it lacks
        return ALONE
    return AS_GLOO if equal(got, theirs) else OTHERWISE


def complete(table: dict[str, dict[str, str]], documented: str) -> None:
    """Take the marks of cells that were left out from the documented table."""
    for line in documented.splitlines()[2:]:
        name, *marks = (word.strip() for word in line.strip("|").split("|"))
        row = table.get(name, {})
        for label, mark in zip(DTYPES, marks, strict=True):
            if row.get(label) == LEFT_OUT:
                row[label] = mark


def markdown(table: dict[str, dict[str, str]]) -> str:
    lines = ["| call | " + " | ".join(DTYPES) + " |", "|" + "---|" * (len(DTYPES) + 1)]
    lines += [
        f"| {name} | " + " | ".join(row[label] for label in DTYPES) + " |"
        for name, row in table.items()
    ]
    return "\n".join(lines)
