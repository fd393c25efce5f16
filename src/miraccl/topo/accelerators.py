"""Descriptions of accelerators that NCCL does not know.

A description (TOML, ``format = 1``) names the PCI class and vendor of a device, the XML element
that marks it, the element of its links and the bandwidth of one link. :func:`apply_accelerators`
rewrites a tree in these terms: the device becomes ``<gpu>``, each link an ``<xlink>`` with the
attributes ``kind`` (switch, gpu or cpu), ``count``, ``bw`` (GB/s of one link and direction),
``target`` and ``switch`` (a name), which ``build`` turns into graph links. A file may contain
``xlink`` itself; a rewritten tree is dumped that way. AMD's dialect of the format (``version="2"``,
``xgmi``) is a built-in description.

    format = 1
    [accelerator.sipu]
    element = "gpu"            # the device's element below its <pci>; default gpu
    pci_class = ["0x120000"]   # prefixes; a device matches when class and vendor do
    pci_vendor = ["0x205d"]
    sm = 80                    # plan for this compute capability instead of the file's sm
    [accelerator.sipu.link]
    element = "silink"         # its link element
    bw = 100.0                 # GB/s of one link and direction, or a table:
                               #   attribute, default, and values by prefix
    kind = "type"              # attribute that names the kind of the remote end ...
    switch = ["switch"]        # ... a switch for these values,
    gpu = ["peer"]             # another device (named by ``target``),
    cpu = ["host"]             # the host
    switch_name = "eth_switch"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import TopologyError
from miraccl.topo.xmlfile import XmlFile, XmlNode, c_float, read_bytes

LINK_ELEMENT = "xlink"
_KINDS = ("switch", "gpu", "cpu")


@dataclass(frozen=True, kw_only=True)
class LinkDescription:
    """XML form and bandwidth of a device's links.

    ``bw`` is the default; ``bw_by`` (values of ``bw_attribute`` of the device, by prefix) takes
    precedence. Without ``kind`` every link leads to ``only``.
    """

    element: str
    bw: float
    bw_attribute: str = ""
    bw_by: Mapping[str, float] = field(default_factory=dict)
    kind: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    only: str = "switch"
    switch_name: str = "switch"

    def bandwidth(self, device: XmlNode) -> float:
        """Return GB/s of one link of this device."""
        value = device.attrs.get(self.bw_attribute, "")
        return next((bw for prefix, bw in self.bw_by.items() if value.startswith(prefix)), self.bw)

    def end_kind(self, link: XmlNode) -> str:
        """Return the kind of the remote end: switch, gpu or cpu.

        Raises ``TopologyError`` for a value that the description lacks.
        """
        if not self.kind:
            return self.only
        value = link.attrs.get(self.kind, "")
        if value not in self.values:
            allowed = ", ".join(self.values)
            raise TopologyError(
                f"cannot use line {link.line}: <{link.name}> has {self.kind}={value!r}; "
                f"its description has {allowed}"
            )
        return self.values[value]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Description of one kind of device.

    ``version`` restricts it to files of that format version (0 for any); ``sm`` None keeps the
    file's value.
    """

    name: str
    element: str = "gpu"
    pci_class: tuple[str, ...] = ()
    pci_vendor: tuple[str, ...] = ()
    sm: int | None = None
    label: str = ""
    link: LinkDescription | None = None
    version: int = 0

    def matches(self, pci: XmlNode, device: XmlNode) -> bool:
        """Return True if a ``pci`` element and its child ``device`` are this accelerator."""
        if device.name != self.element:
            return False
        by_link = self.link is not None and any(
            child.name == self.link.element for child in device.children
        )
        named = bool(self.pci_class or self.pci_vendor)
        by_pci = named and all(
            not prefixes or pci.attrs.get(key, "").lower().startswith(prefixes)
            for key, prefixes in (("class", self.pci_class), ("vendor", self.pci_vendor))
        )
        return by_pci or by_link


