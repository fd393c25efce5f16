"""Safe reader of topology files, and a writer with NCCL's layout.

The format is NCCL's (``src/graph/xml.cc``): ``system`` holds ``cpu``, which holds ``pci`` and
``nic``; ``pci`` holds ``pci``, ``gpu``, ``nic`` and ``pcilink``; ``gpu`` holds ``nvlink`` and
``c2c`` (in AMD's dialect, version 2, ``xgmi``; in ours ``xlink``, see ``accelerators``); ``nic``
holds ``net``. Elements in other places are ignored with their content, like in NCCL, and
are reported as notes. The order of elements matters.

- A file is untrusted input: at most :data:`MAX_BYTES`, :data:`MAX_NODES` elements and
  :data:`MAX_DEPTH` levels, no document type, no entities. Every error raises ``TopologyError`` with
  the line; no other exception leaves this module.
- The reader is more tolerant than NCCL's where no result depends on it (an XML declaration, tabs,
  more than 256 elements). Everything that NCCL itself would reject or drop is in ``XmlFile.notes``,
  for ``topo check``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from miraccl.errors import TopologyError

MAX_BYTES = 8 << 20
MAX_NODES = 20_000
MAX_DEPTH = 64
MAX_STR = 254
"""Longest name or value that NCCL reads (``MAX_STR_LEN`` without its terminator)."""
MAX_ATTRS = 16
"""Attributes of an element beyond this many are dropped by NCCL (``MAX_ATTR_COUNT``), and here."""
NCCL_MAX_NODES = 256
"""Elements NCCL accepts in one file (``NCCL_TOPO_XML_MAX_NODES``)."""
NCCL_MAX_SUBS = 128
"""Children NCCL accepts in one element (``MAX_SUBS``)."""
VERSIONS = (1, 2)

CHILDREN: Mapping[str, tuple[str, ...]] = {
    "system": ("cpu",),
    "cpu": ("pci", "nic"),
    "pci": ("pci", "gpu", "nic", "pcilink"),
    "gpu": ("nvlink", "c2c", "xgmi", "xlink"),
    "nic": ("net",),
}
"""Elements that are read, by parent."""

_CHUNK = 64 << 10

_UNCLOSED = {
    expat.errors.codes[text]
    for text in (expat.errors.XML_ERROR_NO_ELEMENTS, expat.errors.XML_ERROR_TAG_MISMATCH)
}


@dataclass(slots=True, eq=False)
class XmlNode:
    """One element.

    Mutable: selection and fusion work on copies (:meth:`copy`) before anything is built. ``single``
    distinguishes ``<x/>`` from ``<x></x>``, which NCCL's fusion of files compares. ``line`` is 0
    for elements that were not read from a file.
    """

    name: str
    attrs: dict[str, str] = field(default_factory=dict)
    children: list[XmlNode] = field(default_factory=list)
    single: bool = False
    line: int = 0

    def copy(self) -> XmlNode:
        """Return a deep copy."""
        return XmlNode(
            self.name,
            dict(self.attrs),
            [child.copy() for child in self.children],
            self.single,
            self.line,
        )

    def child(self, name: str) -> XmlNode | None:
        """Return the first child of that name, or None."""
        for child in self.children:
            if child.name == name:
                return child
        return None

    def walk(self) -> Iterator[XmlNode]:
        """Yield this element and its descendants in the order of the file."""
        yield self
        for child in self.children:
            yield from child.walk()

    def integer(self, name: str, default: int = 0) -> int:
        """Read an attribute like C's ``strtol(text, NULL, 0)``, truncated to 32 bits.

        Trailing characters are ignored; a text without a number is 0.
        """
        text = self.attrs.get(name)
        return default if text is None else c_int(text)


@dataclass(frozen=True, kw_only=True)
class XmlFile:
    """A file as read: its root, its source, and notes (line, text) for NCCL's deviations."""

    root: XmlNode
    source: str = "<text>"
    notes: tuple[tuple[int, str], ...] = ()

    @property
    def version(self) -> int:
        """Version of the format."""
        return self.root.integer("version")


# Numbers with C's rules

_DIGITS = {**{str(d): d for d in range(10)}, **{c: 10 + i for i, c in enumerate("abcdef")}}


def c_int(text: str) -> int:
    """Parse like ``(int)strtol(text, NULL, 0)``: saturate at 64 bits, then wrap to 32."""
    value = max(-(1 << 63), min((1 << 63) - 1, _leading_integer(text, 0)))
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def c_long(text: str) -> int:
    """Parse like ``strtol(text, NULL, 0)``."""
    return max(-(1 << 63), min((1 << 63) - 1, _leading_integer(text, 0)))


