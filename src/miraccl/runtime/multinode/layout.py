"""Which ranks share a host, as operations on GPU memory see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from miraccl import params
from miraccl.bootstrap import Session


def node_name(session: Session) -> str:
    """Which host this rank counts itself to. Ranks that may share neither device nor host memory are hosts of their own."""
    name = params.HOSTID.read() or session.hosts[session.rank]
    apart = params.P2P_DISABLE.read() == 1 and params.SHM_DISABLE.read()
    return f"{name}/rank{session.rank}" if apart else name


def group_by_node(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks of each host, hosts in the order of their first ranks."""
    return [
        tuple(rank for rank, name in enumerate(hosts) if name == host)
        for host in dict.fromkeys(hosts)
    ]


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """``groups`` are the ranks of each host; ``rank`` is the caller's, the ``index``-th of the ``host``-th host."""

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str]) -> NodeLayout:
        """``hosts[r]`` is the name of rank r's host."""
        nodes = tuple(group_by_node(hosts))
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        return cls(rank=rank, nodes=nodes, node=node, local_rank=nodes[node].index(rank))

    @functools.cached_property
    def nranks(self) -> int:
        return sum(map(len, self.nodes))

    @functools.cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of the caller's host."""
        return self.nodes[self.node]

    @functools.cached_property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @functools.cached_property
    def max_remote_ranks(self) -> int:
        """Ranks of other hosts than its own that any rank has at most."""
        return self.nranks - min(map(len, self.nodes))

    @functools.cached_property
    def uniform(self) -> bool:
        """All hosts have equally many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @functools.cached_property
    def node_major(self) -> bool:
        """Ranks are numbered host by host."""
        return [rank for ranks in self.nodes for rank in ranks] == list(range(self.nranks))

    @functools.cached_property
    def hierarchical(self) -> bool:
        """Operations may take two steps: inside each host, and between the ranks of equal index."""
        return self.uniform and self.local_size > 1

    def inter_node_ranks(self) -> list[int]:
        """The ranks of the caller's index, one a host (all hosts have that many)."""
        return [ranks[self.local_rank] for ranks in self.nodes]

    def locate(self, rank: int) -> tuple[int, int]:
        """Host and index in the host of a rank."""
        return next(
            (host, ranks.index(rank)) for host, ranks in enumerate(self.nodes) if rank in ranks
        )
