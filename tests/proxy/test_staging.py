"""The proxy between streams and the network: one word at a time, whatever the streams do;
without GPUs, and but for one without threads.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miraccl.proxy.kernels.staging_layout import (
    CALL_BYTES,
    DONE_OFFSET,
    MAX_SLEEP_NS,
    MIN_SLEEP_NS,
    NOT_BEGUN,
    READY_OFFSET,
    SLOT_STRIDE,
    SPIN_NS,
)
from miraccl.proxy.staging import StagingThread, slot_of

NSLOTS, LANES = 4, 2
SPIN_S, MIN_SLEEP_S, MAX_SLEEP_S = (
    SPIN_NS / 1e9,
    MIN_SLEEP_NS / 1e9,
    MAX_SLEEP_NS / 1e9,
)
FUNCTION = ctypes.CFUNCTYPE(
    ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


class Job:
    """Segments are run in Python, or with ``codes`` by a call of compiled code that gives these,
    one a segment.
    """

    def __init__(
        self,
        nsegments: int,
        captured: bool = False,
        fails_at: int = -1,
        stride: int = 1,
        codes: list[int] | None = None,
    ) -> None:
        self.nsegments, self.captured, self.fails_at, self.stride = (
            nsegments,
            captured,
            fails_at,
            stride,
        )
        self.ran: list[tuple[int, int]] = []
        self.called: list[int] = []
        self._function = FUNCTION(self._call)
        function = ctypes.cast(self._function, ctypes.c_void_p).value
        self._calls = np.array(
            [[function, segment, code] for segment, code in enumerate(codes or [])], np.int64
        )
        assert self._calls.nbytes == len(codes or []) * CALL_BYTES
        self.calls = self._calls.ctypes.data if codes else 0

    def _call(self, segment: int, code: int, *unused: int) -> int:
        self.called.append(segment)
        return code

    def run(self, segment: int, slot: int) -> None:
        if segment == self.fails_at:
            raise RuntimeError("the network is gone")
        self.ran.append((segment, slot))

    def explain(self, segment: int, code: int) -> None:
        raise RuntimeError(f"segment {segment} gave {code}")


class Side:
    """Stream's side of the slots of some staging threads, and what the threads did."""

    def __init__(self) -> None:
        self.words, self.faults = np.zeros(NSLOTS * SLOT_STRIDE // 8, np.int64), list[Exception]()
        flags = self.words.ctypes.data
        self.proxies = [
            StagingThread(flags, NSLOTS, on_fault=self.faults.append, index=lane, nthreads=LANES)
            for lane in range(LANES)
        ]
        self._next = itertools.cycle(self.proxies)

    def stream(self, job: Job) -> list[Callable[[], bool]]:
        """Yield, for each step of a stream's work on a job, whether the stream could continue."""
        (number,) = {proxy.register(job) for proxy in self.proxies}
        ahead = NSLOTS * job.stride // LANES
        actions: list[Callable[[], bool]] = []
        for k in range(job.nsegments + ahead - 1):
            if k < job.nsegments:
                actions.append(self._write(slot_of(k, job.stride, NSLOTS, LANES), number))
            if k >= ahead - 1:
                actions.append(self._wait(slot_of(k - ahead + 1, job.stride, NSLOTS, LANES)))
        return actions

    def announce(self, job: Job) -> None:
        for proxy in self.proxies:
            if proxy.participates(job):
                proxy.announce()

    def _write(self, slot: int, number: int) -> Callable[[], bool]:
        done, ready = (
            (slot * SLOT_STRIDE + DONE_OFFSET) // 8,
            (slot * SLOT_STRIDE + READY_OFFSET) // 8,
        )

        def write() -> bool:
            self.words[done] = 0
            assert self.words[ready] == 0, "a slot is used before it was answered"
            self.words[ready] = number
            return True

        return write

    def _wait(self, slot: int) -> Callable[[], bool]:
        return lambda: bool(self.words[(slot * SLOT_STRIDE + DONE_OFFSET) // 8] == 1)

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
                next(self._next).step()
        raise AssertionError("the stream never ends")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Return a thread that serves compiled calls."""
    StagingThread(0, 1, on_fault=lambda error: None)


flip = itertools.cycle([True, False])
jobs = st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, LANES])), min_size=1, max_size=6)


def expected(job: Job) -> list[tuple[int, int]]:
    return [(k, slot_of(k, job.stride, NSLOTS, LANES)) for k in range(job.nsegments)]


@given(sizes=jobs, order=st.lists(st.booleans(), min_size=1, max_size=50))
def test_pieces_run_once_and_in_order(sizes: list[tuple[int, int]], order: list[bool]) -> None:
    """In the order of each lane."""
    side = Side()
    turns = itertools.cycle([*order, True, False])
    for size, stride in sizes:
        job = Job(size, stride=stride)
        side.announce(job)
        side.run(side.stream(job), lambda: next(turns))
        assert sorted(job.ran) == expected(job)
        for lane in range(stride):
            mine = [segment for segment, slot in job.ran if slot % LANES == lane]
            assert mine == sorted(mine) == list(range(lane, size, stride))
        assert all(proxy.pause(3600) == 1.0 for proxy in side.proxies), "nothing is left to come"
    assert not any(proxy.step() for proxy in side.proxies)
    assert not side.faults


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("python", [True, False])
def test_a_lane_is_between_jobs_or_not(size: int, python: bool) -> None:
    """It is from the answer to a job's last segment on until the next job's first one is there."""
    side, found = Side(), list[bool]()
    job = Job(size, codes=None if python else [0] * size)
    lane, run = side.proxies[0], job.run

    def look(segment: int, slot: int) -> None:
        found.append(lane.between_jobs)
        run(segment, slot)

    vars(job)["run"] = look
    for _ in range(2):
        assert lane.between_jobs
        served = 0
        for action in side.stream(job):
            assert action()
            assert lane.between_jobs == (served == size)
            served += lane.step()
            assert lane.between_jobs == (served == size)
    assert not any(found)


@pytest.mark.parametrize("stride", [1, LANES])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 10])
def test_a_captured_job_runs_at_every_replay(size: int, stride: int) -> None:
    side, job = Side(), Job(size, captured=True, stride=stride)
    graph = side.stream(job)
    other = Job(5, stride=LANES)
    eager = side.stream(other)
    for _ in range(4):
        side.run(graph, lambda: next(flip))
        side.run(eager, lambda: next(flip))
    assert sorted(job.ran) == sorted(expected(job) * 4)
    assert len(other.ran) == 20


def test_after_a_fault_everything_is_answered_and_nothing_runs() -> None:
    side, job, after = Side(), Job(6, fails_at=2), Job(4)
    side.run(side.stream(job), lambda: next(flip))
    side.run(side.stream(after), lambda: next(flip))
    assert [segment for segment, _ in job.ran] == [0, 1]
    assert after.ran == []
    assert [str(error) for error in side.faults] == ["the network is gone"]


def test_compiled_calls_are_made_and_what_they_leave_is_run() -> None:
    side, job = Side(), Job(7, stride=LANES, codes=[0, 0, NOT_BEGUN, 0, 0, NOT_BEGUN, 0])
    for _ in range(3):
        side.run(side.stream(job), lambda: next(flip))
    assert sorted(job.called) == sorted([*range(7)] * 3), "each segment is offered to its call once"
    assert sorted(job.ran) == sorted([(2, 2), (5, 1)] * 3)
    assert side.faults == []


def test_the_code_of_a_call_is_explained_and_ends_everything() -> None:
    side, job, after = Side(), Job(6, codes=[0, 0, 11, 0, 0, 0]), Job(3, codes=[0, 0, 0])
    side.run(side.stream(job), lambda: next(flip))
    side.run(side.stream(after), lambda: next(flip))
    assert job.called == [0, 1, 2]
    assert after.called == []
    assert job.ran == after.ran == []
    assert [str(error) for error in side.faults] == ["segment 2 gave 11"]


def test_many_jobs() -> None:
    """More than the first table has rows for, between segments of an old one."""
    side, old = Side(), Job(4)
    actions = side.stream(old)
    side.run(actions[:2], lambda: next(flip))
    others = [Job(1) for _ in range(200)]
    streams = [side.stream(job) for job in others]
    side.run(actions[2:], lambda: next(flip))
    for stream in streams:
        side.run(stream, lambda: next(flip))
    assert old.ran == expected(old)
    assert all(job.ran == [(0, 0)] for job in others)


def test_drain_answers_without_a_fault() -> None:
    side, job = Side(), Job(5, stride=LANES)
    for proxy in side.proxies:
        proxy.drain()
    side.run(side.stream(job), lambda: next(flip))
    assert job.ran == []
    assert side.faults == []


def test_it_looks_often_only_where_something_may_come() -> None:
    side, job = Side(), Job(1, stride=LANES)
    proxy, other = side.proxies
    assert proxy.pause(0) == 0
    assert proxy.pause(10 * SPIN_S) == 1.0, "nothing is announced: it sleeps until it is"
    actions = side.stream(job)
    side.announce(job)
    assert proxy.pause(SPIN_S / 2) == 0
    assert proxy.pause(SPIN_S * 1.01) >= MIN_SLEEP_S
    assert proxy.pause(3600) == MAX_SLEEP_S
    assert other.pause(3600) == 1.0, "one segment comes to one lane"
    side.run(actions, lambda: next(flip))
    assert proxy.pause(3600) == 1.0
    side.stream(Job(1, captured=True, stride=LANES))
    assert proxy.pause(3600) == MAX_SLEEP_S, "a graph may be replayed at any time"
    assert other.pause(3600) == 1.0


@pytest.mark.parametrize("codes", [None, [0, 0, NOT_BEGUN, 0]])
def test_the_thread_answers_and_ends(codes: list[int] | None) -> None:
    side, job = Side(), Job(4, stride=LANES, codes=codes)
    actions = side.stream(job)
    for proxy in side.proxies:
        proxy.start("test")
    side.announce(job)
    limit = time.monotonic() + 20
    for action in actions:
        while not action():
            assert time.monotonic() < limit, "no answer"
    assert len(job.ran) == (1 if codes else 4)
    assert all(proxy.close() for proxy in [*side.proxies, *side.proxies])


def test_the_thread_ends_with_its_process() -> None:
    """The thread ends before exit handlers that were registered earlier and may free the flags."""
    code = (
        "import atexit, numpy as np; from miraccl.proxy import staging;"
        "words = np.zeros(64, np.int64); staging.EXIT_WAIT_S = 20.0;"
        "proxy = staging.StagingThread(words.ctypes.data, 1, on_fault=print);"
        "atexit.register(lambda: print('alive' if proxy._thread.is_alive() else 'ended'));"
        "proxy.start('test')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "ended"), done.stderr


def test_numbers_of_jobs_that_have_ended_are_given_again() -> None:
    """Also where another job, which is kept, is run in between."""
    side = Side()
    kept = Job(3, stride=LANES)
    again = side.stream(kept)
    for size in (1, 4, 2):
        job = Job(size, stride=LANES)
        counts = {proxy: proxy.announce() for proxy in side.proxies if proxy.participates(job)}
        actions = side.stream(job)
        assert not any(proxy.has_finished(count) for proxy, count in counts.items())
        side.run(actions, lambda: next(flip))
        assert all(proxy.has_finished(count) for proxy, count in counts.items())
        assert sorted(job.ran) == expected(job)
        for proxy in side.proxies:
            assert proxy._jobs == [kept, job]
            proxy.unregister(2)
        side.announce(kept)
        side.run(again, lambda: next(flip))
    assert sorted(kept.ran) == sorted(3 * expected(kept))
