"""All tables of a machine in one call: ``python bench/gpu_final.py --ranks 4 --out NAME``.

all_reduce in bfloat16 and float32 (CUDA graphs up to 16 MiB, a stream above; then small messages
called one by one, where the host's time matters), then all_gather, reduce_scatter, all_to_all,
broadcast, reduce and send/recv in both types, 16 bytes to 1 GiB, every element checked, alternating
with NCCL. The most important cells run first; every result is written at once, so nothing is lost
if the time is over (``--budget``) or a cell fails, which is reported and skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from gpu_tables import (
    DTYPES,
    GRAPH_UP_TO,
    OTHERS,
    SIZES,
    Results,
    add_options,
    base_of,
    cells,
    finish,
    measure,
)

BUDGET_SECONDS = 340.0


def all_cells(nranks: int) -> Iterator[Any]:
    """Return all cells in the order of importance."""
    for dtype in DTYPES:
        yield from cells("all_reduce", dtype, SIZES, nranks)
    yield from cells(
        "all_reduce",
        DTYPES[0],
        [size for size in SIZES if size <= GRAPH_UP_TO],
        nranks,
        graph_up_to=0,
    )
    for dtype in reversed(DTYPES):
        for op in OTHERS:
            yield from cells(op, dtype, SIZES, nranks)
    yield from cells(
        "all_reduce",
        DTYPES[1],
        [size for size in SIZES if size <= GRAPH_UP_TO],
        nranks,
        graph_up_to=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, budget=BUDGET_SECONDS)
    options = parser.parse_args()
    results = Results("All tables", base_of(options.out))
    measure(list(all_cells(options.ranks)), options, results)
    finish(results)


if __name__ == "__main__":
    main()
