"""Random messages through every version of the exported plugin, as NCCL would send them.

    python -m tests.nccl_plugin.harness --count 100000 [--net udp]

Two processes, eight requests under way; every byte is compared. ``--net`` chooses the transport.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.connection import Connection

from miraccl import nccl_plugin

from . import peer


def sizes_of(version: int, count: int) -> list[int]:
    """Draw sizes around the limits of the FIFO: inline, slot, in place."""
    rng = random.Random(version)
    bounds = (33, 2000, 66_000, 150_000)
    return [rng.randrange(bounds[min(3, int(rng.expovariate(1.2)))]) for _ in range(count)]


def run_side(pipe: Connection, net: str, count: int, sends: bool) -> None:
    os.environ["MIRACCL_NET"] = net
    for version in nccl_plugin.EXPORTED:
        sizes = sizes_of(version, count)
        start = time.perf_counter()
        assert peer.transfer(pipe, version, sizes, sends) == sizes
        if sends:
            print(f"v{version}: {count} messages right, {time.perf_counter() - start:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100_000, help="messages over all versions")
    parser.add_argument("--net", default="tcp", help="value of MIRACCL_NET")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    count = options.count // len(nccl_plugin.EXPORTED)
    context = multiprocessing.get_context("spawn")
    sides = [
        context.Process(target=run_side, args=(end, options.net, count, sends))
        for end, sends in ((here, True), (there, False))
    ]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    return max(abs(side.exitcode or 0) for side in sides)


if __name__ == "__main__":
    sys.exit(main())
