"""InfiniBand and RoCE devices of this host with what they can do, and what is wrong with them."""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miraccl import params
from miraccl.errors import MiracclError, MissingDependency
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary, has_data_direct, load_library
from miraccl.topo.hca import Gid, Hca, Port, read_hcas, select_ports
from miraccl.transport.fifo import PrivateMemory
from miraccl.transport.verbs_device import QpSettings, QueuePair, VerbsDevice

#: Locked memory below which registrations of FIFOs and messages are likely to fail.
MEMLOCK_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class HcaProblem:
    """Something that keeps a device or a port from being used, and what to do about it."""

    what: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class HcaCapabilities:
    """Abilities of an opened device.

    Attributes:
        on_demand_paging: Memory can be registered without locking it (probed).
        dma_buf: The library can register dma-buf descriptors of GPU memory.
        relaxed_ordering: Memory can be registered with relaxed ordering of PCI writes (probed).
        peer_memory: The kernel module nvidia_peermem is loaded.
        null_mr: A registration that drops what is written to it can be made (probed).
        data_direct: The device has a data-direct function beside its own (mlx5).
        max_qps, max_cqe, max_mrs: Limits of the device.
    """

    on_demand_paging: bool
    dma_buf: bool
    relaxed_ordering: bool
    peer_memory: bool
    null_mr: bool
    data_direct: bool
    inline_bytes: int
    max_qps: int
    max_cqe: int
    max_mrs: int


