"""A folder that resembles the kernel's: PCI tree, class devices, NUMA domains."""

from __future__ import annotations

from pathlib import Path


class FakeMachine:
    """Writer of a machine below ``root``; addresses go from the root complex to the device."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")

    def link(self, path: str, target: Path) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(target)

    def pci(
        self,
        chain: str,
        *,
        cls: str,
        speed: str = "16.0 GT/s PCIe",
        width: str = "16",
        numa: str = "0",
        **more: str,
    ) -> Path:
        """Write ``pci0000:00/0000:00:01.0/0000:01:00.0``.

        Bridges above must have been written before or get the same values.
        """
        folder = self.root / "sys" / "devices" / chain
        folder.mkdir(parents=True, exist_ok=True)
        values = {
            "class": cls,
            "max_link_speed": speed,
            "max_link_width": width,
            "numa_node": numa,
            **more,
        }
        for name, text in values.items():
            (folder / name).write_text(text + "\n")
        self.link(f"sys/bus/pci/devices/{folder.name}", folder)
        return folder

    def net(
        self, name: str, device: Path | None, *, speed: str = "25000", state: str = "up"
    ) -> None:
        self.file(f"sys/class/net/{name}/operstate", state)
        self.file(f"sys/class/net/{name}/speed", speed)
        if device is not None:
            self.link(f"sys/class/net/{name}/device", device)

    def infiniband(
        self,
        name: str,
        device: Path,
        *,
        rate: str = "200 Gb/sec (4X HDR)",
        state: str = "4: ACTIVE",
        guid: str = "",
    ) -> None:
        self.file(f"sys/class/infiniband/{name}/ports/1/state", state)
        self.file(f"sys/class/infiniband/{name}/ports/1/rate", rate)
        self.file(f"sys/class/infiniband/{name}/sys_image_guid", guid or "1070:fd03:00b5:951e")
        self.link(f"sys/class/infiniband/{name}/device", device)

    def numa(self, node: int, cpus: str, cpumap: str = "ff") -> None:
        self.file(f"sys/devices/system/node/node{node}/cpulist", cpus)
        self.file(f"sys/devices/system/node/node{node}/cpumap", cpumap)

    def cpuinfo(self, vendor: str = "GenuineIntel", family: int = 6, model: int = 143) -> None:
        text = (
            f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: "
            f"{model}\nmodel name\t: x\n"
        )
        text += "\nprocessor\t: 1\nmodel\t: 9"
        self.file("proc/cpuinfo", text)
