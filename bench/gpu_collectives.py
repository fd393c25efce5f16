"""Other collectives and send/recv on GPUs compared with NCCL in the same processes.

    python bench/gpu_collectives.py --ranks 2 [--ops all_gather,sendrecv] [--dtypes
    bfloat16,float32] [--out NAME]

Sizes are those of the larger of input and output; sendrecv sends to the next rank and receives from
the previous one (NCCL: batch_isend_irecv). Timing as in ``gpu_all_reduce.py``.
"""

from __future__ import annotations

import argparse

from gpu_tables import DTYPES, OTHERS, SIZES, Results, add_options, base_of, cells, finish, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(OTHERS))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, comma separated")
    add_options(parser, budget=420)
    options = parser.parse_args()
    results = Results("Collectives", base_of(options.out))
    sizes = [int(size) for size in options.sizes.split(",")]
    wanted = [
        c
        for op in options.ops.split(",")
        for dtype in options.dtypes.split(",")
        for c in cells(op, dtype, sizes, options.ranks)
    ]
    measure(wanted, options, results)
    finish(results)


if __name__ == "__main__":
    main()
