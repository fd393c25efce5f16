"""GPU checks of ``miraccl doctor``: driver, packages, GPUs, peer access and settings.

CUDA is queried in a separate process (``gpu_facts``). Without a GPU, miraccl works on CPUs: one
finding reports the missing GPU, one the package that GPU memory needs, and checks that do not apply
return None.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from miraccl import trace
from miraccl.errors import MiracclError
from miraccl.params import PROTOCOLS
from miraccl.schedule import catalog
from miraccl.tools import gpu_facts
from miraccl.tools.env import LAUNCH_VARIABLES, collect, unknown_variables
from miraccl.tools.findings import Check, DoctorFinding, read_text
from miraccl.tools.gpu_facts import CudaFacts

INSTALL = "pip install 'miraccl[cuda]'"
_SMI_SECONDS = 30
_ABSENT = "no NVIDIA GPU"
_DEFAULT_MODE = 0
_FABRIC_ADVICE = (
    "start nvidia-fabricmanager (systemctl start nvidia-fabricmanager), of the driver's version;"
    " NVLink is unusable until then"
)


@functools.cache
def facts() -> CudaFacts:
    """Return the facts about CUDA, cached until ``clear_facts``."""
    return gpu_facts.read_facts()


def clear_facts() -> None:
    """Clear the cached facts."""
    facts.cache_clear()


# ---------------------------------------------------------------------- packages and driver


def check_gpu() -> DoctorFinding:
    """Check for a GPU and its kernel driver."""
    version = read_text("/proc/driver/nvidia/version")
    if version:
        return DoctorFinding(name="gpu", status="ok", found=version.splitlines()[0])
    if any(_is_nvidia_gpu(device) for device in Path("/sys/bus/pci/devices").glob("*")):
        advice = "install the NVIDIA driver (Debian: nvidia-driver; Ubuntu: ubuntu-drivers install)"
        return DoctorFinding(
            name="gpu", status="note", found="an NVIDIA GPU without a driver", advice=advice
        )
    if facts().gpus:  # a sandbox that hides /proc/driver
        return DoctorFinding(name="gpu", status="ok", found=facts().names)
    why, advice = "", "collectives run on CPUs"
    if bindings_version() and facts().problem:  # the bindings suggest that GPUs are expected
        why, advice = f": {facts().problem}", f"{advice}; if there is a GPU, {facts().advice}"
    return DoctorFinding(name="gpu", status="note", found=_ABSENT + why, advice=advice)


def _is_nvidia_gpu(device: Path) -> bool:
    """Return True for PCI vendor 10de, class 03 (display controller)."""
    return read_text(str(device / "vendor")) == "0x10de" and read_text(
        str(device / "class")
    ).startswith("0x03")


def has_gpu() -> bool:
    """Return True if there is a GPU, usable or not."""
    return bool(facts().gpus) or not check_gpu().found.startswith(_ABSENT)


def bindings_version() -> str:
    """Return the version of cuda-bindings, empty if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return ""


def check_bindings() -> DoctorFinding:
    version = bindings_version()
    if version:
        return DoctorFinding(name="cuda-bindings", status="ok", found=version)
    why = "GPU memory needs it" if has_gpu() else "only GPU memory needs it"
    return DoctorFinding(
        name="cuda-bindings", status="note", found="not installed", advice=f"{INSTALL}: {why}"
    )


def check_nvrtc() -> DoctorFinding | None:
    """Check the kernel compiler, which is installed with the bindings and needs no GPU."""
    from miraccl.executor.cuda import toolkit

    if not bindings_version():
        return None
    try:
        major, minor = toolkit.version()
        archs = toolkit.supported_archs()
    except MiracclError as error:
        why = error.message if has_gpu() else "not installed"
        return DoctorFinding(
            name="nvrtc",
            status="note",
            found=why,
            advice=f"{INSTALL}: it compiles the kernels for GPUs",
        )
    text = f"{major}.{minor}, compiles for sm_{archs[0]} to sm_{archs[-1]}"
    for arch in sorted({gpu.sm for gpu in facts().gpus}):
        why, advice = toolkit.incompatibility(arch)
        if why:
            return DoctorFinding(name="nvrtc", status="note", found=why, advice=advice)
    driver = facts().driver
    if driver and major > int(driver.split(".")[0]):
        advice = (
            f"{toolkit.INSTALL_12}, or a newer driver: a driver loads code of at most its own major"
            " version"
        )
        return DoctorFinding(
            name="nvrtc",
            status="note",
            found=f"{text}; the driver supports CUDA {driver}",
            advice=advice,
        )
    return DoctorFinding(name="nvrtc", status="ok", found=text)


