"""Construction of the ``System`` graph from a topology file's tree (NCCL 2.28
``src/graph/topo.cc``).

Results depend on these rules, which are therefore reproduced exactly:

- Nodes are created in the order of the file. Links of a node are sorted by descending bandwidth as
  they are added, equal ones in order of arrival. NVLinks are added in a second pass, C2C in a
  third, PCI links between switches in a fourth.
- All NVLinks that do not lead to a GPU or CPU lead to one NVSwitch. A NIC is identified by its bus
  id alone, so NICs directly below several CPUs are one node, at the first CPU.
- Broadcom switches that appear as two levels are flattened; then CPUs are joined; then the upstream
  PCI link is moved to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from miraccl.errors import TopologyError
from miraccl.topo.accelerators import LINK_ELEMENT, link_bw
from miraccl.topo.hardware import (
    NET_MAX_CHANNELS,
    NET_SPEED_DEFAULT,
    cpu_kind,
    inter_cpu_bw,
    nvlink_bw,
    pci_bw,
    pci_class,
)
from miraccl.topo.records import (
    LOC_BW,
    LOCAL_ID_MASK,
    CpuNode,
    GpuNode,
    Link,
    LinkType,
    NetNode,
    NodeType,
    PciNode,
    System,
    TopoNode,
    f32,
)
from miraccl.topo.vertices import Vertex, cpu_of, join
from miraccl.topo.xmlfile import XmlNode, bus_id, c_float, c_long, c_uint64

MAX_NODES = 576
"""Maximum nodes of one type (``NCCL_TOPO_MAX_NODES``); also bounds the work caused by a file."""

MAX_LATENCY = 1e9
"""Limit on a net's latency (us): far beyond any network; sums stay finite in single precision."""


