"""GPU communicators on an emulated driver, ranks as processes: messages, groups, background,
faults.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import emulated_faults, emulated_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = [
    pytest.mark.multiprocess,
    needs_compiler,
]


def run(target: Any, nranks: int, *args: Any) -> list[Any]:
    """Run ranks with two multiprocessors: few warp queues, so row FIFOs wrap around."""
    return run_ranks(
        target,
        nranks,
        *args,
        env={"MIRACCL_SMS": "2", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


@pytest.mark.parametrize("nranks", [2, 3])
def test_point_to_point(nranks: int) -> None:
    run(emulated_ranks.point_to_point, nranks)


def test_two_ranks_of_three_and_graphs() -> None:
    run(emulated_ranks.one_way, 3)


@pytest.mark.parametrize("nranks", [2, 4])
def test_uneven_collectives(nranks: int) -> None:
    run(emulated_ranks.uneven, nranks)


def test_background_groups_and_prepared_operations() -> None:
    run(emulated_ranks.background, 2)


@pytest.mark.parametrize("nranks", [2, 4])
def test_copy_engines(nranks: int) -> None:
    run_ranks(
        emulated_ranks.by_copy_engines,
        nranks,
        env={"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


def test_copy_engines_of_many_shapes() -> None:
    run_ranks(
        emulated_ranks.of_many_shapes,
        2,
        env={"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


def test_rejections() -> None:
    run(emulated_ranks.rejections, 2)


def test_rejections_of_persistent_operations() -> None:
    run(emulated_ranks.rejected_when_prepared, 2)


def test_arrays_on_another_gpu() -> None:
    run(emulated_ranks.on_another_gpu, 2)


def test_large_operations_of_communicators_are_ordered_across_threads() -> None:
    env = {"MIRACCL_SMS": "6", "MIRACCL_EMULATOR_CACHE": str(folder())}
    assert (
        run_ranks(emulated_ranks.communicators_in_threads, 2, env=env, timeout=100.0)
        == [[1, 0, 1, 1, 0, 1, 1]] * 2
    )


def test_operations_wait_for_work_before_a_capture() -> None:
    run_ranks(
        emulated_ranks.after_a_capture,
        2,
        env={"MIRACCL_SMS": "6", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


def test_threads_without_a_context_or_with_another_gpus() -> None:
    run(emulated_ranks.from_other_threads, 2)


def test_ranks_as_threads_with_a_gpu_each() -> None:
    """By kernels and by copy engines."""
    run_ranks(
        emulated_ranks.as_threads,
        1,
        2,
        env={"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=100.0,
    )


def test_a_forked_child_has_no_gpu() -> None:
    for rank, told in enumerate(run(emulated_ranks.forks, 2)):
        names = ("all_reduce", "all_reduce", "send", "barrier", "empty", "")
        who = [
            f"CommunicatorClosed: rank {rank}{name and ', '}{name}: "
            "the communicator belongs to the process"
            for name in names
        ]
        assert [line[: len(start)] for line, start in zip(told, who, strict=True)] == who


def test_streams_that_end_with_their_objects() -> None:
    run(emulated_ranks.in_streams_that_end, 2)


def test_cupy_arrays_with_pytorch_loaded() -> None:
    run(emulated_ranks.beside_torch, 2)


@pytest.mark.parametrize("nranks", [1, 2])
def test_operators_again(nranks: int) -> None:
    run(emulated_ranks.equal_operators, nranks)


def test_one_rank() -> None:
    run(emulated_ranks.one_rank, 1)
    run(emulated_ranks.alone_with_capsules, 1)


def test_the_gpu_of_the_first_array_is_used() -> None:
    assert run(emulated_ranks.begins_on_the_second_gpu, 2) == [1, 1]


USUAL = {
    "all_reduce": "one_shot ll128",
    "broadcast": "one_shot ll",
    "reduce": "one_shot ll128",
    "all_gather": "one_shot ll",
    "all_to_all": "one_shot ll",
}


@pytest.mark.parametrize(
    ("settings", "options", "changes"),
    [
        ({"NCCL_ALGO": "^Tree", "NCCL_PROTO": "LL,LL128"}, {}, {}),
        (
            {
                "NCCL_ALGO": "allreduce:ring,nvls;broadcast:ring;reduce:tree",
                "NCCL_PROTO": "allgather:simple;broadcast:LL128",
            },
            {},
            {
                "all_reduce": "ring ll128",
                "broadcast": "chain ll128",
                "reduce": "double_binary_tree ll128",
                "all_gather": "one_shot simple",
            },
        ),
        (
            {"NCCL_PROTO": "LL128"},
            {},
            {"broadcast": "one_shot ll128", "all_gather": "one_shot ll128"},
        ),
        ({"NCCL_ALGO": "Ring"}, {"deterministic": True}, {"broadcast": "chain ll"}),
        (
            {"MIRACCL_ALGO": "double_binary_tree", "MIRACCL_PROTO": "LL"},
            {},
            {
                name: "one_shot ll"
                if name in ("all_gather", "all_to_all")
                else "double_binary_tree ll"
                for name in USUAL
            },
        ),
        ({"NCCL_ALGO": "Tree"}, {"deterministic": True}, {"broadcast": "double_binary_tree ll"}),
        (
            {"MIRACCL_ALGO": "two_shot"},
            {},
            {"all_reduce": "two_shot ll128", "all_gather": "two_shot ll"},
        ),
    ],
)
def test_nccl_hints(
    settings: dict[str, str], options: dict[str, Any], changes: dict[str, str]
) -> None:
    assert run(emulated_ranks.plans, 3, settings, options)[0] == USUAL | changes


@pytest.mark.parametrize(
    ("algo", "broadcast"),
    [("ring", "one_shot ll"), ("double_binary_tree", "double_binary_tree ll")],
)
def test_an_unsupported_rank_order_is_rejected(algo: str, broadcast: str) -> None:
    answer = run(emulated_ranks.plans, 3, {}, {"algo": algo, "deterministic": True}, 10)[0]
    assert f"all_reduce: cannot use {algo}: deterministic" in answer["all_reduce"]
    assert answer["broadcast"] == broadcast


def test_arrays_with_dlpack_only() -> None:
    run(emulated_ranks.only_dlpack, 2)


@pytest.mark.parametrize("later", [False, True])
def test_a_mismatch_reports_both_messages(later: bool) -> None:
    first, second = run(emulated_faults.mismatch, 2, later)
    sent = "100 x int32 (400 bytes)" if later else "100000 x int32 (400000 bytes)"
    assert second.startswith("CollectiveMismatch")
    assert f"rank 1 receives 100 x float32 (400 bytes) where rank 0 sends {sent}" in second
    assert f"rank 0 sends {sent} where rank 1 receives 100 x float32 (400 bytes)" in first


MESSAGES = [
    "roots of scatter",
    "roots of gather",
    "counts",
    "gather and scatter",
    "gather and barrier",
    "gather and all_reduce",
]


CROSSED = ["all_reduce and recv", "broadcast and recv", "reduce and send"]


@pytest.mark.parametrize(
    "case",
    [*MESSAGES, *CROSSED, "barrier and all_reduce", "gather and send", "gather and recv", "order"],
)
def test_message_collectives_do_not_mix(case: str) -> None:
    """Unmatched messages do not match the next collective; no rank waits for its deadline."""
    answers = run(emulated_faults.mismatched_messages, 3, case)
    assert [answer["type"] for answer in answers] == ["CollectiveMismatch"] * 3, answers


def test_deadlocks_in_calls_that_kernels_do_not_compare_are_reported() -> None:
    texts = {
        "split": "rank 1 waits for rank 0 in split of",
        "broadcast": "rank 0 waits for rank 1 in broadcast #4 (10 x float32, root 1; ",
        "large": "rank 2 waits for rank 0 in send/recv on GPU memory",
        "work": "rank 1 waits for rank 0 in split of",
    }
    env = {
        "MIRACCL_SMS": "4",
        "MIRACCL_EMULATOR_CACHE": str(folder()),
    }  # as many as large messages need
    for answers in run_ranks(
        emulated_faults.deadlocks_in_different_calls, 3, list(texts), env=env, timeout=100.0
    ):
        for answer, text in zip(answers, texts.values(), strict=True):
            assert answer["type"] == "CollectiveMismatch"
            assert "each of these ranks waits for the next one" in answer["text"]
            assert text in answer["text"]


def test_completed_work_is_not_awaited() -> None:
    """Operations behind it do not form a cycle either."""
    assert run(emulated_faults.completed_work, 2) == [[2.0] * 3] * 2


def test_deadlocks_in_copies_and_other_calls_are_reported() -> None:
    env = {"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())}
    for (answer,) in run_ranks(
        emulated_faults.deadlocks_in_different_calls, 2, ["copies"], env=env, timeout=100.0
    ):
        assert answer["type"] == "CollectiveMismatch"
        assert (
            "rank 0 waits for rank 1 in all_gather #6 (10 x float32; one_shot, copy)"
            in answer["text"]
        )


@pytest.mark.parametrize("case", ["recv", "send"])
@pytest.mark.parametrize("nranks", [2, 3])
def test_deadlocks_in_messages_are_reported(nranks: int, case: str) -> None:
    answers = run(emulated_faults.message_deadlocks, nranks, case)
    assert [answer["type"] for answer in answers] == ["CollectiveMismatch"] * nranks, answers
    whom = {"recv": f"a message from rank {nranks - 1}", "send": "rank 1 to receive"}[case]
    for answer in answers:
        assert "each of these ranks waits for the next one: rank 0 waits for" in answer["text"], (
            answers
        )
        assert f"rank 0 waits for {whom}" in answer["text"], answers


def test_an_error_raised_by_a_cpu_call_is_not_raised_again() -> None:
    first, second = run(emulated_faults.reported_on_the_cpu, 2)
    assert (first["type"], second["type"]) == ("CommunicatorAborted", "none")


@pytest.mark.parametrize("case", ["gather", "nothing"])
def test_a_call_during_finalize_of_the_others_is_reported_to_all(case: str) -> None:
    answers = run(emulated_faults.call_during_finalize, 3, case)
    assert [answer["type"] for answer in answers] == ["CollectiveMismatch"] * 3, answers


@pytest.mark.parametrize("case", ["gather", "scatter", "nothing"])
def test_finalize_reports_calls_of_some_ranks_only(case: str) -> None:
    answers = run(emulated_faults.one_more_call, 3, case)
    assert [answer["type"] for answer in answers] == [
        "none" if case == "nothing" else "CollectiveMismatch"
    ] * 3, answers
    if case != "nothing":
        assert all(f"rank 1 called {case}" in answer["text"] for answer in answers), answers


@pytest.mark.parametrize("what", ["gather", "all_reduce"])
def test_a_late_rank_is_not_a_mismatch(what: str) -> None:
    """Operations begun after a rank's deadline do not mean that it is past those of the others."""
    for answer in run(emulated_faults.late_rank, 2, what):
        assert answer["type"] == "CollectiveTimeout", answer
        assert answer["op"] == "gather (root 1)"


