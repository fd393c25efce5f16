"""Unmatched messages of collectives on GPU memory are reported at finalize."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import numpy as np
import pytest

from miraccl.bootstrap import single_rank_session
from miraccl.diagnosis.fault_machine import FaultReceived
from miraccl.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
)
from miraccl.executor.cpu.kernels.nogil import offsets
from miraccl.executor.cpu.lower import signature
from miraccl.runtime.multinode.faults import MultiNodeFaults
from miraccl.runtime.multinode.unmatched import MessageCounters, UnmatchedDetector, find_unmatched
from miraccl.types import Collective, DType, RedOp
from tests.gpu import unmatched_ranks
from tests.gpu.emulator import folder, needs_compiler
from tests.support.ranks import run_ranks

EMULATED = {"MIRACCL_EMULATOR_CACHE": str(folder()), "MIRACCL_SMS": "2"}
COUNT_MISMATCH = "CollectiveMismatch: message count mismatch: "
OP_MISMATCH = "CollectiveMismatch: ranks called different operations: "
COUNTS = COUNT_MISMATCH + "rank 0 sent more in all_to_all_v #1 than rank 1 received"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("hosts", "case", "before", "text"),
    [
        ("AB", "counts", 0, COUNTS),
        ("AB", "counts", 3, COUNTS.replace("#1", "#10")),
        ("AB", "counts in a row", 0, COUNTS.replace("#1", "#2")),
        ("ABC", "counts", 0, COUNTS.replace("rank 1", "rank 2")),
        (
            "AB",
            "scatter alone",
            0,
            COUNT_MISMATCH + "rank 0 sent in scatter_v #1 (root 0), which rank 1 did not call",
        ),
        (
            "AB",
            "gather alone",
            3,
            COUNT_MISMATCH + "rank 1 sent in gather_v #10 (root 0), which rank 0 did not call",
        ),
        (
            "AB",
            "roots of scatter",
            0,
            OP_MISMATCH + "scatter_v #1 (root 0) on rank 0, scatter_v #1 (root 1) on rank 1",
        ),
        (
            "ABC",
            "roots of scatter",
            1,
            OP_MISMATCH + "scatter_v #4 (root 0) on rank 0, scatter_v #4 (root 1) on rank 1",
        ),
        (
            "AB",
            "roots of gather",
            1,
            OP_MISMATCH + "gather_v #4 (root 1) on rank 0, gather_v #4 (root 0) on rank 1",
        ),
        (
            "AB",
            "graph",
            0,
            COUNT_MISMATCH + "rank 0 sent in scatter_v #1 (root 0), which rank 1 did not call",
        ),
        (
            "AB",
            "a plain send before",
            0,
            COUNT_MISMATCH + "rank 0 sent in scatter_v #1 (root 0), which rank 1 did not call",
        ),
        pytest.param(
            "AAB",
            "counts",
            1,
            COUNTS.replace("rank 1", "rank 2").replace("#1", "#4"),
            marks=needs_compiler,
        ),
    ],
)
def test_unmatched_messages_over_nodes_are_reported_at_finalize(
    hosts: str, case: str, before: int, text: str
) -> None:
    for answer in run_ranks(
        unmatched_ranks.errors_at_finalize, len(hosts), hosts, case, before, env=EMULATED
    ):
        assert answer == (text, "")


@pytest.mark.multiprocess
@needs_compiler
@pytest.mark.parametrize(
    "env", [{}, {"NCCL_P2P_DISABLE": "1"}, {"MIRACCL_CUMEM": "0"}], ids=["vmm", "host", "ipc"]
)
@pytest.mark.parametrize(
    ("case", "before", "text"),
    [
        ("counts", 0, "rank 0 sent more in all_to_all_v than rank 2 received"),
        ("counts", 12, "rank 0 sent more in all_to_all_v than rank 2 received"),
        ("scatter alone", 5, "rank 0 called scatter (root 0), but rank"),
        ("gather alone", 0, "rank 2 called gather (root 0), but rank"),
        ("graph", 0, "rank 0 called scatter (root 0), but rank"),
    ],
)
def test_unmatched_messages_on_one_host_are_reported_at_finalize(
    env: dict[str, str], case: str, before: int, text: str
) -> None:
    for said, again in run_ranks(
        unmatched_ranks.errors_at_finalize, 3, "", case, before, env=EMULATED | env
    ):
        assert text in said
        assert not again


@pytest.mark.multiprocess
@needs_compiler
def test_unmatched_messages_inside_one_of_several_nodes() -> None:
    answers = run_ranks(
        unmatched_ranks.errors_at_finalize, 3, "AAB", "counts inside a host", 1, env=EMULATED
    )
    assert answers == 2 * [
        (COUNT_MISMATCH + "rank 0 sent more in all_to_all_v than rank 1 received", "")
    ] + [("", "")]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("hosts", "case", "text"),
    [
        ("AB", "counts", COUNTS.replace("#1", "#7")),
        (
            "ABC",
            "counts in a row",
            COUNT_MISMATCH + "rank 0 sent more in all_to_all_v #7 than rank 2 received",
        ),
        (
            "AB",
            "roots of gather",
            OP_MISMATCH + "gather_v #7 (root 1) on rank 0, gather_v #7 (root 0) on rank 1",
        ),
    ],
)
def test_synchronize_reports_unmatched_messages(hosts: str, case: str, text: str) -> None:
    for answer in run_ranks(
        unmatched_ranks.errors_at_synchronize, len(hosts), hosts, case, env=EMULATED
    ):
        assert answer == (text, "")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "hosts",
    [
        "AB",
        "ABC",
        pytest.param("", marks=needs_compiler),
        pytest.param("AAB", marks=needs_compiler),
    ],
)
def test_correct_programs_have_no_reports(hosts: str) -> None:
    run_ranks(unmatched_ranks.correct_programs, len(hosts) or 3, hosts, env=EMULATED, timeout=120.0)


@pytest.mark.multiprocess
def test_finalize_reports_fault_of_staging_thread() -> None:
    answers = [
        text for text, _ in run_ranks(unmatched_ranks.found_by_staging_thread, 2, "mismatch")
    ]
    assert any(answers)
    assert all(not text or "operator is sum on rank 0, max on rank 1" in text for text in answers)
    (text, _), other = run_ranks(unmatched_ranks.found_by_staging_thread, 2, "deadline")
    assert text.startswith("CollectiveTimeout: ")
    assert other == ("", "")


@pytest.mark.multiprocess
@pytest.mark.parametrize("how", ["told", "aborted"])
def test_finalize_repeats_no_report_and_no_abort(how: str) -> None:
    for at_the_end, before in run_ranks(unmatched_ranks.found_by_staging_thread, 2, how):
        assert not at_the_end
        assert before.startswith("CollectiveMismatch: ") == (how == "told")


@pytest.mark.parametrize(
    ("error", "before", "stopped", "unreported"),
    [
        (CollectiveTimeout("for a test"), None, False, "error"),
        (CommunicatorAborted("for a test"), None, False, ""),
        (CollectiveTimeout("for a test"), PeerDied("reported by a peer"), False, ""),
        (CollectiveTimeout("for a test"), PeerDied("reported by a peer"), True, "before"),
        (
            CollectiveTimeout("for a test"),
            CollectiveMismatch("reported by a peer"),
            False,
            "before",
        ),
    ],
)
def test_unreported_faults(
    error: MiracclError, before: MiracclError | None, stopped: bool, unreported: str
) -> None:
    """Faults of staging threads, and peers' mismatches and faults that interrupted a wait, once."""
    faults = MultiNodeFaults(
        single_rank_session(), release_waits=lambda _: None, abort_network=lambda _: None
    )
    assert faults.unreported(lambda: stopped, False) is None
    if before is not None:
        faults.handle(FaultReceived(error=before))
    faults.fail_staging(error)
    faults.fail_staging(PeerDied("the other lane, later"))
    assert (
        faults.unreported(lambda: stopped, False)
        is {"error": error, "before": before, "": None}[unreported]
    )
    assert faults.unreported(lambda: stopped, True) is (error if unreported == "error" else None), (
        "the application knows the peers' faults"
    )
    with pytest.raises(MiracclError):
        faults.check()
    assert faults.unreported(lambda: stopped, False) is None


