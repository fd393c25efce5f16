"""One rank of a peer library (Gloo through torch, MPI through mpi4py), run by the peer's own
Python.

That Python needs numpy and the peer, but none of miraccl's dependencies. The modules that define
the measurement are miraccl's, loaded from beside this file through stub packages, so both libraries
are measured by the same code.

Protocol over a Unix socket: lines of JSON. ``ready`` before each stretch of work, answered by
``go``; ``row`` with a result and ``done`` after a case (rank 0 only).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    _here = Path(__file__).resolve().parent
    # The peer must not import our file names as top-level modules.
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != _here]
    for _name, _folder in (
        ("miraccl", _here.parents[1]),
        ("miraccl.tools", _here.parent),
        ("miraccl.tools.perf", _here),
    ):
        sys.modules[_name] = _stub = types.ModuleType(_name)
        _stub.__path__ = [str(_folder)]

import numpy as np

from miraccl.tools.perf.data import numpy_dtype
from miraccl.tools.perf.engine import BoundOperation, place_buffers
from miraccl.tools.perf.measure import BarrierWarmup, MeasureOptions, bind_to_core, measure
from miraccl.tools.perf.spec import Case

if TYPE_CHECKING:
    from miraccl.tools.perf.engine import Engine

_MPI_TYPES = {
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int32": "INT32_T",
    "uint32": "UINT32_T",
    "int64": "INT64_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
}
_MPI_OPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX", "none": "SUM"}
_GLOO_TYPES = ("int8", "uint8", "int32", "int64", "float16", "float32", "float64")
_GLOO_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "none": "SUM"}


class MPIEngine:
    """MPI through mpi4py's buffer functions."""

    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD
        self.rank: int = self._comm.rank
        self.nranks: int = self._comm.size

    def barrier(self) -> None:
        self._comm.Barrier()

    def reduce_list(self, values: list[float], *, how: str) -> list[float]:
        fold = max if how == "max" else sum
        return [float(fold(column)) for column in zip(*self._comm.allgather(values))]

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        if (
            case.dtype not in _MPI_TYPES
            or case.redop not in _MPI_OPS
            or (case.op == "broadcast" and not in_place)
        ):
            return None
        x, y = place_buffers(
            case, self.rank, in_place, lambda count: np.zeros(count, numpy_dtype(case.dtype))
        )
        call = self._call(case, in_place, x, y)
        return None if call is None else BoundOperation(call=call, input=x, output=y)

    def close(self) -> None:
        self._comm.Barrier()

    def _call(self, case: Case, in_place: bool, x: Any, y: Any) -> Callable[[], Any] | None:
        kind, count, root = getattr(self._mpi, _MPI_TYPES[case.dtype]), case.count, case.root
        op, comm = getattr(self._mpi, _MPI_OPS[case.redop]), self._comm
        here = self._mpi.IN_PLACE
        source, target = [x, count, kind], [y, count, kind]
        if case.op == "all_reduce":
            given = here if in_place else source
            return lambda: comm.Allreduce(given, target, op)
        if case.op == "all_gather":
            given = here if in_place else source
            return lambda: comm.Allgather(given, target)
        if case.op == "reduce_scatter":
            return None if in_place else lambda: comm.Reduce_scatter_block(source, target, op)
        if case.op == "broadcast":
            return lambda: comm.Bcast(target, root)
        if case.op == "reduce":
            given, received = (
                (here if in_place and self.rank == root else source),
                (target if self.rank == root else None),
            )
            return lambda: comm.Reduce(given, received, op, root)
        if case.op == "all_to_all":
            given = here if in_place else source
            return lambda: comm.Alltoall(given, target)
        if case.op == "gather":
            given, received = (
                (here if in_place and self.rank == root else source),
                (target if self.rank == root else None),
            )
            return lambda: comm.Gather(given, received, root)
        if case.op == "scatter":
            given, received = (
                (source if self.rank == root else None),
                (here if in_place and self.rank == root else target),
            )
            return lambda: comm.Scatter(given, received, root)
        if in_place:
            return None
        if case.op == "barrier":
            return lambda: comm.Barrier()
        following, previous = (self.rank + 1) % self.nranks, (self.rank - 1) % self.nranks
        return lambda: comm.Sendrecv(source, following, recvbuf=target, source=previous)


