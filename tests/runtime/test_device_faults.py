"""What a communicator on GPU memory raises for what its kernels found and what the control plane told."""

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
from miraccl.runtime.gpu.faults import EXIT_NOTICE, FAULT_NOTICE, DeviceFaults
from miraccl.runtime.gpu.flight_recorder import MessageRecord, OpLog, RecorderSnapshot
from miraccl.runtime.multinode.faults import MultiNodeFaults
from miraccl.types import Collective

SCATTER, GATHER = (
    message_collectives.op_signature(Collective.SCATTER, 1, (4, 4)),
    message_collectives.op_signature(Collective.GATHER, 2, (4, 4)),
)


def name(number: int, signature: int) -> str:
    return f"launch #{number}" if number else message_collectives.describe_signature(signature)


def said(
    launch: int = 0, move: int = 0, before: int = 0, what: int = SCATTER, signature: int = 0
) -> OpLog:
    """What a rank says whose last operations are these; the collective of messages came after ``before`` launches."""
    launches = dict.fromkeys(range(launch, max(0, launch - 4), -1), signature)
    entries = (
        {move: MessageRecord(message_collectives.op_tag(move, before, what), what, before)}
        if move
        else {}
    )
    return OpLog(launches, entries, launch, move)


class Told:
    """Faults with the words of a kernel, and the way by which the control plane tells."""

    def __init__(self, words: Any = None) -> None:
        self.notices: list[Any] = []
        self.boards: RecorderSnapshot | None = None
        self.stopped = False
        self.words = np.zeros(layout.HOST_BYTES // 4, np.uint32) if words is None else words
        self.words_when_told: list[Any] = []
        listen = functools.partial(setattr, self, "hear")
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
            read_snapshot=lambda: self.boards,
            describe_launch=name,
            rejected_size=lambda _: None,
            stopped=lambda: self.stopped,
        )

    def notify(self, notice: Any) -> None:
        self.notices.append(notice)
        self.words_when_told.append(self.words.copy())

    def kernel(self, error: int, peer: int) -> None:
        (
            self.words[layout.HOST_PEER],
            self.words[layout.HOST_AWAITED],
            self.words[layout.HOST_ERROR],
        ) = peer, layout.AWAIT_MESSAGE, error

    hear: Any = None


LOST = PeerLost(rank=1, reason="it ended")
ABORTED = Notice(
    from_rank=1,
    payload={
        FAULT_NOTICE: encode_error(CommunicatorAborted("rank 1 aborted the communicator: enough"))
    },
)


@pytest.mark.parametrize("event", [LOST, ABORTED])
def test_a_mismatch_is_told_though_the_peer_has_gone(event: Any) -> None:
    """The peer may have found it first, raised it and ended."""
    told = Told()
    told.hear(event)
    told.kernel(layout.ERROR_MISMATCH, 1)
    with pytest.raises(CollectiveMismatch, match="rank 1 called a different operation"):
        told.faults.check("all_reduce")


@pytest.mark.parametrize(("event", "error"), [(LOST, PeerDied), (ABORTED, CommunicatorAborted)])
def test_what_was_heard_ends_waits_and_is_told(event: Any, error: type[Exception]) -> None:
    told = Told()
    told.faults.check()
    told.hear(event)
    assert told.words[layout.HOST_ABORT] == 1
    told.kernel(layout.ERROR_TIMEOUT, 1)  # a deadline that passed meanwhile is no news
    with pytest.raises(error):
        told.faults.check("all_reduce")


def test_a_rank_that_has_left_is_known_to_kernels() -> None:
    told, other = Told(), Told()
    other.faults.announce_exit()
    (notice,) = other.notices
    for peer in (1, 3):
        told.hear(Notice(from_rank=peer, payload=notice))
    assert (told.words[layout.HOST_ABORT], told.words[layout.HOST_EXITED]) == (0, 0b1010)
    told.faults.check()
    told.kernel(layout.ERROR_EXITED, 3)
    with pytest.raises(PeerDied, match="rank 3 has left the communicator") as raised:
        told.faults.check("recv")
    assert (raised.value.op, raised.value.peer) == ("recv", 3)


