"""One rank of the GPU tests of sparse sums: runs cases by name and reports differences
(``tests.gpu.ranks``).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import numpy as np

from miraccl.api.communicator import Communicator
from miraccl.bootstrap.launch import detect_launch, join_launch
from miraccl.executor.cuda.row_exchange import ExchangeResult, read_result
from miraccl.runtime.options import Options
from miraccl.types import DType, PreMulSum, RedOp
from tests.gpu.worker import to_gpu, torch_dtype

PER_ROW = 256
DTYPES = (
    DType.FLOAT32,
    DType.BFLOAT16,
    DType.FLOAT16,
    DType.FLOAT64,
    DType.FLOAT8_E4M3,
    DType.INT8,
    DType.INT64,
    DType.UINT8,
)
OPERATORS = (RedOp.SUM, RedOp.AVG, RedOp.MIN, RedOp.MAX, RedOp.PROD)
MIB = 1 << 20


class SparseRank:
    """Communicator with its cases."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        launch = detect_launch(os.environ)
        torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
        self.session = join_launch(launch)
        options = Options.create(timeout=60.0, deterministic=True)
        self.comm = Communicator.from_session(self.session, options)

    def data(self, nbytes: int, density: float, dtype: DType, seed: int, offset: int = 0) -> Any:
        """Return a tensor of which ``density`` of the rows are not zero."""
        rng = np.random.default_rng((seed, self.comm.rank))
        words = np.zeros(-(-nbytes // PER_ROW), bool)
        words[:] = rng.random(words.size) < density
        bits = np.zeros((words.size, PER_ROW), np.uint8)
        bits[words] = rng.integers(0, 256, (int(words.sum()), PER_ROW), np.uint8)
        if dtype.is_float and dtype.itemsize > 1:  # no NaN, whose bits an operator may change
            bits[:, dtype.itemsize - 1 :: dtype.itemsize] &= 0xBF
        elif dtype.is_float:
            bits &= 0xBF
        flat = bits.ravel()[:nbytes].view(f"u{dtype.itemsize}")
        return to_gpu(self.torch, flat, dtype, offset)

    def compare(self, x: Any, op: Any = RedOp.SUM, out: Any = None, **options: Any) -> None:
        """Compare the sparse sum of ``x`` with the dense one in the order of ranks."""
        torch, comm = self.torch, self.comm
        want = x.clone()
        comm.all_reduce(want, op=op)
        got = comm.all_reduce_sparse(x, op, out=out, **options)
        torch.cuda.synchronize()
        kind = getattr(torch, {1: "int8", 2: "int16", 4: "int32", 8: "int64"}[x.element_size()])
        wrong = int((got.view(kind) != want.view(kind)).sum())
        assert wrong == 0, f"{wrong} of {x.numel()} elements differ: {x.dtype}, {op}, {options}"

    def result(self) -> ExchangeResult:
        side: Any = self.comm._device
        workspace = side._row_sums._workspaces[-1].workspace
        return read_result(side.gpu, workspace, self.comm.rank)

    # ---- cases

    def densities(self) -> None:
        """Rows and the dense sum, in place and not, several times."""
        for turn in range(3):
            for density in (0.0, 0.01, 0.1, 0.5, 0.99, 1.0):
                x = self.data(32 * MIB, density, DType.FLOAT32, turn)
                out = self.torch.full_like(x, 3.0) if turn == 1 else None
                self.compare(x, out=out)
                plan: Any = self.comm.last_plan
                by_rows = density <= 0.1
                assert self.result().by_rows is by_rows or density == 0.5, (density, plan)
                assert (plan.proto == "rows") is self.result().by_rows, plan

    def types(self) -> None:
        """All types and operators, at addresses and sizes that end within vectors."""
        for number, dtype in enumerate(DTYPES):
            for op in OPERATORS:
                if dtype is DType.FLOAT8_E4M3 and op is not RedOp.SUM:
                    continue
                offset = number % 3
                nbytes = 16 * MIB + 40 * dtype.itemsize
                self.compare(self.data(nbytes, 0.02, dtype, number, offset), op)
            if dtype.is_float:
                for scalar in (0.5 + self.comm.rank, -1.0, 0.0):
                    self.compare(self.data(16 * MIB, 0.02, dtype, 7), PreMulSum(scalar))

    def clustered(self) -> None:
        """All rows of a rank lie together, those of the ranks overlap."""
        x = self.torch.zeros(16 * MIB, device="cuda")
        start = self.comm.rank * 100_000
        x[start : start + 400_000] = self.torch.randn(400_000, device="cuda")
        self.compare(x)

    def graph(self) -> None:
        """A graph chooses anew with every replay."""
        torch, comm = self.torch, self.comm
        x = self.data(16 * MIB, 0.01, DType.FLOAT32, 1)
        comm.all_reduce_sparse(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.all_reduce_sparse(x)
        for turn, density in enumerate((0.01, 1.0, 0.05, 0.0, 1.0)):
            values = self.data(16 * MIB, density, DType.FLOAT32, turn)
            want = values.clone()
            comm.all_reduce(want)
            x.copy_(values)
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(x.view(torch.int32), want.view(torch.int32)), density

    def streams(self) -> None:
        """Calls in the caller's stream, in the background, and others between them."""
        torch, comm = self.torch, self.comm
        for turn in range(20):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            x = self.data(16 * MIB, 0.01 * (turn % 4), DType.FLOAT32, turn)
            want = x.clone()
            comm.all_reduce(want)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if turn % 3:
                    comm.all_reduce_sparse(x)
                else:
                    comm.all_reduce_sparse(x, async_op=True).wait()
            torch.cuda.current_stream().wait_stream(stream)
            assert torch.equal(x.view(torch.int32), want.view(torch.int32)), turn

    def memory(self) -> None:
        """Larger arrays take a further workspace, smaller ones none."""
        held = []
        for mib in (16, 256, 64, 256):  # the cases before have up to 64
            self.compare(self.data(mib * MIB, 0.01, DType.FLOAT32, mib))
            held.append(self.comm.memory()["gpu_device"])
        assert held[0] < held[1] == held[2] == held[3], held
        dtype = torch_dtype(self.torch, DType.FLOAT32)
        small = self.torch.ones(1000, dtype=dtype, device="cuda")
        self.compare(small)


def main() -> None:
    cases = [case["case"] for case in json.loads(sys.stdin.read())]
    rank, answers = SparseRank(), []
    for name in cases:
        try:
            getattr(rank, name)()
            answers.append("")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}")
            side: Any = rank.comm._device
            if side is not None and side._host[0]:  # nothing after it can run
                answers += ["not run"] * (len(cases) - len(answers))
                break
    rank.comm.finalize()
    print("RESULT " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
