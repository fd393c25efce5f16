"""Session of ranks that were given a unique id by the application."""

from __future__ import annotations

import contextlib

from miraccl import params, trace
from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.join import connect
from miraccl.bootstrap.unique_id import UniqueId
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, MiracclError
from miraccl.planning.tuning import prepare
from miraccl.runtime.options import Options


def start_deadline(timeout: float | None = None) -> Deadline:
    """Start the deadline for creating a communicator, after first-use work of the machine.

    Args:
        timeout: Seconds for ranks to find each other and to connect; None:
            MIRACCL_BOOTSTRAP_TIMEOUT.
    """
    with contextlib.suppress(MiracclError, OSError):  # raised later, when it can be reported
        prepare()
    return Deadline.after(params.BOOTSTRAP_TIMEOUT.read() if timeout is None else timeout)


def join_by_id(
    nranks: int, unique_id: UniqueId | bytes | str, rank: int, options: Options, deadline: Deadline
) -> Session:
    """Return the session of the job with this unique id.

    Raises:
        InvalidUsage: ``nranks``, ``rank`` or ``unique_id`` is invalid.
        BootstrapError: A rank is missing at the deadline, died or was rejected.
    """
    check_rank(nranks, rank)
    ident = _as_unique_id(unique_id)
    trace.configure()
    return connect(ident, rank, nranks, deadline, session_timeout=options.timeout)


def check_rank(nranks: int, rank: int) -> None:
    if isinstance(nranks, bool) or not isinstance(nranks, int) or nranks < 1:
        raise InvalidUsage(f"nranks is {nranks!r}; it must be 1 or more")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nranks:
        raise InvalidUsage(f"rank is {rank!r}; allowed are 0 to {nranks - 1}")


def _as_unique_id(given: UniqueId | bytes | str) -> UniqueId:
    if isinstance(given, UniqueId):
        return given
    if isinstance(given, str):
        return UniqueId.parse(given)
    if isinstance(given, bytes | bytearray):
        return UniqueId.from_bytes(bytes(given))
    raise InvalidUsage(
        f"unique_id is a {type(given).__name__}; allowed are the result of get_unique_id(), "
        "its bytes and its text"
    )
