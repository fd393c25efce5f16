"""Checks of ``miraccl doctor`` for InfiniBand and RoCE."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miraccl import params
from miraccl.errors import MissingDependency
from miraccl.native.verbs_abi import load_library
from miraccl.tools.findings import Check, DoctorFinding
from miraccl.topo.hca import read_hcas
from miraccl.transport.hca_devices import HcaCapabilities, hca_devices
from miraccl.transport.verbs_gpu_memory import GpuRegistration, decide, probe
from miraccl.wire.verbs.flush import FlushFacts, FlushMethod, decide_flush


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
    abilities = selected_capabilities(root)
    decisions = {gpu.ordinal: decide_flush(flush_facts(gpu.sm, root, abilities)) for gpu in gpus}
    first = decisions[gpus[0].ordinal]
    texts = dict.fromkeys(
        f"{decision.method.value}: {decision.reason}" for decision in decisions.values()
    )
    advice = ""
    if first.method is not FlushMethod.NONE and params.NET.read() in ("auto", "verbs"):
        advice = "payloads of GPUs are staged in host memory, so no flush is needed yet"
    return DoctorFinding(name="flush", status="ok", found="; ".join(texts), advice=advice)


def selected_capabilities(root: str | Path = "/") -> list[HcaCapabilities]:
    """Return the abilities of the devices that verbs would use."""
    devices = hca_devices(root, load_library).devices
    return [d.capabilities for d in devices if d.selected and d.capabilities]


def flush_facts(
    sm: int, root: str | Path = "/", abilities: Sequence[HcaCapabilities] = ()
) -> FlushFacts:
    """Return what decides the flush for a GPU of compute capability ``sm`` on this host.

    Args:
        abilities: Those of the devices in use; a method must be possible on all of them.
    """
    return FlushFacts(
        memory="gpu",
        compute_capability=sm,
        forced=bool(params.NET_FORCE_FLUSH.read()),
        disabled=bool(params.GDR_FLUSH_DISABLE.read()),
        gdrcopy=(Path(root) / "dev/gdrdrv").exists(),
        null_mr=bool(abilities) and all(each.null_mr for each in abilities),
        data_direct=bool(abilities) and all(each.data_direct for each in abilities),
    )


def check_gpu_registration(root: str | Path = "/") -> DoctorFinding | None:
    """Report how NICs could reach GPU memory, and what is missing."""
    from miraccl.tools.doctor_gpu import facts

    if not read_hcas(root) or not facts().gpus:
        return None
    try:
        found = decide(probe(load_library(), root))
    except MissingDependency as error:
        return DoctorFinding(
            name="gpudirect", status="note", found=error.message, advice=error.hint or ""
        )
    return DoctorFinding(
        name="gpudirect",
        status="note" if found.way is GpuRegistration.NONE else "ok",
        found=f"{found.way.value}: {found.reason}",
        advice="load nvidia_peermem, or install NVIDIA's open kernel modules"
        if found.way is GpuRegistration.NONE
        else "",
    )


CHECKS: dict[str, Check] = {
    "rdma": check_rdma,
    "gpudirect": check_gpu_registration,
    "flush": check_flush,
}
