"""Parts of the backend that need no ranks: the work queue, and streams on a recording GPU."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from miraccl import get_unique_id, params
from miraccl.api.communicator import Communicator
from miraccl.bootstrap import stacks
from miraccl.errors import CollectiveTimeout, InvalidUsage, PeerDied
from miraccl.runtime.core_access import core_access
from miraccl.torch import (
    BackendError,
    ProcessGroupMiraccl,
    fast_path,
    operators,
    point_to_point,
    tensors,
    wrapped,
)
from miraccl.torch.streams import GroupStreams, StreamWork
from miraccl.torch.work import Work, WorkQueue, seconds
from miraccl.types import Collective, PreMulSum, RedOp
from tests.torch.worlds import equal

LIMIT_S = 20.0


def test_pytorch_is_a_library_wherever_it_lies() -> None:
    """Report a wait inside PyTorch at the application's line."""
    assert f"{torch.__path__[0]}/" in stacks._LIBRARIES


# ---- timeouts


def test_centuries_are_a_deadline() -> None:
    """Clamp timeouts whose nanoseconds exceed 64 bits or what a lock accepts."""
    centuries = datetime.timedelta(days=300 * 366)
    comm, mail = (Communicator(1, get_unique_id(), 0) for _ in range(2))
    group = ProcessGroupMiraccl(dist.HashStore(), comm, mail)
    group.set_timeout(centuries)
    assert core_access(comm).timeout == params.FOREVER
    assert seconds(centuries) == params.FOREVER <= threading.TIMEOUT_MAX
    assert seconds(datetime.timedelta(seconds=3)) == 3
    x, options = torch.ones(2), dist.AllreduceOptions()
    options.timeout = centuries
    assert group.allreduce([x], options).wait(centuries)
    group.monitored_barrier(centuries)
    group.shutdown()


# ---- the queue


