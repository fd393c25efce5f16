"""Plans as JSON and back, in the format of NCCL's reference results (format 1).

``plan_from_json`` takes the machine, the request and the channel graphs from the document, derives
everything else again (paths, connections, tuning: some milliseconds) and compares it with the
document, so a document that contradicts itself is rejected with the place. The document lacks, and
a plan that was read therefore lacks, the reports of the searches (``SearchResult.reports``), the
tree of the topology file, and labels and CPU affinities of nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miraccl.errors import TopologyError
from miraccl.graph.channel_graph import MAX_CHANNELS, ChannelGraph, graph_from_json, graph_to_json
from miraccl.graph.connect import connections_to_json
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.graph.plan import Plan, PlanRequest, plan_from_graphs
from miraccl.graph.search import SearchResult
from miraccl.graph.tuning_choice import tuning_to_json
from miraccl.topo.analyse import Domain, Topology, analyse_system
from miraccl.topo.json_schema import (
    Validator,
    any_value,
    fixed_list,
    float32,
    integer,
    list_of,
    mapping,
    one_of,
    raise_invalid,
    record,
    string,
)
from miraccl.topo.records import PathType
from miraccl.topo.system_json import paths_to_json, system_from_json, system_to_json

FORMAT = 1
NCCL_VERSION = "2.28.9-1"
"""The version of NCCL whose decisions a plan reproduces."""

Json = dict[str, Any]


def plan_to_json(plan: Plan) -> Json:
    """Return the plan in the format of the reference results.

    Two keys are added for the reader: ``whole``, the machine before it was divided into domains,
    where there are several; and ``graph_xml`` where graphs came from a file.
    """
    topology, request = plan.topology, plan.request
    graphs = [[graph_to_json(graph) for graph in search.graphs] for search in plan.searches]
    result: Json = {
        "format": FORMAT,
        "nccl_version": NCCL_VERSION,
        "topology": plan.name,
        "nodes": request.nodes,
        "gpus_per_node": topology.nranks // request.nodes,
        "nranks": topology.nranks,
        "collnet": int(request.collnet),
        "fuse": int(request.fuse),
        "gpus": list(request.gpus),
        "env": dict(request.variables),
        "domains": [list(ranks) for ranks in topology.local_ranks],
        "system": system_to_json(topology.system),
        "paths": paths_to_json(topology.paths, topology.system),
        "graphs": graphs[0],
        "comm": connections_to_json(plan.connections),
        "tuning": tuning_to_json(plan.model),
    }
    if len(graphs) > 1:
        result["other_domain_graphs"] = graphs[1:]
        result["whole"] = system_to_json(topology.whole)
    if request.search.graph_xml:
        result["graph_xml"] = request.search.graph_xml
    return result


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """Read the plan that ``plan_to_json`` wrote; unknown keys are ignored.

    Raises ``TopologyError`` with the place, the value and the allowed values, or ``InvalidUsage``
    for a setting in ``env``.
    """
    _DOCUMENT(data, "")
    _check_sizes(data)
    request = PlanRequest.read(
        data["env"],
        nodes=data["nodes"],
        gpus=data["gpus"],
        collnet=bool(data["collnet"]),
        fuse=bool(data["fuse"]),
        graph_xml=data.get("graph_xml", ""),
    )
    topology = _topology(data, request)
    searches = [
        SearchResult(graphs=_graphs(graphs, domain, where), reports=())
        for domain, (where, graphs) in zip(topology.domains, _graphs_of_domains(data), strict=True)
    ]
    plan = plan_from_graphs(request, topology, searches, name=data["topology"])
    for key, derived in plan_to_json(plan).items():
        if found := _difference(data.get(key), derived, key):
            where, there, fits = found
            raise TopologyError(
                f"cannot read {where}: it is {there}; the rest of the document implies {fits}"
            )
    return plan


# Validation of single values

_PATTERNS: dict[GraphKind, tuple[Pattern, ...]] = {
    GraphKind.RING: (Pattern.RING,),
    GraphKind.TREE: (Pattern.BALANCED_TREE, Pattern.SPLIT_TREE, Pattern.TREE),
    GraphKind.COLLNET_CHAIN: (Pattern.TREE,),
    GraphKind.NVLS: (Pattern.NVLS,),
    GraphKind.COLLNET_DIRECT: (Pattern.COLLNET_DIRECT, Pattern.TREE),  # the latter on a single GPU
}
_NEEDED = (GraphKind.RING, GraphKind.TREE)  # every plan has at least one channel of each

_COUNT = integer(0)
_NET = integer(-(1 << 63), (1 << 63) - 1)
_PATH_TYPE = one_of(*(kind.name for kind in PathType))


def _graph_validator(kind: GraphKind) -> Validator:
    return record(
        {
            "id": one_of(int(kind)),
            "computed": one_of(0, 1),
            "pattern": one_of(*map(int, _PATTERNS[kind])),
            "bwIntra": float32,
            "bwInter": float32,
            "latencyInter": float32,
            "typeIntra": _PATH_TYPE,
            "typeInter": _PATH_TYPE,
            "sameChannels": integer(),
            "crossNic": integer(),
            "nHops": integer(),
            "minChannels": integer(),
            "maxChannels": integer(),
            "intra": list_of(list_of(_COUNT, min_length=1), int(kind in _NEEDED), MAX_CHANNELS),
            "inter": list_of(fixed_list(_NET, _NET)),
        }
    )


_GRAPHS = fixed_list(*map(_graph_validator, GraphKind))
_DOCUMENT = record(
    {
        "format": one_of(FORMAT),
        "nccl_version": one_of(NCCL_VERSION),
        "topology": string(),
        "nodes": integer(1),
        "gpus_per_node": integer(1),
        "nranks": integer(1),
        "collnet": one_of(0, 1),
        "fuse": one_of(0, 1),
        "gpus": list_of(_COUNT),
        "env": mapping(string()),
        "domains": list_of(list_of(_COUNT, min_length=1), min_length=1),
        "system": any_value,
        "paths": any_value,
        "graphs": _GRAPHS,
        "comm": record({"rankToNode": list_of(_COUNT)}),
        "tuning": any_value,
        "other_domain_graphs": list_of(_GRAPHS, min_length=1),
        "whole": any_value,
        "graph_xml": string(),
    },
    optional=("other_domain_graphs", "whole", "graph_xml"),
)


# Validation across values


def _check_sizes(data: Mapping[str, Any]) -> None:
    """Validate the sizes before anything of size ``nranks`` is allocated."""
    ranks = len(data["comm"]["rankToNode"])
    if data["nranks"] != data["nodes"] * data["gpus_per_node"]:
        raise_invalid(
            "nranks",
            data["nranks"],
            f"nodes times gpus_per_node, {data['nodes'] * data['gpus_per_node']}",
        )
    if ranks != data["nranks"]:
        raise TopologyError(
            f"cannot read comm.rankToNode: {ranks} entries for {data['nranks']} ranks; "
            "allowed is one per rank"
        )
    more = len(data["domains"]) - 1
    for key in ("other_domain_graphs", "whole"):
        if (key in data) != (more > 0):
            raise TopologyError(
                f"cannot read {key}: it is missing; a plan of several domains has it"
                if more
                else f"cannot read {key}: it is allowed in plans of several domains only"
            )
    if more and len(data["other_domain_graphs"]) != more:
        raise TopologyError(
            f"cannot read other_domain_graphs: {len(data['other_domain_graphs'])} entries for "
            f"{more + 1} domains; allowed is {more}"
        )


def _topology(data: Mapping[str, Any], request: PlanRequest) -> Topology:
    key = "whole" if "whole" in data else "system"
    machine = system_from_json(data[key], key)
    if sorted(gpu.rank for gpu in machine.gpus) != list(range(data["gpus_per_node"])):
        ranks = [gpu.rank for gpu in machine.gpus]
        raise TopologyError(
            f"cannot read {key}: its GPUs have ranks {ranks}; "
            f"allowed is each from 0 to {data['gpus_per_node'] - 1} once"
        )
    topology = analyse_system(machine, nodes=request.nodes, options=request.paths)
    if len(topology.domains) != len(data["domains"]):
        raise TopologyError(
            f"cannot read domains: {len(data['domains'])} entries, "
            f"but the GPUs of {key} form {len(topology.domains)}"
        )
    return topology


def _graphs_of_domains(data: Mapping[str, Any]) -> list[tuple[str, Sequence[Json]]]:
    others = [
        (f"other_domain_graphs[{number}]", graphs)
        for number, graphs in enumerate(data.get("other_domain_graphs", ()))
    ]
    return [("graphs", data["graphs"]), *others]


def _graphs(graphs: Sequence[Json], domain: Domain, where: str) -> tuple[ChannelGraph, ...]:
    """Read the graphs of a domain; channels must be orders of its ranks, NVLS heads a subset."""
    for number, graph in enumerate(graphs):
        for channel, order in enumerate(graph["intra"]):
            heads = graph["id"] == GraphKind.NVLS
            fits = (
                len(set(order)) == len(order)
                and set(order) <= set(domain.ranks)
                and (heads or len(order) == len(domain.ranks))
            )
            if not fits:
                allowed = f"{'some' if heads else 'an order'} of the ranks {sorted(domain.ranks)}"
                raise_invalid(f"{where}[{number}].intra[{channel}]", order, allowed)
    return tuple(graph_from_json(graph) for graph in graphs)


def _difference(there: Any, derived: Any, where: str) -> tuple[str, str, str] | None:
    """Return the first place where the two differ, with the value on either side."""
    if isinstance(derived, Mapping) and isinstance(there, Mapping):
        for key in [*derived, *there]:
            name = f"{where}.{key}"
            if key not in there:
                return name, "missing", _shown(derived[key])
            if key not in derived:
                return name, _shown(there[key]), "nothing"
            if found := _difference(there[key], derived[key], name):
                return found
        return None
    if isinstance(derived, list) and isinstance(there, list):
        for number, (one, other) in enumerate(zip(there, derived)):
            if found := _difference(one, other, f"{where}[{number}]"):
                return found
        return (
            None
            if len(there) == len(derived)
            else (where, f"a list of {len(there)}", f"one of {len(derived)}")
        )
    same = there == derived and isinstance(there, bool) == isinstance(derived, bool)
    return None if same else (where, _shown(there), _shown(derived))


def _shown(value: Any) -> str:
    return (
        f"{type(value).__name__} of {len(value)}"
        if isinstance(value, list | Mapping)
        else repr(value)
    )
