"""Positions of the devices and links of a machine in its picture.

The tree of CPUs, PCI switches and devices is laid out in columns: every device has a column of its
own and a parent is above the middle of its children, so boxes never overlap and a link drawn down a
column crosses no box. Rows from the top: CPUs, levels of PCI switches, GPUs and NICs, the nets of
each NIC (stacked), space for NVLinks between GPUs, and the NVSwitch as a bar below all GPUs.

Coordinates are pixels, y grows downwards; a box is given by its centre.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from miraccl.topo.explain import cpu_name
from miraccl.topo.records import GpuNode, LinkType, NetNode, NodeType, PciNode, System

Point = tuple[float, float]

SIZES = {
    NodeType.CPU: (150, 44),
    NodeType.PCI: (78, 26),
    NodeType.GPU: (88, 48),
    NodeType.NIC: (78, 24),
    NodeType.NET: (78, 36),
    NodeType.NVS: (120, 36),
}
"""Width and height of a box."""

COLUMN_GAP = 12
CPU_GAP = 48
ROW = 66
MARGIN = 28
NET_STEP = 44
NET_ROWS = 5
"""Nets of one NIC per column."""
NVLINK_STEP = 15
SYS_STEP = 16


@dataclass(frozen=True, kw_only=True)
class Box:
    """A device. ``index`` is its flat index in the system."""

    index: int
    kind: NodeType
    title: str
    subtitle: str
    x: float
    y: float
    w: float
    h: float

    @property
    def left(self) -> float:
        return self.x - self.w / 2

    @property
    def right(self) -> float:
        return self.x + self.w / 2

    @property
    def top(self) -> float:
        return self.y - self.h / 2

    @property
    def bottom(self) -> float:
        return self.y + self.h / 2


@dataclass(frozen=True, kw_only=True)
class DrawnLink:
    """A link, drawn once for both directions.

    - ``bw``: GB/s.
    - ``points``: corners of the line; with ``curved`` the control points of a smooth curve.
    - ``label``: position of the bandwidth, None if it is not shown.
    """

    source: int
    target: int
    type: LinkType
    bw: float
    points: tuple[Point, ...]
    label: Point | None
    curved: bool = False


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Positions of all boxes and links.

    Channels may be drawn below the GPUs between ``overlay_top`` and ``overlay_bottom``.
    """

    width: float
    height: float
    boxes: tuple[Box, ...]
    links: tuple[DrawnLink, ...]
    overlay_top: float
    overlay_bottom: float


@dataclass
class _Tree:
    """Parents and children by flat index, and the depth of each node below its CPU."""

    parent: dict[int, int] = field(default_factory=dict)
    children: dict[int, list[int]] = field(default_factory=dict)
    depth: dict[int, int] = field(default_factory=dict)
    roots: list[int] = field(default_factory=list)


def draw_system(system: System) -> Drawing:
    """Place all devices and links of a machine."""
    tree = _find_tree(system)
    placed = _Placer(system, tree)
    boxes = placed.boxes()
    return Drawing(
        width=placed.width,
        height=placed.height,
        boxes=tuple(boxes[i] for i in sorted(boxes)),
        links=tuple(_place_links(system, tree, boxes, placed)),
        overlay_top=placed.overlay_top,
        overlay_bottom=placed.overlay_bottom,
    )


def _find_tree(system: System) -> _Tree:
    """Build the tree breadth first from the CPUs.

    PCI and network links come first, then C2C and NVLink for GPUs without a PCI link.
    """
    tree = _Tree(roots=[i for i, node in enumerate(system.nodes) if node.type == NodeType.CPU])
    tree.depth = dict.fromkeys(tree.roots, 0)
    _grow(system, tree, (LinkType.PCI, LinkType.NET))
    _grow(system, tree, (LinkType.PCI, LinkType.NET, LinkType.C2C, LinkType.NVL))
    for i, node in enumerate(system.nodes):  # unconnected devices are roots
        if i not in tree.depth and node.type != NodeType.NVS:
            tree.roots.append(i)
            tree.depth[i] = 0
            _grow(system, tree, (LinkType.PCI, LinkType.NET))
    return tree


