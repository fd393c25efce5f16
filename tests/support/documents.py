"""The pages of the documentation, for the tests that check them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
]
PAGES = [
    *ROOT_PAGES,
    *sorted(DOCS.rglob("*.md")),
    ROOT / "bench" / "README.md",
    ROOT / "newsfragments" / "README.md",
]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in PAGES}
