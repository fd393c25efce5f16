"""Faults as ranks hear of them on the control plane, of operations on CPUs and on GPUs: deaths, aborts, and what others have found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miraccl import errors
from miraccl.bootstrap import PeerLost
from miraccl.errors import CollectiveTimeout, CommunicatorAborted, MiracclError, PeerDied


def death_error(lost: PeerLost, *, rank: int, called: Sequence[int] | None = None) -> PeerDied:
    """The error of ``rank``; rank -1 is the hub in a launcher. ``called`` are the ranks' numbers in errors, where those are others."""
    peer = called[lost.rank] if called is not None and lost.rank >= 0 else lost.rank
    who = f"rank {peer}" if peer >= 0 else "the launcher"
    return PeerDied(f"{who} died: {lost.reason}", rank=rank, peer=peer)


def departure_error(peer: int, why: str, *, rank: int, op: str | None) -> PeerDied:
    """The error of ``rank``, which waited in ``op`` for a peer that has left in good order."""
    return PeerDied(
        f"rank {peer} has left the communicator ({why}) and will not take part",
        rank=rank,
        peer=peer,
        op=op,
    )


def abort_error(rank: int, reason: str) -> CommunicatorAborted:
    """The error of ``rank``, which has aborted the communicator."""
    return CommunicatorAborted(
        f"rank {rank} aborted the communicator: {reason}", rank=rank, peer=rank
    )


def encode_error(error: MiracclError) -> dict[str, Any]:
    """What a notice says of ``error``, in plain JSON values. One that another module defines is told as what it is derived from."""
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


def decode_error(words: Any, *, rank: int, source: int) -> MiracclError | None:
    """The error of a notice from rank ``source``, as ``rank`` raises it; None where these are not words of an error."""
    kind = getattr(errors, str(words.get("kind")), None) if isinstance(words, dict) else None
    if not (isinstance(kind, type) and issubclass(kind, MiracclError)):
        return None
    peer, op, hint = words.get("peer"), words.get("op"), words.get("hint")
    if not isinstance(peer, int) or (
        kind is PeerDied and peer == rank
    ):  # a rank that hears of its own death lives: it has lost the source
        peer = source
    error = kind(str(words.get("message", "")), rank=rank, peer=peer)
    error.op, error.hint = (str(op) if op else None), (str(hint) if hint else None)
    if isinstance(error, CollectiveTimeout):
        error.graph = tuple(str(line) for line in words.get("graph", ()))
    return error
