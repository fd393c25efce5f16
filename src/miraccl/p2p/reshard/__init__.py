"""Re-sharding of an array between two groups of ranks, as a plan that is proved before it runs."""

from miraccl.p2p.reshard.mesh import Mesh, Replicate, Shard
from miraccl.p2p.reshard.plan import Move, ReshardPlan, reshard
from miraccl.p2p.reshard.versions import Versions

__all__ = ["Mesh", "Move", "Replicate", "ReshardPlan", "Shard", "Versions", "reshard"]