def _grow(system: System, tree: _Tree, types: Sequence[LinkType]) -> None:
    queue = sorted(tree.depth, key=lambda i: (tree.depth[i], i))
    for node in queue:
        if system.nodes[node].type in (NodeType.GPU, NodeType.NET):  # leaves
            continue
        for link in system.nodes[node].links:
            below = system.nodes[link.target]
            if (
                link.type not in types
                or link.target in tree.depth
                or below.type in (NodeType.NVS, NodeType.CPU)
            ):
                continue
            tree.parent[link.target] = node
            tree.children.setdefault(node, []).append(link.target)
            tree.depth[link.target] = tree.depth[node] + 1
            queue.append(link.target)


def _tracks(system: System, order: Mapping[int, int], *, least: int) -> dict[tuple[int, int], int]:
    """Assign a height to each pair of joined devices such that pairs of one height do not overlap.

    Short pairs come first. ``order`` maps devices to positions from left to right; pairs less than
    ``least`` positions apart need no height.
    """
    pairs = {
        (min(i, link.target, key=order.__getitem__), max(i, link.target, key=order.__getitem__))
        for i in order
        for link in system.nodes[i].links
        if link.target in order and abs(order[link.target] - order[i]) >= least
    }
    occupied: list[list[tuple[int, int]]] = []
    tracks = {}
    for length, start, pair in sorted((order[b] - order[a], order[a], (a, b)) for a, b in pairs):
        free = (
            n
            for n, row in enumerate(occupied)
            if all(start + length < s or e < start for s, e in row)
        )
        track = next(free, len(occupied))
        if track == len(occupied):
            occupied.append([])
        occupied[track].append((start, start + length))
        tracks[pair] = track
    return tracks


class _Placer:
    """Computes columns and rows once; ``boxes`` builds the records."""

    def __init__(self, system: System, tree: _Tree) -> None:
        self.system = system
        self.tree = tree
        self.x: dict[int, float] = {}
        self.stack: dict[int, int] = {}  # position of a net below its NIC
        x = float(MARGIN)
        for root in tree.roots:
            x = self._columns(root, x) + CPU_GAP
        self.width = max(x - CPU_GAP + MARGIN, 480.0)
        gpus = [i for i, node in enumerate(system.nodes) if node.type == NodeType.GPU]
        self.order = {i: k for k, i in enumerate(sorted(gpus, key=lambda i: self.x[i]))}
        self.cpus = {
            i: k
            for k, i in enumerate(i for i in tree.roots if system.nodes[i].type == NodeType.CPU)
        }
        self.sys_tracks = _tracks(system, self.cpus, least=2)
        above = 10 + SYS_STEP * (1 + max(self.sys_tracks.values())) if self.sys_tracks else 0
        self.top = MARGIN + SIZES[NodeType.CPU][1] / 2 + above
        levels = [
            tree.depth[i]
            for i, node in enumerate(system.nodes)
            if node.type == NodeType.PCI and i in tree.depth
        ]
        self.leaf_y = self.top + ROW * (max(levels, default=0) + 1)
        nets = min(NET_ROWS, max(self.stack.values(), default=-1) + 1)
        below = (
            SIZES[NodeType.NIC][1] / 2 + 18 + NET_STEP * nets
            if nets
            else SIZES[NodeType.GPU][1] / 2
        )
        self.overlay_top = self.leaf_y + max(below, SIZES[NodeType.GPU][1] / 2) + 8
        self.tracks = _tracks(system, self.order, least=1)
        self.nvlink_top = self.overlay_top
        nvlinks = 22 + NVLINK_STEP * max(self.tracks.values()) if self.tracks else 0
        self.overlay_bottom = self.nvlink_top + nvlinks + min(150.0, 30 + 9.0 * len(gpus))
        has_switch = system.count(NodeType.NVS) > 0
        self.switch_y = self.overlay_bottom + SIZES[NodeType.NVS][1] / 2
        self.height = self.overlay_bottom + (SIZES[NodeType.NVS][1] if has_switch else 0) + MARGIN

    def _columns(self, node: int, x: float) -> float:
        """Assign columns to a subtree starting at ``x``; return its right edge."""
        width = SIZES[self.system.nodes[node].type][0]
        children = self.tree.children.get(node, [])
        if self.system.nodes[node].type == NodeType.NIC:
            for position, net in enumerate(children):
                self.x[net], self.stack[net] = (
                    x + width / 2 + position // NET_ROWS * (width + COLUMN_GAP),
                    position,
                )
            self.x[node] = x + width / 2
            return x + width + max(0, len(children) - 1) // NET_ROWS * (width + COLUMN_GAP)
        if not children:
            self.x[node] = x + width / 2
            return x + width
        end = x
        for child in children:
            end = self._columns(child, end if end == x else end + COLUMN_GAP)
        if end - x < width:  # centre the children below a wider box
            self._shift(node, (width - (end - x)) / 2)
            end = x + width
        first, last = self.x[children[0]], self.x[children[-1]]
        self.x[node] = min(max((first + last) / 2, x + width / 2), end - width / 2)
        return end

    def _shift(self, node: int, by: float) -> None:
        for child in self.tree.children.get(node, []):
            self.x[child] += by
            self._shift(child, by)

    def boxes(self) -> dict[int, Box]:
        result = {}
        for i, node in enumerate(self.system.nodes):
            w, h = (float(size) for size in SIZES[node.type])
            if node.type == NodeType.NVS:
                gpus = [self.x[g] for g in self.order] or [self.width / 2]
                x, w, y = (
                    (min(gpus) + max(gpus)) / 2,
                    max(w, max(gpus) - min(gpus) + SIZES[NodeType.GPU][0]),
                    self.switch_y,
                )
            else:
                x, y = self.x[i], self._row(i)
            title, subtitle = _box_text(self.system, i)
            result[i] = Box(
                index=i, kind=node.type, title=title, subtitle=subtitle, x=x, y=y, w=w, h=h
            )
        return result

    def _row(self, i: int) -> float:
        kind = self.system.nodes[i].type
        if kind in (NodeType.CPU, NodeType.PCI):
            return self.top + ROW * self.tree.depth[i]
        if kind == NodeType.NET:
            return (
                self.leaf_y
                + SIZES[NodeType.NIC][1] / 2
                + 18
                + SIZES[NodeType.NET][1] / 2
                + NET_STEP * (self.stack.get(i, 0) % NET_ROWS)
            )
        return self.leaf_y


