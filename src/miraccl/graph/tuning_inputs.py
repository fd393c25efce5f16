"""Inputs of the tuning model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from miraccl.graph.channel_graph import ChannelGraph
from miraccl.graph.connect import Connections
from miraccl.graph.kinds import GraphKind
from miraccl.graph.tuning_constants import Generation
from miraccl.topo.records import CpuArch, CpuVendor, NodeType, System, f32


@dataclass(frozen=True, kw_only=True)
class TuningInputs:
    """Properties of a communicator that the tuning model depends on.

    ``graphs`` are the agreed ones. ``collnet_heads`` is 0 and ``collnet_direct_heads`` 1 if CollNet
    is not in use; ``sm`` values are compute capabilities times ten.
    """

    graphs: Mapping[GraphKind, ChannelGraph]
    nnodes: int
    nranks: int
    max_local_ranks: int
    channels: int
    min_sm: int
    max_sm: int
    max_tree_pattern: int
    cpu_arch: int
    cpu_vendor: int
    nvswitch: bool
    nvls_support: bool
    nvls_channels: int
    collnet_enabled: bool
    collnet_heads: int
    collnet_direct_heads: int

    @classmethod
    def of(cls, plan: Connections, system: System) -> TuningInputs:
        """Collect the inputs of a communicator; ``system`` is the machine as rank 0 sees it."""
        collnet = plan.collnet
        cpu = system.cpus[0] if system.cpus else None
        return cls(
            graphs=plan.graphs,
            nnodes=plan.layout.nnodes,
            nranks=plan.layout.nranks,
            max_local_ranks=plan.layout.max_local_ranks,
            channels=plan.channels,
            min_sm=plan.min_sm,
            max_sm=plan.max_sm,
            max_tree_pattern=plan.max_tree_pattern,
            cpu_arch=cpu.arch if cpu else CpuArch.UNDEF,
            cpu_vendor=cpu.vendor if cpu else CpuVendor.UNDEF,
            nvswitch=system.count(NodeType.NVS) > 0,
            nvls_support=plan.nvls_support,
            nvls_channels=plan.nvls_channels,
            collnet_enabled=plan.collnet_enabled,
            collnet_heads=collnet.heads if collnet else 0,
            collnet_direct_heads=collnet.direct.heads if collnet and collnet.direct else 1,
        )

    @property
    def generation(self) -> Generation:
        return Generation.of(self.min_sm)

    @property
    def scale(self) -> int:
        """Column of the bandwidth tables: one node, two nodes, more."""
        return min(self.nnodes, 3) - 1

    @property
    def ranks_per_node(self) -> float:
        return f32(self.nranks / self.nnodes)
