"""Sends and receives in CPU memory: order, tags, any source, threads, size mismatches, timeouts."""

from __future__ import annotations

import datetime
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miraccl.executor.cpu.kernels import layout
from miraccl.runtime.progress import progress
from tests.torch.worlds import LIMIT, both, gloo, refused, world

LARGE = 200_000  # elements of a message that goes in many pieces


def point_to_point(path: str) -> None:
    with world(path) as (rank, nranks):
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        for count in (0, 1, 5, 200000):
            out = torch.empty(count)
            ops = [
                dist.P2POp(dist.isend, torch.full((count,), float(rank)), to),
                dist.P2POp(dist.irecv, out, fro),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert (out == fro).all()
        out = torch.zeros(4, 4)
        works = [dist.irecv(out[:, 2], fro), dist.isend(torch.arange(4.0) + rank, to)]
        assert works[0] is not None
        assert works[1] is not None
        works[0].get_future().wait()
        works[1].wait()
        assert out[:, 2].tolist() == [float(i + fro) for i in range(4)]
        assert works[0].is_completed()
        with pytest.raises(IndexError):  # as on other groups
            dist.batch_isend_irecv([])
        to_self = torch.zeros(3)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.ones(3), rank), dist.P2POp(dist.irecv, to_self, rank)]
        ):
            work.wait()
        assert to_self.tolist() == [1.0] * 3
        if rank == 0:
            for n in range(3):
                dist.send(torch.tensor([n]), 1)
        elif rank == 1:
            got = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
            assert [dist.recv(x, 0) for x in got] == [0, 0, 0]
            assert torch.cat(got).tolist() == [0, 1, 2]
        dist.barrier()
        dist.all_reduce(check := torch.ones(1))
        assert check.item() == nranks


def tags(path: str) -> None:
    """Check matching by tag in any order, and by order within one tag."""
    with world(path) as (rank, nranks):
        other = gloo()
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks

        def crossed(group: Any) -> list[Any]:
            sizes = {7: 3, 0: LARGE, 9: 1, 8: 0}
            sends = [
                dist.isend(torch.full((n,), 10.0 * rank + tag), to, group, tag)
                for tag, n in sizes.items()
            ]
            sends += [dist.isend(torch.full((2,), 0.5 + rank), to, group, 7)]
            got = {tag: torch.zeros(sizes[tag]) for tag in (8, 9, 0, 7)}
            for tag, out in got.items():
                assert dist.recv(out, fro, group, tag) == fro
            dist.recv(again := torch.zeros(2), fro, group, 7)
            for work in sends:
                assert work is not None
                work.wait()
            assert all((out == 10.0 * fro + tag).all() for tag, out in got.items())
            assert (again == 0.5 + fro).all()
            return [*got.values(), again]

        both(crossed, other)
        out = torch.zeros(2)
        early = dist.irecv(out, fro, tag=5)
        dist.all_reduce(torch.ones(3))  # a receive that waits does not hold up a collective
        dist.isend(torch.full((2,), float(rank)), to, tag=5)
        assert early is not None
        early.wait()
        assert out.tolist() == [float(fro)] * 2
        mine = torch.zeros(2)
        works = [dist.isend(torch.ones(2), rank, tag=4), dist.irecv(mine, rank, tag=4)]
        assert all(work is not None and work.wait() for work in works)
        assert mine.tolist() == [1.0] * 2


def floods(path: str) -> None:
    """Send more messages than the FIFO has slots before any is received; check content and
    order.
    """
    with world(path) as (rank, nranks):
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        sizes = [LARGE if i in (4, 20) else i % 7 for i in range(40)]
        for turn in range(2):
            sends = [
                dist.isend(torch.full((n,), 100.0 * rank + i + turn), to, tag=i % 3)
                for i, n in enumerate(sizes)
            ]
            for tag in (2, 0, 1):
                for i in range(tag, len(sizes), 3):
                    dist.recv(out := torch.zeros(sizes[i]), fro, tag=tag)
                    assert (out == 100.0 * fro + i + turn).all(), (turn, i)
            assert all(work is not None and work.wait() for work in sends)
        got = torch.zeros(2)
        for i in range(
            20
        ):  # one after the other, while a receive of another tag waits for the same rank
            waits = dist.irecv(other := torch.zeros(1), fro, tag=50)
            dist.send(torch.full((2,), float(i)), to, tag=51)
            dist.recv(got, fro, tag=51)
            dist.send(torch.full((1,), -float(i)), to, tag=50)
            assert waits is not None
            assert waits.wait()
            assert (got.tolist(), other.item()) == ([float(i)] * 2, -float(i))


