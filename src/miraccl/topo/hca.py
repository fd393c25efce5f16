"""InfiniBand and RoCE devices as sysfs shows them: ports, addresses, place in the machine.

Needs neither libibverbs nor permissions. ``root`` is the file system's root, another one in tests.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CLASS = "sys/class/infiniband"
#: Unused entries after which a table of GIDs is assumed to have ended: Soft-RoCE has 1024 entries.
GIDS_UNUSED = 32
#: Forms of a GID that is not used: all zeros behind the prefix.
_EMPTY = (b"\0" * 16, b"\xfe\x80" + b"\0" * 14)


@dataclass(frozen=True, kw_only=True)
class Gid:
    """Entry of a port's table of GIDs.

    Attributes:
        index: Place in the table.
        type: ``ib``, ``roce1`` or ``roce2``.
        netdev: Network interface of a RoCE address, "" for InfiniBand.
    """

    index: int
    raw: bytes
    type: str
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The GID as an address; an IPv4 one if it is mapped."""
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address

    @property
    def family(self) -> int:
        """4 for a mapped IPv4 address, else 6."""
        return self.address.version

    @property
    def link_local(self) -> bool:
        return self.address.is_link_local


@dataclass(frozen=True, kw_only=True)
class Port:
    """Port of a device.

    Attributes:
        state: Name of the state, such as ``ACTIVE`` or ``DOWN``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        rate: Text of the rate, such as ``100 Gb/sec (4X EDR)``.
    """

    number: int
    state: str
    phys_state: str
    link_layer: str
    rate: str
    lid: int = 0
    gids: tuple[Gid, ...] = ()

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def kind(self) -> str:
        """``ib`` or ``roce``: ports of different kinds cannot be connected."""
        return "roce" if self.link_layer == "Ethernet" else "ib"

    @property
    def gbits(self) -> float:
        """Rate in Gbit/s, 0 if it is unknown."""
        text = self.rate.partition(" ")[0]
        try:
            return float(text)
        except ValueError:
            return 0.0


@dataclass(frozen=True, kw_only=True)
class Hca:
    """Device in ``/sys/class/infiniband``.

    Attributes:
        guid: Node GUID as sysfs writes it.
        pci: PCI address, "" for a software device.
        numa: NUMA domain, -1 if unknown.
        uverbs: Device file of libibverbs, "" without the module ib_uverbs.
    """

    name: str
    ports: tuple[Port, ...]
    firmware: str = ""
    board: str = ""
    guid: str = ""
    pci: str = ""
    numa: int = -1
    uverbs: str = ""


def read_hcas(root: str | Path = "/") -> list[Hca]:
    """Return the devices of this machine in the order of their names."""
    folder = Path(root) / CLASS
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
    return [_read_hca(folder / name, Path(root)) for name in names]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_hca(folder: Path, root: Path) -> Hca:
    device = folder / "device"
    pci = device.resolve().name if (device / "vendor").exists() else ""
    numa = _text(device / "numa_node")
    return Hca(
        name=folder.name,
        ports=tuple(_read_ports(folder)),
        firmware=_text(folder / "fw_ver"),
        board=_text(folder / "board_id"),
        guid=_text(folder / "node_guid"),
        pci=pci,
        numa=int(numa) if numa.lstrip("-").isdecimal() else -1,
        uverbs=_uverbs_of(folder.name, root),
    )


def _uverbs_of(name: str, root: Path) -> str:
    folder = root / "sys/class/infiniband_verbs"
    try:
        entries = sorted(folder.glob("uverbs*"))
    except OSError:
        return ""
    for entry in entries:
        if _text(entry / "ibdev") == name:
            return f"/dev/infiniband/{entry.name}"
    return ""


def _read_ports(folder: Path) -> Iterator[Port]:
    try:
        numbers = sorted(int(entry.name) for entry in (folder / "ports").iterdir())
    except (OSError, ValueError):
        return
    for number in numbers:
        base = folder / "ports" / str(number)
        lid = _text(base / "lid")
        yield Port(
            number=number,
            state=_text(base / "state").partition(":")[2].strip(),
            phys_state=_text(base / "phys_state").partition(":")[2].strip(),
            link_layer=_text(base / "link_layer"),
            rate=_text(base / "rate"),
            lid=int(lid, 0) if lid else 0,
            gids=tuple(_read_gids(base)),
        )


_TYPES = {"IB/RoCE v1": "roce1", "RoCE v2": "roce2"}


def _read_gids(port: Path) -> Iterator[Gid]:
    """Yield the entries of a port's table that are used."""
    ethernet = _text(port / "link_layer") == "Ethernet"
    try:
        indices = sorted(int(entry.name) for entry in (port / "gids").iterdir())
    except (OSError, ValueError):
        return
    unused = 0
    for index in indices:
        if unused >= GIDS_UNUSED:
            return
        unused += 1
        try:
            raw = ipaddress.IPv6Address(_text(port / "gids" / str(index))).packed
        except ValueError:
            continue
        # Reading the type of an unused entry fails with EINVAL, which means "unused" as well.
        kind = _text(port / "gid_attrs" / "types" / str(index))
        if raw in _EMPTY or (ethernet and not kind):
            continue
        unused = 0
        yield Gid(
            index=index,
            raw=raw,
            type=_TYPES.get(kind, "roce1") if ethernet else "ib",
            netdev=_text(port / "gid_attrs" / "ndevs" / str(index)),
        )


def select_ports(hcas: list[Hca], wanted: str) -> list[tuple[Hca, Port]]:
    """Return the active ports that a list as of ``NCCL_IB_HCA`` selects."""
    return [
        (hca, port)
        for hca in hcas
        for port in hca.ports
        if port.active and is_selected(hca.name, port.number, wanted)
    ]


def is_selected(name: str, port: int, wanted: str) -> bool:
    """Return True if a list as of ``NCCL_IB_HCA`` selects a port.

    Args:
        wanted: Names, with ``:port`` where needed, as prefixes; a leading ``^`` excludes them,
            ``=`` asks for exact names, ``^=`` excludes exact names. Empty: all.
    """
    excluding = wanted.startswith("^")
    text = wanted.removeprefix("^")
    exact = text.startswith("=")
    names = [part.strip() for part in text.removeprefix("=").split(",") if part.strip()]
    return not names or _matches(name, port, names, exact) != excluding


def _matches(name: str, port: int, names: list[str], exact: bool) -> bool:
    for each in names:
        wanted, _, number = each.partition(":")
        if number and number != str(port):
            continue
        if name == wanted if exact else name.startswith(wanted):
            return True
    return False
