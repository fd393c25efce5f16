"""Where compiled kernels and measured constants live on disk, and the lock that lets one rank make them while the others wait.

Files are written beside their place and renamed, so that a reader never sees half of one; a folder that cannot be written (a
read-only home) only costs the time to make things again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from miraccl import params, trace

log = trace.logger("cache")


def folder() -> Path:
    """``MIRACCL_CACHE_DIR``, or ``$XDG_CACHE_HOME/miraccl``, or ``~/.cache/miraccl``; made if missing, private to the user."""
    chosen = params.CACHE_DIR.read()
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(chosen) if chosen else Path(base) / "miraccl"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except OSError:
        pass
    if chosen:
        _tell_unusable(chosen)
    fallback = Path(tempfile.gettempdir()) / f"miraccl-{os.getuid()}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    if fallback.stat().st_uid != os.getuid():  # somebody else's folder under a guessable name: never load code from there
        return Path(tempfile.mkdtemp(prefix="miraccl-"))
    return fallback


@functools.cache
def _tell_unusable(chosen: str) -> None:
    log.warning("MIRACCL_CACHE_DIR=%s cannot be written; a folder below %s is used", chosen, tempfile.gettempdir())


def plan_folder() -> Path:
    """Where plans are kept: beside compiled kernels and measured constants."""
    plans = folder() / "plans"
    plans.mkdir(mode=0o700, exist_ok=True)
    return plans


def read(name: str) -> bytes | None:
    try:
        return (folder() / name).read_bytes()
    except OSError:
        return None


def write(name: str, data: bytes) -> None:
    target = folder() / name
    with contextlib.suppress(OSError):
        handle, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(temporary, target)
        except OSError:
            os.unlink(temporary)


@contextlib.contextmanager
def lock(name: str) -> Iterator[bool]:
    """Hold the lock ``name``; gives True if nobody else held it. The kernel releases it when its holder dies."""
    handle = os.open(folder() / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        first = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            first = False
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield first
    finally:
        os.close(handle)
