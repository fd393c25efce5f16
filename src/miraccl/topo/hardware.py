"""Bandwidths by hardware generation, and names of device kinds in files, from NCCL 2.28.

All bandwidths are GB/s in one direction. Names are matched by prefix in the order of the tables;
unknown ones get NCCL's default (``src/graph/topo.h``, ``src/graph/topo.cc`` kvDict tables).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from miraccl.topo.records import LOC_BW, UNDEF, CpuArch, CpuVendor, NodeType, f32
from miraccl.topo.xmlfile import XmlNode

# GB/s between NUMA domains of one node (topo.h *_QPI_BW and neighbours).
POWER_BW, ARM_BW, AMD_BW = 32.0, 6.0, 16.0
INTEL_BW = {1: 6.0, 2: 10.0, 3: 22.0, 4: 40.0}
ZHAOXIN_BW = {UNDEF: 6.0, 1: 9.0}

NVLINK_BW = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (80, 20.0), (70, 20.0), (60, 18.0))
"""GB/s of one NVLink in one direction, from this compute capability on (topo.h SM*_NVLINK_BW)."""
NVLINK_BW_DEFAULT = 20.0

PCI_CLASSES = (
    ("0x060400", NodeType.PCI),
    ("0x080100", NodeType.PCI),  # CX8 data direct
    ("0x068000", NodeType.NVS),
    ("0x068001", NodeType.CPU),
    ("0x03", NodeType.GPU),
    ("0x02", NodeType.NIC),
)
"""Node type by the beginning of the PCI class; anything else counts as a PCI switch."""

PCI_SPEEDS = (
    ("2.5 GT/s", 15),
    ("5 GT/s", 30),
    ("8 GT/s", 60),
    ("16 GT/s", 120),
    ("32 GT/s", 240),
    ("5.0 GT/s PCIe", 30),
    ("8.0 GT/s PCIe", 60),
    ("16.0 GT/s PCIe", 120),
    ("32.0 GT/s PCIe", 240),
    ("64.0 GT/s PCIe", 480),
)
"""Speed of a lane in 100 Mbit/s by the beginning of ``link_speed``."""
PCI_SPEED_DEFAULT = 60
PCI_WIDTH_DEFAULT = 16

CPU_ARCHS = (("x86_64", CpuArch.X86), ("arm64", CpuArch.ARM), ("ppc64", CpuArch.POWER))
CPU_VENDORS = (
    ("GenuineIntel", CpuVendor.INTEL),
    ("AuthenticAMD", CpuVendor.AMD),
    ("CentaurHauls", CpuVendor.ZHAOXIN),
    ("  Shanghai  ", CpuVendor.ZHAOXIN),
)

NET_MAX_CHANNELS = 64
"""Default of a net's ``maxconn`` (NCCL ``MAXCHANNELS``)."""
NET_SPEED_DEFAULT = 10_000
"""Mbit/s of a net without a positive ``speed``."""


def nvlink_bw(sm: int) -> float:
    """Return GB/s of one NVLink of a GPU of this compute capability (times ten)."""
    for least, bw in NVLINK_BW:
        if sm >= least:
            return f32(bw)
    return f32(NVLINK_BW_DEFAULT)


def pci_bw(speed: str, width: int) -> float:
    """Return GB/s of a PCI link; an unknown speed counts as 8 GT/s, width 0 as 16 lanes."""
    per_lane = by_prefix(speed, PCI_SPEEDS, PCI_SPEED_DEFAULT)
    return f32((width or PCI_WIDTH_DEFAULT) * per_lane / 80.0)


def pci_class(text: str) -> NodeType:
    """Return the node type of a PCI class; an unknown class counts as a PCI switch."""
    return by_prefix(text, PCI_CLASSES, NodeType.PCI)


def inter_cpu_bw(arch: int, vendor: int, model: int) -> float:
    """Return GB/s between two NUMA domains, by the CPU that the traffic leaves."""
    if arch == CpuArch.POWER:
        return POWER_BW
    if arch == CpuArch.ARM:
        return ARM_BW
    if arch == CpuArch.X86 and vendor == CpuVendor.INTEL:
        return INTEL_BW.get(model, INTEL_BW[1])
    if arch == CpuArch.X86 and vendor == CpuVendor.AMD:
        return AMD_BW
    if arch == CpuArch.X86 and vendor == CpuVendor.ZHAOXIN:
        return ZHAOXIN_BW.get(model, ZHAOXIN_BW[UNDEF])
    return LOC_BW


_T = TypeVar("_T")


def by_prefix(text: str, table: Sequence[tuple[str, _T]], default: _T) -> _T:
    """Return the value of the first key that ``text`` starts with, else ``default``."""
    for prefix, value in table:
        if text.startswith(prefix):
            return value
    return default


def cpu_kind(xml: XmlNode) -> tuple[int, int, int]:
    """Return architecture, vendor and model as NCCL numbers them.

    The vendor is defined on x86 only, the model for Intel and Zhaoxin only.
    """
    arch = by_prefix(xml.attrs.get("arch", ""), CPU_ARCHS, CpuArch.UNKNOWN)
    if arch != CpuArch.X86:
        return arch, CpuVendor.UNDEF, UNDEF
    vendor = by_prefix(xml.attrs.get("vendor", ""), CPU_VENDORS, CpuVendor.UNKNOWN)
    family, model = xml.integer("familyid"), xml.integer("modelid")
    if vendor == CpuVendor.INTEL:
        steps = ((0xCF, 4), (0x8F, 3), (0x55, 2))
        return (
            arch,
            vendor,
            next((number for least, number in steps if family == 6 and model >= least), 1),
        )
    if vendor == CpuVendor.ZHAOXIN and family == 7 and model == 0x5B:
        return arch, vendor, 1
    return arch, vendor, UNDEF