def progress_during_other_calls(path: str) -> None:
    """Check progress of a message while its application is in a collective, the store or another
    group.
    """
    with world(path) as (rank, _):
        store = dist.distributed_c10d._get_default_store()
        other = dist.new_group()
        numbers = torch.arange(10.0 * LARGE)
        places = {
            "collective": lambda name: dist.all_reduce(torch.ones(3)),
            "other group": lambda name: dist.barrier(other),
            "store": lambda name: store.set(name, "") if rank == 1 else store.wait([name], LIMIT),
        }
        for place, go in places.items():
            for blocked in ("send", "recv"):
                if rank == 0:
                    out = torch.zeros(10 * LARGE)
                    work = dist.irecv(out, 1) if blocked == "send" else dist.isend(numbers, 1)
                    go(place + blocked)
                    assert work is not None
                    assert work.wait()
                    assert blocked == "recv" or (out == numbers).all()
                else:
                    out = torch.zeros(10 * LARGE)
                    if rank == 1:
                        dist.send(numbers, 0) if blocked == "send" else dist.recv(out, 0)
                        assert blocked == "send" or (out == numbers).all()
                    go(place + blocked)


def starts_as_progress_sleeps(path: str) -> None:
    """Check a message that starts just as the progress thread goes to sleep."""
    with world(path) as (rank, nranks):
        group: Any = dist.group.WORLD
        post, to, fro = group._matcher, (rank + 1) % nranks, (rank - 1) % nranks
        dist.barrier()
        first = dist.irecv(torch.zeros(1), fro)
        assert post.watched
        second = dist.irecv(torch.zeros(1), fro)  # which finds the thread awake
        progress._wake_up.clear()
        progress._stop_watching()
        assert post.watched
        for work in (first, second):
            dist.send(torch.ones(1), to)
            assert work is not None
            assert work.wait()


def arrived_before_poll(path: str) -> None:
    """Check that a message that arrived in time is received, however late the receiver polls."""
    with world(path) as (rank, nranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "watch", lambda post: None)
        for count in (1, 5000):
            dist.send(torch.full((count,), float(rank)), (rank + 1) % nranks)
            dist.barrier()
            work = dist.irecv(out := torch.zeros(count), (rank - 1) % nranks)
            assert work is not None
            assert work.wait(datetime.timedelta(microseconds=1))
            assert (out == (rank - 1) % nranks).all()


def compiled_only(path: str) -> None:
    """Check that compiled code alone sends what fits the FIFO and receives the next matching
    message.

    Any other message stays queued, and a long message that stalls continues later.
    """
    with world(path) as (rank, nranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "watch", lambda post: None)  # it would be there first at times
        group: Any = dist.group.WORLD
        post = group._matcher
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        put, taken = (
            _results(post._exchange, "_send_tagged"),
            _results(post._exchange, "_recv_tagged"),
        )
        sizes = (0, 1, layout.SHORT_BYTES - 1, layout.SHORT_BYTES, layout.SHORT_BYTES + 1, 5000)
        sends = [
            dist.isend(torch.full((n,), i + 10 * rank, dtype=torch.uint8), to, tag=i)
            for i, n in enumerate(sizes)
        ]
        assert put == [layout.OK] * len(sizes)
        assert all(work is not None and work.is_completed() for work in sends)
        dist.barrier()
        for i, n in enumerate(sizes):
            dist.recv(got := torch.zeros(n, dtype=torch.uint8), fro, tag=i)
            assert (got == i + 10 * fro).all(), n
        assert taken == [fro] * len(sizes)
        dist.send(torch.ones(1), to, tag=1)
        dist.send(torch.ones(1), to, tag=2)
        dist.barrier()
        for tag in (2, 1):
            dist.recv(torch.zeros(1), fro, tag=tag)
        assert taken[len(sizes) :] == [-layout.NOT_HANDLED]  # the other one had come aside by then
        _pauses_mid_message(rank, post, put)
        _woken_by_any(rank, post)


def _results(wire: Any, name: str) -> list[int]:
    """Record the results of a compiled entry point from now on."""
    door: Any = getattr(wire, name)
    results: list[int] = []

    def call(*args: int) -> int:
        results.append(door(*args))
        return results[-1]

    setattr(wire, name, call)
    return results


def _pauses_mid_message(rank: int, post: Any, put: list[int]) -> None:
    """Leave the sender with half a message sent; continue after the receiver's compiled code has
    returned.
    """
    numbers = torch.arange(5.0 * LARGE)
    if rank == 0:
        send = dist.isend(numbers, 1)
        dist.barrier()
        assert put[-1] == layout.IN_PROGRESS
        assert send is not None
        send.wait()
    elif rank == 1:
        out = torch.zeros(5 * LARGE)
        waiter = threading.Thread(target=dist.recv, args=(out, 0))
        waiter.start()
        while not post._active:
            pass
        dist.barrier()
        waiter.join(LIMIT.total_seconds())
        assert (out == numbers).all()
    else:
        dist.barrier()


