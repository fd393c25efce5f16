"""All-reduce by distance doubling in slices that overlap, which hides the latency of a network.

The steps are those of ``distance_doubling``, the slices those of ``staggered_ring``.

=========== ================= ==================
collective  latency steps     blocks on the wire
=========== ================= ==================
all_reduce  (n - 1) (s + 1)   2 (n - 1) / n
=========== ================= ==================
"""

from __future__ import annotations

from dataclasses import replace

from miraccl.schedule.algos import distance_doubling
from miraccl.schedule.algos.staggered_ring import COLLECTIVES, latency, slices, wire
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule
from miraccl.schedule.passes import stagger
from miraccl.types import Collective


def supports(collective: Collective, nranks: int) -> bool:
    return nranks > 1 and nranks & (nranks - 1) == 0


@register(
    "staggered_distance_doubling",
    collectives=COLLECTIVES,
    description="Distance doubling in slices that overlap: hides the latency of a network.",
    direct=COLLECTIVES,
    direct_in_place=COLLECTIVES,
    condition=supports,
    network=True,
    latency=latency,
    wire=wire,
)
def build(collective: Collective, nranks: int, root: int) -> Schedule:
    schedule = distance_doubling.build(collective, nranks, root)
    return replace(stagger(schedule, slices(nranks)), name="staggered_distance_doubling")
