"""The nets a channel may start from or leave by, in the order they are tried (NCCL 2.28 ``src/graph/search.cc`` ncclTopoSelectNets).

They depend on the machine and on ``NETDEVS_POLICY`` only, never on what the search has placed.
"""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.graph.channel_graph import MAX_CHANNELS
from miraccl.topo.queries import NearestDevices
from miraccl.topo.records import NodeType, PathType


def preferred_nets(nearest: NearestDevices, gpu: int) -> list[int]:
    """The nets a GPU uses, by channel until they repeat; of nets that share an id, the first. Empty when it reaches none."""
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
    """The nets to try from these GPUs, best first: those they prefer, then all others up to the path type ``worst``.

    With a number of nets per GPU, the list ends at that many for each of ``gpus``. Empty when one of them reaches no net: NCCL then
    gives up the search.
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
