"""Plans on disk, keyed by what they depend on: the topology's content, every setting, and the code that decides.

A hit costs reading two files and two hashes; the document is only parsed when somebody looks inside. Files are written beside their place
and renamed, so a reader never sees half of one, and begin with a line that is the hash of the rest: a damaged one is no hit. The folder
keeps at most :data:`MAX_FILES`.
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

import miraccl
from miraccl.graph.plan import PlanRequest
from miraccl.native.cache import write_atomically

MAX_FILES = 256
_PREFIX = "plan-"


@dataclass(frozen=True, kw_only=True)
class PlanDocument:
    """A plan as text, and parsed on demand. ``hit``: it came from the cache."""

    text: bytes
    hit: bool

    @cached_property
    def data(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.text)
        return loaded


def plan_key(content: bytes, request: PlanRequest, *, variant: str = "") -> str:
    """A name for the plan of a topology with this content; ``flavour`` tells documents with different contents apart."""
    digest = hashlib.sha256()
    for part in (
        miraccl.__version__.encode(),
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
    """Size and time of change of every source that a plan depends on: a version number alone does not change while somebody edits."""
    package = Path(miraccl.__file__).parent
    files = sorted(
        file for subpackage in ("graph", "topo") for file in (package / subpackage).rglob("*.py")
    )
    return repr(
        [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    ).encode()


def cached_document(
    folder: Path | None, key: str, make: Callable[[], dict[str, Any]]
) -> PlanDocument:
    """The document kept under ``key`` in ``folder``, or the one that ``make`` returns, kept from now on (not without a folder)."""
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
    """What a file holds: the hash and the text."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def _store(target: Path, content: bytes) -> None:
    """Best effort: a folder that cannot be written only costs the time to plan again."""
    with contextlib.suppress(OSError):
        write_atomically(target, content)
        _prune(target.parent)


def _prune(folder: Path) -> None:
    kept = sorted(folder.glob(f"{_PREFIX}*"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in kept[MAX_FILES:]:
        file.unlink(missing_ok=True)
