"""all_reduce on GPUs compared with NCCL in the same processes.

    python bench/gpu_all_reduce.py --ranks 2 [--dtype bfloat16] [--out NAME]

Per size: the median of the slowest rank, in CUDA graphs up to 16 MiB and on a stream above
(``--stream``: at every size); the ratio NCCL / miraccl; the host's time per call; the number of
wrong elements. NCCL runs through torch.distributed with its defaults, except that NVLink multicast
is off (NCCL_NVLS_ENABLE=0).
"""

from __future__ import annotations

import argparse

from gpu_tables import GRAPH_UP_TO, SIZES, Results, add_options, base_of, cells, finish, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, comma separated")
    parser.add_argument("--stream", action="store_true", help="no CUDA graphs")
    add_options(parser, budget=300)
    options = parser.parse_args()
    results = Results("all_reduce", base_of(options.out))
    sizes = [int(size) for size in options.sizes.split(",")]
    measure(
        list(
            cells(
                "all_reduce",
                options.dtype,
                sizes,
                options.ranks,
                0 if options.stream else GRAPH_UP_TO,
            )
        ),
        options,
        results,
    )
    finish(results)


if __name__ == "__main__":
    main()
