"""Registration of GPU memory: the decision, and dma-buf by the ABI on a simulated device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from miraccl.errors import SystemFailure
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.topo.hca import Hca
from miraccl.transport.fifo import PrivateMemory, memory_at
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_flush import FLUSHABLE, FlushQueue
from miraccl.transport.verbs_gpu_memory import (
    GpuRange,
    GpuRegistration,
    RegistrationFacts,
    decide,
    distance_problem,
    probe,
    register_gpu,
)

ALL = RegistrationFacts(library=True, kernel=(6, 1), open_driver=True, peer_memory=True)


def test_decision() -> None:
    assert decide(ALL).way is GpuRegistration.DMABUF
    old = decide(replace(ALL, kernel=(5, 4), open_driver=False))
    assert old.way is GpuRegistration.PEER_MEMORY
    assert "older than 5.12, NVIDIA's open kernel modules are not loaded" in old.reason
    none = decide(replace(ALL, library=False, peer_memory=False))
    assert none.way is GpuRegistration.NONE
    assert "nvidia_peermem is not loaded" in none.reason
    assert "rdma-core 34" in none.reason


def test_probe(tmp_path: Path) -> None:
    found = probe(VerbsLibrary({}), tmp_path)
    assert (found.library, found.open_driver, found.peer_memory) == (False, False, False)
    assert found.kernel >= (3, 0)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159"
    )
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    found = probe(VerbsLibrary({"ibv_reg_dmabuf_mr": lambda *_: 0}), tmp_path)
    assert (found.library, found.open_driver, found.peer_memory) == (True, True, True)


def test_dmabuf_by_the_abi() -> None:
    verbs = SimulatedVerbs(["sim0"])
    ((hca, port),) = verbs.ports("sim0")
    device = VerbsDevice.open(verbs.library, hca, port)
    memory, descriptor = PrivateMemory(4096), os.memfd_create("dma-buf")
    try:
        os.ftruncate(descriptor, 1 << 16)
        part = GpuRange(
            way=GpuRegistration.DMABUF,
            address=memory.address,
            nbytes=4096,
            descriptor=descriptor,
            offset=8192,
        )
        mr, _, rkey = register_gpu(device, part, FLUSHABLE)
        queue = FlushQueue(device)
        queue.open()
        queue.flush(memory.address, 4096, rkey)
        # The device finds the memory by the descriptor, not by its address.
        queue.verify(memory.address + 16, rkey, lambda *_: os.pread(descriptor, 8, 8192 + 16))
        assert bytes(memory_at(memory.address, 4096)) == bytes(4096)
        with pytest.raises(SystemFailure, match="cannot use GPU memory on sim0:1: of"):
            queue.verify(memory.address, rkey, lambda *_: bytes(8))
        queue.close()
        assert device.library.call("ibv_dereg_mr", mr) == 0
        with pytest.raises(SystemFailure, match=r"dma-buf on sim0: ibv_reg_dmabuf_mr: Invalid"):
            register_gpu(device, replace(part, nbytes=1 << 17, offset=0), FLUSHABLE)
        with pytest.raises(SystemFailure, match="neither dma-buf nor peer memory"):
            register_gpu(device, replace(part, way=GpuRegistration.NONE), FLUSHABLE)
    finally:
        os.close(descriptor)
        device.close()
        verbs.close()


def pci_device(root: Path, folder: str, numa: int = 0) -> None:
    """Add a PCI device at a place in the tree."""
    device = root / "sys/devices" / folder
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{numa}\n")
    links = root / "sys/bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / device.name).symlink_to(device)


@pytest.mark.parametrize(
    ("nic", "level", "problem"),
    [
        ("near", None, ""),
        ("near", "LOC", "is PIX, farther than LOC"),
        ("switch", None, ""),
        ("switch", "PIX", "is PXB, farther than PIX"),
        ("bridge", None, "is PHB, farther than PXB"),
        ("bridge", "PHB", ""),
        ("socket", "PHB", "is SYS, farther than PHB"),
        ("socket", "SYS", ""),
        ("absent", None, "is unknown"),
        ("absent", "LOC", "is unknown"),
        ("absent", "SYS", ""),
    ],
)
def test_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nic: str, level: str | None, problem: str
) -> None:
    """Path types as NCCL has them; PXB is the farthest unless the setting says otherwise."""
    top = "pci0000:00/0000:00:01.0/0000:01:00.0"
    gpu, addresses = f"{top}/0000:02:00.0/0000:03:00.0", dict[str, str]()
    pci_device(tmp_path, gpu)
    for number, (name, folder, numa) in enumerate(
        [
            ("near", f"{top}/0000:02:04.0/0000:10:00.0", 0),
            ("switch", f"{top}/0000:02:08.0/0000:04:00.0/0000:05:00.0/0000:11:00.0", 0),
            ("bridge", "pci0000:40/0000:40:01.0/0000:12:00.0", 0),
            ("socket", "pci0000:80/0000:80:01.0/0000:13:00.0", 1),
        ]
    ):
        pci_device(tmp_path, folder, numa)
        addresses[name] = f"0000:1{number}:00.0"
    if level is not None:
        monkeypatch.setenv("MIRACCL_NET_GDR_LEVEL", level)
    hca = Hca(name="mlx5_0", ports=(), pci=addresses.get(nic, ""))
    found = distance_problem("0000:03:00.0", [hca], tmp_path)
    assert problem in found
    assert bool(found) == bool(problem)
