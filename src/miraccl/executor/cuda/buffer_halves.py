"""How the pieces of an operation lie in a bank of the symmetric memory, as packet kernels have them (docs/gpu-kernels.md has a picture).

A bank is slots of equal size, then the words of those kernels whose data go one way only.  Sizes are in places for packets, of 16 bytes.
"""

from __future__ import annotations

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.plan import ROOTED, TREES, Request, rounds_of
from miraccl.executor.cuda.source import Frame
from miraccl.types import Collective


def places() -> int:
    """Of a bank."""
    return layout.HALF_BYTES // 16


def least_slots(algo: str, nranks: int) -> int:
    """Slots that an operation of more pieces than slots needs at least. A ring is wrong with fewer (source/ring.cuh). Of the others two are
    enough, but pieces are to follow one another closely: in shots one is pushed ahead, in trees and chains some are on their way."""
    return nranks + 1 if algo == "ring" else 4


def slot_packets(request: Request, algo: str, piece: int, frame: Frame) -> int:
    """Places of a slot for pieces of ``piece`` packets: room for each message that a piece brings to a rank."""
    if algo == "chain":
        return frame.room(piece)
    if algo == TREES:  # from two children, from the parent
        return frame.room(piece) * {Collective.ALL_REDUCE: 3, Collective.REDUCE: 2}.get(
            request.collective, 1
        )
    return frame.room(piece) * rounds_of(request, algo) * (request.nranks - 1)


def acks_of(request: Request, algo: str) -> int:
    """Ranks that a rank hears acks from, one word per warp (source/acks.cuh): those it sends to, where data go one way only."""
    if request.collective not in ROOTED or algo not in ("chain", TREES):
        return 0
    return 2 if algo == TREES and request.collective is Collective.BROADCAST else 1


def word_packets(request: Request, algo: str, piece: int) -> int:
    """Places behind the slots: acks, and hellos where there are any."""
    acks = acks_of(request, algo)
    return acks * (piece // 32) + layout.MAX_RANKS if acks else 0