class _Builder:
    def __init__(self) -> None:
        self.of: dict[NodeType, list[Vertex]] = {kind: [] for kind in NodeType}
        self.hosts: list[int] = []

    def find(self, type: NodeType, id: int) -> Vertex | None:
        for vertex in self.of[type]:
            if vertex.record.id == id:
                return vertex
        return None

    def add(self, record: TopoNode) -> Vertex:
        if len(self.of[record.type]) == MAX_NODES:
            raise TopologyError(
                f"cannot build the system: more than {MAX_NODES} {record.type.name} nodes"
            )
        vertex = Vertex(record)
        self.of[record.type].append(vertex)
        return vertex

    def host(self, cpu: XmlNode) -> int:
        """Return the number of the host of a ``cpu`` element, by its ``host_hash``."""
        hash = c_uint64(cpu.attrs.get("host_hash", "0"), 16)
        if hash not in self.hosts:
            self.hosts.append(hash)
        return self.hosts.index(hash)

    # Pass 1: CPUs, PCI trees, GPUs, NICs, nets

    def cpu(self, xml: XmlNode) -> None:
        _need(xml, "numaid")
        numa = xml.integer("numaid")
        host = self.host(xml)
        arch, vendor, model = cpu_kind(xml)
        record = CpuNode(
            id=_id(host, numa),
            arch=arch,
            vendor=vendor,
            model=model,
            affinity=xml.attrs.get("affinity", ""),
        )
        cpu = self.add(record)
        for child in xml.children:
            if child.name == "pci":
                self.pci(child, cpu, host)
            elif child.name == "nic":
                nic = self.find(NodeType.NIC, _id(host, 0))
                if nic is None:
                    nic = self.add(TopoNode(type=NodeType.NIC, id=_id(host, 0)))
                    join(cpu, nic, LinkType.PCI, LOC_BW)
                    nic.parent = cpu
                self.nic(child, nic, host)

    def pci(self, xml: XmlNode, parent: Vertex, host: int) -> None:
        _need(xml, "busid")
        id = _id(host, bus_id(xml.attrs["busid"]))
        kind = pci_class(xml.attrs.get("class", ""))
        new: Vertex | None = None
        gpu = xml.child("gpu")
        if gpu is not None:
            if "rank" not in gpu.attrs:
                return
            kind = NodeType.GPU
            new = self.add(_gpu_record(gpu, id))
        nic_xml = xml.child("nic")
        if nic_xml is not None:
            nic = self.find(NodeType.NIC, id)
            if nic is None:
                new = nic = self.add(TopoNode(type=NodeType.NIC, id=id))
            self.nic(nic_xml, nic, host)
        elif kind == NodeType.PCI:
            new = self.add(PciNode(id=id, device=_pci_device(xml)))
            for child in xml.children:
                if child.name == "pci":
                    self.pci(child, new, host)
        if new is not None:
            bw = pci_bw(xml.attrs.get("link_speed", ""), xml.integer("link_width"))
            new.connect(parent, LinkType.PCI, bw)
            parent.connect(new, LinkType.PCI, bw)
            new.parent = parent

    def nic(self, xml: XmlNode, nic: Vertex, host: int) -> None:
        for child in xml.children:
            if child.name == "net" and "dev" in child.attrs:
                record = _net_record(child, host)
                join(nic, self.add(record), LinkType.NET, record.bw)

    # Passes 2 to 4: links that do not follow the tree

    def cross_links(self, root: XmlNode, *elements: str) -> Iterator[tuple[XmlNode, int, int]]:
        """Yield elements of these names with the host and the id of their device."""

        def visit(node: XmlNode, bus: str | None, host: int) -> Iterator[tuple[XmlNode, int, int]]:
            if node.name in elements:
                yield node, host, _id(host, bus_id(bus or ""))
                return
            if node.name == "cpu":
                host = self.host(node)
            bus = node.attrs.get("busid", bus)
            for child in node.children:
                yield from visit(child, bus, host)

        return visit(root, None, 0)

    def nvlinks(self, root: XmlNode) -> None:
        """Add NVLinks and the links of described accelerators, which count as NVLinks."""
        for xml, host, id in self.cross_links(root, "nvlink", LINK_ELEMENT):
            gpu = self.owner(xml, NodeType.GPU, id)
            assert isinstance(gpu.record, GpuNode)
            if xml.name == LINK_ELEMENT:
                _need(xml, "kind", "count", "bw")
                target, bw = self.described_target(xml, gpu, host), f32(link_bw(xml))
            else:
                _need(xml, "count", "tclass")
                target, bw = (
                    self.link_target(xml, gpu, host),
                    f32(xml.integer("count") * nvlink_bw(gpu.record.sm)),
                )
            if target is None:
                continue
            gpu.connect(target, LinkType.NVL, bw)
            if target.record.type != NodeType.GPU:
                target.connect(gpu, LinkType.NVL, bw)

    def described_target(self, xml: XmlNode, gpu: Vertex, host: int) -> Vertex | None:
        match xml.attrs["kind"]:
            case "gpu":
                _need(xml, "target")
                return self.find(NodeType.GPU, _id(host, bus_id(xml.attrs["target"])))
            case "cpu":
                return cpu_of(gpu)
            case "switch":
                return self.switch(xml.attrs.get("switch", "switch"))
            case kind:
                raise TopologyError(
                    f"cannot use line {xml.line}: <{xml.name}> has kind {kind!r}; "
                    "known are switch, gpu and cpu"
                )

    def switch(self, label: str) -> Vertex:
        """Return the switch of that name; NCCL's only NVSwitch has an empty name."""
        for vertex in self.of[NodeType.NVS]:
            if vertex.record.label == label:
                return vertex
        return self.add(TopoNode(type=NodeType.NVS, id=len(self.of[NodeType.NVS]), label=label))

    def link_target(self, xml: XmlNode, gpu: Vertex, host: int) -> Vertex | None:
        """Return the remote end of an NVLink: a GPU, the GPU's CPU, or the NVSwitch.

        None for a GPU that does not take part.
        """
        match pci_class(xml.attrs["tclass"]):
            case NodeType.GPU:
                _need(xml, "target")
                return self.find(NodeType.GPU, _id(host, bus_id(xml.attrs["target"])))
            case NodeType.CPU:
                return cpu_of(gpu)
            case _:
                return self.switch("")

    def c2c(self, root: XmlNode) -> None:
        for xml, _, id in self.cross_links(root, "c2c"):
            gpu = self.owner(xml, NodeType.GPU, id)
            cpu = cpu_of(gpu)
            if cpu is not None:
                _need(xml, "bw", "count")
                join(gpu, cpu, LinkType.C2C, f32(xml.integer("bw") * xml.integer("count") / 1000.0))

    def pci_links(self, root: XmlNode) -> None:
        for xml, host, id in self.cross_links(root, "pcilink"):
            switch = self.owner(xml, NodeType.PCI, id)
            _need(xml, "target")
            remote = self.find(NodeType.PCI, _id(host, bus_id(xml.attrs["target"])))
            if remote is not None:
                switch.connect(remote, LinkType.LOC, LOC_BW)

    def owner(self, xml: XmlNode, type: NodeType, id: int) -> Vertex:
        vertex = self.find(type, id)
        if vertex is None:
            raise TopologyError(
                f"cannot use line {xml.line}: <{xml.name}> belongs to {type.name} "
                f"{id & LOCAL_ID_MASK:x}, which is not in the system"
            )
        return vertex

    # Passes 5 to 7: switches, CPUs, order

    def flatten_switches(self) -> None:
        """Merge the second level of Broadcom gen 4 and gen 5 switches into the first.

        They sustain full bandwidth on all ports.
        """
        at = 0
        while at < len(self.of[NodeType.PCI]):
            switch = self.of[NodeType.PCI][at]
            gen = _broadcom_gen(switch, 0)
            at += 1
            if not gen:
                continue
            inner = []
            position = 0
            while position < switch.count:
                below = switch.store[position].target
                if below.record.type == NodeType.PCI and _broadcom_gen(below, 1) == gen:
                    inner.append(below)
                    switch.remove(position)
                else:
                    position += 1
            for below in inner:
                self.absorb(switch, below)
            assert isinstance(switch.record, PciNode)
            # Marked to prevent a second merge.
            switch.record = PciNode(id=switch.record.id, device=switch.record.device | 0xFFFF)
            at = 0

    def absorb(self, switch: Vertex, below: Vertex) -> None:
        for edge in below.edges:
            if edge.target is switch:
                continue
            switch.append(edge)
            for back in edge.target.edges:
                if back.target is below:
                    back.target = switch
                    break
        self.of[NodeType.PCI].remove(below)
        for vertices in self.of.values():
            for vertex in vertices:
                position = 0
                while position < vertex.count:
                    if vertex.store[position].target is below:
                        vertex.remove(position)
                    else:
                        position += 1

    def join_cpus(self) -> None:
        for one in self.of[NodeType.CPU]:
            assert isinstance(one.record, CpuNode)
            bw = inter_cpu_bw(one.record.arch, one.record.vendor, one.record.model)
            for other in self.of[NodeType.CPU]:
                if one is not other and one.record.system_id == other.record.system_id:
                    one.connect(other, LinkType.SYS, bw)

    def sort(self, vertex: Vertex, up: Vertex | None) -> None:
        if up is not None:
            vertex.put_last(up)
        for edge in vertex.edges:
            if edge.type == LinkType.PCI and edge.target is not up:
                self.sort(edge.target, vertex)

    def system(self) -> System:
        vertices = [vertex for kind in NodeType for vertex in self.of[kind]]
        index = {id(vertex): i for i, vertex in enumerate(vertices)}
        nodes = []
        for vertex in vertices:
            links = tuple(
                Link(type=e.type, bw=e.bw, target=index[id(e.target)]) for e in vertex.edges
            )
            nodes.append(replace(vertex.record, links=links))
        return System(nodes=tuple(nodes))


