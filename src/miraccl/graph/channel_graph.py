"""``ChannelGraph``, the result of a channel search, with its JSON and XML forms.

The JSON is section ``graphs`` of the reference results. The XML is NCCL's (``NCCL_GRAPH_FILE``,
``NCCL_GRAPH_DUMP_FILE``; NCCL 2.28 ``src/graph/search.cc``, ``src/graph/xml.cc``).

- A channel is an order of local ranks of one node. If the communicator spans nodes, it also has the
  ids of the net it enters by and of the net it leaves by. An NVLS channel lists its head rank only.
- Bandwidths are GB/s per channel: IEEE single-precision values held as Python floats.
- Pattern and kind numbers are NCCL's; both forms contain them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from miraccl.errors import TopologyError
from miraccl.graph.kinds import GraphKind, Pattern
from miraccl.topo.records import GpuNode, PathType, System, f32
from miraccl.topo.system_json import number

MAX_CHANNELS = 64
"""Maximum channels of a graph (NCCL ``MAXCHANNELS``)."""

GRAPH_XML_VERSION = 1

# Limits of a graph file in GB/s and us: far beyond any machine, and all derived values stay finite
# in single precision.
MIN_SPEED, MAX_SPEED = 1e-6, 1e6
MAX_LATENCY = 1e9


@dataclass(frozen=True, kw_only=True)
class ChannelGraph:
    """The channels found for one kind of algorithm.

    ``computed`` is False if the search did not run; the other fields then hold initial values.
    ``intra[c]`` is the order of ranks of channel c; ``inter[c]`` holds the ids of its first and
    last net and is empty if the communicator stays inside the node. ``type_intra`` and
    ``type_inter`` are the worst path types allowed, ``n_hops`` is the hop count that NCCL stores
    with the solution, ``latency_inter`` is in us.
    """

    kind: GraphKind
    pattern: Pattern
    computed: bool = True
    bw_intra: float = 0.0
    bw_inter: float = 0.0
    latency_inter: float = 0.0
    type_intra: PathType = PathType.LOC
    type_inter: PathType = PathType.LOC
    same_channels: int = 0
    cross_nic: int = 0
    n_hops: int = 0
    min_channels: int = 1
    max_channels: int = MAX_CHANNELS
    intra: tuple[tuple[int, ...], ...] = ()
    inter: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if len(self.intra) > MAX_CHANNELS:
            raise TopologyError(
                f"cannot use the {self.kind.label} graph: {len(self.intra)} channels, "
                f"allowed are {MAX_CHANNELS}"
            )
        if self.inter and len(self.inter) != len(self.intra):
            raise TopologyError(
                f"cannot use the {self.kind.label} graph: nets for {len(self.inter)} "
                f"of {len(self.intra)} channels"
            )

    @property
    def n_channels(self) -> int:
        return len(self.intra)


def start_graph(kind: GraphKind, ring_channels: int) -> ChannelGraph:
    """Return the initial graph of a search (NCCL ``src/init.cc`` initTransportsRank).

    Trees and CollNet chains request exactly ``ring_channels`` channels, the count of the ring
    graph.
    """
    match kind:
        case GraphKind.RING:
            return ChannelGraph(
                kind=kind, pattern=Pattern.RING, computed=False, max_channels=MAX_CHANNELS // 2
            )
        case GraphKind.TREE | GraphKind.COLLNET_CHAIN:
            pattern = Pattern.BALANCED_TREE if kind is GraphKind.TREE else Pattern.TREE
            return ChannelGraph(
                kind=kind,
                pattern=pattern,
                computed=False,
                min_channels=ring_channels,
                max_channels=ring_channels,
            )
        case GraphKind.NVLS:
            return ChannelGraph(kind=kind, pattern=Pattern.NVLS, computed=False)
        case GraphKind.COLLNET_DIRECT:
            return ChannelGraph(kind=kind, pattern=Pattern.COLLNET_DIRECT, computed=False)


# JSON


def graph_to_json(graph: ChannelGraph) -> dict[str, Any]:
    """Return one object of section ``graphs``."""
    return {
        "id": int(graph.kind),
        "name": graph.kind.label,
        "computed": int(graph.computed),
        "pattern": int(graph.pattern),
        "nChannels": graph.n_channels,
        "bwIntra": number(graph.bw_intra),
        "bwInter": number(graph.bw_inter),
        "latencyInter": number(graph.latency_inter),
        "typeIntra": graph.type_intra.name,
        "typeInter": graph.type_inter.name,
        "sameChannels": graph.same_channels,
        "crossNic": graph.cross_nic,
        "nHops": graph.n_hops,
        "minChannels": graph.min_channels,
        "maxChannels": graph.max_channels,
        "intra": [list(ranks) for ranks in graph.intra],
        "inter": [list(nets) for nets in graph.inter],
    }


def graph_from_json(data: Mapping[str, Any]) -> ChannelGraph:
    """Read one object of section ``graphs``.

    Raises ``TopologyError`` if a key is missing or a value is not allowed.
    """
    try:
        return ChannelGraph(
            kind=GraphKind(data["id"]),
            pattern=Pattern(data["pattern"]),
            computed=bool(data["computed"]),
            bw_intra=f32(data["bwIntra"]),
            bw_inter=f32(data["bwInter"]),
            latency_inter=f32(data["latencyInter"]),
            type_intra=PathType[data["typeIntra"]],
            type_inter=PathType[data["typeInter"]],
            same_channels=data["sameChannels"],
            cross_nic=data["crossNic"],
            n_hops=data["nHops"],
            min_channels=data["minChannels"],
            max_channels=data["maxChannels"],
            intra=tuple(tuple(int(r) for r in ranks) for ranks in data["intra"]),
            inter=tuple((int(first), int(last)) for first, last in data["inter"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"cannot read the channel graph: {error!r}") from None


# NCCL's graph XML. Devices are written in hex as ``dev`` numbers with the system number above
# bit 56; the order of graphs is NCCL's.

_DUMP_ORDER = (
    GraphKind.RING,
    GraphKind.TREE,
    GraphKind.COLLNET_DIRECT,
    GraphKind.COLLNET_CHAIN,
    GraphKind.NVLS,
)


def graphs_to_xml(graphs: Iterable[ChannelGraph], system: System) -> str:
    """Return the text that NCCL writes to ``NCCL_GRAPH_DUMP_FILE``, byte for byte.

    Raises ``TopologyError`` for a rank that is not in ``system``.
    """
    # NCCL fails for the path type C2C, for which it has no name; we write ``C2C``.
    by_kind = {graph.kind: graph for graph in graphs}
    devices = {gpu.rank: _device(gpu) for gpu in system.gpus}
    lines = [f'<graphs version="{GRAPH_XML_VERSION}">']
    for kind in _DUMP_ORDER:
        if kind in by_kind:
            lines += _graph_lines(by_kind[kind], devices)
    lines.append("</graphs>")
    return "\n".join(lines) + "\n"


def _device(gpu: GpuNode) -> int:
    return (gpu.system_id << 56) | gpu.dev


def _graph_lines(graph: ChannelGraph, devices: Mapping[int, int]) -> list[str]:
    attributes = {
        "id": int(graph.kind),
        "pattern": int(graph.pattern),
        "crossnic": graph.cross_nic,
        "nchannels": graph.n_channels,
        "speedintra": f"{graph.bw_intra:g}",
        "speedinter": f"{graph.bw_inter:g}",
        "latencyinter": f"{graph.latency_inter:g}",
        "typeintra": graph.type_intra.name,
        "typeinter": graph.type_inter.name,
        "samechannels": graph.same_channels,
    }
    head = "  <graph " + " ".join(f'{key}="{value}"' for key, value in attributes.items())
    if not graph.intra:
        return [head + "/>"]
    lines = [head + ">"]
    for c, ranks in enumerate(graph.intra):
        unknown = [rank for rank in ranks if rank not in devices]
        if unknown:
            raise TopologyError(
                f"cannot write channel {c} of the {graph.kind.label} graph: "
                f"rank {unknown[0]} is not in the system"
            )
        steps = [f'      <gpu dev="{_hex(devices[rank])}"/>' for rank in ranks]
        if graph.inter:
            first, last = graph.inter[c]
            steps = [
                f'      <net dev="{_hex(first)}"/>',
                *steps,
                f'      <net dev="{_hex(last)}"/>',
            ]
        lines += ["    <channel>", *steps, "    </channel>"]
    lines.append("  </graph>")
    return lines


def _hex(value: int) -> str:
    """Format like C's ``%#lx``, which writes zero without a prefix."""
    return f"{value:#x}" if value else "0"


