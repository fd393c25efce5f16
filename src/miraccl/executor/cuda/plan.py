"""Which kernel, in which shape, for which size: decided from what all ranks know alike.

``choose`` returns a ``DevicePlan``: algorithm, protocol and the shape of the launch.  Thresholds were measured on one host with H200
GPUs and NVLink (docs/performance.md says how); an algorithm or protocol that the user names wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.source import PACKET_MODES, SHOTS, Frame, KernelSpec, can_spare_a_nan, fan_of
from miraccl.types import Collective, DType, RedOp

KIB, MIB = layout.KIB, layout.MIB


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """One way to run a collective. ``blocks`` of ``threads`` threads; each thread handles ``unroll`` vectors of 16 (LL: 8) bytes at a time;
    ``ahead`` pieces are pushed ahead where the operation has several (0: as many as memory allows); ``fan`` threads share a packet."""

    algo: str
    proto: str
    blocks: int
    threads: int
    unroll: int
    min_blocks: int = 1
    ahead: int = 0
    fan: int = 1
    reason: str = ""

    @property
    def piece(self) -> int:
        """Packets that one rank sends another at a time."""
        return self.blocks * self.threads * self.unroll // self.fan

    @property
    def packets(self) -> bool:
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
    why: str = "asked for"  # there is an ``algo``
    ordered: bool = False  # sums are to be taken in the order of the ranks

    @property
    def block_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def reduces(self) -> bool:
        return self.collective.reduces


_SYMMETRIC = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
_ROOTED = (Collective.BROADCAST, Collective.REDUCE)


TREES = "double_binary_tree"
#: algorithms that have packet kernels, or are taken at some size
KERNELS = {
    Collective.ALL_REDUCE: ("one_shot", "two_shot", "ring", TREES),
    Collective.REDUCE_SCATTER: ("one_shot", "ring"),
    Collective.ALL_GATHER: ("one_shot", "ring"),
    Collective.ALL_TO_ALL: ("one_shot",),
    Collective.BROADCAST: ("one_shot", "chain", TREES),
    Collective.REDUCE: ("one_shot", "chain", TREES),
}


def has_packets(request: Request, algo: str) -> bool:
    """Whether there is a packet kernel: one_shot of rooted operations only where all their pieces have room at once."""
    if algo == TREES:
        return algo in KERNELS[request.collective]
    if request.collective in _ROOTED:
        return algo == "chain" or (algo == "one_shot" and 5 * request.block_bytes * (request.nranks - 1) <= layout.BANK_BYTES)
    if request.collective is Collective.ALL_REDUCE and algo == "ring":
        return True
    return request.collective in _SYMMETRIC and algo in ("one_shot", "two_shot")


def frame_of(request: Request, proto: str) -> Frame:
    """How packets of a protocol are framed: in LL128, sums of floats have a NaN to spare, other data are masked."""
    if proto != "ll128":
        return Frame.PAIR
    return Frame.WORD if request.reduces and can_spare_a_nan(request.dtype) else Frame.MASK


def check_protocol(proto: str) -> None:
    if proto not in ("", "simple", "ll", "ll128"):
        raise InvalidUsage(f"protocol {proto!r} does not exist on GPU memory; allowed are simple, ll and ll128")


def choose(request: Request) -> DevicePlan:
    """The plan for a request, or ``InvalidUsage`` where what was asked for does not exist."""
    check_protocol(request.proto)
    algo, why_algo = (request.algo, request.why) if request.algo else _algorithm(request)
    proto, why_proto = (request.proto, "asked for") if request.proto else _protocol(request, algo)
    if proto != "simple" and not has_packets(request, algo):
        proto, why_proto = "simple", f"packets of {algo} have no kernel, or no room"
    plan = _packet_shape(request, algo, proto) if proto != "simple" else _simple_shape(request, algo)
    few = f"; on at most {request.multiprocessors} multiprocessors (CTA policy, MIRACCL_SMS)" if request.packed else ""
    return replace(plan, reason=f"{why_algo}; {proto}: {why_proto}{few}")


def _algorithm(request: Request) -> tuple[str, str]:
    """(algorithm, why)."""
    match request.collective:
        case Collective.ALL_REDUCE if request.nranks == 2:
            return "one_shot", "two ranks, which one exchange is enough for"
        case collective if request.block_bytes >= ring_from(request):
            least = ring_from(request) // MIB
            return "ring", f"{collective.label} of blocks from {least} MiB on: links carry more between neighbours than between all pairs"
        case Collective.ALL_REDUCE:
            return _by_size(request, "two_shot", ONE_SHOT_UP_TO.get(request.nranks, 64 * KIB))
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return "one_shot", "blocks of all sizes"
        case Collective.REDUCE if request.ordered:
            return "one_shot", "needed for the order of the ranks (deterministic)"
        case Collective.BROADCAST | Collective.REDUCE:
            large = TREES if may_use_trees(request) and request.block_bytes <= TREE_UP_TO else "chain"
            return _by_size(request, large, ROOTED_ONE_SHOT_UP_TO.get(request.nranks, 64 * KIB))
        case _:
            raise InvalidUsage(f"no algorithm for {request.collective.label} on GPU memory")


def may_round_at_hops(request: Request) -> bool:
    """Whether a sum may go around a ring that nobody asked for: it is rounded to the data type at every hop, as with NCCL."""
    return not request.ordered and request.dtype.itemsize > 1 and request.proto in ("", "simple")


def may_use_trees(request: Request) -> bool:
    """Whether trees are taken at some size without being asked for."""
    return request.collective in _ROOTED and request.nranks > 4 and not request.ordered


def ring_from(request: Request) -> int:
    """Bytes of a block from which the ring is taken, unless another algorithm is asked for."""
    if request.collective is Collective.ALL_REDUCE:
        least = 64 * MIB if request.nranks <= 4 else 32 * MIB
    elif request.collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        least = 64 * MIB if request.nranks <= 4 else 8 * MIB
    else:
        return NEVER
    if request.nranks == 2 or request.proto not in ("", "simple") or (request.reduces and not may_round_at_hops(request)):
        return NEVER
    return least


def _by_size(request: Request, large: str, threshold: int) -> tuple[str, str]:
    if request.block_bytes <= threshold:
        return "one_shot", f"blocks of up to {threshold // KIB} KiB on {request.nranks} GPUs"
    return large, f"blocks of more than {threshold // KIB} KiB on {request.nranks} GPUs"


ONE_SHOT_UP_TO = {2: 1 << 62, 3: 256 * KIB, 4: 128 * KIB}
ROOTED_ONE_SHOT_UP_TO = {2: MIB, 3: 256 * KIB, 4: 256 * KIB}
#: bytes of a block that is not a sum of floats: pairs spare the work of masking, beyond they cost more than it
LL_UP_TO = 4 * KIB
#: the same where threads share packets, which masks do not allow
LL_FANS_UP_TO = 64 * KIB
#: bytes of a block from which large slots carry more than packets
SIMPLE_FROM = {"chain": 512 * MIB, "ring": 8 * MIB}
#: bytes of a block that trees broadcast or reduce faster than a chain, on more than 4 GPUs
TREE_UP_TO = 512 * KIB
NEVER = 1 << 62


def _protocol(request: Request, algo: str) -> tuple[str, str]:
    """(protocol, why)."""
    if request.block_bytes >= SIMPLE_FROM.get(algo, 1 << 62):
        return "simple", f"from {SIMPLE_FROM[algo] // MIB} MiB on, a {algo} carries more in large slots than by packets"
    if frame_of(request, "ll128") is not Frame.MASK:
        return "ll128", "every word of floats that are added up is its own flag"
    fans = _fans(request, algo, "ll", Frame.PAIR, vectors_of(request, algo, Frame.PAIR))
    most = LL_FANS_UP_TO if fans else LL_UP_TO
    if request.block_bytes <= most:
        return "ll", f"up to {most // KIB} KiB, flags cost less than masks"
    return "ll128", f"above {most // KIB} KiB, masks cost less than flags"


#: (packets of a block or chunk up to, blocks at most, threads, unroll, blocks per multiprocessor); measured on H200, docs/performance.md
Shapes = tuple[tuple[int, int, int, int, int], ...]
PAIR_SHAPES: Shapes = (  # one_shot between two
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (65536, 256, 256, 1, 4),
    (1 << 20, 512, 256, 1, 4),
    (1 << 62, 512, 256, 2, 4),
)
ONE_SHOT_SHAPES: Shapes = (
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (1 << 19, 128, 512, 1, 1),
    (1 << 62, 512, 256, 1, 4),
)
MASK_SHAPES: Shapes = (  # and two_shot
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (1 << 62, 128, 512, 1, 1),
)
#: on more than 4 GPUs, where each packet is work for many peers: more multiprocessors with fewer threads
MANY_SHAPES: Shapes = (
    (4096, 64, 64, 1, 1),
    (8192, 128, 64, 1, 1),
    (16384, 128, 128, 1, 1),
    (1 << 17, 128, 256, 1, 1),
    (1 << 62, 128, 384, 1, 1),
)
MANY_TWO_SHOT_SHAPES: Shapes = (
    *MANY_SHAPES[:3],
    (32768, 128, 256, 1, 1),
    (65536, 128, 512, 1, 1),
    (1 << 62, 128, 256, 1, 1),
)
CHAIN_SHAPES: Shapes = (
    (32768, 128, 256, 1, 1),
    (1 << 21, 512, 256, 1, 4),
    (1 << 62, 512, 256, 2, 4),
)
RING_SHAPES: Shapes = ((4096, 64, 64, 1, 1), (1 << 62, 128, 256, 1, 1))
TREE_SHAPES: Shapes = (  # as many threads as have registers for the packets of three neighbours
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (65536, 256, 256, 1, 2),
    (1 << 62, 256, 256, 2, 2),
)
#: algorithms whose shapes are the same for all collectives and frames
_SHAPES = {"ring": RING_SHAPES, "chain": CHAIN_SHAPES, TREES: TREE_SHAPES}


def _shapes(algo: str, request: Request, frame: Frame) -> Shapes:
    if algo in _SHAPES:
        return _SHAPES[algo]
    if rounds_of(algo, request) == 2:
        return MASK_SHAPES if request.nranks <= 4 else MANY_TWO_SHOT_SHAPES
    if request.nranks == 2:
        return PAIR_SHAPES
    if request.nranks > 4:
        return MANY_SHAPES
    return MASK_SHAPES if frame is Frame.MASK else ONE_SHOT_SHAPES


def rounds_of(algo: str, request: Request) -> int:
    """How often a packet's place is needed per peer: once, or twice where sums are sent on."""
    return 2 if request.collective is Collective.ALL_REDUCE and algo in ("two_shot", "ring") else 1


