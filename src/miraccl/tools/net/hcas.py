"""Provider of ``miraccl net devices``: ports of InfiniBand and RoCE devices."""

from __future__ import annotations

from pathlib import Path

from miraccl import params
from miraccl.native.verbs_abi import load_library
from miraccl.tools.findings import DoctorFinding
from miraccl.tools.net.devices import DeviceReport, NetDevice
from miraccl.topo.hca import Port
from miraccl.transport import registry
from miraccl.transport.hca_devices import HcaReport, hca_devices

#: Abilities of ``HcaCapabilities`` that the text names.
ABILITIES = {
    "on_demand_paging": "on-demand paging",
    "relaxed_ordering": "relaxed ordering",
    "dma_buf": "dma-buf",
    "peer_memory": "peer memory",
    "null_mr": "null regions",
    "data_direct": "data direct",
}


def report(root: str | Path = "/") -> DeviceReport:
    """Return one device per port, and what is wrong; nothing on hosts without such devices, unless
    ``MIRACCL_NET=verbs`` asks for them.
    """
    found = hca_devices(root, load_library)
    if not found.devices and params.NET.read() != registry.VERBS.name:
        return DeviceReport(devices=())
    problems = [*found.problems, *(p for device in found.devices for p in device.problems)]
    return DeviceReport(
        devices=tuple(
            _describe(device, port) for device in found.devices for port in device.hca.ports
        ),
        findings=tuple(
            DoctorFinding(name="verbs", status="note", found=p.what, advice=p.advice)
            for p in problems
        ),
    )


def _describe(device: HcaReport, port: Port) -> NetDevice:
    hca, used = device.hca, port.number in device.selected
    # The same address is there once per type of GID.
    addresses = dict.fromkeys(str(gid.address) for gid in port.gids if gid.type != "roce1")
    record = device.to_dict()
    return NetDevice(
        kind="hca",
        name=f"{hca.name}:{port.number}",
        state=port.state.lower(),
        used=used,
        use="verbs" if used else "not active" if not port.active else "not selected",
        addresses=tuple(addresses),
        speed_mbit=int(port.gbits * 1000),
        numa=hca.numa,
        driver=hca.pci or "software",
        summary=_summary(device, port),
        details={
            "link_layer": port.link_layer,
            "rate": port.rate,
            "firmware": hca.firmware,
            "guid": hca.guid,
            "pci": hca.pci,
            "gids": record["ports"][hca.ports.index(port)]["gids"],
            "capabilities": record["capabilities"],
        },
    )


def _summary(device: HcaReport, port: Port) -> str:
    """Return place, firmware, addresses and abilities of a port's device."""
    hca = device.hca
    parts = [hca.pci or "software", f"firmware {hca.firmware or 'unknown'}"]
    gids = [f"{gid.index} {gid.type} {gid.address}" for gid in port.gids]
    parts.append(f"GIDs: {', '.join(gids) or 'none'}")
    if device.capabilities is not None:
        for title, wanted in (("can", True), ("cannot", False)):
            names = [
                text
                for name, text in ABILITIES.items()
                if getattr(device.capabilities, name) is wanted
            ]
            if names:
                parts.append(f"{title}: {', '.join(names)}")
    return "; ".join(parts)
