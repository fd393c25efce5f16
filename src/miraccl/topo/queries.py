"""Questions about a system and its paths that planning and transports ask again and again; NCCL's answers to them.

All take records and return indices or plain values; positions count among the nodes of a type. Sources: NCCL 2.28
``src/graph/paths.cc`` and ``src/graph/topo.cc`` (the function is named with each).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from miraccl.errors import TopologyError
from miraccl.topo.options import PathOptions
from miraccl.topo.records import CpuArch, CpuVendor, NodeType, Path, PathTable, PathType, System

MAX_CHANNELS = 64


class GdrMode(enum.IntEnum):
    """How a NIC accesses GPU memory: not at all, directly, or over PCI on a machine where the GPU hangs on the CPU by C2C."""

    DISABLED = 0
    DEFAULT = 1
    PCI = 2


def nearest(row: Sequence[Path]) -> list[int]:
    """Positions of the targets with the most bandwidth and, among these, the best path type (ncclTopoGetLocal)."""
    best: list[int] = []
    bw, type = 0.0, PathType.DIS
    for i, path in enumerate(row):
        if path.bw > bw or (path.bw == bw and path.type < type):
            bw, type, best = path.bw, path.type, [i]
        elif path.bw == bw and path.type == type:
            best.append(i)
    return best


def mirror_bits(value: int, power: int) -> int:
    """The low bits of ``value`` in reverse order, for ``power`` = 2**bits: spreads neighbours over NICs."""
    mirrored, low, high = 0, 1, power >> 1
    while low < power:
        if value & low:
            mirrored |= high
        low, high = low << 1, high >> 1
    return mirrored


class NearestDevices:
    """Which NICs a GPU uses and which GPU is the closest to a NIC. Answers are kept until :meth:`forget`."""

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
        """The row of this GPU to the nets, or of this net to the GPUs, has changed."""
        if gpu is not None:
            self._nets.pop(gpu, None)
        if net is not None:
            self._gpus.pop(net, None)

    def first(self, net: int) -> int:
        """The first net with the id of this one; it answers for all that bear the id."""
        return self._first[self.system.nets[net].id]

    def nets(self, gpu: int) -> list[int]:
        """The nearest nets of a GPU (ncclTopoGetLocalNets)."""
        if gpu not in self._nets:
            self._nets[gpu] = nearest(self.paths.row(NodeType.GPU, gpu, NodeType.NET))
        return self._nets[gpu]

    def gpus(self, net: int) -> list[int]:
        if net not in self._gpus:
            self._gpus[net] = nearest(self.paths.row(NodeType.NET, net, NodeType.GPU))
        return self._gpus[net]

    def nets_per_gpu(self, gpu: int) -> int:
        """Over how many of its nearest nets a GPU spreads its channels (``NCCL_NETDEVS_POLICY``); 0 where it has none."""
        nets = self.nets(gpu)
        if not nets or self.net_per_gpu < 0:
            return len(nets)
        if self.net_per_gpu:
            return min(self.net_per_gpu, len(nets))
        return -(-len(nets) // max(1, len(self.gpus(nets[0]))))

    def net(self, gpu: int, channel: int) -> int:
        """The net a GPU uses on a channel, -1 where it reaches none (ncclTopoGetLocalNet)."""
        nets = self.nets(gpu)
        if not nets:
            return -1
        at = self.system.gpus[gpu].dev
        if len(nets) & (len(nets) - 1) == 0:
            at = mirror_bits(at, len(nets))
        return nets[(at + channel % self.nets_per_gpu(gpu)) % len(nets)]

    def gpu(self, net: int) -> int:
        """The GPU that uses this net on the lowest channel, among the closest ones; -1 none (ncclTopoGetLocalGpu)."""
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
    """Position of the CPU fewest hops away from a GPU (ncclGetLocalCpu)."""
    hops = [
        (path.count, cpu)
        for cpu, path in enumerate(paths.row(NodeType.GPU, gpu, NodeType.CPU))
        if path.count
    ]
    if not hops:
        raise TopologyError(f"{system.gpus[gpu].name} reaches no CPU")
    return min(hops)[1]


def p2p_level(system: System, options: PathOptions) -> PathType:
    """Farthest path type over which GPUs access each other's memory."""
    if options.p2p_level is not None:
        return options.p2p_level
    cpu = system.cpus[0] if system.cpus else None
    amd = cpu is not None and cpu.arch == CpuArch.X86 and cpu.vendor == CpuVendor.AMD
    return PathType.SYS if amd and len(system.gpus) <= 2 else PathType.PXB


def peer_access(
    system: System, paths: PathTable, options: PathOptions, gpu: int, peer: int
) -> bool:
    """Whether ``gpu`` may access the memory of ``peer`` directly (ncclTopoCheckP2p, with drivers that allow every pair)."""
    return paths.gpu_gpu(gpu, peer).type <= p2p_level(system, options)


def relay_gpu(system: System, paths: PathTable, gpu: int, peer: int) -> int:
    """The GPU whose NVLinks the traffic from ``gpu`` to ``peer`` passes, -1 none."""
    hops = paths.gpu_gpu(gpu, peer).hops
    if len(hops) != 2:
        return -1
    middle = system.links[hops[0]].target
    return system.position(middle) if system.nodes[middle].type == NodeType.GPU else -1


def net_is_faster(paths: PathTable, options: PathOptions, gpu: int, peer: int) -> bool:
    """Whether two GPUs of one node do better over the network: both have a NIC within PXB that beats their path (ncclTopoCheckNet)."""
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
    """The GPU that talks to ``net`` for ``gpu``: the first GPU behind NVSwitches on a PXN path, else ``gpu`` (GetIntermediateRank)."""
    path = paths.gpu_net(gpu, net)
    if path.type != PathType.PXN:
        return gpu
    for hop in path.hops:
        target = system.links[hop].target
        if system.nodes[target].type == NodeType.GPU:
            return system.position(target)
        if system.nodes[target].type != NodeType.NVS:
            break
    raise TopologyError(f"no GPU between {system.gpus[gpu].name} and {system.nets[net].name}")


def gdr_mode(
    system: System, paths: PathTable, options: PathOptions, gpu: int, net: int, *, read: bool
) -> GdrMode:
    """Whether ``net`` accesses the memory of ``gpu`` directly, for sends (``read``) or receives (ncclTopoCheckGdr)."""
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
    """Before Ampere, sends use GPUDirect only where NVLink leaves PCI free for them."""
    if options.gdr_read >= 0:
        return options.gdr_read != 0
    if system.gpus[gpu].sm >= 80 or len(system.gpus) == 1:
        return True
    row = paths.row(NodeType.GPU, gpu, NodeType.GPU)
    return any(path.type == PathType.NVL for peer, path in enumerate(row) if peer != gpu)
