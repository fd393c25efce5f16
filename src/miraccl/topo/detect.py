"""Detection of this machine as a topology file.

PCI tree, NUMA domains and nets come from sysfs, GPUs from NVML. The result is that of NCCL's
detection (``src/graph/xml.cc``) with one process per GPU, so it can be written, compared with a
dump of NCCL and read again. On a machine without GPUs the ranks are CPUs: each one is a device
below its NUMA domain, connected to it at the copy bandwidth of one core, so the same planning
applies.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miraccl import params
from miraccl.topo.hca import is_selected
from miraccl.topo.nic_fusion import fuse_nics
from miraccl.topo.nvml import NvmlGpu, read_gpus
from miraccl.topo.select import fuse_ranks
from miraccl.topo.sysfs import BUS_ID, Sysfs, printable
from miraccl.topo.xmlfile import XmlFile, XmlNode, read_topology

CPU_RANKS_MAX = 8
"""Maximum of the default number of CPU ranks on a machine without GPUs."""
BASE_FILE = ("var", "run", "nvidia-topologyd", "virtualTopology.xml")
"""Topology file in the virtual machines of cloud providers; NCCL reads it unless one is named."""
CPU_RANK_CLASS = "0x0b4000"  # PCI class of a co-processor
CPU_RANK_SM = 80
_ARCHS = {
    "x86_64": "x86_64",
    "AMD64": "x86_64",
    "aarch64": "arm64",
    "arm64": "arm64",
    "ppc64le": "ppc64",
    "ppc64": "ppc64",
}
_PEER_MEMORY = (
    ("sys", "kernel", "mm", "memory_peers", "nv_mem", "version"),
    ("sys", "kernel", "mm", "memory_peers", "nv_mem_nc", "version"),
    ("sys", "module", "nvidia_peermem", "version"),
)
_SOCKET_MAXCONN, _VERBS_MAXCONN = "65536", "131072"
_NUMBER = re.compile(r"[0-9]{1,9}")
_VIRTUAL = re.compile(
    r"lo\d*|docker.*|veth.*|virbr.*|br-.*|ifb\d+|dummy\d*|cni.*|flannel.*|cali.*"
    r"|tun\d*|tap\d*|sit\d*|bonding_masters"
)


@dataclass(frozen=True, kw_only=True)
class NetInfo:
    """Network device that sysfs does not show, such as one of a network plugin.

    Attributes:
        bus_id: PCI address, "" for none.
        gdr: It accesses GPU memory.
    """

    name: str
    speed_mbps: int
    port: int = 0
    guid: int = 0
    max_connections: int = 0
    gdr: bool = False
    bus_id: str = ""
    latency_us: float = 0.0


def detect_machine(
    root: str | os.PathLike[str] = "/",
    *,
    gpus: Sequence[NvmlGpu] | None = None,
    cpu_ranks: int | None = None,
    arch: str | None = None,
    base: XmlNode | None = None,
    nets: Sequence[NetInfo] | None = None,
) -> XmlFile:
    """Detect the machine whose kernel file systems are mounted below ``root``.

    ``gpus`` None queries NVML. ``cpu_ranks`` is the number of CPU ranks; None means none next to
    GPUs, else one per CPU up to :data:`CPU_RANKS_MAX`. ``arch`` is the architecture as in
    ``platform.machine``. ``base`` is a tree to complete (cloud providers supply files with the PCI
    tree that a virtual machine hides); None uses :data:`BASE_FILE` if it exists. ``nets`` None
    takes those of sysfs: verbs devices that the settings allow, else network interfaces.
    Assumptions are recorded in the notes.
    """
    sys = Sysfs(Path(root))
    machine = _MachineDetector(
        sys,
        _ARCHS.get(arch or platform.machine(), arch or platform.machine()),
        _base_tree(sys) if base is None else base,
    )
    if base is None and machine.root.children:
        machine.note(f"completes {sys.path(*BASE_FILE)}")
    if not sys.names("sys"):
        machine.note(f"cannot read {sys.path('sys')}: PCI tree, NUMA domains and nets are unknown")
    if gpus is None:
        gpus, why = read_gpus()
        if not gpus:
            machine.note(f"no GPUs from NVML: {why}")
    for info in gpus:
        machine.gpu(info)
    if cpu_ranks or (cpu_ranks is None and not gpus):
        machine.cpu_ranks(cpu_ranks)
    machine.nets() if nets is None else machine.given_nets(nets)
    return XmlFile(root=machine.finish(), source="this machine", notes=tuple(machine.notes))


def _base_tree(sys: Sysfs) -> XmlNode | None:
    path = sys.path(*BASE_FILE)
    return read_topology(path).root if path.is_file() else None


class _MachineDetector:
    def __init__(self, sys: Sysfs, arch: str, base: XmlNode | None) -> None:
        self.sys = sys
        self.arch = arch
        self.root = base.copy() if base is not None else XmlNode("system", {"version": "1"})
        self.devices: dict[str, XmlNode] = {}
        for node in self.root.walk():
            if node.name == "pci" and "busid" in node.attrs:
                self.devices.setdefault(node.attrs["busid"].lower(), node)
        self.completed: set[str] = set()
        # Devices whose parents are being created: links of a recorded folder may form a cycle.
        self.unattached: set[str] = set()
        self.ranks: list[XmlNode] = []
        self.notes: list[tuple[int, str]] = []
        self.identity = self.cpu_identity()
        # Either a peer memory module or dma-buf, which needs the open kernel modules of the driver.
        open_driver = "Open Kernel Module" in sys.read("proc", "driver", "nvidia", "version")
        self.peer_memory = open_driver or any(sys.read(*parts) for parts in _PEER_MEMORY)

    def note(self, text: str) -> None:
        self.notes.append((0, text))

    # CPUs

    def cpu(self, numa: str) -> XmlNode:
        node = next((cpu for cpu in self.root.children if cpu.attrs.get("numaid") == numa), None)
        if node is None:
            node = XmlNode("cpu", {"numaid": numa})
            self.root.children.append(node)
            self.complete_cpu(node)
        return node

    def complete_cpu(self, node: XmlNode) -> None:
        numa = node.attrs.get("numaid", "-1")
        affinity = self.sys.value("sys", "devices", "system", "node", f"node{numa}", "cpumap")
        if affinity:
            node.attrs.setdefault("affinity", affinity)
        for key, value in self.identity.items():
            node.attrs.setdefault(key, value)

    def cpu_identity(self) -> dict[str, str]:
        """Return the architecture and, on x86, vendor, family and model like CPUID."""
        if self.arch != "x86_64":
            return {"arch": self.arch}
        info: dict[str, str] = {}
        for line in self.sys.read("proc", "cpuinfo").splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
        family, model = (
            int(text) if _NUMBER.fullmatch(text := info.get(key, "")) else 0
            for key in ("cpu family", "model")
        )
        # Families from 15 on have an extension, shifted by 4.
        if family > 15:
            family = 15 + ((family - 15) << 4)
        return {
            "arch": self.arch,
            "vendor": printable(info.get("vendor_id", "")),
            "familyid": str(family),
            "modelid": str(model),
        }

    # PCI

    def pci(self, bus_id: str, default_class: str) -> XmlNode:
        """Return the element of a PCI device, created with its parents and completed from sysfs."""
        node = self.devices.get(bus_id)
        created = node is None
        if node is None:
            node = self.devices[bus_id] = XmlNode("pci", {"busid": bus_id})
        if bus_id in self.completed:
            return node
        self.completed.add(bus_id)
        path = self.sys.pci(bus_id)
        if path is None:
            for key, value in (("class", default_class), ("link_speed", ""), ("link_width", "")):
                node.attrs.setdefault(key, value)
            if created:
                self.note(
                    f"PCI device {bus_id} is not in sysfs: "
                    "assumed below a CPU of unknown NUMA domain"
                )
                self.attach(node, self.cpu("-1"))
            return node
        for key in ("class", "vendor", "device", "subsystem_vendor", "subsystem_device"):
            value = self.sys.value(path / key)
            if value or key == "class":
                node.attrs.setdefault(key, value or default_class)
        for key, value in zip(("link_speed", "link_width"), self.pci_link(path)):
            node.attrs.setdefault(key, value)
        if created:
            parent, upper = path.parent, path.parent.parent
            self.unattached.add(bus_id)
            if (
                BUS_ID.fullmatch(parent.name)
                and BUS_ID.fullmatch(upper.name)
                and upper.name not in self.unattached
            ):
                self.attach(node, self.pci(upper.name, "0x060400"))
            else:
                self.attach(node, self.cpu(str(self.sys.number(path / "numa_node", default=-1))))
            self.unattached.remove(bus_id)
        return node

    def pci_link(self, path: Path) -> tuple[str, str]:
        """Return speed and width of the slower of device and port.

        Empty and 0 if the (virtual) device does not report them.
        """
        speeds = [self.sys.value(folder / "max_link_speed") for folder in (path, path.parent)]
        numbers = [
            float(match[0])
            if (match := re.match(r"[0-9]+(\.[0-9]+)?(?= GT/s)", text))
            else float("inf")
            for text in speeds
        ]
        width = min(
            max(0, self.sys.number(folder / "max_link_width")) for folder in (path, path.parent)
        )
        return speeds[1] if numbers[1] < numbers[0] else speeds[0], str(width)

    @staticmethod
    def attach(node: XmlNode, parent: XmlNode) -> None:
        """Insert a child in the order of bus ids."""
        at = next(
            (
                i
                for i, c in enumerate(parent.children)
                if "busid" in c.attrs and node.attrs["busid"] < c.attrs["busid"]
            ),
            None,
        )
        parent.children.insert(len(parent.children) if at is None else at, node)

    # Ranks

    def gpu(self, info: NvmlGpu) -> None:
        pci = self.pci(info.bus_id, "0x03")
        attrs = {
            "dev": str(info.dev),
            "sm": str(info.sm),
            "rank": str(len(self.ranks)),
            "gdr": "1",
        }
        gpu = XmlNode("gpu", attrs)
        for target, count in info.nvlinks:
            path = self.sys.pci(target) if BUS_ID.fullmatch(target) else None
            tclass = self.sys.value(path / "class") if path else ""
            gpu.children.append(
                XmlNode(
                    "nvlink",
                    {"target": target, "count": str(count), "tclass": tclass or "0x068000"},
                )
            )
        if info.c2c:
            gpu.children.append(XmlNode("c2c", {"bw": str(info.c2c[0]), "count": str(info.c2c[1])}))
        pci.children = [child for child in pci.children if child.name != "gpu"]
        pci.children.append(gpu)
        self.ranks.append(gpu)

    def cpu_ranks(self, count: int | None) -> None:
        """Add CPU ranks, distributed over the NUMA domains in proportion to their CPUs."""
        nodes = list(self.sys.numa_nodes())
        total = sum(cpus for _, cpus in nodes)
        count = min(total, CPU_RANKS_MAX) if count is None else count
        first = len(self.ranks)
        homes = [numa for numa, cpus in nodes for _ in range(cpus)]
        for i in range(count):
            bus_id = f"ffff:{i // 32:02x}:{i % 32:02x}.0"
            attrs = {
                "busid": bus_id,
                "class": CPU_RANK_CLASS,
                "link_speed": "8.0 GT/s PCIe",
                "link_width": "16",
            }
            pci = self.devices[bus_id] = XmlNode("pci", attrs)
            rank = str(first + i)
            gpu = XmlNode(
                "gpu",
                {
                    "dev": rank,
                    "sm": str(CPU_RANK_SM),
                    "rank": rank,
                    "gdr": "0",
                    "accelerator": "cpu",
                },
            )
            pci.children.append(gpu)
            self.ranks.append(gpu)
            self.attach(pci, self.cpu(homes[i * total // count]))
        self.note(
            f"{count} CPU rank{'s' * (count != 1)}: each joined to its NUMA domain with 12 GB/s, "
            "about the copy bandwidth of one core"
        )

    # Nets

    def nets(self) -> None:
        """Add verbs devices with an active port, or without any the network interfaces."""
        dev, wanted = 0, params.IB_HCA.read()
        disabled = bool(params.IB_DISABLE.read())
        fusible: list[str] = []
        for name in self.sys.names("sys", "class", "infiniband"):
            for port in filter(
                _NUMBER.fullmatch, self.sys.names("sys", "class", "infiniband", name, "ports")
            ):
                base = ("sys", "class", "infiniband", name, "ports", port)
                usable = not disabled and is_selected(name, int(port), wanted)
                if usable and "ACTIVE" in self.sys.read(*base, "state"):
                    rate = re.match(
                        r"[0-9]{1,6}(\.[0-9]+)?(?![0-9])", self.sys.value(*base, "rate")
                    )
                    speed = int(float(rate[0]) * 1000) if rate else 0
                    guid = _guid(
                        self.sys.read("sys", "class", "infiniband", name, "sys_image_guid")
                    )
                    gdr = int(self.peer_memory)
                    self.net(
                        name,
                        dev,
                        speed,
                        int(port),
                        guid,
                        _VERBS_MAXCONN,
                        gdr,
                        self.sys.pci_of("sys", "class", "infiniband", name),
                    )
                    dev += 1
                    fusible.append(printable(name))
        if dev:
            self.fuse(fusible)
            return
        for name in self.sys.names("sys", "class", "net"):
            state = self.sys.read("sys", "class", "net", name, "operstate")
            if not _VIRTUAL.fullmatch(name) and state in ("up", "unknown"):
                speed = self.sys.number("sys", "class", "net", name, "speed")
                bus_id = self.sys.pci_of("sys", "class", "net", name)
                self.net(
                    name, dev, speed if speed > 0 else 10_000, 0, dev, _SOCKET_MAXCONN, 0, bus_id
                )
                dev += 1

    def given_nets(self, nets: Sequence[NetInfo]) -> None:
        """Add devices that the caller knows."""
        for dev, net in enumerate(nets):
            self.net(
                net.name,
                dev,
                max(0, net.speed_mbps),
                net.port,
                net.guid,
                str(max(0, net.max_connections)),
                int(net.gdr),
                net.bus_id,
                net.latency_us,
            )

    def fuse(self, names: Sequence[str]) -> None:
        """Fuse ports as the settings say; ports of one NIC by default, as in NCCL."""
        if params.IB_MERGE_NICS.read() and len({*names}) == len(names):
            for text in fuse_nics(
                self.root,
                names,
                level=params.NET_MERGE_LEVEL.read(),
                force=params.NET_FORCE_MERGE.read(),
            ):
                self.note(text)

    def net(
        self,
        name: str,
        dev: int,
        speed: int,
        port: int,
        guid: int,
        maxconn: str,
        gdr: int,
        bus_id: str,
        latency_us: float = 0.0,
    ) -> None:
        if bus_id:
            merged = bus_id[:-1] + "0"  # the ports of a NIC are functions of one device
            parent = self.pci(merged if self.sys.pci(merged) else bus_id, "0x02")
        else:
            parent = (
                self.root.children[0]
                if self.root.children
                else self.cpu(next(self.sys.numa_nodes())[0])
            )
        nic = parent.child("nic")
        if nic is None:
            nic = XmlNode("nic")
            parent.children.append(nic)
        attrs = {
            "name": printable(name),
            "dev": str(dev),
            "latency": f"{latency_us:g}",
            "speed": str(speed),
            "port": str(port),
            "guid": f"{guid:#x}",
        }
        nic.children.append(XmlNode("net", {**attrs, "maxconn": maxconn, "gdr": str(gdr)}))

    def finish(self) -> XmlNode:
        """Return the merged tree, in the order in which NCCL's ranks merge theirs."""
        for node in self.root.walk():
            if node.name == "cpu":
                self.complete_cpu(node)
            node.single = not node.children
        return fuse_ranks(self.root, self.ranks)


def _guid(text: str) -> int:
    """Parse ``1070:fd03:00b5:951e``: network byte order, returned as a little-endian number."""
    digits = text.replace(":", "")
    return (
        int.from_bytes(bytes.fromhex(digits), "little")
        if re.fullmatch(r"[0-9a-fA-F]{16}", digits)
        else 0
    )
