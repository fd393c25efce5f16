"""Constructors and JSON codec of errors that travel over the control plane.

Deaths, departures and aborts read alike on CPUs and GPUs; errors of other ranks arrive as notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miraccl import errors
from miraccl.bootstrap.events import PeerLost
from miraccl.errors import CollectiveTimeout, CommunicatorAborted, MiracclError, PeerDied


def death_error(
    lost: PeerLost, *, rank: int, global_ranks: Sequence[int] | None = None
) -> PeerDied:
    """Return the error that ``rank`` raises for a peer that died.

    ``lost.rank`` -1: the control plane was lost, and there is no successor. ``global_ranks``: rank
    numbers to use in the message, by rank of the session; default the same numbers.
    """
    peer = lost.rank
    if global_ranks is not None and peer >= 0:
        peer = global_ranks[peer]
    if peer < 0:
        return PeerDied(f"the control plane was lost: {lost.reason}", rank=rank, peer=peer)
    return PeerDied(f"rank {peer} died: {lost.reason}", rank=rank, peer=peer)


def departure_error(peer: int, why: str, *, rank: int, op: str | None) -> PeerDied:
    """Return the error of ``rank``, blocked in ``op``, for a peer that left in good order."""
    return PeerDied(
        f"rank {peer} has left the communicator ({why}) and will not take part",
        rank=rank,
        peer=peer,
        op=op,
    )


def abort_error(rank: int, reason: str) -> CommunicatorAborted:
    """Return the error of ``rank`` for its own abort of the communicator."""
    return CommunicatorAborted(
        f"rank {rank} aborted the communicator: {reason}", rank=rank, peer=rank
    )


def encode_error(error: MiracclError) -> dict[str, Any]:
    """Encode an error as plain JSON values.

    A class that ``miraccl.errors`` does not define is encoded as its nearest base class there.
    """
    kind = next(kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    graph = list(error.graph) if isinstance(error, CollectiveTimeout) else []
    return {
        "kind": kind.__name__,
        "message": error.message,
        "peer": error.peer,
        "op": error.op,
        "hint": error.hint,
        "graph": graph,
    }


def decode_error(payload: Any, *, rank: int, source: int) -> MiracclError | None:
    """Decode the notice of rank ``source`` into the error that ``rank`` raises.

    Returns None if ``payload`` does not encode an error.
    """
    kind = getattr(errors, str(payload.get("kind")), None) if isinstance(payload, dict) else None
    if not (isinstance(kind, type) and issubclass(kind, MiracclError)):
        return None
    peer, op, hint = payload.get("peer"), payload.get("op"), payload.get("hint")
    # A rank that receives the news of its own death is alive: it has lost its link to the source.
    if not isinstance(peer, int) or (kind is PeerDied and peer == rank):
        peer = source
    error = kind(str(payload.get("message", "")), rank=rank, peer=peer)
    error.op, error.hint = (str(op) if op else None), (str(hint) if hint else None)
    if isinstance(error, CollectiveTimeout):
        error.graph = tuple(str(line) for line in payload.get("graph", ()))
    return error
