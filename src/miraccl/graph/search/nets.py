"""Which nets a GPU uses and which GPUs a net is close to, as the search asks for them.

The rules are NCCL 2.28's (``src/graph/topo.cc`` ncclTopoGetLocal, ncclTopoGetLocalNet; ``src/graph/search.cc`` ncclTopoSelectNets);
they depend on the machine and on ``NETDEVS_POLICY`` only, never on what the search has placed.
"""

from __future__ import annotations

from collections.abc import Sequence

from miraccl.graph.channel_graph import MAX_CHANNELS
from miraccl.topo.records import NodeType, Path, PathTable, PathType, System

ALL_NETS = -1
SHARED_NETS = 0


def nearest(row: Sequence[Path]) -> list[int]:
    """Positions of the best paths of a row: most bandwidth, then the better type."""
    best = (0.0, -PathType.DIS)
    found: list[int] = []
    for i, path in enumerate(row):
        score = (path.bw, -path.type)
        if score > best:
            best = score
            found = []
        if score == best:
            found.append(i)
    return found


def _mirror_bits(value: int, size: int) -> int:
    """The bits of ``value`` below ``size`` (a power of two) in reverse order."""
    result, low, high = 0, 1, size >> 1
    while low < size:
        if value & low:
            result |= high
        low, high = low << 1, high >> 1
    return result


def nets_of_gpu(system: System, paths: PathTable, gpu: int, net_per_gpu: int) -> list[int]:
    """The nets a GPU prefers, by channel until they repeat: positions among the nets, by id the first of each.

    ``net_per_gpu``: how many of its nearest nets it uses; 0 shares them evenly among the GPUs near them, -1 takes all.
    Empty when no path leads to a net.
    """
    local = nearest(paths.row(NodeType.GPU, gpu, NodeType.NET))
    if not local:
        return []
    if net_per_gpu == SHARED_NETS:
        sharers = len(nearest(paths.row(NodeType.NET, local[0], NodeType.GPU)))
        used = -(-len(local) // sharers)
    else:
        used = len(local) if net_per_gpu == ALL_NETS else min(net_per_gpu, len(local))
    start = system.gpus[gpu].dev
    if len(local) & (len(local) - 1) == 0:
        start = _mirror_bits(start, len(local))
    by_channel: list[int] = []
    for channel in range(MAX_CHANNELS):
        net = first_of_id(system, local[(start + channel % used) % len(local)])
        if by_channel and net == by_channel[0]:
            break
        by_channel.append(net)
    return by_channel


def first_of_id(system: System, net: int) -> int:
    """The first net that bears the id of this one: files may list an id several times."""
    id = system.nets[net].id
    return next(i for i, node in enumerate(system.nets) if node.id == id)


def candidate_nets(system: System, paths: PathTable, gpus: Sequence[int], worst: PathType, net_per_gpu: int) -> list[int]:
    """The nets to try from these GPUs, best first: those they prefer, then all others up to the path type ``worst``.

    With a number of nets per GPU, the list ends at that many for each of ``gpus``. Empty when some GPU of the node reaches no net: NCCL
    then gives up the search.
    """
    preferred = [nets_of_gpu(system, paths, gpu, net_per_gpu) for gpu in gpus]
    if not all(preferred):
        return []
    nets = list(dict.fromkeys(net for of_gpu in preferred for net in of_gpu))
    most = net_per_gpu * len(gpus) if net_per_gpu > 0 else len(system.nets) + 1
    if len(nets) >= most:
        return nets
    for kind in range(worst + 1):
        for gpu in gpus:
            row = paths.row(NodeType.GPU, gpu, NodeType.NET)[:MAX_CHANNELS]
            for net in (n for n, path in enumerate(row) if path.type == kind):
                if net not in nets:
                    nets.append(net)
                if len(nets) >= most:
                    return nets
    return nets
