"""Barrier that names the missing ranks, with the rules of Gloo's ``monitored_barrier``.

Ranks report to rank 0, which waits for each until the deadline and sends all of them the outcome.
The error also says where the missing ranks are.  Barriers of a group are numbered, so that a late
report is not mistaken for the next barrier's.  The group stays usable after a failed barrier.
"""

from __future__ import annotations

from typing import Any

import torch

from miraccl import clock
from miraccl.errors import CollectiveTimeout
from miraccl.runtime.core_access import core_access
from miraccl.torch.matching import TagMatcher

NAME = "monitored_barrier"
#: Tags below those that applications may use.
FIRST_TAG = -(1 << 60)
#: Seconds that rank 0's outcome may take beyond its own deadline: it queries the missing ranks.
OUTCOME_S = 5.0
OUTCOME_BYTES = 4096


def barrier(matcher: TagMatcher, number: int, limit: float, wait_all_ranks: bool) -> None:
    """Return once all ranks have reached barrier ``number``.

    Raises:
        CollectiveTimeout: Ranks were missing after ``limit`` seconds; raised on every rank that
            arrived.
    """
    rank, nranks = matcher.comm.rank, matcher.comm.nranks
    tag = FIRST_TAG + 2 * number
    if rank:
        outcome = _report(matcher, tag, limit)
    else:
        missing = _missing_ranks(matcher, tag, limit, wait_all_ranks)
        outcome = _describe(matcher, missing, limit)
        for peer in range(1, nranks):  # a late rank learns the outcome at once
            matcher.send(_packed(outcome), peer, tag + 1, NAME)
    if outcome:
        text, *graph = outcome.split("\n")
        if rank and not text.startswith(f"Rank {rank} timed out"):
            text = (
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {text}"
            )
        raise CollectiveTimeout(
            text, graph=tuple(graph), rank=rank, peer=None if rank == 0 else 0, op=NAME
        )


def _missing_ranks(matcher: TagMatcher, tag: int, limit: float, wait_all_ranks: bool) -> list[int]:
    """Return the ranks that did not report in time: all of them, or only the first."""
    end = clock.monotonic() + limit
    reports = {r: matcher.receive(_empty(), r, tag, NAME) for r in range(1, matcher.comm.nranks)}
    missing = []
    for peer, report in reports.items():
        try:
            matcher.wait(report, max(1e-3, end - clock.monotonic()))
        except CollectiveTimeout:
            if matcher.cancel(report):
                missing.append(peer)
    return missing if wait_all_ranks else missing[:1]


def _report(matcher: TagMatcher, tag: int, limit: float) -> str:
    matcher.send(_empty(), 0, tag, NAME)
    packed = torch.zeros(OUTCOME_BYTES, dtype=torch.uint8, device="cpu")
    answer = matcher.receive(packed, 0, tag + 1, NAME)
    try:
        matcher.wait(answer, limit + OUTCOME_S)
    except CollectiveTimeout:
        if matcher.cancel(answer):
            rank = matcher.comm.rank
            return f"Rank {rank} timed out in monitoredBarrier after {limit * 1e3:.0f} ms"
        matcher.wait(answer)  # it was being received
    return bytes(packed.tolist()).rstrip(b"\0").decode("utf-8", "replace")


def _describe(matcher: TagMatcher, missing: list[int], limit: float) -> str:
    """Format the outcome; empty if no rank is missing."""
    if not missing:
        return ""
    who = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    spent = "" if limit > 0 else "Rank 0 timed out in monitoredBarrier after 0 ms: "
    return "\n".join(
        [
            f"{spent}{who} failed to pass monitoredBarrier in {limit * 1e3:.0f} ms",
            *core_access(matcher.comm).wait_for_graph(),
        ]
    )


def _packed(text: str) -> Any:
    data = text.encode()[:OUTCOME_BYTES].ljust(OUTCOME_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _empty() -> Any:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
