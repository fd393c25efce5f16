"""The topology of this process: a named file or this machine, with described accelerators."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from miraccl import params
from miraccl.topo.accelerators import (
    AMD,
    Accelerator,
    apply_accelerators,
    extra_elements,
    read_accelerators,
)
from miraccl.topo.analyse import Topology
from miraccl.topo.xmlfile import XmlFile, parse_topology, read_topology, write_topology


def load_topology(
    path: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    accelerators: Sequence[Accelerator] | None = None,
) -> XmlFile:
    """Return the tree of a topology file, ready for ``analyse_topology``.

    ``path`` None uses the file that ``TOPO_FILE`` names, and without one detects this machine.
    ``accelerators`` None uses the files that ``ACCELERATORS`` names. Raises ``TopologyError``.
    """
    described = load_accelerators(environ) if accelerators is None else tuple(accelerators)
    return apply_accelerators(read_original(path, described, environ=environ), described)


def read_original(
    path: str | os.PathLike[str] | None = None,
    accelerators: Sequence[Accelerator] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> XmlFile:
    """Read a topology like :func:`load_topology`, with described devices in their own elements."""
    name = os.fspath(path) if path is not None else params.TOPO_FILE.read(environ)
    if not name:
        from miraccl.topo.detect import detect_machine  # only needed without a file

        return detect_machine()
    described = load_accelerators(environ) if accelerators is None else tuple(accelerators)
    return read_topology(name, extra=extra_elements([*described, AMD]))


def load_topology_text(
    text: str | bytes, *, source: str = "<text>", accelerators: Sequence[Accelerator] = ()
) -> XmlFile:
    """Read a topology like :func:`load_topology`, from memory."""
    return apply_accelerators(
        parse_topology(text, source=source, extra=extra_elements([*accelerators, AMD])),
        accelerators,
    )


def load_accelerators(environ: Mapping[str, str] | None = None) -> tuple[Accelerator, ...]:
    """Return the descriptions of the files that ``ACCELERATORS`` names."""
    files = [name for name in params.ACCELERATORS.read(environ).split(":") if name]
    return tuple(accelerator for name in files for accelerator in read_accelerators(name))


def dump_if_asked(topology: Topology, environ: Mapping[str, str] | None = None) -> bool:
    """Write the topology in use to ``TOPO_DUMP_FILE``, if set; return True if written."""
    name = params.TOPO_DUMP_FILE.read(environ)
    if not name or topology.root is None:
        return False
    write_topology(topology.root, name)
    return True