@dataclass(frozen=True, kw_only=True)
class HcaReport:
    """One device.

    Attributes:
        capabilities: None if the device cannot be opened.
        selected: Numbers of the ports that verbs would use with the current settings.
    """

    hca: Hca
    capabilities: HcaCapabilities | None
    selected: tuple[int, ...]
    problems: tuple[HcaProblem, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return values that JSON has."""
        record = asdict(self.hca)
        for port, original in zip(record["ports"], self.hca.ports, strict=True):
            port["kind"], port["active"] = original.kind, original.active
            port["gids"] = [_gid_record(gid) for gid in original.gids]
        return record | {
            "capabilities": asdict(self.capabilities) if self.capabilities else None,
            "selected": list(self.selected),
            "problems": [asdict(problem) for problem in self.problems],
        }


def _gid_record(gid: Gid) -> dict[str, Any]:
    return {
        "index": gid.index,
        "address": str(gid.address),
        "type": gid.type,
        "netdev": gid.netdev,
    }


@dataclass(frozen=True, kw_only=True)
class HcaList:
    """Devices of a host, and problems that concern all of them."""

    devices: tuple[HcaReport, ...]
    problems: tuple[HcaProblem, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": [device.to_dict() for device in self.devices],
            "problems": [asdict(problem) for problem in self.problems],
        }


def hca_devices(
    root: str | Path = "/", library: Callable[[], VerbsLibrary] = load_library
) -> HcaList:
    """Return the devices of this host; reads sysfs, and opens each for its capabilities.

    Args:
        root: Root of the file system.
        library: Loads libibverbs.
    """
    hcas = read_hcas(root)
    problems = list(_host_problems(hcas))
    verbs: VerbsLibrary | None = None
    try:
        verbs = library()
    except MissingDependency as error:
        if hcas:
            problems.append(HcaProblem(what=error.message, advice=error.hint or ""))
    chosen = set()
    if not params.IB_DISABLE.read():
        chosen = {(h.name, p.number) for h, p in select_ports(hcas, params.IB_HCA.read())}
    reports = tuple(_report(hca, verbs, chosen) for hca in hcas)
    return HcaList(devices=reports, problems=tuple(problems))


def _host_problems(hcas: list[Hca]) -> list[HcaProblem]:
    if not hcas:
        return [
            HcaProblem(
                what="this host has no InfiniBand or RoCE device",
                advice="if it has an adapter, load its driver (lspci, modprobe mlx5_ib); in a "
                "container, /sys/class/infiniband and /dev/infiniband must be visible",
            )
        ]
    problems = []
    if params.IB_DISABLE.read():
        problems.append(
            HcaProblem(what="MIRACCL_IB_DISABLE is set", advice="unset it to use these devices")
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY and limit < MEMLOCK_BYTES:
        problems.append(
            HcaProblem(
                what=f"this process may lock {limit >> 10} KiB of memory only",
                advice="ulimit -l unlimited; containers: --ulimit memlock=-1",
            )
        )
    return problems


def _report(hca: Hca, library: VerbsLibrary | None, chosen: set[tuple[str, int]]) -> HcaReport:
    problems = [problem for port in hca.ports for problem in _port_problems(hca, port)]
    if not hca.uverbs:
        problems.append(
            HcaProblem(
                what=f"{hca.name} has no device file",
                advice="modprobe ib_uverbs; in a container, pass /dev/infiniband",
            )
        )
    capabilities = None
    active = next((port for port in hca.ports if port.active), None)
    if library and active:
        try:
            capabilities = _capabilities(library, hca, active)
        except MiracclError as error:
            problems.append(HcaProblem(what=error.message, advice=error.hint or ""))
    return HcaReport(
        hca=hca,
        capabilities=capabilities,
        selected=tuple(p.number for p in hca.ports if (hca.name, p.number) in chosen),
        problems=tuple(problems),
    )


def _port_problems(hca: Hca, port: Port) -> list[HcaProblem]:
    name, problems = f"{hca.name}:{port.number}", list[HcaProblem]()
    if not port.active:
        ethernet = port.kind == "roce"
        problems.append(
            HcaProblem(
                what=f"port {name} is {port.state or 'in an unknown state'}",
                advice="bring its network interface up (ip link set ... up), check the cable"
                if ethernet
                else "check the cable; INIT means that no subnet manager runs (opensm)",
            )
        )
    elif port.kind == "roce":
        routable = [gid for gid in port.gids if gid.type == "roce2" and not gid.link_local]
        if not routable:
            problems.append(
                HcaProblem(
                    what=f"port {name} has no RoCE v2 GID with a global address",
                    advice="give its network interface an IP address; until then it reaches its "
                    "own network only",
                )
            )
    return problems


def _capabilities(library: VerbsLibrary, hca: Hca, port: Port) -> HcaCapabilities:
    device = VerbsDevice.open(library, hca, port)
    try:
        limits = device.limits
        return HcaCapabilities(
            on_demand_paging=_probe_on_demand(device),
            dma_buf=library.has("ibv_reg_dmabuf_mr"),
            relaxed_ordering=device.accepts_relaxed_ordering(),
            peer_memory=Path("/sys/module/nvidia_peermem").exists(),
            null_mr=_probe_null_mr(device),
            data_direct=has_data_direct(device.context, hca.name),
            inline_bytes=_probe_inline(device),
            max_qps=limits.max_qp,
            max_cqe=limits.max_cqe,
            max_mrs=limits.max_mr,
        )
    finally:
        device.close()


def _probe_on_demand(device: VerbsDevice) -> bool:
    memory = PrivateMemory(mmap.PAGESIZE)
    try:
        device.register(memory.address, mmap.PAGESIZE, abi.ACCESS_ON_DEMAND)
    except MiracclError:
        return False
    device.deregister(memory.address, abi.ACCESS_ON_DEMAND)
    return True


def _probe_null_mr(device: VerbsDevice) -> bool:
    made = device.make_null_registration()
    if made:
        device.library.call("ibv_dereg_mr", made)
    return bool(made)


def _probe_inline(device: VerbsDevice) -> int:
    """Return the bytes of a row if a queue pair can carry it inline, else 0."""
    queue = device.create_queue(16)
    qp = QueuePair(device=device, queue=queue, send_depth=8, recv_depth=8, settings=QpSettings())
    try:
        qp.create()
        return QpSettings().inline_bytes if qp.inline else 0
    finally:
        qp.close()
        device.library.call("ibv_destroy_cq", queue)
