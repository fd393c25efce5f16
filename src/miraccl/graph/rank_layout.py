"""Placement of ranks: hosts that are copies of each other, divided into the nodes of a plan.

A *host* is a copy of the described machine. A *domain* is a group of its GPUs that reach each other
without the network (``topo`` determines them); the plan treats every domain of every host as a
*node* of its own. Global rank = host * GPUs per host + local rank. Nodes are numbered in the order
of their lowest rank, like in NCCL (``src/init.cc`` initTransportsRank).

Arrays are int32; ``[nodes]`` or ``[ranks]`` in a docstring is a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from miraccl.errors import InvalidUsage

Int32Array = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class RankLayout:
    """Ranks and nodes of a communicator.

    ``domains`` holds the local ranks of each group of a host, ordered by lowest rank. Raises
    ``InvalidUsage`` if the domains do not partition the local ranks.
    """

    hosts: int
    gpus_per_host: int
    domains: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.hosts < 1 or not self.domains:
            raise InvalidUsage("cannot lay out ranks: it needs at least one host and one GPU")
        if sorted(r for domain in self.domains for r in domain) != list(range(self.gpus_per_host)):
            raise InvalidUsage(
                f"cannot lay out ranks: the domains {self.domains} do not hold "
                f"each of the {self.gpus_per_host} local ranks once"
            )
        if any(min(a) > min(b) for a, b in zip(self.domains, self.domains[1:])):
            raise InvalidUsage("cannot lay out ranks: domains must be ordered by lowest rank")

    @property
    def nranks(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def nnodes(self) -> int:
        return self.hosts * len(self.domains)

    @property
    def ranks_per_node(self) -> int:
        """Ranks per node, rounded down, as the latency formulas use it."""
        return self.nranks // self.nnodes

    @property
    def max_local_ranks(self) -> int:
        """Ranks of the largest node."""
        return max(len(domain) for domain in self.domains)

    @cached_property
    def node_domain(self) -> Int32Array:
        """[nodes] The domain that each node is a copy of."""
        return np.tile(np.arange(len(self.domains), dtype=np.int32), self.hosts)

    @cached_property
    def node_offset(self) -> Int32Array:
        """[nodes] Global rank minus local rank."""
        return np.repeat(
            np.arange(self.hosts, dtype=np.int32) * np.int32(self.gpus_per_host), len(self.domains)
        )

    @cached_property
    def rank_to_node(self) -> Int32Array:
        """[ranks] The node of each rank."""
        local = np.empty(self.gpus_per_host, dtype=np.int32)
        for d, ranks in enumerate(self.domains):
            local[list(ranks)] = d
        return (
            (np.arange(self.hosts, dtype=np.int32)[:, None] * np.int32(len(self.domains)) + local)
            .ravel()
            .astype(np.int32)
        )

    def nodes_of(self, domain: int) -> Int32Array:
        """Return the nodes that are copies of ``domain``, ascending."""
        return np.arange(domain, self.nnodes, len(self.domains), dtype=np.int32)

    def per_node(self, local: Sequence[int]) -> Int32Array:
        """Return [nodes] global ranks from one local rank per domain."""
        return np.asarray(local, dtype=np.int32)[self.node_domain] + self.node_offset

    def on_all_hosts(self, local: Sequence[int]) -> Int32Array:
        """Return [hosts, len(local)] global ranks of the given local ranks on every host."""
        hosts = np.arange(self.hosts, dtype=np.int32)[:, None] * np.int32(self.gpus_per_host)
        return hosts + np.asarray(local, dtype=np.int32)[None, :]