def c_uint64(text: str, base: int) -> int:
    """Parse like ``strtoull(text, NULL, base)``: saturate; a minus sign negates modulo 2**64."""
    value = _leading_integer(text, base)
    limit = (1 << 64) - 1
    return limit if abs(value) > limit else value & limit


def c_float(text: str) -> float:
    """Parse the number at the start of ``text`` in double precision, 0.0 without one."""
    text = text.strip()
    for end in range(len(text), 0, -1):
        try:
            return float(text[:end]) if "_" not in text[:end] else float("x")
        except ValueError:
            continue
    return 0.0


def _leading_integer(text: str, base: int) -> int:
    text = text.lstrip(" \t\n\v\f\r").lower()
    sign = 1
    if text[:1] in ("+", "-"):
        sign = -1 if text[0] == "-" else 1
        text = text[1:]
    if base in (0, 16) and text[:2] == "0x" and text[2:3] in _DIGITS:
        base, text = 16, text[2:]
    elif base == 0:
        base = 8 if text[:1] == "0" else 10
    value = 0
    for char in text[:64]:
        digit = _DIGITS.get(char, 99)
        if digit >= base:
            break
        value = value * base + digit
    return sign * value


def bus_id(text: str) -> int:
    """Convert ``0001:02:03.4`` to the number of its hex digits (NCCL ``busIdToInt64``).

    Conversion stops at the first other character.
    """
    digits = ""
    for char in text:
        if char in ".:":
            continue
        if char.lower() not in _DIGITS or len(digits) == 16:
            break
        digits += char
    return min(int(digits, 16), (1 << 63) - 1) if digits else 0


# Reading


class _TopologyReader:
    """Tree builder on expat's events.

    ``allowed`` extends :data:`CHILDREN` by the elements of described accelerators.
    """

    def __init__(self, source: str, data: bytes, extra: Mapping[str, tuple[str, ...]]) -> None:
        self.source = source
        # An XML declaration must be at the start.
        self.data = data.lstrip(b" \t\r\n") if data[:1].isspace() else data
        self.skipped = data[: len(data) - len(self.data)].count(b"\n")
        self.allowed = {
            **CHILDREN,
            **{name: CHILDREN.get(name, ()) + more for name, more in extra.items()},
        }
        self.root: XmlNode | None = None
        self.stack: list[XmlNode] = []
        self.ignored = 0  # depth inside an ignored element
        self.count = 0
        self.notes: list[tuple[int, str]] = []
        parser = self.parser = expat.ParserCreate()
        parser.ordered_attributes = True
        parser.buffer_text = True
        parser.StartElementHandler = self.start
        parser.EndElementHandler = self.end
        parser.CharacterDataHandler = self.text
        parser.StartDoctypeDeclHandler = self.doctype
        parser.EntityDeclHandler = self.doctype

    @property
    def line(self) -> int:
        return self.parser.CurrentLineNumber + self.skipped

    def fail(self, message: str, line: int | None = None) -> TopologyError:
        return TopologyError(
            f"cannot read {self.source}, line {self.line if line is None else line}: {message}"
        )

    def doctype(self, *_: object) -> None:
        raise self.fail("the format allows no document type and no entities")

    def text(self, data: str) -> None:
        if not self.ignored and data.strip():
            raise self.fail(f"text between elements: {data.strip()[:40]!r}")

    def start(self, name: str, flat: list[str]) -> None:
        self.count += 1
        if self.count > MAX_NODES:
            raise self.fail(f"more than {MAX_NODES} elements")
        if len(self.stack) + self.ignored >= MAX_DEPTH:
            raise self.fail(f"elements are nested deeper than {MAX_DEPTH}")
        line = self.line
        if self.ignored:
            self.ignored += 1
            return
        if not self.stack:
            if name != "system":
                raise self.fail(f"the outermost element is <{name[:40]}>, expected <system>")
        elif name not in self.allowed.get(self.stack[-1].name, ()):
            self.notes.append((line, f"<{name[:40]}> inside <{self.stack[-1].name}> is ignored"))
            self.ignored = 1
            return
        node = XmlNode(name, self.attributes(name, flat), line=line)
        if self.stack:
            self.stack[-1].children.append(node)
        else:
            self.root = node
            self.check_version(node)
        self.stack.append(node)

    def attributes(self, name: str, flat: list[str]) -> dict[str, str]:
        attrs: dict[str, str] = {}
        for i in range(0, len(flat), 2):
            key, value = flat[i], flat[i + 1]
            if len(key) > MAX_STR or len(value) > MAX_STR:
                raise self.fail(
                    f"attribute {key[:40]} of <{name}> is longer than {MAX_STR} characters"
                )
            if len(attrs) == MAX_ATTRS:
                self.notes.append(
                    (
                        self.line,
                        f"attribute {key} of <{name}> is ignored: only {MAX_ATTRS} are read",
                    )
                )
            else:
                attrs[key] = value
        return attrs

    def check_version(self, node: XmlNode) -> None:
        if "version" not in node.attrs:
            raise self.fail('<system> has no version; add version="1"')
        if node.integer("version") not in VERSIONS:
            raise self.fail(
                f"version {node.attrs['version']} of the topology format is unknown; "
                "known are 1 (NCCL) and 2 (AMD)"
            )

    def end(self, name: str) -> None:
        if self.ignored:
            self.ignored -= 1
            return
        node = self.stack.pop()
        # Expat's position is after the element for <x/>, but before the closing tag for </x>.
        at = self.parser.CurrentByteIndex
        node.single = not node.children and self.data[at - 2 : at] == b"/>"

    def read(self) -> XmlFile:
        try:
            for start in range(0, len(self.data), _CHUNK):
                self.parser.Parse(self.data[start : start + _CHUNK], False)
            self.parser.Parse(b"", True)
        except TopologyError:
            raise
        except expat.ExpatError as error:
            raise self.fail(self.explain(error), error.lineno + self.skipped) from None
        except (LookupError, ValueError) as error:  # an encoding Python does not know, a surrogate
            raise self.fail(f"not readable as XML: {error}") from None
        return self.finish()

    def explain(self, error: expat.ExpatError) -> str:
        text = expat.ErrorString(error.code) or "not well-formed"
        if self.stack and error.code in _UNCLOSED:
            node = self.stack[-1]
            return f"{text}: <{node.name}> of line {node.line} is not closed"
        return text

    def finish(self) -> XmlFile:
        if self.root is None:
            raise self.fail("the file is empty")
        for node in self.root.walk():
            if len(node.children) > NCCL_MAX_SUBS:
                self.notes.append(
                    (
                        node.line,
                        f"<{node.name}> has {len(node.children)} children; "
                        f"NCCL rejects more than {NCCL_MAX_SUBS}",
                    )
                )
        count = sum(1 for _ in self.root.walk())
        if count >= NCCL_MAX_NODES:
            self.notes.append((1, f"{count} elements; NCCL rejects {NCCL_MAX_NODES} and more"))
        return XmlFile(root=self.root, source=self.source, notes=tuple(sorted(self.notes)))


