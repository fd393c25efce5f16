"""How far a plan is from what any schedule could reach on the machine.

The bound comes from ``graph.bound`` (cuts of the whole machine); the plan's own figure is the bus bandwidth of its fastest algorithm and
protocol for large sizes, as the tuning model has it. Both in GB/s, bus bandwidth as nccl-tests define it.
"""

from __future__ import annotations

from typing import Any

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.bound import bandwidth_bound
from miraccl.graph.plan import Plan
from miraccl.graph.tuning import TuningModel
from miraccl.graph.tuning_constants import PROTOCOL_LABELS, TUNED, Algorithm
from miraccl.topo.jsonform import number
from miraccl.types import Collective, Protocol

MAX_NODES = 16
"""More nodes are bounded as if they were so many: the bottleneck is the same, and the bound only falls towards its limit."""


def bound_section(made: Plan) -> dict[str, Any] | None:
    """The key ``bound`` of a plan's JSON, or ``None`` where there is nothing to bound.

    ``allGather``, ``reduceScatter``, ``allReduce``: the best possible bus bandwidth; ``plan``: for each of them the plan's best, on what,
    and its share of the bound; ``nodes``: the number of nodes that the bound is for; ``sentences``: all this in words.
    """
    nodes = min(made.request.nodes, MAX_NODES)
    # Over several nodes, or where GPUs of one node can only meet over the network, NICs carry the traffic.
    network = nodes > 1 or len(made.topology.domains) > 1
    try:
        bound = bandwidth_bound(made.topology.whole, nodes, network=network)
    except (InvalidUsage, TopologyError):
        return None
    best = {
        Collective.ALL_GATHER: float(bound.all_gather),
        Collective.REDUCE_SCATTER: float(bound.reduce_scatter),
        Collective.ALL_REDUCE: float(bound.all_reduce_ceiling),
    }
    plan = {TUNED[coll]: share for coll, limit in best.items() if (share := _share(made.model, coll, limit))}
    return {
        "nodes": nodes,
        "allGather": number(best[Collective.ALL_GATHER]),
        "reduceScatter": number(best[Collective.REDUCE_SCATTER]),
        "allReduce": number(best[Collective.ALL_REDUCE]),
        "allReduceByTwo": number(float(bound.all_reduce)),
        "plan": plan,
        "sentences": [
            *([f"the bound is that of {nodes} nodes; more of them lower it a little"] if nodes < made.request.nodes else []),
            *bound.sentences(),
            *(_in_words(name, share) for name, share in plan.items()),
        ],
    }


def bus_factor(coll: Collective, nranks: int) -> float:
    """Bus bandwidth is algorithm bandwidth times this (nccl-tests, PERFORMANCE.md)."""
    if coll == Collective.ALL_REDUCE:
        return 2 * (nranks - 1) / nranks
    return (nranks - 1) / nranks if coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) else 1.0


def _share(model: TuningModel, coll: Collective, limit: float) -> dict[str, Any] | None:
    """The plan's highest bus bandwidth for a collective."""
    found = [(model.estimate(coll, algo, proto).bandwidth, algo, proto) for algo in Algorithm for proto in Protocol]
    bandwidth, algo, proto = max(found, key=lambda one: one[0])
    if not bandwidth or not limit:
        return None
    bus = bandwidth * bus_factor(coll, model.facts.nranks)
    reduces_in_switch = algo.uses_nvls or algo.uses_collnet
    return {
        "busBw": number(bus),
        "with": f"{algo.label}/{PROTOCOL_LABELS[proto]}",
        "share": number(bus / limit),
        "switchReduces": reduces_in_switch,
    }


def _in_words(name: str, share: dict[str, Any]) -> str:
    text = f"the plan's best for {name} is {share['with']} with {share['busBw']:.4g} GB/s by the model, {share['share']:.0%} of the bound"
    return f"{text} (which it may pass: the switch reduces)" if share["switchReduces"] else text
