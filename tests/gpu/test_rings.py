"""Neighbour order of the GPUs of a host."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from miraccl.graph.plan_cache import add_checksum
from miraccl.native import cache
from miraccl.planning.ring_order import RingOrder, find_ring
from miraccl.topo.load import load_topology
from miraccl.transport.cuda_pairs import GpuFacts, GpuPaths, read_paths
from tests.gpu import emulated_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

MACHINES = Path(__file__).parent.parent / "data" / "topologies"


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Folder of plans of each test."""
    folder = tmp_path / "plans"
    folder.mkdir()
    monkeypatch.setattr(cache, "plan_folder", lambda: folder)
    return folder


def bus_ids() -> list[str]:
    """Return the bus ids of the GPUs of the topology, in file order."""
    nodes = load_topology().root.walk()
    return [
        node.attrs["busid"]
        for node in nodes
        if node.name == "pci" and any(child.name == "gpu" for child in node.children)
    ]


def ring_of(ids: list[str], paths: GpuPaths | None = None) -> RingOrder:
    facts = [
        GpuFacts(
            rank=r,
            process="p",
            pid=1,
            pid_namespace=0,
            ordinal=r,
            bus_id=text,
            arch=90,
            nbytes=1,
            descriptors=True,
        )
        for r, text in enumerate(ids)
    ]
    return find_ring(facts, paths or read_paths(ids))


def test_neighbours_are_joined_by_nvlink_whatever_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / "nvidia-dgx1v.xml"))
    ids = bus_ids()
    for ranks in ([0, 1, 2, 3, 4, 5, 6, 7], [5, 0, 3, 6, 1, 7, 2, 4]):
        chosen = [ids[i] for i in ranks]
        ring = ring_of(chosen)
        assert "channel search (NVL" in ring.reason
        assert sorted(ring.order) == list(range(8))
        paths = read_paths(chosen)
        around = [*ring.order, ring.order[0]]
        found = [paths.between(chosen[a], chosen[b]) for a, b in pairwise(around)]
        assert {path.name for path in found if path} == {"NVL"}
    assert paths.between(ids[0], ids[5]).name == "NVB"  # type: ignore[union-attr]  # others are not


@pytest.mark.parametrize("name", ["nvidia-dgxh100", "v100-4gpu-mesh-1nic"])
def test_equal_gpus_need_no_search(monkeypatch: pytest.MonkeyPatch, plans: Path, name: str) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / f"{name}.xml"))
    ring = ring_of(bus_ids()[::-1])
    assert ring.kernel_order == ()
    assert "equally distant (NVL" in ring.reason
    assert not list(plans.iterdir())


def test_a_graph_file_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / "hgx-a100-4gpu.xml"))
    ids = bus_ids()
    devices = [
        int(g.attrs["dev"])
        for n in load_topology().root.walk()
        for g in n.children
        if g.name == "gpu"
    ]
    order = [devices[i] for i in (0, 2, 1, 3)]
    gpus = "".join(f'<gpu dev="{device}"/>' for device in order)
    channel = f"<channel>{gpus}</channel>"
    graph = (
        '<graph id="0" pattern="4" crossnic="0" nchannels="1" speedintra="20" speedinter="20" '
        'latencyinter="0" typeintra="NVL"'
    )
    file = tmp_path / "graph.xml"
    file.write_text(
        f'<graphs version="1">{graph} typeinter="PIX" samechannels="1">{channel}</graph></graphs>'
    )
    monkeypatch.setenv("NCCL_GRAPH_FILE", str(file))
    ring = ring_of(ids)
    assert (ring.order, "graph.xml" in ring.reason) == ((0, 2, 1, 3), True)


def test_the_order_is_cached(monkeypatch: pytest.MonkeyPatch, plans: Path) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / "pcie4-2s-nonic.xml"))
    first = ring_of(bus_ids())
    (kept,) = plans.iterdir()
    record = json.loads(kept.read_bytes().partition(b"\n")[2])
    kept.write_bytes(add_checksum(json.dumps({**record, "order": [0, 3, 1, 2]}).encode()))
    again = ring_of(bus_ids())
    assert (again.order, again.reason) == ((0, 3, 1, 2), first.reason)
    assert ring_of(bus_ids()[::-1]).order != again.order
    kept.write_bytes(add_checksum(json.dumps({**record, "order": [0, 3, 3, 2]}).encode()))
    assert ring_of(bus_ids()).reason.startswith(
        "cannot find a ring: the search returned [0, 3, 3, 2]"
    )


def test_the_default_order_is_rank_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / "pcie4-2s-nonic.xml"))
    ids = bus_ids()
    for chosen, why in (
        (ids[:2], "at most two ranks"),
        ([ids[0], ids[1], ids[1]], "ranks share a GPU"),
        (
            [ids[0], ids[1], "0000:fe:00.0"],
            "cannot find a ring: the topology has no GPU 0000:fe:00.0",
        ),
    ):
        ring = ring_of(chosen)
        assert ring.kernel_order == ()
        assert ring.reason.startswith(why)
    monkeypatch.setenv("NCCL_TOPO_FILE", "/nowhere.xml")
    assert ring_of(ids).reason.startswith("cannot find a ring: no topology")


@pytest.mark.multiprocess
@needs_compiler
def test_kernels_follow_the_order_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four GPUs of a DGX-1, with those of ranks 1 and 2 exchanged."""
    monkeypatch.setenv("NCCL_TOPO_FILE", str(MACHINES / "nvidia-dgx1v.xml"))
    text = (MACHINES / "nvidia-dgx1v.xml").read_text()
    for i, rank in zip(range(4), (0, 2, 1, 3)):
        text = text.replace(bus_ids()[i], f"0000:1{rank}:00.0")
    file = tmp_path / "machine.xml"
    file.write_text(text)
    env = {"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())}
    answers = run_ranks(
        emulated_ranks.in_the_order_of_the_machine, 4, str(file), env=env, timeout=200.0
    )
    assert [tuple(order) for order, _ in answers] == [(0, 2, 1, 3)] * 4
    assert "channel search" in answers[0][1]