def _woken_by_any(rank: int, post: Any) -> None:
    """Check that a wait for a blocked send notices an arrived message."""
    wire = post._exchange
    if rank == 0:
        send = wire.start(torch.ones(5 * LARGE).numpy().view(np.uint8), 1, receives=False)
        header = wire.header_from(1)
        wire.enqueue(header)
        assert wire.progress([send], LIMIT.total_seconds(), [header])
        assert header.done
        assert not send.done
        wire.reset(header)
        dist.barrier()
        assert wire.progress([send], LIMIT.total_seconds())
    else:
        if rank == 1:
            post.send(torch.ones(1), 0, 0)
        dist.barrier()
        if rank == 1:
            assert wire.progress(
                [wire.start(np.zeros(20 * LARGE, np.uint8), 0, receives=True)],
                LIMIT.total_seconds(),
            )
    dist.barrier()


class _RecordingList(list[Any]):
    """A list that records the reported transfers before each insertion and after each removal."""

    def __init__(self, post: Any, told: list[list[tuple[int, bool]]]) -> None:
        super().__init__()
        self._post, self._told = post, told

    def append(self, item: Any) -> None:
        self._told.append(self._post._transfers())
        super().append(item)

    def remove(self, item: Any) -> None:
        super().remove(item)
        self._told.append(self._post._transfers())


def reports_while_late(path: str) -> None:
    """Check reports to other ranks while a thread is late to process arrived messages.

    A stale report would make the deadlock detector see a cycle that does not exist.
    """
    with world(path) as (rank, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "watch", lambda post: None)
        group: Any = dist.group.WORLD
        post, told = group._matcher, list[list[tuple[int, bool]]]()
        patch.setattr(
            post, "_try_direct_receive", lambda message: False
        )  # compiled code would not tell in between
        if rank == 0:
            dist.recv(
                torch.zeros(1), tag=9
            )  # of rank 2; the next header of rank 1 is awaited from now on
            post._posted_receives, post._unexpected = (
                _RecordingList(post, told),
                _RecordingList(post, told),
            )
            told.append(post._transfers())
            dist.barrier()
            post.poll(post.receive(torch.zeros(1), 2, 8))
            while not post._unexpected:
                post._advance([])
            told.append(post._transfers())
            dist.recv(out := torch.zeros(5 * LARGE), 1, tag=7)
            assert (out == 1).all()
            assert all((1, True) in transfers for transfers in told), told
            _reported_waits(post)
        else:
            if rank == 2:
                dist.send(torch.zeros(1), 0, tag=9)
            dist.barrier()
            sends = (
                [dist.isend(torch.ones(5 * LARGE), 0, tag=7), dist.isend(torch.ones(1), 0, tag=6)]
                if rank == 1
                else []
            )
            sends += [dist.isend(torch.ones(1), 0, tag=8)] if rank == 2 else []
            assert all(send is not None and send.wait() for send in sends)
        dist.barrier()


def _reported_waits(post: Any) -> None:
    """Check that an arrived but unprocessed message is not reported as awaited."""
    message, sort, waits = post.receive(torch.zeros(1), 1, 6), post._match_messages, []

    def look() -> Any:
        waits.append((post._wait_reason(message), post._exchange.received(1)))
        return sort()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(post, "_match_messages", look)
        post.wait(message)
    assert waits
    assert all(
        wait is None or wait.number < received
        for wait, received in waits
        if received == waits[-1][1]
    ), waits


def closed_while_late(path: str) -> None:
    """Check that a thread that is late to a destroyed group leaves its communicator alone."""
    with world(path) as (rank, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "watch", lambda post: None)
        group: Any = dist.group.WORLD
        post = group._matcher
        dist.barrier()
        if rank == 1:
            dist.isend(torch.ones(5 * LARGE), 0, tag=7)
        elif rank == 0:
            waits = dist.irecv(torch.zeros(1), 1, tag=8)
            assert waits is not None
            while not post._unexpected:
                waits.is_completed()
            dist.destroy_process_group()
            moved = _results(post._exchange, "_advance_table")
            post.advance_in_background()
            assert waits.is_completed()
            assert isinstance(waits.exception(), Exception)
            assert not moved


def fair_any_source(path: str) -> None:
    """Check fairness between sources when only calls make progress."""
    with world(path) as (rank, nranks), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            progress, "watch", lambda post: None
        )  # it would be there first at times, and begin with rank 1 again
        rounds = 3
        if rank:
            for i in range(rounds):
                dist.send(torch.full((2,), float(i)), 0)
        dist.barrier()
        if rank == 0:
            got = [
                (dist.recv(out := torch.zeros(2)), out[0].item())
                for _ in range(rounds * (nranks - 1))
            ]
            assert got == [(peer, float(i)) for i in range(rounds) for peer in range(1, nranks)]