AMD = Accelerator(
    name="amd",
    pci_vendor=("0x1002",),
    sm=80,
    label="gcn",
    version=2,
    link=LinkDescription(
        element="xgmi",
        bw=24.0,
        bw_attribute="gcn",
        bw_by={"gfx90a": 36.0, "910": 36.0, "gfx94": 48.0, "94": 48.0, "gfx95": 48.0, "95": 48.0},
        only="gpu",
    ),
)
"""AMD Instinct: xGMI links between GPUs, GB/s per link by generation (RCCL ``src/graph/topo.h``, in
which gfx90a is 910).

RCCL writes the number of compute units as ``sm``; planning treats them as Ampere (80): rings and
trees without switch multicast.
"""


def extra_elements(accelerators: Sequence[Accelerator]) -> dict[str, tuple[str, ...]]:
    """Return the elements that these descriptions add, for ``xmlfile.read_topology``."""
    extra: dict[str, tuple[str, ...]] = {}
    for accelerator in accelerators:
        if accelerator.element != "gpu":
            extra["pci"] = (*extra.get("pci", ()), accelerator.element)
        if accelerator.link is not None:
            extra[accelerator.element] = (
                *extra.get(accelerator.element, ()),
                accelerator.link.element,
            )
    return extra


def apply_accelerators(file: XmlFile, accelerators: Sequence[Accelerator] = ()) -> XmlFile:
    """Return a file in which described devices and links are written as ``gpu`` and ``xlink``.

    AMD's description always applies.
    """
    used = [a for a in (*accelerators, AMD) if a.version in (0, file.version)]
    root = file.root.copy()
    changed = False
    for pci in root.walk():
        if pci.name == "pci":
            for device in pci.children:
                found = next((a for a in used if a.matches(pci, device)), None)
                if found is not None:
                    _rewrite(device, found)
                    changed = True
    return XmlFile(root=root, source=file.source, notes=file.notes) if changed else file


def _rewrite(device: XmlNode, accelerator: Accelerator) -> None:
    device.name = "gpu"
    if accelerator.sm is not None:
        device.attrs["sm"] = str(accelerator.sm)
    model = device.attrs.get(accelerator.label, "") if accelerator.label else ""
    device.attrs["accelerator"] = f"{accelerator.name} {model}".strip()
    link = accelerator.link
    if link is None:
        return
    for child in device.children:
        if child.name == link.element:
            end_kind = link.end_kind(child)
            attrs = {
                "kind": end_kind,
                "count": child.attrs.get("count", "1"),
                "bw": repr(link.bandwidth(device)),
            }
            if end_kind == "switch":
                attrs["switch"] = link.switch_name
            elif end_kind == "gpu":
                if "target" not in child.attrs:
                    raise TopologyError(
                        f"cannot use line {child.line}: <{child.name}> leads to another device "
                        "and has no target"
                    )
                attrs["target"] = child.attrs["target"]
            child.name, child.attrs = LINK_ELEMENT, attrs


def link_bw(link: XmlNode) -> float:
    """Return GB/s of all links of an ``xlink``; ``TopologyError`` for a value out of range."""
    bw = link.integer("count") * c_float(link.attrs.get("bw", ""))
    if not 0 < bw < 1e6:
        raise TopologyError(
            f"cannot use line {link.line}: <{link.name}> has count and bw of {bw:g} GB/s; "
            "expected more than 0"
        )
    return bw


# Reading descriptions


def read_accelerators(path: str | os.PathLike[str]) -> tuple[Accelerator, ...]:
    """Read the descriptions of a TOML file. Raises ``TopologyError`` with file and reason."""
    name = os.fspath(path)
    try:
        return parse_accelerators(
            tomllib.loads(read_bytes(path, "description of accelerators").decode()), source=name
        )
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TopologyError(f"cannot read {name}: {error}") from None
    except RecursionError:
        raise TopologyError(
            f"cannot read {name}: lists or tables are nested too deeply for a description"
        ) from None


