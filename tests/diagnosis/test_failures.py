"""Errors on every rank after a failure: named, in bounded time, with nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miraccl.diagnosis.mismatch import describe_differences, describe_diverged
from miraccl.executor.cpu.kernels import layout
from miraccl.sim import World
from miraccl.tools.spawn import RankOutcome
from miraccl.types import Collective
from tests.diagnosis import fault_ranks
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess

SECONDS_TO_NOTICE = 20.0  # a death, whatever the survivors were doing; their deadlines are later


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Any:
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if "miraccl" in name}
    assert not left


def values(outcomes: list[RankOutcome], but: int | None = None) -> list[dict[str, Any]]:
    """Return the results of the ranks; ``but`` is the rank that died."""
    for outcome in outcomes:
        assert outcome.rank == but or outcome.ok, (
            f"{outcome.describe()}\n{outcome.error}\n{outcome.output}"
        )
    return [o.value for o in outcomes if o.rank != but]


# ---- different calls

MISMATCHES = {
    "collective": "collective is",
    "dtype": "dtype is",
    "count": "count is",
    "far count": "count is",
    "operator": "operator is",
    "root": "root is",
    "barrier": "collective is",
    "broadcast": "count is",
}


def in_world(program: Callable[..., None], *arguments: Any) -> list[dict[str, Any]]:
    """Return the errors of three virtual ranks of one host, with the engine of processes."""
    outcomes = World(1, 3, engine="compiled", timeout=20).run(
        program, *arguments, return_exceptions=True
    )
    return [fault_ranks.seen(outcome) for outcome in outcomes]


def check_mismatch(errors: list[dict[str, Any]], field: str, odd: int) -> None:
    for got in errors:
        assert got["type"] == "CollectiveMismatch", got
        assert MISMATCHES[field] in got["text"]
        one, two = sorted({0, 1, 2} - {odd})  # one of which may not have come yet
        assert f"on rank {odd}" in got["text"]
        assert any(
            f"on rank{who}" in got["text"] for who in (f" {one}", f" {two}", f"s {one} and {two}")
        )


@pytest.mark.parametrize("field", MISMATCHES)
def test_a_mismatch_names_ranks_and_field_on_every_rank(field: str) -> None:
    check_mismatch(in_world(fault_ranks.call_differently, field, 1, 12), field, 1)


@pytest.mark.parametrize(
    ("field", "ranks_per_host"), [("count", 0), ("collective", 1), ("count", 1), ("root", 1)]
)
def test_a_mismatch_between_processes(field: str, ranks_per_host: int) -> None:
    odd = 2 if ranks_per_host else 1
    outcomes = rank_outcomes(fault_ranks.mismatch, 3, field, odd, 12, ranks_per_host, timeout=30)
    check_mismatch(values(outcomes), field, odd)


def test_a_mismatch_of_large_operations() -> None:
    for field in ("dtype", "far count"):
        for got in values(rank_outcomes(fault_ranks.mismatch, 4, field, 3, 200_000, 0, timeout=30)):
            assert got["type"] == "CollectiveMismatch", got
            assert "on rank 3" in got["text"]


MESSAGE_FIELDS = {
    "dtype": "dtype",
    "count": "count",
    "collective": "collective",
    "size": "count",
}


def check_messages(errors: list[dict[str, Any]], what: str) -> None:
    for got in errors:
        assert got["type"] == "CollectiveMismatch", got
        assert f"{MESSAGE_FIELDS[what]} is" in got["text"]
        assert "on rank 1" in got["text"]
        if (
            what != "collective"
        ):  # else rank 0, whose message rank 1 leaves lying, may be on its way to the barrier
            assert "on rank 0" in got["text"] or "on ranks 0" in got["text"]


@pytest.mark.parametrize("what", MESSAGE_FIELDS)
def test_a_mismatch_of_messages(what: str) -> None:
    check_messages(in_world(fault_ranks.send_differently, what), what)


@pytest.mark.parametrize(("what", "ranks_per_host"), [("size", 0), ("count", 1), ("collective", 1)])
def test_a_mismatch_of_messages_between_processes(what: str, ranks_per_host: int) -> None:
    outcomes = rank_outcomes(fault_ranks.unlike_messages, 3, what, ranks_per_host, timeout=30)
    check_messages(values(outcomes), what)


@pytest.mark.parametrize("field", ["dtype", "count"])
def test_a_mismatch_of_messages_in_groups(field: str) -> None:
    for got in values(rank_outcomes(fault_ranks.unlike_messages_of_groups, 3, field, timeout=30)):
        assert got["type"] == "CollectiveMismatch", got
        other = {"dtype": "count", "count": "dtype"}[field]
        assert f"{field} " in got["text"].partition("different operations:")[2]
        assert f"{other} " not in got["text"].partition("different operations:")[2]
        assert "rank 0" in got["text"]
        assert "rank 1" in got["text"]
        assert got["op"].startswith(("send/recv", "barrier")), got  # ranks 0 and 2 have gone on


@pytest.mark.parametrize("ranks_per_host", [0, 1])
@pytest.mark.parametrize("what", ["messages", "broadcast"])
def test_a_rank_that_ends_at_once_does_not_hide_a_mismatch(what: str, ranks_per_host: int) -> None:
    for got in values(rank_outcomes(fault_ranks.ends_at_once, 3, what, ranks_per_host, timeout=30)):
        assert got["type"] == "CollectiveMismatch", got


@pytest.mark.parametrize("killed", [-1, 1])
def test_mismatch_with_a_rank_that_is_gone(killed: int) -> None:
    """Its board has stayed: what it called was something else."""
    got = values(rank_outcomes(fault_ranks.goes_through, 3, killed, timeout=30))
    assert got[0]["type"] == got[1]["type"] == "none"
    assert got[2]["type"] == "CollectiveMismatch", got
    assert "root is" in got[2]["text"]


SPLIT_AGAINST = [
    (what, what, hosts) for what in ("all_reduce", "broadcast", "barrier") for hosts in (0, 1)
]
SPLIT_AGAINST += [
    ("recv", "send_recv", 0),
    ("recv", "send_recv", 1),
    ("sendrecv", "send_recv", 0),
    ("send", "send_recv", 0),
]


@pytest.mark.parametrize(
    ("what", "name", "ranks_per_host"), [*SPLIT_AGAINST, ("async", "all_reduce", 0)]
)
def test_split_against_another_operation(what: str, name: str, ranks_per_host: int) -> None:
    """Every rank gets the same error long before its deadline, at once where it is certain."""
    for got in values(
        rank_outcomes(fault_ranks.split_against, 3, what, ranks_per_host, timeout=60)
    ):
        assert got["type"] == "CollectiveMismatch", got
        text = got["text"]
        compared = "split on rank 1" in text and f"{name} on rank" in text
        circle = (
            "rank 1 waits for rank 0 in split" in text or "rank 1 waits for rank 2 in split" in text
        )
        if what == "async":  # found where the programs of the others are
            assert circle, text
            assert "waits for rank 1 in all_reduce" in text
        else:
            assert compared or circle, (
                text
            )  # on a busy machine whoever looks for circles may be first


def test_split_against_another_operation_on_the_control_plane() -> None:
    for got in values(rank_outcomes(fault_ranks.split_against_another_meeting, 3, timeout=60)):
        assert got["type"] == "CollectiveMismatch", got
        assert "split on rank 1" in got["text"]
        assert "something else on rank" in got["text"]


def test_split_beside_an_operation_in_the_background() -> None:
    assert (
        run_ranks(fault_ranks.split_after_an_operation_of_another_thread, 3, timeout=40)
        == [27.0] * 3
    )


def test_an_abort_ends_split() -> None:
    for got in values(rank_outcomes(fault_ranks.split_against, 3, "abort", 0, timeout=60)):
        assert got["type"] == "CommunicatorAborted", got
        assert "for a test" in got["text"]


def board(seq: int, sig: Collective = Collective.ALL_REDUCE, **more: Any) -> dict[str, Any]:
    words = {
        "seq": seq,
        "sig": int(sig) << 16 | seq,
        "peer": -1,
        "state": layout.STATE_WAITING,
        "p2p_sig": 0,
    }
    return {"answered": True, "status": {**words, "control_op": {}, **more}}


IN_SPLIT: dict[str, Any] = {"control_op": {"op": "split", "tag": "split 1", "alone": True}}
MESSAGE = int(Collective.SEND_RECV) << 16


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        (
            [board(4), board(3, **IN_SPLIT), board(4)],
            "all_reduce on ranks 0 and 2, split on rank 1",
        ),
        (
            [board(4, p2p_sig=MESSAGE, peer=1), board(4, **IN_SPLIT)],
            "send_recv on rank 0, split on rank 1",
        ),
        (
            [board(4, p2p_sig=MESSAGE, peer=2), board(4, **IN_SPLIT), board(4)],
            "",
        ),  # waits for somebody else
        (
            [board(4), board(4, **IN_SPLIT), board(3)],
            "",
        ),  # rank 2 is missing in operation 4, which rank 1 has behind it
        (
            [board(4), board(3, control_op={"op": "split", "alone": False})],
            "",
        ),  # operation 4 of rank 1 may be under way beside it
        ([board(4, **IN_SPLIT), board(3, **IN_SPLIT), board(3)], ""),  # both are in it
        ([board(4), {"answered": False, "reason": "died"}], ""),
        (
            [board(4, **IN_SPLIT), board(4, control_op={"op": "set-up", "alone": False}), board(4)],
            "split on rank 0, set-up on rank 1",
        ),
    ],
)
def test_describe_diverged(statuses: list[dict[str, Any]], text: str) -> None:
    found = describe_diverged(dict(enumerate(statuses)))
    assert found.endswith(text)
    assert bool(found) == bool(text)


def test_lists_of_ranks_and_values_are_told_apart() -> None:
    found = describe_differences(
        {0: {"count": "4"}, 1: {"count": "5"}, 2: {"count": "4"}, 3: {"count": "4"}}
    )
    assert found.endswith(": count is 4 on ranks 0, 2 and 3, 5 on rank 1")


@pytest.mark.parametrize("field", ["algo", "deterministic", "buffsize", "net"])
def test_different_settings_are_a_plan_mismatch(field: str) -> None:
    for got in values(rank_outcomes(fault_ranks.other_settings, 3, field, timeout=30)):
        assert got["type"] == "PlanMismatch", got
        assert field in got["text"]
        assert "on rank 1" in got["text"]
        assert "on ranks 0, 2" in got["text"]


# ---- nobody comes


@pytest.mark.parametrize("ranks_per_host", [0, 1])
@pytest.mark.parametrize("where", ["python", "c", "recv"])
def test_a_rank_that_never_arrives(where: str, ranks_per_host: int) -> None:
    got = values(rank_outcomes(fault_ranks.absent, 3, where, ranks_per_host, timeout=40))
    for value in got:
        assert value["type"] == "CollectiveTimeout", value
        assert value["seconds"] < SECONDS_TO_NOTICE
        graph = value["graph"]
        assert len(graph) == 3
        assert graph == got[0]["graph"] or where == "c" or ranks_per_host or where == "recv"
        waiting = {line.split(":")[0]: line for line in graph}
        assert "waits for rank 1 in" in waiting["rank 0"]
        assert "step" in waiting["rank 0"]
        assert "fault_ranks.py" in waiting["rank 0"]
        if where != "c":
            assert (
                "never arrived at operation #2; its last was all_reduce #1 (3 x float32, sum)"
                in waiting["rank 1"]
            )
            assert " elsewhere" in waiting["rank 1"]


# ---- death

PHASES = [
    (phase, victim, hosts)
    for phase in ("bootstrap", "waiting", "large", "p2p", "barrier")
    for victim, hosts in ((0, 0), (1, 1), (2, 2))
] + [("window", 1, 0), ("async", 1, 0), ("connect", 1, 0), ("connect", 1, 1), ("connect", 0, 1)]


@pytest.mark.parametrize(("phase", "victim", "ranks_per_host"), PHASES)
def test_a_killed_rank(phase: str, victim: int, ranks_per_host: int, tmp_path: Path) -> None:
    path = str(tmp_path / "death")
    outcomes = rank_outcomes(fault_ranks.killed, 4, phase, victim, path, ranks_per_host, timeout=40)
    assert outcomes[victim].status == -9
    for number, got in enumerate(values(outcomes, but=victim)):
        # while ranks are meeting, the first to see a death leaves, and another may see that first:
        # it is told the reason
        assert got["type"] == "PeerDied" or (
            phase in ("bootstrap", "connect") and got["type"] == "BootstrapError"
        ), got
        assert f"rank {victim}" in got["text"]
        assert got["after"] < SECONDS_TO_NOTICE
        if phase not in ("bootstrap", "connect"):
            assert got["again"] == "PeerDied"  # the communicator stays broken
            assert got["shrunk"] == [number, 3, 6.0]


def test_death_of_a_rank_whose_memory_is_read() -> None:
    """The kernel refuses to copy from a dead rank, before its death has been reported."""
    (got,) = values(rank_outcomes(fault_ranks.dies_with_a_message, 2, timeout=40), but=1)
    assert got["type"] == "PeerDied", got
    assert "rank 1 died" in got["text"]
    assert got["op"] == "send/recv (100000 x float64)"


def test_death_of_a_rank_that_a_leaving_rank_waits_for() -> None:
    (got,) = values(rank_outcomes(fault_ranks.dies_for_one_that_leaves, 2, timeout=40), but=1)
    assert got["type"] == "PeerDied", got
    assert "rank 1 died" in got["text"]


@pytest.mark.parametrize("ranks_per_host", [0, 1])
@pytest.mark.parametrize("how", ["plain", "pending", "finalize"])
def test_a_rank_that_ends_early(how: str, ranks_per_host: int) -> None:
    got = values(rank_outcomes(fault_ranks.exits, 3, how, ranks_per_host, timeout=40))
    for rank in (0, 2):
        assert got[rank]["type"] == "PeerDied", got
        assert got[rank]["peer"] == 1
    if how == "finalize":
        assert "has left the communicator" in got[0]["text"]


def test_a_rank_dies_while_the_others_shrink(tmp_path: Path) -> None:
    got = values(
        rank_outcomes(fault_ranks.killed_while_shrinking, 4, str(tmp_path / "death"), timeout=40),
        but=1,
    )
    assert [value["shrunk"] for value in got] == [[rank, 3, 3.0] for rank in range(3)]


def test_the_hub_dies_with_its_rank(tmp_path: Path) -> None:
    """Kill rank 0, which has the control plane; the others continue without it."""
    got = values(
        rank_outcomes(fault_ranks.hub_in_rank_0, 3, str(tmp_path / "death"), timeout=40), but=0
    )
    for value in got:
        assert value["type"] == "PeerDied", value
        assert value["after"] < SECONDS_TO_NOTICE
    assert [value["shrunk"] for value in got] == [[0, 2, 2.0], [1, 2, 2.0]]


# ---- a stopped rank


def test_errors_about_a_stopped_rank_come_soon_after_the_deadline() -> None:
    """0.45 s on an idle machine: one status query without its answer; 1.5 to 2 s before."""
    best = 9.0
    for _ in range(3):
        got = values(rank_outcomes(fault_ranks.stopped_rank, 4, 1.5, timeout=40))
        for value in [got[0], *got[2:]]:
            assert value["type"] == "CollectiveTimeout", value
            assert "rank 1: did not answer" in str(value["graph"])
        best = min(best, max(value["late"] for value in [got[0], *got[2:]]))
        if best < 0.5:
            return
    raise AssertionError(f"{best:.2f} s after the deadline")


def test_errors_of_a_split_communicator_name_ranks_of_the_job() -> None:
    outcomes = rank_outcomes(fault_ranks.split_death, 4, timeout=40)
    got = outcomes[1].value
    assert got["type"] == "PeerDied", got
    assert got["peer"] == 1
    assert "rank 1 died" in got["text"]
    assert "rank 0 is rank 1, rank 1 is rank 3 of the job]" in got["text"]


# ---- from outside


@pytest.mark.parametrize("ranks_per_host", [0, 1])
@pytest.mark.parametrize("what", ["all_reduce", "recv", "group"])
def test_interrupt_ends_a_wait_and_notifies_the_others(what: str, ranks_per_host: int) -> None:
    got = values(rank_outcomes(fault_ranks.interrupted, 3, what, ranks_per_host, timeout=40))
    assert [g["first"] for g in got] == ["", "KeyboardInterrupt", ""]
    for value in got:
        assert value["type"] == "CommunicatorAborted"
        assert "rank 1 aborted the communicator: a signal handler raised" in value["text"]


@pytest.mark.parametrize("ranks_per_host", [0, 1])
def test_handled_signal_does_not_end_a_wait(ranks_per_host: int) -> None:
    assert run_ranks(fault_ranks.handled, 2, ranks_per_host) == [0, 1]


@pytest.mark.parametrize("ranks_per_host", [0, 1])
@pytest.mark.parametrize("how", ["with", "abort", "thread", "async"])
def test_abort(how: str, ranks_per_host: int) -> None:
    got = values(rank_outcomes(fault_ranks.aborted, 3, how, ranks_per_host, timeout=40))
    assert got[0]["type"] == ("ZeroDivisionError" if how == "with" else "CommunicatorAborted")
    for value in got[1:]:
        assert value["type"] == "CommunicatorAborted", value
        assert "rank 0 aborted the communicator" in value["text"]
        assert value["peer"] == 0
    if how == "with":
        assert "of the application" in got[1]["text"]


def test_no_operation_begins_once_the_fault_is_seen() -> None:
    """A program that goes on to another operation after the fault would be compared with ranks that
    have not heard of it.
    """
    assert run_ranks(fault_ranks.ends_waits_before_its_fault_is_seen, 2) == [True, True]


def test_forked_child_cannot_use_the_session() -> None:
    for rank, (told, total) in enumerate(run_ranks(fault_ranks.forks, 2)):
        assert len(told) == 2
        for line, op in zip(told, ("all_reduce", "shrink"), strict=True):
            assert line.startswith(
                f"CommunicatorClosed: rank {rank}, {op}: the communicator belongs to the "
                "process that made it"
            )
        assert total == 2.0


def test_after_finalize() -> None:
    run_ranks(fault_ranks.after_finalize, 3)
