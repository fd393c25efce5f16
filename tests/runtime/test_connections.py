"""Broken TCP connections between live ranks: all are notified in time and can continue together."""

from __future__ import annotations

import pytest

from tests.runtime import connection_ranks
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

SECONDS = 20.0  # the deadline is far away


def test_broken_connection_is_reported_on_all_live_ranks() -> None:
    for rank, got in enumerate(run_ranks(connection_ranks.broken, 3, "closed", timeout=40)):
        assert got["type"] == "PeerDied", got
        assert "has lost its connection to rank" in got["text"]
        assert got["peer"] in {0, 1} - {rank}
        assert got["seconds"] < SECONDS
        assert got["shrunk"] == [rank, 3, 6.0]


def test_garbage_on_a_connection_is_reported_on_all_ranks() -> None:
    for rank, got in enumerate(run_ranks(connection_ranks.broken, 3, "garbage", timeout=40)):
        assert got["type"] == "ProtocolError", got
        assert "rank 0 violated the protocol" in got["text"]
        assert got["peer"] == 0
        assert got["seconds"] < SECONDS
        assert got["shrunk"] == [rank, 3, 6.0]


def test_connection_broken_during_setup_is_reported() -> None:
    for rank, got in enumerate(run_ranks(connection_ranks.broken_early, 2, timeout=40)):
        left = (
            f"rank {1 - rank} of 2 left: could not connect" in got["text"]
        )  # where it was told before this rank was
        assert got["type"] == ("BootstrapError" if left else "PeerDied"), got
        assert "has lost its connection to rank" in got["text"]
        assert got["seconds"] < SECONDS


def test_connection_cut_before_welcome_is_reported_on_both_ranks() -> None:
    got = run_ranks(connection_ranks.cut_before_welcome, 2, timeout=40)
    assert got[1]["type"] == "PeerDied", got
    assert "rank 1 has lost its connection to rank 0" in got[1]["text"]
    assert got[1]["op"] == "'fabric abilities' of making world"
    assert got[0]["type"] == "PeerDied", got
    assert (
        "rank 1 left while the ranks were connecting: could not connect: rank 1, 'fabric abilities'"
        in got[0]["text"]
    )
    assert max(told["seconds"] for told in got) < SECONDS


def test_rank_that_does_not_connect_is_named_at_the_deadline() -> None:
    got = run_ranks(connection_ranks.absent_while_connecting, 2, timeout=40)
    assert got[0]["type"] == "BootstrapError"
    assert "cannot connect to ranks [1] over TCP within 30 s" in got[0]["text"]
    assert got[0]["seconds"] < SECONDS
    assert got[1]["type"] == "PeerDied"
    assert "rank 0 left while the ranks were connecting" in got[1]["text"]


def test_stalled_network_is_not_a_deadlock() -> None:
    assert run_ranks(connection_ranks.slow, 2, timeout=40) == [2.0, 1.0]
