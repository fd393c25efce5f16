"""miraccl compared with its peers: every operation, size, number of ranks, in and out of place.

All libraries are alive at the same time and alternate batch by batch
(``miraccl.tools.perf.orchestrator``): while one works, the ranks of the others block in a system
call, so other activity of the machine affects all of them. A round starts fresh processes; a cell
is the median over rounds of the median over batches of the slowest rank's mean. Every library's
results are checked element by element.

    python bench/peers.py --peers-dir ~/peers --ranks 2,4 --rounds 5 --out peers-2026-11-21
    python bench/peers.py --peer gloo=gloo:/venvs/torch/bin/python --peer
    mpich=mpi:/venvs/mpich/bin/python

A peer is NAME=LIBRARY:PYTHON; the library is gloo (through torch) or mpi (through mpi4py, with the
mpirun beside that Python, else the one on PATH). ``--peers-dir`` takes every virtual environment in
a folder that has one of them. The variants of miraccl: plain calls, ``persistent`` operations,
``window`` buffers. ``--fresh`` rewrites inputs before each call; otherwise window buffers stay in
the caches and look faster than in an application. If there is a core for each rank, every rank of
every library is bound to one after its start, because a scheduler may leave two polling ranks on
one core after they have slept. Needs a quiet machine; reports the load.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common

from miraccl.params import parse_size
from miraccl.tools import launch
from miraccl.tools.perf.measure import MeasureOptions
from miraccl.tools.perf.orchestrator import (
    OwnGroup,
    PerfJob,
    RankGroup,
    ResultLine,
    run_alternating,
)
from miraccl.tools.perf.peers import PeerGroup, find_python
from miraccl.tools.perf.spec import OPERATIONS, build_case

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
SIZES = "8,1K,16K,256K,1M,4M,16M,64M"
VARIANTS: dict[str, dict[str, Any]] = {
    "miraccl": {},
    "persistent": {"persistent": True},
    "window": {"window": True},
}

#: (ranks, operation, bytes, in place) -> library -> one time in microseconds per round
Cells = dict[tuple[int, str, int, bool], dict[str, list[float]]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A peer of the command line."""

    name: str
    library: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Peer:
        name, _, rest = text.partition("=")
        library, _, python = rest.partition(":")
        if not python or library not in ("gloo", "mpi"):
            raise argparse.ArgumentTypeError(
                f"a peer is NAME=gloo:PYTHON or NAME=mpi:PYTHON, got {text!r}"
            )
        return cls(name=name, library=library, python=python)


def find_peers(folder: Path) -> Iterator[Peer]:
    """Yield the virtual environments below ``folder`` with a peer, named without ``venv_``."""
    for python in sorted(folder.glob("*/bin/python")):
        for library, module in (("gloo", "torch"), ("mpi", "mpi4py")):
            code = (
                f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is"
                " None)"
            )
            if subprocess.run([python, "-c", code], check=False, timeout=60).returncode == 0:
                name = python.parents[1].name.removeprefix("venv").lstrip("_")
                yield Peer(name=name or library, library=library, python=str(python))


def measure_round(
    job: PerfJob, nranks: int, peers: list[Peer], variants: list[str], timeout: float, cells: Cells
) -> None:
    """Measure one operation at all sizes with all libraries; add a time to each cell."""
    lines: dict[str, list[ResultLine]] = {name: [] for name in variants}
    groups: list[RankGroup] = []
    others: list[PeerGroup] = []
    try:
        for name in variants:  # forks, so before anything else
            groups.append(
                OwnGroup(replace(job, **VARIANTS[name]), nranks, lines[name].append, name)
            )
        for peer in peers:
            others.append(PeerGroup(peer.library, peer.python, job, nranks, peer.name))
            groups.append(others[-1])
        for _ in run_alternating(groups, timeout):
            pass
    finally:
        for group in groups:
            group.stop()
    for name, measured in lines.items():
        for row in (row for line in measured for row in line.rows):
            if row.wrong:
                sys.exit(f"{name}: {row.wrong} wrong values in {row.op} of {row.bytes} bytes")
            cells[nranks, row.op, row.bytes, row.in_place][name].append(row.time_us)
    for group in others:
        for (number, in_place), time_us in group.times.items():
            case = job.cases[number]
            cells[nranks, case.op, case.nbytes, in_place][group.name].append(time_us)


