"""Ranks deadlocked in different calls on any groups get an error long before their deadlines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

from tests.torch import pair_ranks

pytestmark = pytest.mark.multiprocess

FAR_S, SOON_S = 600.0, 20.0  # most take 0.2 s, where processors are free
PAIRS = [
    ("new_group", other) for other in ("all_reduce", "async", "recv", "send", "part", "split_group")
]
PAIRS += [
    ("all_reduce", "new_group"),
    ("recv", "all_reduce"),
    ("recv", "recv"),
    ("send", "barrier"),
    ("any", "all_reduce"),
]
PAIRS += [
    ("part", "all_reduce"),
    ("async part", "async"),
    ("async", "recv"),
    ("split_group", "async"),
    ("split_group", "recv"),
]


@pytest.mark.parametrize(
    ("nranks", "names"), [(2, PAIRS), (3, [pair for pair in PAIRS if pair[0] != "any"][::2])]
)
def test_ranks_that_wait_for_one_another(
    nranks: int, names: list[tuple[str, str]], tmp_path: Path
) -> None:
    ranks = run_ranks(pair_ranks.pairs, nranks, str(tmp_path / "store"), names, FAR_S, timeout=300)
    for pair, *seen in zip(names, *ranks, strict=True):
        for got in seen:
            assert got["type"] == "CollectiveMismatch", (pair, seen)
            assert got["seconds"] < SOON_S, (pair, seen)
            assert "rank 1" in got["text"], (pair, seen)


def test_each_rank_learns_where_the_others_are(tmp_path: Path) -> None:
    for (got,) in run_ranks(
        pair_ranks.pairs, 2, str(tmp_path / "store"), [("new_group", "part")], FAR_S
    ):
        assert (
            "rank 0 waits for rank 1 in all_reduce #1 (3 x float32, sum) of group " in got["text"]
        )
        assert "rank 1 waits for rank 0 in new_group; its program is at " in got["text"]
        assert got["text"].count("pair_ranks.py") == 2


def test_a_rank_that_has_destroyed_its_group_does_not_come_to_a_new_one(tmp_path: Path) -> None:
    names = [("destroy", "new_group"), ("new_group", "destroy")]
    ranks = run_ranks(pair_ranks.pairs, 2, str(tmp_path / "store"), names, FAR_S)
    for number, waits in enumerate((0, 1)):
        got = ranks[waits][number]
        assert got["type"] == "PeerDied", got
        assert f"rank {1 - waits} has left the default group" in got["text"]
        assert got["seconds"] < SOON_S