# ---- what is compared


def signature_without_number(collective: Collective, root: int = 0) -> int:
    return signature(collective, DType.UINT8, RedOp.SUM, root, 0)


def counters(
    counted: int,
    peers: list[tuple[int, int, int]],
    kind: int = signature_without_number(Collective.SCATTER),
) -> MessageCounters:
    """Return the counters of a rank that has run ``counted`` collectives of one ``kind``."""
    words = np.full(offsets.COLLECTIVES_BYTES // 8, kind, np.int64)
    words[offsets.COUNTED // 8] = counted
    return MessageCounters.from_bytes(MessageCounters(words, np.array(peers, np.int64)).to_bytes())


def test_comparison_of_message_counters() -> None:
    none, more = (0, 0, 0), (3, 2, 0)
    assert (
        find_unmatched([counters(2, [none, (3, 2, 1)]), counters(2, [(1, 2, 3), none])], 0) is None
    )
    assert find_unmatched([counters(2, [none, more]), None], 0) is None
    assert find_unmatched([None, None], 1) is None
    for rank, peer in ((0, 1), (1, 0)):
        error = find_unmatched([counters(2, [none, more]), counters(2, [(0, 0, 2), none])], rank)
        assert error is not None
        assert (error.rank, error.peer) == (rank, peer)
        assert "rank 0 sent more in scatter_v #2 (root 0) than rank 1 received" in str(error)
    assert "which rank 1 did not call" in str(
        find_unmatched([counters(2, [none, more]), counters(1, [(0, 0, 2), none])], 0)
    )
    long_ago = find_unmatched(
        [
            counters(2 + offsets.RECENT_SIZE, [none, more]),
            counters(2 + offsets.RECENT_SIZE, [(0, 0, 2), none]),
        ],
        0,
    )
    assert "rank 0 sent more in collective #2 than rank 1 received" in str(long_ago)
    another = counters(2, [(0, 0, 2), none], signature_without_number(Collective.SCATTER, 1))
    assert "scatter_v #2 (root 0) on rank 0, scatter_v #2 (root 1) on rank 1" in str(
        find_unmatched([counters(2, [none, more]), another], 0)
    )


@pytest.mark.parametrize(
    ("kind", "behind", "counted", "found"),
    [
        (Collective.SCATTER, 0, 5, True),
        (Collective.SCATTER, 1, 5, True),
        (Collective.SCATTER, 4, offsets.MARK_MASK + 3, True),
        (Collective.SCATTER, 100, 1 << 20, True),
        (Collective.SCATTER, -1, 5, False),  # this rank is still to come to it
        (Collective.SCATTER, -3, offsets.MARK_MASK, False),
        (Collective.SEND_RECV, 5, 5, False),
        (Collective.SCATTER, 0, 0, False),
    ],
)
def test_poll_of_leftover_data(kind: Collective, behind: int, counted: int, found: bool) -> None:
    here, there = socket.socketpair()
    with here, there:
        detector, words = UnmatchedDetector(1, {0: here}), counters(counted, []).collectives.copy()
        streams = {0: np.zeros((2, offsets.STREAM_BYTES // 8), np.int64)}
        assert detector.poll(words, streams, lambda: True) is None
        number = 0 if kind is Collective.SEND_RECV else counted - behind & offsets.MARK_MASK
        header = struct.pack(
            "<qq", signature_without_number(kind) | 1, 4 | number << offsets.MARK_SHIFT
        )
        there.send(header[:15])
        assert detector.poll(words, streams, lambda: True) is None
        there.send(header[15:] + b"data")
        error = detector.poll(words, streams, lambda: True)
        assert (error is not None) == found
        if error is not None:
            assert (
                f"rank 0 sent more in scatter_v #{counted - behind} (root 0) than rank 1 received"
                in str(error)
            )
        assert here.recv(100) == header + b"data"


def begin_during_poll(
    streams: dict[int, np.ndarray], words: np.ndarray, what: str
) -> Callable[[], bool]:
    """Return a staging thread's state that changes while it is polled."""
    answers = iter([what != "ends", what != "waits"])

    def between() -> bool:
        if what == "message":
            streams[0][1][offsets.MESSAGES_BEGUN // 8] += 1
        if what == "collective":
            words[offsets.COUNTED // 8] += 1
        return next(answers)

    return between


@pytest.mark.parametrize("what", ["message", "collective", "waits", "ends"])
def test_poll_ignores_streams_in_use(what: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        detector, words = UnmatchedDetector(1, {0: here}), counters(5, []).collectives.copy()
        streams = {0: np.zeros((2, offsets.STREAM_BYTES // 8), np.int64)}
        there.send(
            struct.pack(
                "<qq", signature_without_number(Collective.SCATTER) | 1, 5 << offsets.MARK_SHIFT
            )
        )
        assert detector.poll(words, streams, begin_during_poll(streams, words, what)) is None
        assert detector.poll(words, streams, lambda: True) is not None
