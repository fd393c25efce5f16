"""Imports between the folders of ``src/miraccl`` are those of the table in docs/design/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "miraccl"
LEAVES = {path.stem for path in SOURCE.glob("*.py")} - {"__init__", "__main__"}
ANYTHING = {"runtime", "api", "tools"}  # "all above", "anything"


def table() -> dict[str, set[str]]:
    """Folder -> those it may import, for the rows that name them."""
    rows = re.findall(
        r"^\| `([a-z]+)/(?:\w+/)?` \|.*\| ([^|]+) \|$",
        (ROOT / "docs" / "design" / "architecture.md").read_text(),
        re.MULTILINE,
    )
    allowed: dict[str, set[str]] = {}
    for room, names in rows:
        allowed.setdefault(room, set()).update(
            set(re.split(r", ", re.sub(r";.*", "", names))) - {"-"}
        )
    return allowed


def imports(path: Path) -> Iterator[str]:
    """The folders and leaves of ours that a file imports, also inside functions and for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = (
                [f"miraccl.{alias.name}" for alias in node.names]
                if node.module == "miraccl"
                else [node.module]
            )
        yield from (module.split(".")[1] for module in modules if module.startswith("miraccl."))


def test_every_folder_is_in_the_table() -> None:
    assert set(table()) == {
        path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"
    }


def test_folders_import_what_the_table_says_and_the_root() -> None:
    allowed = table()
    used: dict[str, set[str]] = {room: set() for room in allowed}
    for room in allowed:
        for path in (SOURCE / room).rglob("*.py"):
            names = set(imports(path)) - {room, "__version__", *LEAVES}
            assert room in ANYTHING or names <= allowed[room], (
                f"{path.relative_to(SOURCE)} imports {sorted(names - allowed[room])}"
            )
            used[room] |= names
    assert "tools" not in set().union(*used.values())
    for room in set(allowed) - ANYTHING:
        assert used[room] == allowed[room], (
            f"docs/design/architecture.md allows {room} what it does not use"
        )
