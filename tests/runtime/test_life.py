"""Lifecycle: split, several communicators, ranks as threads, finalize, memory and window memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import miraccl
from miraccl import Communicator
from miraccl.bootstrap import single_rank_session
from miraccl.bootstrap.session import LinkSession
from miraccl.errors import (
    CollectiveMismatch,
    CommunicatorAborted,
    CommunicatorClosed,
    InvalidUsage,
    MiracclError,
    PeerDied,
    SystemFailure,
)
from miraccl.executor.cpu.kernels import layout
from miraccl.runtime import core, engine_faults
from miraccl.runtime.fabric import ProcessFabric
from miraccl.runtime.options import Options
from miraccl.runtime.window import PAGE, WindowAllocator
from miraccl.runtime.work import BackgroundWorker
from miraccl.transport.fifo import slot_bytes_for
from miraccl.transport.shared_segment import ShmSegment
from miraccl.transport.shm import ShmRegion, default_window_bytes
from miraccl.wire.proxy_records import Loss, LossKind
from tests.diagnosis.late_watcher import LateWatcher
from tests.runtime import cases
from tests.runtime.test_p2p import (
    all_to_all_messages,
    background_collectives,
    receive_first,
    ring,
)
from tests.support.ranks import run_ranks


def in_threads(nranks: int, work: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    """Run ``work`` on ranks that are threads of this process."""
    ident = miraccl.get_unique_id()
    results: list[Any] = [None] * nranks
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        try:
            with Communicator(nranks, ident, number, timeout=20, **options) as comm:
                results[number] = work(comm)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=rank, args=(number,), daemon=True) for number in range(nranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)  # the engine may have to be compiled
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads)
    return results


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def failing_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[MiracclError]]:
    """Start a thread that makes a call; return it and the error of that call."""
    errors: list[MiracclError] = []

    def run() -> None:
        with pytest.raises(MiracclError) as caught:
            call()
        errors.append(caught.value)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


# ---- threads as ranks


def random_cases(comm: Communicator) -> None:
    rng = np.random.default_rng(5)
    for _ in range(40):
        case = cases.random_case(
            rng,
            comm.nranks,
            [0, 1, 5, 129, 5000, 70_000],
            [*cases.EVEN, *cases.UNEVEN],
            ordered=lambda case: False,
        )
        cases.perform(comm, case)


@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_threads_as_ranks(nranks: int) -> None:
    in_threads(nranks, random_cases)


def test_threads_send_and_receive_and_work_in_the_background() -> None:
    def patterns(comm: Communicator) -> None:
        for count in (3, 100_000):
            ring(comm, count)
            receive_first(comm, count)
        all_to_all_messages(comm)
        background_collectives(comm)

    in_threads(3, patterns)


def test_single_copy_between_threads() -> None:
    """A peer in the same process reads the sender's memory directly."""

    def work(comm: Communicator) -> None:
        comm._core.planner.single_copy = 0
        comm._core.context.set(304, 0)
        comm.barrier()
        random_cases(comm)
        ring(comm, 50_000)

    in_threads(2, work)


def test_an_error_of_one_thread_reaches_the_others() -> None:
    def work(comm: Communicator) -> str:
        try:
            if comm.rank == 1:
                comm.all_gather(np.ones(3))
            else:
                comm.all_reduce(np.ones(3))
            comm.barrier()
        except MiracclError as error:
            return type(error).__name__
        return ""

    assert in_threads(3, work) == ["CollectiveMismatch"] * 3


