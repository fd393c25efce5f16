"""Facts about CUDA on this machine, queried in a separate process.

A process that has initialised CUDA cannot be forked into ranks, and a broken driver may crash it.
The tools therefore run a child (``python -m miraccl.tools.gpu_facts``), which answers in JSON.
Neither a GPU, a driver nor the package is required: what is missing is reported with a remedy.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from miraccl.errors import MissingDependency

PROBE_SECONDS = 60.0
SHARED_BYTES = 2 << 20  # size of the allocation that two processes map
DRIVER_ADVICE = (
    "install the NVIDIA driver (Debian: nvidia-driver; Ubuntu: ubuntu-drivers install); containers:"
    " --gpus all"
)
#: remedies for results of cuInit (cuda.h)
_INIT_ADVICE = {
    100: (
        "the driver finds no GPU: check nvidia-smi, CUDA_VISIBLE_DEVICES and, in containers,"
        " --gpus all"
    ),
    802: (
        "the GPUs are not ready: on machines with NVSwitch start nvidia-fabricmanager, then check"
        " nvidia-smi -q (Fabric)"
    ),
    803: (
        "libcuda.so.1 and the driver's kernel module are of different versions: reboot, or remove"
        " the other libcuda from the path"
    ),
    804: (
        "a compatibility package of CUDA does not fit this GPU: remove cuda-compat from the library"
        " path"
    ),
}
_EXCLUSIVE_PROCESS, _PROHIBITED = 3, 2  # CUcomputemode


@dataclass(frozen=True, kw_only=True)
class GpuInfo:
    """One GPU, numbered as in this process.

    - ``sm``: compute capability, 90 for 9.0.
    - ``posix_handles``: its memory can be shared as file descriptors.
    - ``mode``: CUcomputemode; 3 allows one process, 2 none.
    - ``dma_buf``, ``writes_ordering``: what network adapters need (``executor.cuda.gpu.Gpu``).
    """

    ordinal: int
    name: str
    bus_id: str
    sm: int
    multiprocessors: int
    memory_bytes: int
    posix_handles: bool
    mode: int
    dma_buf: bool = False
    writes_ordering: int = -1


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """Access of GPU ``source`` to the memory of ``target``.

    ``rank`` orders the pairs of a machine by performance, 0 is the fastest.
    """

    source: int
    target: int
    allowed: bool
    atomics: bool = False
    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class CudaFacts:
    """State of CUDA. ``driver`` is the CUDA version of the driver.

    ``problem`` is the reason why no GPU is usable, ``advice`` the remedy; both are empty otherwise.
    """

    problem: str = ""
    advice: str = ""
    driver: str = ""
    bindings: str = ""
    gpus: tuple[GpuInfo, ...] = ()
    peers: tuple[PeerAccess, ...] = ()

    @property
    def names(self) -> str:
        """Names of the GPUs with counts, such as ``4 x NVIDIA H200``; several models separated by
        commas.
        """
        kinds = dict.fromkeys(gpu.name for gpu in self.gpus)
        return ", ".join(f"{sum(gpu.name == kind for gpu in self.gpus)} x {kind}" for kind in kinds)

    def restrict_to(self, ordinals: Sequence[int]) -> CudaFacts:
        """Return a copy with the GPUs in ``ordinals`` only."""
        return replace(self, gpus=tuple(gpu for gpu in self.gpus if gpu.ordinal in ordinals))


def collect() -> CudaFacts:
    """Query the driver in this process."""
    from miraccl.executor.cuda.toolkit import INSTALL, bindings

    try:
        cuda = bindings("driver")
    except MissingDependency as error:
        return CudaFacts(problem=error.message, advice=INSTALL)
    version = _package_version()
    try:
        (code,) = cuda.cuInit(0)
    except Exception:  # error classes of the package differ between versions
        return CudaFacts(
            problem="no NVIDIA driver: cannot load libcuda.so.1",
            advice=DRIVER_ADVICE,
            bindings=version,
        )
    if int(code) != 0:
        advice = _INIT_ADVICE.get(
            int(code), "check nvidia-smi and the kernel log (dmesg | grep -i nvrm)"
        )
        return CudaFacts(
            problem=f"cannot initialise CUDA: {code.name}", advice=advice, bindings=version
        )
    return _query_driver(cuda, version)


def _package_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return "unknown version"


def _query_driver(cuda: Any, version: str) -> CudaFacts:
    from miraccl.executor.cuda.driver import check

    number = int(check(cuda.cuDriverGetVersion(), "cuDriverGetVersion"))
    count = int(check(cuda.cuDeviceGetCount(), "cuDeviceGetCount"))
    devices = [check(cuda.cuDeviceGet(i), "cuDeviceGet") for i in range(count)]
    return CudaFacts(
        problem="" if count else "CUDA shows no GPU",
        advice="" if count else _INIT_ADVICE[100],
        driver=f"{number // 1000}.{number % 1000 // 10}",
        bindings=version,
        gpus=tuple(_query_gpu(cuda, i, device) for i, device in enumerate(devices)),
        peers=tuple(
            _query_peer(cuda, i, j, devices) for i in range(count) for j in range(count) if i != j
        ),
    )


def _query_gpu(cuda: Any, ordinal: int, device: Any) -> GpuInfo:
    from miraccl.executor.cuda.driver import check

    def attribute(name: str) -> int:
        kind = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cuda.cuDeviceGetAttribute(kind, device), name))

    return GpuInfo(
        ordinal=ordinal,
        name=_text(check(cuda.cuDeviceGetName(256, device), "cuDeviceGetName")),
        bus_id=_text(check(cuda.cuDeviceGetPCIBusId(64, device), "cuDeviceGetPCIBusId")).lower(),
        sm=10 * attribute("COMPUTE_CAPABILITY_MAJOR") + attribute("COMPUTE_CAPABILITY_MINOR"),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory_bytes=int(check(cuda.cuDeviceTotalMem(device), "cuDeviceTotalMem")),
        posix_handles=bool(attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        mode=attribute("COMPUTE_MODE"),
        dma_buf=bool(attribute("DMA_BUF_SUPPORTED")),
        writes_ordering=attribute("GPU_DIRECT_RDMA_WRITES_ORDERING"),
    )


def _query_peer(cuda: Any, source: int, target: int, devices: list[Any]) -> PeerAccess:
    from miraccl.executor.cuda.driver import check

    allowed = bool(
        check(cuda.cuDeviceCanAccessPeer(devices[source], devices[target]), "cuDeviceCanAccessPeer")
    )

    def attribute(name: str) -> int:
        kind = getattr(cuda.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        return int(
            check(cuda.cuDeviceGetP2PAttribute(kind, devices[source], devices[target]), name)
        )

    if not allowed:
        return PeerAccess(source=source, target=target, allowed=False)
    atomics, rank = bool(attribute("NATIVE_ATOMIC_SUPPORTED")), attribute("PERFORMANCE_RANK")
    return PeerAccess(source=source, target=target, allowed=True, atomics=atomics, rank=rank)


def _text(value: bytes) -> str:
    return value.split(b"\0")[0].decode(errors="replace").strip()


# ---------------------------------------------------------------------- in a process of its own


def read_facts() -> CudaFacts:
    """Query the driver in a child process; report its crash or hang as a problem."""
    try:
        done = subprocess.run(
            _command("facts"),
            env=_environ(),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return CudaFacts(
            problem=f"the driver did not respond within {PROBE_SECONDS:.0f} s",
            advice="check nvidia-smi and dmesg",
        )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return CudaFacts(
            problem=f"querying the driver failed with status {done.returncode}: {tail}",
            advice="check nvidia-smi and dmesg",
        )
    return facts_from_json(json.loads(lines[-1]))


def facts_from_json(record: dict[str, Any]) -> CudaFacts:
    gpus = tuple(GpuInfo(**gpu) for gpu in record["gpus"])
    return CudaFacts(
        **{**record, "gpus": gpus, "peers": tuple(PeerAccess(**peer) for peer in record["peers"])}
    )


def try_ipc(owner: int, mapper: int) -> str:
    """Map memory of GPU ``owner`` of one process on GPU ``mapper`` of another; return the error or
    "".
    """
    share = subprocess.Popen(
        _command("share", str(owner)),
        env=_environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert share.stdin is not None
    assert share.stdout is not None
    try:
        handle = _first_line(share)
        if not handle.startswith("handle "):
            return handle or "the owner of the memory exited without output"
        command = _command("map", str(mapper), handle.split()[1])
        done = subprocess.run(
            command,
            env=_environ(),
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
        answer = (done.stdout.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return "" if answer == "mapped" else answer
    except subprocess.TimeoutExpired:
        return "the other process did not respond"
    finally:
        share.stdin.close()
        try:
            share.wait(10)
        except subprocess.TimeoutExpired:
            share.kill()
            share.wait()
        share.stdout.close()


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PROBE_SECONDS)
    return (
        process.stdout.readline().strip() if readable else "the owner of the memory did not respond"
    )


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "miraccl.tools.gpu_facts", *words]


def _environ() -> dict[str, str]:
    """Return the environment of a child that imports this copy of miraccl."""
    ours = str(Path(__file__).resolve().parents[2])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH", "")))),
    }


def main(words: list[str]) -> None:
    """Run one command of the child.

    ``facts``; ``share ORDINAL``: hold an allocation until standard input ends; ``map ORDINAL
    HANDLE``: map it.
    """
    from miraccl.executor.cuda.gpu import Gpu

    if words[0] == "facts":
        print(json.dumps(asdict(collect())), flush=True)
        return
    try:
        gpu = Gpu(int(words[1]))
        if words[0] == "share":
            address = gpu.allocate(SHARED_BYTES)
            print("handle", gpu.export(address).hex(), flush=True)
            sys.stdin.read()
            gpu.free(address)
        else:
            gpu.unmap_peer(gpu.map_peer(bytes.fromhex(words[2])))
            print("mapped", flush=True)
    except Exception as error:  # any error is the answer
        print(str(error) or type(error).__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