CONTROL_PLANE = {"set-up": "the first operation on GPU memory", "window": "empty on GPUs"}


@pytest.mark.parametrize("what", ["all_reduce", "barrier", "recv", "send", "split"])
@pytest.mark.parametrize("where", ["set-up", "window"])
def test_gpu_setup_against_another_operation(where: str, what: str) -> None:
    """GPU setup and windows use the control plane, where another call is a mismatch."""
    for got in run(emulated_faults.set_up_against, 3, what, where):
        assert got["type"] == "CollectiveMismatch", got
        assert f"{CONTROL_PLANE[where]} on rank 1" in got["text"]
        assert f"{'send_recv' if what in ('send', 'recv') else what} on rank" in got["text"]


@pytest.mark.parametrize("what", ["all_reduce", "recv"])
def test_a_finalizing_rank_is_reported_as_exited(what: str) -> None:
    """It waits for the others before it frees GPU memory, but takes part in nothing."""
    got = run(emulated_faults.set_up_against, 3, what, "finalize")
    assert [answer["type"] for answer in got] == ["PeerDied", "none", "PeerDied"]
    assert "rank 1 has left the communicator" in got[0]["text"]


def test_an_abort_ends_the_first_operation_on_gpus() -> None:
    for got in run(emulated_faults.set_up_against, 3, "abort", "set-up"):
        assert got["type"] == "CommunicatorAborted", got
        assert "for a test" in got["text"]


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_waits_end_by_an_error(how: str) -> None:
    answer = run(emulated_faults.alone, 2, how)[1]
    assert answer.startswith("CollectiveTimeout" if how == "timeout" else "CommunicatorAborted")
    assert how == "abort" or "a message from rank 0" in answer


