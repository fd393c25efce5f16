"""Queries on a system and its paths, answered like in NCCL.

Arguments are records; results are indices or plain values. Positions count within the nodes of a
type. Sources: NCCL 2.28 ``src/graph/paths.cc`` and ``src/graph/topo.cc``; each query names its
function.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from miraccl.errors import TopologyError
from miraccl.topo.options import PathOptions
from miraccl.topo.records import CpuArch, CpuVendor, NodeType, Path, PathTable, PathType, System

MAX_CHANNELS = 64


class GdrMode(enum.IntEnum):
    """Access of a NIC to GPU memory: none, direct, or over PCI where C2C joins GPU and CPU."""

    DISABLED = 0
    DEFAULT = 1
    PCI = 2


def nearest(row: Sequence[Path]) -> list[int]:
    """Return the positions with the most bandwidth, then the best path type (ncclTopoGetLocal)."""
    best: list[int] = []
    bw, type = 0.0, PathType.DIS
    for i, path in enumerate(row):
        if path.bw > bw or (path.bw == bw and path.type < type):
            bw, type, best = path.bw, path.type, [i]
        elif path.bw == bw and path.type == type:
            best.append(i)
    return best


def mirror_bits(value: int, power: int) -> int:
    """Reverse the low bits of ``value``, for ``power`` = 2**bits: spreads neighbours over NICs."""
    mirrored, low, high = 0, 1, power >> 1
    while low < power:
        if value & low:
            mirrored |= high
        low, high = low << 1, high >> 1
    return mirrored


class NearestDevices:
    """Cache of the NICs that a GPU uses and of the GPU closest to a NIC.

    Results are cached until :meth:`invalidate`.
    """

    def __init__(self, system: System, paths: PathTable, net_per_gpu: int = 0) -> None:
        self.system = system
        self.paths = paths
        self.net_per_gpu = net_per_gpu
        self._nets: dict[int, list[int]] = {}
        self._gpus: dict[int, list[int]] = {}
        self._first: dict[int, int] = {}
        for i, net in enumerate(system.nets):
            self._first.setdefault(net.id, i)

    def invalidate(self, *, gpu: int | None = None, net: int | None = None) -> None:
        """Drop the results for a row that changed: this GPU to nets, or this net to GPUs."""
        if gpu is not None:
            self._nets.pop(gpu, None)
        if net is not None:
            self._gpus.pop(net, None)

    def first(self, net: int) -> int:
        """Return the first net with the id of this one, which represents all nets of that id."""
        return self._first[self.system.nets[net].id]

    def nets(self, gpu: int) -> list[int]:
        """Return the nearest nets of a GPU (ncclTopoGetLocalNets)."""
        if gpu not in self._nets:
            self._nets[gpu] = nearest(self.paths.row(NodeType.GPU, gpu, NodeType.NET))
        return self._nets[gpu]

    def gpus(self, net: int) -> list[int]:
        """Return the nearest GPUs of a net."""
        if net not in self._gpus:
            self._gpus[net] = nearest(self.paths.row(NodeType.NET, net, NodeType.GPU))
        return self._gpus[net]

    def nets_per_gpu(self, gpu: int) -> int:
        """Return the number of nearest nets over which a GPU spreads its channels; 0 without any.

        Set by ``NCCL_NETDEVS_POLICY``.
        """
        nets = self.nets(gpu)
        if not nets or self.net_per_gpu < 0:
            return len(nets)
        if self.net_per_gpu:
            return min(self.net_per_gpu, len(nets))
        return -(-len(nets) // max(1, len(self.gpus(nets[0]))))

    def net(self, gpu: int, channel: int) -> int:
        """Return the net that a GPU uses on a channel, or -1 (ncclTopoGetLocalNet)."""
        nets = self.nets(gpu)
        if not nets:
            return -1
        at = self.system.gpus[gpu].dev
        if len(nets) & (len(nets) - 1) == 0:
            at = mirror_bits(at, len(nets))
        return nets[(at + channel % self.nets_per_gpu(gpu)) % len(nets)]

    def gpu(self, net: int) -> int:
        """Return the closest GPU that uses this net on the lowest channel, or -1
        (ncclTopoGetLocalGpu).
        """
        id = self.system.nets[net].id
        close = self.gpus(self.first(net))
        rounds = min(MAX_CHANNELS, max((self.nets_per_gpu(gpu) for gpu in close), default=0))
        for channel in range(rounds):
            for gpu in close:
                used = self.net(gpu, channel)
                if used >= 0 and self.system.nets[used].id == id:
                    return gpu
        return -1


def local_cpu(system: System, paths: PathTable, gpu: int) -> int:
    """Return the position of the CPU fewest hops away from a GPU (ncclGetLocalCpu).

    Raises ``TopologyError`` if the GPU reaches no CPU.
    """
    hops = [
        (path.count, cpu)
        for cpu, path in enumerate(paths.row(NodeType.GPU, gpu, NodeType.CPU))
        if path.count
    ]
    if not hops:
        raise TopologyError(f"cannot find the CPU of {system.gpus[gpu].name}: no path leads to one")
    return min(hops)[1]


def p2p_level(system: System, options: PathOptions) -> PathType:
    """Return the farthest path type over which GPUs access each other's memory."""
    if options.p2p_level is not None:
        return options.p2p_level
    cpu = system.cpus[0] if system.cpus else None
    amd = cpu is not None and cpu.arch == CpuArch.X86 and cpu.vendor == CpuVendor.AMD
    return PathType.SYS if amd and len(system.gpus) <= 2 else PathType.PXB


