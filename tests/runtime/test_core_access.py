"""Only ``runtime`` and ``api`` use the private attributes of a communicator."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import miraccl

ROOT = Path(miraccl.__file__).parent
#: classes of communicators and of their engine
CLASSES = {
    "api/communicator.py": ("Communicator",),
    "api/operations.py": (),
    "runtime/dispatch.py": (),
    "runtime/core.py": ("CommunicatorCore",),
    "runtime/fabric.py": ("ProcessFabric",),
    "runtime/gpu/communicator.py": ("DeviceCommunicator",),
    "runtime/multinode/communicator.py": ("MultiNodeCommunicator",),
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def own_attributes(path: Path) -> frozenset[str]:
    """Return the private names that a module defines: functions and attributes of ``self``."""
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef) and is_private(node.name):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return frozenset(filter(is_private, found))


def private_attributes() -> set[str]:
    """Return the private attributes of communicators."""
    return set().union(*(own_attributes(ROOT / path) for path in CLASSES))


def accesses(path: Path, private: set[str]) -> Iterator[str]:
    """Yield each use of a communicator's private attribute.

    Names that the module or a module beside it defines belong to classes of the package.
    """
    tree = parse(path)
    own: set[str] = set()
    for neighbour in path.parent.glob("*.py"):
        own |= own_attributes(neighbour)
    own -= {"_core", "_device"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in private - own
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


def test_private_attributes_are_used_in_runtime_and_api_only() -> None:
    private = private_attributes()
    assert {"_core", "_device"} <= private
    found = [
        access
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).parts[0] not in ("runtime", "api")
        for access in accesses(path, private)
    ]
    assert found == [], "use runtime.core_access"


def test_core_access_is_the_only_access_of_the_multi_node_side() -> None:
    private = {"_core", "_device"}
    modules = sorted((ROOT / "runtime" / "multinode").glob("*.py"))
    found = [access for path in modules for access in accesses(path, private)]
    assert found == [], "use runtime.core_access"