def test_a_deadline_names_the_absent_rank_on_every_rank() -> None:
    answers = run(emulated_faults.absent_rank, 3)
    what = "(1000 x float32, sum; one_shot, ll128)"
    for rank, answer in enumerate(answers):
        assert answer["type"] == "CollectiveTimeout", answer
        assert answer["op"] == f"all_reduce #2 {what}"
        assert f"rank {rank}, all_reduce #2" in answer["text"]
        assert "rank 0 timed out: waited" in answer["text"]
        does, where = zip(
            *(line.split("; its program is at ") for line in answer["graph"]), strict=True
        )
        assert does[0].endswith(f"in all_reduce #2 {what}")
        assert does[1:] == (
            "rank 1: has started it",
            f"rank 2: never arrived at it; its last was all_reduce #1 {what}",
        )
        assert "emulated_faults.py" in where[2]
        assert where[2].endswith(" absent_rank")


@pytest.mark.parametrize("what", ["all_reduce", "recv", "send"])
def test_kernels_that_wait_for_an_exited_rank_end(what: str) -> None:
    answers = run(emulated_faults.waits_for_exiting_rank, 3, what)
    assert [answer["type"] for answer in answers] == ["PeerDied", "none", "PeerDied"]
    for answer in (answers[0], answers[2]):
        assert "rank 1 has left the communicator" in answer["text"]
        assert answer["peer"] == 1


