"""Bound on bus bandwidth that ``miraccl perf --plot`` draws: a number, or that of a topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from miraccl.errors import MiracclError

#: operations for which ``graph.bound`` has a bound
BOUNDED = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Bus bandwidth in GB/s that cannot be exceeded, and its description for a legend."""

    busbw: float
    label: str


def read_bound(text: str, op: str, nranks: int) -> Bound:
    """Return the bound that ``--bound`` gives: GB/s, or a topology file with a GPU per rank."""
    try:
        number = float(text)
    except ValueError:
        pass
    else:
        if not 0 < number < float("inf"):
            raise click.UsageError(f"--bound {text}: the bandwidth must be finite and above 0")
        return Bound(busbw=number, label=f"bound: {number:g} GB/s")
    if op not in BOUNDED:
        raise click.UsageError(f"--bound with a topology is for {', '.join(BOUNDED)}, not {op}")
    return _compute_bound(text, (), op, nranks)


def detect_bound(ordinals: Sequence[int], op: str) -> Bound | None:
    """Return the bound of this machine's GPUs, or None if it cannot be computed."""
    if op not in BOUNDED or len(set(ordinals)) < 2:
        return None
    try:
        return _compute_bound("", ordinals, op, len(ordinals))
    except (MiracclError, OSError):
        return None


def _compute_bound(path: str, gpus: Sequence[int], op: str, nranks: int) -> Bound:
    """Return the bound of a topology file, or of this machine if ``path`` is empty."""
    from miraccl.graph.bound import bandwidth_bound
    from miraccl.topo.analyse import analyse_topology
    from miraccl.topo.load import load_topology
    from miraccl.topo.options import TopoOptions

    root = load_topology(path).root if path else load_topology().root
    selected = TopoOptions(gpus=tuple(gpus))
    system = analyse_topology(root, selected).system
    if path and nranks != len(system.gpus):
        # The first GPUs stand for the ranks, as `miraccl perf` assigns them.
        system = analyse_topology(root, TopoOptions(gpus=tuple(range(nranks)))).system
    bound = bandwidth_bound(system)
    busbw = {
        "all_gather": bound.all_gather,
        "reduce_scatter": bound.reduce_scatter,
        "all_reduce": bound.all_reduce_ceiling,
    }[op]
    return Bound(busbw=float(busbw), label=f"bound of the links: {float(busbw):.4g} GB/s")
