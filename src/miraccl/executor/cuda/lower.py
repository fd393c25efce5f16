"""Lowering of a plan to the arguments of a launch.

Packet algorithms (``plan.ALGORITHMS``) are recognised by name: their kernels are the schedules with
send and receive fused, one thread per packet. All other schedules, and these in protocol Simple,
are lowered step by step (``schedules``). The result depends on rank and size; the launch fills in
the pointers.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, replace

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.buffer_halves import (
    control_packets,
    half_packets,
    min_slots,
    slot_packets,
)
from miraccl.executor.cuda.plan import TREES, DevicePlan, Request, frame_of, vectors_of
from miraccl.schedule.algos import double_binary_tree
from miraccl.schedule.reduction import NUMPY_DTYPE
from miraccl.types import Collective, RedOp

DOUBLE_BUFFERED_MAX_BYTES = 1 << 30  # the kernel counts bytes in 32 bits
DEFAULT_LOOKAHEAD = 2  # tiles, if a half holds all of them: more only delays the first receive
SCALE_RANKS = 2  # ranks for which the kernel ``scale`` is compiled: kernels need at least two


@dataclass(frozen=True, kw_only=True)
class CommArgs:
    """Fields of ``struct Args`` common to all launches of a communicator (NCCL's
    ``ncclKernelComm``).

    Addresses of the symmetric memory (``transport.cuda_p2p``) and of the host words, and the
    deadline. ``order``: order of the ring, if not that of the ranks. ``direct``: every rank
    addresses every other's device memory.
    """

    rank: int
    own: int
    inboxes: tuple[int, ...]
    outboxes: tuple[int, ...]
    host: int
    timeout_ns: int
    order: tuple[int, ...] = ()
    direct: bool = True


def scalar_bits(request: Request) -> int:
    """Return the scalar of a pre-multiplied sum, as accumulated, zero-extended to 8 bytes."""
    if request.op is not RedOp.PREMUL_SUM:
        return 0
    kind = (
        np.dtype(np.float32) if request.dtype.accumulates_in_float32 else NUMPY_DTYPE[request.dtype]
    )
    return int.from_bytes(kind.type(request.scalar).tobytes(), "little")


def plan_signature(plan: DevicePlan, request: Request, position: tuple[int, ...] = ()) -> int:
    """Return a 32-bit hash of the operation and its plan, on which all ranks must agree.

    ``position``: window position of the buffers.
    """
    fields = (request.collective, request.dtype, request.op, request.count, request.root)
    shape = (
        plan.algo,
        plan.proto,
        plan.blocks,
        plan.threads,
        plan.unroll,
        plan.fanout,
        plan.double_buffered,
    )
    return zlib.crc32(repr((*map(int, fields), *shape, *position)).encode())


def needed_ranks(request: Request, rank: int) -> int:
    """Return the ranks without which an operation cannot end on ``rank``, encoded as in op records.

    The result does not depend on the algorithm.
    """
    if request.collective is Collective.BROADCAST:
        return 0 if rank == request.root else 1 << request.root
    return (
        layout.NEEDS_ALL
        if request.collective is not Collective.REDUCE or rank == request.root
        else 0
    )


def pack_args(
    comm_args: CommArgs,
    *,
    count: int,
    root: int = 0,
    nslots: int = 1,
    lookahead: int = 0,
    scalar: int = 0,
    signature: int = 0,
    needs: int = 0,
    trees: bytes = b"",
) -> bytearray:
    """Pack struct Args with null ``in`` and ``out``; ``needs``: result of ``needed_ranks``."""
    nranks = len(comm_args.inboxes)
    block = bytearray(layout.args_bytes(nranks))
    ring = comm_args.order or range(nranks)
    position = ring.index(comm_args.rank)
    values = {
        "count": count,
        "rank": comm_args.rank,
        "root": root,
        "nslots": nslots,
        "lookahead": lookahead,
        "timeout_ns": comm_args.timeout_ns,
        "host": comm_args.host,
        "own": comm_args.own,
        "prev": ring[position - 1],
        "next": ring[(position + 1) % nranks],
        "position": position,
        "trees": trees,
        "scalar": scalar,
        "signature": needs << 32 | signature,
    }
    for name, value in values.items():
        field = layout.ARGS[name]
        struct.pack_into("<" + field.code, block, field.offset, value)
    boxes = (*comm_args.inboxes, *comm_args.outboxes)
    struct.pack_into(f"<{len(boxes)}Q", block, layout.ARGS["own"].offset + 8, *boxes)
    return block


def lower_packets(plan: DevicePlan, request: Request, comm_args: CommArgs) -> bytearray:
    """Return the arguments of the kernel ``packets``; raise ``InvalidUsage`` if a half cannot hold
    the
    shape.
    """
    count = request.count if request.reduces else request.block_bytes
    tile = plan.tile
    frame = frame_of(request, plan.proto)
    tiles = -(-vectors_of(request, plan.algo, frame) // tile)
    slot = slot_packets(request, plan.algo, tile, frame)
    nslots = (half_packets() - control_packets(request, plan.algo, tile)) // slot
    least = 1 if plan.double_buffered else min(tiles, min_slots(plan.algo, request.nranks))
    if nslots < least:
        each = f"{plan.threads // plan.fanout} x {plan.unroll}"
        raise InvalidUsage(
            f"cannot run {plan.algo}: {plan.blocks} blocks of {each} packets do not fit "
            f"{least} times into a buffer half"
        )
    if request.collective.rooted and plan.algo == "one_shot" and tiles > nslots:
        raise InvalidUsage(
            f"cannot run {request.collective.label} on packets: "
            f"{tiles} tiles exceed the {nslots} slots"
        )
    if plan.double_buffered and request.block_bytes > DOUBLE_BUFFERED_MAX_BYTES:
        raise InvalidUsage(
            f"cannot run a double-buffered {plan.algo} of {request.block_bytes} bytes: "
            f"at most {DOUBLE_BUFFERED_MAX_BYTES} are allowed"
        )
    nslots = 1 if plan.double_buffered else min(nslots, tiles)
    return pack_args(
        comm_args,
        count=count,
        root=request.root,
        nslots=nslots,
        lookahead=_lookahead(plan, request, tiles, nslots),
        scalar=scalar_bits(request),
        signature=plan_signature(plan, request),
        needs=needed_ranks(request, comm_args.rank),
        trees=tree_links(request, comm_args) if plan.algo == TREES else b"",
    )


def _lookahead(plan: DevicePlan, request: Request, tiles: int, nslots: int) -> int:
    """Return the tiles sent ahead of the one received, by peers or by a tree's parent."""
    if plan.double_buffered:  # the kernel decides
        return 0
    trees = plan.algo == TREES
    limit = tiles - 1 if tiles <= nslots else nslots - 2 if trees else nslots // 2 - 1
    default = DEFAULT_LOOKAHEAD if tiles <= nslots else limit
    if trees:  # tiles in flight to the root and back
        default = double_binary_tree.latency(request.collective, request.nranks)
    return min(limit, plan.lookahead or default)


def tree_links(request: Request, comm_args: CommArgs) -> bytes:
    """Return this rank's links in the two trees, in ring order: two of ``layout.TREE_LINKS``."""
    order = comm_args.order or tuple(range(request.nranks))
    root = order.index(request.root) if request.collective.rooted else 0
    trees = [
        double_binary_tree.tree_positions(request.collective, position, request.nranks, root)
        for position in range(request.nranks)
    ]
    here = order.index(comm_args.rank)
    branches = b""
    for tree, (up, down) in enumerate(trees[here]):
        above, child = (
            (layout.NO_RANK, 0) if up is None else (order[up], trees[up][tree].down.index(here))
        )
        below = [order[position] for position in down] + [layout.NO_RANK] * (2 - len(down))
        branches += struct.pack(layout.TREE_LINKS, above, *below, child)
    return branches


def lower_scale(request: Request, comm_args: CommArgs) -> bytearray:
    """Return the arguments of the kernel ``scale``, which has no peers: a single rank's pre-
    multiplied
    sum.
    """
    no_peers = (0,) * SCALE_RANKS
    return pack_args(
        replace(comm_args, inboxes=no_peers, outboxes=no_peers, order=()),
        count=request.count,
        scalar=scalar_bits(request),
    )
