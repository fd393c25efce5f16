"""The proxy between streams and the network: one word at a time, whatever the streams do; without threads or GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.proxy.staging import DONE_OFFSET, LONGEST_PAUSE_S, READY_OFFSET, SHORTEST_PAUSE_S, SLOT_STRIDE, SPIN_S, StagingProxy

NSLOTS = 3


class Words:
    """Memory of flags as a dictionary."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}

    def load_acquire(self, address: int, /) -> int:
        return self.words.get(address, 0)

    def store_release(self, address: int, value: int, /) -> None:
        self.words[address] = value

    def exchange(self, address: int, value: int, /) -> int:
        old, self.words[address] = self.words.get(address, 0), value
        return old


class Job:
    def __init__(self, npieces: int, captured: bool = False, fails_at: int = -1) -> None:
        self.npieces, self.captured, self.fails_at = npieces, captured, fails_at
        self.ran: list[tuple[int, int]] = []

    def run(self, piece: int, slot: int) -> None:
        if piece == self.fails_at:
            raise RuntimeError("the network is gone")
        self.ran.append((piece, slot))


class Side:
    """A proxy with its flags, and streams that write and wait."""

    def __init__(self) -> None:
        self.words, self.faults = Words(), list[Exception]()
        self.proxy = StagingProxy(0, NSLOTS, on_fault=self.faults.append, atomics=self.words)

    def stream(self, number: int, npieces: int) -> list[Callable[[], bool]]:
        """What a stream does for a job: each entry says whether it could go on."""
        actions: list[Callable[[], bool]] = []
        for k in range(npieces + NSLOTS - 1):
            if k < npieces:
                actions.append(self._write(k % NSLOTS, number))
            if k >= NSLOTS - 1:
                actions.append(self._wait((k - NSLOTS + 1) % NSLOTS))
        return actions

    def _write(self, slot: int, number: int) -> Callable[[], bool]:
        def write() -> bool:
            self.words.words[slot * SLOT_STRIDE + DONE_OFFSET] = 0
            assert self.words.words.get(slot * SLOT_STRIDE + READY_OFFSET, 0) == 0, "a slot is used before it was answered"
            self.words.words[slot * SLOT_STRIDE + READY_OFFSET] = number
            return True

        return write

    def _wait(self, slot: int) -> Callable[[], bool]:
        return lambda: self.words.words.get(slot * SLOT_STRIDE + DONE_OFFSET) == 1

    def run(self, actions: list[Callable[[], bool]], turns: Callable[[], bool]) -> None:
        """Stream and proxy take turns until the stream has ended."""
        left = list(actions)
        for _ in range(10_000):
            if not left:
                return
            if turns():
                if left[0]():
                    left.pop(0)
            else:
                self.proxy.step()
        raise AssertionError("the stream never ends")


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), order=st.lists(st.booleans(), min_size=1, max_size=50))
def test_pieces_run_once_and_in_order(sizes: list[int], order: list[bool]) -> None:
    side = Side()
    turns = itertools.cycle([*order, True, False])
    for size in sizes:
        job = Job(size)
        side.proxy.announce()
        number = side.proxy.register(job)
        side.run(side.stream(number, size), lambda: next(turns))
        assert job.ran == [(k, k % NSLOTS) for k in range(size)]
    assert not side.proxy.step()
    assert not side.faults


flip = itertools.cycle([True, False])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_a_captured_job_runs_at_every_replay(size: int) -> None:
    side, job = Side(), Job(size, captured=True)
    graph = side.stream(side.proxy.register(job), size)
    other = Job(5)
    eager = side.stream(side.proxy.register(other), 5)
    for _ in range(4):
        side.run(graph, lambda: next(flip))
        side.run(eager, lambda: next(flip))
    assert job.ran == [(k, k % NSLOTS) for k in range(size)] * 4
    assert len(other.ran) == 20


def test_after_a_fault_everything_is_answered_and_nothing_runs() -> None:
    side, job, after = Side(), Job(6, fails_at=2), Job(4)
    side.run(side.stream(side.proxy.register(job), 6), lambda: next(flip))
    side.run(side.stream(side.proxy.register(after), 4), lambda: next(flip))
    assert [piece for piece, _ in job.ran] == [0, 1]
    assert after.ran == []
    assert [str(error) for error in side.faults] == ["the network is gone"]


def test_drain_answers_without_a_fault() -> None:
    side, job = Side(), Job(5)
    side.proxy.drain()
    side.run(side.stream(side.proxy.register(job), 5), lambda: next(flip))
    assert job.ran == []
    assert side.faults == []


def test_it_looks_often_only_where_something_may_come() -> None:
    side, job = Side(), Job(1)
    proxy = side.proxy
    assert proxy.pause(0) == 0
    assert proxy.pause(10 * SPIN_S) == 1.0, "nothing is announced: it sleeps until it is"
    number = proxy.register(job)
    proxy.announce()
    assert proxy.pause(SPIN_S / 2) == 0
    assert proxy.pause(SPIN_S * 1.01) >= SHORTEST_PAUSE_S
    assert proxy.pause(3600) == LONGEST_PAUSE_S
    side.run(side.stream(number, 1), lambda: next(flip))
    assert proxy.pause(3600) == 1.0
    proxy.register(Job(1, captured=True))
    assert proxy.pause(3600) == LONGEST_PAUSE_S, "a graph may be replayed at any time"


def test_the_thread_answers_and_ends() -> None:
    side, job = Side(), Job(4)
    proxy = side.proxy
    actions = side.stream(proxy.register(job), 4)
    proxy.start("test")
    proxy.announce()
    for action in actions:
        for _ in range(2_000_000):
            if action():
                break
        else:
            raise AssertionError("no answer")
    assert len(job.ran) == 4
    proxy.close()
    proxy.close()
