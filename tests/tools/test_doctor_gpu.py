"""GPU checks of ``miraccl doctor``: every distinguished state of a machine, without a GPU."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest

from miraccl.errors import MissingDependency
from miraccl.executor.cuda import toolkit
from miraccl.tools import doctor, doctor_gpu, gpu_facts
from miraccl.tools.findings import DoctorFinding
from miraccl.tools.gpu_facts import CudaFacts, PeerAccess
from miraccl.topo import nvml
from tests.tools import fake_gpu

NOTHING = CudaFacts(problem="no NVIDIA driver", advice="install it")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the facts about CUDA; sysfs has no GPU, NVRTC is installed."""

    def set_facts(facts: CudaFacts) -> None:
        doctor_gpu.clear_facts()
        monkeypatch.setattr(gpu_facts, "read_facts", lambda: facts)

    monkeypatch.setattr(doctor_gpu, "_is_nvidia_gpu", lambda device: False)
    monkeypatch.setattr(doctor_gpu, "read_text", lambda path: "")
    monkeypatch.setattr(doctor_gpu, "bindings_version", lambda: "13.0.1")
    monkeypatch.setattr(toolkit, "version", lambda: (13, 0))
    monkeypatch.setattr(toolkit, "supported_archs", lambda: (75, 80, 90, 100))
    yield set_facts
    doctor_gpu.clear_facts()


def findings() -> dict[str, DoctorFinding]:
    return {
        finding.name: finding
        for check in doctor_gpu.CHECKS.values()
        if (finding := check()) is not None
    }


def seen(finding: DoctorFinding | None) -> DoctorFinding:
    assert finding is not None
    return finding


