"""Mapping of a pair of ranks: the rules, and the same choice on all ranks and in both orders."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.errors import InvalidUsage, MiracclError, ProtocolError, SystemFailure
from miraccl.topo.records import PathType
from miraccl.transport import cuda_pairs as pairs
from miraccl.transport.cuda_pairs import (
    HOST,
    IPC,
    PROCESS,
    VMM,
    GpuFacts,
    GpuPaths,
    P2pChoice,
    P2pSettings,
)


def facts(rank: int, **more: Any) -> GpuFacts:
    given: dict[str, Any] = {
        "process": f"p{rank}",
        "pid": 100 + rank,
        "pid_namespace": 1,
        "ordinal": rank,
        "arch": 90,
        "nbytes": 4096,
    }
    given |= {"bus_id": f"0000:{rank:02x}:00.0", "descriptors": True}
    return GpuFacts(rank=rank, **(given | more))


def paths(type: PathType = PathType.NVL, n: int = 4) -> GpuPaths:
    return GpuPaths(
        types={(facts(a).bus_id, facts(b).bus_id): type for a in range(n) for b in range(a + 1, n)}
    )


def way(
    a: GpuFacts,
    b: GpuFacts,
    table: GpuPaths | None = None,
    access: tuple[pairs.Access, ...] = (1, 1),
    refused: Any = (),
) -> P2pChoice:
    descriptors, _ = pairs.uses_descriptors([a, b], dict(refused))
    return pairs.choose_mapping(
        a, b, access, paths() if table is None else table, descriptors, dict(refused)
    )


def test_virtual_memory_management_is_the_first_choice() -> None:
    assert way(facts(0), facts(1)) == P2pChoice(kind=VMM, reason="NVL")


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"cumem": 0}, IPC),
        ({"descriptors": False}, IPC),
        ({"p2p_disable": True}, HOST),
        ({"p2p_level": int(PathType.LOC)}, HOST),
        ({"p2p_level": int(PathType.NVL)}, VMM),
        ({"p2p_disable": True, "shm_disable": True}, ""),
        ({"process": "p0", "pid": 100}, PROCESS),
        ({"process": "p0", "pid": 100, "p2p_disable": True}, HOST),
    ],
)
def test_what_one_rank_says_counts_for_the_pair(more: dict[str, Any], kind: str) -> None:
    assert way(facts(0), facts(1, **more)).kind == kind
    assert way(facts(1, **more), facts(0)).kind == kind


@pytest.mark.parametrize(
    ("path", "kind"), [(PathType.PXB, VMM), (PathType.PHB, HOST), (PathType.SYS, HOST)]
)
def test_nccls_default_level(path: PathType, kind: str) -> None:
    assert way(facts(0), facts(1), paths(path)).kind == kind
    assert path.name in way(facts(0), facts(1), paths(path)).reason


def test_the_level_may_be_raised_and_the_driver_has_the_last_word() -> None:
    far = facts(1, p2p_level=int(PathType.SYS))
    assert way(facts(0), far, paths(PathType.SYS)).kind == VMM
    refused = way(facts(0), far, paths(PathType.SYS), (1, 0))
    assert refused.kind == HOST
    assert "driver" in refused.reason


def test_a_link_that_only_the_driver_knows_counts() -> None:
    """A virtual machine may hide from NVML what is at the end of NVLinks."""
    assert way(facts(0), facts(1), paths(PathType.SYS), (2, 2)) == P2pChoice(kind=VMM, reason="NVL")
    assert way(facts(0), facts(1), paths(PathType.SYS), (2, 1)).kind == HOST
    assert pairs.path_between(facts(0), facts(1), (2, 2), GpuPaths(types={})) is PathType.NVL
    assert pairs.path_between(facts(0), facts(0), (2, 2), GpuPaths(types={})) is PathType.LOC


def test_without_a_topology_the_driver_decides() -> None:
    table = GpuPaths(types={}, note="the package nvidia-ml-py is not installed")
    assert way(facts(0), facts(1), table).kind == VMM
    assert "nvidia-ml-py" in way(facts(0), facts(1), table).reason
    assert way(facts(0), facts(1), table, (1, 0)).kind == HOST
    assert way(facts(0), facts(1), table, (None, None)).kind == VMM, (
        "a GPU that this process does not see may still be mapped"
    )
    assert way(facts(0), facts(1, p2p_level=int(PathType.NVL)), table).kind == HOST


def test_two_ranks_on_one_gpu_share_it_unless_told_not_to() -> None:
    same = facts(1, bus_id=facts(0).bus_id)
    assert way(facts(0), same, GpuPaths(types={})) == P2pChoice(kind=VMM, reason="LOC")
    assert way(facts(0), same, GpuPaths(types={}), refused={((0, 1), VMM): "no"}).kind == IPC
    assert (
        way(facts(0), dataclasses.replace(same, p2p_disable=True), GpuPaths(types={})).kind == HOST
    )


def test_ways_that_failed_are_not_tried_again() -> None:
    refused = {((0, 1), VMM): "cuMemCreate: CUDA_ERROR_NOT_SUPPORTED"}
    assert way(facts(0), facts(1), refused=refused).kind == IPC
    refused[(0, 1), IPC] = "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT"
    last = way(facts(0), facts(1), refused=refused)
    assert last.kind == HOST
    assert "cuIpcOpenMemHandle" in last.reason
    refused[(0, 1), HOST] = "no memory"
    assert way(facts(0), facts(1), refused=refused).kind == ""


def test_a_rank_may_insist_on_virtual_memory_management() -> None:
    with pytest.raises(InvalidUsage, match="CUMEM is 0 on rank 1"):
        way(facts(0, cumem=1), facts(1, cumem=0))
    with pytest.raises(InvalidUsage, match="file descriptors"):
        way(facts(0), facts(1, cumem=1, descriptors=False))
    with pytest.raises(InvalidUsage, match="ranks 0 and 1: no"):
        way(facts(0, cumem=1), facts(1), refused={((0, 1), VMM): "no"})
    assert way(facts(0, cumem=1), facts(1, process="p0")).kind == VMM


def test_a_pair_without_a_way_is_named() -> None:
    three = [facts(0), facts(1, shm_disable=True, p2p_disable=True), facts(2)]
    with pytest.raises(
        SystemFailure,
        match=r"ranks 0 and 1 cannot exchange GPU data.*P2P_DISABLE is 1 on rank 1.*SHM_DISABLE",
    ) as caught:
        pairs.choose_mappings(three, [[1] * 3] * 3, paths(), {})
    assert "MIRACCL_HOSTID" in str(caught.value)


answers = st.sampled_from([0, 1, 1, 2, 2, None])
some_facts: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    process=st.sampled_from(["a", "b", "c", "d"]),
    bus_id=st.sampled_from([f"0000:{i:02x}:00.0" for i in range(3)]),
    descriptors=st.booleans(),
    cumem=st.sampled_from([-1, -1, 0]),
    p2p_disable=st.sampled_from([False, False, True]),
    p2p_level=st.sampled_from([-1, -1, 0, 1, 5, 9]),
    shm_disable=st.sampled_from([False, False, False, True]),
)


@given(
    given_facts=st.lists(some_facts, min_size=2, max_size=4),
    rows=st.lists(st.lists(answers, min_size=4, max_size=4), min_size=4, max_size=4),
    path=st.sampled_from(PathType),
    refused=st.dictionaries(
        st.tuples(
            st.sampled_from([(0, 1), (0, 2), (1, 2)]), st.sampled_from([VMM, IPC, HOST, PROCESS])
        ),
        st.just("why"),
    ),
)
def test_every_decision_keeps_the_rules_and_is_the_same_seen_from_both_ends(
    given_facts: list[dict[str, Any]],
    rows: list[list[pairs.Access]],
    path: PathType,
    refused: dict[Any, str],
) -> None:
    ranks = [dataclasses.replace(facts(rank), **more) for rank, more in enumerate(given_facts)]
    table = paths(path, 3)
    descriptors, _ = pairs.uses_descriptors(ranks, refused)
    for a in ranks:
        for b in ranks[a.rank + 1 :]:
            views = (rows[a.rank][b.rank], rows[b.rank][a.rank])
            choice = pairs.choose_mapping(a, b, views, table, descriptors, refused)
            assert choice == pairs.choose_mapping(b, a, views[::-1], table, descriptors, refused)
            assert choice.reason
            assert ((a.rank, b.rank), choice.kind) not in refused
            if choice.kind in pairs.DIRECT:
                assert not a.p2p_disable
                assert not b.p2p_disable
                assert 0 not in views
                assert (choice.kind == VMM) == descriptors
                assert choice.kind != PROCESS or a.process == b.process
            elif choice.kind == HOST:
                assert not a.shm_disable
                assert not b.shm_disable
    try:
        ways = pairs.choose_mappings(ranks, rows, table, refused)
    except MiracclError:
        return
    assert len(ways) == len(ranks) * (len(ranks) - 1) // 2


def test_records_survive_their_journey() -> None:
    assert GpuFacts.from_json(facts(3, cumem=1).to_json(), 3) == facts(3, cumem=1)
    with pytest.raises(ProtocolError, match="it names rank 3"):
        GpuFacts.from_json(facts(3).to_json(), 2)
    with pytest.raises(ProtocolError):
        GpuFacts.from_json(b'{"rank": 1}', 1)
    table = dataclasses.replace(paths(PathType.PHB), note="n", default_level=PathType.SYS)
    assert GpuPaths.from_json(table.to_json()) == table


def test_settings_take_nccls_names() -> None:
    environ = {
        "NCCL_P2P_LEVEL": "NVL",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_CUMEM_ENABLE": "0",
        "NCCL_P2P_DISABLE": "1",
        "MIRACCL_P2P_DISABLE": "0",
    }
    assert P2pSettings.read(environ) == P2pSettings(
        cumem=0, p2p_disable=False, p2p_level=int(PathType.NVL), shm_disable=True
    )
    assert P2pSettings.read({"NCCL_CUMEM_ENABLE": "-2"}) == P2pSettings()
    with pytest.raises(InvalidUsage, match="auto, 0 and 1"):
        P2pSettings.read({"MIRACCL_CUMEM": "2"})


def test_paths_of_gpus_from_a_topology_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    file = tmp_path / "topo.xml"
    file.write_text(
        """<system version="1">
        <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
        <pci busid="0000:10:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="90" rank="0"/></pci>
        <pci busid="0000:20:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="90" rank="1"/></pci>
        </cpu></system>"""
    )
    monkeypatch.setenv("MIRACCL_TOPO_FILE", str(file))
    found = pairs.read_paths(["0000:10:00.0", "0000:20:00.0"])
    assert found.between("0000:20:00.0", "0000:10:00.0") is PathType.PHB
    assert found.between("0000:20:00.0", "0000:20:00.0") is PathType.LOC
    assert found.default_level is PathType.PXB
    assert pairs.read_paths(["0000:30:00.0", "0000:40:00.0"]).note
    monkeypatch.setenv("MIRACCL_TOPO_FILE", str(tmp_path / "missing.xml"))
    assert "no topology" in pairs.read_paths(["0000:10:00.0"]).note


def test_gpus_of_another_kind_are_refused() -> None:
    with pytest.raises(InvalidUsage, match="rank 1 is sm_80"):
        pairs.check_compatible([facts(0), facts(1, arch=80)], 0)
    pairs.check_compatible([facts(0), facts(1)], 0)
