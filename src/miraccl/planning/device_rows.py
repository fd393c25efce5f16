"""Model of sparse sums on the GPUs of a host: time by density, and the break-even density.

The exchange of rows (``executor.cuda.row_exchange``) decides on the GPU: a rank with more rows than
a limit makes all ranks run the dense sum. The limit follows from the size alone, so all ranks have
the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.choice import choose
from miraccl.executor.cuda.plan import ALGORITHMS, DevicePlan, Request
from miraccl.executor.cuda.row_exchange import WorkspaceShape, check_schedule
from miraccl.planning.sparse_planner import SparseCandidate
from miraccl.schedule import catalog

#: Bytes per microsecond: of a link in one direction, from all_reduce of 256 MiB on 2, 4 and 8 H200
#: (docs/measurements.md: 352 to 356); of a scan and of rows that are summed, from 256 MiB on two
#: H200 (bench/sparse.py).
LINK, SCAN, MEMORY = 355e3, 4.1e6, 1.8e6
#: Launches, op records and the wait for the slowest rank, of rows and of the dense sum.
ROWS_US, DENSE_US = 22.0, 8.0
#: Most bytes of the lists in a workspace, as a share of the array.
LIST_SHARE = 0.5
#: Smallest array for which a workspace is made; sizes are powers of two.
MIN_WORKSPACE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class SparseDevicePlan(DevicePlan):
    """Plan of a sparse sum on GPU memory.

    Attributes:
        block: Elements of a row.
        density: Share of rows that are not zero on a rank, the mean of all; None if unknown.
        union: Share of rows that are not zero on some rank; None if unknown.
        break_even: Density of a rank from which the dense sum runs.
    """

    block: int = 0
    density: float | None = None
    union: float | None = None
    break_even: float = 0.0


def sparse_plan(plan: DevicePlan, **more: Any) -> SparseDevicePlan:
    """Return the plan of a sparse sum by the launches of ``plan``; ``more``: fields that differ."""
    return SparseDevicePlan(**{**vars(plan), **more})


def count_rows(nbytes: int) -> int:
    return -(-nbytes // layout.SPARSE_ROW_BYTES)


def dense_request(request: Request) -> Request:
    """Return the request of the dense sum, in the order of ranks as the sum of rows."""
    name = request.algo
    ordered = name in ALGORITHMS[request.collective] and catalog.get(name).rank_ordered
    return replace(request, ordered=True, algo=name if ordered else "")


def dense_plan(request: Request) -> DevicePlan:
    """Return the plan of the dense sum."""
    return choose(dense_request(request))


def dense_us(nbytes: int, nranks: int) -> float:
    """Return the predicted time of the dense sum in microseconds."""
    return DENSE_US + 2 * (nranks - 1) / nranks * nbytes / LINK


def rows_us(nbytes: int, nranks: int, density: float, union: float) -> float:
    """Return the predicted time of an exchange of rows in microseconds.

    Rows are sent while the scan goes on.

    Args:
        density: Share of rows that each rank sends.
        union: Share of rows that some rank sends.
    """
    send = max(nbytes / SCAN, (nranks - 1) * density * nbytes / LINK)
    index = nranks * 8 * nbytes / layout.SPARSE_CHUNK_BYTES
    moved = (nranks * density + union) * nbytes
    return ROWS_US + send + (index + moved) / MEMORY


@lru_cache(maxsize=256)
def break_even(nbytes: int, nranks: int) -> float:
    """Return the density of each rank from which the dense sum is predicted to be faster.

    Ranks' rows are assumed to be disjoint, which makes the union largest. 0: always dense.
    """
    low, high = 0.0, 1.0
    limit = dense_us(nbytes, nranks)
    for _ in range(20):
        middle = (low + high) / 2
        time = rows_us(nbytes, nranks, middle, min(1.0, nranks * middle))
        low, high = (middle, high) if time <= limit else (low, middle)
    return low if low > 1e-5 else 0.0


def row_limit(nbytes: int, nranks: int) -> int:
    """Return the most rows that a rank sends: those of the break-even density and of the lists."""
    lists = int(LIST_SHARE * nbytes) // max(1, nranks - 1) // layout.SPARSE_ROW_BYTES
    return min(int(break_even(nbytes, nranks) * count_rows(nbytes)), lists)


def workspace_shape(nbytes: int, nranks: int) -> WorkspaceShape:
    """Return the shape of the workspaces for arrays of ``nbytes``, and of less."""
    largest = max(MIN_WORKSPACE_BYTES, 1 << (nbytes - 1).bit_length())
    rows = max(row_limit(largest, nranks), row_limit(nbytes, nranks))
    return WorkspaceShape(nranks=nranks, nbytes=largest, rows=rows)


def explain(request: Request, density: float, direct: bool) -> list[SparseCandidate]:
    """Return rows and the dense sum for rows of which ``density`` are not zero on each rank.

    The ranks' rows are independent of each other. The chosen one comes first.

    Args:
        direct: Every rank addresses every other's memory, which the exchange needs.
    """
    nbytes, nranks = request.block_bytes, request.nranks
    union = 1 - (1 - density) ** nranks
    limit = row_limit(nbytes, nranks) / max(1, count_rows(nbytes)) if direct else 0.0
    by_rows = limit > 0.0 and density <= limit
    dense = dense_plan(request)
    if not direct:
        why = "dense: ranks do not address each other's memory"
    elif by_rows:
        why = f"a density of {density:.2%} on a rank is below the break-even density of {limit:.1%}"
    else:
        why = f"dense: a density of {density:.2%} reaches the break-even density of {limit:.1%}"
    rows = SparseCandidate(
        algo=check_schedule(nranks),
        proto="rows",
        channels=1,
        predicted_us=rows_us(nbytes, nranks, density, union),
        chosen=by_rows,
        reason=why,
        block=layout.SPARSE_ROW_BYTES // request.dtype.itemsize,
        density=density,
        union=union,
        break_even=limit,
    )
    whole = replace(
        rows,
        algo=dense.algo,
        proto=dense.proto,
        predicted_us=dense_us(nbytes, nranks),
        chosen=not by_rows,
    )
    return sorted((rows, whole), key=lambda row: not row.chosen)
