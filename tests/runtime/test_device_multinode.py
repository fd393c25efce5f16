"""GPU memory over several nodes with a simulated driver: algorithms, segments, graphs, faults."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from miraccl.tools.spawn import RankOutcome
from miraccl.types import DType
from tests.gpu import fake_hosts
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import rank_outcomes, run_ranks

pytestmark = pytest.mark.multiprocess
SMALL = {"MIRACCL_GPU_STAGING": "64K"}
WITH_EMULATOR = {"MIRACCL_EMULATOR_CACHE": str(folder())}
SIZES = [1, 7, fake_hosts.BIG]
HIERARCHICAL = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}


@pytest.mark.parametrize("hosts", ["AB", "ABC", "AABB", "ABAB", "AAB"])
def test_collectives(hosts: str) -> None:
    for used in run_ranks(
        fake_hosts.even_collectives, len(hosts), hosts, SIZES if hosts != "AAB" else [9], env=SMALL
    ):
        assert set(used) >= HIERARCHICAL | {"gather", "scatter", "all_to_all"}
        assert used["gather"] == "staged"
        assert used["all_to_all"] == ("hierarchical" if hosts == "AABB" else "staged")


@pytest.mark.parametrize(
    ("hosts", "sizes", "staging"),
    [
        ("AB", SIZES, "64K"),
        ("AB", [700_001], "4M"),
        ("AABB", SIZES, "64K"),
        ("ABC", [3, 100_001], "1M"),
    ],
)
def test_collectives_over_tcp(hosts: str, sizes: list[int], staging: str) -> None:
    """Staging threads exchange small segments, and large ones of two nodes; else the CPU
    communicator.
    """
    for used in run_ranks(
        fake_hosts.even_collectives,
        len(hosts),
        hosts,
        sizes,
        True,
        env={"MIRACCL_GPU_STAGING": staging},
    ):
        assert set(used) >= HIERARCHICAL


def test_operations_over_udp() -> None:
    """The CPU communicator carries all segments."""
    env = SMALL | {"MIRACCL_NET": "udp"}
    for used in run_ranks(fake_hosts.even_collectives, 2, "AB", SIZES, True, env=env):
        assert set(used) >= HIERARCHICAL
    run_ranks(fake_hosts.sends_and_receives, 2, "AB", True, env=env)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("hosts", ["AABB", "ABAB", "ABC"])
def test_deterministic_sums_are_independent_of_nodes(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.in_rank_order, len(hosts), hosts, apart)


@needs_compiler
@pytest.mark.parametrize("apart", [False, True])
def test_with_emulated_kernels(apart: bool) -> None:
    run_ranks(
        fake_hosts.with_kernels,
        4,
        "AABB",
        apart,
        env=SMALL | {"MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=180.0,
    )


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "env"), [("host", {"NCCL_P2P_DISABLE": "1"}), ("ipc", {"MIRACCL_CUMEM": "0"})]
)
def test_one_host_with_emulated_kernels(kind: str, env: dict[str, str]) -> None:
    run_ranks(
        fake_hosts.one_host,
        2,
        kind,
        env=env | {"MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=180.0,
    )


@pytest.mark.parametrize("hosts", ["AB", "AABB", "ABBA"])
def test_in_place(hosts: str) -> None:
    run_ranks(fake_hosts.in_place, len(hosts), hosts, 30_001, env=SMALL)


@pytest.mark.parametrize(("hosts", "apart"), [("AB", True), ("AAB", False)])
def test_sparse_sums(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.sparse_sums, len(hosts), hosts, apart, env=SMALL)


@pytest.mark.parametrize(
    ("hosts", "apart"), [("AB", False), ("AAB", False), ("AB", True), ("AAB", True)]
)
def test_uneven_collectives(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.uneven_collectives, len(hosts), hosts, apart, env=SMALL)


@needs_compiler
def test_different_window_offsets_per_rank() -> None:
    env = {"MIRACCL_SMS": "0", "MIRACCL_EMULATOR_CACHE": str(folder())}
    run_ranks(fake_hosts.anywhere_in_windows, 4, "AABB", env=env, timeout=120.0)


@pytest.mark.parametrize(("hosts", "apart"), [("AB", True), ("AB", False)])
def test_jobs_of_changing_counts_are_evicted(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.changing_counts, len(hosts), hosts, apart, env=SMALL)


@pytest.mark.parametrize(
    ("hosts", "apart"),
    [("AB", False), ("AABB", False), ("AB", True), ("AABB", True), ("AAB", True)],
)
def test_sends_and_receives(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.sends_and_receives, len(hosts), hosts, apart, env=SMALL)


@pytest.mark.parametrize(
    ("hosts", "kernels"),
    [("AB", False), pytest.param("AABB", True, marks=needs_compiler), ("ABC", False)],
)
def test_recurring_operations(hosts: str, kernels: bool) -> None:
    run_ranks(
        fake_hosts.repeated_operations,
        len(hosts),
        hosts,
        kernels,
        env=SMALL | {"MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=180.0,
    )


@pytest.mark.parametrize(("hosts", "apart"), [("AB", False), ("AABB", False), ("AABB", True)])
def test_graphs(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.graphs, len(hosts), hosts, apart, env=SMALL)


@pytest.mark.parametrize(("hosts", "apart"), [("AB", False), ("AABB", False), ("AB", True)])
def test_special_operators_and_arguments(hosts: str, apart: bool) -> None:
    run_ranks(fake_hosts.special, len(hosts), hosts, apart, env=SMALL)


def test_public_api() -> None:
    run_ranks(fake_hosts.public_way, 2)


def test_forked_child_and_finalized_parent_have_no_gpu() -> None:
    for lines in run_ranks(fake_hosts.has_ended, 2):
        assert len(lines) == 4
        assert all("CommunicatorClosed: " in line and "forked" in line for line in lines[:2])
        assert all("CommunicatorClosed: " in line and "finalized" in line for line in lines[2:])


WAITS = [(False, False), (True, False), (True, True)]
"""Collectives of CPU communicators over shared memory and over TCP, and receives."""


@pytest.mark.parametrize(("apart", "sends"), WAITS)
def test_abort_ends_waits(apart: bool, sends: bool) -> None:
    for text in run_ranks(fake_hosts.abort, 2, "AB", apart, sends):
        assert text.startswith("CommunicatorAborted: ")
        assert "rank 0 aborted" in text


def test_driver_failure_is_reported_to_all() -> None:
    for text in run_ranks(fake_hosts.driver_fails, 2, "AB", False, env=SMALL):
        assert text.startswith("SystemFailure")
        assert "cuMemcpyDtoHAsync" in text


def test_kernel_report_reaches_other_nodes() -> None:
    for text in run_ranks(fake_hosts.kernel_deadline, 4, "AABB", env=SMALL):
        assert text.startswith("CollectiveTimeout")
        assert "rank 3 timed out: waited" in text
        assert "from rank 2 (" in text


@pytest.mark.parametrize(("apart", "sends"), WAITS)
def test_deadline_ends_waits(apart: bool, sends: bool) -> None:
    texts = run_ranks(fake_hosts.waits_alone, 2, "AB", apart, sends)
    assert texts[0].startswith("CollectiveTimeout")
    assert "rank 1" in texts[0]


@pytest.mark.parametrize(
    ("hosts", "apart"), [("AB", False), ("AB", True), ("AABB", False), ("AABB", True)]
)
def test_different_operations_are_reported(hosts: str, apart: bool) -> None:
    n = len(hosts)
    pairs = [
        f"operator is sum on rank {rank}, max on rank {rank + n // 2}" for rank in range(n // 2)
    ]
    for text in run_ranks(fake_hosts.mismatched_operators, n, hosts, apart):
        assert text.startswith("CollectiveMismatch")
        assert any(pair in text for pair in pairs), text


@pytest.mark.parametrize(
    ("hosts", "apart", "count"),
    [("AABB", False, 100), ("AABB", True, 100), ("AB", True, fake_hosts.BIG)],
)
def test_errors_of_parts_name_the_call(hosts: str, apart: bool, count: int) -> None:
    """Shards and segments have other counts than the application's call."""
    for text in run_ranks(fake_hosts.mismatched_counts, len(hosts), hosts, apart, count, env=SMALL):
        named = re.search(r", a part of all_reduce of (\d+) x float32 on rank (\d): ", text)
        assert named is not None, text
        assert named[1] == str(count + 4 * (int(named[2]) < len(hosts) // 2)), text


IN_DIFFERENT_CALLS = {
    "AB": {
        "recv": "collective is send_recv on rank 0, all_reduce on rank 1",
        "send": "collective is send_recv on rank 0, all_reduce on rank 1",
        "root": "collective is barrier on rank 0, broadcast on rank 1",
        "all_to_all_v": "rank 1 waits for rank 0 in all_to_all #",
    },
    "AABB": {
        "recv": "rank 1 waits for rank 0 in reduce_scatter #5 (500 x float32",
        "ring": "rank 2 waits for rank 3 in send/recv on GPU memory",
        "reduce": "rank 1 waits for rank 0 in reduce #",
    },
}


@pytest.mark.parametrize("hosts", ["AB", pytest.param("AABB", marks=needs_compiler)])
def test_deadlocks_between_nodes_are_reported(hosts: str) -> None:
    cases, env = list(IN_DIFFERENT_CALLS[hosts]), WITH_EMULATOR | {"MIRACCL_SMS": "1"}
    for errors in run_ranks(
        fake_hosts.deadlocks_in_different_calls,
        len(hosts),
        hosts,
        cases,
        hosts == "AABB",
        env=env,
        timeout=120.0,
    ):
        for error, text in zip(errors, IN_DIFFERENT_CALLS[hosts].values(), strict=True):
            assert error.startswith("CollectiveMismatch: ")
            assert text in error


@pytest.mark.parametrize("hosts", ["AB", pytest.param("AABB", marks=needs_compiler)])
def test_deadlock_of_gpu_and_cpu_calls_is_reported(hosts: str) -> None:
    calls = [("synchronize", "all_reduce"), ("synchronize", "split"), ("all_reduce", "synchronize")]
    env = WITH_EMULATOR | {"MIRACCL_SMS": "1"}
    for errors in run_ranks(
        fake_hosts.gpu_and_cpu_calls, len(hosts), hosts, calls, hosts == "AABB", env=env
    ):
        for error, (others, odd) in zip(errors, calls, strict=True):
            assert error.startswith("CollectiveMismatch: ")
            one, other = (
                f"waits for rank {rank} in"
                for rank in ((1, 0) if others == "synchronize" else (0, 1))
            )
            assert one in error
            assert other in error
            assert f"in {odd if others == 'synchronize' else others}" in error


def test_late_rank_is_waited_for() -> None:
    run_ranks(fake_hosts.late_rank, 2, "AB")


def test_stalled_network_is_no_deadlock() -> None:
    run_ranks(fake_hosts.stalled_transfer, 3, env={"MIRACCL_SOCKET_BUFFER": "64K"})


@pytest.mark.parametrize(
    ("count", "dtype", "text"),
    [
        (fake_hosts.BIG, DType.INT32, "dtype is float32 on rank 0, int32 on rank 1"),
        (
            fake_hosts.BIG + 1,
            DType.FLOAT32,
            f"count is {fake_hosts.BIG} on rank 0, {fake_hosts.BIG + 1} on rank 1",
        ),
    ],
    ids=["type", "count"],
)
def test_message_mismatch_describes_both_ends(count: int, dtype: DType, text: str) -> None:
    for error in run_ranks(fake_hosts.mismatched_messages, 2, "AB", count, dtype, env=SMALL):
        assert error.startswith("CollectiveMismatch: ")
        assert f"ranks called different operations: {text}" in error


@pytest.mark.parametrize(
    "hosts_and_kernels", ["AB", "AAB", "ABB", pytest.param("AABB kernels", marks=needs_compiler)]
)
def test_recurring_message_collectives(hosts_and_kernels: str) -> None:
    hosts, _, kernels = hosts_and_kernels.partition(" ")
    run_ranks(
        fake_hosts.uneven_again,
        len(hosts),
        hosts,
        bool(kernels),
        env=SMALL | WITH_EMULATOR,
        timeout=180.0,
    )


@pytest.mark.parametrize(
    ("hosts", "case", "texts"),
    [
        ("AB", "roots", ("scatter_v #9 (root 0) on rank 0, scatter_v #9 (root 1) on rank 1",)),
        ("AB", "collectives", ("gather_v #9 (root 1) on rank 0, scatter_v #9 (root 1) on rank 1",)),
        ("AB", "counts", ("rank 0 sent more in all_to_all_v #9 than rank 1 received",)),
        ("AB", "send", ("collective is send_recv on rank 0",)),
        ("AB", "graph", ("gather_v #9 (root 1) on rank 0, scatter_v #9 (root 1) on rank 1",)),
        ("ABC", "roots", ("(root 1)",)),
    ],
)
def test_unmatched_messages_are_not_taken_for_later_ones(
    hosts: str, case: str, texts: tuple[str, ...]
) -> None:
    for error in run_ranks(
        fake_hosts.mismatched_collectives, len(hosts), hosts, False, case, env=SMALL
    ):
        assert error.startswith("CollectiveMismatch: ")
        assert all(text in error for text in texts)


@needs_compiler
@pytest.mark.parametrize(
    ("hosts", "case"),
    [("AABB", "roots"), ("AABB", "collectives"), ("AAB", "counts"), ("AAB", "one message")],
)
def test_unmatched_messages_inside_a_node(hosts: str, case: str) -> None:
    for error in run_ranks(
        fake_hosts.mismatched_collectives,
        len(hosts),
        hosts,
        True,
        case,
        env=SMALL | WITH_EMULATOR,
        timeout=180.0,
    ):
        assert error.startswith("CollectiveMismatch: ")


@needs_compiler
def test_mismatch_inside_a_node_is_reported_at_finalize() -> None:
    env = {"MIRACCL_SMS": "1", "MIRACCL_EMULATOR_CACHE": str(folder())}
    for text in run_ranks(fake_hosts.mismatch_at_the_end, 3, "AAB", env=env):
        assert text.startswith("CollectiveMismatch: ")


@needs_compiler
def test_fault_received_during_a_call_keeps_its_type() -> None:
    for text in run_ranks(
        fake_hosts.reported_between_checks, 2, env={"MIRACCL_EMULATOR_CACHE": str(folder())}
    ):
        assert text.startswith("PeerDied: ")
        assert "rank 5 died: for a test" in text


def test_fault_of_a_call_and_a_staging_thread_is_reported_once() -> None:
    for text in run_ranks(fake_hosts.reported_by_a_staging_thread, 2):
        assert text.startswith("PeerDied: ")
        assert "rank 5 died: for a test" in text


@pytest.mark.parametrize("sends", [False, True])
def test_broken_stream_ends_waits(sends: bool) -> None:
    for text in run_ranks(fake_hosts.broken_connection, 2, sends):
        assert text.startswith("PeerDied")
        assert "has lost its connection to rank" in text


@pytest.mark.parametrize(
    ("hosts", "apart", "sends"), [("AABB", False, False), *(("AB", *waits) for waits in WAITS)]
)
def test_death_ends_waits(hosts: str, apart: bool, sends: bool) -> None:
    _check_death(rank_outcomes(fake_hosts.death, len(hosts), hosts, apart, sends))


@pytest.mark.parametrize(
    ("hosts", "what", "kernels"),
    [
        ("AB", "all_reduce", False),
        ("AB", "recv", False),
        ("AB", "send", False),
        ("ABC", "large", False),
        pytest.param("AABB", "all_reduce", True, marks=needs_compiler),
    ],
)
def test_exited_rank_is_not_waited_for(hosts: str, what: str, kernels: bool) -> None:
    env = {"MIRACCL_SMS": "1", "MIRACCL_EMULATOR_CACHE": str(folder())}
    texts = run_ranks(fake_hosts.exiting_rank, len(hosts), hosts, what, kernels, env=env)
    assert texts[0].startswith("PeerDied: ")
    assert f"rank {len(hosts) - 1} has left the communicator" in texts[0]
    assert not texts[-1]


@needs_compiler
def test_death_ends_waiting_kernels() -> None:
    env = SMALL | {"MIRACCL_EMULATOR_CACHE": str(folder())}
    _check_death(
        rank_outcomes(fake_hosts.death, 4, "AABB", True, False, True, env=env, timeout=120.0)
    )


def _check_death(outcomes: Sequence[RankOutcome]) -> None:
    last = len(outcomes) - 1
    for outcome in outcomes[:last]:
        assert not outcome.error
        assert str(outcome.value).startswith("PeerDied")
        assert f"rank {last} died" in str(outcome.value)