def graphs_from_xml(text: str, system: System) -> dict[GraphKind, ChannelGraph]:
    """Read the graphs of a file in NCCL's graph format, by kind.

    Fields that the format lacks keep the values of ``start_graph``. Raises ``TopologyError`` with
    the graph and the reason.
    """
    # A document type could define entities that grow without bound.
    if "<!" in text.replace("<!--", ""):
        raise TopologyError(
            "cannot read the graph file: its format allows no document type and no CDATA"
        )
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise TopologyError(f"cannot read the graph file: it is not XML: {error}") from None
    if root.tag != "graphs":
        raise TopologyError(
            f"cannot read the graph file: it begins with <{root.tag}>, expected <graphs>"
        )
    if root.get("version") != str(GRAPH_XML_VERSION):
        raise TopologyError(
            f"cannot read the graph file: version {root.get('version')!r}, "
            f"allowed is {GRAPH_XML_VERSION}"
        )
    graphs: dict[GraphKind, ChannelGraph] = {}
    for element in root.findall("graph"):
        graph = _graph_from_element(element, system)
        graphs[graph.kind] = graph
    return graphs


def _graph_from_element(element: ElementTree.Element, system: System) -> ChannelGraph:
    try:
        kind = GraphKind(_whole(element, "id", 0, max(GraphKind)))
        count = _whole(element, "nchannels")
        pattern = Pattern(_whole(element, "pattern", min(Pattern), max(Pattern)))
        channels = [
            _channel_from_element(channel, number, kind, system)
            for number, channel in enumerate(element)
        ]
        if not 0 <= count <= len(channels):
            raise TopologyError(
                f"cannot read the {kind.label} graph of the file: nchannels is {count}, "
                f"but it has {len(channels)}"
            )
        channels = channels[:count]
        for number, (ranks, _) in enumerate(channels):
            _check_channel(ranks, number, kind, pattern, system)
        start = start_graph(kind, count)
        return ChannelGraph(
            kind=kind,
            pattern=pattern,
            bw_intra=_speed(element.attrib["speedintra"]),
            bw_inter=_speed(element.attrib["speedinter"]),
            latency_inter=_latency(element.get("latencyinter", "0")),
            type_intra=PathType[element.attrib["typeintra"]],
            type_inter=PathType[element.attrib["typeinter"]],
            same_channels=_whole(element, "samechannels", 0, 1),
            cross_nic=_whole(element, "crossnic", 0, 2),
            min_channels=start.min_channels,
            max_channels=start.max_channels,
            intra=tuple(ranks for ranks, _ in channels),
            inter=tuple(_ends(nets) for _, nets in channels) if system.inter else (),
        )
    except KeyError as error:
        raise TopologyError(
            f"{_cannot_read(element)}: {error} is missing or not a path type"
        ) from None
    except ValueError as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"{_cannot_read(element)}: {error}") from None


