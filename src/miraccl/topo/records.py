"""Records of a machine: nodes and links (``System``) and the routes between them (``PathTable``).

- Everything is an index. ``System.nodes`` is one flat tuple ordered by type (GPU, PCI, NVS, CPU,
  NIC, NET) and, within a type, in NCCL's order of creation. A link names its target by flat index;
  a hop of a path names a link by its *global link number*: the links of node 0 come first, then
  those of node 1, ... (``System.link_start``). So a search can copy the bandwidths into one flat
  array.
- Bandwidths are GB/s (1e9 bytes/s): IEEE single-precision values held as Python floats. Computed
  ones go through :func:`f32`, because NCCL's decisions depend on the last digit.
- The numeric values of the enums are those of NCCL 2.28 (``src/graph/topo.h``): link and path types
  share one scale, best first.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from miraccl.errors import TopologyError

_FLOAT = struct.Struct("f")


def f32(value: float) -> float:
    """Round to the nearest IEEE single-precision number; values too large become infinity."""
    try:
        return float(_FLOAT.unpack(_FLOAT.pack(value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


LOC_BW = 5000.0
"""GB/s of a node to itself and of links without a limit of their own (NCCL ``LOC_BW``)."""

LOCAL_ID_MASK = (1 << 56) - 1
"""Mask of the local id in ``system << 56 | local id``.

