"""Errors of a GPU communicator for kernel reports and control-plane events."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miraccl.bootstrap import HUB, Notice, PeerLost
from miraccl.diagnosis.error_codec import encode_error
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, PeerDied
from miraccl.executor.cuda import layout, message_collectives
from miraccl.runtime.gpu.flight_recorder import MessageRecord, OpLog, RecorderSnapshot
from miraccl.runtime.gpu.kernel_faults import EXIT_NOTICE, FAULT_NOTICE, DeviceFaults
from miraccl.runtime.multinode.faults import MultiNodeFaults
from miraccl.types import Collective

SCATTER, GATHER = (
    message_collectives.op_signature(Collective.SCATTER, 1, (4, 4)),
    message_collectives.op_signature(Collective.GATHER, 2, (4, 4)),
)


def name(number: int, signature: int) -> str:
    return f"launch #{number}" if number else message_collectives.describe_signature(signature)


def op_log(
    launch: int = 0, move: int = 0, before: int = 0, what: int = SCATTER, signature: int = 0
) -> OpLog:
    """Return the log of a rank with these last operations.

    The message collective follows ``before`` launches.
    """
    launches = dict.fromkeys(range(launch, max(0, launch - 4), -1), signature)
    entries = (
        {move: MessageRecord(message_collectives.op_tag(move, before, what), what, before)}
        if move
        else {}
    )
    return OpLog(launches, entries, launch, move)


class FaultsUnderTest:
    """Faults with the host words and a session that delivers events."""

    def __init__(self, words: Any = None) -> None:
        self.notices: list[Any] = []
        self.snapshot: RecorderSnapshot | None = None
        self.stopped = False
        self.words = np.zeros(layout.HOST_BYTES // 4, np.uint32) if words is None else words
        self.words_at_notice: list[Any] = []
        listen = functools.partial(setattr, self, "deliver")
        self.answers: dict[int, dict[str, Any]] = {}
        session: Any = types.SimpleNamespace(
            rank=0,
            nranks=4,
            on_event=listen,
            notify=self.notify,
            gone=frozenset,
            request_status=lambda *_, **__: self.answers,
        )
        self.session = session
        self.faults = DeviceFaults(
            session,
            self.words,
            1.0,
            read_snapshot=lambda: self.snapshot,
            describe_launch=name,
            rejected_size=lambda _: None,
            stopped=lambda: self.stopped,
        )

    def notify(self, notice: Any) -> None:
        self.notices.append(notice)
        self.words_at_notice.append(self.words.copy())

    def kernel_report(self, error: int, peer: int) -> None:
        (
            self.words[layout.HOST_PEER],
            self.words[layout.HOST_AWAITED],
            self.words[layout.HOST_ERROR],
        ) = peer, layout.AWAIT_MESSAGE, error

    deliver: Any = None


LOST = PeerLost(rank=1, reason="it ended")
ABORTED = Notice(
    from_rank=1,
    payload={
        FAULT_NOTICE: encode_error(CommunicatorAborted("rank 1 aborted the communicator: enough"))
    },
)


@pytest.mark.parametrize("event", [LOST, ABORTED])
def test_mismatch_is_reported_after_peer_exit(event: Any) -> None:
    """The peer may have detected the mismatch first, raised it and exited."""
    rank = FaultsUnderTest()
    rank.deliver(event)
    rank.kernel_report(layout.ERROR_MISMATCH, 1)
    with pytest.raises(CollectiveMismatch, match="rank 1 called a different operation"):
        rank.faults.check("all_reduce")


@pytest.mark.parametrize(("event", "error"), [(LOST, PeerDied), (ABORTED, CommunicatorAborted)])
def test_peer_fault_ends_waits_and_is_raised(event: Any, error: type[Exception]) -> None:
    rank = FaultsUnderTest()
    rank.faults.check()
    rank.deliver(event)
    assert rank.words[layout.HOST_ABORT] == 1
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)  # a deadline that passed meanwhile is no news
    with pytest.raises(error):
        rank.faults.check("all_reduce")


def test_exited_rank_is_visible_to_kernels() -> None:
    rank, other = FaultsUnderTest(), FaultsUnderTest()
    other.faults.announce_exit()
    (notice,) = other.notices
    for peer in (1, 3):
        rank.deliver(Notice(from_rank=peer, payload=notice))
    assert (rank.words[layout.HOST_ABORT], rank.words[layout.HOST_EXITED]) == (0, 0b1010)
    rank.faults.check()
    rank.kernel_report(layout.ERROR_EXITED, 3)
    with pytest.raises(PeerDied, match="rank 3 has left the communicator") as raised:
        rank.faults.check("recv")
    assert (raised.value.op, raised.value.peer) == ("recv", 3)


def test_message_deadline() -> None:
    rank = FaultsUnderTest()
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="from rank 1") as raised:
        rank.faults.check("recv")
    assert (raised.value.op, raised.value.graph) == (
        "recv",
        ("rank 0: waits for a message from rank 1",),
    )


def test_deadline_reports_application_locations() -> None:
    """Locations are reported for ranks without op logs, too."""
    rank = FaultsUnderTest()
    threads = [{"where": "train.py:7 step"}]
    rank.answers = {
        0: {"answered": True, "threads": threads},
        1: {"answered": True, "threads": threads},
        2: {"answered": False, "reason": "it is late"},
        3: {"answered": True, "closed": True},
    }
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout) as raised:
        rank.faults.check("recv")
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 1; its program is at train.py:7 step",
        "rank 1: its program is at train.py:7 step",
        "rank 2: did not answer (it is late)",
        "rank 3: did not answer (no status)",
    )


def test_death_during_status_query_is_reported() -> None:
    rank = FaultsUnderTest()
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)
    rank.session.request_status = lambda *_, **__: rank.deliver(LOST) or {}
    assert isinstance(rank.faults.unreported(), PeerDied), "finalize raises it"
    with pytest.raises(PeerDied):
        rank.faults.check("recv")
    assert rank.notices == []


def test_deadline_reports_progress_of_ranks() -> None:
    rank = FaultsUnderTest()
    rank.snapshot = RecorderSnapshot(op_log(7), {1: op_log(8), 2: op_log(6), 3: op_log()})
    rank.words[layout.HOST_LAUNCH] = 7
    rank.kernel_report(layout.ERROR_TIMEOUT, 2)
    with pytest.raises(CollectiveTimeout, match="rank 2 has not arrived") as raised:
        rank.faults.check("barrier")
    assert raised.value.op == "launch #7"
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 2 in launch #7",
        "rank 1: has started it",
        "rank 2: never arrived at it; its last was launch #6",
        "rank 3: never arrived at it; it has not run any operation",
    )


def test_kernel_report_is_propagated_once() -> None:
    rank, other = FaultsUnderTest(), FaultsUnderTest()
    rank.snapshot = RecorderSnapshot(op_log(7), {1: op_log(7)})
    rank.words[layout.HOST_LAUNCH] = 7
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="rank 1 has started"):
            rank.faults.check()
    (notice,) = rank.notices
    other.deliver(Notice(from_rank=0, payload=notice))
    assert other.words[layout.HOST_ABORT] == 1
    with pytest.raises(CollectiveTimeout, match="rank 0 timed out: waited") as raised:
        other.faults.check("all_reduce")
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 1 in launch #7",
        "rank 1: has started it",
    )
    assert other.notices == []


def test_op_logs_with_wrapped_numbers() -> None:
    snapshot = RecorderSnapshot(op_log(), {1: op_log(3), 2: op_log(2**32 - 3)})
    assert snapshot.has_begun(1, 2**32 - 2)
    assert not snapshot.has_begun(2, 1)


def test_deadline_in_message_collective() -> None:
    rank = FaultsUnderTest()
    rank.snapshot = RecorderSnapshot(
        op_log(3, 2, 3), {1: op_log(3, 2, 3), 2: op_log(3, 1, 0, GATHER), 3: op_log(1)}
    )
    rank.words[layout.HOST_SIGNATURE] = SCATTER
    rank.kernel_report(layout.ERROR_TIMEOUT, 2)
    with pytest.raises(
        CollectiveTimeout, match="rank 2 has not arrived at this operation"
    ) as raised:
        rank.faults.check()
    assert raised.value.op == "scatter (root 1)"
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 2 in scatter (root 1)",
        "rank 1: has started it",
        "rank 2: never arrived at it; its last was launch #3",
        "rank 3: never arrived at it; its last was launch #1",
    )


def test_message_deadline_reports_last_operations() -> None:
    rank = FaultsUnderTest()
    rank.snapshot = RecorderSnapshot(op_log(3, 2, 3), {1: op_log(4, 2, 3), 2: op_log(3, 2, 3)})
    rank.kernel_report(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="rank 1 has not arrived at this message") as raised:
        rank.faults.check("recv")
    assert raised.value.graph[1:] == (
        "rank 1: its last was launch #4",
        "rank 2: its last was scatter (root 1)",
    )


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        (op_log(7, 3, 7), op_log(7, 3, 7), None),
        (op_log(7, 3, 7), op_log(7, 3, 7, GATHER), (0, SCATTER)),
        (op_log(7, 3, 7), op_log(7, 3, 6), (0, SCATTER)),  # one launch earlier
        (op_log(7), op_log(7, signature=5), (7, 0)),
        (op_log(7), op_log(6, signature=5), (6, 0)),
        (op_log(7), op_log(1, signature=5), None),  # nobody remembers
        (op_log(7, 3, 7), op_log(7, 2, 7), None),  # not there yet
        (op_log(7, 3, 7), op_log(8, 2, 7), (0, SCATTER)),  # past it
        (op_log(8, 2, 7), op_log(7, 3, 7), (8, 0)),  # the other way round
        (op_log(9, 2, 7), op_log(7, 3, 7), (8, 0)),
        (op_log(20, 2, 7), op_log(7, 3, 7), (20, 0)),
        (op_log(8, 3, 7), op_log(7, 2, 6), None),  # two behind
        (op_log(8, 2, 6), op_log(9, 4, 9), None),
        (op_log(), op_log(), None),
    ],
)
def test_reordered_operations_are_detected(
    own: OpLog, other: OpLog, found: tuple[int, int] | None
) -> None:
    snapshot = (
        RecorderSnapshot(own, {2: op_log(7), 3: other})
        if own.last_message_op == 0
        else RecorderSnapshot(own, {3: other})
    )
    assert snapshot.find_mismatch() == (None if found is None else (3, *found))


def test_operations_after_failed_wait_are_ignored() -> None:
    """After a missed deadline a rank's launches continue, its message collectives do not."""
    own, other = op_log(9, 3, 7), op_log(8, 4, 8)
    assert RecorderSnapshot(own, {1: other}).find_mismatch() == (1, 9, 0)
    assert RecorderSnapshot(own, {1: other}).find_mismatch(0) is None
    assert RecorderSnapshot(own, {1: other}).find_mismatch(9) == (1, 9, 0)
    assert RecorderSnapshot(other, {1: own}).find_mismatch(0) == (1, 0, SCATTER)
    assert RecorderSnapshot(other, {1: own}, lambda peer: peer == 1).find_mismatch(0) is None


