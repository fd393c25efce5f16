"""Shared by the GPU tables: cells, ranks that are restarted after a failing cell, result files.

The measurement is that of ``miraccl perf --devices cuda --compare nccl``; this module defines
cells, their order, and the document. Every result is written at once, so a failing cell or the end
of the time budget loses nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_ranks import need_gpus

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (
    16,
    KIB,
    4 * KIB,
    16 * KIB,
    64 * KIB,
    256 * KIB,
    MIB,
    4 * MIB,
    16 * MIB,
    64 * MIB,
    256 * MIB,
    GIB,
)
GRAPH_UP_TO = 16 * MIB
OTHERS = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")
DTYPES = ("bfloat16", "float32")
BATCHES = 7
KERNEL_SECONDS = 30.0  # after which a kernel that waits gives up
PATIENCE_SECONDS = 90.0  # between two results; the first of a kind compiles
LEAST_SECONDS = 25.0  # below which ranks are not started again
MAX_IDLE_STARTS = 2  # that end before anything was measured
MAX_DETAILS = 3000  # characters of the traceback of a rank that failed


def cells(
    op: str, dtype: str, sizes: Iterable[int], nranks: int, graph_up_to: int = GRAPH_UP_TO
) -> Iterator[Any]:
    """Return one operation over sizes: CUDA graphs up to ``graph_up_to``, a stream above.

    Out of place if the operation has that form.
    """
    from miraccl.tools.perf.device_measure import Cell
    from miraccl.tools.perf.spec import build_case

    for size in sizes:
        case = build_case(op, size, nranks=nranks, dtype=dtype)
        yield Cell(case=case, graph=size <= graph_up_to, forms=(op == "broadcast",))


class Results:
    """Rows and the files they are written to, ``<base>.json`` and ``<base>.md``; none if ``base``
    is
    None.
    """

    def __init__(self, title: str, base: Path | None) -> None:
        self.title, self.base = title, base
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []
        self.left: list[str] = []
        self.machine: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "python": ".".join(map(str, sys.version_info[:3])),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        }

    def describe(self, info: Any, nranks: int) -> None:
        """Record the properties that the ranks found at their start."""
        self.machine |= {
            "gpus": f"{nranks} x {info.device}",
            **info.versions,
            "device_memory_mib": {
                name: round(size / MIB, 1) for name, size in info.memory_bytes.items()
            },
            "start_s": round(info.start_s, 3),
        }

    def add(self, row: Any) -> None:
        record = row.to_json()
        self.rows.append(
            {
                name: round(value, 3) if isinstance(value, float) else value
                for name, value in record.items()
            }
        )
        print(_line(record), flush=True)
        self.write()

    def fail(self, cell: Any, reason: str) -> None:
        name = "the start of the ranks" if cell is None else name_of(cell)
        self.failures.append({"cell": name, "reason": reason})
        print(f"{name}: FAILED: {reason}", flush=True)
        self.write()

    def write(self) -> None:
        if self.base is None:
            return
        record = {
            "machine": self.machine,
            "rows": self.rows,
            "failures": self.failures,
            "not_measured": self.left,
        }
        self.base.parent.mkdir(parents=True, exist_ok=True)
        for ending, text in (
            (".json", json.dumps(record, indent=1) + "\n"),
            (".md", self.markdown()),
        ):
            path = self.base.with_name(self.base.name + ending)
            part = path.with_name(path.name + ".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    # ---- the document

    def markdown(self) -> str:
        lines = [
            f"# {self.title}, {self.machine.get('gpus', 'GPUs')}",
            "",
            _about(self.machine),
            "",
            f"    {self.machine['command']}",
            "",
        ]
        lines += self.summary()
        for key in dict.fromkeys(_table_key(row) for row in self.rows):
            lines += _table(key, [row for row in self.rows if _table_key(row) == key])
        if self.failures:
            lines += [
                "## Failed",
                "",
                *(f"- {entry['cell']}: {entry['reason']}" for entry in self.failures),
                "",
            ]
        if self.left:
            lines += [
                "## Not measured",
                "",
                f"The time was over before: {', '.join(self.left)}.",
                "",
            ]
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Return geometric mean and worst cell of the ratios NCCL / miraccl, per table."""
        lines = [
            "| table | cells | geometric mean | least | at bytes | wrong |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for key in dict.fromkeys(_table_key(row) for row in self.rows):
            rows = [row for row in self.rows if _table_key(row) == key]
            rated = [row for row in rows if row.get("ratio")]
            wrong = sum(row["wrong"] or 0 for row in rows)
            if rated:
                least = min(rated, key=lambda row: row["ratio"])
                mean = statistics.geometric_mean(row["ratio"] for row in rated)
                lines.append(
                    f"| {_title(key)} | {len(rated)} | {mean:.2f} | {least['ratio']:.2f} |"
                    f" {least['bytes']} | {wrong} |"
                )
            else:
                lines.append(f"| {_title(key)} | {len(rows)} | | | | {wrong} |")
        return [*lines, ""] if self.rows else []


def _about(machine: dict[str, Any]) -> str:
    parts = [machine["date"]]
    if "nccl" in machine:
        parts.append(
            f"NCCL {machine['nccl']} through torch {machine['torch']} (multicast off), CUDA"
            f" {machine['cuda']}"
        )
    parts.append(f"Python {machine['python']}")
    text = ", ".join(parts) + ". Median of the slowest rank; g: CUDA graph, s: stream."
    if "device_memory_mib" in machine:
        memory = ", ".join(
            f"{name} {mib:g} MiB" for name, mib in machine["device_memory_mib"].items()
        )
        text += (
            f" Device memory of a rank: {memory}. miraccl's communicator was there after"
            f" {machine['start_s']} s."
        )
    return text


def name_of(cell: Any) -> str:
    case = cell.case
    return f"{case.op} {case.dtype} {case.nbytes} {'graph' if cell.graph else 'stream'}"


def _line(row: dict[str, Any]) -> str:
    theirs = f"nccl {row['nccl_us']:9.2f} us  x{row['ratio']:5.2f}" if row.get("ratio") else ""
    how = "g" if row["graph"] else "s"
    wrong = f" WRONG {row['wrong']}" if row["wrong"] else ""
    return (
        f"{row['op']:<15}{row['dtype']:<9}{row['bytes']:>11} {how} {row['time_us']:9.2f} us "
        f" {theirs} host {row['host_us']:5.1f}{wrong}"
    )


def _table_key(row: dict[str, Any]) -> tuple[str, str, bool]:
    """Return the table of a row; small messages on a stream have their own."""
    return row["op"], row["dtype"], not row["graph"] and row["bytes"] <= GRAPH_UP_TO


def _title(key: tuple[str, str, bool]) -> str:
    return f"{key[0]}, {key[1]}" + (", called one by one" if key[2] else "")


def _table(key: tuple[str, str, bool], rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [
        f"## {_title(key)}",
        "",
        (
            "| bytes | | NCCL us | miraccl us | NCCL / miraccl | busbw GB/s | host us, NCCL | host"
            " us | wrong | plan |"
        ),
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if row.get("ratio") else ""
        shape = f"{row['channels']} x {row['threads']}" if row["threads"] else "copy engines"
        lines.append(
            f"| {row['bytes']} | {'g' if row['graph'] else 's'} | {_us(row.get('nccl_us'))} |"
            f" {_us(row['time_us'])} | {ratio} | {row['busbw']:.1f} |"
            f" {_us(row.get('nccl_host_us'))} | {_us(row['host_us'])} | {row['wrong']} |"
            f" {row['algo']} {row['proto']}, {shape} |"
        )
    return [*lines, ""]


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


# ---------------------------------------------------------------------- running


def add_options(parser: argparse.ArgumentParser, budget: float) -> None:
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="as many GPUs, the first ones; where there are fewer, ranks share them",
    )
    parser.add_argument(
        "--out",
        help=(
            "name of the result files, below bench/results or with a folder; none are written"
            " without it"
        ),
    )
    parser.add_argument(
        "--budget", type=float, default=budget, help=f"seconds for everything [default: {budget:g}]"
    )
    parser.add_argument("--no-nccl", action="store_true", help="miraccl alone")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument(
        "--sms", type=int, help="multiprocessors that kernels of miraccl may occupy"
    )


def base_of(out: str | None) -> Path | None:
    if not out:
        return None
    return Path(out) if "/" in out else ROOT / "bench" / "results" / out


def measure(wanted: Sequence[Any], options: argparse.Namespace, results: Results) -> None:
    """Measure cells in order until all are done or the time is over.

    Ranks that exit are restarted after the cell that ended them.
    """
    end = time.monotonic() + options.budget
    ordinals = tuple(gpu.ordinal for gpu in need_gpus().gpus)[: options.ranks]
    with_nccl = not options.no_nccl and len(ordinals) >= options.ranks
    if not with_nccl and not options.no_nccl:
        print(f"{options.ranks} ranks share {len(ordinals)} GPUs: NCCL is left out", flush=True)
    left, idle_starts = list(wanted), 0
    while left and end - time.monotonic() > LEAST_SECONDS and idle_starts < MAX_IDLE_STARTS:
        attempt = _Attempt(_job(left, options, ordinals, with_nccl), options, results, end)
        failure = attempt.run()
        idle_starts = 0 if attempt.started else idle_starts + 1
        if not attempt.started:
            results.fail(None, failure)
        elif failure:
            results.fail(left[attempt.done], failure)
            attempt.done += 1
        left = left[attempt.done :]
    results.left = [name_of(cell) for cell in left]
    results.write()


def _job(
    left: Sequence[Any], options: argparse.Namespace, ordinals: tuple[int, ...], with_nccl: bool
) -> Any:
    from miraccl.tools.perf.device_ranks import DevicePerfJob
    from miraccl.tools.perf.measure import MeasureOptions

    return DevicePerfJob(
        cells=tuple(left),
        options=MeasureOptions(batches=options.batches),
        ordinals=ordinals,
        init={"timeout": KERNEL_SECONDS},
        libraries=("miraccl", "nccl") if with_nccl else ("miraccl",),
        sms=options.sms,
        keep_going=True,
    )


class _Attempt:
    """One start of the ranks.

    - ``done``: number of cells with a result or failure.
    - ``started``: the ranks reached the first measurement.
    """

    def __init__(self, job: Any, options: argparse.Namespace, results: Results, end: float) -> None:
        self.job, self.options, self.results, self.end = job, options, results, end
        self.done, self.started = 0, False

    def run(self) -> str:
        """Run until the cells are done, the time is over, or the ranks exit; return the failure or
        "".
        """
        from miraccl.errors import MiracclError
        from miraccl.tools.perf.device_ranks import run_cells

        seconds = max(1.0, self.end - time.monotonic())
        try:
            with run_cells(
                self.job, self.options.ranks, seconds, self._describe, PATIENCE_SECONDS
            ) as lines:
                for line in lines:
                    self._take(line)
                    if time.monotonic() >= self.end:
                        break
        except MiracclError as error:
            if time.monotonic() < self.end:
                print(getattr(error, "details", "")[-MAX_DETAILS:], flush=True)
                return str(error)
        return "" if self.started else "the ranks ended before they began"

    def _describe(self, info: Any) -> None:
        self.started = True
        self.results.describe(info, self.options.ranks)

    def _take(self, line: Any) -> None:
        self.done = line.number + 1
        for row in line.rows:
            self.results.add(row)
        if not line.rows:
            self.results.fail(
                self.job.cells[line.number],
                line.failure or "this version has no such operation on GPU memory",
            )


def finish(results: Results) -> None:
    """Print the summary; return the exit status, 1 after wrong results or failures."""
    print("\n".join(results.summary()), flush=True)
    for entry in results.failures:
        print(f"FAILED {entry['cell']}: {entry['reason']}")
    if results.left:
        print(f"not measured, the time was over: {len(results.left)} cells")
    if results.base is not None:
        print(f"written: {results.base}.json and {results.base}.md")
    if results.failures or any(row["wrong"] for row in results.rows):
        sys.exit(1)
