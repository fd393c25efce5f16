"""NCCL's reference results as test cases: those in ``tests/data`` and a larger collection.

``MIRACCL_GOLDEN`` names the folder of the larger collection (with ``index.json``; the topologies
are in ``../topologies`` next to it); without it ``../shared/golden`` next to the repository is
tried.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.options import PathOptions, TopoOptions
from miraccl.topo.xmlfile import XmlFile, read_topology

DATA = Path(__file__).resolve().parents[1] / "data"
TOPOLOGIES = DATA / "topologies"


def _larger_collection() -> Path | None:
    named = os.environ.get("MIRACCL_GOLDEN")
    folder = Path(named) if named else DATA.parents[2] / "shared" / "golden"
    return folder if (folder / "index.json").is_file() else None


LARGER = _larger_collection()


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """One reference result: its file, the topology's file, and the request."""

    file: Path
    topology: Path
    options: TopoOptions
    env: dict[str, str]

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(".gz").removesuffix(".json")

    def load(self) -> dict[str, Any]:
        data = self.file.read_bytes()
        loaded: dict[str, Any] = json.loads(
            gzip.decompress(data) if self.file.suffix == ".gz" else data
        )
        return loaded

    def analyse(self) -> Topology:
        return analyse_topology(_file(self.topology).root, self.options)


@cache
def _file(path: Path) -> XmlFile:
    return read_topology(path)


def golden_cases(folder: Path) -> Iterator[GoldenCase]:
    """Return all cases of a folder with an ``index.json``."""
    for entry in json.loads((folder / "index.json").read_text()):
        yield GoldenCase(
            file=folder / entry["file"],
            topology=folder.parent / "topologies" / Path(entry["topology"]).name,
            options=TopoOptions(
                nodes=entry["nodes"],
                gpus=tuple(entry["gpus"]),
                fuse=bool(entry["fuse"]),
                collnet=bool(entry["collnet"]),
                paths=PathOptions.read(entry["env"]),
            ),
            env=entry["env"],
        )


def by_topology(folder: Path | None) -> dict[str, list[GoldenCase]]:
    """Group the cases of a folder by topology file name; empty without a folder."""
    groups: dict[str, list[GoldenCase]] = {}
    for case in golden_cases(folder) if folder else ():
        groups.setdefault(case.topology.name, []).append(case)
    return groups
