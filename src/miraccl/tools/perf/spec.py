"""What is measured: operations, sizes, counts, bandwidth factors, and the record of one measurement.

Sizes mean what they mean in nccl-tests (``src/*.cu``, ``GetCollByteCount``): ``nbytes`` is the larger total buffer of the
operation, that is the receive buffer of all_gather and gather, the send buffer of reduce_scatter and scatter, both of all_to_all,
and the only one of the others; ``count`` is the count argument of NCCL, elements per rank for the block-wise ones.  Unlike
nccl-tests, a size that is too small for one element per rank is raised to it, and the table shows the size that was run.

Standard library only: the processes of a peer (another Python) load this file by its path.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: operation -> (x of the busbw factor x(n-1)/n, or 0 for the factor 1; the input has nranks blocks; the output has)
_OPERATION_SHAPES: dict[str, tuple[float, bool, bool]] = {
    "all_reduce": (2.0, False, False),
    "all_gather": (1.0, False, True),
    "reduce_scatter": (1.0, True, False),
    "broadcast": (0.0, False, False),
    "reduce": (0.0, False, False),
    "all_to_all": (1.0, True, True),
    "gather": (1.0, False, True),
    "scatter": (1.0, True, False),
    "sendrecv": (0.0, False, False),
    "barrier": (0.0, False, False),
}
OPERATIONS = tuple(_OPERATION_SHAPES)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")

#: element sizes in bytes, by the name that the command line uses
ITEMSIZES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
REDOPS = ("sum", "prod", "min", "max", "avg", "premul_sum")


def busbw_factor(op: str, nranks: int) -> float:
    """What algbw is multiplied with so that the result can be held against the speed of a link (nccl-tests PERFORMANCE.md).

    gather and scatter follow ``gather.cu`` and ``scatter.cu`` of nccl-tests: (n-1)/n.
    """
    numerator = _OPERATION_SHAPES[op][0]
    return numerator * (nranks - 1) / nranks if numerator else 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one size. ``count`` is NCCL's count argument; ``root`` is -1 for operations that have none."""

    op: str
    nranks: int
    count: int
    dtype: str
    redop: str
    root: int

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    @property
    def input_count(self) -> int:
        """Elements of the input (scatter: the root's)."""
        return self.count * (self.nranks if _OPERATION_SHAPES[self.op][1] else 1)

    @property
    def output_count(self) -> int:
        """Elements of the output (gather: the root's)."""
        return self.count * (self.nranks if _OPERATION_SHAPES[self.op][2] else 1)

    @property
    def nbytes(self) -> int:
        """The larger total buffer."""
        return max(self.input_count, self.output_count) * self.itemsize

    def speeds(self, time_us: float) -> tuple[float, float]:
        """algbw and busbw in GB/s (10^9 bytes)."""
        algbw = self.nbytes / time_us / 1e3 if time_us > 0 else 0.0
        return algbw, algbw * busbw_factor(self.op, self.nranks)


def build_case(
    op: str, nbytes: int, *, nranks: int, dtype: str, redop: str = "sum", root: int = 0
) -> Case:
    """The case whose larger total buffer is ``nbytes``, rounded down to whole elements per rank, and at least one; barrier has none."""
    if op == "barrier":
        return Case(op=op, nranks=nranks, count=0, dtype=dtype, redop="none", root=-1)
    blockwise = _OPERATION_SHAPES[op][1] or _OPERATION_SHAPES[op][2]
    count = max(1, nbytes // ITEMSIZES[dtype] // (nranks if blockwise else 1))
    return Case(
        op=op,
        nranks=nranks,
        count=count,
        dtype=dtype,
        redop=redop if op in REDUCING else "none",
        root=root if op in ROOTED else -1,
    )


def size_range(smallest: int, largest: int, factor: float) -> list[int]:
    """``smallest``, times ``factor``, and so on up to ``largest`` (nccl-tests ``-b -e -f``)."""
    sizes, size = [], float(smallest)
    while size <= largest:
        sizes.append(int(size))
        size *= factor
    return sizes


@dataclass(frozen=True, kw_only=True)
class PerfRow:
    """One measurement, as it is printed and written to JSON. Times in microseconds, speeds in GB/s.

    ``wrong`` counts elements over all ranks and all checks; it is None when nothing was checked.  On GPUs ``device`` is their name,
    ``channels`` and ``threads`` are the blocks of a launch and the threads of a block, ``graph`` says that CUDA graphs were timed, and
    ``host_us`` is what the calling thread spends on a call.
    """

    op: str
    bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    ranks: int
    in_place: bool
    time_us: float
    time_min_us: float
    algbw: float
    busbw: float
    wrong: int | None
    iters: int
    batches: int
    algo: str
    proto: str
    channels: int
    peer: str = ""
    peer_time_us: float | None = None
    ratio: float | None = None
    device: str = ""
    graph: bool = False
    threads: int = 0
    host_us: float | None = None
    peer_host_us: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that mean something here; beside NCCL its figures also by its name."""
        record = asdict(self)
        if not self.peer:
            for name in _PEER_FIELDS:
                del record[name]
        if not self.device:
            for name in _DEVICE_FIELDS:
                record.pop(name, None)
        elif self.peer:
            record |= {
                f"{self.peer}_us": self.peer_time_us,
                f"{self.peer}_host_us": self.peer_host_us,
            }
        return record


def build_row(case: Case, times_us: Sequence[float], **others: Any) -> PerfRow:
    """The row of ``case`` whose batches took ``times_us`` per operation; ``others`` are the fields that neither tells."""
    time_us = statistics.median(times_us)
    algbw, busbw = case.speeds(time_us)
    return PerfRow(
        op=case.op,
        bytes=case.nbytes,
        count=case.count,
        dtype=case.dtype,
        redop=case.redop,
        root=case.root,
        ranks=case.nranks,
        time_us=time_us,
        time_min_us=min(times_us),
        batches=len(times_us),
        algbw=algbw,
        busbw=busbw,
        **others,
    )


_PEER_FIELDS = ("peer", "peer_time_us", "ratio", "peer_host_us")
_DEVICE_FIELDS = ("device", "graph", "threads", "host_us", "peer_host_us")