def _box_text(system: System, i: int) -> tuple[str, str]:
    """Return title and subtitle of a box."""
    node = system.nodes[i]
    domain = node.local_id >> 20 & 0xFFFFFFFF
    bus = (
        f"{domain:x}:" if domain else ""
    ) + f"{node.local_id >> 12 & 0xFF:02x}:{node.local_id >> 4 & 0xFF:02x}"
    if isinstance(node, GpuNode):
        return f"GPU {node.rank}", f"{bus} sm {node.sm}"
    if isinstance(node, NetNode):
        return f"NET {node.dev}", f"{node.bw * 8:g} Gb/s"
    if isinstance(node, PciNode):
        return "PCI", bus
    if node.type == NodeType.CPU:
        numa = node.local_id if node.local_id < 1 << 55 else -1
        return f"CPU {numa}", cpu_name(node)
    if node.type == NodeType.NVS:
        return "NVSwitch", ""
    return "NIC", bus if node.local_id else ""


def _place_links(
    system: System, tree: _Tree, boxes: dict[int, Box], placed: _Placer
) -> list[DrawnLink]:
    result: list[DrawnLink] = []
    drawn: set[tuple[int, int, LinkType]] = set()
    ports: dict[int, int] = {}
    for i, node in enumerate(system.nodes):
        for link in node.links:
            ends = (min(i, link.target), max(i, link.target), link.type)
            if ends in drawn or i == link.target:
                continue
            drawn.add(ends)
            a, b = boxes[i], boxes[link.target]
            if tree.parent.get(a.index) == b.index:
                a, b = b, a
            points, label, curved = _route(tree, placed, ports, a, b)
            result.append(
                DrawnLink(
                    source=a.index,
                    target=b.index,
                    type=link.type,
                    bw=link.bw,
                    points=points,
                    label=label,
                    curved=curved,
                )
            )
    return result


