"""Order in which rings, chains and trees visit CPU ranks, derived from their placement.

A schedule for ranks 0, 1, 2 ... performs well if consecutive ranks are neighbours in the machine.
Launchers that deal ranks round-robin to hosts or NUMA domains break that: a ring would cross the
network at every step. The order here groups the ranks of a host and within it those of a NUMA
domain, so a ring crosses each boundary once, like NCCL's rings (``src/graph/connect.cc`` joins one
ring per node). The order of the domains comes from ``cpu_host``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Placement of a rank.

    ``host`` is equal for ranks of one host; ``numa`` is the NUMA domain of its CPUs, -1 if unknown.
    """

    host: int
    numa: int = -1


def order_ranks(locations: Sequence[RankLocation], domains: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the ranks in the order in which rings and chains visit them.

    Returns the identity if ranks are placed in blocks already. ``domains`` is the order of NUMA
    domains within a host; domains missing from it come last, by number.
    """
    hosts = list(dict.fromkeys(location.host for location in locations))
    rank_of_domain = {domain: i for i, domain in enumerate(domains)}

    def key(rank: int) -> tuple[int, int, int, int]:
        location = locations[rank]
        return (
            hosts.index(location.host),
            rank_of_domain.get(location.numa, len(rank_of_domain)),
            location.numa,
            rank,
        )

    return tuple(sorted(range(len(locations)), key=key))
