"""Checks of ``miraccl doctor`` for InfiniBand and RoCE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miraccl.errors import MissingDependency
from miraccl.native.verbs_abi import load_library
from miraccl.tools.findings import Check, DoctorFinding
from miraccl.topo.hca import read_hcas
from miraccl.transport.hca_devices import HcaCapabilities, HcaReport, hca_devices
from miraccl.transport.verbs_flush import flush_facts
from miraccl.transport.verbs_gpu_access import GpuTraits, decide_registration
from miraccl.wire.verbs.flush import decide_flush


def check_rdma(root: str | Path = "/") -> DoctorFinding | None:
    """Report ports that verbs would use, and what is wrong with the others."""
    if not read_hcas(root):
        return None
    found = hca_devices(root, load_library)
    used = [f"{d.hca.name}:{port}" for d in found.devices for port in d.selected]
    problems = [*found.problems, *(p for d in found.devices for p in d.problems)]
    text = f"verbs uses {', '.join(used)}" if used else "verbs uses no port"
    if not problems:
        return DoctorFinding(name="rdma", status="ok", found=text)
    return DoctorFinding(
        name="rdma",
        status="note",
        found="; ".join([text, *(problem.what for problem in problems)]),
        advice="; ".join(dict.fromkeys(p.advice for p in problems if p.advice)),
    )


def check_flush(root: str | Path = "/") -> DoctorFinding | None:
    """Report how writes of NICs to GPU memory would be flushed, and why."""
    from miraccl.tools.doctor_gpu import facts

    gpus = facts().gpus
    if not gpus or not read_hcas(root):
        return None
    common = common_abilities(
        [d.capabilities for d in _selected_devices(root) if d.capabilities is not None]
    )
    decisions = [
        decide_flush(flush_facts(gpu.sm, root, writes_ordering=gpu.writes_ordering, **common))
        for gpu in gpus
    ]
    texts = dict.fromkeys(f"{decision.method.value}: {decision.reason}" for decision in decisions)
    return DoctorFinding(name="flush", status="ok", found="; ".join(texts))


def _selected_devices(root: str | Path) -> list[HcaReport]:
    return [each for each in hca_devices(root, load_library).devices if each.selected]


def common_abilities(devices: Sequence[HcaCapabilities]) -> dict[str, bool]:
    """Return what all devices in use can do to flush, as arguments of ``flush_facts``."""
    return {
        "null_mr": bool(devices) and all(each.null_mr for each in devices),
        "data_direct": bool(devices) and all(each.data_direct for each in devices),
    }


def check_gpu_registration(root: str | Path = "/") -> DoctorFinding | None:
    """Report how NICs reach GPU memory, and what is missing."""
    from miraccl.tools.doctor_gpu import facts

    if not read_hcas(root) or not facts().gpus:
        return None
    hcas = [each.hca for each in _selected_devices(root)]
    try:
        decisions = [
            decide_registration(
                GpuTraits(bus_id=gpu.bus_id, sm=gpu.sm, dma_buf=gpu.dma_buf),
                load_library(),
                hcas,
                root,
            )
            for gpu in facts().gpus
        ]
    except MissingDependency as error:
        return DoctorFinding(
            name="gpudirect", status="note", found=error.message, advice=error.hint or ""
        )
    texts = dict.fromkeys(f"{decision.way.value}: {decision.reason}" for decision in decisions)
    missing = any(not decision.possible for decision in decisions)
    return DoctorFinding(
        name="gpudirect",
        status="note" if missing else "ok",
        found="; ".join(texts),
        advice="load nvidia_peermem, install NVIDIA's open kernel modules, or set "
        "MIRACCL_NET_GDR_LEVEL for GPUs far from their adapter; payloads of GPUs are staged in "
        "host memory until then"
        if missing
        else "",
    )


CHECKS: dict[str, Check] = {
    "rdma": check_rdma,
    "gpudirect": check_gpu_registration,
    "flush": check_flush,
}
