"""The folders of the kernel that detection reads, below a root folder so that tests can make their own machine.

Values that cannot be read are empty texts; nothing here decides anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_MAX_READ = 4096


@dataclass(frozen=True)
class Sysfs:
    """The kernel's view below ``root`` (``/`` is this machine)."""

    root: Path = Path("/")

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def read(self, *parts: str | Path) -> str:
        """The text of a file without spaces around it; empty where there is none."""
        try:
            with open(self.root.joinpath(*parts), "rb") as file:
                return file.read(_MAX_READ).decode(errors="replace").strip()
        except OSError:
            return ""

    def names(self, *parts: str) -> list[str]:
        """What is in a folder, with numbers in names ordered as numbers."""
        try:
            return sorted(os.listdir(self.path(*parts)), key=natural)
        except OSError:
            return []

    def real(self, *parts: str) -> Path | None:
        """Where a path leads after links, None where it leads nowhere."""
        path = self.path(*parts)
        return path.resolve() if path.exists() else None

    def pci(self, bus_id: str) -> Path | None:
        """The folder of a PCI device at its place in the tree."""
        return self.real("sys", "bus", "pci", "devices", bus_id)

    def pci_of(self, *parts: str) -> str:
        """The bus id of the PCI device a class device hangs on directly; empty for virtual devices, virtio, USB."""
        device = self.real(*parts, "device")
        if device is None or not BUS_ID.fullmatch(device.name):
            return ""
        return device.name

    def numa_nodes(self) -> Iterator[tuple[str, int]]:
        """NUMA domains with CPUs: their number and how many CPUs they have. One ``-1`` where the kernel shows none."""
        found = False
        for name in self.names("sys", "devices", "system", "node"):
            if re.fullmatch(r"node\d+", name) and (cpus := self.count(self.read("sys", "devices", "system", "node", name, "cpulist"))):
                found = True
                yield name[4:], cpus
        if not found:
            yield "-1", max(1, self.count(self.read("sys", "devices", "system", "cpu", "online")))

    @staticmethod
    def count(ranges: str) -> int:
        """How many numbers a list such as ``0-3,8`` names."""
        total = 0
        for part in filter(None, ranges.split(",")):
            first, _, last = part.partition("-")
            if first.isdigit() and (last.isdigit() or not last):
                total += int(last or first) - int(first) + 1
        return total


def natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key: ``mlx5_10`` after ``mlx5_9``."""
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text))