The local id is the NUMA number of a CPU, the bus id of a PCI device, the device number of a NET."""

UNDEF = -1


class NodeType(enum.IntEnum):
    """Kinds of vertices, in the order of ``System.nodes``. A CPU is a NUMA domain."""

    GPU = 0
    PCI = 1
    NVS = 2
    CPU = 3
    NIC = 4
    NET = 5


class LinkType(enum.IntEnum):
    """Kinds of edges; values match :class:`PathType` where both exist."""

    LOC = 0
    NVL = 1
    C2C = 3
    PCI = 4
    SYS = 9
    NET = 10


class PathType(enum.IntEnum):
    """Distance of two nodes, best first."""

    LOC = 0  # the node itself
    NVL = 1  # NVLink
    NVB = 2  # NVLink through another GPU
    C2C = 3  # GPU and CPU joined chip to chip
    PIX = 4  # one PCI bridge at most
    PXB = 5  # several PCI bridges
    P2C = 6  # C2C to the CPU, PCI to the NIC
    PXN = 7  # NVLink to another GPU, PCI to the NIC
    PHB = 8  # through the host bridge of one NUMA domain
    SYS = 9  # between NUMA domains
    NET = 10  # only over the network
    DIS = 11  # not connected


class CpuArch(enum.IntEnum):
    """CPU architectures, numbered like in NCCL."""

    UNDEF = -1
    UNKNOWN = 0
    X86 = 1
    POWER = 2
    ARM = 3


class CpuVendor(enum.IntEnum):
    """CPU vendors, numbered like in NCCL."""

    UNDEF = -1
    UNKNOWN = 0
    INTEL = 1
    AMD = 2
    ZHAOXIN = 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """One directed edge to the node with flat index ``target``; ``bw`` is GB/s."""

    type: LinkType
    bw: float
    target: int


@dataclass(frozen=True, kw_only=True)
class TopoNode:
    """A vertex.

    ``id`` contains the system number in its upper 8 bits. ``links`` are in NCCL's order. ``label``
    is informational: the name of a net, or the kind of an accelerator or switch that NCCL does not
    know.
    """

    type: NodeType
    id: int
    links: tuple[Link, ...] = ()
    label: str = ""

    @property
    def system_id(self) -> int:
        """Number of the host, from the upper 8 bits of ``id``."""
        return (self.id >> 56) & 0xFF

    @property
    def local_id(self) -> int:
        """The id within its host: bus id, NUMA number or device number."""
        return self.id & LOCAL_ID_MASK

    @property
    def name(self) -> str:
        """``TYPE/<system>-<id>``, both in hex, as NCCL prints it."""
        return f"{self.type.name}/{self.system_id:x}-{self.local_id:x}"


@dataclass(frozen=True, kw_only=True)
class GpuNode(TopoNode):
    """A GPU.

    ``dev`` is its device number, ``rank`` the local rank, ``sm`` the compute capability times ten;
    ``gdr`` is 1 if it supports GPUDirect RDMA.
    """

    type: NodeType = NodeType.GPU
    dev: int = UNDEF
    rank: int = UNDEF
    sm: int = UNDEF
    gdr: int = 0


@dataclass(frozen=True, kw_only=True)
class PciNode(TopoNode):
    """A PCI switch; ``device`` packs vendor, device, subsystem vendor, subsystem device (16 bits
    each).
    """

    type: NodeType = NodeType.PCI
    device: int = 0


@dataclass(frozen=True, kw_only=True)
class CpuNode(TopoNode):
    """A NUMA domain.

    ``model`` is numbered per vendor (Intel: 1 Broadwell, 2 Skylake, 3 Sapphire Rapids, 4 Emerald
    Rapids; Zhaoxin: 1 Yongfeng); ``affinity`` is the cpumap text of the file.
    """

    type: NodeType = NodeType.CPU
    arch: int = CpuArch.UNDEF
    vendor: int = CpuVendor.UNDEF
    model: int = UNDEF
    affinity: str = ""


@dataclass(frozen=True, kw_only=True)
class NetNode(TopoNode):
    """A network device.

    ``asic`` is the guid (or the id), ``bw`` GB/s, ``latency`` us, ``local_gpu`` the index of the
    GPU that NCCL considers closest (-1 for none).
    """

    type: NodeType = NodeType.NET
    dev: int = UNDEF
    asic: int = 0
    port: int = UNDEF
    bw: float = 0.0
    latency: float = 0.0
    gdr: int = 0
    coll: int = 0
    max_channels: int = 0
    local_gpu: int = UNDEF


@dataclass(frozen=True, kw_only=True)
class System:
    """The graph of one node (host).

    ``max_bw`` and ``total_bw`` are GB/s as NCCL's search uses them; ``inter`` is 1 if the
    communicator reaches beyond these GPUs; ``system_id`` is the number of this host within the
    file. Raises ``TopologyError`` if nodes are out of order or a link leads to an unknown node.
    """

    nodes: tuple[TopoNode, ...]
    max_bw: float = 0.0
    total_bw: float = 0.0
    inter: int = 0
    system_id: int = 0

    def __post_init__(self) -> None:
        last = NodeType.GPU
        for i, node in enumerate(self.nodes):
            if node.type < last:
                raise TopologyError(
                    f"cannot use the system: node {i} ({node.name}) is out of order; "
                    "nodes are grouped by type"
                )
            last = node.type
            for link in node.links:
                if not 0 <= link.target < len(self.nodes):
                    raise TopologyError(
                        f"cannot use the system: a link of {node.name} leads to node "
                        f"{link.target} of {len(self.nodes)}"
                    )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Flat index of the first node of each type; a seventh entry is the number of nodes."""
        counts = [0] * (len(NodeType) + 1)
        for node in self.nodes:
            counts[node.type + 1] += 1
        for i in range(len(NodeType)):
            counts[i + 1] += counts[i]
        return tuple(counts)

    def of(self, type: NodeType) -> tuple[TopoNode, ...]:
        """Return the nodes of a type."""
        return self.nodes[self.starts[type] : self.starts[type + 1]]

    def count(self, type: NodeType) -> int:
        """Return the number of nodes of a type."""
        return self.starts[type + 1] - self.starts[type]

    @cached_property
    def gpus(self) -> tuple[GpuNode, ...]:
        """The GPUs."""
        return tuple(n for n in self.nodes if isinstance(n, GpuNode))

    @cached_property
    def pcis(self) -> tuple[PciNode, ...]:
        """The PCI switches."""
        return tuple(n for n in self.nodes if isinstance(n, PciNode))

    @cached_property
    def cpus(self) -> tuple[CpuNode, ...]:
        """The NUMA domains."""
        return tuple(n for n in self.nodes if isinstance(n, CpuNode))

    @cached_property
    def nets(self) -> tuple[NetNode, ...]:
        """The network devices."""
        return tuple(n for n in self.nodes if isinstance(n, NetNode))

    def index(self, type: NodeType, position: int) -> int:
        """Return the flat index of the ``position``-th node of a type."""
        return self.starts[type] + position

    def position(self, index: int) -> int:
        """Return the position within its type of the node with this flat index."""
        return index - self.starts[self.nodes[index].type]

    # Links by global number

    @cached_property
    def link_start(self) -> tuple[int, ...]:
        """Global number of each node's first link; the last entry is the number of links."""
        starts = [0]
        for node in self.nodes:
            starts.append(starts[-1] + len(node.links))
        return tuple(starts)

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """All links by global number."""
        return tuple(link for node in self.nodes for link in node.links)

    @cached_property
    def link_source(self) -> tuple[int, ...]:
        """Flat index of the source of each link, by global link number."""
        return tuple(i for i, node in enumerate(self.nodes) for _ in node.links)

    @cached_property
    def reverse_links(self) -> tuple[int, ...]:
        """Global number of the first opposite link of the same type for each link, or -1."""
        first: dict[tuple[int, int, LinkType], int] = {}
        for number, link in enumerate(self.links):
            first.setdefault((self.link_source[number], link.target, link.type), number)
        return tuple(
            first.get((link.target, self.link_source[n], link.type), -1)
            for n, link in enumerate(self.links)
        )