class GlooEngine:
    """Gloo through ``torch.distributed``, one thread per rank."""

    name = "gloo"

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch: Any = torch
        self._dist: Any = dist
        self.rank: int = dist.get_rank()
        self.nranks: int = dist.get_world_size()

    def barrier(self) -> None:
        self._dist.barrier()

    def reduce_list(self, values: list[float], *, how: str) -> list[float]:
        tensor = self._torch.tensor(values, dtype=self._torch.float64)
        self._dist.all_reduce(
            tensor, op=self._dist.ReduceOp.MAX if how == "max" else self._dist.ReduceOp.SUM
        )
        return [float(v) for v in tensor.tolist()]

    def bind(self, case: Case, in_place: bool) -> BoundOperation | None:
        if (
            case.dtype not in _GLOO_TYPES
            or case.redop not in _GLOO_OPS
            or in_place is not (case.op in ("all_reduce", "broadcast", "reduce"))
        ):
            return None
        kind = getattr(self._torch, case.dtype)
        x, y = place_buffers(
            case, self.rank, in_place, lambda count: self._torch.zeros(count, dtype=kind)
        )
        return BoundOperation(
            call=self._call(case, x, y), input=x.numpy(), output=y.numpy(), owner=(x, y)
        )

    def close(self) -> None:
        self._dist.destroy_process_group()

    def _call(self, case: Case, x: Any, y: Any) -> Callable[[], Any]:
        dist, root, n = self._dist, case.root, self.nranks
        op = getattr(dist.ReduceOp, _GLOO_OPS[case.redop])
        if case.op == "all_reduce":
            return lambda: dist.all_reduce(y, op=op)
        if case.op == "all_gather":
            return lambda: dist.all_gather_into_tensor(y, x)
        if case.op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(y, x, op=op)
        if case.op == "broadcast":
            return lambda: dist.broadcast(y, root)
        if case.op == "reduce":
            return lambda: dist.reduce(y, root, op=op)
        if case.op == "all_to_all":
            return lambda: dist.all_to_all_single(y, x)
        if case.op == "gather":
            parts = list(y.chunk(n)) if self.rank == root else None
            return lambda: dist.gather(x, parts, root)
        if case.op == "scatter":
            parts = list(x.chunk(n)) if self.rank == root else None
            return lambda: dist.scatter(y, parts, root)
        if case.op == "barrier":
            return lambda: dist.barrier()
        return lambda: self._exchange(x, y)

    def _exchange(self, x: Any, y: Any) -> None:
        sending = self._dist.isend(x, (self.rank + 1) % self.nranks)
        self._dist.recv(y, (self.rank - 1) % self.nranks)
        sending.wait()


class _Orchestrator:
    """Connection to the orchestrator, which grants turns."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lines = self._socket.makefile("r", encoding="utf-8")

    def wait_for_turn(self) -> None:
        self.send(kind="ready")
        if self._lines.readline().strip() != "go":
            sys.exit("the orchestrator of this process has exited")

    def send(self, **message: Any) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())


def measure_cases(engine: Engine, orchestrator: _Orchestrator, job: dict[str, Any]) -> None:
    options, pace = MeasureOptions(**job["options"]), BarrierWarmup(engine)
    if options.bind:
        bind_to_core(engine)
    pace.run(0.3, 1.0)

    def turn() -> None:
        orchestrator.wait_for_turn()
        pace.run()

    for number, fields in enumerate(job["cases"]):
        for in_place in (False, True):
            row = measure(engine, Case(**fields), in_place, options, turn)
            if engine.rank == 0 and row is not None:
                orchestrator.send(
                    kind="row", case=number, in_place=in_place, time_us=row.time_us, wrong=row.wrong
                )
        if engine.rank == 0:  # after its rows
            orchestrator.send(kind="done", case=number)


def main(library: str, path: str) -> None:
    engine: Engine = MPIEngine() if library == "mpi" else GlooEngine()
    orchestrator = _Orchestrator(path)
    orchestrator.send(kind="hello", rank=engine.rank, pid=os.getpid())
    with open(path + ".json", encoding="utf-8") as file:
        measure_cases(engine, orchestrator, json.load(file))
    orchestrator.send(kind="end")
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
