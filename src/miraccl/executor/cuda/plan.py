"""What is to be run (``Request``), how (``DevicePlan``), and which kernel that is.

``choice`` decides about algorithm and protocol, ``launch_shape`` about blocks and threads, ``bank`` says what has room.
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
#: algorithms that are taken at some size, or have packet kernels
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
    """One way to run a collective. ``blocks`` of ``threads`` threads, ``min_blocks`` on a multiprocessor at least; each thread handles
    ``unroll`` vectors of 16 (LL: 8) bytes at a time; ``ahead`` pieces are pushed ahead where the operation has several (0: as many as
    memory allows); ``fan`` threads share a packet; ``double_buffered``: pieces are equal and lie in the two banks in turns (source/double_buffered.cuh)."""

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
        """Packets that one rank sends another at a time."""
        return self.blocks * self.threads * self.unroll // self.fanout

    @property
    def uses_packets(self) -> bool:
        """Whether a packet kernel runs it, not the kernel ``steps``."""
        return self.proto in ("ll", "ll128")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be run. ``count`` are the elements of a block (``schedule.ir``), ``multiprocessors`` those that kernels may fill."""

    collective: Collective
    dtype: DType
    op: RedOp
    count: int
    nranks: int
    root: int = 0
    algo: str = ""
    proto: str = ""
    multiprocessors: int = 128
    packed: bool = False  # on as few multiprocessors as are filled, for others may want the rest
    scalar: float = 1.0  # of a pre-multiplied sum; this rank's
    why: str = "asked for"  # why there is an ``algo``
    ordered: bool = False  # sums are to be taken in the order of the ranks

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
    """Whether there is a packet kernel: one_shot of rooted operations only where all their pieces have room at once."""
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
    """How packets of a protocol are framed: in LL128, sums of floats have a NaN to spare, other data are masked."""
    if proto != "ll128":
        return Framing.PAIR
    return Framing.WORD if request.reduces and can_spare_a_nan(request.dtype) else Framing.MASK


def rounds_of(request: Request, algo: str) -> int:
    """How often a packet's place is needed per peer: once, or twice where sums are sent on."""
    return 2 if request.collective is Collective.ALL_REDUCE and algo in ("two_shot", "ring") else 1


def vectors_of(request: Request, algo: str, frame: Framing) -> int:
    """Packets of a block, or of a rank's chunk of it (``work_of`` of source/packets.cuh)."""
    vectors = frame.vectors(request.block_bytes)
    if rounds_of(request, algo) == 2:
        vectors = -(-vectors // request.nranks)
        if frame is Framing.MASK:
            vectors = -(-vectors // 32) * 32
    return vectors


def mode_of(request: Request, algo: str) -> str:
    """The mode of the packet kernel of an algorithm (``source.PACKET_MODES``)."""
    if rounds_of(request, algo) == 2:
        return algo
    return request.collective.label + {"chain": "_chain", TREES: "_tree"}.get(algo, "")


def kernel_spec(plan: DevicePlan, request: Request) -> KernelSpec:
    """What to compile for a plan."""
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