def test_a_deadline_of_a_message() -> None:
    told = Told()
    told.kernel(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="from rank 1") as raised:
        told.faults.check("recv")
    assert (raised.value.op, raised.value.graph) == (
        "recv",
        ("rank 0: waits for a message from rank 1",),
    )


def test_a_deadline_says_where_programs_are() -> None:
    """Also of ranks that have left nothing on a board."""
    told = Told()
    threads = [{"where": "train.py:7 step"}]
    told.answers = {
        0: {"answered": True, "threads": threads},
        1: {"answered": True, "threads": threads},
        2: {"answered": False, "reason": "it is late"},
        3: {"answered": True, "closed": True},
    }
    told.kernel(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout) as raised:
        told.faults.check("recv")
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 1; its program is at train.py:7 step",
        "rank 1: its program is at train.py:7 step",
        "rank 2: did not answer (it is late)",
        "rank 3: did not answer (no status)",
    )


def test_a_death_that_is_heard_while_programs_are_asked_is_what_is_told() -> None:
    told = Told()
    told.kernel(layout.ERROR_TIMEOUT, 1)
    told.session.request_status = lambda *_, **__: told.hear(LOST) or {}
    assert isinstance(told.faults.unreported(), PeerDied), (
        "what finalize raises, if nobody has asked before"
    )
    with pytest.raises(PeerDied):
        told.faults.check("recv")
    assert told.notices == []


def test_a_deadline_says_who_has_come() -> None:
    told = Told()
    told.boards = RecorderSnapshot(said(7), {1: said(8), 2: said(6), 3: said()})
    told.words[layout.HOST_LAUNCH] = 7
    told.kernel(layout.ERROR_TIMEOUT, 2)
    with pytest.raises(CollectiveTimeout, match="rank 2 has not arrived") as raised:
        told.faults.check("barrier")
    assert raised.value.op == "launch #7"
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 2 in launch #7",
        "rank 1: has started it",
        "rank 2: never arrived at it; its last was launch #6",
        "rank 3: never arrived at it; it has not run any operation",
    )


def test_what_a_kernel_found_is_told_to_all_once() -> None:
    told, other = Told(), Told()
    told.boards = RecorderSnapshot(said(7), {1: said(7)})
    told.words[layout.HOST_LAUNCH] = 7
    told.kernel(layout.ERROR_TIMEOUT, 1)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="rank 1 has started"):
            told.faults.check()
    (notice,) = told.notices
    other.hear(Notice(from_rank=0, payload=notice))
    assert other.words[layout.HOST_ABORT] == 1
    with pytest.raises(CollectiveTimeout, match="rank 0 waited longer than") as raised:
        other.faults.check("all_reduce")
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 1 in launch #7",
        "rank 1: has started it",
    )
    assert other.notices == []


def test_boards_of_numbers_that_have_gone_round() -> None:
    boards = RecorderSnapshot(said(), {1: said(3), 2: said(2**32 - 3)})
    assert boards.has_begun(1, 2**32 - 2)
    assert not boards.has_begun(2, 1)


def test_a_deadline_in_a_collective_that_is_messages() -> None:
    told = Told()
    told.boards = RecorderSnapshot(
        said(3, 2, 3), {1: said(3, 2, 3), 2: said(3, 1, 0, GATHER), 3: said(1)}
    )
    told.words[layout.HOST_SIGNATURE] = SCATTER
    told.kernel(layout.ERROR_TIMEOUT, 2)
    with pytest.raises(
        CollectiveTimeout, match="rank 2 has not arrived at this operation"
    ) as raised:
        told.faults.check()
    assert raised.value.op == "scatter (root 1)"
    assert raised.value.graph == (
        "rank 0: waits for a message from rank 2 in scatter (root 1)",
        "rank 1: has started it",
        "rank 2: never arrived at it; its last was launch #3",
        "rank 3: never arrived at it; its last was launch #1",
    )


