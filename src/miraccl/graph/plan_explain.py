"""Reasons of every stage of a plan, as data and as text.

Each stage records its own reasons (paths: ``topo.explain``, search: ``graph.search.explain``,
counts and model: their records). This module combines them under the key ``explain`` of the plan's
JSON:

- ``paths``: per path, its type, the hop that limits its bandwidth and the rules that changed it
- ``search``: per domain and graph, the tries and their reasons
- ``channels``: every step from searched to compute channels, and the limit of send/receive channels
- ``tuning``: all estimates with their limits or the reason they are disabled, time curves, and the
  ranking at each size
- ``sentences``: a summary of all this, by heading
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from miraccl.graph import tuning_constants as k
from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.connect import Connections
from miraccl.graph.format import format_bytes, format_time
from miraccl.graph.kinds import GraphKind
from miraccl.graph.plan import Plan
from miraccl.graph.plan_offload import find_offloads
from miraccl.graph.search.explain import explain_search
from miraccl.graph.tuning import TuningModel
from miraccl.graph.tuning_choice import (
    TABLE_SIZES,
    TuningCandidate,
    candidates,
    choose,
    estimate_at_size,
)
from miraccl.topo.explain import PathChangeLog, explain_paths
from miraccl.topo.system_json import number
from miraccl.types import Collective

CURVE_SIZES = tuple(8 << i for i in range(31))
"""Bytes of the points of a time curve: 8 B, 16 B, ... 8 GiB."""

Json = dict[str, Any]


def explain_plan(plan: Plan, notes: PathChangeLog) -> Json:
    """Return the value of the key ``explain``.

    ``notes`` is the recorder that was passed to :func:`plan.make_plan`.
    """
    paths = [
        reason.to_json()
        for reason in explain_paths(plan.topology.system, plan.topology.paths, notes)
    ]
    search = [[explain_search(report) for report in result.reports] for result in plan.searches]
    return {
        "paths": paths,
        "search": search,
        "channels": _channels(plan.connections),
        "tuning": _tuning(plan.model),
        "sentences": {
            "Paths": _summarize_paths(paths),
            "Search": [
                line for graphs in search for graph in graphs for line in graph["sentences"]
            ],
            "Channels": summarize_channels(plan.connections),
            "Choice": summarize_choices(plan.model),
            "Reduction in switches": [each.describe() for each in find_offloads(plan.model)],
        },
    }


# Paths


def _summarize_paths(paths: list[Json]) -> list[str]:
    """Return one line per kind of path between GPUs and to nets, with an example."""
    groups: dict[tuple[str, str, str, float], list[Json]] = {}
    for path in paths:
        kinds = path["from"].split("/")[0], path["to"].split("/")[0]
        if kinds in (("GPU", "GPU"), ("GPU", "NET")) and path["hops"]:
            groups.setdefault((*kinds, path["type"], path["bw"]), []).append(path)
    result = []
    for (source, target, kind, bw), members in groups.items():
        one = members[0]
        rules = "".join(f"; {rule['sentence']}" for rule in one["rules"])
        result.append(
            f"{len(members)} paths {source} to {target} are {kind} at {bw:g} GB/s, "
            f"such as {one['from']} to {one['to']}: "
            f"{one['type_reason']}; slowest hop: {one['bw_reason']}{rules}"
        )
    return result


# Channels


def _channels(connections: Connections) -> Json:
    return {
        "steps": [
            {"before": s.before, "after": s.after, "why": s.reason} for s in connections.count.steps
        ],
        "p2p": {
            "channels": connections.p2p.total,
            "perPeer": connections.p2p.per_peer,
            "why": connections.p2p.limited_by,
        },
    }


def summarize_channels(connections: Connections) -> list[str]:
    """Return the steps from searched to compute channels, as lines of text."""
    several = connections.layout.nnodes > 1
    rings, trees = (
        _format_graph(connections.graphs[kind], several)
        for kind in (GraphKind.RING, GraphKind.TREE)
    )
    result = [f"the search found {rings} for rings and {trees} for trees"]
    result += [
        f"{step.before} channels become {step.after}: {step.reason}"
        for step in connections.count.steps
    ]
    result.append(f"collectives run on {connections.channels} channels")
    p2p = connections.p2p
    result.append(
        f"send and receive use {p2p.total} channels (a power of two) "
        f"and up to {p2p.per_peer} for one peer, limited by {p2p.limited_by}"
    )
    if connections.nvls:
        result.append(
            f"NVLS uses {connections.nvls_channels} channels "
            f"and {connections.nvls.heads} heads per node"
        )
    if connections.collnet_enabled:
        result.append("CollNet is in use")
    return result


def _format_graph(graph: ChannelGraph, several: bool) -> str:
    """Format channels and bandwidths; ``several`` includes the bandwidth between nodes."""
    inside = (
        f"{graph.n_channels} channels of {graph.bw_intra:g} GB/s inside ({graph.type_intra.name})"
    )
    return (
        f"{inside} and {graph.bw_inter:g} GB/s between nodes ({graph.type_inter.name})"
        if several
        else inside
    )


# Tuning


def _tuning(model: TuningModel) -> Json:
    estimates = [
        {
            "collective": k.TUNED[coll],
            "algorithm": algo.label,
            "protocol": k.PROTOCOL_LABELS[proto],
            "latency": number(estimate.latency),
            "bandwidth": number(estimate.bandwidth),
            "limits": list(estimate.limits),
            "off": estimate.disabled_reason,
        }
        for (coll, algo, proto), estimate in model.estimates.items()
    ]
    return {
        "estimates": estimates,
        "sizes": list(CURVE_SIZES),
        "curves": {name: _curves(model, coll) for coll, name in k.TUNED.items()},
        "choices": {
            name: [_compare_candidates(model, coll, size) for size in TABLE_SIZES]
            for coll, name in k.TUNED.items()
        },
    }


def _name(candidate: TuningCandidate) -> str:
    return f"{candidate.algorithm.label}/{k.PROTOCOL_LABELS[candidate.protocol]}"


def _curves(model: TuningModel, coll: Collective) -> dict[str, list[float | int]]:
    """Return times (us) at each of ``CURVE_SIZES`` for every usable candidate."""
    curves: dict[str, list[float | int]] = {}
    for nbytes in CURVE_SIZES:
        for candidate in candidates(model, coll, nbytes):
            if candidate.time is not None:
                curves.setdefault(_name(candidate), []).append(number(candidate.time))
    return curves


def _ranked(model: TuningModel, coll: Collective, nbytes: int) -> list[TuningCandidate]:
    """Return the usable candidates, fastest first; ties keep NCCL's order."""
    usable = [c for c in candidates(model, coll, nbytes) if c.time is not None]
    return sorted(usable, key=lambda c: c.time or 0.0)


