"""``miraccl perf all_reduce_sparse``: the sparse sum beside the dense one, over densities.

Each rank's array has the given share of blocks that are not zero, others on each rank. Both sums
run in turns in the same ranks, and every element of the sparse one is compared, bit by bit, with
the dense sum in rank order. With 64 Mi float32, blocks of 256 and 1 % it is OmniReduce's test.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from miraccl import clock
from miraccl.errors import InvalidUsage, SystemFailure
from miraccl.tools import launch
from miraccl.tools.perf.orchestrator import virtual_host_environ
from miraccl.tools.perf.plot import check_target, load_figure_class
from miraccl.tools.spawn import RankContext, Ranks

if TYPE_CHECKING:
    from miraccl.api.communicator import Communicator

NAME = "all_reduce_sparse"
DEFAULT_BYTES = 256 << 20
DEFAULT_DENSITIES = (0.0, 0.01, 0.1, 0.5, 0.99, 1.0)
DEFAULT_BLOCK, DEFAULT_ROUNDS = 256, 5
#: options of ``miraccl perf`` that have no meaning here, and their defaults
NOT_USED: dict[str, Any] = {
    "algo": None,
    "proto": None,
    "compare": None,
    "graph": False,
    "threads": False,
    "persistent": False,
    "sms": None,
    "root": None,
    "redop": None,
    "against": (),
    "bound": None,
    "peer_python": None,
}


@dataclass(frozen=True, kw_only=True)
class SparseRow:
    """Measurement of one density.

    Attributes:
        union: Share of blocks that are not zero on some rank.
        dense_ms, sparse_ms: Medians of the slowest rank.
        wrong: Elements whose bits differ from the dense sum in rank order, on all ranks.
        algo, reason: Plan of the sparse call.
    """

    nbytes: int
    dtype: str
    block: int
    density: float
    union: float
    dense_ms: float
    sparse_ms: float
    wrong: int
    algo: str
    reason: str
    break_even: float


@dataclass(frozen=True, kw_only=True)
class SparseJob:
    """Sizes, densities and repetitions that the ranks measure."""

    sizes: tuple[int, ...]
    dtype: str
    block: int
    densities: tuple[float, ...]
    rounds: int
    window: bool


def run(options: dict[str, Any]) -> None:
    """Start ranks, print the table, and write JSON and plot if asked for."""
    for name, default in NOT_USED.items():
        if options[name] != default:
            raise InvalidUsage(f"cannot use --{name.replace('_', '-')} with {NAME}")
    if options["devices"].on_gpu:
        raise InvalidUsage(f"cannot measure {NAME} on GPUs: it runs on CPU memory")
    if options["plot_target"]:
        check_target(options["plot_target"])
    job = SparseJob(
        sizes=tuple(options["sizes"] or (DEFAULT_BYTES,)),
        dtype=options["dtype"],
        block=options["block"] or DEFAULT_BLOCK,
        densities=parse_densities(options["density"]),
        rounds=options["iters"] or DEFAULT_ROUNDS,
        window=options["window"],
    )
    rows: list[SparseRow] = []
    text = options["json_target"] != "-"
    if text:
        click.echo(_head())
    nranks = options["ranks"] or 2

    def environ(rank: int, base: Callable[[int], dict[str, str]]) -> dict[str, str]:
        return {**base(rank), **virtual_host_environ(rank, nranks, options["hosts"])}

    with (
        launch.local_job(nranks) as base,
        Ranks(_measure, nranks, (job,), environ=lambda rank: environ(rank, base)) as ranks,
    ):
        limit = clock.monotonic() + options["timeout"]
        while ranks.running and clock.monotonic() < limit:
            for _, message in ranks.poll(1.0):
                rows.append(SparseRow(**message))
                if text:
                    click.echo(_line(rows[-1]))
        if failure := ranks.first_failure():
            raise SystemFailure(f"cannot measure {NAME}: {failure.describe()}")
    if options["json_target"]:
        _write(options["json_target"], json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options["plot_target"]:
        draw(rows, options["plot_target"])
    sys.exit(int(any(row.wrong for row in rows) or not rows))


def parse_densities(text: str | None) -> tuple[float, ...]:
    """Return the densities of a list such as ``0.01,0.1``."""
    if not text:
        return DEFAULT_DENSITIES
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= density <= 1 for density in found):
        raise InvalidUsage(f"cannot use --density {text}: allowed are shares from 0 to 1")
    return found


def _head() -> str:
    names = ("size", "density", "union", "block", "dense", "sparse", "ratio", "wrong")
    units = ("B", "", "", "", "ms", "ms", "", "")
    widths = (11, 8, 8, 6, 9, 9, 7, 7)
    lines = [
        " ".join(f"{word:>{width}}" for word, width in zip(words, widths, strict=True))
        for words in (names, units)
    ]
    return "\n".join([lines[0] + "  plan", lines[1]])


def _line(row: SparseRow) -> str:
    return (
        f"{row.nbytes:>11} {row.density:>8.4g} {row.union:>8.4g} {row.block:>6}"
        f" {row.dense_ms:>9.3f} {row.sparse_ms:>9.3f} {row.dense_ms / row.sparse_ms:>7.2f}"
        f" {row.wrong:>7}  {row.algo}: {row.reason}"
    )


def _write(target: str, text: str) -> None:
    if target == "-":
        click.echo(text, nl=False)
        return
    with open(target, "w", encoding="utf-8") as file:
        file.write(text)


def draw(rows: Sequence[SparseRow], target: str) -> None:
    """Draw the times of both sums over the density of the union."""
    figure = load_figure_class()(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for size in sorted({row.nbytes for row in rows}):
        own = sorted((row for row in rows if row.nbytes == size), key=lambda row: row.union)
        unions = [100 * row.union for row in own]
        for name, style in (("dense", "--"), ("sparse", "-")):
            times = [getattr(row, f"{name}_ms") for row in own]
            axes.plot(unions, times, style, marker="o", label=f"{name}, {size >> 20} MiB")
        axes.axvline(100 * own[0].break_even, color="gray", linewidth=0.8)
    axes.set_xlabel("blocks that are not zero on some rank, % (line: predicted break-even)")
    axes.set_ylabel("time, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(target)


# ---- on a rank


def _measure(context: RankContext, job: SparseJob) -> None:
    import miraccl
    from miraccl.ops.arguments import data_type
    from miraccl.schedule.reduction import NUMPY_DTYPE

    kind = data_type(job.dtype)
    with miraccl.init() as comm, miraccl.init(deterministic=True) as ordered:
        for size in job.sizes:
            for density in job.densities:
                count = max(1, size // kind.itemsize)
                data = fill(comm.rank, count, job.block, density).astype(NUMPY_DTYPE[kind])
                row = _measure_one(comm, ordered, job, data, density)
                if comm.rank == 0:
                    context.emit(asdict(row))


def fill(rank: int, count: int, block: int, density: float) -> Any:
    """Return float32 of which ``density`` of the blocks are not zero, others for each rank."""
    rng = np.random.default_rng([rank, count])
    x = np.zeros(-(-count // block) * block, np.float32)
    held = np.flatnonzero(rng.random(len(x) // block) < density)
    x.reshape(-1, block)[held] = rng.integers(-9, 10, (len(held), block)) + 0.5
    return x[:count]


def _measure_one(
    comm: Communicator, ordered: Communicator, job: SparseJob, data: Any, density: float
) -> SparseRow:
    x = comm.empty(data.size, data.dtype) if job.window else np.empty_like(data)
    times: dict[str, list[float]] = {"dense": [], "sparse": []}
    for turn in range(job.rounds + 1):
        for name, samples in times.items():
            x[:] = data
            comm.barrier()
            start = clock.monotonic()
            if name == "dense":
                comm.all_reduce(x)
            else:
                comm.all_reduce_sparse(x, block=job.block)
            if turn:  # the first one plans and touches memory
                samples.append((clock.monotonic() - start) * 1e3)
    plan: Any = comm.last_plan
    want = ordered.all_reduce(data.copy())
    wrong = int((x.view(np.uint8) != want.view(np.uint8)).sum())
    medians = np.array([statistics.median(times["dense"]), statistics.median(times["sparse"])])
    from miraccl import MAX

    comm.all_reduce(medians, op=MAX)
    totals = comm.all_reduce(np.array([wrong]))
    return SparseRow(
        nbytes=data.nbytes,
        dtype=job.dtype,
        block=job.block,
        density=density,
        union=plan.union if plan.union is not None else 1 - (1 - density) ** comm.nranks,
        dense_ms=float(medians[0]),
        sparse_ms=float(medians[1]),
        wrong=int(totals[0]),
        algo=plan.algo,
        reason=plan.reason,
        break_even=plan.break_even,
    )
