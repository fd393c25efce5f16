"""The whole flow, from a topology to a plan: system, paths, channel graphs, connections, tuning model.

Owns ``PlanRequest`` (what is asked, with every setting as a value), ``Plan`` (what was decided, each stage's record) and the plan's
JSON, which is the format of NCCL's reference results (format 1).  Nothing here needs a GPU, a socket or another rank, and nothing reads
the environment except :meth:`PlanRequest.read`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from miraccl.errors import InvalidUsage
from miraccl.graph.channel_graph import graph_to_json
from miraccl.graph.connect import Connections, PlannedDomain, connect, connections_to_json
from miraccl.graph.plan_settings import ConnectSettings, TuningSettings
from miraccl.graph.search import SearchResult, SearchSettings, search_channels
from miraccl.graph.tuning import TuningFacts, TuningModel, build_model
from miraccl.graph.tuning_choice import tuning_to_json
from miraccl.topo.analyse import Domain, Topology, analyse_topology
from miraccl.topo.jsonform import paths_to_json, system_to_json
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.paths import PathRecorder, compute_paths, find_domains, finish_system, keep_domain
from miraccl.topo.records import System
from miraccl.topo.xmlfile import XmlNode, read_topology

FORMAT = 1
NCCL_VERSION = "2.28.9-1"
"""The version of NCCL whose decisions a plan reproduces."""

Source = str | os.PathLike[str] | XmlNode | System


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A question to a topology; two equal requests on equal topologies have equal plans.

    ``gpus``: device numbers that take part, empty for all. ``collnet``: a CollNet plugin is present. ``fuse``: read the file as NCCL does
    with one process per GPU. ``variables``: what the environment set, for the record.
    """

    nodes: int = 1
    gpus: tuple[int, ...] = ()
    collnet: bool = False
    fuse: bool = False
    paths: PathOptions = field(default_factory=PathOptions)
    search: SearchSettings = field(default_factory=SearchSettings)
    connect: ConnectSettings = field(default_factory=ConnectSettings)
    tuning: TuningSettings = field(default_factory=TuningSettings)
    variables: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        *,
        nodes: int = 1,
        gpus: Sequence[int] = (),
        collnet: bool = False,
        fuse: bool = False,
        graph_xml: str = "",
    ) -> PlanRequest:
        """With the settings of an environment. ``graph_xml`` is the text of a file of graphs that replace the search."""
        if nodes < 1:
            raise InvalidUsage(f"a job has at least 1 node, not {nodes}")
        seen = _Seen(environ)
        request = cls(
            nodes=nodes,
            gpus=tuple(gpus),
            collnet=collnet,
            fuse=fuse,
            paths=PathOptions.read(seen),
            search=SearchSettings.read(seen, collnet=collnet, graph_xml=graph_xml),
            connect=ConnectSettings.read(seen),
            tuning=TuningSettings.read(seen),
        )
        return replace(request, variables=tuple(sorted(seen.found.items())))

    @property
    def topo(self) -> TopoOptions:
        return TopoOptions(nodes=self.nodes, gpus=self.gpus, fuse=self.fuse, collnet=self.collnet, paths=self.paths)


class _Seen(Mapping[str, str]):
    """An environment that remembers which of its variables were read, that is, which ones the plan depends on."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.found: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        value = self._environ[name]
        if value.strip():
            self.found[name] = value.strip()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What was decided. ``searches[d]`` belongs to domain d of ``topology``; the model is rank 0's."""

    request: PlanRequest
    name: str
    topology: Topology
    searches: tuple[SearchResult, ...]
    connections: Connections
    model: TuningModel


def plan(
    source: Source,
    nodes: int = 1,
    gpus: Sequence[int] = (),
    collnet: bool = False,
    fuse: bool = False,
    env: Mapping[str, str] | None = None,
    *,
    recorder: PathRecorder | None = None,
) -> Plan:
    """The plan for a job on ``nodes`` machines like ``source`` (a topology file, its tree, or a system).

    ``env`` holds NCCL's variables (default none are set); ``recorder`` hears why the paths of the first domain are as they are. Raises
    ``TopologyError`` for a topology that no rank could run on and ``InvalidUsage`` for a setting that is not allowed.
    """
    request = PlanRequest.read(env or {}, nodes=nodes, gpus=gpus, collnet=collnet, fuse=fuse)
    return make_plan(source, request, recorder=recorder)


def make_plan(source: Source, request: PlanRequest, *, recorder: PathRecorder | None = None) -> Plan:
    """Like :func:`plan`, for a request that is already put together."""
    topology = _analyse(source, request, recorder)
    searches = tuple(search_channels(domain.system, domain.paths, request.search) for domain in topology.domains)
    domains = [
        PlannedDomain(system=domain.system, paths=domain.paths, graphs={graph.kind: graph for graph in search.graphs})
        for domain, search in zip(topology.domains, searches)
    ]
    connections = connect(
        domains,
        hosts=request.nodes,
        gpus_per_host=topology.nranks // request.nodes,
        collnet=request.collnet,
        settings=request.connect,
    )
    model = build_model(TuningFacts.of(connections, topology.system), request.tuning)
    name = Path(source).name if isinstance(source, str | os.PathLike) else ""
    return Plan(request=request, name=name, topology=topology, searches=searches, connections=connections, model=model)


def _analyse(source: Source, request: PlanRequest, recorder: PathRecorder | None) -> Topology:
    if isinstance(source, System):
        return _analyse_system(source, request, recorder)
    root = source if isinstance(source, XmlNode) else read_topology(source).root
    return analyse_topology(root, request.topo, recorder=recorder)


def _analyse_system(whole: System, request: PlanRequest, recorder: PathRecorder | None) -> Topology:
    """The stage after a file was read: paths, and one system for each group of GPUs that only the network joins to the others."""
    if request.gpus or request.fuse:
        raise InvalidUsage("GPUs are chosen and ranks are fused in a topology file, not in a system that was built already")
    nranks = len(whole.gpus) * request.nodes
    first = compute_paths(whole, request.paths)
    groups = find_domains(whole, first)
    domains: list[Domain] = []
    for group in groups:
        system = whole if len(groups) == 1 else keep_domain(whole, group)
        paths = compute_paths(system, request.paths, recorder=None if domains else recorder)
        system = finish_system(system, paths, request.paths, nranks=nranks)
        domains.append(Domain(ranks=tuple(gpu.rank for gpu in system.gpus), system=system, paths=paths))
    return Topology(domains=tuple(domains), nranks=nranks, root=XmlNode("system"), whole=whole)


def plan_to_json(made: Plan) -> dict[str, Any]:
    """The plan in the format of the reference results."""
    topology, request = made.topology, made.request
    graphs = [[graph_to_json(graph) for graph in search.graphs] for search in made.searches]
    result: dict[str, Any] = {
        "format": FORMAT,
        "nccl_version": NCCL_VERSION,
        "topology": made.name,
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
        "comm": connections_to_json(made.connections),
        "tuning": tuning_to_json(made.model),
    }
    if len(graphs) > 1:
        result["other_domain_graphs"] = graphs[1:]
    return result