def _compare_candidates(model: TuningModel, coll: Collective, nbytes: int) -> Json:
    """Return the winner at a size, the runner-up and the advantage."""
    ranked = _ranked(model, coll, nbytes)
    result: Json = {
        "bytes": nbytes,
        "winner": None,
        "off": {
            _name(c): c.disabled_reason
            for c in candidates(model, coll, nbytes)
            if c.disabled_reason
        },
    }
    choice = choose(model, coll, nbytes)
    if choice is None:
        return result
    winner = ranked[0]
    result |= {
        "winner": _name(winner),
        "time": number(choice.time),
        "ranking": [[_name(c), number(c.time or 0.0)] for c in ranked],
    }
    if len(ranked) > 1 and winner.time:
        result["runnerUp"] = _name(ranked[1])
        result["advantage"] = number((ranked[1].time or 0.0) / winner.time - 1)
    result["why"] = "".join(_explain_winner(model, coll, ranked, nbytes))
    return result


def _explain_winner(
    model: TuningModel, coll: Collective, ranked: list[TuningCandidate], nbytes: int
) -> Iterator[str]:
    """Yield time, latency and bandwidth of the winner and its advantage over the runner-up."""
    winner = ranked[0]
    yield f"{_name(winner)} takes {format_time(winner.time or 0.0)}"
    if not winner.time:
        return
    latency, bw = estimate_at_size(model, coll, winner.algorithm, winner.protocol, nbytes)
    yield f" ({format_time(latency)} latency, then {format_bytes(nbytes)} at {bw:.4g} GB/s)"
    if len(ranked) > 1:
        other_latency, other_bw = estimate_at_size(
            model, coll, ranked[1].algorithm, ranked[1].protocol, nbytes
        )
        better = ["less latency"] * (latency < other_latency) + ["more bandwidth"] * (bw > other_bw)
        yield (
            f"; {_name(ranked[1])} would take "
            f"{((ranked[1].time or 0.0) / winner.time - 1) * 100:.3g} % more "
            f"({format_time(other_latency)}, {other_bw:.4g} GB/s)"
        )
        yield f": the winner has {' and '.join(better)}" if better else ""


def summarize_choices(model: TuningModel) -> list[str]:
    """Return the size ranges of each collective with winner and reason, as lines of text."""
    result = []
    for coll, name in k.TUNED.items():
        last = ""
        for nbytes in TABLE_SIZES:
            ranked = _ranked(model, coll, nbytes)
            winner = _name(ranked[0]) if ranked else "nothing"
            if winner != last:
                reason = (
                    "".join(_explain_winner(model, coll, ranked, nbytes))
                    if ranked
                    else "no algorithm and protocol is left"
                )
                result.append(f"{name} from {format_bytes(nbytes)}: {reason}")
                last = winner
        if ranked := _ranked(model, coll, TABLE_SIZES[-1]):
            estimate = model.estimate(coll, ranked[0].algorithm, ranked[0].protocol)
            if estimate.limits:
                result.append(
                    f"{name}, the {estimate.bandwidth:.4g} GB/s of {_name(ranked[0])}: "
                    f"{'; '.join(estimate.limits)}"
                )
        if off := sorted(
            {
                c.disabled_reason
                for c in candidates(model, coll, TABLE_SIZES[-1])
                if c.disabled_reason
            }
        ):
            result.append(f"{name}, not available: " + "; ".join(off))
    return result
