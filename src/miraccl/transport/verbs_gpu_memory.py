"""Registration of GPU memory with an adapter: by dma-buf, by peer memory, or not at all.

- dma-buf: the driver exports GPU memory as a descriptor, which the adapter's driver imports
  (``ibv_reg_dmabuf_mr``; rdma-core 34, kernel 5.12, open kernel modules of NVIDIA's driver).
- Peer memory: the module ``nvidia_peermem`` lets ``ibv_reg_mr`` take GPU addresses.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miraccl import params
from miraccl.errors import SystemFailure
from miraccl.native import verbs_abi as abi
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.topo.hca import Hca
from miraccl.topo.records import PathType
from miraccl.topo.sysfs import Sysfs
from miraccl.transport.verbs_device import VerbsDevice

DMABUF_KERNEL = (5, 12)


class GpuRegistration(enum.Enum):
    """Way in which GPU memory is registered."""

    NONE = "none"
    DMABUF = "dma-buf"
    PEER_MEMORY = "peer memory"


@dataclass(frozen=True, kw_only=True)
class RegistrationFacts:
    """Facts from which the way follows.

    Attributes:
        library: libibverbs has ``ibv_reg_dmabuf_mr``.
        kernel: Version of the running kernel.
        open_driver: NVIDIA's open kernel modules are loaded.
        peer_memory: The module nvidia_peermem is loaded.
    """

    library: bool
    kernel: tuple[int, int]
    open_driver: bool
    peer_memory: bool


@dataclass(frozen=True, kw_only=True)
class RegistrationDecision:
    """Way, reason, and what would be needed for a better one."""

    way: GpuRegistration
    reason: str

    @property
    def possible(self) -> bool:
        return self.way is not GpuRegistration.NONE


def probe(library: VerbsLibrary, root: str | Path = "/") -> RegistrationFacts:
    """Return the facts of this host, whose file systems are mounted below ``root``."""
    base = Path(root)
    try:
        version = (base / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        version = ""
    release = os.uname().release.split(".")
    digits = ["".join(c for c in part if c.isdigit()) or "0" for part in (*release, "0")[:2]]
    return RegistrationFacts(
        library=library.has("ibv_reg_dmabuf_mr"),
        kernel=(int(digits[0]), int(digits[1])),
        open_driver="Open Kernel Module" in version,
        peer_memory=(base / "sys/module/nvidia_peermem").exists(),
    )


def decide(facts: RegistrationFacts) -> RegistrationDecision:
    """Return how GPU memory is registered, and why."""
    missing = [
        text
        for holds, text in (
            (facts.library, "libibverbs lacks ibv_reg_dmabuf_mr (rdma-core 34)"),
            (facts.kernel >= DMABUF_KERNEL, "the kernel is older than 5.12"),
            (facts.open_driver, "NVIDIA's open kernel modules are not loaded"),
        )
        if not holds
    ]
    if not missing:
        return RegistrationDecision(
            way=GpuRegistration.DMABUF, reason="library, kernel and GPU driver have it"
        )
    if facts.peer_memory:
        return RegistrationDecision(
            way=GpuRegistration.PEER_MEMORY,
            reason=f"nvidia_peermem is loaded, and dma-buf is not possible: {', '.join(missing)}",
        )
    return RegistrationDecision(
        way=GpuRegistration.NONE,
        reason=f"nvidia_peermem is not loaded, and dma-buf is not possible: {', '.join(missing)}",
    )


def distance_problem(bus_id: str, hcas: Sequence[Hca], root: str | Path = "/") -> str:
    """Return why these devices must not access the memory of a GPU, "" if they may.

    The farthest path type is NCCL's, PXB, unless ``MIRACCL_NET_GDR_LEVEL`` says otherwise.
    """
    level = params.NET_GDR_LEVEL.read()
    farthest = PathType.PXB if level < 0 else PathType(level)
    for hca in hcas:
        found = Sysfs(Path(root)).pci_distance(bus_id, hca.pci)
        if found is None and level <= PathType.LOC:
            return f"the path between GPU and {hca.name} is unknown (MIRACCL_NET_GDR_LEVEL=SYS)"
        if found is not None and found > farthest:
            return (
                f"the path between GPU and {hca.name} is {found.name}, farther than "
                f"{farthest.name} (MIRACCL_NET_GDR_LEVEL)"
            )
    return ""


def register_dmabuf(
    device: VerbsDevice, descriptor: int, offset: int, nbytes: int, address: int, access: int
) -> int:
    """Register a range of a dma-buf; return the ``ibv_mr``, which ``ibv_dereg_mr`` ends.

    Args:
        descriptor: File descriptor that the GPU driver has exported (for CUDA
            ``cuMemGetHandleForAddressRange``); it may be closed afterwards.
        offset: Start of the range in the dma-buf, in bytes.
        address: Address of the range, which work requests and the peer name.

    Raises:
        SystemFailure: The library lacks the function, or the adapter's driver refuses.
    """
    if not device.library.has("ibv_reg_dmabuf_mr"):
        raise SystemFailure(
            "cannot register a dma-buf: libibverbs lacks ibv_reg_dmabuf_mr",
            hint="install rdma-core 34 or newer, or load nvidia_peermem",
        )
    return device.library.make(
        f"a registration of {nbytes} bytes of a dma-buf on {device.hca.name}",
        "ibv_reg_dmabuf_mr",
        device.pd,
        offset,
        nbytes,
        address,
        descriptor,
        access | device.extra_access,
    )


@dataclass(frozen=True, kw_only=True)
class GpuRange:
    """Range of GPU memory that adapters are to access.

    Attributes:
        descriptor: For dma-buf: what the GPU driver has exported, open until the range is
            registered on all devices.
        offset: Start of the range in the dma-buf, in bytes.
    """

    way: GpuRegistration
    address: int
    nbytes: int
    descriptor: int = -1
    offset: int = 0


def register_gpu(device: VerbsDevice, memory: GpuRange, access: int) -> tuple[int, int, int]:
    """Register GPU memory; return the ``ibv_mr``, its local and its remote key.

    Raises:
        SystemFailure: There is no way, or it fails.
    """
    address, nbytes = memory.address, memory.nbytes
    if memory.way is GpuRegistration.DMABUF:
        mr = register_dmabuf(device, memory.descriptor, memory.offset, nbytes, address, access)
    elif memory.way is GpuRegistration.PEER_MEMORY:
        mr = device.make_registration(address, nbytes, access)
    else:
        raise SystemFailure(
            "cannot register GPU memory: neither dma-buf nor peer memory is available",
            hint="miraccl doctor says what is missing",
        )
    return mr, abi.word32(mr + abi.MR_LKEY), abi.word32(mr + abi.MR_RKEY)
