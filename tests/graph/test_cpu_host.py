"""Order of CPU ranks, and hosts of CPU ranks as topologies."""

from __future__ import annotations

import os

import numpy as np
import pytest

import miraccl
from miraccl.graph.cpu_host import detect_host, domain_order
from miraccl.graph.rank_order import RankLocation, order_ranks
from miraccl.schedule import catalog
from miraccl.schedule.passes import relabel
from miraccl.schedule.verify import verify
from miraccl.topo.analyse import analyse_topology
from miraccl.topo.detect import detect_machine
from miraccl.types import Collective
from tests.support.ranks import run_ranks


def locations(*pairs):
    return [RankLocation(host=host, numa=numa) for host, numa in pairs]


def test_block_placement_is_the_identity():
    assert order_ranks(locations((0, 0), (0, 0), (0, 1), (1, 0), (1, 1))) == (0, 1, 2, 3, 4)


def test_round_robin_placement_is_grouped_by_host():
    assert order_ranks(locations((0, -1), (1, -1), (0, -1), (1, -1))) == (0, 2, 1, 3)
    assert order_ranks(locations((0, 1), (0, 0), (0, 1), (0, 0))) == (1, 3, 0, 2)


def test_domains_are_visited_in_the_given_order():
    assert order_ranks(locations((0, 0), (0, 1), (0, 2)), domains=[2, 0, 1]) == (2, 0, 1)


@pytest.mark.parametrize(
    "collective", [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
)
def test_ordered_ring_is_correct_and_crosses_each_boundary_once(collective):
    hosts = (0, 1, 0, 1, 0, 1)
    order = order_ranks([RankLocation(host=h) for h in hosts])
    schedule = relabel(catalog.build("ring", collective, 6), order)
    verify(schedule)
    links = {
        (rank, step.send_peer)
        for rank, steps in enumerate(schedule.channels[0])
        for step in steps
        if step.op.sends
    }
    assert sum(hosts[a] != hosts[b] for a, b in links if b is not None) == 2


def test_this_machine_is_a_topology_of_its_ranks():
    topology = detect_host(3)
    assert len(topology.system.gpus) == 3
    assert sorted(domain_order(topology)) == sorted(
        {domain_order(topology)[i] for i in range(len(domain_order(topology)))}
    )


def test_domains_follow_the_paths(tmp_path):
    """Two sockets: each one is visited once, starting with the first."""
    for node in (0, 1):
        folder = tmp_path / "sys" / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpumap").write_text("3\n" if node == 0 else "c\n")
        (folder / "cpulist").write_text("0-1\n" if node == 0 else "2-3\n")
    topology = analyse_topology(detect_machine(tmp_path, gpus=[], cpu_ranks=4, arch="x86_64").root)
    assert len(topology.system.cpus) == 2
    assert domain_order(topology) == [0, 1]


def ring_over_interleaved_hosts(nranks):
    os.environ["MIRACCL_HOSTID"] = f"host{int(os.environ['MIRACCL_RANK']) % 2}"
    with miraccl.init(algo="ring") as comm:
        order = comm._core.fabric.order
        x = np.arange(1000, dtype=np.int64) + comm.rank
        comm.all_reduce(x)
        gathered = comm.all_gather(np.full(5, comm.rank))
        return order, x[0] == sum(range(nranks)), gathered.tolist()


@pytest.mark.multiprocess
def test_round_robin_ranks_on_two_hosts():
    for order, right, gathered in run_ranks(ring_over_interleaved_hosts, 4, 4, timeout=60):
        assert tuple(order) == (0, 2, 1, 3)
        assert right
        assert gathered == [rank for rank in range(4) for _ in range(5)]
