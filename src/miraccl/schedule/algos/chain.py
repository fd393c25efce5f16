"""Chain: a pipeline of neighbours that starts (broadcast) or ends (reduce) at the root.

Source: NCCL ``src/device/broadcast.h`` and ``src/device/reduce.h`` (``runRing``).

Rank ``root + i`` is at position ``i``. The block is cut into ``PARTS`` chunks, so that all links
are busy at the same time even if the executor does not slice the chunks further.

=================== ============= ==================
collective          latency steps blocks on the wire
=================== ============= ==================
broadcast, reduce   n - 1         1 (0 for n = 1)
=================== ============= ==================
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
    recv,
    recv_copy_send,
    recv_reduce_copy,
    recv_reduce_send,
    send,
)
from miraccl.types import Collective

#: chunks per block; with p parts and n ranks an unsliced pipeline takes 1 + (n - 2) / p block times
PARTS = 4

COLLECTIVES = (Collective.BROADCAST, Collective.REDUCE)


def latency(collective: Collective, nranks: int) -> int:
    return nranks - 1


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(nranks > 1)


@register(
    "chain",
    collectives=COLLECTIVES,
    description=(
        "Pipeline of neighbours: every link carries each byte once, latency grows with the number"
        " of ranks."
    ),
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    steps = _broadcast if collective is Collective.BROADCAST else _reduce
    ranks = (
        [step for part in range(PARTS) for step in steps(rank, nranks, root, part)]
        for rank in range(nranks)
    )
    return one_channel("chain", collective, ranks, parts=PARTS, root=root)


def _broadcast(rank: int, nranks: int, root: int, part: int) -> Iterator[Step]:
    position, before, after = (rank - root) % nranks, (rank - 1) % nranks, (rank + 1) % nranks
    if position == 0:
        if nranks > 1:
            yield send(inp(part), after)
        yield copy(inp(part), out(part))
    elif position < nranks - 1:
        yield recv_copy_send(out(part), before, after)
    else:
        yield recv(out(part), before)


def _reduce(rank: int, nranks: int, root: int, part: int) -> Iterator[Step]:
    position, before, after = (rank - root) % nranks, (rank - 1) % nranks, (rank + 1) % nranks
    if nranks == 1:
        yield copy(inp(part), out(part))
    elif position == 0:
        yield recv_reduce_copy(inp(part), out(part), after)
    elif position < nranks - 1:
        yield recv_reduce_send(inp(part), after, before)
    else:
        yield send(inp(part), before)