def check_cuda() -> DoctorFinding | None:
    """Check the GPUs that CUDA shows to this process."""
    known = facts()
    if known.problem:
        expected = bindings_version() and has_gpu()
        return (
            DoctorFinding(name="cuda", status="note", found=known.problem, advice=known.advice)
            if expected
            else None
        )
    gpus = [
        f"{gpu.ordinal}: {gpu.name}, {gpu.memory_bytes / (1 << 30):.0f} GiB, sm_{gpu.sm},"
        f" {gpu.bus_id}"
        for gpu in known.gpus
    ]
    text = f"CUDA {known.driver}, {known.names} ({'; '.join(gpus)})"
    exclusive = [str(gpu.ordinal) for gpu in known.gpus if gpu.mode != _DEFAULT_MODE]
    if exclusive:
        advice = (
            "nvidia-smi -c 0 lets several processes use a GPU, which --threads and torch in other"
            " processes need"
        )
        return DoctorFinding(
            name="cuda",
            status="note",
            found=f"{text}; GPU {', '.join(exclusive)} allows one process only",
            advice=advice,
        )
    return DoctorFinding(name="cuda", status="ok", found=text)


# ---------------------------------------------------------------------- between GPUs


def check_peers() -> DoctorFinding | None:
    """Check peer access of all pairs of GPUs."""
    pairs = facts().peers
    if not pairs:
        return (
            DoctorFinding(name="gpu peers", status="ok", found="one GPU: no pairs")
            if facts().gpus
            else None
        )
    refused = [
        f"{pair.source}-{pair.target}"
        for pair in pairs
        if not pair.allowed and pair.source < pair.target
    ]
    if refused:
        found = (
            f"no peer access between {', '.join(refused)}; {len(pairs) // 2 - len(refused)} of"
            f" {len(pairs) // 2} pairs have it"
        )
        advice = (
            "nvidia-smi topo -p2p r gives the reason; in virtual machines the GPUs need a common"
            " PCI switch, on bare metal ACS and IOMMU off"
        )
        return DoctorFinding(name="gpu peers", status="note", found=found, advice=advice)
    atomics = "" if all(pair.atomics for pair in pairs) else ", without native atomics (PCI)"
    return DoctorFinding(
        name="gpu peers",
        status="ok",
        found=f"all {len(pairs) // 2} pairs have peer access{atomics}",
    )


def check_ipc() -> DoctorFinding | None:
    """Check CUDA IPC with two processes."""
    gpus = facts().gpus
    if not gpus:
        return None
    reached = {pair.target for pair in facts().peers if pair.source == 0 and pair.allowed}
    error = gpu_facts.try_ipc(0, min(reached, default=0))
    handles = (
        ""
        if all(gpu.posix_handles for gpu in gpus)
        else "; memory cannot be shared as file descriptors"
    )
    if error:
        advice = (
            "ranks in separate processes need CUDA IPC: run containers with --ipc=host and the same"
            " GPUs, or use one process for all GPUs (--threads)"
        )
        return DoctorFinding(
            name="gpu ipc",
            status="note",
            found=f"cannot map memory of another process: {error}{handles}",
            advice=advice,
        )
    return DoctorFinding(
        name="gpu ipc", status="ok", found=f"memory of another process can be mapped{handles}"
    )


def check_nvlink() -> DoctorFinding | None:
    """Check the NVLinks that are up, counted as in ``miraccl topo detect``."""
    from miraccl.topo.nvml import read_gpus

    if not has_gpu():
        return None
    gpus, why = read_gpus()
    if not gpus:
        advice = (
            "pip install nvidia-ml-py: miraccl topo detect and the order of rings read GPUs and"
            " NVLinks from it"
        )
        return DoctorFinding(name="nvlink", status="note", found=why, advice=advice)
    links = [sum(count for _, count in gpu.nvlinks) for gpu in gpus]
    if not any(links):
        text = "one GPU" if len(gpus) == 1 else "none: the GPUs are connected by PCI"
        return DoctorFinding(name="nvlink", status="ok", found=text)
    far_ends = [end for gpu in gpus for end, _ in gpu.nvlinks]
    kind = _describe_far_ends(far_ends, [gpu.bus_id for gpu in gpus])
    text = f"{_range(links)} links up per GPU, {kind}"
    if min(links) < max(links):
        down = ", ".join(str(gpu.dev) for gpu, count in zip(gpus, links) if count < max(links))
        advice = (
            "nvidia-smi nvlink -s shows which are down; reset the GPU or check the fabric"
            " manager's log"
        )
        return DoctorFinding(
            name="nvlink", status="note", found=f"{text}; fewer on GPU {down}", advice=advice
        )
    return DoctorFinding(name="nvlink", status="ok", found=text)


def _range(numbers: Sequence[int]) -> str:
    return (
        str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
    )


def _describe_far_ends(far_ends: Sequence[str], gpus: Sequence[str]) -> str:
    direct = any(end in gpus for end in far_ends)
    switched = any(end not in gpus for end in far_ends)
    return (
        "to GPUs and switches"
        if direct and switched
        else "from GPU to GPU"
        if direct
        else "to switches"
    )