def test_a_deadline_of_a_message_says_what_others_ran_last() -> None:
    told = Told()
    told.boards = RecorderSnapshot(said(3, 2, 3), {1: said(4, 2, 3), 2: said(3, 2, 3)})
    told.kernel(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="rank 1 has not arrived at this message") as raised:
        told.faults.check("recv")
    assert raised.value.graph[1:] == (
        "rank 1: its last was launch #4",
        "rank 2: its last was scatter (root 1)",
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "found"),
    [
        (said(7, 3, 7), said(7, 3, 7), None),
        (said(7, 3, 7), said(7, 3, 7, GATHER), (0, SCATTER)),
        (said(7, 3, 7), said(7, 3, 6), (0, SCATTER)),  # one launch earlier
        (said(7), said(7, signature=5), (7, 0)),
        (said(7), said(6, signature=5), (6, 0)),
        (said(7), said(1, signature=5), None),  # nobody remembers
        (said(7, 3, 7), said(7, 2, 7), None),  # not there yet
        (said(7, 3, 7), said(8, 2, 7), (0, SCATTER)),  # past it
        (said(8, 2, 7), said(7, 3, 7), (8, 0)),  # the other way round
        (said(9, 2, 7), said(7, 3, 7), (8, 0)),
        (said(20, 2, 7), said(7, 3, 7), (20, 0)),
        (said(8, 3, 7), said(7, 2, 6), None),  # two behind
        (said(8, 2, 6), said(9, 4, 9), None),
        (said(), said(), None),
    ],
)
def test_operations_in_another_order_are_found(
    mine: OpLog, theirs: OpLog, found: tuple[int, int] | None
) -> None:
    boards = (
        RecorderSnapshot(mine, {2: said(7), 3: theirs})
        if mine.last_message_op == 0
        else RecorderSnapshot(mine, {3: theirs})
    )
    assert boards.find_mismatch() == (None if found is None else (3, *found))


def test_what_begins_after_a_failed_wait_has_no_order() -> None:
    """The launches of a rank whose deadline has passed go on, its collectives of messages do not."""
    mine, theirs = said(9, 3, 7), said(8, 4, 8)
    assert RecorderSnapshot(mine, {1: theirs}).find_mismatch() == (1, 9, 0)
    assert RecorderSnapshot(mine, {1: theirs}).find_mismatch(0) is None
    assert RecorderSnapshot(mine, {1: theirs}).find_mismatch(9) == (1, 9, 0)
    assert RecorderSnapshot(theirs, {1: mine}).find_mismatch(0) == (1, 0, SCATTER)
    assert RecorderSnapshot(theirs, {1: mine}, lambda peer: peer == 1).find_mismatch(0) is None


def test_all_have_come_where_none_is_behind() -> None:
    assert RecorderSnapshot(said(7, 3, 7), {1: said(7, 3, 7), 2: said(9, 4, 8)}).all_caught_up
    assert not RecorderSnapshot(said(7, 3, 7), {1: said(7, 3, 7), 2: said(6, 3, 6)}).all_caught_up
    assert not RecorderSnapshot(said(7, 3, 7), {1: said(7, 2, 7), 2: said(7, 3, 7)}).all_caught_up


@pytest.mark.parametrize("error", [layout.ERROR_TIMEOUT, layout.ERROR_EXITED])
def test_a_wait_in_vain_that_boards_explain_is_a_mismatch(error: int) -> None:
    told = Told()
    told.boards = RecorderSnapshot(said(8, 2, 7), {1: said(7, 3, 7), 2: said(8, 2, 7)})
    told.words[layout.HOST_LAUNCH] = 8
    told.kernel(error, 2)
    with pytest.raises(
        CollectiveMismatch, match=r"rank 1 called a different operation \(number 8"
    ) as raised:
        told.faults.check()
    assert (raised.value.op, raised.value.peer) == ("launch #8", 1)


