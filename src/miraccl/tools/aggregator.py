"""``miraccl aggregator``: a process that adds up for the ranks of a job, or of any that asks."""

from __future__ import annotations

import json
import sys

import click


@click.command(short_help="Add up for the ranks of a job, or of all jobs that ask.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Be a software switch: start an aggregator for each communicator that asks here.",
)
@click.option(
    "--most",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="With --listen: communicators at a time; further ones are refused.",
)
@click.option("--json", "as_json", is_flag=True, help="Write sums and bytes as JSON at the end.")
def aggregator(listen: str | None, most: int, as_json: bool) -> None:
    """Join a job as an aggregator: receive blocks of all ranks, add them, return the sums.

    `miraccl run --aggregators` starts aggregators beside the ranks. On other hosts, start them with
    the variables of a rank: of MIRACCL_NRANKS processes the last MIRACCL_AGGREGATORS are
    aggregators, and MASTER_ADDR, MASTER_PORT and MIRACCL_SECRET are those of the ranks. An
    aggregator ends when the ranks leave.

    With --listen it is a software switch that serves one communicator after another, and several at
    a time, until a signal ends it. Ranks name it in MIRACCL_SWITCH or call comm.use_switch(); both
    sides need the same MIRACCL_SECRET.

    \b
    Examples:
      MIRACCL_RANK=4 MIRACCL_NRANKS=5 MIRACCL_AGGREGATORS=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500
      MIRACCL_SECRET=... miraccl aggregator
      MIRACCL_SECRET=... miraccl aggregator --listen 10.0.0.9:29400
    """
    if listen is not None:
        _listen(listen, most, as_json)
        return
    from miraccl.api.init import serve_aggregator  # imports numpy

    sums: list[int] = []
    serve_aggregator(sums.append)
    if as_json:
        json.dump({"sums": len(sums), "bytes": sum(sums)}, sys.stdout)
        print()


def _listen(address: str, most: int, as_json: bool) -> None:
    from miraccl.bootstrap.switch import SwitchListener, parse_address
    from miraccl.tools.switch import Switch

    listener = SwitchListener(*parse_address(address, lowest=0))

    def report(text: str) -> None:
        print(f"miraccl aggregator: {text}", file=sys.stderr, flush=True)

    report(f"listens at {listener.address[0]}:{listener.address[1]}")
    switch = Switch(listener=listener, most=most, report=report)
    switch.run()
    if as_json:
        json.dump({"communicators": switch.served}, sys.stdout)
        print()