def test_a_machine_without_anything(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finding reports the missing GPU, one what to install; no others apply."""
    machine(
        replace(NOTHING, problem="GPU memory needs cuda.bindings.driver: No module named 'cuda'")
    )
    monkeypatch.setattr(doctor_gpu, "bindings_version", lambda: "")
    found = findings()
    assert list(found) == ["gpu", "cuda-bindings", "settings"]
    assert (found["gpu"].status, found["gpu"].found) == ("note", "no NVIDIA GPU")
    bindings = found["cuda-bindings"]
    assert (bindings.status, bindings.advice) == (
        "note",
        "pip install 'miraccl[cuda]': only GPU memory needs it",
    )


def test_gpu_packages_without_a_gpu(machine: Any) -> None:
    machine(NOTHING)
    found = findings()
    assert list(found) == ["gpu", "cuda-bindings", "nvrtc", "settings"]
    assert (found["gpu"].status, found["gpu"].found) == ("note", "no NVIDIA GPU: no NVIDIA driver")
    assert found["gpu"].advice == "collectives run on CPUs; if there is a GPU, install it"
    assert found["cuda-bindings"].status == found["nvrtc"].status == "ok"


def test_a_gpu_that_cuda_cannot_use_is_a_note(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_gpu,
        "read_text",
        lambda path: "NVRM version: NVIDIA UNIX Open Kernel Module 580\nmore",
    )
    machine(NOTHING)
    assert doctor_gpu.check_gpu().found.endswith("580")
    cuda = seen(doctor_gpu.check_cuda())
    assert (cuda.status, cuda.found, cuda.advice) == ("note", "no NVIDIA driver", "install it")
    monkeypatch.setattr(doctor_gpu, "bindings_version", lambda: "")
    assert doctor_gpu.check_cuda() is None
    bindings = doctor_gpu.check_bindings()
    assert (bindings.status, bindings.advice) == (
        "note",
        "pip install 'miraccl[cuda]': GPU memory needs it",
    )


def test_gpus_are_listed(machine: Any) -> None:
    machine(fake_gpu.facts(2))
    found = seen(doctor_gpu.check_cuda())
    assert found.status == "ok"
    assert "2 x NVIDIA Fake" in found.found
    assert "sm_90" in found.found
    assert "1 GiB" in found.found
    facts = fake_gpu.facts(2)
    machine(replace(facts, gpus=(facts.gpus[0], replace(facts.gpus[1], mode=3))))
    held = seen(doctor_gpu.check_cuda())
    assert held.status == "note"
    assert "GPU 1 allows one process only" in held.found
    assert "nvidia-smi -c 0" in held.advice


def test_the_compiler_matches_gpus_and_driver(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(fake_gpu.facts(1))
    assert seen(doctor_gpu.check_nvrtc()).status == "ok"
    monkeypatch.setattr(toolkit, "supported_archs", lambda: (100, 120))
    older = seen(doctor_gpu.check_nvrtc())
    assert "cannot compile for sm_90" in older.found
    assert "miraccl[cuda12]" in older.advice
    monkeypatch.setattr(toolkit, "supported_archs", lambda: (50, 80))
    newer = seen(doctor_gpu.check_nvrtc())
    assert "cannot compile for sm_90" in newer.found
    assert "--upgrade" in newer.advice
    monkeypatch.setattr(toolkit, "supported_archs", lambda: (90, 120))
    monkeypatch.setattr(toolkit, "version", lambda: (14, 1))
    assert "miraccl[cuda12]', or a newer driver" in seen(doctor_gpu.check_nvrtc()).advice

    def missing() -> tuple[int, int]:
        raise MissingDependency("no NVRTC here", hint="install")

    monkeypatch.setattr(toolkit, "version", missing)
    assert seen(doctor_gpu.check_nvrtc()).found == "no NVRTC here"


def test_pairs_without_peer_access_are_named(machine: Any) -> None:
    facts = fake_gpu.facts(3)
    machine(facts)
    assert seen(doctor_gpu.check_peers()).found == "all 3 pairs have peer access"
    peers = tuple(replace(p, allowed={p.source, p.target} != {0, 2}) for p in facts.peers)
    machine(replace(facts, peers=peers))
    found = seen(doctor_gpu.check_peers())
    assert found.status == "note"
    assert found.found.startswith("no peer access between 0-2; 2 of 3")
    machine(fake_gpu.facts(1))
    assert "one GPU: no pairs" in seen(doctor_gpu.check_peers()).found


def test_ipc_is_tried_with_a_peer(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def try_ipc(owner: int, mapper: int) -> str:
        tried.append((owner, mapper))
        return "refused" if len(tried) > 2 else ""

    monkeypatch.setattr(gpu_facts, "try_ipc", try_ipc)
    machine(fake_gpu.facts(1))
    assert seen(doctor_gpu.check_ipc()).status == "ok"
    machine(fake_gpu.facts(3))
    assert seen(doctor_gpu.check_ipc()).status == "ok"
    failed = seen(doctor_gpu.check_ipc())
    assert tried == [(0, 0), (0, 1), (0, 1)]
    assert (failed.status, "refused" in failed.found, "--ipc=host" in failed.advice) == (
        "note",
        True,
        True,
    )


def gpu(dev: int, *links: tuple[str, int]) -> nvml.NvmlGpu:
    return nvml.NvmlGpu(dev=dev, bus_id=f"0000:0{dev}:00.0", sm=90, nvlinks=links)


@pytest.mark.parametrize(
    ("gpus", "status", "expected_text"),
    [
        (
            [gpu(0, ("fffffff:ff:ff.0", 18)), gpu(1, ("fffffff:ff:ff.0", 18))],
            "ok",
            "18 links up per GPU, to switches",
        ),
        (
            [gpu(0, ("0000:01:00.0", 4)), gpu(1, ("0000:00:00.0", 4))],
            "ok",
            "4 links up per GPU, from GPU to GPU",
        ),
        ([gpu(0, ("x", 18)), gpu(1, ("x", 16))], "note", "fewer on GPU 1"),
        ([gpu(0), gpu(1)], "ok", "connected by PCI"),
        ([], "note", "not installed"),
    ],
)
def test_nvlinks(
    machine: Any,
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[nvml.NvmlGpu],
    status: str,
    expected_text: str,
) -> None:
    machine(fake_gpu.facts(2))
    monkeypatch.setattr(
        nvml, "read_gpus", lambda: (gpus, "the package nvidia-ml-py is not installed")
    )
    found = seen(doctor_gpu.check_nvlink())
    assert found.status == status
    assert expected_text in found.found


_SMI = """
GPU 00000000:04:00.0
    Product Name                          : NVIDIA H200
    Fabric
        State                             : {0}
        Status                            : {1}
        CliqueId                          : 0
GPU 00000000:05:00.0
    Fabric
        State                             : Completed
        Status                            : Success
"""


@pytest.mark.parametrize(
    ("state", "status", "expected", "expected_text"),
    [
        ("Completed", "Success", "ok", "set up on 2 GPUs"),
        ("In Progress", "N/A", "note", "In Progress, N/A"),
        ("Completed", "NVLink failure", "note", "Completed, NVLink failure"),
    ],
)
def test_the_fabric(state: str, status: str, expected: str, expected_text: str) -> None:
    found = doctor_gpu.parse_fabric(_SMI.format(state, status))
    assert (found.status, found.found) == (expected, expected_text)
    assert ("fabricmanager" in found.advice) is (expected == "note")


def test_without_a_fabric() -> None:
    assert doctor_gpu.parse_fabric("").status == "ok"
    assert (
        "no NVSwitch"
        in doctor_gpu.parse_fabric(
            _SMI.format("N/A", "N/A").replace("Completed", "N/A").replace("Success", "N/A")
        ).found
    )


@pytest.mark.parametrize(
    ("environ", "status", "expected_text"),
    [
        ({}, "ok", "none is set"),
        ({"PATH": "/bin", "MIRACCL_RANK": "1"}, "ok", "none is set"),
        (
            {"CUDA_VISIBLE_DEVICES": "1,2", "NCCL_DEBUG": "INFO"},
            "ok",
            "CUDA_VISIBLE_DEVICES=1,2, NCCL_DEBUG=INFO",
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, "note", "hides every GPU"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "note", "every launch waits"),
        ({"NCCL_P2P_DISABLE": "1"}, "note", "peer access between GPUs is disabled"),
        ({"NCCL_P2P_DISABLE": "0"}, "ok", "NCCL_P2P_DISABLE=0"),
        ({"MIRACCL_ALGO": "ring"}, "note", "overridden"),
        (
            {"MIRACCL_ALGO": "", "MIRACCL_PROTO": " ", "NCCL_ALGO": "", "NCCL_PROTO": ""},
            "ok",
            "MIRACCL_ALGO=",
        ),
        ({"MIRACCL_ALGO": "rings"}, "note", "unknown algorithm"),
        ({"MIRACCL_PROTO": "LL128"}, "note", "overridden"),
        ({"MIRACCL_PROTO": "ll129"}, "note", "allowed are simple, ll, ll128"),
        ({"MIRACCL_DEBUG": "loud"}, "note", "MIRACCL_DEBUG='loud': allowed are none, warn"),
        (
            {"MIRACCL_DEBUG_SUBSYS": "^sockets"},
            "note",
            "MIRACCL_DEBUG_SUBSYS: allowed are all, aggregation, bootstrap",
        ),
        (
            {"MIRACCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_SUBSYS": "COLL"},
            "ok",
            "MIRACCL_DEBUG_SUBSYS=INIT,NET",
        ),
        ({"MIRACCL_SMSS": "4"}, "note", "did you mean MIRACCL_SMS?"),
        ({"MIRACCL_SMS": "many"}, "note", "whole number"),
    ],
)
def test_settings_that_matter(environ: dict[str, str], status: str, expected_text: str) -> None:
    found = doctor_gpu.check_environ(environ)
    assert found.status == status
    assert expected_text in f"{found.found} {found.advice}"


def test_secrets_are_not_shown() -> None:
    found = doctor_gpu.check_environ({"MIRACCL_SECRET": "hush", "MIRACCL_UNIQUE_ID": "hush"})
    assert "hush" not in found.found
    assert "MIRACCL_SECRET" in found.found


def test_the_doctor_runs_all_gpu_checks() -> None:
    assert set(doctor_gpu.CHECKS) <= set(doctor.CHECKS)


# ---------------------------------------------------------------------- CUDA in another process


def test_facts_round_trip_through_json() -> None:
    facts = replace(
        fake_gpu.facts(2), peers=(PeerAccess(source=0, target=1, allowed=True, rank=1),)
    )
    assert gpu_facts.facts_from_json(json.loads(json.dumps(asdict(facts)))) == facts
    assert facts.restrict_to([1]).names == "1 x NVIDIA Fake"


def test_facts_of_this_machine() -> None:
    facts = gpu_facts.read_facts()
    assert bool(facts.gpus) is not bool(facts.problem)
    assert facts.gpus or facts.advice


@pytest.mark.parametrize(
    ("code", "expected_text"),
    [
        ("import os; os.kill(os.getpid(), 11)", "status -11"),
        ("raise RuntimeError('driver trouble')", "driver trouble"),
    ],
)
def test_a_crashing_driver_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, code: str, expected_text: str
) -> None:
    monkeypatch.setattr(gpu_facts, "_command", lambda *words: [sys.executable, "-c", code])
    facts = gpu_facts.read_facts()
    assert not facts.gpus
    assert expected_text in facts.problem


def test_a_hanging_driver_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = {"facts": "import signal; signal.pause()", "share": "import sys; sys.stdin.read()"}
    monkeypatch.setattr(
        gpu_facts, "_command", lambda *words: [sys.executable, "-c", hangs[words[0]]]
    )
    monkeypatch.setattr(gpu_facts, "PROBE_SECONDS", 0.05)
    assert "did not respond" in gpu_facts.read_facts().problem
    assert "did not respond" in gpu_facts.try_ipc(0, 1)


_OWNER = "print('handle 00', flush=True); input()"


@pytest.mark.parametrize(
    ("mapper", "expected_text"),
    [
        ("print('mapped')", ""),
        ("print('refused by a test')", "refused by a test"),
        ("raise SystemExit(3)", "status 3"),
    ],
)
def test_ipc_between_processes(
    monkeypatch: pytest.MonkeyPatch, mapper: str, expected_text: str
) -> None:
    def command(*words: str) -> list[str]:
        return [sys.executable, "-c", _OWNER if words[0] == "share" else mapper]

    monkeypatch.setattr(gpu_facts, "_command", command)
    assert gpu_facts.try_ipc(0, 1) == expected_text