def _route(
    tree: _Tree, placed: _Placer, ports: dict[int, int], a: Box, b: Box
) -> tuple[tuple[Point, ...], Point | None, bool]:
    """Return the corners of a link, the position of its label, and True for a curve."""
    if tree.parent.get(b.index) == a.index:
        # Pass the nets above along the edge of the column.
        if b.kind == NodeType.NET and placed.stack.get(b.index, 0):
            side = b.left - 6
            return (
                (
                    (a.x, a.bottom),
                    (a.x, a.bottom + 7),
                    (side, a.bottom + 7),
                    (side, b.y),
                    (b.left, b.y),
                ),
                None,
                False,
            )
        bus = a.bottom + (ROW - a.h) / 4 if b.kind != NodeType.NET else (a.bottom + b.top) / 2
        return ((a.x, a.bottom), (a.x, bus), (b.x, bus), (b.x, b.top)), (b.x + 4, b.top - 5), False
    kinds = {a.kind, b.kind}
    if NodeType.NVS in kinds and NodeType.GPU in kinds:
        gpu, switch = (a, b) if a.kind == NodeType.GPU else (b, a)
        return ((gpu.x, gpu.bottom), (gpu.x, switch.top)), (gpu.x + 4, switch.top - 6), False
    if kinds == {NodeType.GPU}:
        return _nvlink(placed, ports, a, b)
    if kinds == {NodeType.CPU}:
        return _between_cpus(placed, a, b)
    upper, lower = (a, b) if a.y < b.y else (b, a)
    # Joined bridges, or combinations no known machine has.
    if a.y == b.y or NodeType.NVS in kinds:
        rise = min(a.top, b.top) - 16
        return (
            ((a.x, a.top), (a.x, rise), (b.x, rise), (b.x, b.top)),
            ((a.x + b.x) / 2, rise - 2),
            True,
        )
    port = lower.x + lower.w / 4  # second link to a parent, beside the first one
    bus = upper.bottom + (ROW - upper.h) / 2
    return (
        ((upper.x + 10, upper.bottom), (upper.x + 10, bus), (port, bus), (port, lower.top)),
        (port + 4, lower.top - 16),
        False,
    )


def _nvlink(
    placed: _Placer, ports: dict[int, int], a: Box, b: Box
) -> tuple[tuple[Point, ...], Point, bool]:
    """Route an NVLink down the columns of both GPUs and across below all boxes.

    Each link has its own position at a GPU and its own height.
    """
    first, second = (a, b) if a.x < b.x else (b, a)
    start, end = _port(ports, first), _port(ports, second)
    level = placed.nvlink_top + 14 + NVLINK_STEP * placed.tracks[first.index, second.index]
    return (
        ((start, first.bottom), (start, level), (end, level), (end, second.bottom)),
        ((start + end) / 2, level - 3),
        False,
    )


def _port(ports: dict[int, int], gpu: Box) -> float:
    """Return the next free position at the lower edge of a GPU: middle, then right and left in
    turn.
    """
    n = ports[gpu.index] = ports.get(gpu.index, -1) + 1
    return gpu.x + (gpu.w / 2 - 6) * ((n + 1) // 2) / 8 * (1 if n % 2 else -1)


def _between_cpus(placed: _Placer, a: Box, b: Box) -> tuple[tuple[Point, ...], Point, bool]:
    first, second = (a, b) if a.x < b.x else (b, a)
    # A straight line to the next CPU, an arc over the others in between.
    if placed.cpus[second.index] - placed.cpus[first.index] < 2:
        return (
            ((first.right, first.y), (second.left, second.y)),
            ((first.right + second.left) / 2, first.y - 5),
            False,
        )
    track = placed.sys_tracks[first.index, second.index]
    rise = first.top - 4 - SYS_STEP * (track + 1)
    start, end = first.x + 6 + 9 * track, second.x - 6 - 9 * track
    return (
        ((start, first.top), (start, rise), (end, rise), (end, second.top)),
        ((start + end) / 2, rise - 2),
        False,
    )
