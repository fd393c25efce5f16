"""Comparison of a plan with the upper bound on bandwidth of its machine.

The bound is that of ``graph.bound`` (cuts of the whole machine). The plan's figure is the bus
bandwidth of its fastest algorithm and protocol for large sizes by the tuning model. Both are bus
bandwidths in GB/s as nccl-tests defines them.
"""

from __future__ import annotations

from typing import Any

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.bound import bound_network
from miraccl.graph.flow_network import flow_network
from miraccl.graph.plan import Plan
from miraccl.graph.tuning import TuningModel
from miraccl.graph.tuning_constants import PROTOCOL_LABELS, TUNED, NcclAlgorithm
from miraccl.topo.system_json import number
from miraccl.types import Collective, Protocol

MAX_NODES = 16
"""Nodes for which the bound is computed at most: on a balanced machine it also bounds more."""


def bound_section(plan: Plan) -> dict[str, Any] | None:
    """Return section ``bound`` of a plan's JSON, or None for a plan without a bound.

    ``allGather``, ``reduceScatter`` and ``allReduce`` are bus bandwidths (GB/s) that no schedule
    without reducing switches can pass; ``allReduceByTwo`` bounds a reduce-scatter followed by an
    all-gather. ``reached`` states which of them a known schedule reaches. ``plan`` is the plan's
    best, the algorithm and protocol, and its share of the bound. ``nodes`` is the number of nodes
    the bound was computed for, ``sentences`` the summary as text.
    """
    nodes = min(plan.request.nodes, MAX_NODES)
    # NICs carry traffic between nodes and between domains of one node.
    network = nodes > 1 or len(plan.topology.domains) > 1
    try:
        graph = flow_network(plan.topology.whole, nodes, network=network)
        fewer, balanced = nodes < plan.request.nodes, not any(graph.surplus)
        bound = bound_network(graph, holds_for_more_nodes=fewer and balanced)
    except (InvalidUsage, TopologyError):
        return None
    best = {
        Collective.ALL_GATHER: float(bound.all_gather),
        Collective.REDUCE_SCATTER: float(bound.reduce_scatter),
        Collective.ALL_REDUCE: float(bound.all_reduce_ceiling),
    }
    shares = {
        TUNED[coll]: share
        for coll, limit in best.items()
        if (share := _share(plan.model, coll, limit))
    }
    return {
        "nodes": nodes,
        "allGather": number(best[Collective.ALL_GATHER]),
        "reduceScatter": number(best[Collective.REDUCE_SCATTER]),
        "allReduce": number(best[Collective.ALL_REDUCE]),
        "allReduceByTwo": number(float(bound.all_reduce)),
        "reached": {
            "allGather": bound.all_gather_reached,
            "reduceScatter": bound.reduce_scatter_reached,
            "allReduceByTwo": bound.all_reduce_reached,
        },
        "plan": shares,
        "sentences": [
            *([_describe_node_limit(nodes, balanced)] if fewer else []),
            *bound.summarize(),
            *(_describe_share(name, share) for name, share in shares.items()),
        ],
    }


def bus_factor(coll: Collective, nranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth of a collective (nccl-tests, PERFORMANCE.md)."""
    if coll == Collective.ALL_REDUCE:
        return 2 * (nranks - 1) / nranks
    return (
        (nranks - 1) / nranks if coll in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) else 1.0
    )


def _share(model: TuningModel, coll: Collective, limit: float) -> dict[str, Any] | None:
    """The plan's highest bus bandwidth for a collective."""
    found = [
        (model.estimate(coll, algo, proto).bandwidth, algo, proto)
        for algo in NcclAlgorithm
        for proto in Protocol
    ]
    bandwidth, algo, proto = max(found, key=lambda one: one[0])
    if not bandwidth or not limit:
        return None
    bus = bandwidth * bus_factor(coll, model.inputs.nranks)
    reduces_in_switch = coll != Collective.ALL_GATHER and (algo.uses_nvls or algo.uses_collnet)
    return {
        "busBw": number(bus),
        "with": f"{algo.label}/{PROTOCOL_LABELS[proto]}",
        "share": number(bus / limit),
        "switchReduces": reduces_in_switch,
    }


def _describe_node_limit(nodes: int, balanced: bool) -> str:
    if balanced:
        return (
            f"the bound is that of {nodes} nodes or more; "
            "the exact number of nodes may have a slightly lower one"
        )
    return (
        f"the bound is that of {nodes} nodes; more nodes may exceed it, "
        "as some part of a node cannot send as much as it can receive"
    )


def _describe_share(name: str, share: dict[str, Any]) -> str:
    text = (
        f"the plan's best for {name} is {share['with']} with {share['busBw']:.4g} GB/s "
        f"by the model, {share['share']:.0%} of the bound"
    )
    return (
        f"{text} (which it may exceed: the switch reduces)"
        if share["switchReduces"] and name == TUNED[Collective.ALL_REDUCE]
        else text
    )
