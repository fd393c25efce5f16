"""Deadlocks between ranks in different calls and communicators are reported at once, not at
deadlines.
"""

from __future__ import annotations

import pytest

from tests.runtime import pair_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

FAR_S, SOON_S = 600.0, 20.0  # most take 0.2 s, where processors are free
CERTAIN = ["large", "barrier", "recv", "split", "shrink", "part"]
PAIRS = [(a, b) for a in CERTAIN for b in CERTAIN if a != b]
PAIRS += [
    ("recv", "recv"),
    ("irecv", "broadcast"),
    ("ring", "part"),
    ("part", "ring"),
    ("send", "part"),
    ("part", "send"),
]
PAIRS += [
    ("send in a part", "all_reduce"),
    ("all_reduce", "send in a part"),
    ("recv", "ring"),
    ("ring", "recv"),
]
PAIRS += [("async", other) for other in ("split", "shrink", "part", "irecv")] + [
    ("split", "async"),
    ("part", "async"),
]
BETWEEN_HOSTS = [
    ("recv", "barrier"),
    ("part", "all_reduce"),
    ("shrink", "large"),
    ("async", "split"),
    ("part", "recv"),
    ("recv", "recv"),
]


@pytest.mark.parametrize(
    ("names", "nranks", "ranks_per_host"),
    [(PAIRS, 3, 0), (PAIRS[::3], 2, 0), (BETWEEN_HOSTS, 3, 1)],
    ids=["three", "two", "hosts"],
)
def test_deadlocked_ranks(names: list[tuple[str, str]], nranks: int, ranks_per_host: int) -> None:
    for pair, *seen in zip(
        names,
        *run_ranks(pair_ranks.pairs, nranks, names, FAR_S, ranks_per_host, timeout=300),
        strict=True,
    ):
        for got in seen:
            assert got["type"] == "CollectiveMismatch", (pair, seen)
            assert got["seconds"] < SOON_S, (pair, seen)
            assert "rank 1" in got["text"], (pair, seen)


def test_each_rank_gets_the_wait_for_graph() -> None:
    for got in run_ranks(pair_ranks.pairs, 2, [("part", "recv")], FAR_S, 0):
        assert (
            "rank 0 waits for rank 1 in send/recv (3 x float64) of world; its program is at "
            in got[0]["text"]
        )
        assert (
            "rank 1 waits for rank 0 in all_reduce #2 (3 x float64, sum) of world/1:0; "
            "its program is at " in got[0]["text"]
        )
        assert got[0]["text"].count("pair_ranks.py") == 2


def test_finalized_rank() -> None:
    """Queries of the others do not wait for its answer."""
    names = [("finalize", "all_reduce"), ("finalize", "recv")]
    for rank, seen in enumerate(run_ranks(pair_ranks.pairs, 3, names, FAR_S, 0, FAR_S)):
        for got in seen:
            assert got["type"] == ("none" if rank == pair_ranks.ODD else "PeerDied")
            assert got["seconds"] < SOON_S


def test_thread_that_calls_later() -> None:
    assert run_ranks(pair_ranks.threads, 2) == [4.0] * 2


def test_computing_rank() -> None:
    assert run_ranks(pair_ranks.late_rank, 3) == [3.0] * 3
