"""The session of ranks that were given a unique id by their user."""

from __future__ import annotations

from miraccl import params, trace
from miraccl.bootstrap import Session, UniqueId, connect
from miraccl.comm.member import Options
from miraccl.errors import InvalidUsage


def meet_by_id(nranks: int, unique_id: UniqueId | bytes | str, rank: int, options: Options) -> Session:
    """The session of the job with this id."""
    if isinstance(nranks, bool) or not isinstance(nranks, int) or nranks < 1:
        raise InvalidUsage(f"nranks is {nranks!r}; it is 1 or more")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < nranks:
        raise InvalidUsage(f"rank is {rank!r}; allowed are 0 to {nranks - 1}")
    trace.configure()
    ident = UniqueId.parse(unique_id) if isinstance(unique_id, str) else unique_id
    if isinstance(ident, bytes | bytearray):
        ident = UniqueId.from_bytes(bytes(ident))
    return connect(ident, rank, nranks, params.BOOTSTRAP_TIMEOUT.read(), session_timeout=options.timeout)