def render(
    cells: Cells, machine: dict[str, Any], args: argparse.Namespace, peers: list[str]
) -> str:
    """Return tables of medians, and the ratio of the best peer's time to miraccl's."""
    parts = [
        common.heading("miraccl and its peers", machine),
        f"{args.rounds} rounds, {'fresh inputs' if args.fresh else 'inputs in cache'}.\n",
    ]
    ratios: dict[str, list[float]] = defaultdict(list)
    for nranks, op in dict.fromkeys((n, op) for n, op, _, _ in cells):
        for in_place in (False, True):
            keys = [
                k
                for k in cells
                if k[0] == nranks and k[1] == op and k[3] is in_place and "miraccl" in cells[k]
            ]
            if not keys:
                continue
            parts.append(
                f"\n## {op}, {nranks} ranks, {'in place' if in_place else 'out of place'}: us per"
                " operation\n"
            )
            rows = [_row(key, cells[key], args.variants, peers, ratios) for key in sorted(keys)]
            parts.append(
                common.markdown_table(["bytes", *args.variants, *peers, "best peer", "ratio"], rows)
            )
    parts.append(
        "\n## Ratio: time of the best peer / time of miraccl, geometric mean over the sizes\n"
    )
    parts.append(
        common.markdown_table(
            ["cells", "ratio"], [(k, f"{common.geometric_mean(v):.2f}") for k, v in ratios.items()]
        )
    )
    everything = [r for v in ratios.values() for r in v]
    parts.append(
        f"\nAll {len(everything)} cells: {common.geometric_mean(everything):.2f}; at least as fast"
        f" in {sum(r >= 1 for r in everything)}."
    )
    return "\n".join(parts)


def _row(
    key: tuple[int, str, int, bool],
    cell: dict[str, list[float]],
    variants: list[str],
    peers: list[str],
    ratios: dict[str, list[float]],
) -> list[str]:
    times = {name: common.median(values) for name, values in cell.items() if values}
    theirs = {name: times[name] for name in peers if name in times}
    best = min(theirs, key=lambda name: theirs[name], default="")
    ratio = theirs[best] / times["miraccl"] if best else None
    if ratio:
        ratios[f"{key[1]}, {key[0]} ranks, {'in place' if key[3] else 'out of place'}"].append(
            ratio
        )
    shown = [common.show_us(times.get(name)) for name in (*variants, *peers)]
    return [str(key[2]), *shown, best, f"{ratio:.2f}" if ratio else ""]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer", action="append", type=Peer.parse, default=[], metavar="NAME=LIBRARY:PYTHON"
    )
    parser.add_argument("--peers-dir", type=Path, help="folder of virtual environments")
    parser.add_argument("--ops", default=",".join(OPS), help=f"of {', '.join(OPERATIONS)}")
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--variants", default="miraccl", help=f"of {', '.join(VARIANTS)}; miraccl is always there"
    )
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument(
        "--no-bind",
        action="store_true",
        help="let the scheduler place the ranks, of miraccl and of the peers",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        help="let miraccl's ranks behave as if on so many hosts (sockets)",
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, help="seconds for one operation in one round"
    )
    common.add_output_option(parser)
    args = parser.parse_args()
    args.variants = ["miraccl", *(v for v in args.variants.split(",") if v != "miraccl")]
    if unknown := set(args.variants) - set(VARIANTS):
        parser.error(f"no such variants: {', '.join(unknown)}")
    if unknown := set(args.ops.split(",")) - set(OPERATIONS):
        parser.error(f"no such operations: {', '.join(unknown)}")
    return args


def main() -> None:
    args = parse_args()
    peers: list[Peer] = [
        *args.peer,
        *(find_peers(args.peers_dir.expanduser()) if args.peers_dir else ()),
    ]
    for peer in peers:
        find_python(peer.library, peer.python)
    machine = common.describe_machine()
    launch.warm_up()
    options = MeasureOptions(batches=args.batches, fresh=args.fresh, bind=not args.no_bind)
    cells: Cells = defaultdict(lambda: defaultdict(list))
    for number in range(args.rounds):
        for nranks in (int(n) for n in args.ranks.split(",")):
            for op in args.ops.split(","):
                cases = dict.fromkeys(
                    build_case(op, parse_size(s), nranks=nranks, dtype=args.dtype)
                    for s in args.sizes.split(",")
                )
                job = PerfJob(
                    cases=tuple(cases),
                    options=options,
                    init={},
                    alternating=True,
                    hosts=min(args.hosts, nranks),
                )
                variants = [
                    v for v in args.variants if not (v == "persistent" and op == "sendrecv")
                ]
                print(
                    f"round {number + 1} of {args.rounds}: {op}, {nranks} ranks",
                    file=sys.stderr,
                    flush=True,
                )
                measure_round(job, nranks, peers, variants, args.timeout, cells)
    rows = [
        {"ranks": n, "op": op, "bytes": size, "in_place": in_place, "library": name, "us": times}
        for (n, op, size, in_place), cell in cells.items()
        for name, times in cell.items()
    ]
    names = [peer.name for peer in peers]
    common.save(
        args.out,
        {"machine": machine, "peers": names, "rows": rows},
        render(cells, machine, args, names),
    )


if __name__ == "__main__":
    main()
