"""NCCL through ``torch.distributed`` as a library of the measurement, in miraccl's process and
stream.

Imported for ``--compare nccl`` only; PyTorch is imported when an object is made. NVLink multicast
is disabled (NCCL_NVLS_ENABLE=0), as in miraccl. Operations that ``torch.distributed`` has in place
only (all_reduce, reduce, broadcast) are compared with both forms of miraccl.
"""

from __future__ import annotations

import datetime
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from miraccl.bootstrap.contract import Session
from miraccl.errors import InvalidUsage, MissingDependency
from miraccl.tools.perf.device_array import ALIGNMENT, Arena, PerfDeviceArray
from miraccl.tools.perf.device_miraccl import BoundDeviceOperation, is_repeatable
from miraccl.tools.perf.engine import place_buffers
from miraccl.tools.perf.spec import Case

ENVIRON = {"NCCL_NVLS_ENABLE": "0"}
_RENDEZVOUS_SECONDS = 120
_INSTALL = "pip install torch, a build with CUDA"
_TYPES = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64", "bfloat16")
_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG", "none": "SUM"}
_SAME_BUFFER = ("all_reduce", "reduce", "broadcast")


def load_torch() -> Any:
    """Import PyTorch with NCCL; raise ``MissingDependency`` with what to install."""
    os.environ.update(ENVIRON)
    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"cannot compare with nccl without PyTorch: {error}", hint=_INSTALL
        ) from None
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        text = f"cannot compare with nccl: PyTorch {torch.__version__} has no CUDA or no NCCL"
        raise MissingDependency(text, hint=_INSTALL)
    return torch


def check_torch() -> None:
    """Run ``load_torch`` in another process: this one forks and must not initialise CUDA."""
    code = f"from {__name__} import report_torch; report_torch()"
    try:
        probe = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_RENDEZVOUS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise MissingDependency(
            f"cannot compare with nccl: PyTorch did not load within {_RENDEZVOUS_SECONDS} s",
            hint=_INSTALL,
        ) from None
    if probe.returncode:
        lines = (probe.stdout.strip() or probe.stderr.strip()).splitlines() or [
            f"loading PyTorch failed with status {probe.returncode}"
        ]
        raise MissingDependency(lines[-1], hint=_INSTALL)


def report_torch() -> None:
    """Print what is missing; the command of ``check_torch``'s process."""
    try:
        load_torch()
    except MissingDependency as error:
        print(error.message)
        sys.exit(1)


class TorchStream:
    """PyTorch stream and memory of the measurement; NCCL and miraccl use the same tensors."""

    def __init__(self, torch: Any, ordinal: int) -> None:
        self.torch, self.ordinal = torch, ordinal
        torch.cuda.set_device(ordinal)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)

    @property
    def stream_handle(self) -> int:
        return int(self.stream.cuda_stream)

    def arena(self, nbytes: int) -> Arena:
        whole = self.torch.empty(nbytes, dtype=self.torch.uint8, device=f"cuda:{self.ordinal}")
        return Arena(whole.data_ptr(), nbytes, self.ordinal, whole)

    def capture(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """Capture a CUDA graph as PyTorch users do.

        The stream is synchronised first, so NCCL's watchdog has no work to query during the
        capture.
        """
        torch = self.torch
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            run()
        replay: Callable[[], Any] = graph.replay
        return replay


class NcclDevice:
    """NCCL on one GPU. Created by all ranks of ``session`` together, each with its own GPU."""

    name = "nccl"

    def __init__(self, session: Session, torch_stream: TorchStream, arena: Arena) -> None:
        import torch.distributed as dist

        self._dist, self._torch, self._arena = dist, torch_stream.torch, arena
        self.rank, self.nranks = session.rank, session.nranks
        self.capture = torch_stream.capture
        where = _rendezvous_url(session)
        try:
            dist.init_process_group(
                "nccl",
                init_method=where,
                rank=self.rank,
                world_size=self.nranks,
                timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS),
                device_id=torch_stream.torch.device("cuda", torch_stream.ordinal),
            )
        except Exception as error:
            raise InvalidUsage(
                f"cannot start NCCL: {error}",
                rank=self.rank,
                hint="set NCCL_DEBUG=INFO for details",
            ) from error
        self._aligner = torch_stream.arena(ALIGNMENT).allocate(4, "float32").tensor.zero_()

    def bind(self, case: Case, in_place: bool) -> BoundDeviceOperation | None:
        if (
            case.dtype not in _TYPES
            or case.redop not in _OPS
            or (case.op == "broadcast" and not in_place)
        ):
            return None
        if (case.op in ("all_to_all", "sendrecv") and in_place) or (
            case.op == "sendrecv" and self.nranks == 1
        ):
            return None
        if case.op in ("gather", "scatter") and in_place:
            return None
        same = in_place or case.op in _SAME_BUFFER
        x, y = place_buffers(
            case, self.rank, same, lambda count: self._arena.allocate(count, case.dtype)
        )
        return BoundDeviceOperation(
            call=self._call(case, x, y), input=x, output=y, repeatable=is_repeatable(case, x, y)
        )

    def align(self) -> None:
        self._dist.all_reduce(self._aligner)

    def check(self) -> None:
        """Do nothing: NCCL raises errors where they occur."""

    def close(self) -> None:
        self._dist.destroy_process_group()

    def _call(
        self, case: Case, source: PerfDeviceArray, target: PerfDeviceArray
    ) -> Callable[[], Any]:
        dist, root, x, y = self._dist, case.root, source.tensor, target.tensor
        op = getattr(dist.ReduceOp, _OPS[case.redop])
        match case.op:
            case "all_reduce":
                return lambda: dist.all_reduce(y, op=op)
            case "all_gather":
                gather = (
                    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                )  # older versions have the second one only
                return lambda: gather(y, x)
            case "reduce_scatter":
                scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                return lambda: scatter(y, x, op=op)
            case "broadcast":
                return lambda: dist.broadcast(y, root)
            case "reduce":
                return lambda: dist.reduce(y, root, op=op)
            case "all_to_all":
                return lambda: dist.all_to_all_single(y, x)
            case "gather":
                parts = list(y.chunk(self.nranks)) if self.rank == root else None
                return lambda: dist.gather(x, parts, root)
            case "scatter":
                parts = list(x.chunk(self.nranks)) if self.rank == root else None
                return lambda: dist.scatter(y, parts, root)
        following, previous = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        both = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, previous)]

        def exchange() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return exchange


def _rendezvous_url(session: Session) -> str:
    """Return the address of PyTorch's store: a free port of rank 0 on MASTER_ADDR or this host."""
    where = ""
    if session.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            where = f"{os.environ.get('MASTER_ADDR') or '127.0.0.1'}:{probe.getsockname()[1]}"
    return f"tcp://{session.all_gather(where.encode(), 'perf nccl')[0].decode()}"
