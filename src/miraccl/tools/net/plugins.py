"""Provider of ``miraccl net devices``: devices of the network plugin that the settings name."""

from __future__ import annotations

from miraccl import params
from miraccl.errors import MiracclError
from miraccl.tools.findings import DoctorFinding
from miraccl.tools.net.devices import DeviceReport, NetDevice
from miraccl.transport import registry
from miraccl.transport.net_plugin import DEVICE, load, plugin_paths


def report() -> DeviceReport:
    """Return the plugin's devices; none unless MIRACCL_NET=plugin or NCCL_NET_PLUGIN names one."""
    selected = params.NET.read().partition(":")[0] == registry.PLUGIN.name
    if not selected and not params.NET_PLUGIN.read():
        return DeviceReport(devices=())
    try:
        plugin = load(plugin_paths())
        found = plugin.devices()
    except MiracclError as error:
        finding = DoctorFinding(
            name="network plugin",
            status="missing" if selected else "note",
            found=error.message,
            advice="NCCL_DEBUG=INFO shows what NCCL says of the same plugin",
        )
        return DeviceReport(devices=(), findings=(finding,))
    return DeviceReport(
        devices=tuple(
            NetDevice(
                kind="plugin",
                name=device.name,
                state="up",
                used=selected and index == DEVICE,
                use=f"{plugin.name}, interface v{plugin.version}"
                if selected
                else "MIRACCL_NET=plugin uses it",
                speed_mbit=device.speed_mbps,
                details={
                    "path": plugin.path,
                    "pci": device.pci_path,
                    "port": device.port,
                    "latency_us": device.latency_us,
                    "max_receives": device.max_receives,
                },
            )
            for index, device in enumerate(found)
        )
    )
