"""PAT, parallel aggregated trees: ceil(log2 n) steps, most data over short distances.

Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025,
arXiv:2506.20252; NCCL 2.23 ``collectives.h:PatAGAlgorithm``. NCCL aggregates less when its buffers
are small; here scratch holds all blocks.

All-gather sends along distances from the largest power of two down to 1. At distance ``d`` a rank
holds the blocks of the ranks ``s`` before it for all multiples ``s < n`` of ``2 d``, and sends
those that rank ``r + d`` lacks, aggregated in one message. Most data thus travels the shortest
distance, the opposite of Bruck. Reduce-scatter is the reverse: distances from 1 up, messages are
partial sums.

Blocks lie in scratch in the order in which the all-gather receives them. Received blocks are
therefore one run, and sent blocks are a prefix without at most one block: one or two messages.

============================= ============= ==================
collective                    latency steps blocks on the wire
============================= ============= ==================
all_gather, reduce_scatter    ceil(log2 n)  n - 1
============================= ============= ==================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    copy,
    inp,
    one_channel,
    out,
    recv,
    recv_reduce,
    recv_reduce_copy,
    scratch,
    send,
)
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def latency(collective: Collective, nranks: int) -> int:
    return (nranks - 1).bit_length()


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(nranks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatRound:
    """One distance of the all-gather.

    - ``runs``: (first slot, number of slots) of the blocks sent. Received blocks are stored from
      slot ``start`` on.
    """

    distance: int
    runs: tuple[tuple[int, int], ...]
    start: int


def plan_rounds(nranks: int) -> tuple[list[int], list[PatRound]]:
    """Return the offset (owner's distance before the rank) of each slot, and the all-gather's
    rounds.

    Both are the same on all ranks.
    """
    offsets, rounds = [0], []
    for bit in reversed(range((nranks - 1).bit_length())):
        distance = 1 << bit
        runs: list[tuple[int, int]] = []
        wanted = [slot for slot, offset in enumerate(offsets) if offset + distance < nranks]
        for slot in wanted:
            if runs and sum(runs[-1]) == slot:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((slot, 1))
        rounds.append(PatRound(distance=distance, runs=tuple(runs), start=len(offsets)))
        offsets = offsets + [offsets[slot] + distance for slot in wanted]
    return offsets, rounds


@register(
    "pat",
    collectives=COLLECTIVES,
    description=(
        "Parallel aggregated trees, far ranks first: log2(n) steps for any number of ranks, most"
        " bytes to near ranks."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    offsets, rounds = plan_rounds(nranks)
    steps = _all_gather if collective is Collective.ALL_GATHER else _reduce_scatter
    ranks = (steps(rank, nranks, offsets, rounds) for rank in range(nranks))
    return one_channel("pat", collective, ranks, scratch_chunks=nranks if nranks > 1 else 0)


def _all_gather(
    rank: int, nranks: int, offsets: list[int], rounds: list[PatRound]
) -> Iterator[Step]:
    if nranks > 1:
        yield copy(inp(0), scratch(0))
    for pat_round in rounds:
        for slot, blocks in pat_round.runs:
            yield send(scratch(slot, blocks), (rank + pat_round.distance) % nranks)
        slot = pat_round.start
        for _, blocks in pat_round.runs:
            yield recv(scratch(slot, blocks), (rank - pat_round.distance) % nranks)
            slot += blocks
    yield copy(inp(0), out(rank))
    for slot, offset in enumerate(offsets[1:], start=1):
        yield copy(scratch(slot), out((rank - offset) % nranks))


def _reduce_scatter(
    rank: int, nranks: int, offsets: list[int], rounds: list[PatRound]
) -> Iterator[Step]:
    """Yield the steps of ``rank``: the all-gather in reverse.

    Blocks received in a round of the all-gather are sent back to their sender, which adds them to
    the blocks it had sent.
    """
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    for slot, offset in enumerate(offsets):
        yield copy(inp((rank - offset) % nranks), scratch(slot))
    for pat_round in reversed(rounds):
        slot = pat_round.start
        for _, blocks in pat_round.runs:
            yield send(scratch(slot, blocks), (rank - pat_round.distance) % nranks)
            slot += blocks
        for first, blocks in pat_round.runs:
            peer = (rank + pat_round.distance) % nranks
            yield (
                recv_reduce_copy(scratch(0), out(0), peer)
                if pat_round is rounds[0]
                else recv_reduce(scratch(first, blocks), peer)
            )