def test_second_thread_in_a_communicator_is_rejected() -> None:
    """The second thread is rejected while the first waits, which is unaffected."""

    def work(comm: Communicator) -> None:
        inside = threading.Event()
        if comm.rank == 0:
            refused: list[BaseException] = []

            def other() -> None:
                inside.wait(10)
                while not comm._core.context.in_engine:
                    pass
                try:
                    comm.barrier()
                except InvalidUsage as error:
                    refused.append(error)
                comm._core.session.all_gather(b"", "refused")

            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            inside.set()
            assert (comm.all_reduce(np.ones(4)) == 2).all()
            thread.join(10)
            assert "another thread is inside" in str(refused[0])
        else:
            comm._core.session.all_gather(b"", "refused")
            comm.all_reduce(np.ones(4))
        comm.barrier()

    in_threads(2, work)


@pytest.mark.parametrize(
    ("patience", "told"),
    [
        (0.2, "CommunicatorClosed: finalized while a thread was inside"),
        (60.0, "PeerDied: rank 1 has left"),
    ],
)
def test_finalize_ends_operation_of_another_thread(
    patience: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation ends when the awaited rank leaves, or after a while, not at its deadline."""
    monkeypatch.setattr(core, "CLOSE_WAIT_S", patience)
    ranks: dict[int, Communicator] = {}
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        ranks[comm.rank] = comm
        comm.barrier()
        if comm.rank == 1:
            while not (ended.is_set() if patience < 1 else ranks[0]._core.closed):
                time.sleep(0.001)
            comm.finalize()
            return
        thread, errors = failing_thread(lambda: comm.recv(np.ones(4), src=1))
        while not comm._core.context.in_engine:
            time.sleep(0.001)
        comm.finalize()
        thread.join(10)
        ended.set()
        kind, _, text = told.partition(": ")
        assert type(errors[0]).__name__ == kind
        assert text in str(errors[0])
        with pytest.raises(CommunicatorClosed, match="has been finalized"):
            comm.barrier()

    in_threads(2, work)


def test_finalize_ends_pending_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "CLOSE_WAIT_S", 0.2)
    ended = threading.Event()

    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            pending = comm.all_reduce(np.ones(4), async_op=True)
            comm.finalize()
            ended.set()
            with pytest.raises(
                CommunicatorClosed, match="finalized while an operation was pending"
            ):
                pending.wait()
        else:
            assert ended.wait(10)

    in_threads(2, work)


class LateRank1:
    """Ranks of which rank 1 processes notices late."""

    watcher: LateWatcher

    def __init__(self, nranks: int) -> None:
        self._all_here = threading.Barrier(nranks)

    def come(self, comm: Communicator) -> None:
        if comm.rank == 1:
            self.watcher = LateWatcher(comm._core.session)
        self._all_here.wait(20)

    def abort(self, comm: Communicator) -> None:
        """Abort ``comm`` of another rank while rank 1 holds back its notices."""
        comm._core.session.notify({"kind": "for a test"})
        self.watcher.wait_for_event()
        comm.abort("for a test")


def test_notice_before_a_broken_connection_is_the_cause_with_late_watcher() -> None:
    ranks: dict[int, Communicator] = {}
    late = LateRank1(3)

    def work(comm: Communicator) -> None:
        ranks[comm.rank] = comm
        faults = comm._core.faults
        late.come(comm)
        if comm.rank == 0:
            late.abort(comm)
        elif comm.rank == 1:
            until(lambda: ranks[2]._core.faults.fault is not None)  # the hub has told rank 1 before
            faults.connection_lost(0, Loss(LossKind.RESET, "it is closed"))
            until(lambda: faults.fault is not None or late.watcher.awaited)
            late.watcher.release(100)
            until(lambda: faults.fault is not None)
        with pytest.raises(
            CommunicatorAborted, match="rank 0 aborted the communicator: for a test"
        ):
            comm.barrier()

    in_threads(3, work)


def test_mismatch_behind_a_broken_connection_is_reported_as_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 sees no progress page of another rank, as if it were on another host."""
    monkeypatch.setattr(
        ProcessFabric, "shm_ranks", property(lambda fabric: [0, 1] if fabric.rank == 0 else [])
    )
    called = threading.Barrier(2)

    def work(comm: Communicator) -> None:
        comm.broadcast(np.ones(4), comm.rank)  # a root waits for nobody
        called.wait(20)
        if comm.rank == 0:
            comm._core.faults.connection_lost(1, Loss(LossKind.RESET, "it is closed"))
        until(lambda: comm._core.faults.fault is not None)
        with pytest.raises(CollectiveMismatch, match="root is 0 on rank 0, 1 on rank 1"):
            comm.barrier()

    in_threads(2, work)


def test_woken_thread_continues_after_others_are_notified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process may exit directly afterwards."""
    monkeypatch.setattr(engine_faults, "DELIVERY_WAIT_S", 20.0)
    late = LateRank1(2)

    def work(comm: Communicator) -> None:
        mine, session = comm._core.faults, comm._core.session
        late.come(comm)
        if comm.rank == 1:
            until(lambda: mine.fault is not None)
            return
        assert isinstance(session, LinkSession)
        link, seen, notify = session._link, [], session.notify
        assert link is not None

        def note(payload: dict[str, Any]) -> None:
            seen.append(mine.fault)
            notify(payload)

        session.notify = note  # type: ignore[method-assign]
        thread, errors = failing_thread(lambda: comm.recv(np.ones(4), src=1))
        aborts = threading.Thread(target=comm.abort, args=("for a test",))
        aborts.start()
        until(
            lambda: bool(errors) or len(link._status) == 2
        )  # who aborts and who was woken ask whether rank 1 has heard
        assert not errors
        assert seen == [None]  # when the others are told
        late.watcher.release(100)
        thread.join(20)
        aborts.join(20)
        assert isinstance(errors[0], CommunicatorAborted)

    in_threads(2, work)


def test_notice_before_a_departure_is_the_cause_with_late_watcher() -> None:
    """The departure of a rank ends a control operation before the watcher processes earlier
    notices.
    """
    late = LateRank1(2)

    def work(comm: Communicator) -> None:
        late.come(comm)
        if comm.rank == 0:
            late.abort(comm)
            comm.finalize()
            return
        thread, errors = failing_thread(lambda: comm.split(0))
        until(
            lambda: late.watcher.has_received(b"rank 0: rank 0 aborted")
        )  # the reason why it left
        late.watcher.release()
        late.watcher.wait_for_event()  # received the rest; stopped before its first word
        until(lambda: bool(errors) or late.watcher.awaited)
        late.watcher.release(100)
        thread.join(20)
        assert isinstance(errors[0], CommunicatorAborted), errors
        assert "rank 0 aborted the communicator: for a test" in str(errors[0])

    in_threads(2, work)


def interrupt_when(condition: Callable[[], bool]) -> None:
    until(condition)
    os.kill(os.getpid(), signal.SIGALRM)


def finalize_in_a_handler() -> str:
    core.CLOSE_WAIT_S = 60.0
    comm = miraccl.init(timeout=60)
    comm.barrier()
    signal.signal(signal.SIGALRM, lambda *_: comm.finalize())
    begun = time.monotonic()
    if comm.rank == 0:
        threading.Thread(
            target=interrupt_when, args=(lambda: comm._core.context.in_engine,), daemon=True
        ).start()
        with pytest.raises(CommunicatorClosed, match="finalized while a thread was inside"):
            comm.recv(np.ones(4), src=1)
        assert time.monotonic() - begun < 20
    else:
        with pytest.raises(PeerDied, match="rank 0 has left"):
            comm.recv(np.ones(4), src=0)
        comm.finalize()
    return "ended"


@pytest.mark.multiprocess
def test_finalize_in_signal_handler_ends_the_interrupted_operation() -> None:
    assert run_ranks(finalize_in_a_handler, 2) == ["ended"] * 2


def finalize_in_a_handler_of_finalize() -> str:
    """Finalize rank 0 with a pending operation, whose peer joins after a signal handler has
    finalized.
    """
    with miraccl.init(timeout=20) as comm:
        session, handled = comm._core.session, threading.Event()

        def handle(*_: Any) -> None:
            comm.finalize()
            session.notify({"kind": "for a test"})

        signal.signal(signal.SIGALRM, handle)
        session.on_event(lambda _: handled.set())
        comm.barrier()
        if comm.rank == 0:
            work = comm.all_reduce(np.ones(4), async_op=True)
            threading.Thread(
                target=interrupt_when, args=(lambda: comm._core.faults.closing,), daemon=True
            ).start()
            comm.finalize()
            return str(work.wait().sum())
        assert handled.wait(20)
        return str(comm.all_reduce(np.ones(4)).sum())


@pytest.mark.multiprocess
def test_finalize_in_signal_handler_inside_finalize() -> None:
    assert run_ranks(finalize_in_a_handler_of_finalize, 2) == ["8.0"] * 2


def finalize_in_a_handler_of_a_call() -> bool:
    """Interrupt a call that updates the busy word; return True if the fast path is disabled in the
    end.
    """
    comm = miraccl.init(timeout=20)
    context = comm._core.context
    signal.signal(signal.SIGALRM, lambda *_: comm.finalize())
    write = context.set

    def interrupted(place: int, value: int) -> None:
        if place == layout.CTX_BUSY and not comm._core.closed:
            signal.raise_signal(signal.SIGALRM)
        write(place, value)

    context.set = interrupted  # type: ignore[method-assign]
    comm.recv(np.ones(4), src=1 - comm.rank, async_op=True) if comm.rank == 0 else comm.send(
        np.ones(4), 1 - comm.rank
    )
    closed = comm._core.closed and context.get(layout.CTX_BUSY) != 0
    comm.finalize()
    return closed


@pytest.mark.multiprocess
def test_finalize_in_signal_handler_during_any_call() -> None:
    assert run_ranks(finalize_in_a_handler_of_a_call, 2)[0]


def test_work_submitted_during_close_is_run() -> None:
    worker = BackgroundWorker("a test", lambda: None, lambda: None)
    closer = threading.Thread(target=worker.close, args=(20.0,))
    put = worker._queue.put

    class Queue:
        get = worker._queue.get

        def put(self, item: Any) -> None:
            if item is not None:
                closer.start()
                closer.join(0.2)  # it may come first, if it can
            put(item)

    worker._queue = Queue()  # type: ignore[assignment]
    assert worker.submit("work", lambda: 7).wait(10) == 7
    closer.join(20)


# ---- several communicators


def splits() -> None:
    with miraccl.init(timeout=20) as world:
        n, r = world.nranks, world.rank
        half = world.split(r % 2)
        backwards = world.split(0, key=-r)
        alone = world.split(r)
        few = world.split(None if r == 1 else 7)
        assert half is not None
        assert backwards is not None
        assert alone is not None
        assert (half.rank, half.nranks) == (r // 2, len(range(r % 2, n, 2)))
        assert (backwards.rank, backwards.nranks) == (n - 1 - r, n)
        assert (alone.rank, alone.nranks) == (0, 1)
        assert (few is None) == (r == 1)
        with contextlib.suppress(InvalidUsage):
            world.split("x")  # type: ignore[arg-type]
        if r == 0:  # refused calls of one rank alone do not bring the ranks out of step
            for _ in range(3):
                with contextlib.suppress(InvalidUsage):
                    world.split(True)
        for turn in range(4):
            x = np.full(2000 * turn + 3, float(r))
            assert (world.all_reduce(x.copy()) == n * (n - 1) / 2).all()
            assert (half.all_reduce(x.copy()) == sum(range(r % 2, n, 2))).all()
            assert backwards.all_gather(x[:1]).tolist() == [float(v) for v in reversed(range(n))]
            assert (alone.all_reduce(x.copy()) == r).all()
            if few is not None:
                assert few.all_reduce(np.ones(5))[0] == n - 1
            works = [c.all_reduce(np.ones(3), async_op=True) for c in (world, half, backwards)]
            assert [w.wait()[0] for w in reversed(works)] == [n, half.nranks, n]
            out = np.zeros(1)
            with miraccl.group():  # two communicators in one group
                world.sendrecv(np.array([float(r)]), (r + 1) % n, out, (r - 1) % n)
                summed = half.all_reduce(np.ones(2))
            assert out[0] == (r - 1) % n
            assert summed[0] == half.nranks
        again = half.split(0)
        assert again is not None
        half.finalize()
        assert again.all_reduce(np.ones(1))[0] == half.nranks
        last = world.split(0)
        assert last is not None
    assert last.all_reduce(np.ones(1))[0] == n  # lives on when its parent is finalized
    last.finalize()
    for c in (backwards, alone, few, again):
        if c is not None:
            c.finalize()


@pytest.mark.multiprocess
@pytest.mark.parametrize("nranks", [2, 4])
def test_split(nranks: int) -> None:
    run_ranks(splits, nranks)


def shrunk_without_need() -> list[float]:
    with miraccl.init() as world:
        same = world.shrink()
        total = float(same.all_reduce(np.ones(2))[0])
        same.finalize()
        return [total, float(world.all_reduce(np.ones(2))[0])]


@pytest.mark.multiprocess
def test_shrink_of_a_whole_communicator_is_a_copy() -> None:
    assert run_ranks(shrunk_without_need, 3) == [[3.0, 3.0]] * 3


def descriptors() -> list[int]:
    """Return the open descriptors before a split, with eight children, and after these are
    closed.
    """
    with miraccl.init() as world:
        counts = [len(os.listdir("/proc/self/fd"))]
        parts = [world.split(0) for _ in range(8)]
        for part in parts:
            assert part is not None
            part.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
        for part in parts:
            assert part is not None
            part.finalize()
        counts.append(len(os.listdir("/proc/self/fd")))
        return counts


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_communicator_cannot_be_copied_or_pickled(duplicate: Callable[[Any], Any]) -> None:
    with Communicator(1, miraccl.get_unique_id(), 0) as comm:
        with pytest.raises(
            TypeError,
            match=r"cannot pickle or copy a Communicator.*other processes get their own rank",
        ):
            duplicate(comm)
        assert comm.all_reduce(np.ones(2)).tolist() == [1, 1]


@pytest.mark.multiprocess
def test_communicators_of_one_job_share_its_descriptors() -> None:
    for before, during, after in run_ranks(descriptors, 3):
        assert before == during == after


# ---- memory


def window_use() -> list[int]:
    """Return resident window bytes: for a new array, touched, with a second array, and with
    none.
    """
    with miraccl.init() as comm:
        first, second = comm.empty(10 * PAGE, np.uint8), comm.empty(PAGE, np.uint8)
        used = [comm.memory()["window"]]
        first[: 4 * PAGE] = 1
        used.append(comm.memory()["window"])
        second[:] = 1
        used.append(comm.memory()["window"])
        del first, second
        return [*used, comm.memory()["window"]]


@pytest.mark.multiprocess
def test_window_memory_counts_once_it_is_touched() -> None:
    assert run_ranks(window_use, 2) == [[0, 4 * PAGE, 5 * PAGE, 0]] * 2


def memory_use() -> dict[str, int]:
    with miraccl.init() as comm:
        for count in (1, 1000, 300_000):
            for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
                getattr(comm, name)(np.ones(count * comm.nranks, np.float32))
        comm.barrier()
        return comm.memory()


@pytest.mark.multiprocess
def test_memory_is_bounded_and_linear() -> None:
    """8 MiB per rank for 8 local ranks and no more for 4; reservations cover slots and pages of all
    peers, and the slots that several peers read.
    """
    used = {n: run_ranks(memory_use, n) for n in (2, 4, 8)}
    for n, ranks in used.items():
        shared = layout.NFANOUT * slot_bytes_for(n - 1) if n > 2 else 0
        for memory in ranks:
            assert memory["total"] <= 8 << 20
            assert (
                memory["fifo"]
                <= memory["fifo_reserved"]
                <= 4096 + (n - 1) * (4096 + 8 * slot_bytes_for(n - 1)) + shared
            )
            assert memory["window"] == 0
    shared = layout.NFANOUT * slot_bytes_for(7)
    two, eight = (max(memory["total"] for memory in used[n]) for n in (2, 8))
    assert eight <= 4 * two + shared + (1 << 20)


@given(st.integers(1, 300), st.sampled_from([0, 1, 1 << 20, 64 << 20]))
def test_slots_share_a_budget(npeers: int, budget: int) -> None:
    size = slot_bytes_for(npeers, budget)
    assert size & (size - 1) == 0
    assert 8192 <= size <= 64 << 10
    assert size == 8192 or npeers * size * 8 <= (budget or 4 << 20)
    assert slot_bytes_for(npeers + 1, budget) <= size


# ---- window memory


@pytest.mark.parametrize(
    ("memory", "nranks", "size"),
    [(4 << 40, 8, 64 << 30), (4 << 40, 192, (512 << 30) // 192), (24 << 30, 8, 24 << 30)],
)
def test_windows_leave_addresses_for_other_communicators(
    memory: int, nranks: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank maps the windows of all: half a TiB of 128, whatever memory the host has."""
    monkeypatch.setattr(
        os, "sysconf", {"SC_PAGE_SIZE": PAGE, "SC_PHYS_PAGES": memory // PAGE}.__getitem__
    )
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert default_window_bytes(nranks) == size // PAGE * PAGE


@pytest.mark.multiprocess
def test_window_memory_with_limited_address_space() -> None:
    """Batch systems limit it with ``ulimit -v``; here to a gigabyte more than is mapped."""
    assert run_ranks(limited, 2) == [3.0, 3.0]


def limited() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * PAGE + (1 << 30), resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    with miraccl.init(timeout=20) as comm:
        x = comm.empty(1000, np.float32)
        x[:] = comm.rank + 1
        return float(comm.all_reduce(x)[-1])


def make_window(pages: int) -> WindowAllocator:
    return WindowAllocator(ShmRegion.create("miraccl-test", pages * PAGE))


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 5 * PAGE), st.none()), max_size=40),
    st.randoms(use_true_random=False),
)
def test_window_allocation(plan: list[int | None], random: Any) -> None:
    """A number allocates bytes, None frees a random array: blocks never overlap and are reused
    whole.
    """
    window = make_window(24)
    live: dict[int, np.ndarray] = {}
    array = None
    for tag, nbytes in enumerate(plan):
        if nbytes is None:
            if live:
                del live[random.choice(sorted(live))]
        else:
            try:
                array = window.empty(nbytes, np.uint8)
            except SystemFailure:
                room = sum(max(PAGE, -(-a.nbytes // PAGE) * PAGE) for a in live.values())
                assert window.allocated == room
                assert max((size for _, size in window._free), default=0) < max(
                    PAGE, -(-nbytes // PAGE) * PAGE
                )
                continue
            array[:] = tag % 251
            assert array.ctypes.data % PAGE == 0
            assert window.contains(array.ctypes.data, array.nbytes)
            live[tag] = array
        spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in live.values() if a.nbytes)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        for number, array in live.items():
            assert (array == number % 251).all()
    del array
    live.clear()
    gc.collect()
    assert window._free == [(0, 24 * PAGE)]
    assert window.allocated == 0
    assert window.region.resident_bytes(0, 24 * PAGE) == 0  # the pages went back to the system


def test_window_memory_freed_by_gc_inside_an_allocation() -> None:
    """The garbage collector may free cyclic arrays in the middle of an allocation."""
    window = make_window(64)

    class Lock:
        """A lock under which a block is released."""

        def __init__(self) -> None:
            self.real = threading.Lock()

        def acquire(self, blocking: bool = True) -> bool:
            return self.real.acquire(blocking)

        def release(self) -> None:
            self.real.release()

        def __enter__(self) -> None:
            self.real.acquire()
            cycle.clear()

        def __exit__(self, *_: object) -> None:
            self.real.release()

    cycle: list[Any] = [window.empty(PAGE, np.uint8)]
    window._lock = Lock()  # type: ignore[assignment]
    kept = window.empty(2 * PAGE, np.uint8)
    assert kept.size == 2 * PAGE
    del kept
    window.empty(1, np.uint8)
    assert window.allocated == 0


def test_window_is_first_fit_and_views_keep_blocks_alive() -> None:
    window = make_window(8)
    a, b, c = (window.empty(PAGE, np.uint8) for _ in range(3))
    where = a.ctypes.data
    part = b[100:200]
    del a, b
    assert window._free[0] == (0, PAGE)
    assert window.empty(PAGE // 2, np.float32).shape == (
        PAGE // 2,
    )  # two pages: not in the first hole
    d = window.empty((2, 3), np.int16)
    assert d.ctypes.data == where
    part[:] = 7
    assert (part == 7).all()
    del part
    assert window.allocated == 2 * PAGE
    with pytest.raises(SystemFailure, match=r"cannot allocate .* bytes of window memory"):
        window.empty(9 * PAGE, np.uint8)
    del c, d
    assert window.allocated == 0


def test_window_arrays_survive_their_communicator() -> None:
    with miraccl.init() as comm:
        x = comm.empty((100, 100), "bfloat16")
        x[:] = 3
        y = x[5:7].view(np.uint16)
    del comm
    gc.collect()
    assert (x == 3).all()
    del x
    gc.collect()
    assert (y == y[0, 0]).all()
    y[:] = 1


def test_segments_of_dead_processes() -> None:
    with pytest.raises(SystemFailure, match="cannot open the segment of process 999999999"):
        ShmSegment.open(999999999, 3, PAGE)


def test_threads_agree_on_window_memory() -> None:
    """The plan must be the same on all ranks, even if a thread could address private memory of
    another.
    """

    def work(comm: Communicator) -> None:
        for turn in range(8):
            x = (
                comm.empty(200_000, np.float32)
                if (turn >> comm.rank) & 1
                else np.empty(200_000, np.float32)
            )
            x[:] = comm.rank
            comm.all_reduce(x)
            assert (x == comm.nranks * (comm.nranks - 1) / 2).all()

    in_threads(3, work)


def test_background_work_without_thread_fails_alone() -> None:
    """At the limit on processes, the operation does not start and the communicator remains
    usable.
    """

    def work(comm: Communicator) -> float:
        x = np.ones(4, np.float32)
        if comm.rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading.Thread, "start", _no_more_threads)
                with pytest.raises(
                    SystemFailure,
                    match=r"all_reduce: cannot start the background thread: can't start new thread",
                ):
                    comm.all_reduce(x, async_op=True)
        comm.all_reduce(x)
        comm.all_reduce(x, async_op=True).wait()
        return float(x[0])

    assert in_threads(2, work) == [4.0, 4.0]


def test_broken_connection_is_reported_without_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with Communicator.from_session(single_rank_session(), Options.create()) as comm:
        monkeypatch.setattr(threading.Thread, "start", _no_more_threads)
        comm._core.faults.connection_lost(0, Loss(LossKind.RESET, "Connection reset by peer"))
        with pytest.raises(
            PeerDied, match="rank 0 has lost its connection to rank 0: Connection reset by peer"
        ):
            comm.all_reduce(np.ones(2, np.float32))


def _no_more_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