def test_all_caught_up_if_no_peer_is_behind() -> None:
    assert RecorderSnapshot(op_log(7, 3, 7), {1: op_log(7, 3, 7), 2: op_log(9, 4, 8)}).all_caught_up
    assert not RecorderSnapshot(
        op_log(7, 3, 7), {1: op_log(7, 3, 7), 2: op_log(6, 3, 6)}
    ).all_caught_up
    assert not RecorderSnapshot(
        op_log(7, 3, 7), {1: op_log(7, 2, 7), 2: op_log(7, 3, 7)}
    ).all_caught_up


@pytest.mark.parametrize("error", [layout.ERROR_TIMEOUT, layout.ERROR_EXITED])
def test_failed_wait_explained_by_op_logs_is_a_mismatch(error: int) -> None:
    rank = FaultsUnderTest()
    rank.snapshot = RecorderSnapshot(op_log(8, 2, 7), {1: op_log(7, 3, 7), 2: op_log(8, 2, 7)})
    rank.words[layout.HOST_LAUNCH] = 8
    rank.kernel_report(error, 2)
    with pytest.raises(
        CollectiveMismatch, match=r"rank 1 called a different operation \(number 8"
    ) as raised:
        rank.faults.check()
    assert (raised.value.op, raised.value.peer) == ("launch #8", 1)


