"""Disk cache of compiled kernels and measured constants, with locks between ranks.

Files are written next to their final name and renamed, so that a reader never sees a partial file.
A folder that cannot be written (a read-only home, a full disk, another user's) is still read; new
files go to a folder below the temporary one. If no folder can be written, every process compiles
and measures again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from miraccl import params, trace

log = trace.logger("cache")


def preferred_folder() -> Path:
    """Return the folder that settings choose.

    ``MIRACCL_CACHE_DIR``, else ``$XDG_CACHE_HOME/miraccl`` (if absolute), else
    ``~/.cache/miraccl``; for a user without a home, as in containers that run under any user ID,
    the fallback folder.
    """
    chosen = params.CACHE_DIR.read()
    if chosen:
        return Path(chosen)
    named, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(named):
        return Path(named) / "miraccl"
    return Path(home) / ".cache" / "miraccl" if os.path.isabs(home) else _fallback_path()


def writable_folder() -> Path | None:
    """Return the first folder whose mode allows writing, None without one."""
    return next(_writable_folders(), None)


def _writable_folders() -> Iterator[Path]:
    """Yield the folders whose mode allows writing: the preferred one, made private to the user if
    it
    does not exist, then the fallback.
    """
    path = preferred_folder()
    try:
        path = _fallback_folder() if path == _fallback_path() else path
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = "" if os.access(path, os.W_OK | os.X_OK) else "no permission"
    except OSError as error:
        why = error.strerror or "no reason given"
    if not why:
        yield path
    elif params.CACHE_DIR.read():
        _warn_once(
            f"cannot write to MIRACCL_CACHE_DIR={path} ({why}); a folder below {_temporary()} is "
            "used"
        )
    with contextlib.suppress(OSError):
        yield _fallback_folder()


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder can be written
        return "/tmp"


def _fallback_path() -> Path:
    return Path(_temporary()) / f"miraccl-{os.getuid()}"


def _fallback_folder() -> Path:
    path = _fallback_path()
    path.mkdir(mode=0o700, exist_ok=True)
    return path if _owned_by_user(path) else _private_folder()


def _owned_by_user(path: Path) -> bool:
    """Return False for another user's folder or link under a guessable name: never load code from
    it.
    """
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="miraccl-"))


@functools.cache
def _warn_once(text: str) -> None:
    """Log a warning once per process."""
    log.warning("%s", text)


def plan_folder() -> Path | None:
    """Return the folder of cached plans, None if there is no writable one."""
    for place in _writable_folders():
        with contextlib.suppress(OSError):
            (place / "plans").mkdir(mode=0o700, exist_ok=True)
            return place / "plans"
    return None


def read(name: str) -> bytes | None:
    """Return the content of a file in the preferred or the fallback folder, None if it does not
    exist.
    """
    below = _fallback_path()
    for place in dict.fromkeys((preferred_folder(), below)):
        if place == below and not _owned_by_user(below):
            continue
        with contextlib.suppress(OSError):
            return (place / name).read_bytes()
    return None


def write(name: str, data: bytes) -> None:
    """Write a file to the first folder that accepts it; log a warning if none does."""
    failed = ""
    for place in _writable_folders():
        try:
            write_atomically(place / name, data)
        except OSError as error:
            failed = failed or f"cannot write to {place}: {error.strerror}"
        else:
            if failed:
                _warn_once(f"{failed}; {place} is used")
            return
    _warn_once(
        "cannot store compiled code and measurements, which every process makes again: "
        f"{failed or 'no folder can be written'}"
    )


def write_atomically(target: Path, data: bytes) -> None:
    """Write a complete file, or raise ``OSError`` and leave nothing."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except BaseException:  # also an interruption by the user
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def lock(name: str) -> Iterator[bool]:
    """Hold the lock ``name`` within a ``with`` block; the value is True if it was free.

    The kernel releases it when its holder dies. Without a folder, or on a file system without
    locks, the block runs without waiting.
    """
    handle = _open(f"{name}.lock")
    if handle is None:
        yield True
        return
    try:
        first = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            first = False
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            log.info("no lock for %s: %s", name, error)
        yield first
    finally:
        os.close(handle)


def _open(name: str) -> int | None:
    """Open a file in the first folder that accepts it; None if none does.

    Raises ``OSError`` if the process has no descriptor left.
    """
    for place in _writable_folders():
        try:
            return os.open(place / name, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    return None