def parse_accelerators(
    data: Mapping[str, Any], *, source: str = "<toml>"
) -> tuple[Accelerator, ...]:
    """Read the descriptions of parsed TOML. Raises ``TopologyError`` with the key and its value."""
    if data.get("format") != 1:
        raise TopologyError(
            f"cannot read {source}: format is {data.get('format')!r}; "
            "the format of accelerator descriptions is 1"
        )
    tables = _TomlTable(source, "", data)
    tables.allow_only("format", "accelerator")
    return tuple(
        _accelerator(name, tables.table("accelerator").table(name))
        for name in tables.table("accelerator").data
    )


@dataclass(frozen=True)
class _TomlTable:
    """A TOML table with its position in the file, for error messages."""

    source: str
    where: str
    data: Mapping[str, Any]

    def fail(self, key: str, expected: str) -> TopologyError:
        name = f"{self.where}.{key}" if self.where else key
        return TopologyError(
            f"cannot read {self.source}: {name} is {self.data.get(key)!r}, expected {expected}"
        )

    def allow_only(self, *keys: str) -> None:
        unknown = [key for key in self.data if key not in keys]
        if unknown:
            raise TopologyError(
                f"cannot read {self.source}: {self.where or 'the file'} has {unknown[0]!r}; "
                f"known are {', '.join(keys)}"
            )

    def table(self, key: str) -> _TomlTable:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self.fail(key, "a table")
        return _TomlTable(self.source, f"{self.where}.{key}" if self.where else key, value)

    def text(self, key: str, default: str) -> str:
        value = self.data.get(key, default)
        if not isinstance(value, str) or not value:
            raise self.fail(key, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise self.fail(key, "a text or a list of texts")
        return tuple(values)

    def bw(self, key: str) -> float:
        value = self.data.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
            raise self.fail(key, "GB/s of one link and direction, a number greater than 0")
        return float(value)


def _accelerator(name: str, table: _TomlTable) -> Accelerator:
    table.allow_only("element", "pci_class", "pci_vendor", "sm", "label", "version", "link")
    if not name.strip():
        raise TopologyError(
            f"cannot read {table.source}: an accelerator is called {name!r}; expected a name"
        )
    sm, version = table.data.get("sm"), table.data.get("version", 0)
    if sm is not None and (not isinstance(sm, int) or isinstance(sm, bool) or not 0 < sm < 1000):
        raise table.fail("sm", "a compute capability times ten, such as 80")
    if version not in (0, 1, 2) or isinstance(version, bool):
        raise table.fail("version", "1 or 2")
    return Accelerator(
        name=name,
        element=table.text("element", "gpu"),
        pci_class=tuple(v.lower() for v in table.texts("pci_class")),
        pci_vendor=tuple(v.lower() for v in table.texts("pci_vendor")),
        sm=sm,
        label=table.text("label", "-") if "label" in table.data else "",
        version=version,
        link=_link(table.table("link")) if "link" in table.data else None,
    )


def _link(table: _TomlTable) -> LinkDescription:
    table.allow_only("element", "bw", "kind", *_KINDS, "only", "switch_name")
    attribute, by = "", {}
    if isinstance(table.data.get("bw"), dict):
        inner = table.table("bw")
        attribute, default = inner.text("attribute", ""), inner.bw("default")
        by = {key: inner.bw(key) for key in inner.data if key not in ("attribute", "default")}
    else:
        default = table.bw("bw")
    values = {value: kind for kind in _KINDS for value in table.texts(kind)}
    for kind in _KINDS:
        for value in table.texts(kind):
            if values[value] != kind:
                raise TopologyError(
                    f"cannot read {table.source}: {table.where} has {value!r} for both {kind} "
                    f"and {values[value]}"
                )
    only = table.text("only", "switch")
    if only not in _KINDS:
        raise table.fail("only", "switch, gpu or cpu")
    if ("kind" in table.data) != bool(values):
        raise TopologyError(
            f"cannot read {table.source}: {table.where} needs both kind and values "
            "for switch, gpu or cpu, or neither"
        )
    return LinkDescription(
        element=table.text("element", "link"),
        bw=default,
        bw_attribute=attribute,
        bw_by=by,
        kind=table.text("kind", "-") if values else "",
        values=values,
        only=only,
        switch_name=table.text("switch_name", "switch"),
    )
