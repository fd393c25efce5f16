"""The session of ranks that were given a unique id by their user."""

from __future__ import annotations

from miraccl import params, trace
from miraccl.bootstrap import Session, UniqueId, connect
from miraccl.comm.member import Options
from miraccl.errors import InvalidUsage


def meet_by_id(nranks: int, unique_id: UniqueId | bytes | str, rank: int, options: Options) -> Session:
    """The session of the job with this id."""
    check_place(nranks, rank)
    ident = _as_unique_id(unique_id)
    trace.configure()
    return connect(ident, rank, nranks, params.BOOTSTRAP_TIMEOUT.read(), session_timeout=options.timeout)


def check_place(nranks: int, rank: int) -> None:
    if isinstance(nranks, bool) or not isinstance(nranks, int) or nranks < 1:
        raise InvalidUsage(f"nranks is {nranks!r}; it is 1 or more")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nranks:
        raise InvalidUsage(f"rank is {rank!r}; allowed are 0 to {nranks - 1}")


def _as_unique_id(given: UniqueId | bytes | str) -> UniqueId:
    if isinstance(given, UniqueId):
        return given
    if isinstance(given, str):
        return UniqueId.parse(given)
    if isinstance(given, bytes | bytearray):
        return UniqueId.from_bytes(bytes(given))
    raise InvalidUsage(f"unique_id is a {type(given).__name__}; allowed are what get_unique_id() returns, its bytes and its text")
