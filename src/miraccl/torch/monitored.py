"""A barrier that says who is missing: ranks report to rank 0, which waits for each until the deadline and tells all how it ended.

The rules are those of c10d's ``monitored_barrier`` on Gloo; besides the ranks, the error says where their programs are.  The barriers of
a group have numbers, so that a rank that comes late to one is not taken for the next.  The group goes on after a barrier that failed.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from miraccl.errors import CollectiveTimeout
from miraccl.torch.core_access import wait_for_graph
from miraccl.torch.matching import Post

NAME = "monitored_barrier"
#: Tags below those that programs use.
FIRST_TAG = -(1 << 60)
#: What rank 0's verdict may take beyond the deadline that it waits for itself: it asks the missing ranks where they are.
VERDICT_S = 5.0
VERDICT_BYTES = 4096


def barrier(post: Post, number: int, limit: float, wait_all_ranks: bool) -> None:
    """Return once all ranks have come to the barrier of this number; ``CollectiveTimeout`` after ``limit`` seconds, on all who came."""
    rank, nranks = post.comm.rank, post.comm.nranks
    tag = FIRST_TAG + 2 * number
    if rank:
        verdict = _report(post, tag, limit)
    else:
        missing = _missing(post, tag, limit, wait_all_ranks)
        verdict = _describe(post, missing, limit)
        for peer in range(1, nranks):  # who comes late is told at once
            post.send(_packed(verdict), peer, tag + 1, NAME)
    if verdict:
        text, *graph = verdict.split("\n")
        raise CollectiveTimeout(
            text, graph=tuple(graph), rank=rank, peer=None if rank == 0 else 0, op=NAME
        )


def _missing(post: Post, tag: int, limit: float, wait_all_ranks: bool) -> list[int]:
    """The ranks that have not reported in time: the first of them, or all."""
    end = time.monotonic() + limit
    reports = {r: post.receive(_nothing(), r, tag, NAME) for r in range(1, post.comm.nranks)}
    missing = []
    for peer, report in reports.items():
        try:
            post.wait(report, max(1e-3, end - time.monotonic()))
        except CollectiveTimeout:
            if post.withdraw(report):
                missing.append(peer)
    return missing if wait_all_ranks else missing[:1]


def _report(post: Post, tag: int, limit: float) -> str:
    post.send(_nothing(), 0, tag, NAME)
    packed = torch.zeros(VERDICT_BYTES, dtype=torch.uint8, device="cpu")
    answer = post.receive(packed, 0, tag + 1, NAME)
    try:
        post.wait(answer, limit + VERDICT_S)
    except CollectiveTimeout:
        if post.withdraw(answer):
            return f"rank 0 did not come within {limit:g} s"
        post.wait(answer)  # it was on its way
    return bytes(packed.tolist()).rstrip(b"\0").decode("utf-8", "replace")


def _describe(post: Post, missing: list[int], limit: float) -> str:
    """Empty if all came."""
    if not missing:
        return ""
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
    return "\n".join([f"{who} did not come within {limit:g} s", *wait_for_graph(post.comm)])


def _packed(text: str) -> Any:
    data = text.encode()[:VERDICT_BYTES].ljust(VERDICT_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _nothing() -> Any:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
