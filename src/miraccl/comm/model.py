"""The cost model of CPU ranks: how long a program takes, from constants that were measured on this machine.

A rank has one thread, so a program costs the sum of its steps: bytes copied and reduced at the bandwidth that a working set of that
size gets, plus a fixed cost per step; messages in a row add the latency of crossing from core to core.  Where ranks share cores, work
is stretched by ranks per core, and each wait costs a switch between processes instead of a cache line's way.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from miraccl.executor.cpu.lower import chunk_bytes
from miraccl.schedule.ir import Op, Schedule
from miraccl.types import Collective, DType


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What was measured (``executor.cpu.measure``). Times in microseconds, bandwidths in bytes per microsecond (MB/s).

    ``copy`` and ``fold`` are bandwidths for working sets of ``sizes`` bytes; ``fold`` counts the bytes of the result.
    ``single_copy_from`` is the block size from which reading the peer's private memory beats two copies, -1 if it never does.
    """

    sizes: tuple[int, ...] = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
    copy: tuple[float, ...] = (60000.0, 50000.0, 40000.0, 30000.0, 12000.0)
    fold: tuple[float, ...] = (50000.0, 40000.0, 35000.0, 25000.0, 9000.0)
    single_copy_from: int = -1
    latency_us: float = 0.08
    switch_us: float = 3.0
    step_us: float = 0.012
    network_latency_us: float = 60.0
    network: float = 3000.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Constants:
        """Raises ``ValueError`` for what ``to_json`` does not produce."""
        values: Any = json.loads(text)
        if not isinstance(values, dict) or set(values) != {f.name for f in fields(cls)}:
            raise ValueError("these are not the constants of this version")
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**arguments)

    def at(self, table: Sequence[float], size: float) -> float:
        """Bandwidth for a working set of ``size`` bytes, interpolated."""
        if size <= self.sizes[0]:
            return table[0]
        if size >= self.sizes[-1]:
            return table[-1]
        right = bisect.bisect_left(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return table[right - 1] + share * (table[right] - table[right - 1])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the model knows of the communicator: ranks per core of the busiest host (at least 1), and which peers are on a network."""

    nranks: int
    ranks_per_core: float = 1.0
    hosts: tuple[int, ...] = ()

    def remote(self, a: int, b: int | None) -> bool:
        return b is not None and bool(self.hosts) and self.hosts[a] != self.hosts[b]


#: op -> (copies, folds) of the step's bytes
_WORK: dict[Op, tuple[int, int]] = {
    Op.SEND: (1, 0),
    Op.RECV: (1, 0),
    Op.COPY: (1, 0),
    Op.RECV_REDUCE: (0, 1),
    Op.RECV_COPY_SEND: (2, 0),
    Op.RECV_REDUCE_SEND: (0, 1),
    Op.RECV_REDUCE_COPY: (0, 1),
    Op.RECV_REDUCE_COPY_SEND: (1, 1),
    Op.RECV_REDUCE_ALL: (0, 1),
    Op.PUT: (1, 0),
    Op.GET: (1, 0),
    Op.REDUCE_FROM_PEERS: (0, 1),
}


def predict_us(
    schedule: Schedule, latency_steps: int, block_bytes: int, dtype: DType, round_bytes: int, shape: Shape, constants: Constants
) -> float:
    """Predicted time in microseconds of one operation whose blocks have ``block_bytes`` bytes."""
    chunk = min(chunk_bytes(block_bytes, schedule.parts, dtype.itemsize), max(block_bytes, 1))
    rounds = -(-chunk // round_bytes) if block_bytes else 1
    total = sum(len(steps) for steps in schedule.channels[0])
    ranks = range(schedule.nranks) if total <= 4096 else range(1)
    work = max((_work_us(schedule, rank, chunk, block_bytes, rounds, shape, constants) for rank in ranks), default=0.0)
    crowded = shape.ranks_per_core > 1
    hop = constants.switch_us if crowded else constants.latency_us
    if shape.hosts and len(set(shape.hosts)) > 1:
        hop = constants.network_latency_us
    return work * max(1.0, shape.ranks_per_core) + latency_steps * hop


def _work_us(schedule: Schedule, rank: int, chunk: int, block_bytes: int, rounds: int, shape: Shape, constants: Constants) -> float:
    blocks = max(schedule.input_chunks, schedule.output_chunks) / schedule.parts
    footprint = 2.0 * block_bytes * blocks  # input and output pass through the caches
    copied = folded = wired = 0
    steps = 0
    for channel in schedule.channels:
        for step in channel[rank]:
            steps += 1
            nbytes = step.chunks * chunk
            copies, folds = _WORK.get(step.op, (0, 0))
            folds *= max(1, len(step.peers) - 1)
            copied += copies * nbytes
            folded += folds * nbytes
            if step.op.sends and shape.remote(rank, step.send_peer):
                wired += nbytes
    time = copied / constants.at(constants.copy, footprint) + folded / constants.at(constants.fold, footprint)
    return time + wired / constants.network + steps * rounds * constants.step_us


def default_block_bytes(collective: Collective, nbytes: int, nranks: int) -> int:
    """Bytes of a block when the whole buffer, as nccl-tests counts it, has ``nbytes``."""
    blocked = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL, Collective.GATHER, Collective.SCATTER)
    return nbytes // nranks if collective in blocked else nbytes
