"""On-disk cache of plans, keyed by topology content, settings and planner source code.

A hit costs reading two files and two hashes; the document is parsed on demand. A file is written
under another name and renamed, so a reader never sees a partial one. Its first line is the hash of
the rest: a damaged file counts as a miss. The folder keeps at most :data:`MAX_FILES` files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from miraccl.graph.plan import PlanRequest
from miraccl.native.cache import write_atomically
from miraccl.version import __version__

MAX_FILES = 256
_PREFIX = "plan-"


@dataclass(frozen=True, kw_only=True)
class PlanDocument:
    """A plan as text, parsed on demand; ``hit`` states that it came from the cache."""

    text: bytes
    hit: bool

    @cached_property
    def data(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text)
        return loaded


def plan_key(content: bytes, request: PlanRequest, *, variant: str = "") -> str:
    """Return the cache key of the plan of a topology with this content.

    ``variant`` distinguishes documents with different sections.
    """
    digest = hashlib.sha256()
    for part in (
        __version__.encode(),
        _code_stamp(),
        variant.encode(),
        repr(request).encode(),
        content,
    ):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@cache
def _code_stamp() -> bytes:
    """Return size and modification time of every source that a plan depends on."""
    package = Path(__file__).parents[1]
    # A version number alone does not change while a developer edits the sources.
    files = sorted(
        file for subpackage in ("graph", "topo") for file in (package / subpackage).rglob("*.py")
    )
    return repr(
        [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    ).encode()


def cached_document(
    folder: Path | None, key: str, make: Callable[[], dict[str, Any]]
) -> PlanDocument:
    """Return the document stored under ``key`` in ``folder``, or create it with ``make`` and store
    it.

    A document is not stored if ``folder`` is None.
    """
    target = folder / f"{_PREFIX}{key}" if folder else None
    if target:
        with contextlib.suppress(OSError):
            content = target.read_bytes()
            text = content.partition(b"\n")[2]
            if content == add_checksum(text):
                return PlanDocument(text=text, hit=True)
    text = json.dumps(make(), separators=(",", ":")).encode() + b"\n"
    if target:
        _store(target, add_checksum(text))
    return PlanDocument(text=text, hit=False)


def add_checksum(text: bytes) -> bytes:
    """Return the content of a cache file: the hash and the text."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _store(target: Path, content: bytes) -> None:
    """Write a cache file; a folder that cannot be written only costs the time to plan again."""
    with contextlib.suppress(OSError):
        write_atomically(target, content)
        _prune(target.parent)


def _prune(folder: Path) -> None:
    newest_first = sorted(
        folder.glob(f"{_PREFIX}*"), key=lambda file: file.stat().st_mtime, reverse=True
    )
    for file in newest_first[MAX_FILES:]:
        file.unlink(missing_ok=True)
