"""Provider of ``miraccl net devices``: network interfaces, from sysfs and ioctls (Linux)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from miraccl import params
from miraccl.bootstrap.interfaces import (
    Interface,
    choose_addresses,
    list_interfaces,
    rail_addresses,
)
from miraccl.errors import MiracclError
from miraccl.tools.findings import DoctorFinding, read_text
from miraccl.tools.net.devices import DeviceReport, NetDevice

SYS = Path("/sys/class/net")
SIOCETHTOOL = 0x8946  # linux/sockios.h
#: ETHTOOL_G* of linux/ethtool.h, each with a struct ethtool_value.
OFFLOADS = {"tso": 0x1E, "gso": 0x23, "gro": 0x2B}
COUNTERS = ("rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
#: Share of packets above which drops or errors are reported.
BAD_SHARE = 1e-4
#: Speed (Mbit/s) from which MTU 1500 costs processor time.
FAST_MBIT = 10_000
UDP_SEGMENT = 103  # linux/udp.h


def report() -> DeviceReport:
    """Return all interfaces of this host, loopback included, and what is wrong."""
    addresses = {i.name: i for i in list_interfaces()}
    used: set[str] = set()
    findings: list[DoctorFinding] = []
    with _reported(findings, "interfaces"):  # the addresses of a rank without a rendezvous
        chosen, _ = choose_addresses()
        used = {*chosen, *rail_addresses(chosen)}
    devices = [read_interface(name, addresses.get(name), used) for _, name in socket.if_nameindex()]
    findings += examine(devices, selected=not findings)
    with _reported(findings, "settings"):
        findings += examine_host(read_host(), params.SOCKET_BUFFER.read())
    return DeviceReport(devices=tuple(devices), findings=tuple(findings))


@contextlib.contextmanager
def _reported(findings: list[DoctorFinding], name: str) -> Iterator[None]:
    """Make a finding of an error with which ranks would end."""
    try:
        yield
    except MiracclError as error:
        findings.append(
            DoctorFinding(name=name, status="missing", found=error.message, advice=error.hint or "")
        )


def read_interface(name: str, known: Interface | None, used: set[str]) -> NetDevice:
    """Return the facts of one interface; ``known``: its addresses if it is up."""
    folder = SYS / name
    addresses = known.addresses if known else ()
    device = folder / "device"
    return NetDevice(
        kind="interface",
        name=name,
        state=_state(folder, known),
        used=bool(used & set(addresses)),
        use=_use(known),
        addresses=addresses,
        speed_mbit=max(0, _number(folder / "speed")),
        duplex=read_text(str(folder / "duplex")),
        mtu=_number(folder / "mtu"),
        numa=_number(device / "numa_node", -1),
        driver=os.path.basename(os.path.realpath(device / "driver")) if device.exists() else "",
        offloads=read_offloads(name),
        counters={c: _number(folder / "statistics" / c) for c in COUNTERS},
        details={"loopback": bool(known and known.loopback), "virtual": not device.exists()},
    )


def _state(folder: Path, known: Interface | None) -> str:
    state = read_text(str(folder / "operstate"))
    return "up" if state == "unknown" and known else state or "unknown"


def _use(known: Interface | None) -> str:
    """Return why an interface is not used, if it is not."""
    names, variable = params.SOCKET_IFNAME.resolve()
    if known is None or not known.addresses:
        return "no address" if known else "down"
    if names:
        return f"{variable}={names}"
    if known.loopback:
        return "loopback"
    return "virtual" if known.virtual else "another one is preferred"


def _number(path: Path, default: int = 0) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # sysfs has files that some drivers cannot answer
        return default


def read_offloads(name: str) -> dict[str, bool]:
    """Return which offloads are on (ethtool ioctl); empty where the kernel does not say."""
    found: dict[str, bool] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for label, command in OFFLOADS.items():
            value = array("I", [command, 0])
            request = struct.pack("16sP", os.fsencode(name)[:15], value.buffer_info()[0])
            with contextlib.suppress(OSError):
                fcntl.ioctl(probe, SIOCETHTOOL, request)
                found[label] = bool(value[1])
    return found


def examine(devices: Sequence[NetDevice], *, selected: bool = True) -> list[DoctorFinding]:
    """Return what is wrong with interfaces, and what to do.

    ``selected``: the settings name interfaces that exist, or none.
    """
    findings: list[DoctorFinding] = []

    def note(device: str, found: str, advice: str) -> None:
        findings.append(DoctorFinding(name=device, status="note", found=found, advice=advice))

    for device in devices:
        if device.details.get("loopback"):
            continue
        if device.state == "down" and not device.details.get("virtual"):
            note(device.name, "down", f"ip link set {device.name} up, or check cable and switch")
        if device.state != "up":
            continue
        if device.duplex == "half":
            advice = f"ethtool -s {device.name} duplex full, and the same at the switch"
            note(device.name, "half duplex", advice)
        off = [x for x in ("gso", "gro") if device.offloads.get(x) is False]
        if off:
            advice = " ".join([f"ethtool -K {device.name}", *(f"{name} on" for name in off)])
            note(device.name, f"{', '.join(off)} off: more processor time per byte", advice)
        if device.mtu == 1500 and device.speed_mbit >= FAST_MBIT:
            advice = f"ip link set {device.name} mtu 9000, if all hosts and switches allow it"
            note(device.name, "MTU 1500 on a fast interface", advice)
        findings += _examine_counters(device)
    findings += _examine_mtus(devices)
    if selected and not any(d.used and not d.details.get("loopback") for d in devices):
        note(
            "interfaces",
            "none to other hosts: loopback only",
            "MIRACCL_SOCKET_IFNAME names interfaces of containers and virtual machines",
        )
    return findings


def _examine_counters(device: NetDevice) -> list[DoctorFinding]:
    findings = []
    for way in ("rx", "tx"):
        packets = max(1, device.counters.get(f"{way}_packets", 0))
        for kind, cause in (
            ("errors", "cable, transceiver or driver"),
            ("dropped", f"rings too small: ethtool -G {device.name} {way} 4096, or a full queue"),
        ):
            count = device.counters.get(f"{way}_{kind}", 0)
            if count > BAD_SHARE * packets:
                findings.append(
                    DoctorFinding(
                        name=device.name,
                        status="note",
                        found=f"{count} of {packets} {way} packets: {kind}",
                        advice=cause,
                    )
                )
    return findings


def _examine_mtus(devices: Sequence[NetDevice]) -> list[DoctorFinding]:
    mtus = {d.name: d.mtu for d in devices if d.used and not d.details.get("loopback")}
    if len(set(mtus.values())) < 2:
        return []
    text = ", ".join(f"{name} {mtu}" for name, mtu in mtus.items())
    return [
        DoctorFinding(
            name="mtu",
            status="note",
            found=f"interfaces that carry data differ: {text}",
            advice="one MTU on all of them; miraccl net probe finds what a path carries",
        )
    ]


def read_host() -> dict[str, str]:
    """Return kernel settings and counters that concern all interfaces."""
    names = {
        "rmem_max": "net/core/rmem_max",
        "wmem_max": "net/core/wmem_max",
        "congestion": "net/ipv4/tcp_congestion_control",
        "available": "net/ipv4/tcp_available_congestion_control",
        "ports": "net/ipv4/ip_local_port_range",
    }
    facts = {name: read_text(f"/proc/sys/{path}") for name, path in names.items()}
    facts["udp_overflows"] = str(_udp_overflows())
    facts["udp_segmentation"] = "yes" if _has_udp_segmentation() else "no"
    return facts


def _udp_overflows() -> int:
    """Return the datagrams lost since boot because a receive buffer was full (/proc/net/snmp)."""
    lines = [line.split() for line in read_text("/proc/net/snmp").splitlines()]
    for names, values in zip(lines[::2], lines[1::2]):
        if names[:1] == ["Udp:"] and "RcvbufErrors" in names:
            return int(values[names.index("RcvbufErrors")])
    return 0


def _has_udp_segmentation() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, 1400)
        return True
    return False


def examine_host(facts: Mapping[str, str], wanted: int) -> list[DoctorFinding]:
    """Return findings on the kernel's settings; ``wanted``: bytes of a socket buffer."""
    findings = []
    for name in ("rmem_max", "wmem_max"):
        limit = int(facts.get(name) or 0)
        short = 0 < limit < wanted
        findings.append(
            DoctorFinding(
                name=name,
                status="note" if short else "ok",
                found=f"{limit} bytes" + (f", below the {wanted} that miraccl asks for" * short),
                advice=f"sysctl -w net.core.{name}={wanted}" if short else "",
            )
        )
    found = f"TCP uses {facts.get('congestion', '')} of {facts.get('available', '')}"
    findings.append(DoctorFinding(name="congestion", status="ok", found=found))
    overflows = int(facts.get("udp_overflows") or 0)
    if overflows:
        findings.append(
            DoctorFinding(
                name="udp drops",
                status="note",
                found=f"{overflows} datagrams lost in full receive buffers since boot",
                advice="a larger net.core.rmem_max",
            )
        )
    findings += [_segmentation(facts), *_port_range(facts.get("ports", ""))]
    return findings


