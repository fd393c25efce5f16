"""Every fault over every network between hosts: the error on each rank names rank, peer and
operation, in time.

Ranks share a machine and no memory, so all their messages take the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis import fault_ranks
from tests.diagnosis.test_failures import SECONDS_TO_NOTICE, values
from tests.support.ranks import rank_outcomes

pytestmark = pytest.mark.multiprocess
#: ``test_failures`` has most faults over TCP; all of both take a minute and a half.
over_networks = pytest.mark.parametrize(
    "net", ["tcp", "udp"] if os.environ.get("TEST_SLOW") else ["udp"]
)


def faults_of(
    net: str, target: Callable[..., Any], *arguments: Any, nranks: int = 3, but: int | None = None
) -> list[dict[str, Any]]:
    """Return the errors that the ranks have seen; rank ``but`` died."""
    env = {"MIRACCL_NET": net, "MIRACCL_SHM_DISABLE": "1"}
    found = values(rank_outcomes(target, nranks, *arguments, env=env, timeout=60), but=but)
    return [value for value in found if isinstance(value, dict) and "type" in value]


@over_networks
@pytest.mark.parametrize("phase", ["connect", "waiting", "large", "p2p"])
def test_a_killed_rank(net: str, phase: str, tmp_path: Path) -> None:
    found = faults_of(net, fault_ranks.killed, phase, 1, str(tmp_path / "death"), 0, but=1)
    assert len(found) == 2
    for error in found:
        assert error["type"] == "PeerDied" or (
            phase == "connect" and error["type"] == "BootstrapError"
        ), error
        assert "rank 1" in error["text"]
        assert error["after"] < SECONDS_TO_NOTICE
        if phase != "connect":
            assert error["peer"] == 1
            assert ("send" if phase == "p2p" else "all_reduce") in error["op"]
            assert error["shrunk"][1:] == [2, 3.0]  # over new connections of the same network


@over_networks
@pytest.mark.parametrize("how", ["plain", "finalize"])
def test_a_rank_that_leaves(net: str, how: str) -> None:
    found = faults_of(net, fault_ranks.exits, how, 0)
    assert [(error["type"], error["peer"]) for error in found] == [("PeerDied", 1)] * 2, found
    assert all("all_reduce #2" in error["op"] for error in found)


@over_networks
def test_a_rank_that_aborts(net: str) -> None:
    for error in faults_of(net, fault_ranks.aborted, "abort", 0):
        assert error["type"] == "CommunicatorAborted"
        assert "rank 0 aborted the communicator: enough of it" in error["text"]


@over_networks
def test_a_rank_that_never_arrives(net: str) -> None:
    for error in faults_of(net, fault_ranks.absent, "python", 0):
        assert error["type"] == "CollectiveTimeout", error
        assert error["seconds"] < SECONDS_TO_NOTICE
        assert "waits for rank 1 in" in error["graph"][0]
        assert "never arrived at operation #2" in error["graph"][1]


@over_networks
def test_a_stopped_rank(net: str) -> None:
    first, *_, last = faults_of(net, fault_ranks.stopped_rank, 4.0)
    for error in (first, last):
        if error["type"] != "none":  # the rank that was stopped
            assert error["type"] == "CollectiveTimeout", error
            assert error["late"] < SECONDS_TO_NOTICE
            assert "rank 1: did not answer" in str(error["graph"])


@over_networks
@pytest.mark.parametrize("field", ["collective", "count", "dtype"])
def test_different_calls(net: str, field: str) -> None:
    for error in faults_of(net, fault_ranks.mismatch, field, 1, 12, 0):
        assert error["type"] == "CollectiveMismatch", error
        assert f"{field} is" in error["text"]
        assert "on rank 1" in error["text"]
        assert error["op"]


@over_networks
def test_messages_of_different_sizes(net: str) -> None:
    for error in faults_of(net, fault_ranks.unlike_messages, "size", 0):
        assert error["type"] == "CollectiveMismatch", error
        assert error["peer"] in (0, 1)


@pytest.mark.parametrize("net", ["tcp", "udp"])
def test_a_network_that_carries_nothing(net: str) -> None:
    for error in faults_of(net, fault_ranks.black_hole, 0.0):
        assert error["type"] == "CollectiveTimeout", error
        assert "within its timeout of 4 s while waiting for rank" in error["text"]
        assert "all_reduce #2" in error["op"]
        assert len(error["graph"]) == 3
        assert "no network path to rank 1 is open (" in str(error["graph"])
        assert error["seconds"] < SECONDS_TO_NOTICE
        assert error["peer"] in range(3)  # as the rank that found it says


@pytest.mark.parametrize("net", ["tcp", "udp"])
def test_a_network_that_carries_nothing_for_a_while(net: str) -> None:
    for error in faults_of(net, fault_ranks.black_hole, 0.4):
        assert error["type"] == "none", error
