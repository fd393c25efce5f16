"""Status queries and the text of status reports: lines of a wait-for graph, cycles, locations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from miraccl.bootstrap.contract import Session
from miraccl.errors import MiracclError

STATUS_TIMEOUT_S = 1.5
#: A rank that runs replies within milliseconds, so a query ends this long after the last reply: a
#: stopped rank must not delay the errors of the others.
STATUS_QUIET_S = 0.35
#: Hint of errors about deadlocks.
ORDER_HINT = (
    "all ranks make the same calls in the same order; sends and receives that need one another "
    "belong into one group, or a sendrecv"
)


def query_status(session: Session, left: Collection[int] = ()) -> dict[int, dict[str, Any]]:
    """Query the status of all ranks that are still there and not in ``left``.

    Takes at most ``STATUS_TIMEOUT_S``, and ends ``STATUS_QUIET_S`` after the last reply. Answers by
    rank as ``Session.request_status`` gives them; empty if the control plane is gone.
    """
    with contextlib.suppress(MiracclError):
        return session.request_status(
            STATUS_TIMEOUT_S, without={*left, *session.gone()}, quiet=STATUS_QUIET_S
        )
    return {}


def describe_location(answer: Mapping[str, Any]) -> str:
    """Return the source line at which a rank's application is, empty if the answer has none."""
    for thread in answer.get("threads", ()):
        if isinstance(thread, dict) and thread.get("where"):
            return f"its program is at {thread['where']}"
    return ""


def describe_unresponsive(answer: Mapping[str, Any]) -> str:
    """Return the text for a rank that did not answer, with the reason."""
    return f"did not answer ({answer.get('reason', 'no status')})"


def join_parts(*parts: str) -> str:
    """Join the non-empty parts of a report line."""
    return "; ".join(filter(None, parts))


def describe_cycle(ranks: Sequence[int], describe: Callable[[int, int], str]) -> str:
    """Return the text of a cycle of ranks, beginning with the lowest one.

    ``describe(i, j)`` describes the wait of the i-th rank for the j-th one.
    """
    first = ranks.index(min(ranks))
    turned = [*range(first, len(ranks)), *range(first)]
    lines = map(describe, turned, [*turned[1:], turned[0]])
    return "deadlock: each of these ranks waits for the next one: " + " | ".join(lines)


def graph_line(rank: int, *parts: str) -> str:
    """Return the line of a wait-for graph for one rank."""
    return f"rank {rank}: {join_parts(*parts)}"
