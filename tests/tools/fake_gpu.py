"""Fake GPUs: a CUDA driver on this process's memory and a communicator over its session.

``install`` replaces the driver, the kernels and NCCL for ``miraccl perf --devices cuda`` before
ranks are forked, so the rest of the tool runs on a machine without a GPU. Work runs when it is
enqueued, or is recorded while a stream is captured.

Faults are injected by environment variables: FAKE_WRONG changes one element of rank 1's results,
FAKE_REJECTS rejects an operation, FAKE_DIES kills rank 1 in it, FAKE_LACKS removes it,
FAKE_UNCAPTURABLE makes the peer fail while it is captured, FAKE_PRINTS makes ranks print their GPU.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.ops.device_arrays import DeviceMemory, device_view
from miraccl.schedule.interpret import expected_outputs
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.tools.gpu_facts import CudaFacts, GpuInfo, PeerAccess
from miraccl.tools.perf.data import PERIOD
from miraccl.types import Collective, PreMulSum, RedOp

NAME = "NVIDIA Fake"


def view(address: int, nbytes: int) -> Any:
    """Return the bytes at an address."""
    memory: Any = (ctypes.c_char * nbytes).from_address(address) if nbytes else b""
    return np.frombuffer(memory, np.uint8)


class FakeCuda:
    """Functions of ``cuda.bindings.driver`` that the tool calls."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self) -> None:
        self.recording: list[Callable[[], Any]] | None = None
        self.graphs: dict[int, list[Callable[[], Any]]] = {}
        self.ticks = 0

    def submit(self, action: Callable[[], Any]) -> tuple[int]:
        if self.recording is None:
            action()
        else:
            self.recording.append(action)
        return (0,)

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:  # noqa: N802
        return 0, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, NAME.encode().ljust(length, b"\0")

    def cuMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, 1 << 30, 1 << 30

    def cuStreamCreate(self, flags: int) -> tuple[int, int]:  # noqa: N802
        return 0, 77

    def cuEventCreate(self, flags: int) -> tuple[int, list[int]]:  # noqa: N802
        return 0, [0]

    def cuEventRecord(self, event: list[int], stream: int) -> tuple[int]:  # noqa: N802
        self.ticks += 1
        event[0] = self.ticks
        return (0,)

    def cuEventElapsedTime(  # noqa: N802
        self, begin: list[int], end: list[int]
    ) -> tuple[int, float]:
        return 0, float(end[0] - begin[0]) * 0.5

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:  # noqa: N802
        assert self.recording is None
        self.recording = []
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple[int, list[Callable[[], Any]]]:  # noqa: N802
        actions, self.recording = self.recording, None
        assert actions is not None
        return 0, actions

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, int]:  # noqa: N802
        number = len(self.graphs) + 1
        self.graphs[number] = graph
        return 0, number

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[int]:  # noqa: N802
        for action in self.graphs[graph]:
            action()
        return (0,)

    def cuGraphExecDestroy(self, graph: int) -> tuple[int]:  # noqa: N802
        self.graphs[graph] = []
        return (0,)

    def cuMemcpyHtoDAsync(  # noqa: N802
        self, target: int, source: int, nbytes: int, stream: int
    ) -> tuple[int]:
        return self.submit(lambda: ctypes.memmove(target, source, nbytes))

    cuMemcpyDtoHAsync = cuMemcpyHtoDAsync  # noqa: N815

    def cuMemsetD8Async(  # noqa: N802
        self, address: int, value: int, nbytes: int, stream: int
    ) -> tuple[int]:
        return self.submit(lambda: ctypes.memset(address, value, nbytes))

    def cuLaunchKernel(self, function: tuple[str, int], *shape: Any) -> tuple[int]:  # noqa: N802
        (name, itemsize), arguments = function, shape[8]
        number = {"tile": 4, "count_different": 5, "spin": 1}[name]
        pointers = (ctypes.c_void_p * number).from_address(arguments)
        values = [ctypes.c_uint64.from_address(p or 0).value for p in pointers]
        return self.submit(lambda: _kernel(name, itemsize, values))

    def __getattr__(self, name: str) -> Any:
        if name in (
            "cuEventSynchronize",
            "cuStreamSynchronize",
            "cuGraphDestroy",
            "cuEventDestroy",
            "cuStreamDestroy",
        ):
            return lambda *args: (0,)
        raise AttributeError(name)