def test_a_lane_without_a_thread_takes_nothing_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more_threads(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    queue, work = WorkQueue("test"), Work("first", [])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(
            BackendError,
            match=r"cannot start the thread of background operations: can't start new thread",
        ):
            queue.submit(Work("none", []), lambda: None)
    queue.submit(work, lambda: None)
    assert work.wait(datetime.timedelta(seconds=LIMIT_S))
    assert queue.close(LIMIT_S)


def test_many_threads_may_wait_for_one_work() -> None:
    work, queue, go = Work("slow", []), WorkQueue("test"), threading.Event()
    queue.submit(work, lambda: go.wait(LIMIT_S))
    with pytest.raises(BackendError, match=r"slow: timed out after 0:00:00\.010000"):
        work.wait(datetime.timedelta(milliseconds=10))
    assert not work.is_completed()
    ended: list[bool] = []
    waiters = [threading.Thread(target=lambda: ended.append(work.wait())) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert ended == []
    go.set()
    for waiter in waiters:
        waiter.join(LIMIT_S)
    assert ended == [True] * 3
    assert work.wait(datetime.timedelta(milliseconds=1))
    assert queue.close(LIMIT_S)


class _Slow(Work):
    """A work whose completion can be delayed."""

    def __init__(self) -> None:
        super().__init__("slow", [])
        self.ending, self.go = threading.Event(), threading.Event()

    def mark_done(self, error: Exception | None) -> bool:
        self.ending.set()
        self.go.wait(LIMIT_S)
        return super().mark_done(error)


def test_the_queue_is_busy_until_its_last_work_has_ended() -> None:
    """Otherwise a synchronous call could overtake the end of the asynchronous one before it."""
    queue, work = WorkQueue("test"), _Slow()
    queue.submit(work, lambda: None)
    assert work.ending.wait(LIMIT_S)
    assert not queue.idle
    assert not work.is_completed()
    work.go.set()
    queue.run("next", lambda: None)
    assert work.is_completed()
    assert queue.close(LIMIT_S)


def test_a_lane_tells_while_it_runs_beside_the_program() -> None:
    recorded: list[bool] = []
    queue, go = WorkQueue("test", recorded.append), threading.Event()
    queue.run("on the caller's thread", lambda: None)
    works = [queue.submit(Work("test", []), lambda: go.wait(LIMIT_S)) for _ in range(3)]
    assert recorded == [True]
    go.set()
    assert all(work.wait() for work in works)
    assert queue.close(LIMIT_S)
    assert recorded == [True, False]


def test_a_queue_closed_by_a_signal_handler_rejects_the_call() -> None:
    recorded: list[str] = []

    def destroy(beside: bool) -> None:
        """Close the queue like a signal handler during the call."""
        assert queue.close(LIMIT_S)

    def call() -> None:
        with pytest.raises(BackendError, match="destroyed"):
            queue.submit(Work("test", []), lambda: recorded.append("run"))
        recorded.append("refused")

    queue = WorkQueue("test", destroy)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(LIMIT_S)
    assert recorded == ["refused"]


def test_callbacks_run_on_the_lane_and_may_wait_for_what_they_start() -> None:
    queue = WorkQueue("test")
    begin = threading.Event()
    seen: list[Any] = []
    work = Work("first", ["value"])
    queue.submit(work, lambda: begin.wait(LIMIT_S))

    def callback(future: Any) -> Any:
        seen.append(queue.idle)
        queue.run("sync", lambda: seen.append("sync"))
        queue.submit(Work("inner", ["inner"]), lambda: seen.append("async")).get_future().wait()
        return future.value()

    chained = work.get_future().then(callback)
    begin.set()
    queue.run("after", lambda: seen.append("after"))
    assert chained.wait() == ["value"]
    assert seen == [False, "sync", "async", "after"]
    assert queue.close(LIMIT_S)


def test_errors_belong_to_the_work_and_leave_the_lane_running() -> None:
    def fail() -> None:
        raise InvalidUsage("no")

    queue = WorkQueue("test")
    work = queue.submit(Work("bad", []), fail)
    with pytest.raises(BackendError, match="InvalidUsage: no"):
        work.wait()
    assert isinstance(work.exception(), BackendError)
    assert queue.submit(Work("good", []), lambda: None).wait()
    with pytest.raises(BackendError, match="InvalidUsage"):
        queue.run("bad", fail)
    assert queue.close(LIMIT_S)
    with pytest.raises(BackendError, match="destroyed"):
        queue.submit(Work("late", []), lambda: None)


# ---- tensors as arrays


@pytest.mark.parametrize("count", [0, 3, tensors.SMALL_BYTES])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.bool, torch.int16]
)
def test_a_list_is_one_array_and_back(count: int, dtype: torch.dtype) -> None:
    """Round-trip lists copied as bytes and by PyTorch: large, strided, conjugate and widened."""
    values = torch.arange(4 * count).reshape(4, count) % 5
    plain = [row.clone() for row in values.to(dtype)]
    strided = [torch.stack([row, row], 1)[:, 0] for row in plain]
    lists = [
        plain,
        strided,
        [plain[0], *strided[1:]],
        *([[row.conj() for row in plain]] if dtype.is_complex else []),
    ]
    for form in tensors.ElementEncoding:
        if form is tensors.ElementEncoding.WIDE and dtype not in tensors.WIDENED:
            continue
        for given in lists:
            want = (
                torch.cat(given).to(torch.int32)
                if form is tensors.ElementEncoding.WIDE
                else torch.cat(given).resolve_conj()
            )
            staged = tensors.stage_list(given, "test", form)
            assert staged.count == sum(staged.counts) == staged.array.size
            assert len(set(staged.counts)) == 1
            staged.load()
            assert staged.array.tobytes() == want.view(torch.uint8).numpy().tobytes()
            results = [torch.zeros_like(tensor) for tensor in given]
            target = tensors.stage_list(results, "test", form, load=False)
            target.array[:] = staged.array
            target.store()
            assert all(torch.equal(a, b) for a, b in zip(results, given, strict=True))


def test_errors_of_other_processes_are_the_same() -> None:
    error = BackendError(
        CollectiveTimeout("waited", rank=0, peer=1, op="all_reduce", graph=("rank 1: never came",))
    )
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is BackendError
        assert (str(again), again.error.peer) == (str(error), 1)


def test_a_list_is_of_one_type() -> None:
    with pytest.raises(
        InvalidUsage, match=r"have one dtype, got \['torch.float32', 'torch.int32'\]"
    ):
        tensors.stage_list([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], "test")


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
        self.cuda_stream = f"number of {name}"

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: _Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record_event(self, event: _Event | None = None) -> _Event:
        if event is None:
            self.events += 1
            return _Event(self.log, f"{self.name}/{self.events}")
        event.name = self.name
        return event


