"""Events that a session reports on its watcher thread. Ranks are those of that session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Rank in an event that reports only the loss of the control plane: the hub ran in the process of
#: no
#: rank of the session (a launcher, or a rank outside the group), or of one that had left before.
HUB = -1


@dataclass(frozen=True, kw_only=True)
class PeerLost:
    """A rank's process ended or its connection broke without a goodbye."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PeerLeft:
    """A rank closed its session, or its interpreter exited in good order."""

    rank: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Another rank called ``notify(payload)``."""

    from_rank: int
    payload: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StatusRequest:
    """Another rank queries this rank's status; the session replies by itself.

    ``id`` is unique per querying rank.
    """

    from_rank: int
    id: int


Event = PeerLost | PeerLeft | Notice | StatusRequest