@dataclass(frozen=True, kw_only=True)
class Path:
    """A route.

    ``hops`` are global link numbers in order of travel; ``bw`` is GB/s. An unreachable node has
    type DIS, bandwidth 0 and no hops.
    """

    type: PathType
    bw: float
    hops: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Number of hops."""
        return len(self.hops)


DISCONNECTED = Path(type=PathType.DIS, bw=0.0)

TABLE_SOURCES = (NodeType.GPU, NodeType.NET)
TABLE_TARGETS = (NodeType.GPU, NodeType.NET, NodeType.CPU, NodeType.NVS)

Rows = Sequence[Sequence[Path]]


@dataclass(frozen=True, kw_only=True)
class PathTable:
    """Paths from every GPU and NET, after all corrections.

    ``rows[source type, target type][i][j]`` leads from the i-th node of the source type to the j-th
    of the target type. The row is empty where no paths are computed (NET to NET, or no such nodes).
    """

    rows: Mapping[tuple[NodeType, NodeType], Rows] = field(default_factory=dict)

    def row(self, source: NodeType, position: int, target: NodeType) -> Sequence[Path]:
        """Return the paths of one node to all nodes of a type; empty if none were computed."""
        rows = self.rows.get((source, target), ())
        return rows[position] if position < len(rows) else ()

    def path(self, source: NodeType, i: int, target: NodeType, j: int) -> Path:
        """Return a path, or :data:`DISCONNECTED` if none was computed."""
        row = self.row(source, i, target)
        return row[j] if j < len(row) else DISCONNECTED

    def gpu_gpu(self, i: int, j: int) -> Path:
        """Return the path from GPU ``i`` to GPU ``j``."""
        return self.path(NodeType.GPU, i, NodeType.GPU, j)

    def gpu_net(self, gpu: int, net: int) -> Path:
        """Return the path from a GPU to a net."""
        return self.path(NodeType.GPU, gpu, NodeType.NET, net)

    def net_gpu(self, net: int, gpu: int) -> Path:
        """Return the path from a net to a GPU."""
        return self.path(NodeType.NET, net, NodeType.GPU, gpu)

    def gpu_cpu(self, gpu: int, cpu: int) -> Path:
        """Return the path from a GPU to a CPU."""
        return self.path(NodeType.GPU, gpu, NodeType.CPU, cpu)

    def __iter__(self) -> Iterator[tuple[NodeType, int, NodeType, int, Path]]:
        for (source, target), rows in self.rows.items():
            for i, row in enumerate(rows):
                for j, path in enumerate(row):
                    yield source, i, target, j, path
