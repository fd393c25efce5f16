"""From a topology file to everything the search needs: system, paths, and the domains of GPUs that only the network joins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from miraccl.errors import TopologyError
from miraccl.topo.build import build_system
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.paths import (
    PathRecorder,
    compute_paths,
    find_domains,
    finish_system,
    restrict_to_domain,
)
from miraccl.topo.records import PathTable, System
from miraccl.topo.select import select_topology
from miraccl.topo.xmlfile import XmlNode


@dataclass(frozen=True, kw_only=True)
class Domain:
    """GPUs of a node that reach each other without the network, with the system and the paths they see."""

    ranks: tuple[int, ...]
    system: System
    paths: PathTable


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One node of a job. Usually there is one domain; with several, NCCL treats each as a node of its own.

    ``nranks``: ranks of the whole job; ``root``: the tree the systems were built from, if there was one; ``whole``: the system before
    GPUs were put apart.
    """

    domains: tuple[Domain, ...]
    nranks: int
    root: XmlNode | None
    whole: System

    @property
    def system(self) -> System:
        return self.domains[0].system

    @property
    def paths(self) -> PathTable:
        return self.domains[0].paths

    @property
    def local_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The local ranks of each domain."""
        return tuple(domain.ranks for domain in self.domains)


def analyse_topology(
    root: XmlNode, options: TopoOptions | None = None, *, recorder: PathRecorder | None = None
) -> Topology:
    """The topology of one node of a job of ``options.nodes`` such nodes. ``recorder`` hears why the paths of the
    first domain are as they are.

    Raises ``TopologyError`` when the file describes no machine that ranks could run on.
    """
    options = options or TopoOptions()
    selected = select_topology(root, options)
    whole = build_system(selected)
    _reject_dropped_gpus(selected, whole)
    topology = analyse_system(whole, nodes=options.nodes, options=options.paths, recorder=recorder)
    return replace(topology, root=selected)


def _reject_dropped_gpus(root: XmlNode, system: System) -> None:
    """A GPU that has a rank and is not in the graph would leave a job with holes."""
    there = {gpu.rank for gpu in system.gpus}
    for node in root.walk():
        if node.name == "gpu" and system.gpus and node.integer("rank") not in there:
            why = (
                "a <pci> holds one <gpu>, and a <pci> that holds another one has to be a PCI switch"
            )
            raise TopologyError(
                f"line {node.line}: the GPU with dev {node.attrs.get('dev')} is not in the machine: {why}"
            )


def analyse_system(
    whole: System,
    *,
    nodes: int = 1,
    options: PathOptions | None = None,
    recorder: PathRecorder | None = None,
) -> Topology:
    """As :func:`analyse_topology`, for a system that was built already (all its GPUs take part)."""
    options = options or PathOptions()
    if not whole.gpus:
        raise TopologyError("no GPU takes part: the topology has no <gpu> below a <pci>")
    nranks = len(whole.gpus) * nodes
    first = compute_paths(whole, options, recorder=recorder)
    groups = find_domains(whole, first)
    if len(groups) > 1 and recorder is not None:
        recorder.split()
    domains: list[Domain] = []
    for group in groups:
        system = whole if len(groups) == 1 else restrict_to_domain(whole, group)
        paths = (
            first
            if system is whole
            else compute_paths(system, options, recorder=None if domains else recorder)
        )
        system = finish_system(system, paths, options, nranks=nranks)
        domains.append(
            Domain(ranks=tuple(gpu.rank for gpu in system.gpus), system=system, paths=paths)
        )
    return Topology(domains=tuple(domains), nranks=nranks, root=None, whole=whole)