class _Cuda:
    """``torch.cuda`` as ``GroupStreams`` uses it."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current, self.made, self.events = _Stream(self.log, "current"), 0, 0
        self.capturing = self.elsewhere = False

    def Stream(self, device: Any) -> _Stream:  # noqa: N802
        self.made += 1
        return _Stream(self.log, f"own{self.made}")

    def Event(self) -> _Event:  # noqa: N802
        self.events += 1
        return _Event(self.log, "")

    def current_device(self) -> int | None:
        return 5 if self.elsewhere else None

    def current_stream(self, device: Any) -> _Stream:
        return self.current

    def set_stream(self, stream: _Stream) -> None:
        self.current = stream

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self.log.append("on the group's GPU")
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
    """A communicator without a GPU side, or with one that holds a fault."""

    _device: Any = None


class _Broken:
    def check(self, name: str) -> None:
        raise CollectiveTimeout("waited for rank 1", op=name, graph=("rank 1: never came",))


def _streams() -> tuple[GroupStreams, _Cuda]:
    cuda = _Cuda()
    comm: Any = _Comm()
    return GroupStreams(comm, torch.device("cpu"), cuda), cuda


def test_an_asynchronous_operation_waits_for_the_current_stream_and_wait_for_it() -> None:
    streams, cuda = _streams()
    work = streams.run(
        "op",
        [],
        [_Tensor(cuda.log)],
        lambda: cuda.log.append(f"op in {cuda.current.name}"),
        asynchronous=True,
    )
    assert cuda.log == ["own1 waits for current", "op in own1", "memory of own1"]
    cuda.log.clear()
    assert work.wait()
    work.synchronize()
    work.block_current_stream()
    assert cuda.log == ["current waits for own1"] * 3
    assert not work.is_completed()
    with pytest.raises(BackendError, match="timed out after"):
        work.wait(datetime.timedelta(milliseconds=5))
    cuda.capturing = True
    assert work.wait(
        datetime.timedelta(milliseconds=5)
    )  # a graph that is captured never waits on the host


def test_an_operation_gets_its_stream() -> None:
    streams, cuda = _streams()
    recorded: list[Any] = []

    def operation(*args: Any, stream: Any = None) -> None:
        recorded.append((args, stream))

    work = streams.call("op", ["x"], [_Tensor(cuda.log)], operation, (1, 2), asynchronous=True)
    assert recorded == [((1, 2), "number of own1")]
    assert cuda.log == ["own1 waits for current", "memory of own1"]
    assert work.wait()
    assert cuda.log[2:] == ["current waits for own1"]
    work = streams.call("op", ["x"], [_Tensor(cuda.log)], operation, (3,), asynchronous=False)
    assert recorded[1:] == [((3,), None)]
    assert work.wait()
    assert work.result() == ["x"]
    assert len(cuda.log) == 3
    cuda.elsewhere = (
        True  # the group's GPU is not the current one, whose stream the operation would take
    )
    work = streams.call("op", [], [], operation, (4,), asynchronous=True)
    assert recorded[2:] == [((4,), None)]
    assert cuda.log[3:] == ["on the group's GPU", "own1 waits for current"]

    def broken(stream: Any = None) -> None:
        raise InvalidUsage("no")

    for elsewhere in (False, True):
        cuda.elsewhere = elsewhere
        with pytest.raises(BackendError, match="InvalidUsage: no"):
            streams.call("op", [], [], broken, (), asynchronous=True)


def test_events_serve_again_once_nobody_can_wait_for_them() -> None:
    streams, cuda = _streams()
    works = [streams.run("op", [], [], lambda: None, asynchronous=True) for _ in range(3)]
    assert cuda.events == 4  # and that by which the streams part
    assert len({id(work.event) for work in works}) == 3
    del works
    for _ in range(5):
        work = streams.run("op", [], [], lambda: None, asynchronous=True)
        assert work.wait()
    assert cuda.events == 4


def test_a_synchronous_operation_runs_in_the_current_stream_and_costs_no_event() -> None:
    streams, cuda = _streams()
    work = streams.run(
        "op",
        [],
        [_Tensor(cuda.log)],
        lambda: cuda.log.append(f"op in {cuda.current.name}"),
        asynchronous=False,
    )
    assert work.wait()
    assert (cuda.log, cuda.current.events, cuda.made) == (["op in current"], 0, 0)
    here = cuda.current
    with cuda.stream(_Stream(cuda.log, "other")):
        work.wait()
    assert cuda.log[1:] == ["other waits for current"]
    assert not work.is_completed()
    assert here.events == 1


def test_kernel_faults_are_raised_by_wait_and_returned_by_exception() -> None:
    streams, _ = _streams()
    work = streams.run("op", [], [], lambda: None, asynchronous=True)
    assert work.exception() is None
    comm: Any = streams.comm
    comm._device = _Broken()
    with pytest.raises(
        BackendError, match="CollectiveTimeout: op: waited for rank 1\n  rank 1: never came"
    ):
        work.wait()
    assert isinstance(work.exception(), BackendError)
    assert not work.is_success()
    with pytest.raises(BackendError, match="CollectiveTimeout"):
        work.get_future().wait()


def test_messages_that_start_together_are_one_operation() -> None:
    streams, cuda = _streams()
    log = cuda.log
    works: list[Work] = []

    def start() -> None:
        for name in ("send", "recv"):
            begin, after = (
                functools.partial(log.append, name),
                functools.partial(log.append, f"{name} ended"),
            )
            works.append(streams.transfer(name, [name], [_Tensor(log)], begin, after))
        with pytest.raises(BackendError, match="batch is still open"):
            works[0].wait()
        assert not works[0].is_completed()
        assert log == []

    whole = streams.run_batch(start)
    assert whole is not None
    assert log == [
        "own1 waits for current",
        "send",
        "recv",
        "send ended",
        "recv ended",
        *["memory of own1"] * 2,
    ]
    assert all(work.wait() for work in [*works, whole])
    assert whole.result() == ["send", "recv"]
    assert streams.run_batch(lambda: None) is None

    def broken() -> None:
        streams.transfer("send", [], [], lambda: None, lambda: None)
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        streams.run_batch(broken)
    streams.transfer("send", [], [], lambda: log.append("alone"), lambda: None)
    assert log[-1] == "alone"


def test_a_barrier_waits_on_the_host_for_what_was_enqueued_before() -> None:
    streams, cuda = _streams()
    drain = streams.record_drain_point()
    assert cuda.log == ["on the group's GPU"]
    drain()
    assert cuda.log[1:] == ["host waits for current/1", "host waits for own1/1"]


# ---- the group's way for GPU memory, with CPU tensors in its place: one rank, whose communicator
# takes both


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    comm, mail = (Communicator(1, get_unique_id(), 0) for _ in range(2))
    group = ProcessGroupMiraccl(dist.HashStore(), comm, mail)
    monkeypatch.setattr(tensors.Staged, "device", torch.device("cuda", 0))
    monkeypatch.setattr(tensors, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(point_to_point, "is_plain_cpu_tensor", lambda tensor: False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    cuda = _Cuda()
    group._streams = GroupStreams(comm, torch.device("cuda", 0), cuda)
    monkeypatch.setattr(group._streams, "future", lambda work: work.result())
    yield group
    group.shutdown()


def test_every_call_takes_the_streams(group: Any) -> None:
    x = torch.arange(6.0)
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64, torch.float8_e5m2):
        value, out = x.to(dtype), torch.zeros(6).to(dtype)
        columns = torch.zeros(3, 4).to(dtype)[:, ::2]
        calls: list[tuple[str, Any, Any]] = [
            ("allreduce", ([value.clone()],), None),
            ("broadcast", ([value.clone()],), None),
            ("reduce", ([value.clone()],), None),
            ("allgather", ([[out]], [value]), out),
            ("allgather_coalesced", ([[out]], [value]), out),
            ("_allgather_base", (out, value), out),
            ("all_gather_single_coalesced", ([out], [value]), out),
            ("reduce_scatter", ([out], [[value]]), out),
            ("_reduce_scatter_base", (columns.view_as(columns), value.reshape(3, 2)), columns),
            ("alltoall", ([out], [value]), out),
            ("alltoall_base", (out, value, [], []), out),
            ("alltoall_base", (out, value, [6], [6]), out),
            ("gather", ([[out]], [value]), out),
            ("gather_single", (out, value), out),
            ("scatter", ([out], [[value]]), out),
        ]
        for name, args, result in calls:
            out.zero_()
            work = getattr(group, name)(*args)
            assert isinstance(work, StreamWork), name
            assert work.wait()
            got = args[0][0] if result is None else result
            assert equal(got.reshape(-1).contiguous(), value), (name, dtype)
    assert group._get_sequence_number_for_group() == 5 * len(calls)


def test_ordinary_tensors_are_arrays_at_once() -> None:
    """Every other layout is left to ``stage``, whose values must be those of the tensor."""
    x, pairs = torch.arange(6.0), torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (x, x[2:4], torch.ones(3, requires_grad=True), x.bfloat16()):
        array = tensors.plain_cpu_array(tensor)
        assert array.ctypes.data == tensor.data_ptr()
        assert array.tolist() == tensor.tolist()
    with torch.inference_mode():
        assert tensors.plain_cpu_array(torch.ones(2)).tolist() == [1, 1]
    lazy = torch._neg_view(x)
    assert lazy.is_contiguous()
    assert tensors.stage(lazy, "test").temporary is not None
    others = [lazy, pairs, torch.conj(pairs), x[::2], x.bool(), x.short(), torch.nn.Parameter(x)]
    others += [x.to_sparse(), torch.ones(2, device="meta")]
    assert [tensors.plain_cpu_array(tensor) for tensor in others] == [None] * len(others)


def test_an_asynchronous_sum_of_an_ordinary_tensor(group: Any) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    works = [group.allreduce([torch.full((3,), float(i))], options) for i in range(4)]
    assert all(type(work) is Work for work in works)
    values = [work.get_future().wait()[0].tolist() for work in works]
    assert values == [[float(i)] * 3 for i in range(4)]


class _RecordingComm:
    """A communicator that records its calls."""

    rank, nranks, _device = 0, 1, None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, stream=None: self.calls.append((name, *args))


def test_only_common_calls_take_the_fast_path(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def ordinary(tensor: Any, ordinal: int | None) -> bool:
        return (
            ordinal == 0
            and type(tensor) is torch.Tensor
            and tensor.is_contiguous()
            and tensor.dtype in tensors.NATIVE
        )

    monkeypatch.setattr(fast_path, "is_plain_gpu_tensor", ordinary)
    monkeypatch.setattr(fast_path, "plain_cpu_array", lambda tensor: None)
    monkeypatch.setattr(group, "_start", lambda *_, **_named: "staged")
    real, recorded = group.communicator, _RecordingComm()
    monkeypatch.setattr(group, "communicator", recorded)
    x, out, bools = torch.arange(6.0), torch.zeros(6), torch.zeros(6, dtype=torch.bool)
    plain, average, scaled = (dist.AllreduceOptions() for _ in range(3))
    average.reduceOp = dist.ReduceOp.AVG
    scaled.reduceOp = dist._make_nccl_premul_sum(2.0)
    gather, scatter, exchange = (
        c10d.AllgatherOptions(),
        c10d.ReduceScatterOptions(),
        c10d.AllToAllOptions(),
    )
    column, pairs, pairs_out = torch.zeros(6, 2)[:, 0], torch.ones(3, 2), torch.zeros(3, 2)
    straight: list[tuple[str, Any, Any]] = [
        ("allreduce", ([x], plain), ("all_reduce", x, x, RedOp.SUM)),
        ("allreduce", ([x], average), ("all_reduce", x, x, RedOp.AVG)),
        ("broadcast", ([x], dist.BroadcastOptions()), ("broadcast", x, 0)),
        ("reduce", ([x], dist.ReduceOptions()), ("reduce", x, 0, None, RedOp.SUM)),
        ("_allgather_base", (out, x, gather), ("all_gather", x, out)),
        ("all_gather_single", (out, x, gather), ("all_gather", x, out)),
        ("_reduce_scatter_base", (out, x, scatter), ("reduce_scatter", x, out, RedOp.SUM)),
        ("alltoall_base", (out, x, [], [], exchange), ("all_to_all", x, out)),
        ("alltoall_base", (out, x, [6], [6], exchange), ("all_to_all_v", x, [6], [6], out)),
        (
            "alltoall_base",
            (pairs_out, pairs, [3], [3], exchange),
            ("all_to_all_v", pairs, [6], [6], pairs_out),
        ),
    ]
    others: list[tuple[str, Any]] = [
        ("allreduce", ([x], scaled)),
        ("allreduce", ([bools], plain)),
        ("allreduce", ([column], plain)),
        ("allreduce", ([x],)),
        ("allreduce", (x,)),
        ("allreduce", (x, dist.ReduceOp.MAX)),
        ("reduce", ([bools], dist.ReduceOptions())),
        ("_reduce_scatter_base", (out, column, scatter)),
        ("alltoall_base", (out, column, [6], [6], exchange)),
    ]
    for name, args, wanted in straight:
        before = group._sequence
        assert getattr(group, name)(*args).wait()
        assert recorded.calls.pop() == wanted
        assert group._sequence == before + 1
    for name, args in others:
        assert getattr(group, name)(*args) == "staged", name
    for splits in ([5], [3, 3]):
        with pytest.raises(BackendError, match="split"):
            group.alltoall_base(out, x, splits, [6], exchange)
    with torch.profiler.profile():
        assert group.allreduce([x], plain) == "staged"
    group._batch = []
    assert group.allreduce([x], plain) == "staged"
    group._batch = None
    assert recorded.calls == []
    assert group.allreduce([x], plain).result() == [x]
    monkeypatch.setattr(group, "communicator", real)


def test_lists_of_plain_tensors_are_not_staged(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[str] = []
    monkeypatch.setattr(
        fast_path,
        "is_plain_gpu_tensor",
        lambda tensor, ordinal: tensor.is_contiguous() and tensor.dtype in tensors.NATIVE,
    )
    monkeypatch.setattr(group, "_start", lambda name, *_, **_named: staged.append(name))
    recorded: list[Any] = []  # to the GPU side, which is not there
    monkeypatch.setattr(fast_path, "mark_collective", lambda comm, *what: recorded.append(what))
    x, gather = torch.arange(6.0).reshape(2, 3), c10d.AllgatherOptions()

    def here(kind: Any) -> Any:
        options = kind()
        options.asyncOp = (
            False  # or messages are recorded a stream, which those on CPU memory have not
        )
        return options

    calls: list[Callable[[Any], Any]] = [
        lambda out: group.allgather([[out]], [x], gather),
        lambda out: group.reduce_scatter([out], [[x]], c10d.ReduceScatterOptions()),
        lambda out: group.alltoall([out], [x], here(c10d.AllToAllOptions)),
        lambda out: group.gather([[out]], [x], here(dist.GatherOptions)),
        lambda out: group.scatter([out], [[x]], here(dist.ScatterOptions)),
    ]
    for call in calls:
        out = torch.zeros(2, 3)
        assert call(out).wait()
        assert torch.equal(out, x)
    assert not staged
    assert recorded == [
        (Collective.ALL_TO_ALL, 0, (), 2),
        (Collective.GATHER, 0, (6,), 2),
        (Collective.SCATTER, 0, (6,), 2),
    ]
    for other in (out.view(-1), torch.zeros(3, 2).t(), torch.zeros(2, 3, dtype=torch.int16)):
        group.allgather([[other]], [x], gather)
    assert staged == ["all_gather"] * 3
    group.alltoall([x], [x], c10d.AllToAllOptions())  # nothing that a message could be
    group._on_one_host = False
    group.alltoall([out], [x], c10d.AllToAllOptions())
    assert staged[3:] == ["all_to_all"] * 2


def test_sends_and_receives_of_a_batch_go_together(group: Any) -> None:
    out = torch.zeros(2, 2)

    def start() -> None:
        group.send([torch.ones(2)], 0, 0)
        group.recv([out[:, 1]], 0, 0)
        assert out.sum() == 0

    works = group.run_batch(torch.device("cuda", 0), start)
    assert [work.wait() for work in works] == [True]
    assert out.tolist() == [[0.0, 1.0]] * 2


def test_a_group_has_one_gpu(group: Any) -> None:
    with pytest.raises(BackendError, match="one GPU per rank"):
        group._streams_of(torch.device("cuda", 1))
    assert group._get_backend("cuda:0") is group
    with pytest.raises(RuntimeError, match="no backend"):
        group._get_backend("xpu")


def test_tensors_of_a_future_are_found_as_pytorch_finds_them() -> None:
    original: Any = torch._jit_internal._extract_tensors.__wrapped__
    asked: list[Any] = []

    def note(value: Any) -> Any:
        asked.append(value)
        return original(value)

    find = wrapped._extract_tensors(note)
    x, y = torch.ones(2), torch.zeros(3)
    for value in ([x], [y, x], []):
        assert [id(tensor) for tensor in find(value)] == [id(tensor) for tensor in original(value)]
    assert not asked
    for other in (x, (x, y), {"x": [x]}, [x, 1], [torch.nn.Parameter(x)], None):
        assert [id(tensor) for tensor in find(other)] == [id(tensor) for tensor in original(other)]
    assert len(asked) == 6
    with pytest.raises(BackendError, match="PeerDied"):
        find(BackendError(PeerDied("rank 1 died")))


def test_symmetric_memory_is_refused_before_it_ends_the_process(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous = wrapped._symmetric_memory_rendezvous(lambda tensor, group: "met")
    monkeypatch.setattr(
        distributed_c10d, "_resolve_process_group", lambda name: group if name == "ours" else None
    )
    for given in (group, "ours"):
        with pytest.raises(BackendError, match=r"symmetric memory.*gloo"):
            rendezvous(None, given)
    assert rendezvous(None, "theirs") == "met"


def test_the_flight_recorder_leaves_groups_in_python_alone(group: Any) -> None:
    recorded: list[Any] = []
    attach = wrapped._maybe_attach_flight_recorder(
        lambda pg, config, global_ranks: recorded.append((pg, global_ranks))
    )
    attach(group, None, [0])
    attach("theirs", None, [0])
    assert recorded == [("theirs", [0])]


def test_a_block_of_coalesced_calls_needs_no_gpu_where_there_is_none(
    group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``_abort_process_group`` of PyTorch 2.15 opens a block for the build's accelerator."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    group._streams = None
    group._start_coalescing(torch.device("cuda"))
    assert group._end_coalescing(torch.device("cuda")).wait()


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.complex64, torch.float32])
def test_a_part_of_a_column_is_an_array_of_any_form(
    dtype: Any, count: int, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of at most one element are contiguous whatever their stride."""
    monkeypatch.setattr(tensors, "_on_gpu", lambda _: on_gpu)
    column = torch.arange(6).to(dtype).reshape(3, 2)[1 : 1 + count, 1]
    assert column.stride() == (2,)
    for form in (tensors.ElementEncoding.VALUES, tensors.ElementEncoding.BYTES):
        staged = tensors.stage(column, "test", form)
        assert staged.temporary is None
        assert not on_gpu or staged.array.stride() == (1,)
        array = staged.array.numpy() if on_gpu else staged.array
        assert array.tobytes() == column.clone().numpy().tobytes()


def test_factors_of_integers_are_exact() -> None:
    """A factor may be an integer that float64 cannot represent."""
    odd = (1 << 53) + 1
    for factor, want in (
        (torch.tensor([odd]), odd),
        (torch.tensor(odd), odd),
        (torch.tensor([2.5]), 2.5),
        (2.0, 2.0),
    ):
        op = operators.reduction_plan(dist._make_nccl_premul_sum(factor), torch.int64, "test").op
        assert op == PreMulSum(want), (factor, op)


@pytest.mark.parametrize(("name", "wanted"), [("BAND", 0b1000), ("BOR", 0b1110), ("BXOR", 0b0110)])
def test_bitwise_operators_fold_tensors(name: str, wanted: int) -> None:
    class Comm:
        def all_gather(self, x: Any) -> Any:
            return torch.tensor([0b1100, 0b1010], dtype=torch.uint8)

    comm: Any = Comm()
    x = torch.tensor([0b1100], dtype=torch.uint8)
    operators.all_reduce(
        comm, x, operators.reduction_plan(getattr(dist.ReduceOp, name), torch.uint8, "test")
    )
    assert x.tolist() == [wanted]