def _cannot_read(element: ElementTree.Element) -> str:
    return f"cannot read the <graph> of the file with id {element.get('id', '')[:40]!r}"


def _check_channel(
    ranks: Sequence[int], number: int, kind: GraphKind, pattern: Pattern, system: System
) -> None:
    """Raise ``TopologyError`` for a channel that its graph cannot have.

    An NVLS channel needs a head. Any other channel lists each GPU once, and a tree on one GPU has
    pattern TREE.
    """
    name = f"cannot use channel {number} of the {kind.label} graph of the file"
    if kind is GraphKind.NVLS:
        if not ranks:
            raise TopologyError(f"{name}: it names no GPU")
        return
    if sorted(ranks) != sorted(gpu.rank for gpu in system.gpus):
        given = " ".join(map(str, ranks)) or "none"
        raise TopologyError(
            f"{name}: it has the GPUs of ranks {given}; "
            f"expected is each of the {len(system.gpus)} GPUs once"
        )
    if kind is GraphKind.TREE and len(ranks) == 1 and pattern is not Pattern.TREE:
        raise TopologyError(
            f"{name}: pattern {int(pattern)} needs two GPUs; "
            f"a tree on one GPU is pattern {int(Pattern.TREE)}"
        )


def _whole(
    element: ElementTree.Element, name: str, low: int | None = None, high: int | None = None
) -> int:
    """Read an integer attribute; ``ValueError`` outside ``low`` to ``high``."""
    text = element.attrib[name]
    allowed = "whole numbers" if low is None else f"{low} to {high}"
    try:
        value = int(text, 0)
    except ValueError:
        value = None
    if value is None or (low is not None and high is not None and not low <= value <= high):
        raise ValueError(f"{name} is {text[:40]!r}; allowed are {allowed}")
    return value


def _speed(text: str) -> float:
    """Read a bandwidth in GB/s."""
    value = f32(float(text))
    if value and not MIN_SPEED <= value <= MAX_SPEED:
        raise ValueError(
            f"bandwidth {text!r}; allowed are 0 and {MIN_SPEED:g} to {MAX_SPEED:g} GB/s"
        )
    return value


def _latency(text: str) -> float:
    """Read a latency in us."""
    value = f32(float(text))
    if not 0 <= value <= MAX_LATENCY:
        raise ValueError(f"latency {text!r}; allowed are 0 to {MAX_LATENCY:g} us")
    return value


def _channel_from_element(
    element: ElementTree.Element, number: int, kind: GraphKind, system: System
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks and the net ids of a ``<channel>``."""
    ranks = {_device(gpu): gpu.rank for gpu in system.gpus}
    known = {0, *(net.id for net in system.nets)}  # NCCL writes 0 if it found no net
    order: list[int] = []
    nets: list[int] = []
    for step in element:
        if step.tag not in ("net", "gpu"):
            continue
        text = step.get("dev", "")
        try:
            device = int(text, 16)
        except ValueError:
            raise TopologyError(
                f"cannot read channel {number} of the {kind.label} graph of the file: "
                f"dev of a <{step.tag}> is {text[:40]!r}, expected is its device number in hex"
            ) from None
        if device not in ranks if step.tag == "gpu" else system.inter and device not in known:
            raise TopologyError(
                f"cannot use channel {number} of the {kind.label} graph of the file: "
                f"{step.tag.upper()} {device:#x} is not in the system"
            )
        if step.tag == "net":
            nets.append(device)
        else:
            order.append(ranks[device])
    return tuple(order), tuple(nets)


def _ends(nets: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last net, or zeros for a channel without nets, like NCCL."""
    return (nets[0], nets[-1]) if nets else (0, 0)
