"""Layout of an operation's tiles in one half of the packet buffer (docs/design/kernels.md).

A half consists of slots of equal size, followed by the control words of kernels whose data flow one
way only. Sizes are in packets of 16 bytes.
"""

from __future__ import annotations

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.plan import ROOTED, TREES, Request, rounds_of
from miraccl.executor.cuda.source import Framing
from miraccl.types import Collective


def half_packets() -> int:
    """Return the packets that a half holds."""
    return layout.HALF_BYTES // 16


def min_slots(algo: str, nranks: int) -> int:
    """Return the slots that an operation of more tiles than slots needs at least."""
    # A ring is incorrect with fewer (source/ring.cuh). Otherwise two are enough, but tiles should
    # overlap: in shots one is sent ahead, in trees and chains several are in flight.
    return nranks + 1 if algo == "ring" else 4


def slot_packets(request: Request, algo: str, tile: int, frame: Framing) -> int:
    """Return the packets of a slot for tiles of ``tile`` packets: one run per message of a tile."""
    if algo == "chain":
        return frame.run_packets(tile)
    if algo == TREES:  # two children, parent
        return frame.run_packets(tile) * {Collective.ALL_REDUCE: 3, Collective.REDUCE: 2}.get(
            request.collective, 1
        )
    return frame.run_packets(tile) * rounds_of(request, algo) * (request.nranks - 1)


def ack_senders(request: Request, algo: str) -> int:
    """Return the number of ranks that send acks to a rank, one word per warp (source/acks.cuh).

    These are the ranks it sends to, in kernels whose data flow one way only; otherwise 0.
    """
    if request.collective not in ROOTED or algo not in ("chain", TREES):
        return 0
    return 2 if algo == TREES and request.collective is Collective.BROADCAST else 1


def control_packets(request: Request, algo: str, tile: int) -> int:
    """Return the packets behind the slots that hold acks and hellos; 0 without acks."""
    acks = ack_senders(request, algo)
    return acks * (tile // 32) + layout.MAX_RANKS if acks else 0