def least_slots(algo: str, nranks: int) -> int:
    """Slots below which pieces cannot follow one another (source/pieces.cuh, ring.cuh, chain.cuh and tree.cuh say why)."""
    return nranks + 2 if algo == "ring" else 4


def slot_packets(algo: str, request: Request, piece: int, frame: Frame) -> int:
    """Places of a slot for pieces of ``piece`` packets: room for each message that a piece brings to a rank."""
    if algo == "chain":
        return frame.room(piece)
    if algo == TREES:  # from two children, from the parent
        return frame.room(piece) * {Collective.ALL_REDUCE: 3, Collective.REDUCE: 2}.get(request.collective, 1)
    return frame.room(piece) * rounds_of(algo, request) * (request.nranks - 1)


def acks_of(algo: str, request: Request) -> int:
    """Ranks that a rank hears acks from, one word per warp (source/acks.cuh): those it sends to, where data go one way only."""
    if request.collective not in _ROOTED or algo not in ("chain", TREES):
        return 0
    return 2 if algo == TREES and request.collective is Collective.BROADCAST else 1


def word_packets(algo: str, request: Request, piece: int) -> int:
    """Places behind the slots: acks, and hellos where there are any."""
    acks = acks_of(algo, request)
    return acks * (piece // 32) + layout.MAX_RANKS if acks else 0


def vectors_of(request: Request, plan_algo: str, frame: Frame) -> int:
    """Packets of a block, or of a rank's chunk of it (``work_of`` of source/packets.cuh)."""
    vectors = frame.vectors(request.block_bytes)
    if rounds_of(plan_algo, request) == 2:
        vectors = -(-vectors // request.nranks)
        if frame is Frame.MASK:
            vectors = -(-vectors // 32) * 32
    return vectors


#: threads of a block where they share packets, and blocks at most
FAN_THREADS, FAN_BLOCKS = (64, 128, 256, 512), 128


def _fans(request: Request, algo: str, proto: str, frame: Frame, vectors: int) -> DevicePlan | None:
    """The shape of the kernel in which threads share packets, where it has all packets in one piece."""
    if request.nranks < 3 or frame is Frame.MASK or PACKET_MODES.get(mode_of(algo, request)) is not SHOTS:
        return None
    fan, most = fan_of(request.nranks), min(FAN_BLOCKS, request.multiprocessors)
    for threads in FAN_THREADS:
        if vectors * fan <= most * threads:
            return DevicePlan(algo=algo, proto=proto, blocks=-(-vectors * fan // threads), threads=threads, unroll=1, fan=fan)
    return None


def _packet_shape(request: Request, algo: str, proto: str) -> DevicePlan:
    """Many small blocks for short messages, so that each multiprocessor has little to do; fuller ones where bandwidth counts."""
    frame = frame_of(request, proto)
    vectors = vectors_of(request, algo, frame)
    if fans := _fans(request, algo, proto, frame, vectors):
        return fans
    _, limit, threads, unroll, min_blocks = next(row for row in _shapes(algo, request, frame) if vectors <= row[0])
    if request.packed:  # blocks go to idle multiprocessors first: several to one stay together only as one block
        limit, threads, min_blocks = -(-limit // min_blocks), threads * min_blocks, 1
    # all blocks are on the GPU at once, and an operation of several pieces has slots enough (lower.lower_packets)
    own = threads * unroll  # packets of a block; what it needs of a bank grows with the number of blocks
    slot, words, room = slot_packets(algo, request, own, frame), word_packets(algo, request, own), layout.BANK_BYTES // 16
    most = max(1, min(limit, min_blocks * request.multiprocessors, room // (slot + words)))
    blocks = -(-vectors // own)
    if blocks > most:  # several pieces
        blocks = max(1, min(most, room // (least_slots(algo, request.nranks) * slot + words)))
    return DevicePlan(algo=algo, proto=proto, blocks=blocks, threads=threads, unroll=unroll, min_blocks=min_blocks)


def _simple_shape(request: Request, algo: str) -> DevicePlan:
    total = request.block_bytes
    blocks = max(1, min(layout.BLOCKS, request.multiprocessors, total // (16 * KIB)))
    return DevicePlan(algo=algo, proto="simple", blocks=blocks, threads=512, unroll=4)


def mode_of(algo: str, request: Request) -> str:
    """The mode of the packet kernel of an algorithm (``source.PACKET_MODES``)."""
    if rounds_of(algo, request) == 2:
        return algo
    return request.collective.label + {"chain": "_chain", TREES: "_tree"}.get(algo, "")


def kernel_spec(plan: DevicePlan, request: Request) -> KernelSpec:
    """What to compile for a plan."""
    mode = mode_of(plan.algo, request) if plan.packets else ""
    frame = frame_of(request, plan.proto) if plan.packets else Frame.WORD
    return KernelSpec(
        family="packets" if plan.packets else "steps",
        mode=mode,
        nranks=request.nranks,
        dtype=request.dtype if request.reduces else DType.UINT8,
        op=request.op if request.reduces else RedOp.SUM,
        reduces=request.reduces,
        frame=frame,
        single=PACKET_MODES.get(mode) is SHOTS and vectors_of(request, plan.algo, frame) <= plan.piece,
        fan=plan.fan,
        threads=plan.threads,
        unroll=plan.unroll,
        min_blocks=plan.min_blocks,
    )
