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
#: Rows of (maximum packets of a block or chunk, maximum blocks, threads, unroll, blocks per
#: multiprocessor).
Shapes = tuple[tuple[int, int, int, int, int], ...]
PAIR_SHAPES: Shapes = (  # one_shot between two ranks
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
MASK_SHAPES: Shapes = (  # masked packets, and two_shot
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (UNBOUNDED, 128, 512, 1, 1),
)
#: More than 4 GPUs, where each packet is work for many peers: more blocks with fewer threads.
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
TREE_SHAPES: Shapes = (  # limited by the registers for packets of three neighbours
    (4096, 64, 64, 1, 1),
    (32768, 128, 256, 1, 1),
    (65536, 256, 256, 1, 2),
    (UNBOUNDED, 256, 256, 2, 2),
)
#: Algorithms whose shapes do not depend on collective and framing.
_SHAPES = {"ring": RING_SHAPES, "chain": CHAIN_SHAPES, TREES: TREE_SHAPES}

#: Maximum tiles of a double-buffered operation; larger ones reuse slots.
MAX_DOUBLE_BUFFERED_TILES = 8
#: Of fanout kernels: threads of a block in order of preference, and maximum blocks.
FANOUT_THREADS, FANOUT_BLOCKS = (64, 128, 256, 512), 128
#: Minimum data of a block in protocol Simple.
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
    if plan := fanout_shape(request, algo, proto, frame, vectors):
        return plan
    _, limit, threads, unroll, min_blocks = next(
        row for row in _candidate_shapes(request, algo, frame) if vectors <= row[0]
    )
    if request.packed:  # several blocks would spread over idle multiprocessors: make them one block
        limit, threads, min_blocks = -(-limit // min_blocks), threads * min_blocks, 1
    # all blocks are resident at once, and an operation of several tiles has enough slots
    own = (
        threads * unroll
    )  # packets of a block; the space in a half grows with the number of blocks
    slot, control, capacity = (
        slot_packets(request, algo, own, frame),
        control_packets(request, algo, own),
        half_packets(),
    )
    max_blocks = max(
        1, min(limit, min_blocks * request.multiprocessors, capacity // (slot + control))
    )
    blocks = -(-vectors // own)
    if blocks > max_blocks:  # several tiles
        if plan := double_buffered_shape(request, algo, proto, frame, vectors):
            return plan
        blocks = max(
            1, min(max_blocks, capacity // (min_slots(algo, request.nranks) * slot + control))
        )
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
    for tiles in range(2, MAX_DOUBLE_BUFFERED_TILES + 1):
        tile = -(-vectors // tiles)
        _, limit, threads, unroll, min_blocks = next(
            row for row in LARGE_GROUP_TWO_SHOT_SHAPES if tile <= row[0]
        )
        own = threads * unroll
        max_blocks = min(
            limit,
            min_blocks * request.multiprocessors,
            half_packets() // slot_packets(request, algo, own, frame),
        )
        if (blocks := -(-tile // own)) <= max_blocks:
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
    fanout, max_blocks = fanout_threads(request.nranks), min(FANOUT_BLOCKS, request.multiprocessors)
    for threads in FANOUT_THREADS:
        if vectors * fanout <= max_blocks * threads:
            return DevicePlan(
                algo=algo,
                proto=proto,
                blocks=-(-vectors * fanout // threads),
                threads=threads,
                unroll=1,
                fanout=fanout,
            )
    return None


def simple_shape(request: Request, algo: str) -> DevicePlan:
    """Return a plan of protocol Simple: few full blocks."""
    blocks = max(
        1, min(layout.BLOCKS, request.multiprocessors, request.block_bytes // SIMPLE_BLOCK_BYTES)
    )
    return DevicePlan(algo=algo, proto="simple", blocks=blocks, threads=512, unroll=4)
