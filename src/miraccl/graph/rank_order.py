"""In which order rings, chains and trees of CPU ranks visit them, from where the ranks are.

A schedule for ranks 0, 1, 2 ... is good where neighbours in number are neighbours in the machine.  Launchers that deal ranks out to hosts
in turn, or to NUMA domains, break that: a ring would cross the network at every step.  The order here keeps the ranks of a host
together, in it those of a NUMA domain; so a ring crosses each border once, as NCCL's rings do (``src/graph/connect.cc`` joins one ring
per node).  The order of the domains comes from ``cpu_host``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankLocation:
    """Where a rank runs: ``host`` is the same number for ranks of one host, ``numa`` the domain of its processors (-1 unknown)."""

    host: int
    numa: int = -1


def order_ranks(places: Sequence[RankLocation], domains: Sequence[int] = ()) -> tuple[int, ...]:
    """The ranks in the order in which rings and chains visit them; the identity where ranks are placed in blocks already.

    ``domains`` is the order of NUMA domains within a host (those not in it come last, by number).
    """
    hosts = list(dict.fromkeys(place.host for place in places))
    rank_of_domain = {domain: i for i, domain in enumerate(domains)}

    def key(rank: int) -> tuple[int, int, int, int]:
        place = places[rank]
        return (
            hosts.index(place.host),
            rank_of_domain.get(place.numa, len(rank_of_domain)),
            place.numa,
            rank,
        )

    return tuple(sorted(range(len(places)), key=key))
