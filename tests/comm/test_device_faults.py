"""What a communicator on GPU memory raises for what its kernels found and what the control plane told."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miraccl.bootstrap import Notice, PeerLost
from miraccl.comm.device.faults import NOTICE, DeviceFaults
from miraccl.comm.device.hosts.faults import HostsFaults
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, PeerDied
from miraccl.executor.cuda import layout


class Told:
    """Faults with the words of a kernel, and the way by which the control plane tells."""

    def __init__(self, words: Any = None) -> None:
        self.words = np.zeros(layout.HOST_BYTES // 4, np.uint32) if words is None else words
        session: Any = types.SimpleNamespace(
            rank=0, on_event=lambda hear: setattr(self, "hear", hear), notify=lambda _: self.words_when_told.append(self.words.copy())
        )
        self.words_when_told: list[Any] = []
        self.faults = DeviceFaults(session, self.words, 1.0)

    def kernel(self, error: int, peer: int) -> None:
        self.words[layout.HOST_PEER], self.words[layout.HOST_WHAT], self.words[layout.HOST_ERROR] = peer, layout.WHAT_MESSAGE, error

    hear: Any = None


LOST = PeerLost(rank=1, reason="it ended")
ABORTED = Notice(from_rank=1, payload={NOTICE: "enough"})


@pytest.mark.parametrize("event", [LOST, ABORTED])
def test_a_mismatch_is_told_though_the_peer_has_gone(event: Any) -> None:
    """The peer may have found it first, raised it and ended."""
    told = Told()
    told.hear(event)
    told.kernel(layout.ERROR_MISMATCH, 1)
    with pytest.raises(CollectiveMismatch, match="rank 1 called another operation"):
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


def test_a_deadline() -> None:
    told = Told()
    told.kernel(layout.ERROR_TIMEOUT, 1)
    with pytest.raises(CollectiveTimeout, match="from rank 1"):
        told.faults.check("all_reduce")


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
    told.hear(LOST) if hears else told.faults.settle(CommunicatorAborted("enough"))
    waiting[0].join()
    assert seen == [(PeerDied if hears else CommunicatorAborted, True)]


def test_the_words_are_not_written_any_more_once_their_memory_may_go() -> None:
    order: list[str] = []

    def end(told: Told) -> None:
        told.faults.end()
        order.append("ended")

    def close(told: Told) -> None:
        closing.append(beside(lambda: end(told), 0.05))
        order.append("written")

    closing: list[threading.Thread] = []
    told = late(close)
    told.hear(LOST)
    closing[0].join()
    told.hear(ABORTED)
    told.faults.settle(CommunicatorAborted("too late"))
    assert order == ["written", "ended"]


def test_others_are_told_of_an_abort_before_it_wakes_anybody_here() -> None:
    """Who is woken may end at once."""
    told = Told()
    told.faults.abort("enough")
    assert [words[layout.HOST_ABORT] for words in told.words_when_told] == [0]
    assert told.faults.broken


def test_others_are_told_of_a_fault_between_hosts_before_it_wakes_anybody_here() -> None:
    order: list[str] = []

    def note(kind: str) -> None:
        order.append(f"{kind}, {'broken' if faults.fault else 'whole'}")

    session: Any = types.SimpleNamespace(rank=0, notify=lambda _: note("told"))
    faults = HostsFaults(session, let_go=lambda _: note("let go"), abort_network=lambda _: None)
    faults.fail(CollectiveTimeout("late"))
    faults.fail(CollectiveTimeout("later"))
    assert order == ["told, whole", "let go, broken"]
