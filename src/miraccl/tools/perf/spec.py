"""Definitions of measurements: operations, sizes, counts, bandwidth factors, result rows.

Sizes have the meaning of nccl-tests (``src/*.cu``, ``GetCollByteCount``): ``nbytes`` is the larger
total buffer of the operation, which is the receive buffer of all_gather and gather, the send buffer
of reduce_scatter and scatter, both of all_to_all, and the only one of the others. ``count`` is
NCCL's count argument, elements per rank for block-wise operations. Unlike nccl-tests, a size too
small for one element per rank is raised to it, and the table shows the size that was run.

Standard library only: processes of a peer (another Python) load this file by its path.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

#: operation -> (x of the busbw factor x(n-1)/n, or 0 for the factor 1; True if the input has nranks
#: blocks; True if the output has nranks blocks)
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
    """Return busbw / algbw, which makes busbw comparable with link bandwidth.

    Source: nccl-tests ``doc/PERFORMANCE.md``; (n-1)/n for gather and scatter as in ``gather.cu``
    and ``scatter.cu``.
    """
    numerator = _OPERATION_SHAPES[op][0]
    return numerator * (nranks - 1) / nranks if numerator else 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation at one size.

    ``count`` is NCCL's count argument; ``root`` is -1 for operations without a root.
    """

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
        """Elements of the input (scatter: of the root's)."""
        return self.count * (self.nranks if _OPERATION_SHAPES[self.op][1] else 1)

    @property
    def output_count(self) -> int:
        """Elements of the output (gather: of the root's)."""
        return self.count * (self.nranks if _OPERATION_SHAPES[self.op][2] else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the larger total buffer."""
        return max(self.input_count, self.output_count) * self.itemsize

    def speeds(self, time_us: float) -> tuple[float, float]:
        """Return algbw and busbw in GB/s (10^9 bytes)."""
        algbw = self.nbytes / time_us / 1e3 if time_us > 0 else 0.0
        return algbw, algbw * busbw_factor(self.op, self.nranks)


def build_case(
    op: str, nbytes: int, *, nranks: int, dtype: str, redop: str = "sum", root: int = 0
) -> Case:
    """Return the case whose larger total buffer has ``nbytes``.

    ``nbytes`` is rounded down to whole elements per rank, at least one; a barrier has none.
    """
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
    """Return the geometric range from ``smallest`` to ``largest`` (nccl-tests ``-b -e -f``)."""
    sizes, size = [], float(smallest)
    while size <= largest:
        sizes.append(int(size))
        size *= factor
    return sizes


@dataclass(frozen=True, kw_only=True)
class PerfRow:
    """One measurement, as printed and written to JSON. Times in us, bandwidths in GB/s.

    - ``wrong``: wrong elements over all ranks and checks, None if nothing was checked.
    - ``device``: name of the GPUs, empty on CPUs. On GPUs ``channels`` and ``threads`` are the
      blocks of a launch and the threads of a block.
    - ``graph``: CUDA graphs were timed.
    - ``host_us``: time the calling thread spends on a call.
    - ``ratio``: time of the peer / time of miraccl.
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
        """Return the applicable fields; with NCCL as peer its times are also included under its
        name.
        """
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
    """Return the row of ``case`` from the times per operation of each batch.

    - ``others``: the remaining fields.
    """
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
