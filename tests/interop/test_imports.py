"""Direction of the imports between the subpackages: a layer imports itself and those before it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from codecheck.imports import LAYERS, LEAVES, ImportGraph, layer_of

ROOT = Path(__file__).resolve().parents[2]
INTRINSICS = "miraccl.native.intrinsics"


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    return ImportGraph.read(ROOT)


def test_every_subpackage_has_a_layer() -> None:
    package = ROOT / "src" / "miraccl"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert folders == set(LAYERS) - {LEAVES}


def test_imports_go_down(graph: ImportGraph) -> None:
    upward = {str(item) for item in graph.upward}
    assert not upward, "these modules import a layer above their own"


def test_only_kernel_sources_import_numba(graph: ImportGraph) -> None:
    """It takes 0.3 s and 60 MiB of every process; kernel sources are imported to compile them."""
    edges = graph.edges(deferred=False, type_only=False)
    sources = {name for name, imported in edges.items() if INTRINSICS in imported}
    found, size = {INTRINSICS} | sources, 0
    while len(found) > size:
        size = len(found)
        found |= {name for name, imported in edges.items() if imported & found}
    others = found - sources - {INTRINSICS}
    assert not {name for name in others if ".kernels" not in name}


def test_leaves_import_the_standard_library_alone(graph: ImportGraph) -> None:
    for name, path in graph.modules.items():
        if layer_of(name) == LEAVES:
            found = re.findall(r"^(?:from|import) (\w+)", path.read_text("utf-8"), re.MULTILINE)
            assert set(found) - {"miraccl"} <= sys.stdlib_module_names, name


def test_design_page_lists_every_layer_in_order() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| `?([a-z0-9_]+)[/ ]", page, re.MULTILINE)
    assert list(dict.fromkeys(row for row in rows if row in LAYERS)) == list(LAYERS)
