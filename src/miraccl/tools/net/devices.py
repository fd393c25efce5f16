"""Network devices of this host: records, providers, and advice on what is wrong.

A provider is a function that returns devices of one kind; ``PROVIDERS`` lists them. Interfaces are
in ``interfaces``; another kind of device (host channel adapters) is one module and one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from miraccl.tools.findings import DoctorFinding


@dataclass(frozen=True, kw_only=True)
class NetDevice:
    """One network device.

    Attributes:
        kind: ``interface``, or what else a provider finds.
        state: ``up``, ``down`` or what the kernel says.
        used: True if miraccl uses it with the current settings; ``use`` says why or why not.
        speed_mbit: Speed in Mbit/s; 0 while unknown, as for virtual interfaces.
        numa: NUMA node; -1 while unknown.
        offloads: Segmentation and aggregation by the kernel or the card, by name.
        counters: Packets, errors and drops since the device came up.
        details: Other facts of the kind.
        summary: What of these a reader of the table wants to know, in one line.
    """

    kind: str
    name: str
    state: str
    used: bool = False
    use: str = ""
    addresses: tuple[str, ...] = ()
    speed_mbit: int = 0
    duplex: str = ""
    mtu: int = 0
    numa: int = -1
    driver: str = ""
    offloads: dict[str, bool] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    summary: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Devices of one provider, and what it finds on them and on the host."""

    devices: tuple[NetDevice, ...]
    findings: tuple[DoctorFinding, ...] = ()


Provider = Callable[[], DeviceReport]


def _interfaces() -> DeviceReport:
    from miraccl.tools.net.interfaces import report

    return report()


def _hcas() -> DeviceReport:
    from miraccl.tools.net.hcas import report

    return report()


def _plugins() -> DeviceReport:
    from miraccl.tools.net.plugins import report

    return report()


#: Kinds of devices by name. Each provider imports what it needs when it is called.
PROVIDERS: dict[str, Provider] = {
    "interfaces": _interfaces,
    "verbs": _hcas,
    "plugins": _plugins,
}


COLUMNS = (
    "device",
    "state",
    "speed",
    "MTU",
    "NUMA",
    "offloads",
    "errors",
    "drops",
    "used",
    "addresses",
)


def collect() -> DeviceReport:
    """Run all providers; one that raises gives a finding instead of devices."""
    devices: list[NetDevice] = []
    findings: list[DoctorFinding] = []
    for name, provider in PROVIDERS.items():
        try:
            part = provider()
        except Exception as error:  # one failing provider must not hide the others
            text = f"cannot list: {type(error).__name__}: {error}"
            findings.append(DoctorFinding(name=name, status="note", found=text))
            continue
        devices += part.devices
        findings += part.findings
    return DeviceReport(devices=tuple(devices), findings=tuple(findings))


def format_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with left-aligned columns."""
    table = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def render(report: DeviceReport) -> str:
    """Return the table of devices, and the findings below it."""
    rows = [
        (
            device.name,
            device.state,
            format_speed(device.speed_mbit),
            device.mtu or "",
            device.numa if device.numa >= 0 else "",
            " ".join(name for name, on in device.offloads.items() if on) or "none",
            sum(n for name, n in device.counters.items() if "error" in name),
            sum(n for name, n in device.counters.items() if "drop" in name),
            "yes" if device.used else f"no: {device.use}",
            " ".join(device.addresses),
        )
        for device in report.devices
    ]
    lines = [format_table(COLUMNS, rows)]
    width = max((4, *(len(f.status) for f in report.findings)))
    lines += [f"{each.name}: {each.summary}" for each in report.devices if each.summary]
    for finding in report.findings:
        lines.append(f"{finding.status:<{width}}  {finding.name}: {finding.found}")
        if finding.advice:
            lines.append(f"{'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


def format_speed(mbit: int) -> str:
    """Format a speed in Mbit/s, such as ``25 Gbit/s``; empty if unknown."""
    if mbit <= 0:
        return ""
    return f"{mbit / 1000:g} Gbit/s" if mbit >= 1000 else f"{mbit} Mbit/s"
