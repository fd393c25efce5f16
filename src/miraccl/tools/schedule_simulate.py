"""Output of ``miraccl schedule simulate``: a table over sizes, and a run as a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from miraccl.schedule.ir import Schedule
from miraccl.schedule.text import format_step
from miraccl.sim.clock import SimulationResult, simulate
from miraccl.sim.links import LATENCY_US, Links, machine, mesh, switch
from miraccl.tools.perf.spec import build_case
from miraccl.tools.perf.table import format_us

Record = dict[str, Any]


def read_machine(
    topo: str, nodes: int, gpus: Sequence[int] | None, latency_us: float | None
) -> Links:
    """Return the links of a job on ``nodes`` machines of a topology file."""
    from miraccl.topo.analyse import analyse_topology
    from miraccl.topo.load import load_topology
    from miraccl.topo.options import TopoOptions

    options = TopoOptions(nodes=nodes, gpus=tuple(gpus or ()))
    return machine(
        analyse_topology(load_topology(topo).root, options),
        LATENCY_US if latency_us is None else latency_us,
    )


def uniform_links(
    nranks: int, bandwidth: float, latency_us: float | None, *, direct: bool
) -> Links:
    """Return a switch, or with ``direct`` a link per pair, with equal links."""
    return (mesh if direct else switch)(
        nranks, bandwidth, LATENCY_US if latency_us is None else latency_us
    )


def measure(
    schedule: Schedule,
    links: Links,
    sizes: Sequence[int],
    *,
    slot_bytes: float,
    fifo_depth: int,
    memory_bandwidth: float = math.inf,
) -> tuple[list[Record], SimulationResult]:
    """Return a record per size, with the fields of ``miraccl perf``, and the last size's result."""
    records: list[Record] = []
    for nbytes in sizes:
        case = build_case(schedule.collective.label, nbytes, nranks=schedule.nranks, dtype="int8")
        if records and records[-1]["bytes"] == case.nbytes:
            continue
        outcome = simulate(
            schedule,
            links,
            case.count,
            slot_bytes=slot_bytes,
            fifo_depth=fifo_depth,
            memory_bandwidth=memory_bandwidth,
        )
        algbw, busbw = case.speeds(outcome.time_us)
        use = outcome.link_utilisation(links)
        records.append(
            {
                "bytes": case.nbytes,
                "time_us": outcome.time_us,
                "algbw": algbw,
                "busbw": busbw,
                "rounds": outcome.rounds,
                "busiest_link": use[0][1] if use else "",
                "busiest_part": use[0][0] if use else 0.0,
            }
        )
    return records, outcome


def table(schedule: Schedule, links: Links, records: Sequence[Record]) -> str:
    """Format the records with the columns of nccl-tests."""
    lines = [
        (
            f"# simulated: {schedule.name} {schedule.collective.label} over"
            f" {schedule.nranks} ranks, {len(links.names)} links"
        ),
        (
            f"#{'size (B)':>13} {'time (us)':>11} {'algbw (GB/s)':>13} {'busbw (GB/s)':>13}"
            f" {'rounds':>7}  busiest link, part of the time"
        ),
    ]
    for r in records:
        busiest = f"{r['busiest_link']}, {r['busiest_part']:.0%}" if r["busiest_part"] else ""
        lines.append(
            f"{r['bytes']:>14} {format_us(r['time_us']):>11} {r['algbw']:>13.2f}"
            f" {r['busbw']:>13.2f} {r['rounds']:>7}  {busiest}".rstrip()
        )
    return "\n".join(lines)


def trace(schedule: Schedule, outcome: SimulationResult) -> Record:
    """Return a run in Chrome's Trace Event Format: a process per rank, a thread per channel.

    Perfetto and chrome://tracing show it.
    """
    events: list[Record] = []
    for step in outcome.steps:
        name = format_step(schedule.channels[step.channel][step.rank][step.number])
        common = {
            "ph": "X",
            "pid": step.rank,
            "tid": step.channel,
            "args": {"round": step.round, "step": step.number},
        }
        if step.start > step.ready:
            events.append(
                {"name": "wait", "ts": step.ready, "dur": step.start - step.ready, **common}
            )
        events.append({"name": name, "ts": step.start, "dur": step.end - step.start, **common})
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(schedule.nranks)
    ]
    return {"displayTimeUnit": "ns", "traceEvents": [*names, *events]}
