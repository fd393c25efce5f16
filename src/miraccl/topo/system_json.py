"""``System`` and ``PathTable`` as JSON, in the format of the reference results (format 1).

Names are ``TYPE/<system>-<id>`` in hex; bandwidths have nine significant digits, enough to restore
an IEEE single exactly. Several NET nodes may have one name; lists are in node order, so positions
distinguish them, and the reader resolves a name by the links that lead there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miraccl.errors import TopologyError
from miraccl.topo.json_schema import (
    Validator,
    fixed_list,
    float32,
    integer,
    list_of,
    one_of,
    record,
    string,
)
from miraccl.topo.records import (
    LOCAL_ID_MASK,
    TABLE_SOURCES,
    TABLE_TARGETS,
    CpuNode,
    GpuNode,
    Link,
    LinkType,
    NetNode,
    NodeType,
    Path,
    PathTable,
    PathType,
    PciNode,
    Rows,
    System,
    TopoNode,
    f32,
)

Json = dict[str, Any]

_DEVICE_BITS = (1 << 64) - 1


def number(value: float) -> float | int:
    """Round to nine significant digits; integers are returned without a fraction."""
    string = float(f"{value:.9g}")
    return int(string) if string == int(string) and abs(string) < 1e15 else string


def system_to_json(system: System) -> Json:
    """Return section ``system``."""
    names = [node.name for node in system.nodes]
    result: Json = {
        "maxBw": number(system.max_bw),
        "totalBw": number(system.total_bw),
        "inter": system.inter,
    }
    for kind in NodeType:
        result[kind.name] = [
            {
                "name": node.name,
                **_attributes(node),
                "links": [
                    [link.type.name, number(link.bw), names[link.target]] for link in node.links
                ],
            }
            for node in system.of(kind)
        ]
    return result


def _attributes(node: TopoNode) -> Json:
    if isinstance(node, GpuNode):
        return {"dev": node.dev, "rank": node.rank, "sm": node.sm, "gdr": node.gdr}
    if isinstance(node, PciNode):
        return {"device": f"{node.device & _DEVICE_BITS:#x}"}
    if isinstance(node, CpuNode):
        return {"arch": int(node.arch), "vendor": int(node.vendor), "model": node.model}
    if isinstance(node, NetNode):
        return {
            "id": node.id,
            "dev": node.dev,
            "asic": f"{node.asic:#x}",
            "port": node.port,
            "bw": number(node.bw),
            "latency": number(node.latency),
            "gdr": node.gdr,
            "coll": node.coll,
            "maxChannels": node.max_channels,
            "localGpu": node.local_gpu,
        }
    return {}


def _device_number(value: Any, where: str) -> None:
    if type(value) is not int:
        string("-?0x[0-9a-f]{1,16}", "a number in hex, as 0x10de")(value, where)


_ATTRIBUTES: dict[NodeType, dict[str, Validator]] = {
    NodeType.GPU: dict.fromkeys(("dev", "rank", "sm", "gdr"), integer()),
    NodeType.PCI: {"device": _device_number},
    NodeType.CPU: dict.fromkeys(("arch", "vendor", "model"), integer()),
    NodeType.NET: {
        **dict.fromkeys(("dev", "port", "gdr", "coll", "maxChannels", "localGpu"), integer()),
        "asic": _device_number,
        "bw": float32,
        "latency": float32,
    },
}


def _node_validator(kind: NodeType) -> Validator:
    name = string(
        f"{kind.name}/[0-9a-f]{{1,2}}-[0-9a-f]{{1,14}}", f"a name such as {kind.name}/0-1a000"
    )
    link = fixed_list(one_of(*(kind.name for kind in LinkType)), float32, string())
    return record({"name": name, **_ATTRIBUTES.get(kind, {}), "links": list_of(link)})


_NODES = {kind.name: list_of(_node_validator(kind)) for kind in NodeType}
_SYSTEM = record({"maxBw": float32, "totalBw": float32, "inter": one_of(0, 1), **_NODES})


def system_from_json(data: Mapping[str, Any], where: str = "system") -> System:
    """Read the section at ``where``.

    Raises ``TopologyError`` with the place of a missing or invalid value, and for a link to an
    unknown node.
    """
    _SYSTEM(data, where)
    raw = [(kind, entry) for kind in NodeType for entry in data[kind.name]]
    resolve = _link_resolver([entry for _, entry in raw], where)
    nodes = []
    for i, (kind, entry) in enumerate(raw):
        links = tuple(
            Link(type=LinkType[t], bw=f32(bw), target=resolve(i, LinkType[t], f32(bw), name))
            for t, bw, name in entry["links"]
        )
        nodes.append(_node_from_json(kind, entry, links))
    return System(
        nodes=tuple(nodes),
        max_bw=f32(data["maxBw"]),
        total_bw=f32(data["totalBw"]),
        inter=data["inter"],
    )


def _link_resolver(
    entries: Sequence[Mapping[str, Any]], where: str
) -> Callable[[int, LinkType, float, str], int]:
    """Return a function from (source index, link type, bandwidth, name) to the target's index.

    Where nodes share a name, the candidates are those with a link back to the source, preferably of
    the same bandwidth; each one is used once.
    """
    by_name: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        by_name.setdefault(entry["name"], []).append(i)
    used: set[tuple[int, LinkType, int]] = set()

    def resolve(source: int, kind: LinkType, bw: float, name: str) -> int:
        candidates = by_name.get(name)
        if not candidates:
            raise TopologyError(
                f"cannot read {where}: a link of {entries[source]['name']} leads to {name}, "
                "which is not in it"
            )
        if len(candidates) == 1:
            return candidates[0]
        back = entries[source]["name"]
        free = [target for target in candidates if (source, kind, target) not in used]
        for same_bw in (True, False):  # between CPUs of different kinds the two directions differ
            for target in free:
                if any(
                    t == kind.name and n == back and (f32(b) == bw or not same_bw)
                    for t, b, n in entries[target]["links"]
                ):
                    used.add((source, kind, target))
                    return target
        raise TopologyError(
            f"cannot read {where}: a link of {back} leads to {name}, which has no link back"
        )

    return resolve


def _node_from_json(kind: NodeType, entry: Mapping[str, Any], links: tuple[Link, ...]) -> TopoNode:
    system, _, local = entry["name"].partition("/")[2].partition("-")
    id = (int(system, 16) << 56) | (int(local, 16) & LOCAL_ID_MASK)
    match kind:
        case NodeType.GPU:
            return GpuNode(
                id=id,
                links=links,
                dev=entry["dev"],
                rank=entry["rank"],
                sm=entry["sm"],
                gdr=entry["gdr"],
            )
        case NodeType.PCI:
            return PciNode(id=id, links=links, device=_integer(entry["device"]))
        case NodeType.CPU:
            return CpuNode(
                id=id, links=links, arch=entry["arch"], vendor=entry["vendor"], model=entry["model"]
            )
        case NodeType.NET:
            return NetNode(
                id=id,
                links=links,
                dev=entry["dev"],
                asic=_integer(entry["asic"]),
                port=entry["port"],
                bw=f32(entry["bw"]),
                latency=f32(entry["latency"]),
                gdr=entry["gdr"],
                coll=entry["coll"],
                max_channels=entry["maxChannels"],
                local_gpu=entry["localGpu"],
            )
        case _:
            return TopoNode(type=kind, id=id, links=links)


def _integer(value: str | int) -> int:
    return int(value, 0) if isinstance(value, str) else value


def paths_to_json(paths: PathTable, system: System) -> Json:
    """Return section ``paths``; hops are written as ``"<link type>:<node reached>"``."""
    names = [node.name for node in system.nodes]
    hop = [f"{link.type.name}:{names[link.target]}" for link in system.links]
    result: Json = {}
    for source in TABLE_SOURCES:
        result[source.name] = []
        for i, node in enumerate(system.of(source)):
            entry: Json = {"from": node.name}
            for target in TABLE_TARGETS:
                if (source, target) == (NodeType.NET, NodeType.NET):
                    continue
                fixed_list = paths.row(source, i, target)
                entry[target.name] = [
                    [p.type.name, number(p.bw), [hop[h] for h in p.hops]] for p in fixed_list
                ]
            result[source.name].append(entry)
    return result


def paths_from_json(data: Mapping[str, Any], system: System) -> PathTable:
    """Read section ``paths`` for its ``system``. Raises ``TopologyError`` for an invalid table."""
    rows: dict[tuple[NodeType, NodeType], Rows] = {}
    try:
        for source in TABLE_SOURCES:
            for target in TABLE_TARGETS:
                rows[source, target] = tuple(
                    tuple(
                        Path(
                            type=PathType[kind],
                            bw=f32(bw),
                            hops=_hops(
                                system, system.index(source, i), hops, system.index(target, j)
                            ),
                        )
                        for j, (kind, bw, hops) in enumerate(entry.get(target.name, ()))
                    )
                    for i, entry in enumerate(data[source.name])
                )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"cannot read the table of paths: {error!r}") from None
    return PathTable(rows=rows)


def _hops(system: System, start: int, texts: Sequence[str], end: int) -> tuple[int, ...]:
    """Return the global link numbers of a written route; the last hop reaches ``end``."""
    hops: list[int] = []
    at = start
    for k, hop_text in enumerate(texts):
        kind, _, name = hop_text.partition(":")
        fits = [
            (number_, link.target)
            for number_, link in enumerate(system.nodes[at].links, system.link_start[at])
            if link.type.name == kind and system.nodes[link.target].name == name
        ]
        if not fits:
            source = system.nodes[start].name
            raise TopologyError(
                f"cannot read a path from {source}: it takes {hop_text} at "
                f"{system.nodes[at].name}, where no such link starts"
            )
        # Among nodes with one name the last hop prefers the target of the path.
        hop, at = next((fit for fit in fits if k == len(texts) - 1 and fit[1] == end), fits[0])
        hops.append(hop)
    return tuple(hops)
