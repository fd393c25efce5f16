"""MkDocs hooks: pages of the repository's root in the site, and links that leave docs/.

Pages link to files of the repository by relative paths, so that they also work in a checkout. On
the site, links to the root pages lead to their copies, and links to other files of the repository
become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]+)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the root pages."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links to files outside of docs/."""
    source = page.file.src_uri
    folder = "." if source in ROOT_PAGES else posixpath.join("docs", posixpath.dirname(source))

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        inside = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / inside).exists():
            return match[0]  # left to MkDocs, which warns
        page_name = inside.removeprefix("docs/") if inside.startswith("docs/") else inside
        if not inside.startswith("docs/") and inside not in ROOT_PAGES:
            return text if text.startswith("`") else f"{text} (`{inside}`)"
        return f"[{text}]({posixpath.relpath(page_name, posixpath.dirname(source) or '.')}{anchor})"

    return _LINK.sub(rewrite, markdown)
