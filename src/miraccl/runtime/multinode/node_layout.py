"""Assignment of ranks to nodes, for operations on GPU memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from miraccl import params
from miraccl.bootstrap.contract import Session


def node_name(session: Session) -> str:
    """Return the name of this rank's node.

    Ranks that may share neither device nor node memory are nodes of their own.
    """
    name = params.HOSTID.read() or session.hosts[session.rank]
    apart = params.P2P_DISABLE.read() == 1 and params.SHM_DISABLE.read()
    return f"{name}/rank{session.rank}" if apart else name


def group_by_node(hosts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each node, nodes in the order of their first ranks."""
    return [
        tuple(rank for rank, name in enumerate(hosts) if name == node)
        for node in dict.fromkeys(hosts)
    ]


@dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Assignment of ranks to nodes as seen by ``rank``.

    ``nodes``: ranks of each node. ``node``: index of the caller's node, in which it is the
    ``local_rank``-th rank.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @classmethod
    def of(cls, rank: int, hosts: Sequence[str]) -> NodeLayout:
        """Build the layout of ``rank``; ``hosts[r]``: node name of rank r."""
        nodes = tuple(group_by_node(hosts))
        node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
        return cls(rank=rank, nodes=nodes, node=node, local_rank=nodes[node].index(rank))

    @functools.cached_property
    def nranks(self) -> int:
        return sum(map(len, self.nodes))

    @functools.cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks of the caller's node."""
        return self.nodes[self.node]

    @functools.cached_property
    def remote_ranks(self) -> tuple[int, ...]:
        """Ranks of the other nodes, in ascending order."""
        return tuple(rank for rank in range(self.nranks) if rank not in self.local_ranks)

    @functools.cached_property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @functools.cached_property
    def max_remote_ranks(self) -> int:
        """Largest number of ranks on other nodes that any rank has."""
        return self.nranks - min(map(len, self.nodes))

    @functools.cached_property
    def uniform(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len({len(ranks) for ranks in self.nodes}) == 1

    @functools.cached_property
    def node_major(self) -> bool:
        """True if ranks are numbered node by node."""
        return [rank for ranks in self.nodes for rank in ranks] == list(range(self.nranks))

    @functools.cached_property
    def hierarchical(self) -> bool:
        """True if operations can be split into parts inside and between nodes."""
        return self.uniform and self.local_size > 1

    def inter_node_ranks(self) -> list[int]:
        """Return the ranks with the caller's local rank, one per node; all nodes have one."""
        return [ranks[self.local_rank] for ranks in self.nodes]

    def locate(self, rank: int) -> tuple[int, int]:
        """Return (node, local rank) of a rank."""
        return next(
            (node, ranks.index(rank)) for node, ranks in enumerate(self.nodes) if rank in ranks
        )
