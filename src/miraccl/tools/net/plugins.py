"""Provider of ``miraccl net devices``: devices of the network plugin that the settings name."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from miraccl import params
from miraccl.errors import MiracclError, SystemFailure
from miraccl.native.nccl_net_abi import PTR_CUDA, PTR_DMABUF
from miraccl.native.nccl_net_plugin import NetPlugin, PluginDevice
from miraccl.tools.findings import DoctorFinding
from miraccl.tools.net.devices import DeviceReport, NetDevice
from miraccl.topo.detect import NetInfo
from miraccl.topo.sysfs import BUS_ID
from miraccl.transport import registry
from miraccl.transport.net_plugin import DEVICE, load, plugin_paths

#: Time for a plugin to load and describe its devices.
TRIAL_S = 30


def find_devices() -> tuple[NetPlugin, list[PluginDevice]]:
    """Return the plugin that the settings name, and its devices.

    A child process loads it first, because some plugins end the process that does.

    Raises:
        InvalidUsage, SystemFailure: It is not named, or cannot be used.
    """
    paths = plugin_paths()
    pid = os.fork()
    if pid == 0:
        signal.alarm(TRIAL_S)
        with contextlib.suppress(Exception):  # this process reports it
            load(paths).devices()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        raise SystemFailure(
            f"cannot use the network plugins {', '.join(paths)}: one ends the process ({end})",
            hint="its own output says why",
        )
    plugin = load(paths)
    return plugin, plugin.devices()


def nets() -> list[NetInfo] | None:
    """Return the devices of the plugin that the settings name, for the topology; None without one.

    Raises:
        SystemFailure: It cannot be used.
    """
    if params.NET.read().partition(":")[0] != registry.PLUGIN.name:
        return None
    return [
        NetInfo(
            name=device.name or f"plugin{index}",
            speed_mbps=device.speed_mbps,
            port=device.port,
            guid=device.guid,
            max_connections=device.max_comms,
            gdr=bool(device.pointer_support & (PTR_CUDA | PTR_DMABUF)),
            bus_id=_bus_id(device.pci_path),
            latency_us=device.latency_us,
        )
        for index, device in enumerate(find_devices()[1])
    ]


def _bus_id(path: str) -> str:
    """Return the PCI address of a folder in sysfs, "" if it is not that of a PCI device."""
    name = Path(path).resolve().name if path else ""
    return name if BUS_ID.fullmatch(name) else ""


def report() -> DeviceReport:
    """Return the plugin's devices; none unless MIRACCL_NET=plugin or NCCL_NET_PLUGIN names one."""
    selected = params.NET.read().partition(":")[0] == registry.PLUGIN.name
    if not selected and not params.NET_PLUGIN.read():
        return DeviceReport(devices=())
    try:
        plugin, found = find_devices()
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
