"""Blocks and threads of a launch by algorithm, protocol and size, measured on H200
(docs/measurements.md).
"""

from __future__ import annotations

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.buffer_halves import (
    control_packets,
    half_packets,
    min_slots,
    slot_packets,
)
from miraccl.executor.cuda.plan import (
    TREES,
    DevicePlan,
    Request,
    frame_of,
    mode_of,
    rounds_of,
    vectors_of,
)
from miraccl.executor.cuda.source import PACKET_MODES, TILED_SHOTS, Framing, fanout_threads

UNBOUNDED = 1 << 62
#: (packets of a block or chunk up to, blocks at most, threads, unroll, blocks per multiprocessor)
Shapes = tuple[tuple[int, int, int, int, int], ...]
PAIR_SHAPES: Shapes = (  # one_shot between two
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (65536, 256, 256, 1, 4),
    (1 << 20, 512, 256, 1, 4),
    (UNBOUNDED, 512, 256, 2, 4),
)
ONE_SHOT_SHAPES: Shapes = (
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (1 << 19, 128, 512, 1, 1),
    (UNBOUNDED, 512, 256, 1, 4),
)
MASK_SHAPES: Shapes = (  # and two_shot
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (UNBOUNDED, 128, 512, 1, 1),
)
#: on more than 4 GPUs, where each packet is work for many peers: more multiprocessors with fewer threads
LARGE_GROUP_SHAPES: Shapes = (
    (4096, 64, 64, 1, 1),
    (8192, 128, 64, 1, 1),
    (16384, 128, 128, 1, 1),
    (1 << 17, 128, 256, 1, 1),
    (UNBOUNDED, 128, 384, 1, 1),
)
LARGE_GROUP_TWO_SHOT_SHAPES: Shapes = (
    *LARGE_GROUP_SHAPES[:3],
    (32768, 128, 256, 1, 1),
    (65536, 128, 512, 1, 1),
    (UNBOUNDED, 128, 256, 1, 1),
)
CHAIN_SHAPES: Shapes = (
    (32768, 128, 256, 1, 1),
    (1 << 21, 512, 256, 1, 4),
    (UNBOUNDED, 512, 256, 2, 4),
)
RING_SHAPES: Shapes = ((4096, 64, 64, 1, 1), (UNBOUNDED, 128, 256, 1, 1))
TREE_SHAPES: Shapes = (  # as many threads as have registers for the packets of three neighbours
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (65536, 256, 256, 1, 2),
    (UNBOUNDED, 256, 256, 2, 2),
)
#: algorithms whose shapes are the same for all collectives and frames
_SHAPES = {"ring": RING_SHAPES, "chain": CHAIN_SHAPES, TREES: TREE_SHAPES}

#: of an operation; beyond, slots are used again
MAX_DOUBLE_BUFFERED_TILES = 8
#: threads of a block where they share packets, and blocks at most
FANOUT_THREADS, FANOUT_BLOCKS = (64, 128, 256, 512), 128
#: of the data for each block of protocol Simple at least
SIMPLE_BLOCK_BYTES = 16 * layout.KIB


def _candidate_shapes(request: Request, algo: str, frame: Framing) -> Shapes:
    if algo in _SHAPES:
        return _SHAPES[algo]
    if rounds_of(request, algo) == 2:
        return MASK_SHAPES if request.nranks <= 4 else LARGE_GROUP_TWO_SHOT_SHAPES
    if request.nranks == 2:
        return PAIR_SHAPES
    if request.nranks > 4:
        return LARGE_GROUP_SHAPES
    return MASK_SHAPES if frame is Framing.MASK else ONE_SHOT_SHAPES


def packet_shape(request: Request, algo: str, proto: str) -> DevicePlan:
    """Return a plan with the launch shape of a packet kernel.

    Short messages use many small blocks, so that each multiprocessor has little work; large ones
    use fuller blocks for bandwidth.
    """
    frame = frame_of(request, proto)
    vectors = vectors_of(request, algo, frame)
    if fans := fanout_shape(request, algo, proto, frame, vectors):
        return fans
    _, limit, threads, unroll, min_blocks = next(
        row for row in _candidate_shapes(request, algo, frame) if vectors <= row[0]
    )
    if (
        request.packed
    ):  # blocks go to idle multiprocessors first: several to one stay together only as one block
        limit, threads, min_blocks = -(-limit // min_blocks), threads * min_blocks, 1
    # all blocks are on the GPU at once, and an operation of several pieces has slots enough
    own = (
        threads * unroll
    )  # packets of a block; what it needs of a bank grows with the number of blocks
    slot, words, room = (
        slot_packets(request, algo, own, frame),
        control_packets(request, algo, own),
        half_packets(),
    )
    most = max(1, min(limit, min_blocks * request.multiprocessors, room // (slot + words)))
    blocks = -(-vectors // own)
    if blocks > most:  # several pieces
        if parts := double_buffered_shape(request, algo, proto, frame, vectors):
            return parts
        blocks = max(1, min(most, room // (min_slots(algo, request.nranks) * slot + words)))
    return DevicePlan(
        algo=algo, proto=proto, blocks=blocks, threads=threads, unroll=unroll, min_blocks=min_blocks
    )


def double_buffered_shape(
    request: Request, algo: str, proto: str, frame: Framing, vectors: int
) -> DevicePlan | None:
    """Return the double-buffered plan; None if the two halves in turns do not hold more than slots
    of
    tiles.
    """
    if algo != "two_shot" or request.nranks <= 4:
        return None
    for parts in range(2, MAX_DOUBLE_BUFFERED_TILES + 1):
        part = -(-vectors // parts)
        _, limit, threads, unroll, min_blocks = next(
            row for row in LARGE_GROUP_TWO_SHOT_SHAPES if part <= row[0]
        )
        own = threads * unroll
        most = min(
            limit,
            min_blocks * request.multiprocessors,
            half_packets() // slot_packets(request, algo, own, frame),
        )
        if (blocks := -(-part // own)) <= most:
            return DevicePlan(
                algo=algo,
                proto=proto,
                blocks=blocks,
                threads=threads,
                unroll=unroll,
                min_blocks=min_blocks,
                double_buffered=True,
            )
    return None


def fanout_shape(
    request: Request, algo: str, proto: str, frame: Framing, vectors: int
) -> DevicePlan | None:
    """Return the plan in which threads share packets; None if the packets exceed one tile."""
    if (
        request.nranks < 3
        or frame is Framing.MASK
        or PACKET_MODES.get(mode_of(request, algo)) is not TILED_SHOTS
    ):
        return None
    fan, most = fanout_threads(request.nranks), min(FANOUT_BLOCKS, request.multiprocessors)
    for threads in FANOUT_THREADS:
        if vectors * fan <= most * threads:
            return DevicePlan(
                algo=algo,
                proto=proto,
                blocks=-(-vectors * fan // threads),
                threads=threads,
                unroll=1,
                fanout=fan,
            )
    return None


def simple_shape(request: Request, algo: str) -> DevicePlan:
    """Return a plan of protocol Simple: few full blocks."""
    blocks = max(
        1, min(layout.BLOCKS, request.multiprocessors, request.block_bytes // SIMPLE_BLOCK_BYTES)
    )
    return DevicePlan(algo=algo, proto="simple", blocks=blocks, threads=512, unroll=4)
