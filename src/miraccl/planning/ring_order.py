"""Ring order of the GPUs of a host, from the channel search.

``ring``, ``chain`` and ``double_binary_tree`` (also with protocol Simple) communicate with
neighbours only, so the order matters. Rank 0 uses the topology that the transport has read
(``transport.cuda_pairs``). If all GPUs are equally distant, rank order is as good as any; otherwise
``graph`` searches with the settings of NCCL's search, and the result is cached with the plans on
disk. On any error the order is that of the ranks, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miraccl import params, trace
from miraccl.topo.records import LOCAL_ID_MASK
from miraccl.topo.xmlfile import XmlNode, bus_id, format_topology
from miraccl.transport.cuda_pairs import GpuFacts, GpuPaths

_log = trace.logger("graph")


@dataclass(frozen=True, kw_only=True)
class RingOrder:
    """Ranks in ring order, and the reason for it."""

    order: tuple[int, ...]
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"order": list(self.order), "why": self.reason}

    @classmethod
    def from_json(cls, record: Any) -> RingOrder:
        return cls(order=tuple(int(rank) for rank in record["order"]), reason=str(record["why"]))

    @property
    def kernel_order(self) -> tuple[int, ...]:
        """Order for ``executor.cuda.lower``; empty for rank order."""
        return () if self.order == tuple(range(len(self.order))) else self.order


def rank_order(nranks: int, reason: str) -> RingOrder:
    return RingOrder(order=tuple(range(nranks)), reason=reason)


def find_ring(facts: Sequence[GpuFacts], paths: GpuPaths) -> RingOrder:
    """Return the ring order of ranks with these GPUs. Never raises.

    ``paths``: the topology as read by this process.
    """
    nranks, ids = len(facts), [fact.bus_id for fact in facts]
    if nranks < 3:
        return rank_order(nranks, "at most two ranks")
    if len(set(ids)) < nranks:
        return rank_order(nranks, "ranks share a GPU")
    try:
        if paths.topology is None or paths.machine is None:
            raise LookupError(paths.note or "no topology")
        graph_file = params.GRAPH_FILE.read()
        if not graph_file and (near := _uniform_distance(paths, ids)):
            return rank_order(nranks, f"all GPUs are equally distant ({near})")
        order, near = _search_cached(paths.machine, ids, graph_file)
    except Exception as error:  # unexpected topologies must not prevent communication
        _log.warning("GPU rings use rank order: %s", error)
        return rank_order(nranks, f"cannot find a ring: {error}")
    return RingOrder(order=order, reason=f"ring of {graph_file or 'the channel search'} ({near})")


def _uniform_distance(paths: GpuPaths, ids: Sequence[str]) -> str:
    """Return the path type and bandwidth that all pairs of GPUs share; empty if they differ."""
    assert paths.topology is not None
    for domain in paths.topology.domains:
        place = {
            gpu.id & LOCAL_ID_MASK: position for position, gpu in enumerate(domain.system.gpus)
        }
        here = [place.get(bus_id(text)) for text in ids]
        if None in here:
            continue
        pairs = [
            domain.paths.gpu_gpu(a, b)
            for a in here
            for b in here
            if a is not None and b is not None and a != b
        ]
        if len({(path.type, path.bw) for path in pairs}) == 1:
            return f"{pairs[0].type.name}, {pairs[0].bw:g} GB/s"
    return ""


def _search_cached(
    machine: XmlNode, ids: Sequence[str], graph_file: str
) -> tuple[tuple[int, ...], str]:
    """Return (order, slowest neighbour path) of the first channel, from disk or a search."""
    from miraccl.graph.plan import (
        PlanRequest,
    )
    from miraccl.graph.plan_cache import cached_document, plan_key
    from miraccl.native.cache import plan_folder

    graphs = Path(graph_file).read_text() if graph_file else ""
    request = PlanRequest.read(os.environ, gpus=_device_numbers(machine, ids), graph_xml=graphs)
    key = plan_key(format_topology(machine).encode(), request, variant="gpu ring")
    found = cached_document(plan_folder(), key, lambda: _search(machine, request)).data
    order = tuple(int(rank) for rank in found["order"])
    if sorted(order) != list(range(len(ids))):
        raise LookupError(f"the search returned {list(order)} for {len(ids)} ranks")
    return order, f"{found['path']}, {found['bw']:g} GB/s per channel"


def _search(machine: XmlNode, request: Any) -> dict[str, Any]:
    """Search the ring graph; GPUs joined only by the network follow each other by group."""
    from miraccl.graph.kinds import GraphKind
    from miraccl.graph.search import search_channels
    from miraccl.topo.analyse import analyse_topology

    order: list[int] = []
    graphs = []
    for domain in analyse_topology(machine, request.topo).domains:
        graph = search_channels(domain.system, domain.paths, request.search).graphs[GraphKind.RING]
        graphs.append(graph)
        order += graph.intra[0]
    slowest = min(graphs, key=lambda graph: graph.bw_intra)
    return {"order": order, "bw": slowest.bw_intra, "path": slowest.type_intra.name}


def _device_numbers(machine: XmlNode, ids: Sequence[str]) -> tuple[int, ...]:
    """Return the topology's device numbers of the GPUs with these bus ids."""
    numbers = {
        bus_id(node.attrs["busid"]): int(gpu.attrs["dev"])
        for node in machine.walk()
        if node.name == "pci" and "busid" in node.attrs
        for gpu in node.children
        if gpu.name == "gpu" and "dev" in gpu.attrs
    }
    missing = [text for text in ids if bus_id(text) not in numbers]
    if missing:
        raise LookupError(f"the topology has no GPU {missing[0]}")
    return tuple(numbers[bus_id(text)] for text in ids)
