"""Figures of the package's structure: imports, cycles, names and private access."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from codecheck.imports import ImportGraph, layer_of, longest_chain, strong_components
from codecheck.report import Figure

MAX_IMPORTS = 15
MAX_SAME_NAME = 3
CORE_CLASSES = frozenset({"CommunicatorCore", "Member", "Operations"})
"""Classes of a communicator besides those whose name ends in ``Communicator``."""


def structure_figures(root: Path) -> list[Figure]:
    """Measure the package below ``root``."""
    graph = ImportGraph.read(root)
    loaded = graph.edges(deferred=False, type_only=False)
    counts = sorted(
        ((len(targets), name) for name, targets in loaded.items() if len(targets) > MAX_IMPORTS),
        reverse=True,
    )
    chain = longest_chain(loaded)
    cycle = max(strong_components(graph.edges(deferred=True, type_only=True)), key=len)
    names = Counter(
        path.stem for path in graph.modules.values() if path.name not in ("__init__.py",)
    )
    repeated = {stem: count for stem, count in names.items() if count > MAX_SAME_NAME}
    private = list(private_access(graph))
    return [
        Figure(
            name="upward imports",
            now=len({str(item) for item in graph.upward}),
            before=None,
            aim="0",
            details=tuple(dict.fromkeys(f"{item} (line {item.line})" for item in graph.upward)),
        ),
        Figure(
            name=f"modules that import more than {MAX_IMPORTS} others",
            now=len(counts),
            before=8,
            aim="0",
            details=tuple(f"{name}: {count}" for count, name in counts),
        ),
        Figure(
            name="imports of the largest module",
            now=max(len(targets) for targets in loaded.values()),
            before=41,
            aim=f"at most {MAX_IMPORTS}",
        ),
        Figure(
            name="longest import chain",
            now=len(chain),
            before=28,
            aim="at most 18",
            details=(" -> ".join(chain),),
        ),
        Figure(
            name="largest group of modules that import one another, with types",
            now=len(cycle) if len(cycle) > 1 else 0,
            before=50,
            aim="at most 5",
            details=tuple(cycle) if len(cycle) > 1 else (),
        ),
        Figure(
            name=f"module names used more than {MAX_SAME_NAME} times",
            now=len(repeated),
            before=3,
            aim="0",
            details=tuple(
                f"{stem}: {', '.join(n for n, p in graph.modules.items() if p.stem == stem)}"
                for stem in sorted(repeated)
            ),
        ),
        Figure(
            name="private access to a communicator from other packages",
            now=len(private),
            before=17,
            aim="0",
            details=tuple(private),
        ),
    ]


def private_access(graph: ImportGraph) -> Iterator[str]:
    """Yield the uses of a communicator's private attributes outside the packages that define it."""
    owners: set[str] = set()
    private: set[str] = set()
    trees = {name: ast.parse(path.read_text("utf-8")) for name, path in graph.modules.items()}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ClassDef)
                and (node.name.endswith("Communicator") or node.name in CORE_CLASSES)
                and (found := set(_private_names(node)))
                and layer_of(name) not in ("torch", "ray")
            ):
                owners.add(layer_of(name))
                private |= found
    for name, tree in trees.items():
        if layer_of(name) in owners:
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in private
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
                and _names_communicator(node.value)
            ):
                yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def _names_communicator(node: ast.expr) -> bool:
    """Return True if an expression is named like a communicator or its core."""
    last = ast.unparse(node).rpartition(".")[2].strip("_")
    return last in ("comm", "communicator", "core", "member", "gpu", "world")


def _private_names(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            name = node.attr
        else:
            continue
        if name.startswith("_") and not name.startswith("__"):
            yield name
