"""Analysis of a topology file: system, paths, and the domains of GPUs."""

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
    """GPUs of a node that reach each other without the network, with their system and paths."""

    ranks: tuple[int, ...]
    system: System
    paths: PathTable


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One node of a job.

    Usually it has one domain; with several, NCCL treats each one as a node of its own. ``nranks``
    counts the ranks of the whole job; ``root`` is the tree that the systems were built from, if
    any; ``whole`` is the system before it was divided.
    """

    domains: tuple[Domain, ...]
    nranks: int
    root: XmlNode | None
    whole: System

    @property
    def system(self) -> System:
        """System of the first domain."""
        return self.domains[0].system

    @property
    def paths(self) -> PathTable:
        """Paths of the first domain."""
        return self.domains[0].paths

    @property
    def local_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Local ranks of each domain."""
        return tuple(domain.ranks for domain in self.domains)


def analyse_topology(
    root: XmlNode, options: TopoOptions | None = None, *, recorder: PathRecorder | None = None
) -> Topology:
    """Analyse one node of a job of ``options.nodes`` identical nodes.

    ``recorder`` receives the changes made to the paths of the first domain. Raises
    ``TopologyError`` if the file describes no machine that ranks could run on.
    """
    options = options or TopoOptions()
    selected = select_topology(root, options)
    whole = build_system(selected)
    _reject_dropped_gpus(selected, whole)
    topology = analyse_system(whole, nodes=options.nodes, options=options.paths, recorder=recorder)
    return replace(topology, root=selected)


def _reject_dropped_gpus(root: XmlNode, system: System) -> None:
    """Raise ``TopologyError`` for a GPU that has a rank but is missing from the graph."""
    present = {gpu.rank for gpu in system.gpus}
    for node in root.walk():
        if node.name == "gpu" and system.gpus and node.integer("rank") not in present:
            why = (
                "a <pci> holds one <gpu>, and a <pci> that holds another one has to be a PCI switch"
            )
            raise TopologyError(
                f"cannot use line {node.line}: "
                f"the GPU with dev {node.attrs.get('dev')} is not in the machine: {why}"
            )


def analyse_system(
    whole: System,
    *,
    nodes: int = 1,
    options: PathOptions | None = None,
    recorder: PathRecorder | None = None,
) -> Topology:
    """Analyse a system that was built already; all its GPUs take part.

    See :func:`analyse_topology`.
    """
    options = options or PathOptions()
    if not whole.gpus:
        raise TopologyError(
            "cannot plan on the topology: no GPU takes part, it has no <gpu> below a <pci>"
        )
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
