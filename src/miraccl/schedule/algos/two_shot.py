"""Two-shot: each rank reduces one chunk for all ranks, then sends it to all ranks.

Source: vLLM ``custom_all_reduce.cuh`` (``cross_device_reduce_2stage``); TensorRT-LLM
``twoShotAllReduce``.

Rank ``p`` receives chunk ``p`` of every input, adds in rank order and rounds once; then every rank
receives chunk ``p`` of the result from rank ``p``. Two steps and as few bytes as a ring: for medium
sizes on fully connected machines (NVSwitch, shared memory). All sends come before the receives, one
message to each peer per shot.

============== ============= ==================
collective     latency steps blocks on the wire
============== ============= ==================
all_reduce     2             2 (n - 1) / n
reduce_scatter 1             n - 1
all_gather     1             n - 1
============== ============= ==================

All are 0 for n = 1. The single shots are the reduce_scatter and all_gather of ``one_shot``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from miraccl.schedule.algos import one_shot
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    copy,
    inp,
    one_channel,
    out,
    peers_after,
    recv,
    recv_reduce_all,
    send,
)
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def latency(collective: Collective, nranks: int) -> int:
    return (2 if collective is Collective.ALL_REDUCE else 1) * (nranks > 1)


def wire(collective: Collective, nranks: int) -> Fraction:
    return (
        Fraction(2 * (nranks - 1), nranks)
        if collective is Collective.ALL_REDUCE
        else Fraction(nranks - 1)
    )


@register(
    "two_shot",
    collectives=COLLECTIVES,
    description=(
        "Each rank reduces one chunk for all and sends it to all: two steps, few bytes, rank order,"
        " rounded once."
    ),
    rank_ordered=True,
    rounds_once=True,
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    uneven=(Collective.REDUCE_SCATTER, Collective.ALL_GATHER),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    if collective is not Collective.ALL_REDUCE:
        return replace(one_shot.build(collective, nranks, root), name="two_shot")
    return one_channel(
        "two_shot", collective, (_all_reduce(rank, nranks) for rank in range(nranks)), parts=nranks
    )


def _all_reduce(rank: int, nranks: int) -> Iterator[Step]:
    if nranks == 1:
        yield copy(inp(0), out(0))
        return
    peers = peers_after(rank, nranks)
    yield from (send(inp(peer), peer) for peer in peers)
    yield recv_reduce_all(inp(rank), out(rank), range(nranks))
    yield from (send(out(rank), peer) for peer in peers)
    yield from (recv(out(peer), peer) for peer in reversed(peers))