def check_fabric() -> DoctorFinding | None:
    """Check the state of the NVSwitch fabric with ``nvidia-smi -q``."""
    if not has_gpu():
        return None
    program = shutil.which("nvidia-smi")
    if program is None:
        return DoctorFinding(
            name="fabric",
            status="note",
            found="unknown: nvidia-smi is not on PATH",
            advice="it comes with the driver",
        )
    try:
        done = subprocess.run(
            [program, "-q"], capture_output=True, text=True, timeout=_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return DoctorFinding(
            name="fabric", status="note", found=f"nvidia-smi fails: {error}", advice="check dmesg"
        )
    return parse_fabric(done.stdout)


def parse_fabric(text: str) -> DoctorFinding:
    """Return the finding for the "Fabric" sections of ``nvidia-smi -q``.

    Each GPU has a state, and a status once the state is Completed.
    """
    states = re.findall(
        r"^\s+Fabric\s*\n\s+State\s*:\s*(\S.*?)\s*\n\s+Status\s*:\s*(\S.*?)\s*$", text, re.MULTILINE
    )
    if not states or all(state == "N/A" for state, _ in states):
        return DoctorFinding(name="fabric", status="ok", found="no NVSwitch fabric")
    bad = sorted(
        {
            f"{state}, {status}"
            for state, status in states
            if state != "Completed" or status != "Success"
        }
    )
    if bad:
        return DoctorFinding(
            name="fabric", status="note", found="; ".join(bad), advice=_FABRIC_ADVICE
        )
    return DoctorFinding(
        name="fabric", status="ok", found=f"set up on {len(states)} GPU{'s' * (len(states) != 1)}"
    )


# ---------------------------------------------------------------------- settings

_P2P_OFF = "peer access between GPUs is disabled: unset it unless this is intended"
_OVERRIDES = "the choice of plans is overridden for every size"
_NO_ALGORITHM = "unknown algorithm: programs fail unless they register one of that name"
_NO_PROTOCOL = "unknown protocol, programs fail: allowed are"
_HINT_ONLY = "if it leaves a single choice of miraccl's, that is used for every size"
#: variable -> function from its value to the problem, or an empty string
_SETTING_CHECKS: dict[str, Callable[[str], str]] = {
    "CUDA_LAUNCH_BLOCKING": lambda value: (
        "every launch waits for its kernel: unset it" if value not in ("", "0") else ""
    ),
    "CUDA_VISIBLE_DEVICES": lambda value: "it hides every GPU" if value in ("", "-1") else "",
    "MIRACCL_P2P_DISABLE": lambda value: _P2P_OFF if value not in ("", "0") else "",
    "NCCL_P2P_DISABLE": lambda value: _P2P_OFF if value not in ("", "0") else "",
    "MIRACCL_ALGO": lambda value: (
        value and (_OVERRIDES if value.lower() in catalog.names() else _NO_ALGORITHM)
    ),
    "NCCL_ALGO": lambda value: value and _HINT_ONLY,
    "MIRACCL_PROTO": lambda value: (
        value
        and (_OVERRIDES if value.lower() in PROTOCOLS else f"{_NO_PROTOCOL} {', '.join(PROTOCOLS)}")
    ),
    "NCCL_PROTO": lambda value: value and _HINT_ONLY,
    "MIRACCL_DEBUG_SUBSYS": trace.validate_subsystems,
}
_PREFIXES = ("MIRACCL_", "NCCL_")
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_ORDER",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
_SECRET = ("MIRACCL_SECRET", "MIRACCL_UNIQUE_ID")
_MAX_SHOWN = 60


def check_settings() -> DoctorFinding:
    return check_environ(os.environ)


def check_environ(environ: Mapping[str, str]) -> DoctorFinding:
    """Return the environment variables that change behaviour, with problems of their values."""
    names = [
        name
        for name in sorted(environ)
        if (name.startswith(_PREFIXES) or name in _NAMES) and not _is_launch_variable(name)
    ]
    if not names:
        return DoctorFinding(name="settings", status="ok", found="none is set")
    shown = ", ".join(
        name if name in _SECRET else f"{name}={environ[name][:_MAX_SHOWN]}" for name in names
    )
    problems = [
        f"{name}: {text}"
        for name in names
        if name in _SETTING_CHECKS and (text := _SETTING_CHECKS[name](environ[name].strip()))
    ]
    problems += [
        f"{name} is unknown" + (f", did you mean {close}?" if close else "")
        for name, close in unknown_variables(environ)
    ]
    problems += [record["error"] for record in collect(environ) if "error" in record]
    return DoctorFinding(
        name="settings",
        status="note" if problems else "ok",
        found=shown,
        advice="; ".join(problems),
    )


def _is_launch_variable(name: str) -> bool:
    return name.removeprefix("MIRACCL_") in LAUNCH_VARIABLES and name not in _SECRET


CHECKS: dict[str, Check] = {
    "gpu": check_gpu,
    "cuda": check_cuda,
    "cuda-bindings": check_bindings,
    "nvrtc": check_nvrtc,
    "gpu peers": check_peers,
    "gpu ipc": check_ipc,
    "nvlink": check_nvlink,
    "fabric": check_fabric,
    "settings": check_settings,
}
