"""Findings about a topology file: errors, assumptions, and how to fix them.

Findings never change a plan: the reader's defaults are NCCL's (an unknown PCI speed is 8 GT/s, a
width of 0 is 16 lanes, a net without a speed has 10 Gbit/s ...). This module reports the places
where a default was used and the value to write instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from miraccl.errors import TopologyError
from miraccl.topo.accelerators import LINK_ELEMENT, Accelerator, link_bw
from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.hardware import (
    NET_SPEED_DEFAULT,
    PCI_SPEEDS,
    PCI_WIDTH_DEFAULT,
    pci_bw,
    pci_class,
)
from miraccl.topo.load import load_topology
from miraccl.topo.records import NodeType, PathType
from miraccl.topo.sysfs import BUS_ID
from miraccl.topo.xmlfile import XmlFile, XmlNode, bus_id

Severity = Literal["error", "warning", "note"]

_SM = range(30, 200)
"""Plausible compute capabilities times ten."""


@dataclass(frozen=True, kw_only=True)
class TopologyFinding:
    """One finding: ``error`` prevents the use of the file, ``warning`` is probably a mistake,
    ``note``
    is an assumption.

    ``line`` is 0 for the whole file. ``count`` equal findings are merged at the first line. ``fix``
    says what to write instead.
    """

    severity: Severity
    line: int
    text: str
    fix: str = ""
    count: int = 1


def check_file(
    path: str | os.PathLike[str] | None = None, *, accelerators: Sequence[Accelerator] | None = None
) -> list[TopologyFinding]:
    """Read a file (None like ``load_topology``) and check it.

    If it cannot be read, the reason is the only finding.
    """
    try:
        file = load_topology(path, accelerators=accelerators)
    except TopologyError as error:
        return [_describe_error(error)]
    return check_topology(file)


def check_topology(file: XmlFile) -> list[TopologyFinding]:
    """Return the findings in the order of the file, equal ones merged."""
    describe = (
        "links and devices NCCL does not know can be described in a TOML file (--accelerators)"
    )
    fixes = {
        "inside <gpu>": describe,
        "inside <pci>": describe,
        "attributes": "",
        "rejects": "NCCL itself would reject the file",
    }
    found = []
    for line, text in file.notes:
        fix = next((fix for phrase, fix in fixes.items() if phrase in text), "")
        found.append(TopologyFinding(severity="note", line=line, text=text, fix=fix))
    if file.version == 2:
        text = (
            "version 2 is AMD's dialect: xgmi elements are read as links between GPUs; "
            "NCCL rejects the file"
        )
        found.append(
            TopologyFinding(
                severity="note",
                line=file.root.line,
                text=text,
                fix='for NCCL write version="1" and nvlink elements',
            )
        )
    for check in (_cpus, _pcis, _gpus, _links, _nets):
        found += check(file.root)
    try:
        found += _planned(analyse_topology(file.root))
    except TopologyError as error:
        found.append(_describe_error(error))
    return _merge_equal(sorted(found, key=lambda finding: finding.line))


def _describe_error(error: TopologyError) -> TopologyFinding:
    match = re.search(r"lines? (\d+)", error.message)
    text = error.message
    fix = ""
    if any(
        phrase in text
        for phrase in ("not closed", "no element found", "mismatched tag", "unclosed token")
    ):
        fix = "close every element, <pci ...>...</pci> or <pci .../>"
    elif "duplicate attribute" in text:
        fix = "remove one of the two"
    elif "has no sm" in text:
        fix = 'add sm="80" (the compute capability times ten)'
    elif "no GPU takes part" in text:
        fix = (
            "this is the PCI tree only: add a <gpu> element to the <pci> element of each GPU, "
            "or have NCCL or detection complete it"
        )
    elif "two GPUs have rank" in text:
        fix = "give each gpu element its own rank"
    # Every finding is printed with its line in front.
    text = re.sub(r"^.*?line \d+: ", "", text)
    return TopologyFinding(severity="error", line=int(match[1]) if match else 0, text=text, fix=fix)


def _merge_equal(found: list[TopologyFinding]) -> list[TopologyFinding]:
    counts: dict[tuple[Severity, str, str], list[int]] = {}
    for finding in found:
        counts.setdefault((finding.severity, finding.text, finding.fix), []).append(finding.line)
    return [
        TopologyFinding(severity=kind, line=at[0], text=text, fix=fix, count=len(at))
        for (kind, text, fix), at in counts.items()
    ]


def _elements(root: XmlNode, name: str) -> Iterator[XmlNode]:
    return (node for node in root.walk() if node.name == name)


def _hosts(root: XmlNode) -> dict[int, str | None]:
    """Return the host of each element below a cpu: bus ids and device numbers are per host."""
    return {
        id(node): cpu.attrs.get("host_hash")
        for cpu in _elements(root, "cpu")
        for node in cpu.walk()
    }


def _named_by(root: XmlNode, name: str, *more: str) -> Callable[[XmlNode], object]:
    """Return a key function for ``_repeated``: these attributes on one host, None without the
    first.
    """
    hosts = _hosts(root)
    return lambda node: (
        (hosts[id(node)], *map(node.attrs.get, (name, *more))) if name in node.attrs else None
    )


def _repeated(
    nodes: Iterator[XmlNode], key: Callable[[XmlNode], object]
) -> Iterator[tuple[XmlNode, XmlNode]]:
    """Yield pairs of a node and an earlier one with the same key; None never matches."""
    first: dict[object, XmlNode] = {}
    for node in nodes:
        value = key(node)
        if value is not None and value in first:
            yield node, first[value]
        else:
            first[value] = node


def _cpus(root: XmlNode) -> Iterator[TopologyFinding]:
    for cpu in _elements(root, "cpu"):
        if cpu.integer("numaid") == -1:
            text = (
                "numaid is -1: the NUMA domain is unknown (a virtual machine often hides it); "
                "everything below counts as one domain"
            )
            yield TopologyFinding(
                severity="note",
                line=cpu.line,
                text=text,
                fix="write one cpu element per NUMA domain, numaid 0, 1, ...",
            )
        if "arch" not in cpu.attrs:
            text = "cpu without arch: traffic between NUMA domains is taken to be unlimited"
            yield TopologyFinding(
                severity="warning",
                line=cpu.line,
                text=text,
                fix='add arch="x86_64", vendor, familyid and modelid',
            )
        elif cpu.attrs["arch"] == "x86_64" and "vendor" not in cpu.attrs:
            text = "x86 cpu without vendor: traffic between NUMA domains is taken to be unlimited"
            yield TopologyFinding(
                severity="warning",
                line=cpu.line,
                text=text,
                fix='add vendor="GenuineIntel", familyid, modelid',
            )
    hosts = {cpu.attrs.get("host_hash") for cpu in _elements(root, "cpu")}
    if len(hosts) > 1:
        text = f"cpu elements of {len(hosts)} hosts (host_hash): the file holds several machines"
        yield TopologyFinding(severity="note", line=root.line, text=text)
    for cpu, first in _repeated(
        _elements(root, "cpu"), lambda c: (c.attrs.get("host_hash"), c.attrs.get("numaid"))
    ):
        text = f"numaid {cpu.attrs.get('numaid')} again, first in line {first.line}"
        yield TopologyFinding(
            severity="warning", line=cpu.line, text=text, fix="put what is below it into the first"
        )


def _pcis(root: XmlNode) -> Iterator[TopologyFinding]:
    for pci in _elements(root, "pci"):
        if "busid" in pci.attrs and not BUS_ID.fullmatch(pci.attrs["busid"]):
            text = f"busid {pci.attrs['busid']!r} is not like 0000:1b:00.0"
            yield TopologyFinding(
                severity="warning",
                line=pci.line,
                text=text,
                fix="write domain:bus:device.function in hex",
            )
        device = any(child.name in ("gpu", "nic") for child in pci.children)
        for kind in ("gpu", "nic"):
            for more in [child for child in pci.children if child.name == kind][1:]:
                text = (
                    f"another {kind} in the pci element of line {pci.line}: "
                    "only the first counts, this one is ignored"
                )
                yield TopologyFinding(
                    severity="warning",
                    line=more.line,
                    text=text,
                    fix=f"give each {kind} its own pci element, or join them",
                )
        if "class" not in pci.attrs and not device:
            text = "pci without class: taken for a PCI switch"
            yield TopologyFinding(
                severity="note", line=pci.line, text=text, fix='add class="0x060400"'
            )
        if not device and pci_class(pci.attrs.get("class", "")) != NodeType.PCI:
            text = (
                f"a device of class {pci.attrs['class']} without gpu or nic element: "
                "it is ignored with all below it"
            )
            yield TopologyFinding(severity="note", line=pci.line, text=text)
        elif not any(node.name in ("gpu", "nic") for node in pci.walk()):
            yield TopologyFinding(
                severity="note",
                line=pci.line,
                text="a PCI switch without GPU and NIC: it is ignored",
            )
        else:
            yield from _pci_link(pci)
    for pci, first in _repeated(_elements(root, "pci"), _named_by(root, "busid")):
        text = f"busid {pci.attrs['busid']} again, first in line {first.line}"
        yield TopologyFinding(
            severity="warning", line=pci.line, text=text, fix="each PCI device has one element"
        )


def _pci_link(pci: XmlNode) -> Iterator[TopologyFinding]:
    speed, width = pci.attrs.get("link_speed", ""), pci.integer("link_width")
    known = any(speed.startswith(prefix) for prefix, _ in PCI_SPEEDS)
    bw = pci_bw(speed, width)
    what = (
        ", ".join(child.name for child in pci.children if child.name in ("gpu", "nic")) or "switch"
    )
    lanes = f"{width or PCI_WIDTH_DEFAULT} lanes"
    if not known:
        text = (
            f"link_speed of a {what} is {repr(speed) if speed else 'missing'}: "
            f"8 GT/s assumed, with {lanes} {bw:g} GB/s"
        )
        yield TopologyFinding(
            severity="warning",
            line=pci.line,
            text=text,
            fix='write the real one, such as link_speed="32.0 GT/s PCIe"',
        )
    if width == 0:
        text = (
            f"link_width of a {what} is {pci.attrs.get('link_width') or 'missing'}: "
            f"{lanes} assumed, {bw:g} GB/s"
        )
        yield TopologyFinding(
            severity="note",
            line=pci.line,
            text=text,
            fix='write the real one, such as link_width="16"',
        )
    elif width < 0:
        yield TopologyFinding(
            severity="warning",
            line=pci.line,
            text=f"link_width is {width}: the link carries nothing",
            fix='link_width="16"',
        )
    net_bw = sum(max(0, net.integer("speed")) for net in _elements(pci, "net")) / 8000
    # 24 GB/s of PCI for 25 GB/s of network is the usual ratio of a machine.
    if net_bw * 0.9 > bw and what == "nic":
        text = f"its nets offer {net_bw:g} GB/s, its PCI link {bw:g} GB/s: the PCI link limits them"
        yield TopologyFinding(
            severity="note" if known and width else "warning", line=pci.line, text=text
        )


def _gpus(root: XmlNode) -> Iterator[TopologyFinding]:
    gpus = list(_elements(root, "gpu"))
    for key in ("dev", "rank"):
        lacking = [gpu for gpu in gpus if key not in gpu.attrs]
        if lacking:
            rule = "numbered by bus id" if key == "dev" else "numbered by dev"
            yield TopologyFinding(
                severity="note",
                line=lacking[0].line,
                text=f"gpu without {key}: {rule}",
                fix=f"add {key} to every gpu",
            )
    for gpu in gpus:
        if (kind := gpu.attrs.get("accelerator", "").partition(" ")[0]) and "sm" in gpu.attrs:
            text = f"{kind} is planned as if it were a GPU of sm {gpu.attrs['sm']}"
            yield TopologyFinding(severity="note", line=gpu.line, text=text)
        if "sm" in gpu.attrs and gpu.integer("sm") not in _SM:
            text = f"sm of a gpu is {gpu.attrs['sm']!r}, read as {gpu.integer('sm')}: no GPU has it"
            yield TopologyFinding(
                severity="warning",
                line=gpu.line,
                text=text,
                fix='write the compute capability times ten, such as sm="90"',
            )
        if "gdr" not in gpu.attrs:
            yield TopologyFinding(
                severity="note",
                line=gpu.line,
                text="gpu without gdr: GPUDirect RDMA assumed",
                fix='add gdr="1" or gdr="0"',
            )
    for gpu, first in _repeated(iter(gpus), _named_by(root, "dev")):
        text = f"dev {gpu.attrs['dev']} again, first in line {first.line}"
        yield TopologyFinding(
            severity="warning", line=gpu.line, text=text, fix="give each gpu element its own dev"
        )
    if len({gpu.attrs.get("sm") for gpu in gpus}) > 1:
        kinds = ", ".join(sorted({gpu.attrs.get("sm", "none") for gpu in gpus}))
        yield TopologyFinding(
            severity="note",
            line=gpus[0].line,
            text=f"GPUs of different sm ({kinds}) in one machine",
        )


def _links(root: XmlNode) -> Iterator[TopologyFinding]:
    counts: dict[tuple[tuple[str | None, int], tuple[str | None, int]], int] = {}
    owners: dict[tuple[str | None, int], XmlNode] = {}
    hosts = _hosts(root)
    for pci in _elements(root, "pci"):
        gpu = pci.child("gpu")
        if gpu is not None:
            owners[hosts[id(pci)], bus_id(pci.attrs.get("busid", ""))] = gpu
    for own, gpu in owners.items():
        for link in gpu.children:
            if link.name == LINK_ELEMENT:
                yield from _described_link(link, gpu)
            peer = link.name == "nvlink" and pci_class(link.attrs.get("tclass", "")) == NodeType.GPU
            if not peer and link.attrs.get("kind") != "gpu":
                continue
            target = own[0], bus_id(link.attrs.get("target", ""))
            counts[own, target] = counts.get((own, target), 0) + link.integer("count")
            if target == own:
                text = f"a GPU linked to itself ({link.attrs.get('target')}): the link is useless"
                fix = (
                    'write the bus id of the other GPU; for a link to an NVSwitch tclass="0x068000"'
                )
                yield TopologyFinding(severity="warning", line=link.line, text=text, fix=fix)
            elif target not in owners:
                text = f"a link to {link.attrs.get('target')}, which is not a GPU: it is ignored"
                yield TopologyFinding(
                    severity="warning",
                    line=link.line,
                    text=text,
                    fix="correct the target, or add that GPU",
                )
    for (one, other), count in counts.items():
        back = counts.get((other, one), 0)
        if other in owners and other != one and back != count:
            text = f"{count} links to {other[1]:x}, but {back} back"
            yield TopologyFinding(
                severity="warning",
                line=owners[one].line,
                text=text,
                fix="links between GPUs are written on both sides",
            )


def _described_link(link: XmlNode, gpu: XmlNode) -> Iterator[TopologyFinding]:
    try:
        bw = link_bw(link)
    except TopologyError:  # reported by _planned
        return
    end = link.attrs.get("switch") or link.attrs.get("kind", "nowhere")
    text = (
        f"{link.integer('count')} links of a {gpu.attrs.get('accelerator', 'GPU')} to {end}: "
        f"{bw:g} GB/s by its description"
    )
    yield TopologyFinding(severity="note", line=link.line, text=text)


def _nets(root: XmlNode) -> Iterator[TopologyFinding]:
    nets = list(_elements(root, "net"))
    for net in nets:
        if "dev" not in net.attrs:
            yield TopologyFinding(
                severity="warning",
                line=net.line,
                text="net without dev: it is ignored",
                fix="number the nets from 0",
            )
        if net.integer("speed") <= 0:
            text = (
                f"net speed is {net.attrs.get('speed', 'missing')}: "
                f"{NET_SPEED_DEFAULT // 1000} Gbit/s assumed"
            )
            yield TopologyFinding(
                severity="warning",
                line=net.line,
                text=text,
                fix='write Mbit/s, such as speed="400000"',
            )
        if "gdr" not in net.attrs:
            text = "net without gdr: no GPUDirect RDMA assumed"
            yield TopologyFinding(
                severity="note",
                line=net.line,
                text=text,
                fix='add gdr="1" where the NIC can access GPU memory',
            )
    for net, first in _repeated(iter(nets), _named_by(root, "dev")):
        text = (
            f"a net with dev {net.attrs['dev']} ({net.attrs.get('name', 'no name')}) "
            f"is listed again, first in line {first.line}"
        )
        fix = "list each net once, below the NIC it belongs to: paths lead to the first one only"
        yield TopologyFinding(severity="warning", line=net.line, text=text, fix=fix)
    for net, first in _repeated(iter(nets), _named_by(root, "name", "port")):
        if net.attrs.get("dev") != first.attrs.get("dev"):
            text = (
                f"net {net.attrs['name']}, port {net.attrs.get('port', 'missing')}, "
                f"is listed again as dev {net.attrs.get('dev')}, "
                f"first in line {first.line}: it counts twice"
            )
            yield TopologyFinding(
                severity="warning", line=net.line, text=text, fix="list each net once"
            )


def _planned(topology: Topology) -> Iterator[TopologyFinding]:
    system = topology.system
    if len(topology.domains) > 1:
        groups = "; ".join(",".join(map(str, ranks)) for ranks in topology.local_ranks)
        yield TopologyFinding(
            severity="note",
            line=0,
            text=f"ranks {groups}: the network is faster between these groups, each is a node",
        )
    first: dict[int, int] = {}
    for j, net in enumerate(system.nets):
        paths = [
            domain.paths.gpu_net(i, j)
            for domain in topology.domains
            for i in range(len(domain.ranks))
        ]
        if first.setdefault(net.id, j) == j and all(path.type == PathType.DIS for path in paths):
            yield TopologyFinding(
                severity="warning",
                line=0,
                text=f"no GPU reaches {net.name} ({net.label or 'no name'})",
            )
    if not system.nets:
        fix = "add a net element below each NIC for jobs of several nodes"
        yield TopologyFinding(
            severity="note", line=0, text="no nets: single-node jobs only", fix=fix
        )
