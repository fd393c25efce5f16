"""How the pieces of an operation lie in a bank of the symmetric memory, as packet kernels have them (docs/gpu-kernels.md has a picture).

A bank is slots of equal size, then the words of those kernels whose data go one way only.  Sizes are in places for packets, of 16 bytes.
"""

from __future__ import annotations

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.plan import ROOTED, TREES, Request, rounds_of
from miraccl.executor.cuda.source import Framing
from miraccl.types import Collective


def half_packets() -> int:
    """Of a bank."""
    return layout.HALF_BYTES // 16


def min_slots(algo: str, nranks: int) -> int:
    """Slots that an operation of more pieces than slots needs at least. A ring is wrong with fewer (source/ring.cuh). Of the others two are
    enough, but pieces are to follow one another closely: in shots one is pushed ahead, in trees and chains some are on their way."""
    return nranks + 1 if algo == "ring" else 4


def slot_packets(request: Request, algo: str, tile: int, frame: Framing) -> int:
    """Places of a slot for pieces of ``piece`` packets: room for each message that a piece brings to a rank."""
    if algo == "chain":
        return frame.run_packets(tile)
    if algo == TREES:  # from two children, from the parent
        return frame.run_packets(tile) * {Collective.ALL_REDUCE: 3, Collective.REDUCE: 2}.get(
            request.collective, 1
        )
    return frame.run_packets(tile) * rounds_of(request, algo) * (request.nranks - 1)


def ack_senders(request: Request, algo: str) -> int:
    """Ranks that a rank hears acks from, one word per warp (source/acks.cuh): those it sends to, where data go one way only."""
    if request.collective not in ROOTED or algo not in ("chain", TREES):
        return 0
    return 2 if algo == TREES and request.collective is Collective.BROADCAST else 1


def control_packets(request: Request, algo: str, tile: int) -> int:
    """Places behind the slots: acks, and hellos where there are any."""
    acks = ack_senders(request, algo)
    return acks * (tile // 32) + layout.MAX_RANKS if acks else 0
