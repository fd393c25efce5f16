"""The packet-level fabric against published results, and what admission and path choice change.

Completion times are virtual and do not depend on the machine; only the seconds do. ``bound_us``
are the bounds of EQDS's authors (htsim, ``sim/datacenter/validate.txt``); ``htsim_us`` are times
of htsim's own EQDS on the same cases, run by hand (seed 13). The permutation of 1024 hosts is
another random one than htsim's.

    python bench/fabric.py                     # fabrics of 16 and 128 hosts: half a minute
    python bench/fabric.py --hosts 1024 --out fabric/MACHINE-DATE
    python bench/fabric.py --part datagrams    # incast, long lossy path, message times
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from common import add_output_option, describe_machine, heading, markdown_table, save

from miraccl.sim.fabric import compiled
from miraccl.sim.fabric.datagram_runs import (
    AdmissionPolicy,
    Incast,
    run_incast,
    run_messages,
    run_transfer,
)
from miraccl.sim.fabric.faults import LinkChange, both_directions
from miraccl.sim.fabric.topology import FabricTopology, LinkProfile, fat_tree
from miraccl.sim.fabric.transfers import (
    Balance,
    Control,
    FabricTransfer,
    TransferConfig,
    TransferRequest,
    TransferResult,
)

US, MS, GIGA = 1_000, 1_000_000, 1_000_000_000
PACKET, NBYTES = 4150, 2_000_000
#: 100 Gbit/s, 1 us per hop, queues of 35 packets, trimming.
PROFILE = LinkProfile(rate=100 * GIGA, latency=1 * US, queue=35 * PACKET, trimming=True)
#: htsim's perm_16n_16c_2MB.cm: targets of the sources 0 to 15.
PERMUTATION_16 = (13, 3, 10, 14, 0, 11, 7, 5, 9, 12, 6, 4, 15, 2, 8, 1)


def permutation(nhosts: int, seed: int = 0) -> list[FabricTransfer]:
    """Random cycle over all hosts."""
    order = list(range(nhosts))
    random.Random(seed).shuffle(order)
    return [FabricTransfer(order[i - 1], order[i], NBYTES) for i in range(nhosts)]


def outcast_incast() -> list[FabricTransfer]:
    """Hosts 2 and 3 send to eleven and ten hosts; both and host 1 send to host 0."""
    pairs = [(1, 0), (2, 0), *((2, 4 + i) for i in range(9))]
    pairs += [(3, 0), *((3, 13 + i) for i in range(9))]
    return [FabricTransfer(a, b, NBYTES) for a, b in pairs]


@dataclass(frozen=True)
class Case:
    """A published case: bound and reference in us, and the transfer that it is about."""

    name: str
    hosts: int
    bound: float
    reference: float | None
    transfers: Callable[[], list[FabricTransfer]]
    entropies: int = 128
    first_only: bool = False


CASES = (
    Case("one flow", 16, 180, 177.8, lambda: [FabricTransfer(0, 13, NBYTES)]),
    Case(
        "both directions",
        16,
        190,
        179.9,
        lambda: [FabricTransfer(0, 13, NBYTES), FabricTransfer(13, 0, NBYTES)],
    ),
    Case("15 to 1", 16, 2500, 2470.4, lambda: [FabricTransfer(i, 15, NBYTES) for i in range(15)]),
    Case(
        "permutation, 128 entropies",
        16,
        210,
        201.1,
        lambda: [FabricTransfer(i, t, NBYTES) for i, t in enumerate(PERMUTATION_16)],
    ),
    Case(
        "permutation, 1 entropy",
        16,
        1300,
        416.7,
        lambda: [FabricTransfer(i, t, NBYTES) for i, t in enumerate(PERMUTATION_16)],
        entropies=1,
    ),
    Case(
        "127 to 1", 128, 23_000, None, lambda: [FabricTransfer(i, 127, NBYTES) for i in range(127)]
    ),
    Case("outcast-incast, all", 128, 2500, 1637.9, outcast_incast),
    Case("outcast-incast, flow 1 to 0", 128, 215, 210.0, outcast_incast, first_only=True),
    Case("permutation, 128 entropies", 1024, 220, None, lambda: permutation(1024)),
    Case("permutation, 1 entropy", 1024, 1300, None, lambda: permutation(1024), entropies=1),
)


def tree_of(hosts: int, profile: LinkProfile = PROFILE) -> FabricTopology:
    """Fat tree with that many hosts."""
    return fat_tree(round((4 * hosts) ** (1 / 3)), profile)


def run_case(case: Case, tree: FabricTopology, seed: int = 0) -> dict[str, Any]:
    """Run one case; times in us."""
    config = TransferConfig(entropies=case.entropies)
    began, cpu_began = time.perf_counter(), time.process_time()
    result = compiled.run(TransferRequest(tree, case.transfers(), config, seed=seed))
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    ours = (result.completion[0] if case.first_only else result.slowest) / US
    return {
        "case": case.name,
        "hosts": case.hosts,
        "bound_us": case.bound,
        "htsim_us": case.reference,
        "ours_us": round(ours, 1),
        "over_bound": round(ours / case.bound, 3),
        "trimmed": result.trimmed,
        "events": result.events,
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu, 2),
    }


def percentile(values: Sequence[int], share: float) -> float:
    """Percentile in us."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / US