class LateWords(np.ndarray[Any, Any]):
    """Words of which the writer of ``HOST_ABORT`` is late: ``meanwhile`` runs before they are written."""

    meanwhile: Any

    def __setitem__(self, place: Any, value: Any) -> None:
        if place == layout.HOST_ABORT:
            self.meanwhile()
        super().__setitem__(place, value)


def late(meanwhile: Callable[[Told], None]) -> Told:
    words = np.zeros(layout.HOST_BYTES // 4, np.uint32).view(LateWords)
    told = Told(words)
    words.meanwhile = lambda: meanwhile(told)
    return told


def beside(action: Callable[[], None], limit: float) -> threading.Thread:
    """A thread that has tried for ``limit`` seconds."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join(limit)
    return thread


@pytest.mark.parametrize("hears", [True, False])
def test_no_operation_begins_once_the_fault_is_seen(hears: bool) -> None:
    """A program that goes on to another operation after the fault would be compared with ranks that have not heard of it."""
    waiting: list[threading.Thread] = []
    seen: list[tuple[type[Exception], bool]] = []

    def check(told: Told) -> None:
        try:
            told.faults.check()
        except (PeerDied, CommunicatorAborted) as error:
            seen.append((type(error), told.faults.broken))

    told = late(lambda told: waiting.append(beside(lambda: check(told), 0.05)))
    told.hear(LOST) if hears else told.faults.set_fault(CommunicatorAborted("enough"))
    waiting[0].join()
    assert seen == [(PeerDied if hears else CommunicatorAborted, True)]


def test_the_words_are_not_written_any_more_once_their_memory_may_go() -> None:
    order: list[str] = []

    def end(told: Told) -> None:
        told.faults.close()
        order.append("ended")

    def close(told: Told) -> None:
        closing.append(beside(lambda: end(told), 0.05))
        order.append("written")

    closing: list[threading.Thread] = []
    told = late(close)
    told.hear(LOST)
    closing[0].join()
    told.hear(ABORTED)
    told.hear(Notice(from_rank=1, payload={EXIT_NOTICE: True}))
    told.faults.set_fault(CommunicatorAborted("too late"))
    assert told.words[layout.HOST_EXITED] == 0
    assert order == ["written", "ended"]


def test_others_are_told_of_an_abort_before_it_wakes_anybody_here() -> None:
    """Who is woken may end at once."""
    told = Told()
    told.faults.abort("enough")
    assert [words[layout.HOST_ABORT] for words in told.words_when_told] == [0]
    assert told.faults.broken


def test_a_launcher_that_dies_is_no_rank() -> None:
    session: Any = types.SimpleNamespace(rank=0)
    hosts, told = (
        MultiNodeFaults(session, release_waits=lambda _: None, abort_network=lambda _: None),
        Told(),
    )
    for hear, check in ((hosts.on_event, hosts.check), (told.hear, told.faults.check)):
        hear(PeerLost(rank=HUB, reason="it was killed"))
        with pytest.raises(PeerDied, match="the launcher died: it was killed"):
            check("all_reduce")


def test_others_are_told_of_a_fault_between_hosts_before_it_wakes_anybody_here() -> None:
    order: list[str] = []

    def note(kind: str) -> None:
        order.append(f"{kind}, {'broken' if faults.fault else 'whole'}")

    session: Any = types.SimpleNamespace(rank=0, notify=lambda _: note("told"))
    faults = MultiNodeFaults(
        session, release_waits=lambda _: note("let go"), abort_network=lambda _: None
    )
    faults.fail(CollectiveTimeout("late"))
    faults.fail(CollectiveTimeout("later"))
    assert order == ["told, whole", "let go, broken"]