def any_source(path: str) -> None:
    with world(path) as (rank, nranks):
        other = gloo()

        def collect(group: Any) -> list[Any]:
            out = torch.zeros(LARGE)
            if rank:
                dist.send(torch.full((LARGE,), float(rank)), 0, group, tag=3)
                return []
            seen = set()
            for _ in range(nranks - 1):
                source = dist.recv(out, group=group, tag=3)
                assert (out == source).all()
                seen.add(source)
            return [torch.tensor(sorted(seen))]

        assert (both(collect, other) or [torch.arange(1, nranks)])[0].tolist() == list(
            range(1, nranks)
        )
        if rank:
            dist.send_object_list([{"from": rank}, "text"], dst=0)
        else:
            box: list[Any] = [None, None]
            senders = [dist.recv_object_list(box, src=peer) for peer in range(1, nranks)]
            assert senders == list(range(1, nranks))
            assert box == [{"from": nranks - 1}, "text"]
        waiting = dist.irecv(torch.zeros(1), tag=99)
        assert waiting is not None
        assert not waiting.is_completed()
        dist.barrier()
        dist.send(torch.ones(1), (rank + 1) % nranks, tag=99)
        assert waiting.wait()
        assert waiting.source_rank() == (rank - 1) % nranks


def threads(path: str) -> None:
    """Check that a thread waiting for a message does not block the thread that sends its
    counterpart.
    """
    with world(path) as (rank, nranks):
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        answers = [torch.zeros(1) for _ in range(3)]
        waiters = [
            threading.Thread(target=dist.recv, args=(answer, to), kwargs={"tag": i})
            for i, answer in enumerate(answers)
        ]
        for waiter in waiters:
            waiter.start()
        question = torch.zeros(1)
        for i in reversed(range(len(answers))):
            dist.send(torch.full((1,), 10.0 * rank + i), to, tag=100 + i)
            dist.recv(question, fro, tag=100 + i)
            dist.send(question + 1, fro, tag=i)
        for waiter in waiters:
            waiter.join(LIMIT.total_seconds())
        assert [answer.item() for answer in answers] == [
            10.0 * rank + i + 1 for i in range(len(answers))
        ]
        future = dist.irecv(late := torch.zeros(2), fro, tag=1).get_future()
        dist.send(torch.ones(2), to, tag=1)
        assert future.wait()[0].tolist() == late.tolist() == [1.0] * 2


def futures(path: str) -> None:
    """Check that futures complete in message order; a callback may post and await messages."""
    with world(path) as (rank, _):
        if rank == 0:
            first, second = (dist.irecv(torch.zeros(1), 1, tag=tag) for tag in (1, 2))
            assert first is not None
            assert second is not None

            def ask_again(future: Any) -> Any:
                more = dist.irecv(out := torch.zeros(1), 1, tag=4)
                assert more is not None
                more.get_future().wait()
                return out

            ends, later = first.get_future().then(ask_again), second.get_future()
            dist.send(torch.ones(1), 1, tag=3)
            assert later.wait()[0].item() == 2
            dist.send(torch.ones(1), 1, tag=3)
            assert ends.wait().item() == 4
        elif rank == 1:
            for tag in (2, 1):
                dist.recv(torch.zeros(1), 0, tag=3)
                dist.send(torch.full((1,), float(tag)), 0, tag=tag)
            dist.send(torch.full((1,), 4.0), 0, tag=4)


def misfits(path: str) -> None:
    """Check size mismatches, invalid ranks and short waits; the group stays usable."""
    with world(path) as (rank, nranks):
        to, fro = (rank + 1) % nranks, (rank - 1) % nranks
        sent = dist.isend(torch.ones(4), to)
        with refused("CollectiveMismatch", f"rank {fro}", "16 bytes", "the tensor has 8"):
            dist.recv(torch.zeros(2), fro)
        late = dist.irecv(out := torch.zeros(3), fro, tag=1)
        assert late is not None
        with refused("CollectiveTimeout", "tag 1", f"from rank {fro}", "continues"):
            late.wait(datetime.timedelta(milliseconds=20))
        dist.barrier()
        dist.send(torch.arange(3.0), to, tag=1)
        late.wait()
        assert out.tolist() == [0.0, 1.0, 2.0]
        assert sent is not None
        sent.wait()
        with refused("InvalidUsage", f"0 to {nranks - 1}"):
            dist.group.WORLD.send([torch.ones(1)], nranks, 0)
        dist.all_reduce(check := torch.ones(1))
        assert check.item() == nranks
