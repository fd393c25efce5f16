"""Where compiled kernels and measured constants live on disk, and the lock that lets one rank make them while the others wait.

Files are written beside their place and renamed, so that a reader never sees half of one.  A folder that cannot be written (a read-only
home, a full disk, somebody else's) is still read; what is new goes to one below the temporary folder.  Where nothing can be kept, that
costs the time to make things again in every process.
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
    """``MIRACCL_CACHE_DIR``, or ``$XDG_CACHE_HOME/miraccl`` (relative ones do not count), or ``~/.cache/miraccl``; the folder below the
    temporary one for a user without a home, as in containers that run under any number."""
    chosen = params.CACHE_DIR.read()
    if chosen:
        return Path(chosen)
    named, home = os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~")
    if os.path.isabs(named):
        return Path(named) / "miraccl"
    return Path(home) / ".cache" / "miraccl" if os.path.isabs(home) else _fallback_path()


def writable_folder() -> Path | None:
    """The first folder that can be written, by its modes; None without one."""
    return next(_writable_folders(), None)


def _writable_folders() -> Iterator[Path]:
    """Folders that can be written, by their modes: the wanted one, made if missing and private to the user; one below the temporary one."""
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
            f"MIRACCL_CACHE_DIR={path} cannot be written ({why}); a folder below {_temporary()} is used"
        )
    with contextlib.suppress(OSError):
        yield _fallback_folder()


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # there is none that can be written
        return "/tmp"


def _fallback_path() -> Path:
    return Path(_temporary()) / f"miraccl-{os.getuid()}"


def _fallback_folder() -> Path:
    path = _fallback_path()
    path.mkdir(mode=0o700, exist_ok=True)
    return path if _owned_by_user(path) else _private_folder()


def _owned_by_user(path: Path) -> bool:
    """False for somebody else's folder, or link, under a guessable name: never load code from there."""
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


@functools.cache
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="miraccl-"))


@functools.cache
def _warn_once(text: str) -> None:
    """Once in this process."""
    log.warning("%s", text)


def plan_folder() -> Path | None:
    """Where plans are kept: beside compiled kernels and measured constants. None where they cannot be."""
    for place in _writable_folders():
        with contextlib.suppress(OSError):
            (place / "plans").mkdir(mode=0o700, exist_ok=True)
            return place / "plans"
    return None


def read(name: str) -> bytes | None:
    """What was written under this name, from the folder that is wanted or the one in its place."""
    below = _fallback_path()
    for place in dict.fromkeys((preferred_folder(), below)):
        if place == below and not _owned_by_user(below):
            continue
        with contextlib.suppress(OSError):
            return (place / name).read_bytes()
    return None


def write(name: str, data: bytes) -> None:
    failed = ""
    for place in _writable_folders():
        try:
            write_atomically(place / name, data)
        except OSError as error:
            failed = failed or f"{place} cannot be written: {error.strerror}"
        else:
            if failed:
                _warn_once(f"{failed}; {place} is used")
            return
    _warn_once(
        f"compiled code and measurements are not kept, every process makes them again: {failed or 'no folder can be written'}"
    )


def write_atomically(target: Path, data: bytes) -> None:
    """Write a file whole, or raise ``OSError`` and leave nothing."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def lock(name: str) -> Iterator[bool]:
    """Hold the lock ``name``; gives True if nobody else held it. The kernel releases it when its holder dies.

    Nobody waits where no folder, or a file system without locks, can have it.
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
        except OSError as error:  # not on every network file system
            log.info("no lock for %s: %s", name, error)
        yield first
    finally:
        os.close(handle)


def _open(name: str) -> int | None:
    """A descriptor of a file in the first folder that can have it; None where none can. Raises ``OSError`` without a descriptor left."""
    for place in _writable_folders():
        try:
            return os.open(place / name, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
    return None
