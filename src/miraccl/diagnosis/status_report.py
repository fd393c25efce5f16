"""What ranks answer whoever asks them where they are, and the lines of a wait-for graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from miraccl.bootstrap import Session
from miraccl.errors import MiracclError

STATUS_TIMEOUT_S = 1.5
#: how a program avoids circles
ORDER_HINT = "all ranks make the same calls in the same order; sends and receives that need one another belong into one group, or a sendrecv"


def query_status(session: Session, left: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """What all ranks are doing, as ``session.request_status`` has it, but not those that have ``left``. Takes up to ``STATUS_WAIT_S``;
    empty if they cannot be asked."""
    with contextlib.suppress(MiracclError):
        return session.request_status(STATUS_TIMEOUT_S, without={*left, *session.gone()})
    return {}


def describe_location(answer: Mapping[str, Any]) -> str:
    """Where the program of a rank is, as far as its answer tells."""
    for thread in answer.get("threads", ()):
        if isinstance(thread, dict) and thread.get("where"):
            return f"its program is at {thread['where']}"
    return ""


def describe_unresponsive(answer: Mapping[str, Any]) -> str:
    """That a rank has not answered, and why."""
    return f"did not answer ({answer.get('reason', 'no status')})"


def join_parts(*said: str) -> str:
    """What is said of a rank, in one line; what is empty is left out."""
    return "; ".join(filter(None, said))


def describe_cycle(ranks: Sequence[int], says: Callable[[int, int], str]) -> str:
    """That each of these ranks waits for the next one, the last one for the first, beginning with the lowest; ``says(i, j)`` is what the
    i-th does, which waits for the j-th."""
    first = ranks.index(min(ranks))
    turned = [*range(first, len(ranks)), *range(first)]
    lines = map(says, turned, [*turned[1:], turned[0]])
    return "ranks wait for one another, so none goes on: " + " | ".join(lines)


def graph_line(rank: int, *said: str) -> str:
    """What a wait-for graph says of a rank."""
    return f"rank {rank}: {join_parts(*said)}"
