"""What a communicator was asked to be: options, settings, wishes of NCCL's variables, and the reasons that come out."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from miraccl.comm import nccl_wishes
from miraccl.comm.member import Options
from miraccl.comm.model import Constants, Shape
from miraccl.comm.planner import Candidate, Overrides, Planner
from miraccl.errors import InvalidUsage
from miraccl.schedule import catalog
from miraccl.schedule.catalog import register
from miraccl.types import Collective, DType

TUNED = (Collective.BROADCAST, Collective.REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE)


def chosen(collective: Collective, nbytes: int, nranks: int = 4, dtype: DType = DType.FLOAT32, **overrides: object) -> list[Candidate]:
    shape = Shape(nranks=nranks)
    planner = Planner(rank=0, shape=shape, slot_bytes=1 << 18, constants=Constants(), overrides=Overrides(**overrides))  # type: ignore[arg-type]
    return planner.candidates(collective, nbytes, dtype)


# ---- reasons


@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
@pytest.mark.parametrize("collective", [Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER])
def test_only_the_lowest_prediction_is_called_so(collective: Collective, nranks: int) -> None:
    for exponent in range(3, 25):
        first, *others = chosen(collective, 1 << exponent, nranks)
        lowest = min(row.predicted_us for row in (first, *others) if row.chosen or "times the predicted time" in row.reason)
        if first.predicted_us == lowest:
            assert first.reason == "lowest predicted time"
        else:
            assert first.reason.startswith("preferred among equals (within 5%")
            assert first.predicted_us <= 1.05 * lowest


def test_equals_occur() -> None:
    first, second, *_ = chosen(Collective.ALL_REDUCE, 128 << 10)
    assert (first.algo, first.reason) == ("ring", "preferred among equals (within 5% of the lowest predicted time)")
    assert second.predicted_us < first.predicted_us
    assert second.reason.endswith("which is taken among equals (within 5%)")


def test_uneven_blocks_are_not_kept_in_scratch_memory() -> None:
    """Its size would follow from counts that come with the call."""
    gather = Collective.ALL_GATHER
    register("pat_for_uneven", collectives=[gather], uneven=[gather], sentence="")(
        lambda collective, nranks, root: replace(catalog.build("pat", collective, nranks, root), name="pat_for_uneven")
    )
    try:
        planner = Planner(rank=0, shape=Shape(nranks=4), slot_bytes=1 << 18, constants=Constants(), overrides=Overrides())
        rows = {row.algo: row.reason for row in planner.candidates(gather, 1024, DType.FLOAT32, uneven=True)}
        assert rows["pat_for_uneven"].startswith("keeps blocks in scratch memory")
        assert "scratch" not in {row.algo: row.reason for row in planner.candidates(gather, 1024, DType.FLOAT32)}["pat_for_uneven"]
    finally:
        catalog.unregister("pat_for_uneven")


# ---- NCCL_ALGO and NCCL_PROTO


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ring", dict.fromkeys(TUNED, "ring")),
        ("TREE", dict.fromkeys(TUNED, "double_binary_tree")),
        ("pat", dict.fromkeys(TUNED, "pat")),
        ("Tree,NVLS", dict.fromkeys(TUNED, "double_binary_tree")),
        ("^Tree,PAT", dict.fromkeys(TUNED, "ring")),
        ("allreduce:tree", {Collective.ALL_REDUCE: "double_binary_tree"}),
        ("Ring;allreduce:tree;broadcast:nvls", {**dict.fromkeys(TUNED[1:4], "ring"), Collective.ALL_REDUCE: "double_binary_tree"}),
        ("two_shot", dict.fromkeys(Collective, "two_shot")),
        ("Ring,Tree", {}),
        ("^Tree", {}),
        ("NVLS", {}),
        ("CollNetDirect,CollNetChain", {}),
        ("Treee", {}),
        ("ring;tree", {}),
        ("allreduces:ring", {}),
    ],
)
def test_what_nccl_algo_wishes(
    text: str, expected: dict[Collective, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("miraccl"), "propagate", True)  # trace.configure may have been here
    with caplog.at_level(logging.INFO, logger="miraccl"):
        command, wishes = nccl_wishes.read_algorithms({"NCCL_ALGO": text})
    assert (command, wishes) == ("", expected)
    assert bool(expected) or "NCCL_ALGO" in caplog.text
    assert nccl_wishes.read_algorithms({"MIRACCL_ALGO": "Ring", "NCCL_ALGO": text}) == ("ring", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Simple", "simple"),
        ("LL", "ll"),
        ("^LL,LL128", "simple"),
        ("LL,LL128,Simple", ""),
        ("^LL128", ""),
        ("LL128", ""),
        ("^LL128;allreduce:LL128", ""),
        ("Simple;allreduce:LL", ""),
        ("Complicated", ""),
    ],
)
def test_what_nccl_proto_wishes(text: str, expected: str) -> None:
    command, wishes = nccl_wishes.read_protocols({"NCCL_PROTO": text})
    assert (command, nccl_wishes.on_cpus(wishes)) == ("", expected)
    assert nccl_wishes.read_protocols({"MIRACCL_PROTO": "LL128", "NCCL_PROTO": text}) == ("ll128", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ring", {Collective.ALL_REDUCE: "ring", Collective.BROADCAST: "chain", Collective.REDUCE: "chain"}),
        ("allreduce:ring,nvls", {Collective.ALL_REDUCE: "ring"}),
        ("Tree", dict.fromkeys((Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE), "double_binary_tree")),
        ("PAT", {}),
        ("two_shot", dict.fromkeys(Collective, "two_shot")),
    ],
)
def test_what_gpus_have_kernels_of(
    text: str, expected: dict[Collective, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("miraccl"), "propagate", True)
    wishes = nccl_wishes.algorithms(text)
    with caplog.at_level(logging.INFO, logger="miraccl"):
        assert nccl_wishes.on_gpus(wishes) == expected
    assert ("left aside on GPU memory" in caplog.text) is (set(wishes) != set(expected))


def test_what_nccl_proto_wishes_of_gpus() -> None:
    _, wishes = nccl_wishes.read_protocols({"NCCL_PROTO": "^LL128;allreduce:LL128;broadcast:simple"})
    assert wishes == {Collective.ALL_REDUCE: "ll128", Collective.BROADCAST: "simple"}


def test_wishes_are_followed_where_they_can_be() -> None:
    wishes = nccl_wishes.algorithms("ring;broadcast:tree")
    assert chosen(Collective.ALL_REDUCE, 64, wishes=wishes)[0].algo == "ring"
    assert chosen(Collective.ALL_REDUCE, 64, wishes=wishes)[0].reason == "asked for"
    assert chosen(Collective.BROADCAST, 64, wishes=wishes)[0].algo == "double_binary_tree"
    assert chosen(Collective.ALL_TO_ALL, 64, wishes=wishes)[0].reason != "asked for"
    assert chosen(Collective.REDUCE, 64, wishes=wishes)[0].reason != "asked for"  # ring has none
    ordered = chosen(Collective.ALL_REDUCE, 4 << 20, wishes=wishes, deterministic=True)[0]
    assert ordered.algo in ("one_shot", "two_shot")
    with pytest.raises(InvalidUsage, match="no algorithm is left"):
        chosen(Collective.ALL_REDUCE, 4 << 20, algo="ring", deterministic=True)


# ---- deterministic


def test_the_setting_counts_where_the_program_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.create().deterministic is False
    monkeypatch.setenv("MIRACCL_DETERMINISTIC", "1")
    assert Options.create().deterministic is True
    assert Options.create(deterministic=False).deterministic is False
    monkeypatch.setenv("MIRACCL_DETERMINISTIC", "maybe")
    with pytest.raises(InvalidUsage, match="MIRACCL_DETERMINISTIC"):
        Options.create()
