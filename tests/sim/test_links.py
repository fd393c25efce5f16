"""Virtual links of switches, meshes and recorded machines; bounds on simulated schedules."""

from __future__ import annotations

import math

import pytest

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.graph.bound import bandwidth_bound
from miraccl.schedule import catalog
from miraccl.sim.clock import simulate
from miraccl.sim.links import Links, Route, machine, mesh, switch
from miraccl.tools.perf.spec import busbw_factor
from miraccl.topo.analyse import Topology, analyse_topology
from miraccl.topo.load import load_topology
from miraccl.topo.options import TopoOptions
from miraccl.types import Collective
from tests.topo.golden import TOPOLOGIES


def topology(name: str, nodes: int = 1, gpus: tuple[int, ...] = ()) -> Topology:
    return analyse_topology(
        load_topology(TOPOLOGIES / f"{name}.xml").root, TopoOptions(nodes=nodes, gpus=gpus)
    )


def test_links_of_a_switch_and_a_mesh() -> None:
    assert len(switch(4, 10.0).names) == 8
    assert switch(4, 10.0).route(1, 2).links == (1, 6)
    assert len(mesh(4, 10.0).names) == 12
    assert (
        len({mesh(4, 10.0).route(a, b).links for a in range(4) for b in range(4) if a != b}) == 12
    )


def test_nvswitch_routes() -> None:
    links = machine(topology("nvidia-dgxh100"))
    assert links.nranks == 8
    assert [links.names[link] for link in links.route(0, 3).links] == [
        "NVL GPU/0-1b000 to NVS/0-0",
        "NVL NVS/0-0 to GPU/0-61000",
    ]


def test_nodes_are_joined_by_the_nearest_nets() -> None:
    links = machine(topology("nvidia-dgxh100", nodes=2), latency_us=3.0)
    assert links.nranks == 16
    route = links.route(0, 9)
    names = [links.names[link] for link in route.links]
    assert names[0] == "PCI GPU/0-1b000 to PCI/0-15000@0"
    assert names[2:4] == ["NET NIC/0-18000 to NET/0-0@0", "NET NET/0-1 to NIC/0-40000@1"]
    assert min(links.bandwidths[link] for link in route.links) == 48
    assert route.latency_us == 3.0


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("nvidia-dgxh100", 1), ("nvidia-dgx1v", 1), ("pcie8-2s-nonic", 1), ("gh200-4gpu-mesh", 2)],
)
@pytest.mark.parametrize("algo", ["ring", "two_shot", "recursive_halving_doubling"])
def test_no_schedule_exceeds_the_bound_of_the_machine(name: str, nodes: int, algo: str) -> None:
    """The bound is computed from cuts, the simulation from routes and shares."""
    made = topology(name, nodes)
    links = machine(made, latency_us=0.0)
    bound = bandwidth_bound(made.system, nodes)
    schedule = catalog.build(algo, Collective.ALL_GATHER, links.nranks)
    time_us = simulate(schedule, links, 1e6).time_us
    busbw = 1e6 * links.nranks / time_us / 1e3 * busbw_factor("all_gather", links.nranks)
    assert busbw <= float(bound.all_gather) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("name", "groups"),
    [("pcie8-2s-2nic", "its 2 groups of GPUs"), ("split-nvlink-2x4", "GPUs 0 and 4")],
)
def test_machines_joined_by_the_network_only_are_rejected(name: str, groups: str) -> None:
    with pytest.raises(
        TopologyError, match=f"cannot simulate this machine: only the network joins {groups}"
    ):
        machine(topology(name))
    assert machine(topology(name, gpus=(0, 1))).nranks == 2


def test_nodes_without_nets_are_rejected() -> None:
    with pytest.raises(TopologyError):
        machine(topology("pcie8-2s-nonic", nodes=2))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_bandwidths_must_be_positive_and_finite(bandwidth: float) -> None:
    with pytest.raises(InvalidUsage, match="must be finite and greater than 0"):
        switch(2, bandwidth)


def test_latencies_and_routes_are_checked() -> None:
    with pytest.raises(InvalidUsage, match="latency from rank 0 to rank 1 is -1 us"):
        switch(2, 1.0, -1.0)
    with pytest.raises(InvalidUsage, match="2 links have 1 bandwidths"):
        Links(nranks=1, names=("a", "b"), bandwidths=(1.0,), routes={})
    with pytest.raises(InvalidUsage, match="no route from rank 1 to rank 0"):
        Links(nranks=2, names=("a",), bandwidths=(1.0,), routes={(0, 1): Route((0,), 0.0)}).route(
            1, 0
        )
