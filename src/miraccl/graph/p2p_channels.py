"""Numbers of send/receive channels, in total and per pair of ranks.

Both are powers of two because peers are mapped to channels by bits (NCCL ``src/graph/paths.cc``
ncclTopoComputeP2pChannels).
"""

from __future__ import annotations

from dataclasses import dataclass

from miraccl.graph.plan_settings import MAX_CHANNELS, ConnectSettings
from miraccl.topo.hardware import nvlink_bw
from miraccl.topo.records import NodeType, PathTable, PathType, System, f32


@dataclass(frozen=True, kw_only=True)
class P2pChannels:
    """Send/receive channels of a communicator.

    A pair of ranks uses ``per_peer`` of ``total`` channels; ``limited_by`` names the limit of
    ``per_peer``.
    """

    total: int
    per_peer: int
    limited_by: str


def count_p2p_channels(
    system: System, paths: PathTable, *, channels: int, nranks: int, settings: ConnectSettings
) -> P2pChannels:
    """Count the send/receive channels.

    ``channels`` is the number of collective channels; ``system`` and ``paths`` are those of the
    rank's own domain.
    """
    total = max(min(channels, settings.max_p2p_channels), settings.min_p2p_channels)
    least, limited_by = total, "their number"
    beyond = nranks > len(system.gpus)
    for g, gpu in enumerate(system.gpus):
        candidates = [
            (
                _count_local_channels(paths, g, peer, gpu.sm),
                f"{gpu.name} to {system.gpus[peer].name} ({paths.gpu_gpu(peer, g).type.name})",
            )
            for peer in range(len(system.gpus))
            if peer != g
        ]
        if beyond:
            candidates.append(
                (
                    _count_network_channels(system, paths, g, total, nranks, settings),
                    f"{gpu.name} over the network",
                )
            )
        for count, pair in candidates:
            if count < least:
                least, limited_by = count, pair
    total_pow2 = min(_pow2_up(total), MAX_CHANNELS)
    return P2pChannels(
        total=total_pow2, per_peer=min(_pow2_up(least), total_pow2), limited_by=limited_by
    )


def _count_local_channels(paths: PathTable, gpu: int, peer: int, sm: int) -> int:
    """Return two channels per NVLink between the GPUs, at least two."""
    path = paths.gpu_gpu(peer, gpu)
    if path.type != PathType.NVL:
        return 2
    return 2 * max(1, int(f32(path.bw / nvlink_bw(sm))))


def _count_network_channels(
    system: System, paths: PathTable, gpu: int, total: int, nranks: int, settings: ConnectSettings
) -> int:
    """Return the channels per peer on another node.

    Two, halved while all peers together would put more than four on a channel, but enough to
    saturate the GPU's NICs.
    """
    if settings.channels_per_net_peer:
        return settings.channels_per_net_peer
    share = 2
    while share * nranks > total * 4 and share > 1:
        share //= 2
    return max(_count_nics_to_saturate(system, paths, gpu), share)


def _count_nics_to_saturate(system: System, paths: PathTable, gpu: int) -> int:
    """Return the number of nearest NICs that saturate the GPU's link to its CPU; 0 without one."""
    to_cpu = [
        link.bw for link in system.gpus[gpu].links if system.nodes[link.target].type == NodeType.CPU
    ]
    gpu_bw = to_cpu[-1] if to_cpu else 0.0
    row = paths.row(NodeType.GPU, gpu, NodeType.NET)
    best = max(((path.bw, -path.type) for path in row), default=(0.0, 0))
    nearest = [path for path in row if (path.bw, -path.type) == best and path.bw > 0]
    count, reached = 0, 0.0
    for path in nearest:
        if reached >= gpu_bw:
            break
        reached = f32(reached + path.bw)
        count += 1
    return count


def _pow2_up(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