def peer_access(
    system: System, paths: PathTable, options: PathOptions, gpu: int, peer: int
) -> bool:
    """Return True if ``gpu`` may access the memory of ``peer`` directly (ncclTopoCheckP2p).

    The driver is assumed to allow every pair.
    """
    return paths.gpu_gpu(gpu, peer).type <= p2p_level(system, options)


def relay_gpu(system: System, paths: PathTable, gpu: int, peer: int) -> int:
    """Return the GPU whose NVLinks forward the traffic from ``gpu`` to ``peer``, or -1."""
    hops = paths.gpu_gpu(gpu, peer).hops
    if len(hops) != 2:
        return -1
    middle = system.links[hops[0]].target
    return system.position(middle) if system.nodes[middle].type == NodeType.GPU else -1


def net_is_faster(paths: PathTable, options: PathOptions, gpu: int, peer: int) -> bool:
    """Return True if both GPUs have a NIC within PXB that beats their path (ncclTopoCheckNet)."""
    if not options.net_intra:
        return False
    speed = paths.gpu_gpu(gpu, peer).bw

    def net_speed(g: int) -> float:
        return max(
            (p.bw for p in paths.row(NodeType.GPU, g, NodeType.NET) if p.type <= PathType.PXB),
            default=0.0,
        )

    return net_speed(gpu) > speed and net_speed(peer) > speed


def pxn_relay(system: System, paths: PathTable, gpu: int, net: int) -> int:
    """Return the GPU that forwards to ``net`` for ``gpu``, else ``gpu`` (NCCL GetIntermediateRank).

    On a PXN path it is the first GPU after the NVSwitches.
    """
    path = paths.gpu_net(gpu, net)
    if path.type != PathType.PXN:
        return gpu
    for hop in path.hops:
        target = system.links[hop].target
        if system.nodes[target].type == NodeType.GPU:
            return system.position(target)
        if system.nodes[target].type != NodeType.NVS:
            break
    raise TopologyError(
        f"cannot find the PXN relay from {system.gpus[gpu].name} to {system.nets[net].name}: "
        "the path has no other GPU"
    )


def gdr_mode(
    system: System, paths: PathTable, options: PathOptions, gpu: int, net: int, *, read: bool
) -> GdrMode:
    """Return the access of ``net`` to the memory of ``gpu`` (ncclTopoCheckGdr).

    ``read`` asks for sends, else for receives.
    """
    if not system.nets[net].gdr or not system.gpus[gpu].gdr:
        return GdrMode.DISABLED
    if read and not _gdr_read(system, paths, options, gpu):
        return GdrMode.DISABLED
    at = pxn_relay(system, paths, gpu, net)
    distance = paths.gpu_net(at, net).type
    if options.gdr_c2c and distance == PathType.P2C:
        distance = PathType.C2C
    if distance > (PathType.PXB if options.gdr_level is None else options.gdr_level):
        return GdrMode.DISABLED
    on_c2c = paths.gpu_cpu(at, local_cpu(system, paths, at)).type == PathType.C2C
    return GdrMode.PCI if on_c2c and distance != PathType.C2C else GdrMode.DEFAULT


def _gdr_read(system: System, paths: PathTable, options: PathOptions, gpu: int) -> bool:
    """Return True if sends use GPUDirect."""
    if options.gdr_read >= 0:
        return options.gdr_read != 0
    # Before Ampere, sends use GPUDirect only if NVLink keeps PCI free for them.
    if system.gpus[gpu].sm >= 80 or len(system.gpus) == 1:
        return True
    row = paths.row(NodeType.GPU, gpu, NodeType.GPU)
    return any(path.type == PathType.NVL for peer, path in enumerate(row) if peer != gpu)
