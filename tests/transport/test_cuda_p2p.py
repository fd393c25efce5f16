"""Symmetric memory with every mapping, between processes and threads (``tests.gpu.fake_cuda``)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from miraccl.executor.cuda import driver
from miraccl.executor.cuda.gpu import Gpu
from miraccl.transport import cuda_pairs as pairs
from miraccl.transport.cuda_p2p import SymmetricMemory
from miraccl.transport.cuda_pairs import P2pSettings
from tests.gpu import fake_ranks
from tests.gpu.fake_cuda import FakeCuda, context_of
from tests.gpu.thread_rendezvous import ThreadRendezvous
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess


def connected(
    nranks: int,
    *,
    refuse: Sequence[str] = (),
    deny: Sequence[Sequence[int]] = (),
    env: dict[str, str] | None = None,
    by_rank: dict[str, dict[str, str]] | None = None,
    window: bool = True,
) -> list[dict[str, Any]]:
    return run_ranks(
        fake_ranks.connect, nranks, list(refuse), list(deny), by_rank or {}, window, env=env
    )


@pytest.mark.parametrize(
    ("env", "kind"),
    [
        ({}, "vmm"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "ipc"),
        ({"NCCL_P2P_DISABLE": "1"}, "host"),
        ({"TEST_GPUS": "1"}, "vmm"),
    ],
)
def test_all_pairs_with_one_mapping(env: dict[str, str], kind: str) -> None:
    for rank, got in enumerate(connected(3, env=env)):
        assert got["kinds"] == [kind if peer != rank else "self" for peer in range(3)]
        assert [row[0] for row in got["why"]] == [(0, 1), (0, 2), (1, 2)]
        assert got["addressable"] == (kind != "host")
        assert (got["pinned"] > 0) == (kind == "host")


@pytest.mark.parametrize("cumem", ["0", "auto"])
def test_mappings_may_differ_between_pairs(cumem: str) -> None:
    """GPU 0 and GPU 1 do not reach each other: one direction is enough."""
    direct = "ipc" if cumem == "0" else "vmm"
    results = connected(3, deny=[[1, 0]], env={"MIRACCL_CUMEM": cumem})
    assert [got["kinds"] for got in results] == [
        ["self", "host", direct],
        ["host", "self", direct],
        [direct, direct, "self"],
    ]
    assert [got["pinned"] > 0 for got in results] == [True, True, False]
    assert all(got["addressable"] is False and got["why"] == results[0]["why"] for got in results)
    assert "driver" in results[0]["why"][0][2]


@pytest.mark.parametrize(
    "call",
    [
        "cuMemCreate",
        "1:cuMemCreate",
        "0:cuMemExportToShareableHandle",
        "1:cuMemImportFromShareableHandle",
        "cuMemMap",
    ],
)
def test_a_mapping_that_fails_on_one_rank_is_abandoned_by_all(call: str) -> None:
    for rank, got in enumerate(connected(2, refuse=[call])):
        assert got["kinds"] == [["self", "ipc"], ["ipc", "self"]][rank]
        assert not got["descriptors"]


def test_an_unmapped_rank_has_plain_memory_beside_others_with_descriptors() -> None:
    for rank, got in enumerate(
        connected(3, refuse=["2:cuMemCreate"], by_rank={"2": {"MIRACCL_P2P_DISABLE": "1"}})
    ):
        assert (
            got["kinds"]
            == [["self", "vmm", "host"], ["vmm", "self", "host"], ["host", "host", "self"]][rank]
        )
        assert got["descriptors"]


def test_host_memory_is_the_last_mapping() -> None:
    for got in connected(2, refuse=["cuMemCreate", "1:cuIpcOpenMemHandle"]):
        assert sorted(got["kinds"]) == ["host", "self"]
        assert "ipc failed: cuIpcOpenMemHandle" in got["why"][0][2]


def test_no_mapping_is_an_error_that_names_the_pair_on_every_rank() -> None:
    outcomes = rank_outcomes(
        fake_ranks.connect, 2, ["cuMemHostRegister"], [], {"1": {"NCCL_P2P_DISABLE": "1"}}, False
    )
    for outcome in outcomes:
        assert outcome.error is not None
        assert (
            "SystemFailure: ranks 0 and 1 cannot exchange GPU data: P2P_DISABLE is 1 on rank 1"
            in outcome.error
        )
        assert "cuMemHostRegister" in outcome.error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(driver, "bindings", driver.bindings)  # type: ignore[attr-defined]
    return FakeCuda().install()


def test_threads_of_one_process_use_plain_pointers(cuda: FakeCuda) -> None:
    nranks = 3
    room = ThreadRendezvous(nranks)
    memories: list[SymmetricMemory | None] = [None] * nranks

    def rank(number: int) -> None:
        memories[number] = SymmetricMemory(
            Gpu(number), number, nranks, 4096, stages=room.stages(number), settings=P2pSettings()
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(nranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    made = [memory for memory in memories if memory is not None]
    assert len(made) == nranks
    owns = [memory.own for memory in made]
    for number, memory in enumerate(made):
        assert memory.kinds == [
            pairs.PROCESS if peer != number else pairs.SELF for peer in range(nranks)
        ]
        assert memory.outboxes == owns
        assert memory.inboxes == [owns[number]] * nranks
    assert cuda.enabled == {
        (context_of(a), context_of(b)) for a, b in itertools.permutations(range(nranks), 2)
    }
    for number, memory in enumerate(made):
        cuda.cuCtxSetCurrent(context_of(number))
        memory.close()
    assert not cuda.live


def test_one_rank_takes_no_memory(cuda: FakeCuda) -> None:
    stages = ThreadRendezvous(1).stages(0)
    memory = SymmetricMemory(Gpu(0), 0, 1, 1 << 20, stages=stages)
    assert not cuda.live
    assert memory.explain() == []
    window = memory.window(100, stages)
    assert window.addressable
    assert window.addresses == [window.own]
    window.close()
    memory.close()
    assert not cuda.live