def _kernel(name: str, itemsize: int, values: list[int]) -> None:
    if name == "spin":
        return
    address, table, count, phase, *rest = values
    kind = np.dtype(f"u{itemsize}")
    period = view(table, PERIOD * itemsize).view(kind)
    array = view(address, count * itemsize).view(kind)
    right = period[(np.arange(count) + phase) % PERIOD]
    if name == "tile":
        array[:] = right
    else:
        view(rest[0], 8).view(np.uint64)[0] += np.count_nonzero(array != right)


class FakeGpu:
    def __init__(self, ordinal: int) -> None:
        if not hasattr(_of_thread, "cuda"):
            _of_thread.cuda = FakeCuda()  # one driver, with a current stream per rank
        self.ordinal, self.cuda, self.arch, self.multiprocessors = ordinal, _of_thread.cuda, 90, 4
        self._memory: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        memory = np.zeros(nbytes + 512, np.uint8)
        address = -(-memory.ctypes.data // 512) * 512
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self._memory[address]

    def load(self, cubin: bytes, entry: str) -> tuple[str, int]:
        return entry, int(cubin.decode().rsplit("-", 1)[1])

    def make_current(self) -> None:
        pass

    def close(self) -> None:
        assert not self.cuda.recording


class FakeCommunicator:
    """Every operation computed by its definition; data moves through the session."""

    def __init__(self, session: Any, ordinal: int, options: Any) -> None:
        self.session, self.rank, self.nranks = session, session.rank, session.nranks
        self.gpu = FakeGpu(ordinal)
        if os.environ.get("FAKE_PRINTS"):
            print(f"rank {self.rank} on GPU {ordinal}", file=sys.stderr)
        self.algo, self.proto, self.aborted = (
            options.algo or "one_shot",
            options.proto or "ll128",
            False,
        )
        self.last_plan: Any = None

    def all_reduce(self, x: Any, out: Any = None, op: Any = RedOp.SUM, *, stream: int) -> None:
        self._run(Collective.ALL_REDUCE, x, x if out is None else out, op)

    def reduce_scatter(self, x: Any, out: Any, op: Any = RedOp.SUM, *, stream: int) -> None:
        self._run(Collective.REDUCE_SCATTER, x, out, op)

    def all_gather(self, x: Any, out: Any, *, stream: int) -> None:
        self._run(Collective.ALL_GATHER, x, out)

    def all_to_all(self, x: Any, out: Any, *, stream: int) -> None:
        self._run(Collective.ALL_TO_ALL, x, out)

    def broadcast(self, x: Any, root: int = 0, *, stream: int) -> None:
        self._run(Collective.BROADCAST, x, x, root=root)

    def reduce(
        self, x: Any, root: int = 0, out: Any = None, op: Any = RedOp.SUM, *, stream: int
    ) -> None:
        self._run(Collective.REDUCE, x, x if out is None else out, op, root)

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, *, stream: int) -> None:
        assert (dst, src) == ((self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks)
        self._run(Collective.SEND_RECV, x, out)

    def gather(self, x: Any, root: int, out: Any, *, stream: int) -> None:
        self._run(Collective.GATHER, x, x if out is None else out, root=root)

    def scatter(self, x: Any, root: int, out: Any, *, stream: int) -> None:
        self._run(Collective.SCATTER, out if x is None else x, out, root=root)

    def barrier(self, *, stream: int) -> None:
        self.session.barrier("fake barrier")

    def check(self) -> None:
        assert not self.aborted

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        if not self.aborted:
            self.session.barrier("fake close")

    def _run(
        self, collective: Collective, x: Any, out: Any, op: Any = RedOp.SUM, root: int = 0
    ) -> None:
        source, target = (
            device_view(x, "x", collective.label),
            device_view(out, "out", collective.label),
        )
        if os.environ.get("FAKE_REJECTS") == collective.label:
            raise InvalidUsage(f"{collective.label} is rejected on purpose", rank=self.rank)
        if os.environ.get("FAKE_DIES") == collective.label and self.rank == 1 and source.count > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        reason = f"for {collective.label} of {source.count}"
        self.last_plan = SimpleNamespace(
            algo=self.algo, proto=self.proto, blocks=3, threads=64, unroll=1, reason=reason
        )
        self.gpu.cuda.submit(lambda: self._now(collective, source, target, op, root))

    def _now(
        self, collective: Collective, source: DeviceMemory, target: DeviceMemory, op: Any, root: int
    ) -> None:
        kind = NUMPY_DTYPE[source.dtype]
        scalars = None
        inputs = [
            np.frombuffer(blob, kind)
            for blob in self.session.all_gather(
                view(source.address, source.nbytes).tobytes(), "fake"
            )
        ]
        if isinstance(op, PreMulSum):
            scalars = [
                float(blob)
                for blob in self.session.all_gather(str(op.scalar).encode(), "fake scalar")
            ]
            op = RedOp.PREMUL_SUM
        if collective is Collective.SEND_RECV:
            result: Any = inputs[(self.rank - 1) % self.nranks]
        else:
            result = expected_outputs(collective, inputs, root=root, op=op, scalars=scalars)[
                self.rank
            ]
        if result is not None:
            place = view(target.address, target.nbytes).view(kind)
            place[:] = result
            if os.environ.get("FAKE_WRONG") and self.rank == 1 and place.size > 7:
                view(target.address, target.nbytes)[7 * kind.itemsize] ^= 1


class FakeTorchStream:
    """NCCL's stream without PyTorch; NCCL is another fake communicator."""

    stream_handle = 77

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch, self.ordinal = torch, ordinal

    def arena(self, nbytes: int) -> Any:
        from miraccl.tools.perf.device_array import Arena

        self.memory = FakeGpu(self.ordinal)
        return Arena(self.memory.allocate(nbytes), nbytes, self.ordinal)


def fake_nccl(session: Any, torch_stream: FakeTorchStream, arena: Any) -> Any:
    from miraccl.runtime.options import Options
    from miraccl.tools.perf.device_miraccl import MiracclDevice

    comm = FakeCommunicator(session, torch_stream.ordinal, Options.create())

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        if "FAKE_UNCAPTURABLE" in os.environ:
            raise RuntimeError("cannot be captured on purpose")
        return run

    library = MiracclDevice(comm, torch_stream.stream_handle, arena, capture)
    library.name = "nccl"
    return library


_of_thread = threading.local()


def facts(count: int, problem: str = "") -> CudaFacts:
    gpus = tuple(
        GpuInfo(
            ordinal=i,
            name=NAME,
            bus_id=f"0000:{i:02x}:00.0",
            sm=90,
            multiprocessors=4,
            memory_bytes=1 << 30,
            posix_handles=True,
            mode=0,
        )
        for i in range(count)
    )
    peers = tuple(
        PeerAccess(source=i, target=j, allowed=True, atomics=True)
        for i in range(count)
        for j in range(count)
        if i != j
    )
    return CudaFacts(problem=problem, driver="13.0", bindings="13.0", gpus=gpus, peers=peers)


def compile_nothing(source: str, arch: int, name: str) -> bytes:
    """Return stand-in machine code of the pattern kernels."""
    return name.encode()


def start(count: int, *words: str) -> None:
    """Run ``miraccl``, or a script, with ``count`` GPUs."""
    from miraccl.tools import cli

    install(count)
    if words[0].endswith(".py"):
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(words[0]))
        runpy.run_path(words[0], run_name="__main__")
    else:
        cli.main(list(words))