def parse_topology(
    text: str | bytes, *, source: str = "<text>", extra: Mapping[str, tuple[str, ...]] | None = None
) -> XmlFile:
    """Read a topology from memory.

    ``extra`` adds elements to :data:`CHILDREN` (described accelerators). Raises ``TopologyError``
    with source and line.
    """
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(data) > MAX_BYTES:
        raise TopologyError(
            f"cannot read {source}: {len(data)} bytes; a topology file has at most {MAX_BYTES}"
        )
    return _TopologyReader(source, data, extra or {}).read()


def read_topology(
    path: str | os.PathLike[str], *, extra: Mapping[str, tuple[str, ...]] | None = None
) -> XmlFile:
    """Read a topology file.

    Raises ``TopologyError`` if it cannot be opened, is not a regular file, is too large or is not
    valid.
    """
    return parse_topology(read_bytes(path, "topology file"), source=os.fspath(path), extra=extra)


def read_bytes(path: str | os.PathLike[str], what: str) -> bytes:
    """Read a file of kind ``what``. Raises ``TopologyError`` if it cannot be opened or is too
    large.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise TopologyError(f"cannot read {name}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise TopologyError(
            f"cannot read {name}: larger than {MAX_BYTES} bytes, the limit of a {what}"
        )
    return data


# Writing


def format_topology(root: XmlNode) -> str:
    """Return the text that NCCL writes to ``NCCL_TOPO_DUMP_FILE``.

    Two spaces per level, attributes in their order, ``<x/>`` for empty elements.
    """
    lines: list[str] = []
    _format(root, 0, lines)
    return "\n".join(lines) + "\n"


def _format(node: XmlNode, indent: int, lines: list[str]) -> None:
    attrs = "".join(f' {key}="{_escape(value)}"' for key, value in node.attrs.items())
    if not node.children:
        lines.append(f"{' ' * indent}<{node.name}{attrs}/>")
        return
    lines.append(f"{' ' * indent}<{node.name}{attrs}>")
    for child in node.children:
        _format(child, indent + 2, lines)
    lines.append(f"{' ' * indent}</{node.name}>")


def _escape(value: str) -> str:
    return (
        value.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
        if any(c in value for c in '&<"')
        else value
    )


def write_topology(root: XmlNode, path: str | os.PathLike[str]) -> None:
    """Write :func:`format_topology` to a file. Raises ``TopologyError`` if it cannot be written."""
    try:
        Path(path).write_text(format_topology(root), encoding="utf-8")
    except OSError as error:
        raise TopologyError(f"cannot write {os.fspath(path)}: {error.strerror or error}") from None
