"""``miraccl doctor``: available and missing features of this machine, with remedies."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import click

import miraccl
from miraccl import params
from miraccl.tools import doctor_gpu, doctor_net, doctor_verbs
from miraccl.tools.findings import Check, DoctorFinding, Status, read_text
from miraccl.tools.options import OutputFile, write_json

CACHE_BYTES = 1 << 20  # lower bound of the size of compiled CPU kernels


@click.command(short_help="Check this machine.")
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write a list of JSON objects; - is standard output.",
)
@click.option(
    "--net",
    "with_network",
    is_flag=True,
    help="Check the network instead: devices, kernel settings, and which transport hosts use.",
)
def doctor(json_target: str | None, with_network: bool) -> None:
    """Check what this machine offers and what is missing, with what to install or to change.

    The exit status is 1 if a requirement of miraccl is missing; notes do not count.

    \b
    Examples:
      miraccl doctor
      miraccl doctor --net
      miraccl doctor --json - | jq '.[] | select(.status != "ok")'
    """
    findings = examine(doctor_net.CHECKS if with_network else CHECKS)
    if with_network:
        findings += doctor_net.device_findings()
    if json_target:
        write_json(json_target, [asdict(f) for f in findings])
    else:
        _print(findings)
    if any(f.status == "missing" for f in findings):
        sys.exit(1)


def examine(checks: Mapping[str, Check] | None = None) -> list[DoctorFinding]:
    """Run all checks, or those given; a check that raises gives a finding too."""
    doctor_gpu.clear_facts()
    findings: list[DoctorFinding | None] = []
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            findings.append(check())
        except Exception as error:  # one failing check must not hide the others
            findings.append(
                DoctorFinding(
                    name=name, status="note", found=f"cannot check: {type(error).__name__}: {error}"
                )
            )
    return [finding for finding in findings if finding is not None]


def _print(findings: list[DoctorFinding]) -> None:
    width = max(len(f.name) for f in findings)
    for f in findings:
        print(f"{f.status:<8}{f.name:<{width}}  {f.found}")
        if f.advice:
            print(f"{'':<8}{'':<{width}}  -> {f.advice}")


# ---------------------------------------------------------------------- checks


def _check_python() -> DoctorFinding:
    text = (
        f"miraccl {miraccl.__version__},"
        f" {platform.python_implementation()} {platform.python_version()} at {sys.executable}"
    )
    return DoctorFinding(name="python", status="ok", found=text)


def _check_package(name: str, why: str, extra: str = "") -> Callable[[], DoctorFinding]:
    """Return a check for a package; ``extra`` is the extra of miraccl that installs an optional
    one.
    """

    def check() -> DoctorFinding:
        try:
            return DoctorFinding(name=name, status="ok", found=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            status: Status = "note" if extra else "missing"
            install = f"pip install 'miraccl[{extra}]'" if extra else f"pip install {name}"
            return DoctorFinding(
                name=name, status=status, found="not installed", advice=f"{install}: {why}"
            )

    return check


def _check_kernel() -> DoctorFinding:
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        return DoctorFinding(
            name="kernel", status="missing", found=text, advice="miraccl runs on Linux"
        )
    return DoctorFinding(name="kernel", status="ok", found=text)


def _check_cores() -> DoctorFinding:
    allowed, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    text = f"{allowed} of {all_cores} usable"
    quota = _cgroup_cores()
    if quota is not None and quota < allowed:
        advice = (
            "the container's quota is below its cores: more ranks than the quota share time slices"
        )
        return DoctorFinding(
            name="cores", status="note", found=f"{text}, quota {quota:g}", advice=advice
        )
    return DoctorFinding(name="cores", status="ok", found=text)


def _cgroup_cores() -> float | None:
    """Return the CPU quota of cgroup v2 in cores, None without a quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _check_memfd() -> DoctorFinding:
    fd = os.memfd_create("miraccl-doctor")
    try:
        os.ftruncate(fd, 1 << 12)
    finally:
        os.close(fd)
    return DoctorFinding(name="memfd", status="ok", found="anonymous shared memory works")


def _check_shm() -> DoctorFinding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return DoctorFinding(
            name="/dev/shm",
            status="note",
            found="absent",
            advice="containers: run with --ipc=host or --shm-size=1g",
        )
    free = stat.f_bavail * stat.f_frsize
    text = f"{free / (1 << 20):.0f} MiB free"
    if free < 64 << 20:
        return DoctorFinding(
            name="/dev/shm", status="note", found=text, advice="containers: run with --shm-size=1g"
        )
    return DoctorFinding(name="/dev/shm", status="ok", found=text)


