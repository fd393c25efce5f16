"""Figures of language and structure on small trees, and their output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from codecheck.language import HEADS, Source, language_figures, split_identifier
from codecheck.report import Figure, figures_to_json, format_figures
from codecheck.structure import structure_figures
from codecheck.vocabulary import VOCABULARY

ROOT = Path(__file__).resolve().parents[2]


def make_tree(root: Path, **files: str) -> Path:
    """Write a package with a communicator and the given modules."""
    package = root / "src" / "miraccl"
    for name, text in {"__init__": "__all__ = []\n", **files}.items():
        path = package / (name.replace("___", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "docs").mkdir(exist_ok=True)
    return root


def value(figures: list[Figure], start: str) -> float:
    return next(figure.now for figure in figures if figure.name.startswith(start))


def test_language_of_a_small_tree(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        a='"""Values of a."""\n\nclass One:\n    """What it is."""\n\n    seat = 1\n',
        b=f'class One:\n    """A door of the hub, and `doors`."""\n# {"x" * 100}\n',
    )
    (tmp_path / "docs" / "page.md").write_text("Ranks are told.\n")
    figures = language_figures(tmp_path)
    assert value(figures, "identifiers") == 1
    assert value(figures, "such words in docstrings") == 1
    assert value(figures, "such words in docs/") == 1
    assert value(figures, "docstrings that begin") == pytest.approx(33.3)
    assert value(figures, "class names") == 1
    assert value(figures, "lines over") == 1
    assert value(figures, "exported API") == 0


def test_exported_api_is_measured(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        __init__=(
            "__all__ = ['good', 'bare', 'vague']\n"
            "def good(a):\n"
            '    """Do it with ``a``.\n\n    Raises:\n        OSError: Never.\n    """\n'
            "def bare(a): pass\n"
            'def vague(a, b):\n    """Do it with a. Raises nothing."""\n'
        ),
    )
    found = next(f for f in language_figures(tmp_path) if f.name.startswith("exported"))
    assert found.details == ("bare: no docstring", "vague: parameters b")


def test_structure_of_a_small_tree(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        runtime___core="class CommunicatorCore:\n    def __init__(self):\n        self._fifo = 1\n",
        torch___use="from miraccl.runtime import core\ndef f(comm):\n    return comm._core._fifo\n",
        runtime___loop="from miraccl.torch import use\n",
    )
    figures = structure_figures(tmp_path)
    assert value(figures, "upward imports") == 1
    assert value(figures, "longest import chain") == 3
    assert value(figures, "private access") == 1
    assert value(figures, "largest group") == 0


def test_names_are_split_into_words() -> None:
    assert split_identifier("FIFOSeat2_nextDoor") == ["fifo", "seat", "2", "next", "door"]


@pytest.mark.parametrize("text", ["What it is.", "Whether to go on.", "The same for GPUs."])
def test_heads_without_a_noun(text: str) -> None:
    assert HEADS.match(text)


@pytest.mark.parametrize("text", ["Whatever.", "Order of ranks.", "Return the rank."])
def test_other_heads(text: str) -> None:
    assert not HEADS.match(text)


def test_words_with_a_plain_meaning_are_allowed_there() -> None:
    assert VOCABULARY["visits"].allowed("src/miraccl/graph/search/report.py")
    assert not VOCABULARY["visits"].allowed("src/miraccl/runtime/core.py")


def test_code_in_backquotes_is_no_prose(tmp_path: Path) -> None:
    source = Source.read_all(make_tree(tmp_path, a='"""Return ``door``."""\n'), "src")
    assert [text for s in source for _, _, text in s.docstrings] == ["Return ``door``."]
    assert value(language_figures(tmp_path), "such words in docstrings") == 0


def test_table_and_json() -> None:
    figures = [
        Figure(name="lines", now=1234, before=5000, aim="0", details=("a.py: 3",)),
        Figure(name="share", now=3.5, before=None, aim="0", unit="%"),
    ]
    assert format_figures(figures).splitlines() == [
        "       at ab73fdd    now  aim",
        "lines       5,000  1,234  0",
        "share           -  3.5 %  0",
    ]
    assert format_figures(figures, details=True).endswith("lines:\n  a.py: 3")
    assert json.loads(figures_to_json(figures))["figures"][0]["now"] == 1234


@pytest.mark.parametrize("measure", ["language", "structure"])
def test_command(measure: str, tmp_path: Path) -> None:
    make_tree(tmp_path, a="import miraccl\n")
    command = [sys.executable, str(ROOT / ".ci" / "codecheck"), measure, "--json"]
    done = subprocess.run(
        [*command, "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(done.stdout)["figures"]) == 7
