"""Import graph of the package, read from its source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "miraccl"

LAYERS = (
    "leaves",
    "native",
    "topo",
    "graph",
    "schedule",
    "wire",
    "transport",
    "bootstrap",
    "proxy",
    "executor",
    "fastpath",
    "ops",
    "p2p",
    "planning",
    "diagnosis",
    "runtime",
    "api",
    "sim",
    "torch",
    "ray",
    "nccl_plugin",
    "compat",
    "tools",
)
"""Subpackages from the bottom to the top; a module imports its own layer and those before it."""

LEAVES = "leaves"
FACADE = "facade"
"""Layer of the package's root and ``__main__``, which load the other layers on demand."""

USERS = ("torch", "ray", "tools")
"""Layers that import the package like an application does."""


@dataclass(frozen=True, kw_only=True, order=True)
class Import:
    """One imported module.

    ``deferred`` states that a function contains the import, ``type_only`` that ``TYPE_CHECKING``
    guards it.
    """

    source: str
    target: str
    line: int
    deferred: bool = False
    type_only: bool = False

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}"


@dataclass(frozen=True, kw_only=True)
class ImportGraph:
    """Modules of the package (dotted name -> file) and the imports between them."""

    modules: Mapping[str, Path]
    imports: tuple[Import, ...]

    @classmethod
    def read(cls, root: Path) -> ImportGraph:
        """Read the package below ``root``/src."""
        source = root / "src"
        modules: dict[str, Path] = {}
        for path in sorted((source / PACKAGE).rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        found = (
            item for name, path in modules.items() for item in _read_module(name, path, modules)
        )
        return cls(modules=modules, imports=tuple(found))

    def edges(self, *, deferred: bool, type_only: bool) -> dict[str, set[str]]:
        """Return the imported modules by module, with or without deferred and type-only imports."""
        result: dict[str, set[str]] = {name: set() for name in self.modules}
        for item in self.imports:
            if (deferred or not item.deferred) and (type_only or not item.type_only):
                result[item.source].add(item.target)
        return result

    @cached_property
    def upward(self) -> tuple[Import, ...]:
        """The imports of a module in a higher layer, or of the package's root from inside."""
        return tuple(item for item in self.imports if _is_upward(item))

    def layer_edges(self) -> dict[str, set[str]]:
        """Return the imported layers by layer, without the facade."""
        result: dict[str, set[str]] = {layer: set() for layer in LAYERS}
        for item in self.imports:
            source, target = layer_of(item.source), layer_of(item.target)
            if FACADE not in (source, target) and source != target:
                result[source].add(target)
        return result


def _is_upward(item: Import) -> bool:
    source, target = layer_of(item.source), layer_of(item.target)
    if source == FACADE:
        return False
    if target == FACADE:
        return source not in USERS
    return LAYERS.index(target) > LAYERS.index(source)


def layer_of(module: str) -> str:
    """Return the layer of a module: its subpackage, or ``leaves`` for a file of the package."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] == "__main__":
        return FACADE
    return parts[1] if parts[1] in LAYERS else LEAVES


_STATEMENTS = ast.stmt | ast.excepthandler | ast.match_case


def _read_module(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[Import]:
    """Yield the imports of one file, also those of modules named in ``from package import``."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            parents = parents[: len(parents) - node.level + 1]
            base = ".".join([*parents, *([node.module] if node.module else [])])
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield full if full in modules else base

    def visit(node: ast.AST, deferred: bool, type_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                if target in modules and target != name:
                    yield Import(
                        source=name,
                        target=target,
                        line=node.lineno,
                        deferred=deferred,
                        type_only=type_only,
                    )
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for guarded in node.body:
                yield from visit(guarded, deferred, True)
            for other in node.orelse:
                yield from visit(other, deferred, type_only)
            return
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _STATEMENTS):  # expressions have no imports
                yield from visit(child, inside, type_only)

    yield from visit(ast.parse(path.read_text("utf-8")), False, False)


def strong_components(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components, each before the ones that import it (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(sorted(edges[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    work.append((target, iter(sorted(edges[target]))))
                    break
                if target in stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    components.append(sorted(stack[at:]))
                    del stack[at:]
    return components


def longest_chain(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the longest chain of imports, top first; modules in a cycle count as one."""
    chain: dict[str, list[str]] = {}
    best: list[str] = []
    for component in strong_components(edges):
        below: list[str] = []
        for target in sorted({t for node in component for t in edges[node]} - set(component)):
            below = max(below, chain[target], key=len)
        here = [component[0], *below]
        chain.update(dict.fromkeys(component, here))
        best = max(best, here, key=len)
    return best
