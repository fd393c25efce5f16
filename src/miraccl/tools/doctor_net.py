"""``miraccl doctor --net``: which transport connects hosts and why, and what the devices allow."""

from __future__ import annotations

from miraccl import params
from miraccl.errors import MiracclError, MissingDependency
from miraccl.tools.findings import Check, DoctorFinding, Status


def device_findings() -> list[DoctorFinding]:
    """Return a line per network device, and what is wrong with them and the kernel's settings."""
    from miraccl.tools.net.devices import NetDevice, collect, format_speed

    def describe(device: NetDevice) -> DoctorFinding:
        facts = [device.state, format_speed(device.speed_mbit), f"MTU {device.mtu}"]
        facts += [f"NUMA {device.numa}"] if device.numa >= 0 else []
        facts.append("carries data" if device.used else f"not used: {device.use}")
        return DoctorFinding(name=device.name, status="ok", found=", ".join(filter(None, facts)))

    report = collect()
    return [*(describe(device) for device in report.devices), *report.findings]


def _check_transports() -> DoctorFinding:
    """Explain the choice between two hosts that have this host's kind of addresses."""
    from miraccl.bootstrap.interfaces import choose_addresses
    from miraccl.runtime.rank_records import read_host_settings
    from miraccl.transport import registry
    from miraccl.transport.base import Endpoint

    net = params.NET.read()
    try:
        specs = registry.allowed(net)
        addresses, _ = choose_addresses()
        hcas = read_host_settings(2)["hcas"]
        here, there = (
            Endpoint(rank=rank, hostid=f"host {rank}", pid=rank + 1, addresses=addresses, hcas=hcas)
            for rank in range(2)
        )
        choice = registry.choose(here, there, specs)
    except MiracclError as error:  # ranks would fail alike
        return DoctorFinding(
            name="transport", status="missing", found=error.message, advice=error.hint or ""
        )
    others = [f"not {name}: {reason}" for name, reason in choice.rejected.items()]
    reason = "MIRACCL_NET={} asks for it" if net == registry.AUTO else f"MIRACCL_NET={net}"
    others += [
        f"not {name}: {reason.format(name)}"
        for name in registry.names()
        if registry.spec_of(name).network
        and name not in {registry.MEMORY.name, *(spec.name for spec in specs)}
        and name not in choice.rejected
    ]
    found = f"MIRACCL_NET={net}: {choice.name}, {choice.reason} ({'; '.join(others)})"
    return DoctorFinding(name="transport", status="ok", found=found)


def _check_streams() -> DoctorFinding:
    from miraccl.transport.socket import SocketOptions

    options = SocketOptions.from_environment()
    found = f"{options.nstreams} streams per network that two hosts share"
    found += f", buffers of {options.buffer_bytes >> 10} KiB" if options.buffer_bytes else ""
    return DoctorFinding(name="tcp", status="ok", found=found)


def _check_udp() -> DoctorFinding:
    """Check what UDP needs, and show its settings."""
    from miraccl.native.crypto import libcrypto
    from miraccl.transport.datagram import options_from_environment
    from miraccl.transport.registry import UDP
    from miraccl.wire.datagram.control import controller

    selected = params.NET.read() == UDP.name
    try:
        options = options_from_environment()
        libcrypto()
    except MiracclError as error:
        # without libcrypto there is AEGIS, where both processors compute it
        fails = selected and not isinstance(error, MissingDependency)
        status: Status = "missing" if fails else "note"
        return DoctorFinding(
            name="udp", status=status, found=error.message, advice=error.hint or ""
        )
    found = (
        f"{options.ports} ports per interface, congestion control {options.congestion} "
        f"({controller(options.congestion).summary}), protection {options.protection}, "
        f"admission {options.admission}" + "; not selected" * (not selected)
    )
    return DoctorFinding(name="udp", status="ok", found=found)


def _check_secret() -> DoctorFinding:
    if params.SECRET.read():
        return DoctorFinding(name="secret", status="ok", found="MIRACCL_SECRET is set")
    return DoctorFinding(
        name="secret",
        status="note",
        found="MIRACCL_SECRET is not set",
        advice="several hosts need the same unguessable text in it",
    )


CHECKS: dict[str, Check] = {
    "transport": _check_transports,
    "tcp": _check_streams,
    "udp": _check_udp,
    "secret": _check_secret,
}
