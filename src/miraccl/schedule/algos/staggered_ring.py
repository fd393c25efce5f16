"""All-reduce around a ring in slices that overlap, which hides the latency of a network.

The steps are those of ``ring``. A round of it waits for as many latencies as it has steps, one
after the other; here a rank works on one slice while a message of another one is on its way
(``passes.stagger``). Software pipelining: Lam, PLDI 1988; in collectives: NCCL's loop over slices,
``src/device/prims_simple.h``.

With ``s`` slices (``slices``):

=========== ================= ==================
collective  latency steps     blocks on the wire
=========== ================= ==================
all_reduce  (n - 1) (s + 1)   2 (n - 1) / n
=========== ================= ==================
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from miraccl.schedule.algos import ring
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule
from miraccl.schedule.passes import stagger
from miraccl.types import Collective

COLLECTIVES = (Collective.ALL_REDUCE,)
#: A longer ring has no more than a few slices left in flight at once.
MOST_RANKS = 16


def slices(nranks: int) -> int:
    """Return the slices of a chunk in one round of the executor; between rounds nothing
    overlaps.
    """
    return max(2, min(8, 16 // nranks))


def latency(collective: Collective, nranks: int) -> int:
    return (nranks - 1) * (slices(nranks) + 1)


def wire(collective: Collective, nranks: int) -> Fraction:
    return Fraction(2 * (nranks - 1), nranks)


@register(
    "staggered_ring",
    collectives=COLLECTIVES,
    description="The ring in slices that overlap: hides the latency of a network.",
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    condition=lambda collective, nranks: 1 < nranks <= MOST_RANKS,
    network=True,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    schedule = ring.build(collective, nranks, root)
    return replace(stagger(schedule, slices(nranks)), name="staggered_ring")
