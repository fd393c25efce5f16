"""Choice of algorithm and protocol by size, from values that all ranks share.

``choose`` returns a ``DevicePlan``. Thresholds were measured on one host with H200 GPUs and NVLink
(docs/measurements.md); an algorithm or protocol that the user names takes precedence.
"""

from __future__ import annotations

from dataclasses import replace

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda import layout
from miraccl.executor.cuda.launch_shape import fanout_shape, packet_shape, simple_shape
from miraccl.executor.cuda.plan import (
    ROOTED,
    TREES,
    DevicePlan,
    Request,
    check_protocol,
    frame_of,
    has_packets,
    vectors_of,
)
from miraccl.executor.cuda.source import Framing
from miraccl.types import Collective

KIB, MIB = layout.KIB, layout.MIB
UNREACHABLE_BYTES = 1 << 62
#: Block sizes up to which one exchange between all ranks is fastest, by number of ranks: of
#: all_reduce, of rooted operations, and for more ranks than listed.
ONE_SHOT_MAX_BYTES = {3: 256 * KIB, 4: 128 * KIB}
ROOTED_ONE_SHOT_MAX_BYTES = {2: MIB, 3: 256 * KIB, 4: 256 * KIB}
LARGE_GROUP_ONE_SHOT_MAX_BYTES = 64 * KIB
#: Block sizes from which links carry more between neighbours than between all pairs:
#: (up to 4 GPUs, more GPUs).
RING_MIN_BYTES = {
    Collective.ALL_REDUCE: (64 * MIB, 32 * MIB),
    Collective.ALL_GATHER: (64 * MIB, 8 * MIB),
    Collective.REDUCE_SCATTER: (64 * MIB, 8 * MIB),
}
#: Up to this block size LL packets are faster than masked ones, for data other than float sums.
LL_MAX_BYTES = 4 * KIB
#: The same with fanout kernels, which do not exist for masked packets.
LL_FANOUT_MAX_BYTES = 64 * KIB
#: Block sizes from which protocol Simple is faster than packets.
SIMPLE_MIN_BYTES = {"chain": 512 * MIB, "ring": 8 * MIB}
#: Block size up to which trees broadcast or reduce faster than a chain, on more than 4 GPUs.
TREE_MAX_BYTES = 512 * KIB


def choose(request: Request) -> DevicePlan:
    """Return the plan for a request; raise ``InvalidUsage`` if the requested combination does not
    exist.
    """
    check_protocol(request.proto)
    algo, algo_reason = (request.algo, request.why) if request.algo else _algorithm(request)
    proto, proto_reason = (
        (request.proto, "asked for") if request.proto else _protocol(request, algo)
    )
    if proto != "simple" and not has_packets(request, algo):
        proto, proto_reason = "simple", f"{algo} has no packet kernel for this size"
    plan = packet_shape(request, algo, proto) if proto != "simple" else simple_shape(request, algo)
    limit = (
        f"; at most {request.multiprocessors} multiprocessors (CTA policy, MIRACCL_SMS)"
        if request.packed
        else ""
    )
    tiles = (
        "; double-buffered: tiles alternate between the buffer halves"
        if plan.double_buffered
        else ""
    )
    return replace(plan, reason=f"{algo_reason}; {proto}: {proto_reason}{tiles}{limit}")


def _algorithm(request: Request) -> tuple[str, str]:
    """Return (algorithm, reason)."""
    match request.collective:
        case Collective.ALL_REDUCE if request.nranks == 2:
            return "one_shot", "one exchange between two ranks"
        case collective if request.block_bytes >= ring_min_bytes(request):
            least = ring_min_bytes(request) // MIB
            return (
                "ring",
                f"{collective.label} of blocks from {least} MiB on, where links carry more "
                "between neighbours than between all pairs",
            )
        case Collective.ALL_REDUCE:
            return _by_size(
                request,
                "two_shot",
                ONE_SHOT_MAX_BYTES.get(request.nranks, LARGE_GROUP_ONE_SHOT_MAX_BYTES),
            )
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER | Collective.ALL_TO_ALL:
            return "one_shot", "blocks of all sizes"
        case Collective.REDUCE if request.ordered:
            return "one_shot", "adds in the order of the ranks (deterministic)"
        case Collective.BROADCAST | Collective.REDUCE:
            large = (
                TREES
                if may_use_trees(request) and request.block_bytes <= TREE_MAX_BYTES
                else "chain"
            )
            return _by_size(
                request,
                large,
                ROOTED_ONE_SHOT_MAX_BYTES.get(request.nranks, LARGE_GROUP_ONE_SHOT_MAX_BYTES),
            )
        case _:
            raise InvalidUsage(
                f"cannot run {request.collective.label} on GPU memory: there is no algorithm for it"
            )


def _by_size(request: Request, large: str, threshold: int) -> tuple[str, str]:
    if request.block_bytes <= threshold:
        return "one_shot", f"blocks of up to {threshold // KIB} KiB on {request.nranks} GPUs"
    return large, f"blocks of more than {threshold // KIB} KiB on {request.nranks} GPUs"


def may_round_at_hops(request: Request) -> bool:
    """Return True if a sum may use the ring without being asked to.

    A ring rounds to the data type at every hop, as NCCL does.
    """
    return not request.ordered and request.dtype.itemsize > 1 and request.proto in ("", "simple")


def may_use_trees(request: Request) -> bool:
    """Return True if trees are chosen at some size without being requested."""
    return request.collective in ROOTED and request.nranks > 4 and not request.ordered


def ring_min_bytes(request: Request) -> int:
    """Return the block size in bytes from which the ring is chosen unless another algorithm is
    requested.
    """
    up_to_4, more = RING_MIN_BYTES.get(request.collective, (UNREACHABLE_BYTES, UNREACHABLE_BYTES))
    if (
        request.nranks == 2
        or request.proto not in ("", "simple")
        or (request.reduces and not may_round_at_hops(request))
    ):
        return UNREACHABLE_BYTES
    return up_to_4 if request.nranks <= 4 else more


def _protocol(request: Request, algo: str) -> tuple[str, str]:
    """Return (protocol, reason)."""
    if request.block_bytes >= SIMPLE_MIN_BYTES.get(algo, UNREACHABLE_BYTES):
        return (
            "simple",
            f"from {SIMPLE_MIN_BYTES[algo] // MIB} MiB on, large slots carry more than packets",
        )
    if frame_of(request, "ll128") is not Framing.MASK:
        return "ll128", "words of float sums are their own flags"
    fanout = fanout_shape(
        request, algo, "ll", Framing.PAIR, vectors_of(request, algo, Framing.PAIR)
    )
    most = LL_FANOUT_MAX_BYTES if fanout else LL_MAX_BYTES
    if request.block_bytes <= most:
        return "ll", f"up to {most // KIB} KiB, flags cost less than masks"
    return "ll128", f"above {most // KIB} KiB, masks cost less than flags"
