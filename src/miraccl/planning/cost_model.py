"""Cost model of CPU ranks: predicted time of a program from constants measured on this machine.

A rank has one thread, so a program costs the sum of its steps: bytes copied and reduced at the
bandwidth for a working set of that size, plus a fixed cost per step. Messages in sequence add the
latency between cores. If ranks share cores, work is stretched by the ranks per core, and each wait
costs a context switch instead of a cache line transfer. Between hosts, each round adds the latency
of its messages in sequence, of which as many cross the network as its receives do on average, and
the ranks of a host share its network.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.sizes import chunk_bytes
from miraccl.schedule.ir import Op, Schedule, input_blocks, output_blocks
from miraccl.types import Collective, DType


@dataclass(frozen=True, kw_only=True)
class CpuConstants:
    """Measured constants of a machine (``api.measure``).

    Attributes:
        sizes: Working set sizes in bytes for ``copy`` and ``fold``.
        copy: Copy bandwidth by working set, in bytes per microsecond (MB/s).
        fold: Reduction bandwidth by working set, in result bytes per microsecond.
        single_copy_from: Block size in bytes from which reading a peer's private memory is faster
            than two copies; -1 for never.
        exchange_copy_from: The same when all ranks are busy and read whole blocks (all_gather,
            all_to_all); -1 for never.
        swap_slots: True if ranks that exchange messages are faster with slots that change hands
            (``executor.cpu.kernels.slots``).
        loop_copy: True if a loop copies faster than glibc's ``memcpy``
            (``executor.cpu.kernels.copies``).
        latency_us: Latency of a message between cores.
        switch_us: Latency of a message between ranks on one core.
        step_us: Fixed cost of a step.
        network_latency_us: Latency of a message between hosts.
        network_message_us: Processor time of one end of such a message.
        network: Bandwidth of a host's network in bytes per microsecond.
    """

    sizes: tuple[int, ...] = (16 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)
    copy: tuple[float, ...] = (60000.0, 50000.0, 40000.0, 30000.0, 12000.0)
    fold: tuple[float, ...] = (50000.0, 40000.0, 35000.0, 25000.0, 9000.0)
    single_copy_from: int = -1
    exchange_copy_from: int = -1
    swap_slots: bool = False
    loop_copy: bool = False
    latency_us: float = 0.08
    switch_us: float = 3.0
    step_us: float = 0.012
    network_latency_us: float = 15.0
    network_message_us: float = 5.0
    network: float = 3000.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CpuConstants:
        """Parse the output of ``to_json``.

        Raises:
            ValueError: ``text`` has other fields than this version.
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict) or set(values) != {f.name for f in fields(cls)}:
            raise ValueError("cannot read the constants: they are of another version")
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**arguments)

    def at(self, table: Sequence[float], size: float) -> float:
        """Return the bandwidth for a working set of ``size`` bytes, interpolated in ``table``."""
        if size <= self.sizes[0]:
            return table[0]
        if size >= self.sizes[-1]:
            return table[-1]
        right = bisect.bisect_left(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return table[right - 1] + share * (table[right] - table[right - 1])


@dataclass(frozen=True, kw_only=True)
class CommunicatorShape:
    """Properties of a communicator that the model uses.

    Attributes:
        ranks_per_core: Ranks per core of the busiest host, at least 1.
        hosts: Host number of each rank; empty if there is one host.
        order: Order in which rings visit the ranks; empty for rank order.
    """

    nranks: int
    ranks_per_core: float = 1.0
    hosts: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def remote(self, a: int, b: int | None) -> bool:
        return b is not None and bool(self.hosts) and self.hosts[a] != self.hosts[b]


#: op -> (slot passes, user passes): number of times the bytes of a step pass through FIFO slots,
#: which stay in the caches, and through user buffers, which may not. Data that the step has written
#: or the previous step has read counts as cached.
_PASSES: dict[Op, tuple[int, int]] = {
    Op.SEND: (1, 1),
    Op.RECV: (1, 1),
    Op.COPY: (0, 2),
    Op.RECV_REDUCE: (1, 2),
    Op.RECV_COPY_SEND: (2, 1),
    Op.RECV_REDUCE_SEND: (2, 1),
    Op.RECV_REDUCE_COPY: (1, 2),
    Op.RECV_REDUCE_COPY_SEND: (2, 2),
    Op.RECV_REDUCE_ALL: (1, 2),
    Op.PUT: (0, 1),
    Op.GET: (0, 2),
    Op.REDUCE_FROM_PEERS: (1, 2),
}
_SAMPLE_STEPS = 4096  # steps per rank from which rank 0 represents all ranks


def predict_us(
    schedule: Schedule,
    latency_steps: int,
    block_bytes: int,
    dtype: DType,
    round_bytes: int,
    shape: CommunicatorShape,
    constants: CpuConstants,
) -> float:
    """Return the predicted time of an operation in microseconds.

    Args:
        latency_steps: Messages in sequence on the critical path.
        block_bytes: Bytes of a block.
        round_bytes: Bytes of a block that one round moves.
    """
    chunk = min(chunk_bytes(block_bytes, schedule.parts, dtype.itemsize), max(block_bytes, 1))
    rounds = -(-chunk // round_bytes) if block_bytes else 1
    whole = sum(len(steps) for steps in schedule.channels[0]) <= _SAMPLE_STEPS
    ranks = range(schedule.nranks) if whole else range(1)
    works = [
        _work_us(schedule, rank, chunk, block_bytes, rounds, shape, constants) for rank in ranks
    ]
    total = sum(works) * schedule.nranks / len(works)
    cores = schedule.nranks / max(1.0, shape.ranks_per_core)
    network = _host_bytes(schedule, ranks, chunk, shape) / constants.network
    between_hosts = math.ceil(latency_steps * _remote_share(schedule, ranks, shape))
    latency = _latency_us(latency_steps, between_hosts, rounds, shape, constants)
    return max(max(works), total / cores) + network + latency


def _remote_share(schedule: Schedule, ranks: Sequence[int], shape: CommunicatorShape) -> float:
    """Return the share of the messages to these ranks that come from other hosts."""
    received = remote = 0
    for channel in schedule.channels if shape.hosts else ():
        for rank in ranks:
            for step in channel[rank]:
                for peer in (step.recv_peer, *step.peers):
                    received += peer is not None and peer != rank
                    remote += shape.remote(rank, peer)
    return remote / received if received else 0.0


def _latency_us(
    latency_steps: int,
    between_hosts: int,
    rounds: int,
    shape: CommunicatorShape,
    constants: CpuConstants,
) -> float:
    """Return the time of the messages in sequence, of which some are ``between_hosts``."""
    if between_hosts:
        network = between_hosts * rounds * constants.network_latency_us
        return network + _latency_us(latency_steps - between_hosts, 0, rounds, shape, constants)
    # Rounds are pipelined if every rank has a core. If ranks share cores, a waiting rank yields to
    # another one every few messages.
    if shape.ranks_per_core > 1:
        return latency_steps * constants.switch_us * (1 + rounds / 4)
    return latency_steps * constants.latency_us


def _host_bytes(
    schedule: Schedule, ranks: Sequence[int], chunk: int, shape: CommunicatorShape
) -> int:
    """Return the bytes that the busiest host sends to others; ``ranks`` represent all."""
    if not shape.hosts:
        return 0
    sent: dict[int, int] = {}
    for channel in schedule.channels:
        for rank in ranks:
            for step in channel[rank]:
                if step.op.sends and shape.remote(rank, step.send_peer):
                    host = shape.hosts[rank]
                    sent[host] = sent.get(host, 0) + step.chunks * chunk
    most = max(sent.values(), default=0)
    if len(ranks) == schedule.nranks:
        return most
    return most * schedule.nranks // len(set(shape.hosts))


def _work_us(
    schedule: Schedule,
    rank: int,
    chunk: int,
    block_bytes: int,
    rounds: int,
    shape: CommunicatorShape,
    constants: CpuConstants,
) -> float:
    """Return the time of one rank's steps without waiting."""
    blocks = max(schedule.input_chunks, schedule.output_chunks) / schedule.parts
    cached = 1 / constants.at(constants.copy, min(256 << 10, 2.0 * chunk))
    extra = max(0.0, 1 / constants.at(constants.copy, 2.0 * block_bytes * blocks) - cached)
    folding = max(0.0, 1 / constants.at(constants.fold, 2.0 * chunk) - cached)
    slots = users = copies = reduced = remote = steps = 0
    before, before_sent = None, False
    for channel in schedule.channels:
        for step in channel[rank]:
            steps += 1
            nbytes = step.chunks * chunk
            additions = max(1, len(step.peers) - 1)
            slot, user = _PASSES.get(step.op, (0, 0))
            sends = step.op is Op.SEND and not shape.remote(rank, step.send_peer)
            if sends and before_sent and step.src == before and nbytes >= layout.FANOUT_FROM:
                slot, user = 0, 1  # all receivers read one slot; 1: in the cache, as below
            before_sent = sends
            slots += slot * additions * nbytes
            in_cache = step.src is not None and step.src == before and step.op is not Op.COPY
            users += (user - in_cache) * nbytes
            before = step.src
            if step.op is Op.COPY:
                copies += nbytes
            if step.op.reduces:
                reduced += additions * nbytes
            peers = (step.send_peer, step.recv_peer, *step.peers)
            remote += sum(shape.remote(rank, peer) for peer in peers)
    time = (slots + copies) * cached + users * extra + reduced * folding
    time += remote * rounds * constants.network_message_us
    return time + steps * rounds * constants.step_us


def default_block_bytes(collective: Collective, nbytes: int, nranks: int) -> int:
    """Return the bytes of a block if the whole buffer, as nccl-tests counts it, has ``nbytes``."""
    return nbytes // max(1, input_blocks(collective, nranks), output_blocks(collective, nranks))
