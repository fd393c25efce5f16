"""Rendezvous through the store of a process group.

Rank 0 creates the unique id of a new communicator; the store carries it to the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from miraccl import clock, params
from miraccl.bootstrap.dial import ControlPlaneUnreachable
from miraccl.bootstrap.hub import HubServer, create_hub
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.session import single_rank_session
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.errors import AuthenticationError, BootstrapError, MiracclError

if TYPE_CHECKING:
    from miraccl.bootstrap.contract import Session
    from miraccl.deadline import Deadline

KEY = "miraccl/unique_id"
_NONE, _FAILED = "none", "failed: "
#: Backoff between reads of the id, in seconds.
BACKOFF_FIRST_S, BACKOFF_LAST_S = 1e-3, 0.05
#: Seconds until the first check for a newer id; doubled after each check.
RECHECK_FIRST_S = 0.5
#: Ids with which ranks of this process have failed.
_failed_ids: set[tuple[int, str]] = set()


def join_by_store(
    store: Any, rank: int, size: int, deadline: Deadline, look: Callable[[], None]
) -> Session:
    """Join the ranks that share ``store``; collective.

    Args:
        look: Called while waiting; raises to end it.

    Raises:
        BootstrapError: The ranks could not meet by the deadline.
    """
    if size == 1:
        return single_rank_session(deadline.seconds)
    if rank == 0:
        return _join_as_root(store, size, deadline, look)
    return _join_as_peer(store, rank, size, deadline, look)


def _join_as_root(store: Any, size: int, deadline: Deadline, look: Callable[[], None]) -> Session:
    """Join as rank 0: listen, publish the id, and stop listening on failure."""
    try:
        ident, root = create_hub(nranks=size)
    except MiracclError as error:
        # the random part makes every failure text unique, as ids are
        store.set(KEY, f"{_FAILED}{clock.random_hex(8)} {error}")
        raise
    try:
        with _published_id(store, ident):
            return _connect(ident, 0, size, deadline, look, root)
    except BaseException as error:
        root.close_after_error(error)
        raise


@contextlib.contextmanager
def _published_id(store: Any, ident: UniqueId) -> Iterator[None]:
    """Publish the id in the store for the duration of the block, in which all ranks meet.

    A later group under the same name must not read a stale id, so the key is overwritten
    afterwards.  It is not deleted: a rank that has just seen it would block in ``store.get``.  A
    rank that is too late for this id waits for the next one, as it would for a rank 0 that has not
    started.
    """
    try:
        store.set(KEY, str(ident))
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(KEY, _NONE)


def _join_as_peer(
    store: Any, rank: int, size: int, deadline: Deadline, look: Callable[[], None]
) -> Session:
    """Join as another rank; retry if the id was of a killed rank 0 or of an earlier attempt."""
    while True:
        text = _read_id(store, rank, deadline, look)
        try:
            if text.startswith(_FAILED):
                why = text.removeprefix(_FAILED).partition(" ")[2]
                raise BootstrapError(
                    f"rank 0 cannot start the control plane: {why}", rank=rank, peer=0
                )
            return _connect(
                UniqueId.parse(text), rank, size, deadline, _check_not_replaced(store, text, look)
            )
        except BaseException as error:
            _failed_ids.add((rank, text))
            misled = isinstance(
                error, ControlPlaneUnreachable | AuthenticationError
            ) and _is_replaced(store, text)
            if not misled and not isinstance(error, _Replaced):
                raise


class _Replaced(Exception):
    """Raised when rank 0 has published another id."""


def _check_not_replaced(store: Any, text: str, look: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``look`` so that it also raises ``_Replaced`` once the store holds another id than
    ``text``.
    """
    pause = RECHECK_FIRST_S
    due = clock.monotonic() + pause

    def both() -> None:
        nonlocal pause, due
        look()
        if clock.monotonic() >= due:
            if _is_replaced(store, text):
                raise _Replaced
            pause *= 2
            due = clock.monotonic() + pause

    return both


def _is_replaced(store: Any, text: str) -> bool:
    with contextlib.suppress(RuntimeError):
        return _read(store) not in (text, _NONE)
    return False


def _connect(
    ident: UniqueId,
    rank: int,
    size: int,
    deadline: Deadline,
    look: Callable[[], None],
    root: HubServer | None = None,
) -> Session:
    """Connect to rank 0.

    Ranks may start as far apart as the group's timeout, but an unreachable rank 0 is reported after
    MIRACCL_BOOTSTRAP_TIMEOUT.
    """
    dial = params.BOOTSTRAP_TIMEOUT.read()
    return connect(
        ident,
        rank,
        size,
        deadline,
        session_timeout=deadline.seconds,
        dial_timeout=dial,
        hub=root,
        poll=look,
    )


def _read_id(store: Any, rank: int, deadline: Deadline, look: Callable[[], None]) -> str:
    """Wait for the id that rank 0 publishes for this attempt."""
    pause_s = BACKOFF_FIRST_S
    try:
        while (text := _read(store)) == _NONE or (rank, text) in _failed_ids:
            look()
            if not deadline.left:
                raise BootstrapError(
                    f"rank 0 did not publish a unique id within {deadline.seconds:g} s",
                    rank=rank,
                    peer=0,
                )
            clock.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_LAST_S)
    except RuntimeError as error:  # some stores raise DistStoreError, others not
        raise BootstrapError(
            f"cannot read the unique id of rank 0 from the store: {error}", rank=rank, peer=0
        ) from error
    return text


def _read(store: Any) -> str:
    text: str = store.get(KEY).decode() if store.check([KEY]) else _NONE
    return text