def install(count: int) -> None:
    """Install ``count`` fake GPUs in this process and its forks."""
    import miraccl.executor.cuda.gpu as cuda
    import miraccl.runtime.multinode.communicator as device_hosts
    from miraccl.executor.cuda import toolkit
    from miraccl.tools import gpu_facts
    from miraccl.tools.perf import device_measure, device_nccl, device_ranks

    def gpu(ordinal: int) -> Any:
        return FakeGpu(ordinal)

    changes: dict[tuple[Any, str], Any] = {
        (gpu_facts, "read_facts"): lambda: facts(count),
        (cuda, "Gpu"): gpu,
        (toolkit, "compile_cubin"): compile_nothing,
        (device_hosts, "make_device_communicator"): lambda *args, open_cpu, plane=None: (
            FakeCommunicator(*args)
        ),
        (device_nccl, "load_torch"): lambda: SimpleNamespace(
            __version__="0",
            version=SimpleNamespace(cuda="0"),
            cuda=SimpleNamespace(nccl=SimpleNamespace(version=lambda: (0, 0))),
        ),
        (device_nccl, "check_torch"): lambda: None,
        (device_nccl, "TorchStream"): FakeTorchStream,
        (device_nccl, "NcclDevice"): fake_nccl,
        (device_ranks, "_WARM_UP_US"): 0.0,
        (device_measure, "_HOST_CALLS"): 2,  # each is a round of the ranks
    }
    if "FAKE_LACKS" in os.environ:
        delattr(FakeCommunicator, os.environ["FAKE_LACKS"])
    for (module, name), value in changes.items():
        setattr(module, name, value)


if __name__ == "__main__":
    start(int(sys.argv[1]), *sys.argv[2:])