def _segmentation(facts: Mapping[str, str]) -> DoctorFinding:
    if facts.get("udp_segmentation") == "yes":
        return DoctorFinding(name="udp gso", status="ok", found="the kernel segments datagrams")
    return DoctorFinding(
        name="udp gso",
        status="note",
        found="the kernel does not segment datagrams",
        advice="Linux 4.18 or later: UDP costs several times the processor time without",
    )


def _port_range(kernel: str) -> list[DoctorFinding]:
    """Compare NET_PORT_RANGE with the range from which the kernel chooses."""
    ports = params.NET_PORT_RANGE.read()
    if not ports.first:
        found = f"chosen by the kernel of {'-'.join(kernel.split()) or 'its range'}"
        advice = "MIRACCL_NET_PORT_RANGE=20000-20099 limits them, for firewalls"
        return [DoctorFinding(name="ports", status="ok", found=found, advice=advice)]
    found = f"{ports}, by MIRACCL_NET_PORT_RANGE"
    low, high = (int(x) for x in (kernel.split() or ["0", "0"])[:2])
    if ports.first <= high and ports.last >= low:
        advice = "choose ports outside: other programs may hold these as their local ports"
        found += f"; it overlaps with the kernel's own range {low}-{high}"
        return [DoctorFinding(name="ports", status="note", found=found, advice=advice)]
    return [DoctorFinding(name="ports", status="ok", found=found)]
