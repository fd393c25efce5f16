"""Options, settings, NCCL's hints, and the reasons that ``explain`` gives."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from miraccl.errors import InvalidUsage, ScheduleError
from miraccl.executor.cpu.sizes import size_class
from miraccl.ops.request import PlanRequest
from miraccl.planning import nccl_hints
from miraccl.planning.cost_model import CommunicatorShape, CpuConstants
from miraccl.planning.planner import Candidate, Overrides, Planner
from miraccl.runtime.options import Options
from miraccl.schedule import catalog
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import (
    barrier,
    copy,
    inp,
    one_channel,
    out,
    recv,
    recv_reduce_copy,
    send,
    signal,
    wait,
)
from miraccl.types import Collective, DType, RedOp

TUNED = (
    Collective.BROADCAST,
    Collective.REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_REDUCE,
)


def chosen(
    collective: Collective,
    nbytes: int,
    nranks: int = 4,
    dtype: DType = DType.FLOAT32,
    **overrides: object,
) -> list[Candidate]:
    shape = CommunicatorShape(nranks=nranks)
    planner = Planner(
        rank=0,
        shape=shape,
        slot_bytes=1 << 18,
        constants=CpuConstants(),
        overrides=Overrides(**overrides),  # type: ignore[arg-type]
    )
    return planner.candidates(collective, nbytes, dtype)


# ---- reasons


@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "collective", [Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER]
)
def test_lowest_prediction_is_named_once(collective: Collective, nranks: int) -> None:
    for exponent in range(3, 25):
        first, *others = chosen(collective, 1 << exponent, nranks)
        lowest = min(
            row.predicted_us
            for row in (first, *others)
            if row.chosen or "times the predicted time" in row.reason
        )
        if first.predicted_us == lowest:
            assert first.reason == "lowest predicted time"
        else:
            assert first.reason.startswith("preferred among equals (within 5%")
            assert first.predicted_us <= 1.05 * lowest


def test_ties_occur() -> None:
    first, second, *_ = chosen(Collective.ALL_REDUCE, 256 << 10, 2)
    assert (first.algo, first.reason) == (
        "ring",
        "preferred among equals (within 5% of the lowest predicted time)",
    )
    assert second.predicted_us < first.predicted_us
    assert second.reason.endswith("which is preferred among equals (within 5%)")


@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_size_class_has_one_algorithm(nranks: int) -> None:
    """The reason says so if another algorithm is predicted to be faster at that size."""
    planner, reasons = (
        Planner(
            rank=0,
            shape=CommunicatorShape(nranks=nranks),
            slot_bytes=1 << 18,
            constants=CpuConstants(),
            overrides=Overrides(),
        ),
        set(),
    )
    for collective in (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE_SCATTER):
        for least in [n << shift for shift in range(18) for n in (4, 5, 6, 7)]:
            names = {}
            for nbytes in (
                least,
                least + least // 9,
                least * 5 // 4 - 1 if least % 4 == 0 else least,
            ):
                if size_class(nbytes) == least:
                    first, *others = planner.candidates(collective, nbytes, DType.FLOAT32)
                    names[nbytes] = first.algo
                    lowest = min(
                        row.predicted_us
                        for row in (first, *others)
                        if row.chosen or "times the predicted" in row.reason
                    )
                    assert (
                        first.predicted_us <= 1.05 * lowest
                        or f"best for blocks of {least} bytes" in first.reason
                    )
                    reasons.add(first.reason.partition(" ")[0])
            assert len(set(names.values())) == 1, names
    assert reasons >= {"lowest", "preferred"}


def test_new_size_costs_no_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(
        rank=0,
        shape=CommunicatorShape(nranks=4),
        slot_bytes=1 << 18,
        constants=CpuConstants(),
        overrides=Overrides(),
    )
    predicted: list[int] = []

    def predict(schedule: object, steps: object, block_bytes: int, *rest: object) -> float:
        predicted.append(block_bytes)
        return float(block_bytes)

    monkeypatch.setattr("miraccl.planning.planner.predict_us", predict)
    ask = partial(
        PlanRequest, collective=Collective.ALL_REDUCE, dtype=DType.FLOAT32, op=RedOp.SUM, root=0
    )
    runs = [
        planner.make_run(ask(in_counts=(n,), out_counts=(n,), block_bytes=4 * n, count=n))
        for n in (1100, 1101, 1200, 1279)
    ]
    assert set(predicted) == {4096}, "the least of the class of 4400 to 5116 bytes"
    assert len(predicted) == len(catalog.algorithms_for(Collective.ALL_REDUCE, 4))
    choices = [planner.choice_of(run.address) for run in runs]
    assert all(choices)
    assert [c.predicted_us for c in choices if c] == [4400.0, 4404.0, 4800.0, 5116.0]
    planner.make_run(ask(in_counts=(1280,), out_counts=(1280,), block_bytes=5120, count=1280))
    assert 5120 in predicted


def test_new_algorithm_is_considered() -> None:
    planner = Planner(
        rank=0,
        shape=CommunicatorShape(nranks=4),
        slot_bytes=1 << 18,
        constants=CpuConstants(),
        overrides=Overrides(),
    )
    before = planner.candidates(Collective.ALL_REDUCE, 8, DType.FLOAT32)[0].algo

    def build(collective: Collective, nranks: int, root: int) -> Schedule:
        return replace(catalog.build(before, collective, nranks, root), name="twin")

    register(
        "twin",
        collectives=[Collective.ALL_REDUCE],
        description="",
        latency=lambda collective, nranks: 0,
    )(build)
    try:
        assert planner.candidates(Collective.ALL_REDUCE, 8, DType.FLOAT32)[0].algo == "twin"
    finally:
        catalog.unregister("twin")
    assert planner.candidates(Collective.ALL_REDUCE, 8, DType.FLOAT32)[0].algo == before


@pytest.mark.parametrize("asked", ["", "for_root_2"])
def test_schedule_for_one_root_excludes_others(asked: str) -> None:
    catalog.register_schedule(
        replace(catalog.build("chain", Collective.BROADCAST, 4, 2), name="for_root_2")
    )
    try:
        planner = Planner(
            rank=0,
            shape=CommunicatorShape(nranks=4),
            slot_bytes=1 << 18,
            constants=CpuConstants(),
            overrides=Overrides(algo=asked),
        )
        for root in range(4):
            rows = [
                row.algo
                for row in planner.candidates(Collective.BROADCAST, 1024, DType.FLOAT32, root)
            ]
            assert ("for_root_2" in rows) == (root == 2)
            assert not asked or (rows[0] == asked) == (root == 2)
    finally:
        catalog.unregister("for_root_2")


def test_uneven_blocks_exclude_scratch_memory() -> None:
    """The size of scratch memory would depend on the counts of each call."""
    gather = Collective.ALL_GATHER
    register("pat_for_uneven", collectives=[gather], uneven=[gather], description="")(
        lambda collective, nranks, root: replace(
            catalog.build("pat", collective, nranks, root), name="pat_for_uneven"
        )
    )
    try:
        planner = Planner(
            rank=0,
            shape=CommunicatorShape(nranks=4),
            slot_bytes=1 << 18,
            constants=CpuConstants(),
            overrides=Overrides(),
        )
        rows = {
            row.algo: row.reason
            for row in planner.candidates(gather, 1024, DType.FLOAT32, uneven=True)
        }
        assert rows["pat_for_uneven"].startswith("needs scratch memory")
        assert (
            "scratch"
            not in {
                row.algo: row.reason for row in planner.candidates(gather, 1024, DType.FLOAT32)
            }["pat_for_uneven"]
        )
    finally:
        catalog.unregister("pat_for_uneven")


def test_signals_need_blocks_that_all_ranks_know() -> None:
    collectives = [Collective.ALL_GATHER, Collective.GATHER]
    at_root = [copy(inp(0), out(0)), barrier(), recv(out(1), 1)]
    programs = {
        Collective.GATHER: [at_root, [barrier(), send(inp(0), 0)]],
        Collective.ALL_GATHER: [
            [*at_root, send(inp(0), 1)],
            [barrier(), send(inp(0), 0), copy(inp(0), out(1)), recv(out(0), 0)],
        ],
    }
    register("signals", collectives=collectives, uneven=collectives, description="")(
        lambda collective, nranks, root: one_channel("signals", collective, programs[collective])
    )
    try:
        planner = Planner(
            rank=0,
            shape=CommunicatorShape(nranks=2),
            slot_bytes=1 << 18,
            constants=CpuConstants(),
            overrides=Overrides(),
        )
        for collective in collectives:
            rows = {
                row.algo: row.reason
                for row in planner.candidates(collective, 1024, DType.FLOAT32, uneven=True)
            }
            assert rows["signals"].startswith("has signals, but rounds") == (
                collective is Collective.GATHER
            )
    finally:
        catalog.unregister("signals")


def symmetric_all_reduce(steps: Callable[[int], list[Step]], **more: Any) -> Schedule:
    """Build an all-reduce of two ranks with identical steps."""
    return one_channel("flawed", Collective.ALL_REDUCE, map(steps, range(2)), **more)


def right(rank: int) -> list[Step]:
    return [send(inp(0), 1 - rank), recv_reduce_copy(inp(0), out(0), 1 - rank)]


def fails(*args: object) -> Any:
    raise ZeroDivisionError("by a test")


FLAWED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "no sum": (
        lambda *args: symmetric_all_reduce(lambda rank: [copy(inp(0), out(0))]),
        {},
        r"channel 0, rank 0, step 0 .* at the end output\[0\]",
    ),
    "not in place": (
        lambda *args: one_channel("flawed", Collective.ALL_REDUCE, [right(0)[::-1], right(1)]),
        {},
        "contribution of rank 1 to input.* twice",
    ),
    "not on CPUs": (
        lambda *args: symmetric_all_reduce(
            lambda rank: [right(rank)[0], signal([1 - rank]), wait([1 - rank]), right(rank)[1]]
        ),
        {},
        "CPU ranks consume them in the order of their posts",
    ),
    "too wide": (
        lambda *args: symmetric_all_reduce(
            lambda rank: [
                send(inp(0, 8192), 1 - rank),
                recv_reduce_copy(inp(0, 8192), out(0, 8192), 1 - rank),
            ],
            parts=8192,
        ),
        {},
        "8192 chunks, too many for slots of 262144 bytes",
    ),
    "no schedule": (
        fails,
        {},
        "failed to build all_reduce over 2 ranks: ZeroDivisionError: by a test",
    ),
    "no condition": (
        lambda *args: symmetric_all_reduce(right),
        {"condition": fails},
        "failed to evaluate its condition for all_reduce over 2 ranks: ZeroDiv",
    ),
    "no latency": (
        lambda *args: symmetric_all_reduce(right),
        {"latency": fails},
        "failed to compute the latency of all_reduce over 2 ranks: ZeroDiv",
    ),
    "not in the order it claims": (
        lambda *args: symmetric_all_reduce(right),
        {"rank_ordered": True},
        "in rank order",
    ),
}


@pytest.mark.parametrize("flaw", FLAWED)
def test_defective_algorithm_is_excluded_unless_requested(flaw: str) -> None:
    build, claims, reason = FLAWED[flaw]
    request = partial(
        PlanRequest,
        collective=Collective.ALL_REDUCE,
        dtype=DType.FLOAT32,
        op=RedOp.SUM,
        root=0,
        in_counts=(2,),
        out_counts=(2,),
    )
    before = chosen(Collective.ALL_REDUCE, 8, 2)
    register(
        "flawed",
        collectives=[Collective.ALL_REDUCE],
        description="",
        **({"latency": lambda *args: 0} | claims),
    )(build)
    try:
        for rank in range(2):
            planner = Planner(
                rank=rank,
                shape=CommunicatorShape(nranks=2),
                slot_bytes=1 << 18,
                constants=CpuConstants(),
                overrides=Overrides(),
            )
            rows = planner.candidates(Collective.ALL_REDUCE, 8, DType.FLOAT32)
            assert rows[: len(before)] == before
            (flawed,) = rows[len(before) :]
            assert (flawed.algo, flawed.predicted_us) == ("flawed", math.inf)
            assert re.match(f"excluded: .*{reason}", flawed.reason)
            for in_place in (False, True):
                assert (
                    planner.make_run(
                        request(block_bytes=8, count=2, in_place=in_place)
                    ).program.schedule.name
                    == before[0].algo
                )
        asked = Planner(
            rank=0,
            shape=CommunicatorShape(nranks=2),
            slot_bytes=1 << 18,
            constants=CpuConstants(),
            overrides=Overrides(algo="flawed"),
        )
        with pytest.raises((ScheduleError, InvalidUsage), match=reason):
            asked.make_run(request(block_bytes=8, count=2, in_place=flaw == "not in place"))
    finally:
        catalog.unregister("flawed")


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
        (
            "Ring;allreduce:tree;broadcast:nvls",
            {**dict.fromkeys(TUNED[1:4], "ring"), Collective.ALL_REDUCE: "double_binary_tree"},
        ),
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
def test_nccl_algo_hints(
    text: str, expected: dict[Collective, str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="miraccl"):
        command, hints = nccl_hints.read_algorithms({"NCCL_ALGO": text})
    assert (command, hints) == ("", expected)
    assert bool(expected) or "NCCL_ALGO" in caplog.text
    assert nccl_hints.read_algorithms({"MIRACCL_ALGO": "Ring", "NCCL_ALGO": text}) == ("ring", {})


def test_unknown_algorithm_error_names_the_variable() -> None:
    with pytest.raises(InvalidUsage, match=r"^MIRACCL_ALGO: .*'rings'"):
        nccl_hints.read_algorithms({"MIRACCL_ALGO": "rings"})


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
def test_nccl_proto_hints(text: str, expected: str) -> None:
    command, hints = nccl_hints.read_protocols({"NCCL_PROTO": text})
    assert (command, nccl_hints.cpu_protocol(hints)) == ("", expected)
    assert nccl_hints.read_protocols({"MIRACCL_PROTO": "LL128", "NCCL_PROTO": text}) == (
        "ll128",
        {},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Ring",
            {
                Collective.ALL_REDUCE: "ring",
                Collective.BROADCAST: "chain",
                Collective.REDUCE: "chain",
            },
        ),
        ("allreduce:ring,nvls", {Collective.ALL_REDUCE: "ring"}),
        (
            "Tree",
            dict.fromkeys(
                (Collective.ALL_REDUCE, Collective.BROADCAST, Collective.REDUCE),
                "double_binary_tree",
            ),
        ),
        ("PAT", {}),
        ("two_shot", dict.fromkeys(Collective, "two_shot")),
    ],
)
def test_gpu_algorithm_hints(
    text: str, expected: dict[Collective, str], caplog: pytest.LogCaptureFixture
) -> None:
    hints = nccl_hints.hinted_algorithms(text)
    with caplog.at_level(logging.INFO, logger="miraccl"):
        assert nccl_hints.gpu_algorithms(hints) == expected
    assert ("ignored on GPU memory" in caplog.text) is (set(hints) != set(expected))


def test_nccl_proto_hints_on_gpus() -> None:
    _, hints = nccl_hints.read_protocols({"NCCL_PROTO": "^LL128;allreduce:LL128;broadcast:simple"})
    assert hints == {Collective.ALL_REDUCE: "ll128", Collective.BROADCAST: "simple"}


def test_hints_are_followed_if_possible() -> None:
    hints = nccl_hints.hinted_algorithms("ring;broadcast:tree")
    assert chosen(Collective.ALL_REDUCE, 64, hints=hints)[0].algo == "ring"
    assert chosen(Collective.ALL_REDUCE, 64, hints=hints)[0].reason == "requested"
    assert chosen(Collective.BROADCAST, 64, hints=hints)[0].algo == "double_binary_tree"
    assert chosen(Collective.ALL_TO_ALL, 64, hints=hints)[0].reason != "requested"
    assert chosen(Collective.REDUCE, 64, hints=hints)[0].reason != "requested"  # ring has none
    ordered = chosen(Collective.ALL_REDUCE, 4 << 20, hints=hints, deterministic=True)[0]
    assert ordered.algo in ("one_shot", "two_shot")
    with pytest.raises(InvalidUsage, match="cannot choose an algorithm"):
        chosen(Collective.ALL_REDUCE, 4 << 20, algo="ring", deterministic=True)


# ---- deterministic


def test_setting_is_the_default_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options.create().deterministic is False
    monkeypatch.setenv("MIRACCL_DETERMINISTIC", "1")
    assert Options.create().deterministic is True
    assert Options.create(deterministic=False).deterministic is False
    monkeypatch.setenv("MIRACCL_DETERMINISTIC", "maybe")
    with pytest.raises(InvalidUsage, match="MIRACCL_DETERMINISTIC"):
        Options.create()


def test_schedules_between_hosts() -> None:
    """Neighbours reduce first, rounds overlap where there are many, and one host has neither."""

    def best(nbytes: int, *hosts: int) -> str:
        shape = CommunicatorShape(nranks=len(hosts), hosts=hosts, order=tuple(range(len(hosts))))
        planner = Planner(
            rank=0,
            shape=shape,
            slot_bytes=1 << 20,
            constants=CpuConstants(),
            overrides=Overrides(),
            addressable=False,
        )
        return planner.candidates(Collective.ALL_REDUCE, nbytes, DType.FLOAT32)[0].algo

    assert best(8, 0, 1) == "one_shot"
    # half of the messages of one_shot cross the network, which costs processor time
    assert best(8, 0, 0, 1, 1) == "recursive_doubling"
    assert best(1 << 20, 0, 0, 1, 1) == "distance_doubling"
    assert best(1 << 26, 0, 0, 1, 1) == "staggered_distance_doubling"
    assert best(1 << 26, 0, 1) == "staggered_ring"
    near = chosen(Collective.ALL_REDUCE, 1 << 26)
    reasons = {row.algo: row.reason for row in near}
    assert reasons["distance_doubling"] == "made for ranks on several hosts"
