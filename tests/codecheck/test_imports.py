"""The import graph of small packages, and its chains and cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

from codecheck.imports import (
    FACADE,
    LEAVES,
    ImportGraph,
    layer_of,
    longest_chain,
    strong_components,
)


def write(root: Path, **files: str) -> ImportGraph:
    """Write modules (``topo__build`` for ``miraccl.topo.build``) and read their graph."""
    for name, text in files.items():
        path = root / "src" / "miraccl" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, *path.parent.parents):
            if folder.name == "src":
                break
            (folder / "__init__.py").touch()
        path.write_text(text)
    return ImportGraph.read(root)


def test_all_forms_of_import(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        errors="import os\n",
        topo__build="from miraccl import errors\nfrom .records import Node\n",
        topo__records="import miraccl.errors\n",
        topo__load="def f():\n    from miraccl.topo import build\n",
        topo__check=(
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from miraccl.topo.build import X\n"
        ),
    )
    found = {(str(item), item.deferred, item.type_only) for item in graph.imports}
    assert found == {
        ("miraccl.topo.build -> miraccl.errors", False, False),
        ("miraccl.topo.build -> miraccl.topo.records", False, False),
        ("miraccl.topo.records -> miraccl.errors", False, False),
        ("miraccl.topo.load -> miraccl.topo.build", True, False),
        ("miraccl.topo.check -> miraccl.topo.build", False, True),
    }
    assert graph.edges(deferred=False, type_only=False)["miraccl.topo.load"] == set()


def test_upward_imports_are_found(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        topo__build="def f():\n    import miraccl.graph.plan\n",
        graph__plan="from miraccl.topo import build\n",
    )
    assert [str(item) for item in graph.upward] == ["miraccl.topo.build -> miraccl.graph.plan"]


def test_only_users_import_the_root(tmp_path: Path) -> None:
    graph = write(
        tmp_path,
        graph__plan="import miraccl\nfrom miraccl import graph\n",
        tools__cli="import miraccl\n",
    )
    assert [str(item) for item in graph.upward] == ["miraccl.graph.plan -> miraccl"]


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("miraccl", FACADE),
        ("miraccl.__main__", FACADE),
        ("miraccl.errors", LEAVES),
        ("miraccl.topo", "topo"),
        ("miraccl.graph.search.run", "graph"),
    ],
)
def test_layers(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_chains_and_cycles() -> None:
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": {"e"}, "e": set(), "f": {"e"}}
    assert sorted(map(tuple, strong_components(edges)), key=len)[-1] == ("b", "c")
    chain = longest_chain(edges)
    assert (chain[0], len(chain)) == ("a", 4)
    assert chain[-2:] == ["d", "e"]


def test_long_chains_need_no_recursion() -> None:
    edges = {str(i): {str(i + 1)} for i in range(5000)} | {"5000": set()}
    assert len(longest_chain(edges)) == 5001
