"""Requests (``Request``), plans for them (``DevicePlan``), and the kernel of a plan.

``choice`` decides on algorithm and protocol, ``launch_shape`` on blocks and threads,
``buffer_halves`` on the space that is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.source import (
    PACKET_MODES,
    TILED_SHOTS,
    Framing,
    KernelSpec,
    can_spare_a_nan,
)
from miraccl.types import Collective, DType, RedOp

SYMMETRIC = (
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
)
ROOTED = (Collective.BROADCAST, Collective.REDUCE)
TREES = "double_binary_tree"
#: Algorithms that are chosen at some size or have packet kernels.
ALGORITHMS = {
    Collective.ALL_REDUCE: ("one_shot", "two_shot", "ring", TREES),
    Collective.REDUCE_SCATTER: ("one_shot", "ring"),
    Collective.ALL_GATHER: ("one_shot", "ring"),
    Collective.ALL_TO_ALL: ("one_shot",),
    Collective.BROADCAST: ("one_shot", "chain", TREES),
    Collective.REDUCE: ("one_shot", "chain", TREES),
}


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """One way to run a collective.

    Attributes:
        blocks: Blocks of ``threads`` threads, at least ``min_blocks`` per multiprocessor.
        unroll: Vectors of 16 (LL: 8) bytes that a thread handles at a time.
        lookahead: Tiles sent ahead if the operation has several; 0: as many as memory allows.
        fanout: Threads that share a packet.
        double_buffered: Tiles are equal and alternate between the two buffer halves
            (source/double_buffered.cuh).
    """

    algo: str
    proto: str
    blocks: int
    threads: int
    unroll: int
    min_blocks: int = 1
    lookahead: int = 0
    fanout: int = 1
    double_buffered: bool = False
    reason: str = ""

    @property
    def tile(self) -> int:
        """Packets that one rank sends to another per tile."""
        return self.blocks * self.threads * self.unroll // self.fanout

    @property
    def uses_packets(self) -> bool:
        """True for a packet kernel, False for the kernel ``steps``."""
        return self.proto in ("ll", "ll128")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Operation to run.

    ``count``: elements of a block (``schedule.ir``); ``multiprocessors``: number that kernels may
    use.
    """

    collective: Collective
    dtype: DType
    op: RedOp
    count: int
    nranks: int
    root: int = 0
    algo: str = ""
    proto: str = ""
    multiprocessors: int = 128
    packed: bool = False  # fill few multiprocessors and leave the rest to other work
    scalar: float = 1.0  # this rank's factor of a pre-multiplied sum
    why: str = "asked for"  # reason for ``algo``
    ordered: bool = False  # add in the order of the ranks

    @property
    def block_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def reduces(self) -> bool:
        return self.collective.reduces


def check_protocol(proto: str) -> None:
    if proto not in ("", "simple", "ll", "ll128"):
        raise InvalidUsage(
            f"protocol {proto!r} does not exist on GPU memory; allowed are simple, ll and ll128"
        )


def has_packets(request: Request, algo: str) -> bool:
    """Return True if there is a packet kernel; for rooted one_shot only if all tiles have slots at
    once.
    """
    if algo == TREES:
        return algo in ALGORITHMS[request.collective]
    if request.collective in ROOTED:
        return algo == "chain" or (
            algo == "one_shot"
            and 5 * request.block_bytes * (request.nranks - 1) <= layout.HALF_BYTES
        )
    if request.collective is Collective.ALL_REDUCE and algo == "ring":
        return True
    return request.collective in SYMMETRIC and algo in ("one_shot", "two_shot")


def frame_of(request: Request, proto: str) -> Framing:
    """Return the framing of a protocol's packets.

    LL128 uses a spare NaN for sums of floats and masks for other data.
    """
    if proto != "ll128":
        return Framing.PAIR
    return Framing.WORD if request.reduces and can_spare_a_nan(request.dtype) else Framing.MASK


def rounds_of(request: Request, algo: str) -> int:
    """Return the number of runs that a packet needs per peer: 2 if sums are sent on, else 1."""
    return 2 if request.collective is Collective.ALL_REDUCE and algo in ("two_shot", "ring") else 1


def vectors_of(request: Request, algo: str, frame: Framing) -> int:
    """Return the packets of a block, or of a rank's chunk of it (``work_of`` of
    source/packets.cuh).
    """
    vectors = frame.vectors(request.block_bytes)
    if rounds_of(request, algo) == 2:
        vectors = -(-vectors // request.nranks)
        if frame is Framing.MASK:
            vectors = -(-vectors // 32) * 32
    return vectors


def mode_of(request: Request, algo: str) -> str:
    """Return the packet kernel's mode for an algorithm (``source.PACKET_MODES``)."""
    if rounds_of(request, algo) == 2:
        return algo
    return request.collective.label + {"chain": "_chain", TREES: "_tree"}.get(algo, "")


def kernel_spec(plan: DevicePlan, request: Request) -> KernelSpec:
    """Return the kernel to compile for a plan."""
    mode = mode_of(request, plan.algo) if plan.uses_packets else ""
    frame = frame_of(request, plan.proto) if plan.uses_packets else Framing.WORD
    single = (
        PACKET_MODES.get(mode) is TILED_SHOTS and vectors_of(request, plan.algo, frame) <= plan.tile
    )
    return KernelSpec(
        family="packets" if plan.uses_packets else "steps",
        mode=mode,
        nranks=request.nranks,
        dtype=request.dtype if request.reduces else DType.UINT8,
        op=request.op if request.reduces else RedOp.SUM,
        reduces=request.reduces,
        frame=frame,
        single_tile=single,
        fanout=plan.fanout,
        double_buffered=plan.double_buffered and not single,
        threads=plan.threads,
        unroll=plan.unroll,
        min_blocks=plan.min_blocks,
    )
