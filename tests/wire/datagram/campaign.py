"""Long runs of random cases in several processes, with progress, a time limit and a result."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from typing import Any

PROGRESS_S = 10.0


def run_campaign(
    run_chunk: Callable[[int], dict[str, Any]],
    *,
    about: str,
    unit: str,
    chunk: int,
    count: int,
    step: int = 1,
) -> None:
    """Run chunks as the command line asks, print totals as JSON, and exit with 1 after a finding.

    Args:
        run_chunk: Runs one chunk from a seed on; returns counts, of which ``unit`` is one, and
            "findings" as (seed, text).
        about: What the command does.
        unit: Name of a case.
        chunk: Cases of a chunk.
        count: Cases to run by default.
        step: Seeds of a chunk.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--count", type=int, default=count, help=f"{unit} to run")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    args = parser.parse_args()
    totals: dict[str, Any] = {unit: 0, "findings": []}
    seeds = range(args.first, args.first + -(-args.count // chunk) * step, step)
    began = shown = time.monotonic()
    with multiprocessing.Pool(args.processes) as pool:
        for found in pool.imap_unordered(run_chunk, seeds):
            for name, value in found.items():
                totals[name] = totals[name] + value if name in totals else value
            now = time.monotonic()
            if now - shown > PROGRESS_S or found["findings"]:
                shown = now
                print(
                    f"{totals[unit]} of {args.count} {unit}, {totals[unit] / (now - began):.0f}/s, "
                    f"{len(totals['findings'])} findings {totals['findings'][:3]}",
                    file=sys.stderr,
                )
            if now - began > args.seconds:
                pool.terminate()
                break
    totals["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(totals))
    sys.exit(bool(totals["findings"]))