def test_an_abort_ends_the_kernels_of_others() -> None:
    answer = run(emulated_faults.aborted_by_another, 2)[1]
    assert answer.startswith("CommunicatorAborted")
    assert "rank 0 has had enough" in answer


def test_an_exception_in_the_block_ends_kernels() -> None:
    assert run(emulated_faults.left_by_an_exception, 2) == [True, True]


def test_unreported_errors_are_raised_at_the_end() -> None:
    answers = run(emulated_faults.deadline_before_close, 2)
    assert answers[1].startswith("CollectiveTimeout")
    assert "a message from rank 0" in answers[1]


def test_deterministic_sums_use_the_order_of_the_ranks() -> None:
    assert run(emulated_ranks.ordered, 3)[0] == [0.0, 0.0]


def test_copy_streams_are_released_when_a_peer_dies() -> None:
    env = {"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())}
    outcomes = rank_outcomes(emulated_faults.death_between_copies, 2, env=env)
    assert outcomes[0].ok, outcomes[0]


def test_copy_streams_are_released_after_the_deadline() -> None:
    """The barrier kernel ends then; streams, and so the host, would wait for data that never
    arrive.
    """
    env = {"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())}
    for answer in run_ranks(emulated_faults.absent_from_copies, 2, env=env):
        assert answer["type"] == "CollectiveTimeout", answer
        assert answer["op"] == "all_gather #3 (1000 x float32; one_shot, copy)"
        assert (
            "rank 1: never arrived at it; its last was all_gather #2 "
            "(1000 x float32; one_shot, copy)" in answer["graph"][1]
        )


@pytest.mark.parametrize("captured", [False, True])
def test_copies_have_a_deadline_after_the_barrier(captured: bool) -> None:
    env = {"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())}
    first, second = run_ranks(emulated_faults.stopped_before_copies, 2, captured, env=env)
    for answer in (first, second):
        assert answer["type"] == "CollectiveTimeout", answer
        assert "rank 0 timed out: waited 0.3 s for a copy, or space for one," in answer["text"], (
            answer
        )
    assert "stands" in first["graph"][1], "where the program of rank 1 is"
    assert first["op"] == "all_gather #3 (1000 x float32; one_shot, copy)"


@pytest.mark.parametrize("how", ["synchronize", "finalize"])
def test_a_mismatch_in_the_last_operation_is_reported(how: str) -> None:
    """It blocks no rank, and there is no next launch to report it."""
    for answer in run(emulated_faults.mismatch_at_the_end, 3, how):
        assert answer["type"] == "CollectiveMismatch", answer
        assert "called a different operation (number 3 of" in answer["text"]
        assert answer["op"] in [
            f"all_reduce #3 (1000 x float32, {op}; one_shot, ll128)" for op in ("sum", "max")
        ]


def test_kernels_that_wait_for_a_rank_without_a_gpu_side_end() -> None:
    answers = run(emulated_faults.setup_fails_last, 3)
    assert [answer["type"] for answer in answers] == ["PeerDied", "SystemFailure", "PeerDied"]
    for answer in (answers[0], answers[2]):
        assert (
            "rank 1 has left the communicator "
            "(gave up the first operation on GPU memory: cuEventCreate" in answer["text"]
        )