def build_system(root: XmlNode) -> System:
    """Build the graph of a selected tree (``select.select_topology``), before paths are known.

    ``max_bw``, ``total_bw``, ``inter`` and the nets' ``local_gpu`` depend on paths; ``paths`` fills
    them in. Raises ``TopologyError``.
    """
    builder = _Builder()
    for child in root.children:
        if child.name == "cpu":
            builder.cpu(child)
    builder.nvlinks(root)
    builder.c2c(root)
    builder.pci_links(root)
    builder.flatten_switches()
    builder.join_cpus()
    for cpu in builder.of[NodeType.CPU]:
        builder.sort(cpu, None)
    return builder.system()


def _need(xml: XmlNode, *keys: str) -> None:
    for key in keys:
        if key not in xml.attrs:
            raise TopologyError(f"cannot use line {xml.line}: <{xml.name}> has no {key}")


def _id(host: int, local: int) -> int:
    return (host << 56) | (local & LOCAL_ID_MASK)


def _broadcom_gen(vertex: Vertex, level: int) -> int:
    """Return 4 or 5 for Broadcom switches that show a second level, else 0."""
    assert isinstance(vertex.record, PciNode)
    # Vendor, device and subsystem vendor decide.
    prefix = vertex.record.device & 0xFFFF_FFFF_FFFF_F000
    if prefix == 0x1000_C010_1000_A000:
        return 4
    return 5 if prefix == 0x1000_C030_1000_0000 | level * 0x1000 else 0


def _gpu_record(xml: XmlNode, id: int) -> GpuNode:
    _need(xml, "sm")
    return GpuNode(
        id=id,
        label=xml.attrs.get("accelerator", ""),
        dev=xml.integer("dev"),
        rank=xml.integer("rank"),
        sm=xml.integer("sm"),
        gdr=xml.integer("gdr"),
    )


def _pci_device(xml: XmlNode) -> int:
    keys = (("vendor", 48), ("device", 32), ("subsystem_vendor", 16), ("subsystem_device", 0))
    return sum(c_long(xml.attrs[key]) << shift for key, shift in keys if key in xml.attrs) & (
        (1 << 64) - 1
    )


def _net_record(xml: XmlNode, host: int) -> NetNode:
    dev = xml.integer("dev")
    id = _id(host, dev)
    latency = f32(c_float(xml.attrs.get("latency", "0")))
    if not abs(latency) <= MAX_LATENCY:
        raise TopologyError(
            f"cannot use line {xml.line}: latency {xml.attrs['latency'][:40]}; "
            f"allowed is a number of us up to {MAX_LATENCY:g}"
        )
    speed = xml.integer("speed")
    return NetNode(
        id=id,
        label=xml.attrs.get("name", ""),
        dev=dev,
        asic=c_uint64(xml.attrs["guid"], 16) if "guid" in xml.attrs else id,
        port=xml.integer("port"),
        bw=f32((speed if speed > 0 else NET_SPEED_DEFAULT) / 8000.0),
        latency=latency,
        gdr=xml.integer("gdr"),
        coll=xml.integer("coll"),
        max_channels=xml.integer("maxconn", NET_MAX_CHANNELS),
    )
