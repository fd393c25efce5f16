"""Hand-over of a unique id between ranks of one user on one host, through a private file.

For launchers that only number the ranks. The folder is 0700 and the file 0600, both owned by the
user; anything else is rejected, since a user who can write the file could send ranks to a hub of
their own. Rank 0 replaces the file atomically and removes it once all ranks have joined. A file
that a crashed job left leads nowhere and is read again until the deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable

from miraccl import clock
from miraccl.bootstrap.dial import ControlPlaneUnreachable
from miraccl.bootstrap.session import LinkSession
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.deadline import Deadline
from miraccl.errors import (
    AuthenticationError,
    BootstrapError,
    InvalidUsage,
    SystemFailure,
    as_system_failure,
)

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.05
#: Seconds to find the hub at the address in the file before the file is read again.
DIAL_SECONDS = 0.25
#: Names of the processes that start ranks on a host, as in /proc (at most 15 characters).
LAUNCHERS = (
    "hydra_pmi_proxy",
    "mpirun",
    "mpiexec",
    "orted",
    "orterun",
    "prte",
    "slurmstepd",
    "pbs_demux",
)
MAX_ANCESTORS = 16


def runtime_folder() -> str:
    """Return the user's private folder, created if missing.

    Raises ``SystemFailure`` if another user could write there.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    with as_system_failure("cannot find a folder for the rendezvous file"):
        if not (base and os.path.isdir(base) and os.stat(base).st_uid == os.getuid()):
            base = tempfile.gettempdir()
    path = os.path.join(base, f"miraccl-{os.getuid()}")
    with as_system_failure(f"cannot make the folder {path}"):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise SystemFailure(
            f"cannot use the folder {path}: it is not private to this user (mode 0700)",
            hint="remove it, or set XDG_RUNTIME_DIR",
        )
    return path


def _path_of(job: str) -> str:
    return os.path.join(runtime_folder(), hashlib.sha256(job.encode()).hexdigest()[:24] + ".id")


def publish_id(job: str, unique_id: UniqueId) -> str:
    """Write the id for the other ranks of ``job``; return the path.

    Raises ``SystemFailure`` and leaves no file then.
    """
    path = _path_of(job)
    with as_system_failure(f"cannot write the rendezvous file {path}"):
        handle, draft = tempfile.mkstemp(dir=os.path.dirname(path))  # 0600
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(str(unique_id))
            os.replace(draft, path)
        except BaseException:
            remove_id(draft)
            raise
    return path


def remove_id(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _read_id(path: str) -> UniqueId | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(handle)
            if info.st_uid != os.getuid() or info.st_mode & 0o077 or not stat.S_ISREG(info.st_mode):
                raise SystemFailure(
                    f"cannot use the rendezvous file {path}: it is not private to this user "
                    "(mode 0600)"
                )
            text = file.read(4 * UniqueId.MAX_BYTES).decode("ascii", "replace")
    except SystemFailure:
        raise
    except OSError:  # it does not exist, or cannot be read now
        return None
    try:
        return UniqueId.parse(text)
    except InvalidUsage:
        return None


def wait_for_id(
    job: str, deadline: Deadline, join: Callable[[UniqueId, float], LinkSession]
) -> LinkSession:
    """Call ``join(unique_id, dial_timeout)`` with the id that rank 0 writes for ``job``.

    Raises ``BootstrapError`` at the deadline if there is no id, or the last error of ``join``.
    """
    path = _path_of(job)
    pause = FIRST_PAUSE
    problem: BootstrapError | None = None
    while (left := deadline.left) > 0:
        unique_id = _read_id(path)
        if unique_id is not None:
            try:
                return join(unique_id, DIAL_SECONDS)
            except (ControlPlaneUnreachable, AuthenticationError) as error:
                problem = error
        clock.sleep(min(pause, left))
        pause = min(pause * 1.5, LONGEST_PAUSE)
    raise problem or BootstrapError(
        f"cannot find rank 0: it wrote no rendezvous file within {deadline.seconds:.3g} s",
        hint=f"the file is {path}; ranks on several hosts need MASTER_ADDR",
    )


def job_of_parent(process: Callable[[int], tuple[str, int, str] | None] | None = None) -> str:
    """Return a name for the job of the last resort: pid and start time of the process that started
    it.

    That is the launcher among our ancestors, else our parent. ``process`` gives (name, parent,
    start time) of a pid. Ancestors are searched so that ranks may be started by wrapper scripts.
    """
    process = process or _process
    parent = pid = os.getppid()
    for _ in range(MAX_ANCESTORS):
        found = process(pid)
        if found is None:
            break
        name, above, _ = found
        if name.startswith(LAUNCHERS):
            parent = pid
            break
        pid = above
    started = process(parent)
    return f"parent {parent} {started[2] if started else ''}"


def _process(pid: int) -> tuple[str, int, str] | None:
    """Return fields 2 (comm), 4 (ppid) and 22 (starttime) of /proc/pid/stat, see proc(5)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            head, _, tail = file.read().rpartition(")")
        fields = tail.split()
        return head.partition("(")[2], int(fields[1]), fields[19]
    except (OSError, IndexError, ValueError):
        return None
