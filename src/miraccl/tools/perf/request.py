"""Checked options of ``miraccl perf``; conflicts are reported before any rank is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from miraccl.tools import launch
from miraccl.tools.options import Sizes
from miraccl.tools.perf import devices, plot
from miraccl.tools.perf.bound import Bound, detect_bound, read_bound
from miraccl.tools.perf.spec import (
    REDUCING,
    ROOTED,
    Case,
    PerfRow,
    build_case,
    busbw_factor,
    size_range,
)
from miraccl.types import Collective

DEFAULT_RANKS = 2
DEFAULT_SIZES = "8,1K,16K,256K,1M,4M,16M"
DEFAULT_FACTOR = 2.0


@dataclass(kw_only=True)
class PerfRequest:
    """Checked options; ``rows`` collects results.

    ``gpu_bytes`` is the memory of the smallest selected GPU; ``runs`` and ``bound`` are drawn
    beside the results.
    """

    op: str
    options: dict[str, Any]
    nranks: int
    joins_launcher: bool
    cases: tuple[Case, ...]
    ordinals: tuple[int, ...] = ()
    device: str = ""
    gpu_bytes: int = 0
    rows: list[PerfRow] = field(default_factory=list)
    runs: tuple[plot.EarlierRun, ...] = ()
    bound: Bound | None = None

    @property
    def peer(self) -> str:
        return self.options["compare"] or ""

    @property
    def binds(self) -> bool:
        """True if ranks are bound to cores."""
        # Alternating ranks sleep and wake up, after which the scheduler may leave two polling ranks
        # on one core: bind both libraries.
        bind = self.options["bind"]
        return bool(self.options["compare"] if bind is None else bind)

    @property
    def quiet(self) -> bool:
        return bool(self.options["json_target"] == "-")


def check(op: str, options: dict[str, Any]) -> PerfRequest:
    devices.check_options(options)
    if op == "barrier" and options["devices"].on_gpu:
        raise click.UsageError("barrier moves no data: omit --devices")
    if options["plot_target"]:
        plot.check_target(options["plot_target"])
    elif options["against"] or options["bound"]:
        raise click.UsageError("--against and --bound are for the picture: add --plot FILE")
    if options["redop"] and op not in REDUCING:
        raise click.UsageError(f"--redop is for {', '.join(REDUCING)}; {op} does not reduce")
    if op == "barrier" and any(
        options[name] is not None for name in ("sizes", "min_bytes", "max_bytes")
    ):
        raise click.UsageError("a barrier has no size: omit --sizes, --min-bytes and --max-bytes")
    if options["root"] is not None and op not in ROOTED:
        raise click.UsageError(f"--root is for {', '.join(ROOTED)}; {op} has none")
    joined = None if options["ranks"] else launch.detect_ranks()
    ordinals, device, gpu_bytes = _resolve_gpus(options["devices"])
    nranks = options["ranks"] or joined or len(ordinals) or DEFAULT_RANKS
    if options["plot_target"] and (op == "barrier" or not busbw_factor(op, nranks)):
        raise click.UsageError(
            "--plot draws busbw, which is 0 for"
            f" {'a barrier' if op == 'barrier' else f'{op} on one rank'}"
        )
    root = options["root"] or 0
    if root >= nranks:
        raise click.UsageError(f"--root {root} is not in 0..{nranks - 1}")
    if options["hosts"] > nranks or (joined and options["hosts"] > 1):
        raise click.UsageError(
            f"--hosts {options['hosts']} needs at least as many ranks started here: add --ranks"
        )
    if joined and options["threads"]:
        raise click.UsageError("--threads starts ranks itself: run it without a launcher")
    if options["threads"] and options["hosts"] > 1:
        raise click.UsageError("--hosts needs a process for each rank: omit --threads")
    if joined and options["compare"] in ("gloo", "mpi"):
        raise click.UsageError(
            "--compare starts ranks itself: run it without a launcher, with --ranks"
        )
    if options["peer_python"] and not options["compare"]:
        raise click.UsageError("--peer-python needs --compare")
    if options["persistent"] and op in ("sendrecv", "barrier"):
        raise click.UsageError(f"--persistent: {op} has no persistent form")
    if options["explain"] and op in ("sendrecv", "barrier"):
        raise click.UsageError(f"--explain is for operations with several algorithms, not {op}")
    if options["explain"] and options["json_target"] == "-":
        raise click.UsageError(
            "--explain is part of the table, which --json - omits: give --json a file"
        )
    together = (
        devices.count_ranks_per_host(nranks, options["hosts"], bool(joined)) if ordinals else nranks
    )
    _check_algorithm(op, nranks, options)
    if together == nranks:
        _check_deterministic(op, nranks, options)
    cases = [
        build_case(
            op,
            size,
            nranks=nranks,
            dtype=options["dtype"],
            redop=options["redop"] or "sum",
            root=root,
        )
        for size in _sizes(options)
    ]
    if not options["devices"].on_gpu:
        _check_memory(cases, 1 if joined else nranks)
    return PerfRequest(
        op=op,
        options=options,
        nranks=nranks,
        joins_launcher=bool(joined),
        cases=tuple(dict.fromkeys(cases)),
        ordinals=ordinals,
        device=device,
        gpu_bytes=gpu_bytes,
        runs=tuple(plot.read_run(path, op) for path in options["against"]),
        bound=_bound(op, nranks, ordinals, options),
    )


def _bound(op: str, nranks: int, ordinals: Sequence[int], options: dict[str, Any]) -> Bound | None:
    if options["bound"]:
        return read_bound(options["bound"], op, nranks)
    if options["plot_target"] and len(ordinals) == nranks and options["hosts"] == 1:
        return detect_bound(ordinals, op)
    return None


def _check_algorithm(op: str, nranks: int, options: dict[str, Any]) -> None:
    """Reject an algorithm or protocol that the ranks would reject or ignore.

    Over several hosts of GPUs algorithms also run in subsets of the ranks, which the ranks check.
    """
    from miraccl.executor.cuda import plan
    from miraccl.planning import planner
    from miraccl.schedule import catalog

    on_gpu = options["devices"].on_gpu
    (plan if on_gpu else planner).check_protocol((options["proto"] or "").lower())
    if not options["algo"]:
        return
    algorithm = catalog.get(options["algo"].lower())
    if op == "sendrecv":
        raise click.UsageError("--algo is for collectives, not sendrecv")
    collective = Collective[op.upper()]
    if not algorithm.supports(collective, nranks) and not (on_gpu and options["hosts"] > 1):
        others = catalog.format_names_for(collective, nranks)
        raise click.UsageError(
            f"--algo {algorithm.name} has no {op} over {nranks} ranks; available: {others}"
        )


def _check_deterministic(op: str, nranks: int, options: dict[str, Any]) -> None:
    """Reject an algorithm that does not add in rank order together with ``deterministic``.

    Either may come from the environment.
    """
    from miraccl.runtime.options import Options
    from miraccl.schedule import catalog

    # A single GPU copies without an algorithm.
    if op not in REDUCING or (options["devices"].on_gpu and nranks == 1):
        return
    asked = Options.create(algo=options["algo"], deterministic=options["deterministic"] or None)
    if not asked.deterministic or not asked.algo:
        return
    algorithm, collective = catalog.get(asked.algo), Collective[op.upper()]
    if algorithm.supports(collective, nranks) and not algorithm.rank_ordered:
        ordered = ", ".join(
            other.name for other in catalog.algorithms_for(collective, nranks) if other.rank_ordered
        )
        chosen = "--algo" if options["algo"] else "MIRACCL_ALGO"
        option = "--deterministic" if options["deterministic"] else "MIRACCL_DETERMINISTIC"
        text = f"{option} needs an algorithm that adds in rank order, not {chosen} {asked.algo}"
        raise click.UsageError(f"{text}; available for {op}: {ordered}")


def _resolve_gpus(requested: devices.Devices) -> tuple[tuple[int, ...], str, int]:
    """Return numbers, names and the smallest memory of the selected GPUs; empty on CPUs.

    CUDA is queried in another process, because this one may fork.
    """
    if not requested.on_gpu:
        return (), "", 0
    from miraccl.tools import gpu_facts

    facts = gpu_facts.read_facts()
    ordinals = devices.resolve(requested, facts)
    meant = facts.restrict_to(ordinals)
    return ordinals, meant.names, min(gpu.memory_bytes for gpu in meant.gpus)


def _sizes(options: dict[str, Any]) -> list[int]:
    smallest, largest = options["min_bytes"], options["max_bytes"]
    if smallest is None and largest is None:
        if options["factor"]:
            raise click.UsageError(
                "--factor is for a range of sizes: add --min-bytes or --max-bytes"
            )
        sizes = list(options["sizes"] or Sizes().convert(DEFAULT_SIZES, None, None))
    elif options["sizes"]:
        raise click.UsageError("use either --sizes or --min-bytes and --max-bytes")
    else:
        smallest = smallest if smallest is not None else min(8, largest)
        largest = largest if largest is not None else max(smallest, 16 << 20)
        if smallest < 1:
            raise click.UsageError("a size must be at least 1 byte")
        sizes = size_range(smallest, largest, options["factor"] or DEFAULT_FACTOR)
        if not sizes:
            raise click.UsageError(
                f"no size lies between --min-bytes {smallest} and --max-bytes {largest}"
            )
    if min(sizes) < 1:
        raise click.UsageError("a size must be at least 1 byte")
    return sizes


def _check_memory(cases: Sequence[Case], nranks: int) -> None:
    """Reject buffers of ``nranks`` ranks that exceed the memory of this machine."""
    needed = nranks * max((case.input_count + case.output_count) * case.itemsize for case in cases)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        ranks = f" of {nranks} ranks" if nranks > 1 else ""
        raise click.UsageError(
            f"cannot measure these --sizes: the buffers{ranks} need {needed} bytes, this machine"
            f" has {memory}"
        )
