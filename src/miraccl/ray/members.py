"""Actor side of groups: the groups of this process, and joining one.

``create_group`` of the driver calls ``prepare``, ``join`` and ``leave`` in the actors
(``__ray_call__``) and carries the unique id itself, so nothing is stored.  ``join_group`` is for
processes that know their rank without a driver: rank 0 stores the id in the cluster's key-value
store under Ray's namespace and the group's name, and removes it once all have joined.  A key left
by a crashed rank 0 leads to a dead address and is read again until the deadline, as with the files
of ``bootstrap.runtime_file``.

Everything here runs in the process of an actor or task; the tables belong to the process, whatever
thread a method runs on.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import ray
from ray.experimental import internal_kv

from miraccl import clock, params, trace
from miraccl.api.communicator import Communicator
from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.dial import ControlPlaneUnreachable
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.deadline import Deadline
from miraccl.errors import AuthenticationError, BootstrapError, InvalidUsage, MiracclError
from miraccl.runtime.options import Options
from miraccl.runtime.rendezvous import check_rank, start_deadline
from miraccl.runtime.setup_phases import SetupPhases

DEFAULT = "default"
#: Seconds an id from the store is trusted while its address does not answer, and the pauses
#: between reads.
STALE_ID_SECONDS = 1.0
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1
#: Seconds the driver joins in place of a failed rank.
JOIN_AND_LEAVE_SECONDS = 0.5
_STORE = b"miraccl"
_FAILED = "failed: "

_lock = threading.Lock()
_joined: dict[str, Communicator] = {}
_opened: dict[str, HubServer] = {}  # listening control planes of groups being created


def check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise InvalidUsage(f"name is {name!r}; it must be a non-empty string")


def join_timeout(meet_timeout: float | None) -> float:
    """Return the seconds within which a group must be formed."""
    if meet_timeout is not None and (isinstance(meet_timeout, bool | str) or not meet_timeout > 0):
        raise InvalidUsage(
            f"meet_timeout is {meet_timeout!r}; it must be a number of seconds above 0"
        )
    return params.BOOTSTRAP_TIMEOUT.read() if meet_timeout is None else float(meet_timeout)


def get_group(name: str = DEFAULT) -> Communicator:
    """Return this process's communicator of a group.

    Raises:
        InvalidUsage: This process is not in the group.
    """
    try:
        return _joined[name]
    except KeyError:
        others = ", ".join(sorted(_joined)) or "none"
        raise InvalidUsage(
            f"this process does not belong to group {name!r} (it belongs to: {others})",
            hint="create_group(actors) makes one",
        ) from None


# ---- by the driver's hand: these run in the actors, ``_actor`` is the user's object


def prepare(_actor: Any, name: str, rank: int, nranks: int) -> str:
    """Check that the name is free; on rank 0, start to listen.

    Returns:
        The unique id on rank 0, an empty string on other ranks.
    """
    trace.configure()
    with _lock:
        if name in _joined:
            raise InvalidUsage(
                f"this actor already belongs to group {name!r}",
                rank=rank,
                hint="destroy that group first, or choose another name",
            )
        if (old := _opened.pop(name, None)) is not None:  # left by a driver that died
            old.close("the group is being created again")
        if rank != 0:
            return ""
        unique_id, _opened[name] = create_hub(nranks=nranks)
        return str(unique_id)


def join(
    _actor: Any,
    name: str,
    rank: int,
    nranks: int,
    ident: str,
    timeout: float,
    options: dict[str, Any],
) -> None:
    """Join the other ranks within ``timeout`` seconds and register the communicator."""
    deadline = start_deadline(timeout)
    with _lock:
        root = _opened.pop(name, None)
    try:
        opts = Options.create(**options)
        session = connect(
            UniqueId.parse(ident), rank, nranks, deadline, session_timeout=opts.timeout, hub=root
        )
    except BaseException as error:
        _close(root, error)
        raise
    _register(name, Communicator.from_session(session, opts, setup=SetupPhases(session, deadline)))


def join_and_leave(ident: str, nranks: int, rank: int) -> None:
    """Join in place of a rank that will not, and leave, so that the others fail at once."""
    with suppress(MiracclError):
        connect(UniqueId.parse(ident), rank, nranks, JOIN_AND_LEAVE_SECONDS).close()


def abandon(_actor: Any, name: str) -> None:
    """Stop listening for a group that was not formed."""
    with _lock:
        root = _opened.pop(name, None)
    if root is not None:
        root.close("creation of the group was abandoned")


def leave(_actor: Any, name: str) -> bool:
    """Leave a group; return True if this process was in it."""
    with _lock:
        comm = _joined.pop(name, None)
    if comm is not None:
        comm.finalize()
    return comm is not None


def _register(name: str, comm: Communicator) -> None:
    with _lock:
        in_use = name in _joined
        if not in_use:
            _joined[name] = comm
    if in_use:
        comm.abort("the name of its group is in use")
        comm.finalize()
        raise InvalidUsage(f"this process already belongs to group {name!r}", rank=comm.rank)


def _close(root: HubServer | None, error: BaseException) -> None:
    if root is not None:
        root.close_after_error(error)


# ---- without a driver


def join_group(
    nranks: int,
    rank: int,
    name: str = DEFAULT,
    *,
    meet_timeout: float | None = None,
    **options: Any,
) -> Communicator:
    """Join a group from an actor or task, without a driver; collective.

    Args:
        nranks: Number of ranks that call this.
        rank: This process's rank.
        name: Name of the group; ``get_group(name)`` returns the communicator again.
        meet_timeout: Seconds until all must have joined; default MIRACCL_BOOTSTRAP_TIMEOUT.
        options: Options of ``Communicator``.

    Raises:
        BootstrapError: A rank is missing at the deadline.
    """
    check_name(name)
    if name in _joined:
        raise InvalidUsage(
            f"this process already belongs to group {name!r}",
            hint="destroy that group first, or choose another name",
        )
    comm = rendezvous_by_store(nranks, rank, name, meet_timeout, Options.create(**options))
    _register(name, comm)
    return comm


def rendezvous_by_store(
    nranks: int, rank: int, name: str, meet_timeout: float | None, options: Options
) -> Communicator:
    """Return a communicator of the ranks that meet under ``name`` in this Ray namespace.

    The caller owns it.
    """
    check_rank(nranks, rank)
    deadline = start_deadline(join_timeout(meet_timeout))
    trace.configure()
    key = f"{ray.get_runtime_context().namespace}/{name}".encode()
    meet = _join_as_root if rank == 0 else _join_as_peer
    session = meet(key, rank, nranks, deadline, options)
    return Communicator.from_session(session, options, setup=SetupPhases(session, deadline))


def _join_as_root(
    key: bytes, rank: int, nranks: int, deadline: Deadline, options: Options
) -> Session:
    root: HubServer | None = None
    published = ""
    try:
        ident, root = create_hub(nranks=nranks)
        _put(key, str(ident))
        published = str(ident)
        session = connect(ident, rank, nranks, deadline, session_timeout=options.timeout, hub=root)
    except BaseException as error:
        _close(root, error)
        if isinstance(error, MiracclError):
            with suppress(MiracclError):
                _publish_failure(key, published, error)
        raise
    with suppress(ray.exceptions.RayError):  # a leftover key leads to a dead address
        internal_kv._internal_kv_del(key, namespace=_STORE)
    return session


def _publish_failure(key: bytes, published: str, error: MiracclError) -> None:
    """Publish this rank's failure, unless another process has replaced ``published``."""
    if published and (_get(key, 0) or published) != published:
        error.hint = "another process also joined this group as rank 0"
    else:
        _put(key, f"{_FAILED}{error}")


