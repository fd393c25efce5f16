"""Figures of the package's language: words, docstrings, names and line lengths."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from codecheck.api_docs import incomplete_api
from codecheck.report import Figure
from codecheck.vocabulary import TEXT_WORDS, VOCABULARY

MAX_COLUMNS = 100
HEADS = re.compile(r"(What|Whether|How|Where|As|Of|Which|Why|That|Those|Who|The same)\b")
"""First words of a docstring that name neither a value nor an action."""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source file."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def read_all(cls, root: Path, folder: str) -> list[Source]:
        """Read the Python files below a folder of ``root``."""
        files = sorted((root / folder).rglob("*.py"))
        return [
            cls(
                path=str(f.relative_to(root)),
                text=(text := f.read_text("utf-8")),
                tree=ast.parse(text),
            )
            for f in files
            if "data" not in f.relative_to(root).parts
        ]

    @cached_property
    def docstrings(self) -> list[tuple[str, int, str]]:
        """Name, line and text of every docstring."""
        return [
            (getattr(node, "name", "module"), getattr(node, "lineno", 1), text)
            for node in ast.walk(self.tree)
            if isinstance(node, Documented) and (text := ast.get_docstring(node))
        ]

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        """Line and text of every comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT]

    @cached_property
    def identifiers(self) -> list[tuple[int, str]]:
        """Line and name of every definition: classes, functions, parameters, variables."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((node.lineno, node.name))
            elif isinstance(node, ast.arg):
                found.append((node.lineno, node.arg))
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                name = node.id if isinstance(node, ast.Name) else node.attr
                found.append((node.lineno, name))
        return found


def language_figures(root: Path) -> list[Figure]:
    """Measure the source and the documentation below ``root``."""
    sources = Source.read_all(root, "src")
    docs = sorted((root / "docs").rglob("*.md"))
    identifiers = list(_word_uses_in_identifiers(sources))
    texts = list(_word_uses_in_texts(sources))
    pages = [
        f"{page.relative_to(root)}:{line}: {word}"
        for page in docs
        for line, word in _text_words(page.read_text("utf-8"))
    ]
    total = sum(1 for source in sources for _ in source.docstrings)
    heads = [
        f"{source.path}:{line}: {name}: {text.splitlines()[0]}"
        for source in sources
        for name, line, text in source.docstrings
        if HEADS.match(text)
    ]
    long_lines = Counter(
        source.path
        for source in sources
        for line in source.text.split("\n")
        if len(line) > MAX_COLUMNS
    )
    repeated = _repeated_classes(sources)
    api = incomplete_api(root)
    return [
        Figure(
            name="identifiers with a word of the glossary's list",
            now=len(identifiers),
            before=410,
            aim="0",
            details=tuple(identifiers),
        ),
        Figure(
            name="such words in docstrings and comments",
            now=len(texts),
            before=792,
            aim="0",
            details=tuple(texts),
        ),
        Figure(
            name="such words in docs/",
            now=len(pages),
            before=258,
            aim="0",
            details=tuple(pages),
        ),
        Figure(
            name=f"docstrings that begin with What, Whether, How ... (of {total:,})",
            now=round(100 * len(heads) / max(1, total), 1),
            before=19.8,
            unit="%",
            aim="0",
            details=tuple(heads),
        ),
        Figure(
            name="exported API without docstring, parameters or errors",
            now=len(api),
            before=79,
            aim="0",
            details=tuple(api),
        ),
        Figure(
            name="class names defined twice",
            now=len(repeated),
            before=42,
            aim="fewer than 10",
            details=tuple(f"{name}: {', '.join(paths)}" for name, paths in repeated.items()),
        ),
        Figure(
            name=f"lines over {MAX_COLUMNS} columns",
            now=sum(long_lines.values()),
            before=5733,
            aim="0",
            details=tuple(f"{path}: {count}" for path, count in long_lines.most_common()),
        ),
    ]


def split_identifier(name: str) -> list[str]:
    """Split a snake_case or CamelCase name into lower-case words."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def _word_uses_in_identifiers(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for line, name in source.identifiers:
            for word in split_identifier(name):
                entry = VOCABULARY.get(word)
                if entry and not entry.allowed(source.path):
                    yield f"{source.path}:{line}: {name}: {entry.instead}"


def _word_uses_in_texts(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources:
        for name, line, text in source.docstrings:
            for offset, word in _text_words(text, source.path):
                yield f"{source.path}:{line + offset}: {name}: {word}"
        for line, text in source.comments:
            for _, word in _text_words(text, source.path):
                yield f"{source.path}:{line}: {word}"


def _text_words(text: str, path: str = "") -> Iterator[tuple[int, str]]:
    """Yield line offset and word for every word of the list; code in backquotes is skipped."""
    for number, line in enumerate(text.split("\n")):
        for match in TEXT_WORDS.finditer(re.sub(r"``?[^`]*``?", "", line)):
            entry = VOCABULARY.get(match[0].lower())
            if entry is None or not entry.allowed(path):
                yield number, match[0]


def _repeated_classes(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Return the class names that are defined more than once, with their files."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.path)
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}
