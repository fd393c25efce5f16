"""Versions of miraccl compared on CPUs: the benchmarks of two trees, in turns.

    python bench/cpu_versions.py --before /tmp/before --now . --cache /tmp/cache --out NAME
    python bench/cpu_versions.py --before /tmp/before --now . --cache /tmp/cache --only startup
    python bench/cpu_versions.py --before /tmp/before --now . --cache /tmp/cache --warm

Each tree runs its own ``bench/call_overhead.py``, ``torch_calls.py``, ``startup.py`` and
``peers.py`` with the same arguments, in processes of its own, and keeps compiled code in a cache
folder of its own (``--cache``/before, ``--cache``/now). A round runs a benchmark in both trees, the
other one first in every second round. The ratio of a row is the median over rounds of the figure
now divided by the figure before; below 1 the current tree is faster. ``spread`` is the smallest and
the largest ratio. Rows of libraries other than miraccl (Gloo, MPI, ``numpy.add``, an empty Python)
run the same code in both trees: their ratios show the noise of the run.
``--warm`` runs everything once in the smallest form, so that no round compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

PEERS = (
    "--ops all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,sendrecv --rounds 1"
    " --batches 3 --sizes 8,16K,1M,16M"
)
#: Name of a benchmark -> script, arguments.
BENCHMARKS: dict[str, tuple[str, str]] = {
    "call_overhead": ("call_overhead.py", "--rounds 5 --calls 10000"),
    "torch_calls, 2 ranks": ("torch_calls.py", "--ranks 2 --rounds 5 --calls 100"),
    "startup": ("startup.py", "--rounds 1"),
    "peers, 2 ranks": ("peers.py", f"--ranks 2 {PEERS}"),
    "peers, 4 ranks": ("peers.py", f"--ranks 4 {PEERS}"),
}
SMALLEST = {
    "call_overhead.py": "--rounds 1 --calls 10",
    "torch_calls.py": "--ranks 2 --rounds 1 --calls 3",
    "startup.py": "--rounds 1",
    "peers.py": "--ranks 2,4 --rounds 1 --batches 1 --sizes 8,16K,1M,16M --ops"
    " all_reduce,all_gather,reduce_scatter,broadcast,all_to_all,sendrecv",
}
FOREIGN = ("empty function", "numpy", "python -c", "gloo", "mpi")
_LIMIT_S = 900

#: Row -> figures of one run.
Rows = dict[str, list[float]]


def read_rows(record: dict[str, Any]) -> Rows:
    """Return the figures of a result file of any of the four benchmarks, by row."""
    if "rows" in record:
        return {
            f"{row['library']}: {row['op']}, {row['bytes']} bytes,"
            f" {'in place' if row['in_place'] else 'out of place'}": row["us"]
            for row in record["rows"]
        }
    return dict(_leaves(record["ms"] if "ms" in record else record["us"], ()))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, list[float]]]:
    if isinstance(value, list):
        yield ": ".join(path), value
    else:
        for name, inner in value.items():
            yield from _leaves(inner, (*path, name))


def run(tree: Path, cache: Path, script: str, arguments: list[str]) -> Rows:
    """Run a benchmark of a tree and return its figures."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result"
        environ = os.environ | {
            "PYTHONPATH": str(tree / "src"),
            "MIRACCL_CACHE_DIR": str(cache),
        }
        command = [sys.executable, str(tree / "bench" / script), *arguments, "--out", str(out)]
        subprocess.run(
            command, env=environ, check=True, timeout=_LIMIT_S, stdout=subprocess.DEVNULL, cwd=tree
        )
        return read_rows(json.loads(out.with_suffix(".json").read_text()))


def table(rounds: list[tuple[Rows, Rows]]) -> list[dict[str, Any]]:
    """Return the rows that both trees have: medians of both, and the ratios over rounds."""
    rows = []
    for name in rounds[0][0]:
        pairs = [(b[name], n[name]) for b, n in rounds if b.get(name) and n.get(name)]
        figures = [(common.median(before), common.median(now)) for before, now in pairs]
        if figures:
            ratios = sorted(now / before for before, now in figures)
            rows.append(
                {
                    "name": name,
                    "before": common.median(before for before, _ in figures),
                    "now": common.median(now for _, now in figures),
                    "ratio": common.median(ratios),
                    "spread": [ratios[0], ratios[-1]],
                }
            )
    return rows


def render(machine: dict[str, Any], results: dict[str, list[dict[str, Any]]], rounds: int) -> str:
    summary = []
    for name, rows in results.items():
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            foreign = any(word in row["name"].lower() for word in FOREIGN)
            groups["the same code in both" if foreign else "miraccl"].append(row["ratio"])
        means = ", ".join(
            f"{common.geometric_mean(ratios):.3f} over {len(ratios)} rows of {group}"
            for group, ratios in sorted(groups.items())
        )
        summary.append(f"- {name}: {means}")
    title, _, rest = common.heading("The current tree and an earlier one", machine).partition("\n")
    parts = [
        title,
        f"\nTime now / time before, medians over {rounds} rounds in turns, geometric means:\n",
        *summary,
        rest,
    ]
    for name, rows in results.items():
        unit = "ms" if name == "startup" else "us"
        parts.append(f"\n## {name}\n")
        parts.append(
            common.markdown_table(
                ["row", f"before, {unit}", f"now, {unit}", "ratio", "spread"],
                [
                    (
                        row["name"],
                        common.show_us(row["before"]),
                        common.show_us(row["now"]),
                        f"**{row['ratio']:.2f}**",
                        " to ".join(f"{value:.2f}" for value in row["spread"]),
                    )
                    for row in rows
                ],
            )
        )
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="root of the earlier tree")
    parser.add_argument("--now", type=Path, required=True, help="root of the current tree")
    parser.add_argument("--cache", type=Path, required=True, help="folder for compiled code")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="benchmarks whose name contains this word")
    parser.add_argument("--peer", action="append", default=[], help="as for bench/peers.py")
    parser.add_argument("--warm", action="store_true")
    common.add_output_option(parser)
    args = parser.parse_args()
    machine = common.describe_machine()
    trees = {"before": args.before.resolve(), "now": args.now.resolve()}
    peers = [word for peer in args.peer for word in ("--peer", peer)]
    results: dict[str, list[dict[str, Any]]] = {}
    for name, (script, arguments) in BENCHMARKS.items():
        if args.only not in name:
            continue
        words = [*(SMALLEST[script] if args.warm else arguments).split()]
        words += peers if script == "peers.py" else []
        rounds: list[tuple[Rows, Rows]] = []
        for number in range(1 if args.warm else args.rounds):
            print(f"{name}: round {number + 1}", file=sys.stderr, flush=True)
            order = list(trees) if number % 2 == 0 else list(reversed(trees))
            found = {
                which: run(trees[which], args.cache.resolve() / which, script, words)
                for which in order
            }
            rounds.append((found["before"], found["now"]))
        results[name] = table(rounds)
    text = render(machine, results, args.rounds)
    common.save(args.out, {"machine": machine, "results": results}, text)


if __name__ == "__main__":
    main()
