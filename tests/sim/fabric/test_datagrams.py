"""The datagram machines on the fabric: incast, long lossy paths, fat trees, adversaries."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from miraccl.errors import MissingDependency
from miraccl.native.crypto import libcrypto
from miraccl.sim.fabric.datagram_host import DatagramHost, join
from miraccl.sim.fabric.datagram_runs import (
    AdmissionPolicy,
    Incast,
    run_incast,
    run_messages,
    run_transfer,
)
from miraccl.sim.fabric.events import MS, SECOND, US
from miraccl.sim.fabric.faults import LinkChange, both_directions
from miraccl.sim.fabric.network import PacketFabric
from miraccl.sim.fabric.topology import LinkProfile, fat_tree
from tests.wire.datagram import histories, mutations

MEBI = 1 << 20
slow = pytest.mark.skipif(not os.environ.get("TEST_SLOW"), reason="takes a minute; TEST_SLOW=1")


def test_credit_serves_an_incast_without_loss_and_fairly() -> None:
    """8 senders into 500 Mbit/s with a queue of 300 kB; more unsolicited bytes than the queue."""
    case = Incast(nbytes=MEBI // 4)
    result = run_incast(case)
    assert result.over_ideal <= 1.08
    assert result.dropped_share <= 0.001
    assert result.jain >= 0.98
    without = run_incast(replace(case, admission=AdmissionPolicy.OFF, congestion="cubic"))
    assert without.dropped_share > 0.005


def test_clear_to_send_delivers() -> None:
    result = run_incast(Incast(nbytes=MEBI // 4, senders=3, admission=AdmissionPolicy.CTS))
    assert result.over_ideal <= 1.2


def test_a_flow_over_a_fat_tree_survives_its_links() -> None:
    """Paths are entropies; links from aggregation to core switches fail one after the other."""
    profile = LinkProfile(rate=1 * SECOND, latency=5 * US, queue=100_000)
    tree = fat_tree(4, profile)
    fabric = PacketFabric(tree)
    a, b = DatagramHost(fabric, 0), DatagramHost(fabric, 13)
    end, other = join(a, b, npaths=8)
    cores = [i for i, link in enumerate(tree.links) if link.target >= tree.hosts + 16]
    for i, link in enumerate(cores[:3]):
        fabric.schedule_changes(
            both_directions(LinkChange(time=(i + 1) * MS, link=link, up=False), link + 1)
        )
    end.submit(0, bytes(MEBI))
    fabric.run(10 * SECOND, lambda: end.flow.idle)
    assert other.frames[0].payload == bytes(MEBI)
    assert fabric.total("lost") > 0


def test_sealed_packets_survive_random_histories() -> None:
    try:
        libcrypto()
    except MissingDependency as error:
        pytest.skip(str(error))
    totals = [histories.run_history(seed) for seed in range(40)]
    assert sum(t["rejected"] for t in totals) > 0, "corrupted packets were seen and rejected"


def test_mutated_packets_are_rejected() -> None:
    try:
        libcrypto()
    except MissingDependency as error:
        pytest.skip(str(error))
    result = mutations.run_chunk(1)
    assert result["accepted"] == 0
    assert result["decoded"] > 0
    assert not result["findings"]


@slow
def test_long_lossy_path_against_cubic_and_bbr() -> None:
    path = LinkProfile(rate=100_000_000, latency=5 * MS, queue=300_000, loss=0.01)
    shares = {c: run_transfer([path], 16 * MEBI, congestion=c).share for c in ("swift", "bbr")}
    cubic = run_transfer([path], 4 * MEBI, congestion="cubic").share
    assert shares["swift"] >= 0.95
    assert shares["swift"] >= shares["bbr"]
    assert shares["swift"] >= 5 * cubic


@slow
def test_tail_of_message_times_at_one_percent_loss() -> None:
    path = LinkProfile(rate=500_000_000, latency=100 * US, queue=300_000, loss=0.01)
    times = run_messages(path, MEBI, 100)
    assert times[98] <= 1.6 * times[50]