class DelayedWords(np.ndarray[Any, Any]):
    """Host words of which the write to ``HOST_ABORT`` is delayed by a callback."""

    before_abort_write: Any

    def __setitem__(self, place: Any, value: Any) -> None:
        if place == layout.HOST_ABORT:
            self.before_abort_write()
        super().__setitem__(place, value)


def with_delayed_words(callback: Callable[[FaultsUnderTest], None]) -> FaultsUnderTest:
    words = np.zeros(layout.HOST_BYTES // 4, np.uint32).view(DelayedWords)
    rank = FaultsUnderTest(words)
    words.before_abort_write = lambda: callback(rank)
    return rank


def start_for(action: Callable[[], None], limit: float) -> threading.Thread:
    """Start a thread and give it ``limit`` seconds."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(limit)
    return thread


@pytest.mark.parametrize("hears", [True, False])
def test_waits_end_before_fault_is_visible(hears: bool) -> None:
    """An application that continues after the fault would be compared with peers unaware of it."""
    waiting: list[threading.Thread] = []
    seen: list[tuple[type[Exception], bool]] = []

    def check(rank: FaultsUnderTest) -> None:
        try:
            rank.faults.check()
        except (PeerDied, CommunicatorAborted) as error:
            seen.append((type(error), rank.faults.broken))

    rank = with_delayed_words(lambda rank: waiting.append(start_for(lambda: check(rank), 0.05)))
    rank.deliver(LOST) if hears else rank.faults.set_fault(CommunicatorAborted("enough"))
    waiting[0].join()
    assert seen == [(PeerDied if hears else CommunicatorAborted, True)]


def test_words_are_not_written_after_close() -> None:
    order: list[str] = []

    def end(rank: FaultsUnderTest) -> None:
        rank.faults.close()
        order.append("ended")

    def close(rank: FaultsUnderTest) -> None:
        closing.append(start_for(lambda: end(rank), 0.05))
        order.append("written")

    closing: list[threading.Thread] = []
    rank = with_delayed_words(close)
    rank.deliver(LOST)
    closing[0].join()
    rank.deliver(ABORTED)
    rank.deliver(Notice(from_rank=1, payload={EXIT_NOTICE: True}))
    rank.faults.set_fault(CommunicatorAborted("too late"))
    assert rank.words[layout.HOST_EXITED] == 0
    assert order == ["written", "ended"]


def test_abort_notifies_peers_before_waking_waits() -> None:
    """A woken application may exit at once."""
    rank = FaultsUnderTest()
    rank.faults.abort("enough")
    assert [words[layout.HOST_ABORT] for words in rank.words_at_notice] == [0]
    assert rank.faults.broken


def test_launcher_death_is_not_a_rank() -> None:
    session: Any = types.SimpleNamespace(rank=0, nranks=2)
    multi_node, rank = (
        MultiNodeFaults(session, release_waits=lambda _: None, abort_network=lambda _: None),
        FaultsUnderTest(),
    )
    for hear, check in ((multi_node.on_event, multi_node.check), (rank.deliver, rank.faults.check)):
        hear(PeerLost(rank=HUB, reason="it was killed"))
        with pytest.raises(PeerDied, match="the control plane was lost: it was killed"):
            check("all_reduce")


def test_multi_node_fault_notifies_peers_first() -> None:
    order: list[str] = []

    def note(kind: str) -> None:
        order.append(f"{kind}, {'broken' if faults.fault else 'whole'}")

    session: Any = types.SimpleNamespace(rank=0, nranks=2, notify=lambda _: note("notified"))
    faults = MultiNodeFaults(
        session, release_waits=lambda _: note("released"), abort_network=lambda _: None
    )
    faults.fail(CollectiveTimeout("late"))
    faults.fail(CollectiveTimeout("later"))
    assert order == ["notified, whole", "released, broken"]
