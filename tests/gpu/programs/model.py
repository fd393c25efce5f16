"""Expected memory of every rank after each step, in NumPy, by the definitions of
``tests.runtime.reference``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from miraccl.types import PreMulSum, RedOp
from tests.gpu.programs import records
from tests.gpu.programs.values import parts, pool
from tests.runtime import reference as ref

Array = np.ndarray
_BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


class Model:
    """Expected ``memory[buffer][rank]`` and allocated results ``made[step][rank of the
    communicator]``.
    """

    def __init__(self, program: records.Program) -> None:
        self.comms = {0: records.Comm(0, tuple(range(program.nranks)))}
        self.memory = {
            b.number: [np.zeros(b.count, ref.DTYPES[b.dtype]) for _ in range(program.nranks)]
            for b in program.buffers
        }
        self._dtypes = {b.number: b.dtype for b in program.buffers}
        self.made: dict[int, list[Array]] = {}
        self._graphs: dict[int, tuple[records.Step, ...]] = {}

    def apply(self, step: records.Step) -> None:
        match step:
            case records.Call():
                self._call(step)
            case records.Messages(messages=messages, comm=comm):
                for message in messages:
                    source = self._part(message.source, comm, message.src, 0)
                    self._part(message.target, comm, message.dst, 0)[:] = source.copy()
            case records.Batch(steps=together):
                for one in together:
                    self.apply(one)
            case records.Fill(buffer=buffer, kind=kind, salt=salt):
                values = pool(self._dtypes[buffer], kind)
                for rank, array in enumerate(self.memory[buffer]):
                    for place, first, count in parts(array.size, rank, salt):
                        array[place : place + count] = values[first : first + count]
            case records.Copy(source=source_view, target=target_view):
                for rank, (source, target) in enumerate(
                    zip(
                        self.memory[source_view.buffer],
                        self.memory[target_view.buffer],
                        strict=True,
                    )
                ):
                    target[target_view.of(rank)] = source[source_view.of(rank)]
            case records.Split(comms=comms):
                self.comms |= {comm.number: comm for comm in comms}
            case records.Graph(number=number, body=body):
                self._graphs[number] = body
            case records.Replay(graph=graph):
                for part in self._graphs[graph]:
                    self.apply(part)
            case records.Beside(bodies=bodies):
                for part in itertools.chain(*bodies):
                    self.apply(part)

    def _part(self, view: records.View, comm: int, rank: int, span: int) -> Array:
        """Return the slice of a view on a rank of a communicator."""
        return self.memory[view.buffer][self.comms[comm].ranks[rank]][view.of(span)]

    def _call(self, call: records.Call) -> None:
        n = len(self.comms[call.comm].ranks)
        inputs = [self._part(call.x, call.comm, rank, rank).copy() for rank in range(n)]
        results = results_of(call, inputs)
        if call.makes:
            self.made[call.number] = [
                np.empty(0) if result is None else result for result in results
            ]
            return
        target = call.x if call.out is None else call.out
        for rank, result in enumerate(results):
            if result is not None:
                self._part(target, call.comm, rank, rank)[:] = result


def reduction(call: records.Call, arrays: Sequence[Array]) -> Array:
    if call.op in _BITWISE:
        total = arrays[0]
        for array in arrays[1:]:
            total = _BITWISE[call.op](total, array)
        return total
    op = PreMulSum(1.0) if call.op == "PREMUL_SUM" else RedOp[call.op]
    return ref.reduce_arrays(arrays, op, call.scalars)


def results_of(call: records.Call, inputs: Sequence[Array]) -> list[Array | None]:
    """Return each rank's result, or None."""
    n = len(inputs)
    match call.name:
        case "all_reduce":
            total = reduction(call, inputs)
            return [total] * n
        case "reduce":
            return [reduction(call, inputs) if rank == call.root else None for rank in range(n)]
        case "broadcast":
            return [inputs[call.root]] * n
        case "all_gather":
            whole = np.concatenate(inputs)
            return [whole] * n
        case "gather":
            return [np.concatenate(inputs) if rank == call.root else None for rank in range(n)]
        case "reduce_scatter":
            return list(_blocks(reduction(call, inputs), call.counts[0]))
        case "scatter":
            return list(_blocks(inputs[call.root], call.counts[0]))
        case "all_to_all":
            blocks = [_blocks(x, row) for x, row in zip(inputs, call.counts, strict=True)]
            return [np.concatenate([row[rank] for row in blocks]) for rank in range(n)]
    raise ValueError(call.name)


def _blocks(array: Array, counts: Sequence[int]) -> list[Array]:
    ends = list(itertools.accumulate(counts))
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]
