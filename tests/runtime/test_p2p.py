"""Sends, receives, groups and background work on real ranks, in patterns of MPI and NCCL programs.

Each rank function is a sequence of patterns on one communicator, so that ranks start once for all.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import miraccl
from miraccl import Communicator, DType
from miraccl.errors import InvalidUsage
from tests.runtime import reference as ref
from tests.runtime.sweep_ranks import act_as_hosts
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.multiprocess

BIG = 700_000  # float32: far more than the slots of a FIFO hold


def data(rank: int, count: int, tag: int = 0) -> np.ndarray:
    return (np.arange(count) % 1000 + 1000.0 * rank + 7 * tag).astype(np.float32)


def expect(got: np.ndarray, rank: int, tag: int = 0) -> None:
    assert ref.same(got, data(rank, got.size, tag)), f"not what rank {rank} sent with tag {tag}"


def ring(comm: Communicator, count: int) -> None:
    """Send to the next rank and receive from the previous one, with sendrecv and in a group."""
    to, frm = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    out = np.zeros(count, np.float32)
    assert comm.sendrecv(data(comm.rank, count), to, out, frm) is out
    expect(out, frm)
    if count > 1:
        with pytest.raises(InvalidUsage, match="overlap"):
            comm.sendrecv(out[1:], to, out[:-1], frm)
    out[:] = 0
    with miraccl.group():
        comm.send(data(comm.rank, count, 1), to)
        comm.recv(out, frm)
    expect(out, frm, 1)


def receive_first(comm: Communicator, count: int) -> None:
    """Start with a receive on both ranks; wait for it after a send, before it, or poll it."""
    peer = comm.rank ^ 1
    if peer >= comm.nranks:
        return
    for way in ("sync send", "background send", "wait the send first", "poll"):
        out = np.zeros(count, np.float32)
        receive = comm.recv(out, peer, async_op=True)
        if way == "sync send":
            comm.send(data(comm.rank, count), peer)
        else:
            send = comm.send(data(comm.rank, count), peer, async_op=True)
            if way == "wait the send first":
                send.wait()
        if way == "poll":
            while not receive.done():
                pass
        assert receive.wait() is out
        expect(out, peer)
        if way != "sync send":
            assert send.wait() is None
            assert send.exception() is None


def background_progress_during_other_waits(comm: Communicator) -> None:
    """Progress a background message while one side waits in another communicator for the other."""
    peer = comm.rank ^ 1
    other = comm.split(comm.rank // 2)
    assert other is not None
    if peer < comm.nranks:
        out = np.zeros(BIG, np.float32)
        for elsewhere in (0, 1):
            work = (
                comm.recv(out, peer, async_op=True)
                if comm.rank % 2
                else comm.send(data(comm.rank, BIG), peer, async_op=True)
            )
            if comm.rank % 2 == elsewhere:
                other.barrier()  # to which the other one comes when it has its message
            work.wait()
            if comm.rank % 2 != elsewhere:
                other.barrier()
            assert comm.rank % 2 == 0 or ref.same(out, data(peer, BIG))
    other.finalize()


def polled_by_another_thread(comm: Communicator) -> None:
    """Poll a message that another thread waits for: rejected, without effect on that wait."""
    side = comm.split(0)
    assert side is not None
    for count in (3, BIG):
        if comm.rank == 0 and comm.nranks > 1:
            side.barrier()
            comm.send(data(0, count), 1)
        elif comm.rank == 1:
            out = np.zeros(count, np.float32)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    comm._core, "advance_in_background", lambda: None
                )  # it would be taken for the thread that waits
                work = comm.recv(out, 0, async_op=True)
                waiter = threading.Thread(target=work.wait)
                waiter.start()
                while not comm._core.context.in_engine:
                    pass
                for _ in range(2):
                    with pytest.raises(InvalidUsage, match="another thread is inside"):
                        work.done()
                side.barrier()
                waiter.join()
            expect(out, 0)
        else:
            side.barrier()
    side.finalize()


def rejected_while_another_thread_is_inside(comm: Communicator) -> None:
    """A rejected message is neither sent nor received later."""
    side, n = comm.split(0), comm.nranks
    assert side is not None
    x, out = np.full(3, 9, np.float32), np.zeros(3, np.float32)

    def in_a_group() -> None:
        with miraccl.group():
            comm.send(x, 1)

    for inside in (
        comm.barrier,
        lambda: comm.sendrecv(x[:0], (comm.rank + 1) % n, out[:0], (comm.rank - 1) % n),
    ):
        if comm.rank == 0 and n > 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    comm._core, "advance_in_background", lambda: None
                )  # it would be taken for the thread that is inside
                waiter = threading.Thread(target=inside)
                waiter.start()
                while not comm._core.context.in_engine:
                    pass
                for call in (
                    lambda: comm.send(x, 1),
                    lambda: comm.send(x, 1, async_op=True),
                    lambda: comm.recv(out, 1),
                    lambda: comm.recv(out, 1, async_op=True),
                    lambda: comm.sendrecv(x, 1, out, 1),
                    in_a_group,
                ):
                    with pytest.raises(InvalidUsage, match="another thread is inside"):
                        call()
                side.barrier()
                waiter.join()
        else:
            side.barrier()
            inside()
        assert (comm.all_reduce(np.ones(3)) == n).all()
        assert not out.any()
        assert not comm._core.transfers
    side.finalize()


def many_in_flight(comm: Communicator) -> None:
    """Post more messages than a FIFO is deep and wait for them in reverse order."""
    to, frm = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    outs = [np.zeros(1 + 900 * tag, np.float32) for tag in range(20)]
    receives = [comm.recv(out, frm, async_op=True) for out in outs]
    sends = [
        comm.send(data(comm.rank, out.size, tag), to, async_op=True) for tag, out in enumerate(outs)
    ]
    for work in reversed([*sends, *receives]):
        work.wait()
    for tag, out in enumerate(outs):
        expect(out, frm, tag)


def send_while_receive_is_open(comm: Communicator) -> None:
    """A send must not wait for an older receive whose message depends on it."""
    if comm.nranks < 2 or comm.rank > 1:
        return
    if comm.rank == 0:
        answer = np.zeros(5, np.float32)
        receive = comm.recv(answer, 1, async_op=True)
        assert not receive.done()
        comm.send(data(0, BIG), 1)
        comm.send(data(0, 3, 1), 1)
        receive.wait()
        expect(answer, 1)
    else:
        big, small = np.zeros(BIG, np.float32), np.zeros(3, np.float32)
        comm.recv(big, 0)
        comm.recv(small, 0)
        expect(big, 0)
        expect(small, 0, 1)
        comm.send(data(1, 5), 0)


def different_groups(comm: Communicator, count: int) -> None:
    """Group on one side what the other calls singly, both directions, with messages beyond the
    FIFO.
    """
    if comm.rank > 1 or comm.nranks < 2:
        return
    peer = 1 - comm.rank
    outs = [np.zeros(count, np.float32) for _ in range(2)]
    if comm.rank == 0:
        with miraccl.group():
            for tag in range(2):
                comm.recv(outs[tag], peer)
            for tag in range(2):
                comm.send(data(0, count, tag), peer)
    else:
        comm.send(data(1, count, 0), peer)
        comm.recv(outs[0], peer)
        with miraccl.group():
            comm.send(data(1, count, 1), peer)
            comm.recv(outs[1], peer)
    for tag in range(2):
        expect(outs[tag], peer, tag)


def all_to_all_messages(comm: Communicator) -> None:
    """Group several messages of different types to each rank, this one included."""
    dtypes = (np.float32, np.uint8, ref.DTYPES[DType.BFLOAT16])
    outs = {
        (r, t): np.zeros(17 + 3000 * t, d) for r in range(comm.nranks) for t, d in enumerate(dtypes)
    }
    with miraccl.group():
        for (r, t), out in outs.items():
            comm.recv(out, r)
            del t
        for (r, t), out in outs.items():
            comm.send(np.full(out.size, (10 * comm.rank + r + t) % 128, out.dtype), r)
    for (r, t), out in outs.items():
        assert (out.astype(np.float32) == (10 * r + comm.rank + t) % 128).all()


def to_oneself(comm: Communicator) -> None:
    x, out = data(comm.rank, 9), np.zeros(9, np.float32)
    comm.sendrecv(x, comm.rank, out, comm.rank)
    expect(out, comm.rank)
    out[:] = 0
    receive = comm.recv(out, comm.rank, async_op=True)
    comm.send(x, comm.rank)
    receive.wait()
    expect(out, comm.rank)
    with pytest.raises(InvalidUsage, match="sends itself 1 messages and receives 0"):
        comm.send(x, comm.rank)
    with pytest.raises(InvalidUsage, match="sends itself 9 x float32 and receives 8"):
        comm.sendrecv(x, comm.rank, out[:8], comm.rank)


def groups_of_all_kinds(comm: Communicator) -> None:
    """Collectives inside groups, nested groups, two communicators in one group, an exception
    inside.
    """
    a, b = np.full(5, comm.rank, np.int64), np.zeros(5, np.int64)
    to, frm = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
    with miraccl.group():
        summed = comm.all_reduce(a.copy())
        with miraccl.group():
            comm.send(a, to)
            gathered = comm.all_gather(a)
        comm.recv(b, frm)
    assert (summed == comm.nranks * (comm.nranks - 1) // 2).all()
    assert gathered.tolist() == [r for r in range(comm.nranks) for _ in range(5)]
    assert (b == frm).all()
    with contextlib.suppress(ZeroDivisionError), miraccl.group():
        comm.send(a, to)
        raise ZeroDivisionError("nothing of the group is sent")
    with pytest.raises(InvalidUsage, match="async_op is not allowed"), miraccl.group():
        comm.all_reduce(a, async_op=True)
    with miraccl.group():
        pass
    comm.barrier()
    b[:] = -1
    comm.sendrecv(a, to, b, frm)
    assert (b == frm).all()


def groups_of_two_communicators(comm: Communicator) -> None:
    """Name communicators in different orders, with messages that need their peers.

    Some communicators take part with a collective only.
    """
    other = comm.split(0)
    assert other is not None
    n, peer = comm.nranks, comm.rank ^ 1
    x, outs = data(comm.rank, BIG), [np.zeros(BIG, np.float32) for _ in range(2)]
    if peer < n:
        order = [(comm, outs[0]), (other, outs[1])]
        with miraccl.group():
            for each, out in order if comm.rank % 2 else reversed(order):
                each.send(x, peer)
                each.recv(out, peer)
        for out in outs:
            expect(out, peer)
    a, b = np.ones(3000, np.float32), np.full(3000, 2, np.float32)
    with miraccl.group():
        if comm.rank < n - n % 2 and comm.rank % 2:
            comm.send(x[:3], peer)
        elif comm.rank < n - n % 2:
            comm.recv(outs[0][:3], peer)
        other.all_reduce(a)
        comm.all_reduce(b)
        other.all_reduce(b[:0])
    assert (a == n).all()
    assert (b == 2 * n).all()
    other.finalize()


def background_collectives(comm: Communicator) -> None:
    """Mix background work and synchronous calls; argument errors are raised at once."""
    n = comm.nranks
    xs = [np.full(1000 * (i + 1), comm.rank + i, np.float32) for i in range(6)]
    works = [comm.all_reduce(x, async_op=True) for x in xs[:3]]
    assert comm.all_reduce(xs[3]) is xs[3]  # after those before it
    assert all(w.done() for w in works)
    gather = comm.all_gather(xs[4], async_op=True)
    bcast = comm.broadcast(xs[5], n - 1, async_op=True)
    barrier = comm.barrier(async_op=True)
    with pytest.raises(InvalidUsage):
        comm.all_reduce([1, 2], async_op=True)
    assert barrier.wait() is None
    assert gather.wait(10.0).size == n * 5000
    assert bcast.wait() is xs[5]
    assert (xs[5] == n - 1 + 5).all()
    for i, work in enumerate(works):
        assert work.wait() is xs[i]
        assert work.exception() is None
        assert "all_reduce" in repr(work)
    for i in range(4):
        assert (xs[i] == n * (n - 1) / 2 + n * i).all()
    out = np.zeros(4, np.float32)
    to, frm = (comm.rank + 1) % n, (comm.rank - 1) % n
    if n > 1:  # sends and receives while background work is pending go in order as well
        work = comm.all_reduce(np.ones(50000, np.float32), async_op=True)
        receive = comm.recv(out, frm, async_op=True)
        send = comm.send(data(comm.rank, 4), to, async_op=True)
        assert (work.wait() == n).all()
        receive.wait()
        send.wait()
        expect(out, frm)
        receive = comm.recv(out, frm, async_op=True)
        send = comm.send(data(comm.rank, 4, 1), to, async_op=True)
        assert (comm.all_reduce(np.ones(10, np.int32)) == n).all()  # ends what is open before it
        expect(out, frm, 1)
        assert receive.done()
        assert send.done()


def messages_behind_a_background_collective(comm: Communicator) -> None:
    """A send called during a background collective is not overtaken by a later fast-path send."""
    side = comm.split(0)
    assert side is not None
    here = np.zeros(BIG, np.float32)
    for _ in range(2):
        comm.all_reduce(ones := np.ones(3000, np.float32))
    if comm.rank == 0 and comm.nranks > 1:
        work = comm.all_reduce(np.ones(5, np.float32), async_op=True)
        send = comm.send(data(0, BIG), 1, async_op=True)
        side.send(here[:0], 1)  # only now does rank 1 begin
        assert (work.wait() == comm.nranks).all()
        comm.all_reduce(ones)
        send.wait()
    else:
        if comm.rank == 1:
            side.recv(here[:0], 0)
        comm.all_reduce(np.ones(5, np.float32))
        if comm.rank == 1:
            comm.recv(here, 0)
            expect(here, 0)
        comm.all_reduce(ones)
    assert (ones == comm.nranks**2).all()
    side.finalize()


def messages_between_background_collectives(comm: Communicator) -> None:
    """A send called after a background collective does not overtake it, even behind earlier
    sends.
    """
    side = comm.split(0)
    assert side is not None
    first, second = (np.ones(3000, np.float32) for _ in range(2))
    here, there = np.zeros(BIG, np.float32), np.zeros(BIG, np.float32)
    if comm.rank == 0 and comm.nranks > 1:
        works = [
            comm.all_reduce(first, async_op=True),
            comm.send(data(0, BIG), 1, async_op=True),
            comm.all_reduce(second, async_op=True),  # behind the send before it
            comm.send(data(0, BIG, 1), 1, async_op=True),
        ]
        side.send(first[:0], 1)  # only now does rank 1 begin
        for work in works:
            work.wait()
    else:
        if comm.rank == 1:
            side.recv(here[:0], 0)
        comm.all_reduce(first)
        if comm.rank == 1:
            comm.recv(here, 0)
        comm.all_reduce(second)
        if comm.rank == 1:
            comm.recv(there, 0)
            expect(here, 0)
            expect(there, 0, 1)
    assert (first == comm.nranks).all()
    assert (second == comm.nranks).all()
    side.finalize()


def persistent_operations(comm: Communicator) -> None:
    n = comm.nranks
    x, small = np.zeros(3000, np.float32), np.zeros(3, np.float32)
    reduce_x, reduce_small = comm.all_reduce_init(x), comm.all_reduce_init(small, op=miraccl.MAX)
    scaled = comm.all_reduce_init(small, np.zeros(3, np.float32), miraccl.PreMulSum(0.5))
    gather = comm.all_gather_init(small)
    for turn in range(3):
        x[:] = comm.rank + turn
        small[:] = comm.rank - turn
        assert reduce_x() is x
        assert (scaled() == sum(0.5 * (r - turn) for r in range(n))).all()
        assert gather().tolist() == [r - turn for r in range(n) for _ in range(3)]
        assert (comm.all_reduce(np.ones(3000, np.float32)) == n).all()
        work = comm.all_reduce(np.ones(3, np.float32), async_op=True)
        assert (reduce_small() == n - 1 - turn).all()
        assert (work.wait() == n).all()
        assert (x == n * (n - 1) / 2 + n * turn).all()
        assert (comm.broadcast_init(x, 0)() == n * (n - 1) / 2 + n * turn).all()
    assert "all_reduce" in repr(reduce_x)


def persistent_operations_with_parts_and_roots(comm: Communicator) -> None:
    """Repeat persistent operations with new contents, small and large, between other operations."""
    n, rank, root = comm.nranks, comm.rank, comm.nranks - 1
    ranks = np.arange(n)
    for count in (2, 4000):
        x, whole = np.zeros(count, np.int64), np.zeros(n * count, np.int64)
        part, gathered = np.zeros(count, np.int64), np.zeros(n * count, np.int64)
        shares, maxima = (
            comm.reduce_scatter_init(whole),
            comm.reduce_scatter_init(whole, part, miraccl.MAX),
        )
        to_root = comm.reduce_init(x, root, out=part if rank == root else None)
        exchanged = comm.all_to_all_init(whole)
        collected = comm.gather_init(x, root, out=gathered if rank == root else None)
        spread = comm.scatter_init(
            whole if rank == root else None, root, out=np.zeros(count, np.int64)
        )
        for turn in range(3):
            x[:] = 10 * rank + turn
            whole[:] = np.repeat(
                100 * rank + 10 * ranks + turn, count
            )  # block k of rank r is 100 r + 10 k + turn
            assert (shares() == (100 * ranks + 10 * rank + turn).sum()).all()
            assert (maxima() == 100 * root + 10 * rank + turn).all()
            to_root()
            assert rank != root or (part == (10 * ranks + turn).sum()).all()
            assert (comm.all_reduce(np.ones(3, np.int64)) == n).all()
            assert exchanged().reshape(n, count).tolist() == [
                [100 * r + 10 * rank + turn] * count for r in range(n)
            ]
            collected()
            assert rank != root or (gathered == np.repeat(10 * ranks + turn, count)).all()
            assert (spread() == 100 * root + 10 * rank + turn).all()
            assert (x == 10 * rank + turn).all()


def all_patterns(ranks_per_host: int) -> None:
    act_as_hosts(ranks_per_host)
    with miraccl.init(timeout=20) as comm:
        for count in (1, 8, 5000, BIG):
            ring(comm, count)
            receive_first(comm, count)
            different_groups(comm, count)
        background_progress_during_other_waits(comm)
        polled_by_another_thread(comm)
        rejected_while_another_thread_is_inside(comm)
        many_in_flight(comm)
        send_while_receive_is_open(comm)
        all_to_all_messages(comm)
        to_oneself(comm)
        groups_of_all_kinds(comm)
        groups_of_two_communicators(comm)
        background_collectives(comm)
        messages_between_background_collectives(comm)
        messages_behind_a_background_collective(comm)
        persistent_operations(comm)
        persistent_operations_with_parts_and_roots(comm)


@pytest.mark.parametrize(("nranks", "ranks_per_host"), [(1, 0), (2, 0), (3, 0), (2, 1), (4, 2)])
def test_patterns(nranks: int, ranks_per_host: int) -> None:
    run_ranks(all_patterns, nranks, ranks_per_host, timeout=60)
