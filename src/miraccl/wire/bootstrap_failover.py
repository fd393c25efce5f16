"""Choice of the rank that succeeds a lost hub, as a state machine without I/O.

Every rank of a formed job listens at a standby port, which all ranks know from ``Welcome``. When
the connection to the hub breaks, each survivor tries the living ranks in ascending order. A
connection to a candidate that lives waits in the kernel's queue until the candidate has noticed the
loss too; so all survivors settle on the lowest living rank without a message among them. A rank
whose lower candidates have all failed takes over itself.

Two hubs at a time are prevented by the hub: a successor that fewer than half of the living ranks
can reach gives up (``HubMachine._give_up_missing``). A candidate that fails is not declared dead by
this machine; only a hub does that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miraccl.wire.bootstrap import advance


class SearchState(enum.Enum):
    """Search of one survivor for the new hub."""

    DIALING = "connects to a candidate and waits for its proof"
    REJOINING = "waits at a hub for the other survivors"
    SERVING = "has taken over, and waits at its own hub for the other survivors"
    RESUMED = "the control plane works again"
    FAILED = "no candidate is left"


class Outcome(enum.Enum):
    """Result of the last action."""

    REFUSED = "the host of the candidate refuses the connection: its process has ended"
    UNREACHABLE = "no connection in time: the candidate's host may be down"
    SILENT = "connected, but no proof in time: the candidate does not run"
    PROVED = "the candidate is a hub and knows the secret"
    LOST = "the connection to the hub broke"
    REJECTED = "the hub counts this rank as lost, or could not gather a majority"
    RESUMED = "all survivors are at the hub"


_NEXT = (Outcome.REFUSED, Outcome.UNREACHABLE, Outcome.SILENT)

SEARCH_TRANSITIONS: dict[tuple[SearchState, str], SearchState] = {
    **{(SearchState.DIALING, outcome.name): SearchState.DIALING for outcome in _NEXT},
    (SearchState.DIALING, "PROVED"): SearchState.REJOINING,
    (SearchState.REJOINING, "LOST"): SearchState.DIALING,
    (SearchState.REJOINING, "SILENT"): SearchState.DIALING,
    (SearchState.REJOINING, "REJECTED"): SearchState.FAILED,
    (SearchState.REJOINING, "RESUMED"): SearchState.RESUMED,
    (SearchState.DIALING, "take over"): SearchState.SERVING,
    **{
        (SearchState.SERVING, outcome.name): SearchState.DIALING
        for outcome in (*_NEXT, Outcome.LOST, Outcome.REJECTED)
    },
    (SearchState.SERVING, "PROVED"): SearchState.SERVING,
    (SearchState.SERVING, "RESUMED"): SearchState.RESUMED,
    (SearchState.DIALING, "exhausted"): SearchState.FAILED,
}


@dataclass(frozen=True, kw_only=True)
class Dial:
    """Action: connect to the standby port of ``rank``, prove the secret, send ``Rejoin``."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class TakeOver:
    """Action: start a hub at this rank's own standby port, then connect to it as to any other."""

    rank: int


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Action: the control plane is lost for this rank."""

    reason: str


Action = Dial | TakeOver | GiveUp


class SuccessorSearch:
    """Search of ``rank`` for the new hub.

    ``candidates``: living ranks with a standby port, by rank their host's fingerprint; this rank is
    one of them if it has a standby port itself.
    """

    def __init__(self, *, rank: int, candidates: Mapping[int, str]) -> None:
        self.state = SearchState.DIALING
        self._rank, self._hosts = rank, dict(candidates)
        self._left = sorted(candidates)  # not tried yet
        self._failed: dict[int, str] = {}

    @property
    def failures(self) -> Mapping[int, str]:
        """Reason by rank why a candidate was passed over."""
        return self._failed

    def start(self) -> Action:
        """Return the first action."""
        return self._next()

    def handle(self, outcome: Outcome, detail: str = "") -> Action | None:
        """Take the outcome of the last action; return the next action, None to wait."""
        serving = self.state is SearchState.SERVING
        self.state = advance(SEARCH_TRANSITIONS, self.state, outcome.name)
        if self.state is SearchState.FAILED:
            return GiveUp(reason=detail or outcome.value)
        if self.state is not SearchState.DIALING:
            return None
        candidate = self._left.pop(0)
        self._failed[candidate] = detail or outcome.value
        if outcome is Outcome.UNREACHABLE and not serving:
            # A host without power does not refuse connections: do not wait for its other ranks.
            down = self._hosts[candidate]
            self._left = [r for r in self._left if self._hosts[r] != down or r == self._rank]
        return self._next()

    def _next(self) -> Action:
        if not self._left:
            self.state = advance(SEARCH_TRANSITIONS, self.state, "exhausted")
            return GiveUp(reason=self._explain())
        if self._left[0] == self._rank:
            self.state = advance(SEARCH_TRANSITIONS, self.state, "take over")
            return TakeOver(rank=self._rank)
        return Dial(rank=self._left[0])

    def _explain(self) -> str:
        if not self._failed:
            return "no living rank has a standby port"
        return "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self._failed.items()))

    def validate_state(self) -> None:
        """Assert the machine's invariants."""
        assert self._left == sorted(set(self._left))
        assert not set(self._left) & set(self._failed)
        if self.state is SearchState.SERVING:
            assert self._left[0] == self._rank
        assert self._left or self.state is SearchState.FAILED


def candidates(
    standby_ports: Sequence[int], hosts: Sequence[str], gone: Sequence[int]
) -> dict[int, str]:
    """Return the candidates of a job by rank: those with a standby port that are not gone."""
    return {
        rank: hosts[rank]
        for rank, port in enumerate(standby_ports)
        if port and rank not in set(gone)
    }
