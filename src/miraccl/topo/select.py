"""Selection of the tree that a node uses: GPUs, their ranks, and fusion of the ranks' views.

Pure functions: each takes a root and returns a new one. The rules for missing attributes (rank
follows dev, dev follows the bus id, a GPU without ``gdr`` has GPUDirect) are those of NCCL's
reference results; fusion follows ``src/graph/xml.cc`` (ncclTopoTrimXml, ncclTopoFuseXml).
"""

from __future__ import annotations

from miraccl.errors import TopologyError
from miraccl.topo.options import TopoOptions
from miraccl.topo.xmlfile import XmlNode, bus_id

_TRIMMED = ("pci", "cpu", "nic", "net")


def select_topology(root: XmlNode, options: TopoOptions) -> XmlNode:
    """Return the tree that takes part: complete ``gpu`` elements with local ranks from 0."""
    root = root.copy()
    gpus = complete_gpus(root)
    if options.gpus:
        gpus = keep_gpus(root, gpus, options.gpus)
    _drop_empty_switches(root)
    _drop_empty_cpus(root)
    if options.collnet:
        for node in root.walk():
            if node.name == "net":
                node.attrs.setdefault("coll", "1")
    return fuse_ranks(root, gpus) if options.fuse else root


def complete_gpus(root: XmlNode) -> list[XmlNode]:
    """Add missing ``dev``, ``rank`` and ``gdr`` to ``root``; return the ``gpu`` elements by rank.

    Raises ``TopologyError`` if two GPUs have one rank.
    """
    found = [
        (child, node) for node in root.walk() for child in node.children if child.name == "gpu"
    ]
    if any("dev" not in gpu.attrs for gpu, _ in found):
        by_bus = sorted(range(len(found)), key=lambda i: bus_id(found[i][1].attrs.get("busid", "")))
        for dev, i in enumerate(by_bus):
            found[i][0].attrs["dev"] = str(dev)
    if any("rank" not in gpu.attrs for gpu, _ in found):
        for rank, (gpu, _) in enumerate(sorted(found, key=lambda pair: pair[0].integer("dev"))):
            gpu.attrs["rank"] = str(rank)
    for gpu, _ in found:
        gpu.attrs.setdefault("gdr", "1")
    by_rank: dict[int, XmlNode] = {}
    for gpu, _ in found:
        rank = gpu.integer("rank")
        if rank in by_rank:
            raise TopologyError(
                f"cannot rank the GPUs: two GPUs have rank {rank}, "
                f"lines {by_rank[rank].line} and {gpu.line}"
            )
        by_rank[rank] = gpu
    ranked = [by_rank[rank] for rank in sorted(by_rank)]
    # A dump of another node than the first has global ranks.
    for local, gpu in enumerate(ranked):
        gpu.attrs["rank"] = str(local)
    return ranked


def keep_gpus(root: XmlNode, gpus: list[XmlNode], devs: tuple[int, ...]) -> list[XmlNode]:
    """Drop the GPUs without one of these device numbers and rank the others in that order.

    Raises ``TopologyError`` for an unknown device number.
    """
    by_dev = {gpu.integer("dev"): gpu for gpu in gpus}
    missing = [dev for dev in devs if dev not in by_dev]
    if missing:
        raise TopologyError(
            f"cannot select GPU {missing[0]}: "
            f"the topology has dev {', '.join(map(str, sorted(by_dev)))}"
        )
    kept = [by_dev[dev] for dev in devs]
    for rank, gpu in enumerate(kept):
        gpu.attrs["rank"] = str(rank)
    _drop_gpus(root, {id(gpu) for gpu in kept})
    return kept


def _drop_gpus(node: XmlNode, kept: set[int]) -> None:
    node.children = [child for child in node.children if child.name != "gpu" or id(child) in kept]
    for child in node.children:
        _drop_gpus(child, kept)


def _drop_empty_switches(node: XmlNode) -> bool:
    """Remove ``pci`` elements without GPU and NIC; return True if ``node`` holds one."""
    if node.name in ("gpu", "nic"):
        return True
    holding = [(child, _drop_empty_switches(child)) for child in node.children]
    node.children = [child for child, holds in holding if holds or child.name != "pci"]
    return any(holds for _, holds in holding)


def _drop_empty_cpus(root: XmlNode) -> None:
    """Remove the CPUs that hold neither a GPU nor a net, like NCCL's ncclTopoTrimXml."""
    root.children = [
        child
        for child in root.children
        if child.name != "cpu"
        or any(n.name == "gpu" or (n.name == "net" and "dev" in n.attrs) for n in child.walk())
    ]


# Fusion


def fuse_ranks(root: XmlNode, gpus: list[XmlNode]) -> XmlNode:
    """Merge the trees that the ranks keep of this file, in rank order.

    New elements are appended to their parent.
    """
    fused: XmlNode | None = None
    for gpu in gpus:
        own = _rank_view(root, gpu)
        if own is None:
            continue
        if fused is None:
            fused = own
        else:
            _merge(fused, own)
    return fused if fused is not None else root


def _rank_view(node: XmlNode, gpu: XmlNode) -> XmlNode | None:
    """Return the part that one rank keeps: its own GPU, every net, and their parents."""
    if node is gpu or node.name == "net":
        return node.copy() if node is gpu or "dev" in node.attrs else None
    if node.name == "gpu":
        return None
    children = [view for child in node.children if (view := _rank_view(child, gpu)) is not None]
    if node.name in _TRIMMED and not any(child.name in ("gpu", *_TRIMMED) for child in children):
        return None
    return XmlNode(node.name, dict(node.attrs), children, node.single, node.line)


def _merge(into: XmlNode, other: XmlNode) -> None:
    for child in other.children:
        same = next(
            (
                c
                for c in into.children
                if c.name == child.name and c.single == child.single and c.attrs == child.attrs
            ),
            None,
        )
        if same is None:
            into.children.append(child.copy())
        else:
            _merge(same, child)
