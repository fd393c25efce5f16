"""Parts of the backend that need no ranks: the lane, and the streams on a GPU that only notes what it is asked."""

from __future__ import annotations

import contextlib
import datetime
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError)

import torch

from miraccl.errors import CollectiveTimeout, InvalidUsage
from miraccl.torch import BackendError
from miraccl.torch.streams import Streams, as_one_batch
from miraccl.torch.work import Lane, Work

LIMIT_S = 20.0


# ---- the lane


class _Slow(Work):
    """Its end can be held up."""

    def __init__(self) -> None:
        super().__init__("slow", [])
        self.ending, self.go = threading.Event(), threading.Event()

    def settle(self, error: Exception | None) -> bool:
        self.ending.set()
        self.go.wait(LIMIT_S)
        return super().settle(error)


def test_a_lane_is_not_idle_before_its_last_work_has_ended() -> None:
    """Else a synchronous call may overtake the end of the asynchronous one before it, whose caller then sees it unfinished."""
    lane, work = Lane("test"), _Slow()
    lane.submit(work, lambda: None)
    assert work.ending.wait(LIMIT_S)
    assert not lane.idle
    assert not work.is_completed()
    work.go.set()
    lane.run("next", lambda: None)
    assert work.is_completed()
    assert lane.close(LIMIT_S)


def test_callbacks_run_on_the_lane_and_may_wait_for_what_they_start() -> None:
    lane = Lane("test")
    begin = threading.Event()
    seen: list[Any] = []
    work = Work("first", ["value"])
    lane.submit(work, lambda: begin.wait(LIMIT_S))

    def callback(future: Any) -> Any:
        seen.append(lane.idle)
        lane.run("sync", lambda: seen.append("sync"))
        lane.submit(Work("inner", ["inner"]), lambda: seen.append("async")).get_future().wait()
        return future.value()

    chained = work.get_future().then(callback)
    begin.set()
    lane.run("after", lambda: seen.append("after"))
    assert chained.wait() == ["value"]
    assert seen == [False, "sync", "async", "after"]
    assert lane.close(LIMIT_S)


def test_errors_belong_to_the_work_and_leave_the_lane_running() -> None:
    def fail() -> None:
        raise InvalidUsage("no")

    lane = Lane("test")
    work = lane.submit(Work("bad", []), fail)
    with pytest.raises(BackendError, match="InvalidUsage: no"):
        work.wait()
    assert isinstance(work.exception(), BackendError)
    assert lane.submit(Work("good", []), lambda: None).wait()
    with pytest.raises(BackendError, match="InvalidUsage"):
        lane.run("bad", fail)
    assert lane.close(LIMIT_S)
    with pytest.raises(BackendError, match="destroyed"):
        lane.submit(Work("late", []), lambda: None)


# ---- streams


class _Event:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.done = log, name, False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class _Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self) -> _Event:
        self.events += 1
        return _Event(self.log, f"{self.name}/{self.events}")


class _Cuda:
    """``torch.cuda`` as ``Streams`` uses it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current, self.made, self.capturing = _Stream(self.log, "current"), 0, False

    def Stream(self, device: Any) -> _Stream:  # noqa: N802
        self.made += 1
        return _Stream(self.log, f"own{self.made}")

    def current_stream(self, device: Any) -> _Stream:
        return self.current

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class _Tensor:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record_stream(self, stream: _Stream) -> None:
        self.log.append(f"memory of {stream.name}")


class _Comm:
    """A communicator without a GPU side, or with one that has found an error."""

    _device: Any = None


class _Broken:
    def check(self, name: str) -> None:
        raise CollectiveTimeout("waited for rank 1", op=name)


def _streams() -> tuple[Streams, _Cuda]:
    cuda = _Cuda()
    comm: Any = _Comm()
    return Streams(comm, torch.device("cpu"), cuda), cuda


def test_an_asynchronous_operation_waits_for_the_current_stream_and_wait_for_it() -> None:
    streams, cuda = _streams()
    work = streams.run("op", [], [_Tensor(cuda.log)], lambda: cuda.log.append(f"op in {cuda.current.name}"), asynchronous=True)
    assert cuda.log == ["own1 waits for current", "op in own1", "memory of own1"]
    cuda.log.clear()
    assert work.wait()
    work.synchronize()
    work.block_current_stream()
    assert cuda.log == ["current waits for own1/1"] * 3
    assert not work.is_completed()
    with pytest.raises(BackendError, match="not finished within"):
        work.wait(datetime.timedelta(milliseconds=5))
    cuda.capturing = True
    assert work.wait(datetime.timedelta(milliseconds=5))  # a graph that is captured never waits on the host


def test_a_synchronous_operation_runs_in_the_current_stream_and_costs_no_event() -> None:
    streams, cuda = _streams()
    work = streams.run("op", [], [_Tensor(cuda.log)], lambda: cuda.log.append(f"op in {cuda.current.name}"), asynchronous=False)
    assert work.wait()
    assert (cuda.log, cuda.current.events, cuda.made) == (["op in current"], 0, 0)
    here = cuda.current
    with cuda.stream(_Stream(cuda.log, "other")):
        work.wait()
    assert cuda.log[1:] == ["other waits for current"]
    assert not work.is_completed()
    assert here.events == 1


def test_what_kernels_found_is_raised_by_wait_and_told_by_exception() -> None:
    streams, _ = _streams()
    work = streams.run("op", [], [], lambda: None, asynchronous=True)
    assert work.exception() is None
    comm: Any = streams.comm
    comm._device = _Broken()
    with pytest.raises(BackendError, match="CollectiveTimeout: op: waited for rank 1"):
        work.wait()
    assert isinstance(work.exception(), BackendError)
    assert not work.is_success()


def test_a_batch_of_messages_is_one_operation() -> None:
    streams, cuda = _streams()
    with as_one_batch(streams):
        log = cuda.log
        works = [
            streams.transfer(
                name, [name], [_Tensor(log)], functools.partial(log.append, name), functools.partial(log.append, f"{name} ended")
            )
            for name in ("send", "recv")
        ]
        with pytest.raises(BackendError, match="batch has not ended"):
            works[0].wait()
        assert not works[0].is_completed()
        assert cuda.log == []
    whole = streams.close_batch()
    assert whole is not None
    assert cuda.log == ["own1 waits for current", "send", "recv", "send ended", "recv ended", *["memory of own1"] * 2]
    assert all(work.wait() for work in [*works, whole])
    assert whole.result() == ["send", "recv"]
    assert streams.close_batch() is None
    with contextlib.suppress(ZeroDivisionError), as_one_batch(streams):
        streams.transfer("send", [], [], lambda: None, lambda: None)
        raise ZeroDivisionError
    streams.transfer("send", [], [], lambda: cuda.log.append("alone"), lambda: None)
    assert cuda.log[-1] == "alone"


def test_a_barrier_waits_on_the_host_for_what_was_enqueued_before() -> None:
    streams, cuda = _streams()
    drain = streams.mark()
    assert cuda.log == []
    drain()
    assert cuda.log == ["host waits for current/1", "host waits for own1/1"]
