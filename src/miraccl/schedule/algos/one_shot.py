"""One-shot: every rank sends its data directly to every rank that needs it, in one step.

Source: FlashInfer/TensorRT-LLM ``oneShotAllReduce``; vLLM ``custom_all_reduce.cuh``
(``cross_device_reduce_1stage``); MPICH linear (isend/irecv) gather, scatter and all-to-all.

Lowest latency of all algorithms and the usual choice of inference servers for small all-reduces.
Sends come first and start with the next rank, which spreads the load over ranks. Reductions add in
rank order and round once.

========================== ============= ==================================
collective                 latency steps blocks on the wire
========================== ============= ==================================
all_reduce, all_gather     1             n - 1
broadcast, scatter         1             n - 1 (at the root)
reduce, gather             1             1 (at each rank but the root)
all_to_all, reduce_scatter 1             n - 1
========================== ============= ==================================

All are 0 for n = 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

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

COLLECTIVES = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.BROADCAST,
    Collective.REDUCE,
    Collective.ALL_TO_ALL,
    Collective.GATHER,
    Collective.SCATTER,
)


def latency(collective: Collective, nranks: int) -> int:
    return int(nranks > 1)


def wire(collective: Collective, nranks: int) -> Fraction:
    single = collective in (Collective.REDUCE, Collective.GATHER)
    return Fraction(int(nranks > 1) if single else nranks - 1)


@register(
    "one_shot",
    collectives=COLLECTIVES,
    description=(
        "Every rank sends directly to all that need its data: one step, rank order, rounded once."
    ),
    rank_ordered=True,
    rounds_once=True,
    direct=COLLECTIVES,
    # an in-place all-reduce overwrites the input while peers may still read it
    direct_in_place=[
        c for c in COLLECTIVES if c not in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL)
    ],
    uneven=(
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.GATHER,
        Collective.SCATTER,
    ),
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    ranks = (_steps(collective, rank, nranks, root) for rank in range(nranks))
    return one_channel("one_shot", collective, ranks, root=root)


def _steps(collective: Collective, rank: int, nranks: int, root: int) -> Iterator[Step]:
    everybody = range(nranks)
    match collective:
        case Collective.ALL_REDUCE:
            yield from (send(inp(0), peer) for peer in peers_after(rank, nranks))
            yield _reduce_all_inputs(rank, nranks, 0)
        case Collective.REDUCE_SCATTER:
            yield from (send(inp(peer), peer) for peer in peers_after(rank, nranks))
            yield _reduce_all_inputs(rank, nranks, rank)
        case Collective.ALL_GATHER:
            yield from (send(inp(0), peer) for peer in peers_after(rank, nranks))
            yield copy(inp(0), out(rank))
            yield from (recv(out(peer), peer) for peer in reversed(peers_after(rank, nranks)))
        case Collective.ALL_TO_ALL:
            yield from (send(inp(peer), peer) for peer in peers_after(rank, nranks))
            yield copy(inp(rank), out(rank))
            yield from (recv(out(peer), peer) for peer in reversed(peers_after(rank, nranks)))
        case Collective.REDUCE:
            yield send(inp(0), root) if rank != root else _reduce_all_inputs(rank, nranks, 0)
        case _:
            yield from _rooted(collective, rank, root, everybody)


def _reduce_all_inputs(rank: int, nranks: int, chunk: int) -> Step:
    return (
        recv_reduce_all(inp(chunk), out(0), range(nranks))
        if nranks > 1
        else copy(inp(chunk), out(0))
    )


def _rooted(collective: Collective, rank: int, root: int, everybody: range) -> Iterator[Step]:
    """Yield broadcast, scatter and gather: one message between the root and each rank."""
    if collective is Collective.GATHER:
        if rank != root:
            yield send(inp(0), root)
            return
        yield copy(inp(0), out(root))
        yield from (recv(out(peer), peer) for peer in peers_after(root, len(everybody)))
        return
    if rank != root:
        yield recv(out(0), root)
        return
    own = root if collective is Collective.SCATTER else 0
    for peer in peers_after(root, len(everybody)):
        yield send(inp(peer if collective is Collective.SCATTER else 0), peer)
    yield copy(inp(own), out(0))