def _check_futex() -> DoctorFinding:
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_int(0)
    numbers = {"x86_64": 202, "aarch64": 98}  # asm/unistd_64.h and asm-generic/unistd.h
    if platform.machine() not in numbers:
        return DoctorFinding(
            name="futex", status="note", found=f"not checked on {platform.machine()}"
        )
    woken = libc.syscall(
        numbers[platform.machine()], ctypes.byref(word), 1, 1, None, None, 0
    )  # FUTEX_WAKE
    if woken < 0:
        code = ctypes.get_errno()
        return DoctorFinding(
            name="futex",
            status="missing",
            found=os.strerror(code),
            advice="allow futex in the sandbox",
        )
    return DoctorFinding(name="futex", status="ok", found="works")


def _check_cma() -> DoctorFinding:
    """Check that a process can read the memory of another one, with a forked child."""
    if params.CMA_DISABLE.read():
        return DoctorFinding(name="cma", status="note", found="disabled by MIRACCL_CMA_DISABLE")
    error = _read_sibling_memory()
    if not error:
        return DoctorFinding(
            name="cma",
            status="ok",
            found="process_vm_readv between processes of one user is allowed",
        )
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope")
    advice = "large messages are copied twice instead of once"
    if scope not in ("", "0"):
        advice += f"; kernel.yama.ptrace_scope is {scope}, 0 allows it"
    else:
        advice += "; containers: add the capability SYS_PTRACE"
    return DoctorFinding(
        name="cma",
        status="note",
        found=f"process_vm_readv fails: {os.strerror(error)}",
        advice=advice,
    )


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_sibling_memory() -> int:
    """Return errno of reading one int of this process from a forked child, 0 on success.

    Yama's scope 1 forbids a child to read its parent, as it forbids reading between siblings.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    source, target = ctypes.c_int(12345), ctypes.c_int(0)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        remote = _IoVec(ctypes.addressof(source), 4)
        local = _IoVec(ctypes.addressof(target), 4)
        count = libc.process_vm_readv(parent, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        os._exit(0 if count == 4 else min(255, ctypes.get_errno()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _check_cache() -> DoctorFinding:
    from miraccl.native import cache

    wanted, folder = cache.preferred_folder(), cache.writable_folder()
    if folder is None:
        advice = (
            "kernels are compiled in every process: set MIRACCL_CACHE_DIR to a persistent writable"
            " folder"
        )
        return DoctorFinding(
            name="cache",
            status="note",
            found=f"neither {wanted} nor a temporary folder is writable",
            advice=advice,
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, CACHE_BYTES)
    except OSError as error:
        advice = (
            "compiled kernels go to a temporary folder if it has space: free some here, or set"
            " MIRACCL_CACHE_DIR"
        )
        return DoctorFinding(
            name="cache",
            status="note",
            found=f"{folder} is not writable: {error.strerror}",
            advice=advice,
        )
    if folder != wanted:
        advice = (
            "set MIRACCL_CACHE_DIR to a persistent writable folder, otherwise kernels are compiled"
            " again"
        )
        return DoctorFinding(
            name="cache",
            status="note",
            found=f"{wanted} is not writable, {folder} is used",
            advice=advice,
        )
    return DoctorFinding(name="cache", status="ok", found=f"{folder} is writable")


def _check_interfaces() -> DoctorFinding:
    import socket

    names = [name for _, name in socket.if_nameindex()]
    states = [
        f"{name} {read_text(f'/sys/class/net/{name}/operstate') or 'unknown'}" for name in names
    ]
    if not names:
        return DoctorFinding(
            name="interfaces",
            status="note",
            found="none",
            advice="without a network interface miraccl works within one host only",
        )
    return DoctorFinding(name="interfaces", status="ok", found=", ".join(states))


def _check_tools() -> DoctorFinding:
    found = [name for name in ("torchrun", "mpirun", "srun") if shutil.which(name)]
    return DoctorFinding(name="launchers", status="ok", found=", ".join(["miraccl run", *found]))


CHECKS: dict[str, Check] = {
    "python": _check_python,
    "numpy": _check_package("numpy", "buffers are numpy arrays"),
    "numba": _check_package("numba", "compiles the kernels"),
    "ml_dtypes": _check_package("ml_dtypes", "bfloat16 and 8-bit floats"),
    "matplotlib": _check_package("matplotlib", "miraccl perf --plot draws with it", extra="plot"),
    "torch": _check_package(
        "torch", "tensors as buffers, and comparisons with gloo and NCCL", extra="torch"
    ),
    "kernel": _check_kernel,
    "cores": _check_cores,
    "memfd": _check_memfd,
    "/dev/shm": _check_shm,
    "futex": _check_futex,
    "cma": _check_cma,
    "cache": _check_cache,
    "interfaces": _check_interfaces,
    **doctor_verbs.CHECKS,
    **doctor_gpu.CHECKS,
    "launchers": _check_tools,
}