def _get(key: bytes, rank: int) -> str:
    try:
        return (internal_kv._internal_kv_get(key, namespace=_STORE) or b"").decode(
            "ascii", "replace"
        )
    except ray.exceptions.RayError as error:
        raise BootstrapError(f"cannot reach Ray's key-value store: {error}", rank=rank) from error


def _put(key: bytes, text: str) -> None:
    try:
        internal_kv._internal_kv_put(key, text, overwrite=True, namespace=_STORE)
    except ray.exceptions.RayError as error:
        raise BootstrapError(f"cannot reach Ray's key-value store: {error}", rank=0) from error


def _join_as_peer(
    key: bytes, rank: int, nranks: int, deadline: Deadline, options: Options
) -> Session:
    pause = FIRST_PAUSE
    problem = BootstrapError(
        f"rank 0 did not publish a unique id within {deadline.seconds:g} s", rank=rank, peer=0
    )
    while (left := deadline.left) > 0:
        try:
            text = _get(key, rank)
        except BootstrapError as error:  # for example, the head node restarts
            problem, text = error, ""
        if text.startswith(_FAILED):  # it may retry
            problem = BootstrapError(
                f"rank 0 could not form the group: {text.removeprefix(_FAILED)}",
                rank=rank,
                peer=0,
            )
        elif text:
            try:
                return connect(
                    UniqueId.parse(text),
                    rank,
                    nranks,
                    deadline,
                    session_timeout=options.timeout,
                    dial_timeout=STALE_ID_SECONDS,
                )
            except (ControlPlaneUnreachable, AuthenticationError) as error:
                problem = error
        clock.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise problem
