"""Candidate nets of a channel, in the order in which they are tried.

The source is NCCL 2.28 ``src/graph/search.cc`` ncclTopoSelectNets. Candidates depend on the machine
and on ``NETDEVS_POLICY`` only, never on channels found so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.graph.channel_graph import MAX_CHANNELS
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import NodeType, PathType


def preferred_nets(nearest: NearestDevices, gpu: int) -> list[int]:
    """Return the nets that a GPU uses on successive channels, until they repeat.

    Of nets that share an id only the first is listed. Empty if the GPU reaches no net.
    """
    nets: list[int] = []
    for channel in range(MAX_CHANNELS):
        net = nearest.net(gpu, channel)
        if net < 0:
            return []
        net = nearest.first(net)
        if nets and net == nets[0]:
            break
        nets.append(net)
    return nets


def candidate_nets(nearest: NearestDevices, gpus: Sequence[int], worst: PathType) -> list[int]:
    """Return the nets to try from ``gpus``, best first.

    The preferred nets come first, then all others up to path type ``worst``. With a limit of nets
    per GPU the list ends at that many for each GPU. Empty if a GPU reaches no net: NCCL then
    abandons the search.
    """
    preferred = [preferred_nets(nearest, gpu) for gpu in gpus]
    if not all(preferred):
        return []
    nets = list(dict.fromkeys(net for gpu_nets in preferred for net in gpu_nets))
    limit = (
        nearest.net_per_gpu * len(gpus) if nearest.net_per_gpu > 0 else len(nearest.system.nets) + 1
    )
    if len(nets) >= limit:
        return nets
    rows = [nearest.paths.row(NodeType.GPU, gpu, NodeType.NET)[:MAX_CHANNELS] for gpu in gpus]
    for kind in range(worst + 1):
        for row in rows:
            for net in (n for n, path in enumerate(row) if path.type == kind):
                if net not in nets:
                    nets.append(net)
                if len(nets) >= limit:
                    return nets
    return nets