def balance_rows() -> list[dict[str, Any]]:
    """Oblivious spraying against recycled entropies with a dead or slow link to a core switch."""
    hosts = 128
    profile = replace(PROFILE, mark_above=PROFILE.queue // 2)
    tree = tree_of(hosts, profile)
    core = next(i for i, s in enumerate(tree.links) if s.target >= tree.hosts + 64)
    faults = {
        "none": (),
        "dead at 50 us": both_directions(LinkChange(time=50 * US, link=core, up=False), core + 1),
        "a tenth of the rate": both_directions(
            LinkChange(time=0, link=core, rate=10 * GIGA), core + 1
        ),
    }
    rows = []
    for fault, changes in faults.items():
        for balance in Balance:
            config = TransferConfig(balance=balance)
            request = TransferRequest(tree, permutation(hosts), config, changes)
            result = compiled.run(request)
            rows.append(
                {
                    "link": fault,
                    "entropies": balance.name.lower(),
                    "median_us": round(percentile(result.completion, 0.5), 1),
                    "p99_us": round(percentile(result.completion, 0.99), 1),
                    "slowest_us": round(result.slowest / US, 1),
                    "lost": result.lost,
                    "trimmed": result.trimmed,
                    "last_loss_us": round(result.last_loss / US, 1),
                }
            )
    return rows


def control_rows() -> list[dict[str, Any]]:
    """Receiver credit against a sender's window: a permutation with an incast into one host."""
    hosts, senders = 128, 32
    transfers = permutation(hosts) + [FabricTransfer(i, 127, NBYTES) for i in range(senders)]
    droptail = replace(PROFILE, trimming=False, mark_above=10 * PACKET)
    rows = []
    for name, profile, config in (
        ("credit, 128 entropies", PROFILE, TransferConfig()),
        (
            "DCTCP, 128 entropies",
            droptail,
            TransferConfig(control=Control.SENDER, window=50),
        ),
        (
            "DCTCP, 1 entropy",
            droptail,
            TransferConfig(control=Control.SENDER, window=50, entropies=1),
        ),
    ):
        result: TransferResult = compiled.run(
            TransferRequest(tree_of(hosts, profile), transfers, config)
        )
        others = [
            time for time, t in zip(result.completion, transfers, strict=True) if t.target != 127
        ]
        rows.append(
            {
                "control": name,
                "permutation_median_us": round(percentile(others, 0.5), 1),
                "permutation_p99_us": round(percentile(others, 0.99), 1),
                "incast_slowest_us": round(result.slowest / US, 1),
                "dropped": result.dropped,
                "trimmed": result.trimmed,
                "resent": result.resent,
            }
        )
    return rows


def datagram_rows(part: str) -> list[dict[str, Any]]:
    """The datagram machines: incast by admission, a long lossy path, times of messages."""
    if part == "incast":
        rows = []
        for admission in AdmissionPolicy:
            for congestion in ("swift", "cubic"):
                result = run_incast(Incast(admission=admission, congestion=congestion))
                rows.append(
                    {
                        "admission": admission.value,
                        "congestion": congestion,
                        "over_ideal": round(result.over_ideal, 3),
                        "dropped_percent": round(100 * result.dropped_share, 3),
                        "jain": round(result.jain, 4),
                        "peak_queue_bytes": result.peak_queue,
                    }
                )
        return rows
    if part == "long":
        path = LinkProfile(rate=100_000_000, latency=5 * MS, queue=300_000, loss=0.01)
        rows = []
        for congestion in ("swift", "bbr", "cubic"):
            result = run_transfer([path], 16 << 20, congestion=congestion)
            rows.append({"congestion": congestion, **asdict(result)})
            rows[-1]["share"] = round(result.share, 3)
        return rows
    path = LinkProfile(rate=500_000_000, latency=100 * US, queue=300_000, loss=0.01)
    rows = []
    for congestion in ("swift", "cubic"):
        times = run_messages(path, 1 << 20, 100, congestion=congestion)
        median, p99 = statistics.median(times) / MS, times[98] / MS
        rows.append(
            {
                "congestion": congestion,
                "median_ms": round(median, 2),
                "p99_ms": round(p99, 2),
                "p99_over_median": round(p99 / median, 3),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table of records."""
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--hosts", type=int, default=128, help="largest fabric: 16, 128 or 1024")
    parser.add_argument(
        "--part", choices=("fabric", "datagrams", "all"), default="fabric", help="what to run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    add_output_option(parser)
    args = parser.parse_args()
    record: dict[str, Any] = {"machine": describe_machine()}
    if args.part != "datagrams":
        trees = {n: tree_of(n) for n in (16, 128, 1024) if n <= args.hosts}
        compiled.run(TransferRequest(trees[16], CASES[0].transfers()))  # load the compiled code
        record["published"] = [run_case(c, trees[c.hosts]) for c in CASES if c.hosts in trees]
        record["one entropy, 16 hosts, 20 seeds"] = [
            {
                "median_us": round(statistics.median(spread), 1),
                "least_us": min(spread),
                "most_us": max(spread),
            }
            for spread in [[run_case(CASES[4], trees[16], s)["ours_us"] for s in range(20)]]
        ]
        if args.hosts >= 128:
            record["entropies with a failing link, 128 hosts"] = balance_rows()
            record["credit and sender control, 128 hosts"] = control_rows()
    if args.part != "fabric":
        for part in ("incast", "long", "messages"):
            record[part] = datagram_rows(part)
    if args.json:
        print(json.dumps(record, indent=1))
        return
    text = heading("Packet-level fabric", record["machine"])
    for name, rows in record.items():
        if name != "machine":
            text += f"\n## {name}\n\n{table(rows)}\n"
    save(args.out, record, text)


if __name__ == "__main__":
    main()
