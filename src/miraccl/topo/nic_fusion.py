"""Fusion of NICs: several ports that communicators use as one network device.

The rules are those of NCCL's ``ncclTopoMakeVNics`` (``src/graph/topo.cc``):

- ``NET_FORCE_MERGE`` names groups: ports separated by commas, groups by semicolons.
- Every other port is the first of a group that takes the ports at most ``NET_MERGE_LEVEL`` away.
  The distance of two ports of a NIC is PORT, otherwise the path type of their PCI devices.
- A group has at most eight ports. One port alone stays as it is.

A fused device is called ``a+b`` and has the sum of the speeds. The ports of one NIC stay in its
place; others move below a PCI device of their own at their common ancestor, whose link has the sum
of their widths.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from miraccl.errors import InvalidUsage
from miraccl.topo.records import PathType
from miraccl.topo.xmlfile import XmlNode

MAX_DEVICES = 8
"""Ports of a fused device: ``NCCL_NET_MAX_DEVS_PER_NIC`` since interface v12."""
PORT = PathType.NVL
"""Distance of two ports of one NIC: NCCL's PATH_PORT has the value of NVL."""


def parse_groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse ``NET_FORCE_MERGE``: ``a,b;c,d`` are two groups."""
    groups = (tuple(filter(None, group.split(","))) for group in text.split(";"))
    return tuple(group for group in groups if group)


def fuse_nics(root: XmlNode, names: Sequence[str], *, level: int, force: str = "") -> list[str]:
    """Fuse nets of a tree, in place; return a sentence per fused device.

    Args:
        names: Nets that may be fused, in the order of their devices.
        level: Farthest distance of two ports of a device, a ``PathType``; LOC fuses none.
        force: Value of ``NET_FORCE_MERGE``.

    Raises:
        InvalidUsage: ``force`` names a port that does not exist, twice, or too many.
    """
    parents = {id(child): node for node in root.walk() for child in node.children}
    nets = {
        node.attrs["name"]: node
        for node in root.walk()
        if node.name == "net" and node.attrs.get("name") in names
    }
    chains = {name: _chain(parents, nets[name]) for name in names if name in nets}
    groups = _forced(force, list(chains))
    placed = {name for group in groups for name in group}
    for name in chains:
        if name in placed:
            continue
        members = [name]
        for other in chains:
            near = other not in placed and other != name and len(members) < MAX_DEVICES
            if near and distance(chains[name], chains[other]) <= level:
                members.append(other)
        placed.update(members)
        groups.append(tuple(members))
    texts = []
    number = len(names)
    for group in groups:
        if len(group) > 1:
            _fuse(root, [chains[name] for name in group], number)
            number += 1
            texts.append(f"{' and '.join(group)} are one network device")
    return texts


def _forced(force: str, names: Sequence[str]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    seen: set[str] = set()
    for group in parse_groups(force):
        problem = ""
        if unknown := [name for name in group if name not in names]:
            problem = f"there is no active port {unknown[0]} (ports: {', '.join(names) or 'none'})"
        elif len(group) > MAX_DEVICES:
            problem = f"{len(group)} ports; at most {MAX_DEVICES} are allowed"
        elif len({*group}) < len(group) or seen & {*group}:
            problem = "a port is named twice"
        if problem:
            raise InvalidUsage(
                f"cannot fuse {','.join(group)} as MIRACCL_NET_FORCE_MERGE says: {problem}"
            )
        seen |= {*group}
        groups.append(group)
    return groups


def _chain(parents: dict[int, XmlNode], node: XmlNode) -> list[XmlNode]:
    """Return a net and its ancestors, the root last."""
    chain = [node]
    while id(chain[-1]) in parents:
        chain.append(parents[id(chain[-1])])
    return chain


def _common(chains: Sequence[Sequence[XmlNode]]) -> XmlNode:
    """Return the nearest common ancestor."""
    for node in chains[0]:
        if all(any(node is other for other in chain) for chain in chains):
            return node
    raise AssertionError("the chains have different roots")


def distance(a: Sequence[XmlNode], b: Sequence[XmlNode]) -> int:
    """Return the path type of two nets, each given with its ancestors."""
    common = _common([a, b])
    if common.name in ("nic", "net"):
        return PORT
    if common.name == "system":
        return PathType.SYS
    if common.name == "cpu":
        return PathType.PHB
    bridges = [sum(node.name == "pci" for node in chain[: chain.index(common)]) for chain in (a, b)]
    return PathType.PIX if max(bridges) <= 1 else PathType.PXB


def _fuse(root: XmlNode, chains: Sequence[list[XmlNode]], number: int) -> None:
    nets = [chain[0] for chain in chains]
    fused = nets[0].copy()
    fused.attrs |= {
        "name": "+".join(net.attrs["name"] for net in nets),
        "dev": str(number),
        "speed": str(sum(net.integer("speed") for net in nets)),
        "gdr": str(min(net.integer("gdr") for net in nets)),
    }
    common = _common(chains)
    if common.name == "nic":
        home = common
    else:
        home = XmlNode("nic")
        common.children.append(_own_device(root, chains, home))
    home.children.append(fused)  # first: a nic without nets is removed
    for chain in chains:
        _remove(chain)


def _own_device(root: XmlNode, chains: Sequence[list[XmlNode]], nic: XmlNode) -> XmlNode:
    """Return a PCI device for ``nic`` with an address of its own; ``nic`` where there is no PCI."""
    devices = [next((node for node in chain if node.name == "pci"), None) for chain in chains]
    known = [device for device in devices if device is not None]
    if not known:
        return nic
    attrs = dict(known[0].attrs)
    attrs["busid"] = _free_bus_id(root, known[0].attrs["busid"])
    widths = [device.integer("link_width") for device in known]
    if all(widths):
        attrs["link_width"] = str(sum(widths))
    return XmlNode("pci", attrs, [nic])


def _free_bus_id(root: XmlNode, bus_id: str) -> str:
    """Return the next address that no device of the tree has."""
    used = {node.attrs.get("busid", "").lower() for node in root.walk() if node.name == "pci"}
    value = int(bus_id.replace(":", "").replace(".", ""), 16)
    while True:
        value += 1
        digits = f"{value:09x}"
        made = f"{digits[:4]}:{digits[4:6]}:{digits[6:8]}.{digits[8]}"
        if made not in used:
            return made


def _remove(chain: list[XmlNode]) -> None:
    """Remove a net, and the nic and PCI device that are empty without it."""
    for node, parent in itertools.pairwise(chain):
        parent.children = [child for child in parent.children if child is not node]
        if parent.children or parent.name not in ("nic", "pci") or node.name == "pci":
            return
