"""Kernel file systems read by detection, below a root folder that tests can replace.

Values that cannot be read, or that no kernel writes, are empty; this module makes no decisions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from miraccl.topo.records import PathType
from miraccl.topo.xmlfile import MAX_STR

BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_NODE = re.compile(r"node[0-9]{1,9}")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_MAX_READ = 4096
_MAX_CPUS = 1 << 16
"""Limit on the CPUs of a list; Linux has at most 8192 (``NR_CPUS``)."""


@dataclass(frozen=True)
class Sysfs:
    """The kernel's view below ``root`` (``/`` is this machine)."""

    root: Path = Path("/")

    def path(self, *parts: str) -> Path:
        """Return a path below ``root``."""
        return self.root.joinpath(*parts)

    def read(self, *parts: str | Path) -> str:
        """Return the stripped text of a file, empty if it cannot be read."""
        try:
            with open(self.root.joinpath(*parts), "rb") as file:
                return file.read(_MAX_READ).decode(errors="replace").strip()
        except OSError:
            return ""

    def value(self, *parts: str | Path) -> str:
        """Return the only line of a file.

        Empty for anything else, and for a value that does not fit a topology file.
        """
        text = self.read(*parts)
        return text if len(text) <= MAX_STR and text.isascii() and text.isprintable() else ""

    def number(self, *parts: str | Path, default: int = 0) -> int:
        """Return the signed 32-bit number in a file, or ``default``."""
        text = self.value(*parts)
        return (
            int(text)
            if re.fullmatch(r"-?[0-9]{1,10}", text) and abs(int(text)) < 1 << 32
            else default
        )

    def names(self, *parts: str) -> list[str]:
        """Return the entries of a folder in natural order."""
        try:
            return sorted(os.listdir(self.path(*parts)), key=natural)
        except OSError:
            return []

    def real(self, *parts: str) -> Path | None:
        """Resolve the links of a path; None if it does not exist."""
        path = self.path(*parts)
        try:
            return path.resolve() if path.exists() else None
        except OSError:  # permission denied for a parent folder
            return None

    def pci(self, bus_id: str) -> Path | None:
        """Return the folder of a PCI device at its position in the tree."""
        return self.real("sys", "bus", "pci", "devices", bus_id)

    def pci_distance(self, a: str, b: str) -> PathType | None:
        """Return the path type of two PCI devices, as NCCL counts it; None if one is unknown."""
        first, second = (self.pci(each) if each else None for each in (a, b))
        if first is None or second is None:
            return None
        common = Path(os.path.commonpath([first, second]))
        if not any(BUS_ID.fullmatch(part) for part in common.parts):
            domains = {self.value(folder, "numa_node") for folder in (first, second)}
            same = common.name.startswith("pci") or len(domains) == 1
            return PathType.PHB if same else PathType.SYS
        # Below a switch's upstream port: its downstream port and the device.
        steps = max(len(each.relative_to(common).parts) for each in (first, second))
        return PathType.PIX if steps <= 2 else PathType.PXB

    def pci_of(self, *parts: str) -> str:
        """Return the bus id of a class device's PCI parent.

        Empty for virtual devices, virtio and USB.
        """
        device = self.real(*parts, "device")
        if device is None or not BUS_ID.fullmatch(device.name):
            return ""
        return device.name

    def numa_nodes(self) -> Iterator[tuple[str, int]]:
        """Yield NUMA domains that have CPUs, with their number of CPUs.

        Yields a single ``-1`` if the kernel shows none.
        """
        found = False
        for name in self.names("sys", "devices", "system", "node"):
            if _NODE.fullmatch(name) and (
                cpus := self.count(self.read("sys", "devices", "system", "node", name, "cpulist"))
            ):
                found = True
                yield name[4:], cpus
        if not found:
            yield "-1", max(1, self.count(self.read("sys", "devices", "system", "cpu", "online")))

    @staticmethod
    def count(ranges: str) -> int:
        """Count the numbers of a list such as ``0-3,8``, ``_MAX_CPUS`` at most."""
        total = 0
        for part in ranges.split(","):
            if match := _RANGE.fullmatch(part.strip()):
                total += max(0, int(match[2] or match[1]) - int(match[1]) + 1)
        return min(total, _MAX_CPUS)


def printable(name: str) -> str:
    """Return a name that a topology file can hold, with ``?`` for unprintable characters."""
    return "".join(char if char.isprintable() else "?" for char in name)[:MAX_STR]


def natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key that puts ``mlx5_10`` after ``mlx5_9``."""
    return tuple(
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"(\d+)", text)
    )
