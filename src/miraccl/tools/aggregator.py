"""``miraccl aggregator``: a process that adds up for the ranks of a job."""

from __future__ import annotations

import json
import sys

import click


@click.command(short_help="Add up for the ranks of a job.")
@click.option("--json", "as_json", is_flag=True, help="Write sums and bytes as JSON at the end.")
def aggregator(as_json: bool) -> None:
    """Join a job as an aggregator: receive blocks of all ranks, add them, return the sums.

    `miraccl run --aggregators` starts aggregators beside the ranks. On other hosts, start them with
    the variables of a rank: of MIRACCL_NRANKS processes the last MIRACCL_AGGREGATORS are
    aggregators, and MASTER_ADDR, MASTER_PORT and MIRACCL_SECRET are those of the ranks. An
    aggregator ends when the ranks leave.

    \b
    Example:
      MIRACCL_RANK=4 MIRACCL_NRANKS=5 MIRACCL_AGGREGATORS=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500
      MIRACCL_SECRET=... miraccl aggregator
    """
    from miraccl.api.init import serve_aggregator  # imports numpy

    sums: list[int] = []
    serve_aggregator(sums.append)
    if as_json:
        json.dump({"sums": len(sums), "bytes": sum(sums)}, sys.stdout)
        print()
