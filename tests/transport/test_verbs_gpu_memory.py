"""Registration of GPU memory: the decision, and dma-buf by the ABI on a simulated device."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from miraccl.errors import SystemFailure
from miraccl.native.verbs_abi import VerbsLibrary
from miraccl.sim.verbs import SimulatedVerbs
from miraccl.transport.fifo import PrivateMemory
from miraccl.transport.verbs_device import VerbsDevice
from miraccl.transport.verbs_flush import FLUSHABLE, FlushQueue
from miraccl.transport.verbs_gpu_memory import (
    GpuRegistration,
    RegistrationFacts,
    decide,
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
        mr, _, rkey = register_gpu(
            device,
            GpuRegistration.DMABUF,
            memory.address,
            4096,
            FLUSHABLE,
            descriptor=descriptor,
            offset=8192,
        )
        queue = FlushQueue(device)
        queue.open()
        queue.flush(memory.address, 4096, rkey)
        queue.close()
        assert device.library.call("ibv_dereg_mr", mr) == 0
        with pytest.raises(SystemFailure, match=r"dma-buf on sim0: ibv_reg_dmabuf_mr: Invalid"):
            register_gpu(
                device,
                GpuRegistration.DMABUF,
                memory.address,
                1 << 17,
                FLUSHABLE,
                descriptor=descriptor,
            )
        with pytest.raises(SystemFailure, match="neither dma-buf nor peer memory"):
            register_gpu(device, GpuRegistration.NONE, memory.address, 4096, FLUSHABLE)
    finally:
        os.close(descriptor)
        device.close()
        verbs.close()
