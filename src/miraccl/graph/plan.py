"""The complete planning flow: system, paths, channel graphs, connections, tuning model.

``PlanRequest`` holds every setting as a value; ``Plan`` holds the record of each stage
(``plan_json`` writes and reads it). Planning needs no GPU, no socket and no other rank, and reads
the environment in :meth:`PlanRequest.read` only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.graph.connect import Connections, SearchedDomain, connect
from miraccl.graph.plan_settings import ConnectSettings, TuningSettings
from miraccl.graph.search import SearchResult, SearchSettings, search_channels
from miraccl.graph.tuning import TuningModel, build_model
from miraccl.graph.tuning_inputs import TuningInputs
from miraccl.topo.analyse import Topology, analyse_system, analyse_topology
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.paths import PathRecorder
from miraccl.topo.records import System
from miraccl.topo.xmlfile import XmlNode, read_topology

TopologySource = str | os.PathLike[str] | XmlNode | System


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Settings of a plan; equal requests on equal topologies have equal plans.

    ``gpus`` lists the device numbers that take part, empty for all. ``collnet`` states that a
    CollNet plugin is present. ``fuse`` reads the file like NCCL with one process per GPU.
    ``variables`` records the environment variables that were read.
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
        """Read the settings from an environment.

        ``graph_xml`` is the text of a file of graphs that replace the search. Raises
        ``InvalidUsage`` for fewer than 1 node or a setting that is not allowed.
        """
        if nodes < 1:
            raise InvalidUsage(f"cannot plan for {nodes} nodes: a job has at least 1")
        recording = _RecordingEnviron(environ)
        collnet = params.COLLNET_ENABLE.read(recording) == 1 and collnet
        request = cls(
            nodes=nodes,
            gpus=tuple(gpus),
            collnet=collnet,
            fuse=fuse,
            paths=PathOptions.read(recording),
            search=SearchSettings.read(recording, collnet=collnet, graph_xml=graph_xml),
            connect=ConnectSettings.read(recording),
            tuning=TuningSettings.read(recording),
        )
        return replace(request, variables=tuple(sorted(recording.found.items())))

    @property
    def topo(self) -> TopoOptions:
        """The settings of the topology stage."""
        return TopoOptions(
            nodes=self.nodes, gpus=self.gpus, fuse=self.fuse, collnet=self.collnet, paths=self.paths
        )


class _RecordingEnviron(Mapping[str, str]):
    """An environment that records the variables read from it: those that a plan depends on."""

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
    """The decisions of all stages.

    ``searches[d]`` belongs to domain d of ``topology``; ``model`` is that of rank 0.
    """

    request: PlanRequest
    name: str
    topology: Topology
    searches: tuple[SearchResult, ...]
    connections: Connections
    model: TuningModel


def plan(
    source: TopologySource,
    nodes: int = 1,
    gpus: Sequence[int] = (),
    collnet: bool = False,
    fuse: bool = False,
    env: Mapping[str, str] | None = None,
    *,
    recorder: PathRecorder | None = None,
) -> Plan:
    """Plan a job on ``nodes`` machines like ``source``: a topology file, its tree, or a system.

    ``env`` holds NCCL variables, none by default; ``recorder`` receives the changes made to the
    paths of the first domain. Raises ``TopologyError`` for a topology that no rank could run on and
    ``InvalidUsage`` for a setting that is not allowed.
    """
    request = PlanRequest.read(env or {}, nodes=nodes, gpus=gpus, collnet=collnet, fuse=fuse)
    return make_plan(source, request, recorder=recorder)


def make_plan(
    source: TopologySource, request: PlanRequest, *, recorder: PathRecorder | None = None
) -> Plan:
    """Plan a complete request; see :func:`plan`."""
    topology = _analyse(source, request, recorder)
    searches = tuple(
        search_channels(domain.system, domain.paths, request.search) for domain in topology.domains
    )
    name = Path(source).name if isinstance(source, str | os.PathLike) else ""
    return plan_from_graphs(request, topology, searches, name=name)


def plan_from_graphs(
    request: PlanRequest, topology: Topology, searches: Sequence[SearchResult], *, name: str = ""
) -> Plan:
    """Run the stages after the search; ``searches[d]`` is the result on domain d."""
    domains = [
        SearchedDomain(
            system=domain.system,
            paths=domain.paths,
            graphs={graph.kind: graph for graph in search.graphs},
        )
        for domain, search in zip(topology.domains, searches, strict=True)
    ]
    connections = connect(
        domains,
        hosts=request.nodes,
        gpus_per_host=topology.nranks // request.nodes,
        collnet=request.collnet,
        settings=request.connect,
    )
    model = build_model(TuningInputs.of(connections, topology.system), request.tuning)
    return Plan(
        request=request,
        name=name,
        topology=topology,
        searches=tuple(searches),
        connections=connections,
        model=model,
    )


def _analyse(
    source: TopologySource, request: PlanRequest, recorder: PathRecorder | None
) -> Topology:
    if isinstance(source, System):
        if request.gpus or request.fuse:
            raise InvalidUsage(
                "cannot select GPUs or fuse ranks in a System: both need a topology file"
            )
        return analyse_system(source, nodes=request.nodes, options=request.paths, recorder=recorder)
    root = source if isinstance(source, XmlNode) else read_topology(source).root
    return analyse_topology(root, request.topo, recorder=recorder)
