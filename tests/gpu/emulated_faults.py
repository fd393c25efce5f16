"""Ranks of the fault tests of GPU communicators on an emulated driver: deadlines, mismatches,
aborts,
deaths.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.diagnosis import blocked_ops, detector
from miraccl.errors import CollectiveMismatch, CollectiveTimeout, CommunicatorAborted, MiracclError
from miraccl.executor.cuda import layout
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.types import RedOp
from tests.diagnosis.fault_ranks import seen as told_by
from tests.gpu.emulated_ranks import EmulatedRank, rank
from tests.gpu.fake_ranks import session
from tests.runtime.pair_ranks import await_two, status_queries


def mismatch(later: bool) -> str:
    """Receive another size or type than is sent. ``later``: the sender has a valid message behind
    it.
    """
    with rank() as me:
        me.comm.barrier(stream=0)
        size = 100 if later else 100_000
        with miraccl.group():
            if me.rank == 0:
                me.comm.send(me.put(np.zeros(size), "int32"), 1)
            else:
                me.comm.recv(me.zeros(100, "float32"), 0)
            for _ in range(later):
                x = me.zeros(100_000, "float32")
                me.comm.send(x, 1) if me.rank == 0 else me.comm.recv(x, 0)
        return outcome(me)


def set_up_against(what: str, where: str) -> dict[str, Any]:
    """Rank 1 starts using GPU memory, asks for window memory or finalizes; the others call
    ``what``.
    No deadline passes.
    """
    with session() as world:
        me = EmulatedRank(world, 600.0)
        world.timeout = 600.0
        me.comm.all_reduce(np.ones(3))
        x = me.put(np.ones(3))
        if where != "set-up":
            me.comm.all_reduce(x)
            me.synchronize()
        world.barrier("test")
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: me.comm.all_reduce(np.ones(3)),
            "barrier": me.comm.barrier,
            "recv": lambda: me.comm.recv(np.ones(3), 1),
            "send": lambda: me.comm.send(np.ones(300_000), 1),
            "split": lambda: me.comm.split(0),
            "abort": lambda: me.comm.abort("for a test") if me.rank == 0 else me.comm.barrier(),
            "set-up": lambda: me.comm.all_reduce(x),
            "window": lambda: me.comm.empty(10, "float32", device="cuda"),
            "finalize": me.comm.finalize,
        }
        try:
            calls[where if me.rank == 1 else what]()
            if me.rank != 1 or where != "finalize":
                me.comm.barrier()
        except MiracclError as error:
            return told_by(error)
        finally:
            me.comm.finalize()
        return {"type": "none"}


def alone(how: str) -> str:
    """Rank 1 waits for a message that is never sent."""
    with rank() as me:
        me.comm.barrier(stream=0)
        me.synchronize()
        if me.rank == 0:
            exit_is_reported(me)
            return ""
        messages: Any = me.comm._device._messages  # type: ignore[union-attr]
        if how == "timeout":  # only now: compilers run before the barrier
            messages._comm_args = dataclasses.replace(messages._comm_args, timeout_ns=int(0.3e9))
        me.comm.recv(me.zeros(100), 0)
        if how == "abort":
            threading.Timer(0.2, me.comm._device.abort if me.comm._device else print).start()
        answer = outcome(me)
        exit_is_reported(me)
        return answer


def exit_is_reported(me: EmulatedRank) -> None:
    """Ranks that wait for a leaving rank get that error before their deadline."""
    me.comm._core.session.barrier("told")


def absent_rank() -> dict[str, Any]:
    """The last rank skips the second operation. Only rank 0 has a short deadline."""
    with rank(timeout=600.0) as me:
        x, last = me.put(np.ones(1000)), me.nranks - 1
        me.comm.all_reduce(x, stream=0)
        me.synchronize()
        device = me.comm._device
        assert isinstance(device, DeviceCommunicator)
        if me.rank == 0:  # only now: compilers run before the first operation
            boards = device.probe.snapshot()
            while boards is None or not all(boards.has_begun(peer, 2) for peer in range(1, last)):
                boards = device.probe.snapshot()
            device._comm_args = dataclasses.replace(device._comm_args, timeout_ns=int(0.3e9))
            device._drop_launches()
        if me.rank == last:
            while not device.faults.broken:
                os.sched_yield()
        try:
            if me.rank != last:
                me.comm.all_reduce(x, stream=0)
            me.synchronize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def waits_for_exiting_rank(what: str) -> dict[str, Any]:
    """Rank 1 finalizes while the others wait for it. No deadline passes."""
    with rank(timeout=600.0) as me:
        x = me.put(np.ones(1_000_000))  # more than the rings take
        me.comm.barrier(stream=0)
        if me.rank == 1:
            return {"type": "none"}
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: me.comm.all_reduce(x, stream=0),
            "recv": lambda: me.comm.recv(x, 1, stream=0),
            "send": lambda: me.comm.send(x, 1, stream=0),
        }
        try:
            me.synchronize()  # the other waiting rank may have reported it
            calls[what]()
            me.synchronize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def outcome(me: EmulatedRank) -> str:
    try:
        me.synchronize()
    except (CollectiveMismatch, CollectiveTimeout, CommunicatorAborted) as error:
        return f"{type(error).__name__}: {error}"
    except MiracclError as error:
        return f"unexpected {error}"
    return "ended"


def aborted_by_another() -> str:
    """Return the error of rank 1, which waits for a message, after rank 0 aborts."""
    with rank(timeout=60.0) as me:
        if me.rank == 0:
            me.comm.barrier(stream=0)
            me.synchronize()
            me.comm.abort("rank 0 has had enough")
            return ""
        try:  # the abort may arrive before the second call, or during the first
            me.comm.barrier(stream=0)
            me.comm.recv(me.zeros(100), 0, stream=0)
            me.synchronize()
        except MiracclError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"


def left_by_an_exception() -> bool:
    """Leave a with block by an exception without waiting for the deadline of running work."""
    with rank(timeout=600.0) as me:
        me.comm.barrier(stream=0)
        if me.rank == 0:
            return True  # no further checks: rank 1 may abort at any time
        me.synchronize()
        try:
            with me.comm:
                me.comm.recv(me.zeros(100), 0, stream=0)
                raise ValueError("a bug in the program")
        except ValueError:
            return True


def deadline_before_close() -> str:
    """A deadline that passes after the last call is raised when the communicator is closed."""
    with session() as world:
        me = EmulatedRank(world, 30.0)
        me.comm.barrier(stream=0)
        me.synchronize()
        if me.rank == 1:
            messages: Any = me.comm._device._messages  # type: ignore[union-attr]
            messages._comm_args = dataclasses.replace(messages._comm_args, timeout_ns=int(0.3e9))
            me.comm.recv(me.zeros(100), 0, stream=0)
            me.cuda.cuCtxSynchronize()
        exit_is_reported(me)
        try:
            me.comm.finalize()
        except MiracclError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def death_between_copies() -> None:
    """Rank 1 dies between its barrier and its copies; rank 0's streams are released."""
    from miraccl.errors import PeerDied
    from miraccl.executor.cuda import staged_copies

    staged_copies.STAGING_BYTES = 64 << 10
    with rank(timeout=60.0) as me:
        out, x = me.zeros(100_003 * me.nranks), me.put(me.data(me.rank, 100_003))
        me.comm.barrier(stream=0)
        me.synchronize()
        if me.rank == 1:
            vars(staged_copies)["StagedLaunch"].run = lambda self, source, target, stream: (
                self._before.run(source, target, stream)
            )
            me.comm.all_gather(x, out, stream=0)
            me.synchronize()
            os._exit(3)
        me.comm.all_gather(x, out, stream=0)
        with pytest.raises(PeerDied):
            me.synchronize()


@contextlib.contextmanager
def ready_for_copies() -> Iterator[tuple[EmulatedRank, DeviceCommunicator, Any, Any]]:
    """Return a rank that has copied through staging memory, its GPU side, and its input and output.
    No
    deadline passes.
    """
    from miraccl.executor.cuda import staged_copies
    from tests.gpu import fake_cuda

    staged_copies.STAGING_BYTES, fake_cuda.WAIT_LIMIT_S = 64 << 10, 15.0
    with rank(timeout=600.0) as me:
        out, x = me.zeros(1000 * me.nranks), me.put(np.ones(1000))
        me.comm.all_gather(x, out, stream=0)
        me.synchronize()
        device = me.comm._device
        assert isinstance(device, DeviceCommunicator)
        yield me, device, x, out


def absent_from_copies() -> dict[str, Any]:
    """Rank 1 skips copies through staging memory; rank 0's GPU waits for them unobserved."""
    with ready_for_copies() as (me, device, x, out):
        device._engines._comm_args = dataclasses.replace(
            device._engines._comm_args, timeout_ns=int(0.3e9)
        )  # only now: compilers have run
        device._engines._launches.clear()
        try:
            if me.rank == 0:
                me.comm.all_gather(x, out, stream=0)
                me.cuda.cuCtxSynchronize()
                me.comm.barrier(stream=0)
            else:
                exit_is_reported(me)
                me.synchronize()
        except MiracclError as error:
            return told_by(error)
        finally:
            if me.rank == 0:
                exit_is_reported(me)
        return {"type": "none"}


def stopped_before_copies(captured: bool) -> dict[str, Any]:
    """All ranks pass the barrier of staged copies, and rank 1 stops before it enqueues its own."""
    from miraccl.executor.cuda import staged_copies

    with ready_for_copies() as (me, device, x, out):
        exit_is_reported(me)

        def stands(*_: Any) -> None:
            while not device.faults.broken:
                os.sched_yield()

        if me.rank == 1:
            vars_of: Any = staged_copies.StagedLaunch
            vars_of._enqueue = stands
        else:
            device.faults._timeout = 0.3
        try:
            if captured and me.rank == 0:
                stream = me.cuda.make_stream()
                device.gpu.launch_graph(
                    device.gpu.capture(stream, lambda s: me.comm.all_gather(x, out, stream=s)),
                    stream,
                )
            else:
                me.comm.all_gather(x, out, stream=0)
            me.synchronize()
        except MiracclError as error:
            return told_by(error)
        finally:
            exit_is_reported(me)
        return {"type": "none"}


def mismatch_at_the_end(how: str) -> dict[str, Any]:
    """The last operation differs on rank 1 without anybody waiting; only ``how`` is called after
    it.
    """
    with rank(timeout=60.0) as me:
        x = me.put(np.ones(1000))
        for op in (RedOp.SUM, RedOp.MAX):
            me.comm.all_reduce(x, op=op, stream=0)
            me.synchronize()
        exit_is_reported(me)
        me.comm.all_reduce(x, op=RedOp.MAX if me.rank == 1 else RedOp.SUM, stream=0)
        me.cuda.cuCtxSynchronize()
        exit_is_reported(me)
        try:
            me.comm.synchronize() if how == "synchronize" else me.comm.finalize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def mismatched_messages(case: str) -> dict[str, Any]:
    """Ranks call different operations, some of them messages, between valid ones. No deadline
    passes.
    """
    with rank(timeout=600.0) as me:
        comm, mine = me.comm, me.rank
        one, all_ones, large = me.put(np.ones(1)), me.put(np.ones(3)), me.put(np.ones(1 << 20))

        def scatter(value: float, root: int) -> Any:
            return comm.scatter(me.put(np.full(3, value)), root, out=one, stream=0)

        def gather(root: int) -> Any:
            return comm.gather(one, root, out=me.zeros(3) if mine == root else None, stream=0)

        swapped: list[Callable[[], Any]] = [
            lambda: gather(0),
            lambda: comm.all_reduce(all_ones, stream=0),
        ]
        calls: dict[str, Callable[[], Any]] = {
            "roots of scatter": lambda: scatter(mine + 100, 1 if mine == 1 else 0),
            "roots of gather": lambda: gather(mine),
            "counts": lambda: comm.all_gather_v(
                me.put(np.ones((1, 2, 1)[mine])),
                [1, 0, 1] if mine == 2 else [1, 2, 1],
                me.zeros(2 if mine == 2 else 4),
                stream=0,
            ),
            "gather and scatter": lambda: gather(0) if mine == 1 else scatter(5, 1),
            "gather and barrier": lambda: gather(0) if mine == 1 else comm.barrier(stream=0),
            "gather and all_reduce": lambda: (
                gather(0) if mine == 1 else comm.all_reduce(all_ones, stream=0)
            ),
            "barrier and all_reduce": lambda: (
                comm.barrier(stream=0) if mine == 1 else comm.all_reduce(all_ones, stream=0)
            ),
            "gather and send": lambda: comm.send(one, 0, stream=0) if mine == 1 else gather(0),
            "gather and recv": lambda: comm.recv(one, 1, stream=0) if mine == 0 else gather(0),
            "all_reduce and recv": lambda: (
                comm.recv(one, 1, stream=0) if mine == 0 else comm.all_reduce(all_ones, stream=0)
            ),
            "broadcast and recv": lambda: (
                comm.recv(one, 1, stream=0) if mine == 0 else comm.broadcast(all_ones, 0, stream=0)
            ),
            "reduce and send": lambda: (
                comm.send(large, 0, stream=0) if mine == 1 else comm.reduce(all_ones, 0, stream=0)
            ),
            "order": lambda: [call() for call in swapped[:: -1 if mine == 1 else 1]],
        }
        try:
            for value in (1, 2):
                scatter(value, 1)
                comm.all_reduce(all_ones, stream=0)
            me.synchronize()
            exit_is_reported(me)
            calls[case]()
            for value in (200, 300):
                scatter(value, 1)
            me.synchronize()
            exit_is_reported(me)
            comm.finalize()
        except MiracclError as error:
            with contextlib.suppress(MiracclError):
                exit_is_reported(me)
            return told_by(error)
        return {"type": "none"}


def message_deadlocks(case: str) -> dict[str, Any]:
    """Each rank waits for the next one in a cycle, in ungrouped calls, after valid ones. No
    deadline
    passes.
    """
    with rank(timeout=600.0) as me:
        comm, mine, n = me.comm, me.rank, me.nranks
        small, large = me.zeros(10), me.zeros(1 << 20)
        after, before = (mine + 1) % n, (mine - 1) % n
        comm.sendrecv(small, after, me.zeros(10), before, stream=0)
        me.synchronize()
        exit_is_reported(me)
        calls: dict[str, Callable[[], Any]] = {
            "recv": lambda: (comm.recv(small, before, stream=0), comm.send(small, after, stream=0)),
            "send": lambda: (comm.send(large, after, stream=0), comm.recv(large, before, stream=0)),
        }
        try:
            calls[case]()
            me.synchronize()
        except MiracclError as error:
            with contextlib.suppress(MiracclError):
                exit_is_reported(me)
            return told_by(error)
        return {"type": "none"}


def deadlocks_in_different_calls(cases: Sequence[str]) -> list[dict[str, Any]]:
    """Ranks block on each other in calls that kernels do not compare; return the error of each
    case.

    No deadline passes.
    """
    detector.FIRST_STREAM_PROBE_S, detector.HOST_POLL_S = 0.05, 0.1
    layout.BULK_MIN_BYTES, layout.CHUNK_BYTES, layout.BULK_BYTES = 5000, 1024, 6 * 1024
    vars(blocked_ops)["only_application_thread"] = lambda: (
        threading.main_thread().ident
    )  # those of the emulated GPU are no program's
    with session() as world:
        return [
            _in_different_calls(
                EmulatedRank(world.subgroup(range(world.nranks), case), 600.0), case
            )
            for case in cases
        ]


def _in_different_calls(me: EmulatedRank, case: str) -> dict[str, Any]:
    comm, mine = me.comm, me.rank
    x, large, left = me.zeros(10), me.zeros(3000), (mine + 1) % me.nranks
    calls: dict[str, Callable[[], Any]] = {
        "split": lambda: comm.split(0) if mine == 1 else comm.recv(x, 1, stream=0),
        "broadcast": lambda: (
            comm.broadcast(x, 1, stream=0) if mine == 0 else comm.recv(x, left, stream=0)
        ),
        "large": lambda: (
            comm.broadcast(x, 1, stream=0) if mine == 0 else comm.send(large, left, stream=0)
        ),
        "work": lambda: (
            comm.split(0) if mine == 1 else comm.recv(x, 1, async_op=True).synchronize()
        ),
        "copies": lambda: (
            comm.split(0) if mine == 1 else comm.all_gather(x, me.zeros(10 * me.nranks), stream=0)
        ),
    }
    try:
        for _ in range(2):  # rows, and large messages, are counted on
            comm.sendrecv(
                large, (mine + 1) % me.nranks, me.zeros(3000), (mine - 1) % me.nranks, stream=0
            )
            comm.all_gather(x, me.zeros(10 * me.nranks), stream=0)
        comm.all_reduce(x, stream=0)
        comm.synchronize()
        comm._core.session.barrier("before they differ")
        calls[case]()
        comm.synchronize()
    except MiracclError as error:
        return told_by(error)
    finally:
        with contextlib.suppress(MiracclError):
            comm.finalize()
    return {"type": "none"}


def completed_work() -> list[float]:
    """Rank 0 waits on its host for completed GPU work, in front of operations that wait for rank 1.

    Rank 1 waits for rank 0 on the CPU; rank 0 continues after several probes of its peers.
    """
    detector.FIRST_STREAM_PROBE_S, detector.HOST_POLL_S = 0.05, 0.1
    vars(blocked_ops)["only_application_thread"] = lambda: threading.main_thread().ident
    with rank(timeout=60.0) as me:
        comm, x, y = me.comm, me.zeros(10), np.ones(3)
        for _ in range(2):
            comm.all_reduce(x, stream=0)
        me.synchronize()
        asked = status_queries(comm._core.session)
        if me.rank == 0:
            work = comm.broadcast(x, 0, async_op=True)
            comm.recv(me.zeros(10), 1, async_op=True)
            calls, usual = itertools.count(), work.done

            def done() -> bool:  # the program is slow to see that it has ended
                if next(calls) == 1:
                    while not usual():
                        os.sched_yield()
                    for _ in range(3):
                        await_two(asked)
                    return True
                return False

            vars(work)["done"] = done
            work.synchronize()
            comm.all_reduce(y)
        else:
            comm.broadcast(x, 0, stream=0)
            comm.all_reduce(y)
            comm.send(x, 0, stream=0)
        me.synchronize()
        return list(y)


def reported_on_the_cpu() -> dict[str, Any]:
    """Rank 1 aborts while rank 0 waits on its GPU; a CPU call reports it, and ``finalize`` does not
    repeat it.
    """
    with rank(timeout=600.0) as me:
        x = me.put(np.ones(1000))
        me.comm.all_reduce(x, stream=0)
        me.synchronize()
        if me.rank == 0:
            me.comm.all_reduce(x, stream=0)
        exit_is_reported(me)
        if me.rank == 1:
            me.comm.abort("for a test")
            exit_is_reported(me)
            me.comm.finalize()
            return {"type": "none"}
        try:
            me.comm.barrier()
        except MiracclError as error:
            exit_is_reported(me)
            me.comm.finalize()
            return told_by(error)
        return {"type": "none"}


def call_during_finalize(case: str) -> dict[str, Any]:
    """Rank 0 calls another operation, or none, while the others wait in ``finalize`` with idle
    GPUs.
    """
    with rank(timeout=60.0) as me:
        comm, mine = me.comm, me.rank
        one, three = me.put(np.ones(1)), me.put(np.ones(3))
        comm.all_reduce(three, stream=0)
        comm.gather(one, 1, out=me.zeros(3) if mine == 1 else None, stream=0)
        me.synchronize()
        exit_is_reported(me)
        device = comm._device
        assert isinstance(device, DeviceCommunicator)
        try:
            if mine == 0:
                while device._host[layout.HOST_EXITED] != 0b110:
                    os.sched_yield()
                {"gather": lambda: comm.gather(one, 1, stream=0), "nothing": lambda: None}[case]()
            elif mine == 1:
                comm.scatter(three, 1, out=one, stream=0)
            else:
                comm.scatter(None, 1, out=one, stream=0)
            comm.finalize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def one_more_call(case: str) -> dict[str, Any]:
    """Rank 1 calls one more operation, which waits for no rank; then all finalize."""
    with rank(timeout=60.0) as me:
        comm, mine = me.comm, me.rank
        one, three = me.put(np.ones(1)), me.put(np.ones(3))
        for _ in range(2):
            comm.all_reduce(three, stream=0)
            comm.gather(one, 0, out=me.zeros(3) if mine == 0 else None, stream=0)
            comm.broadcast(three, 1, stream=0)
        me.synchronize()
        exit_is_reported(me)
        calls = {
            "gather": lambda: comm.gather(one, 0, stream=0),
            "scatter": lambda: comm.scatter(three, 1, out=one, stream=0),
            "nothing": lambda: None,
        }
        try:
            if mine == 1:
                calls[case]()
            comm.finalize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def late_rank(what: str) -> dict[str, Any]:
    """A correct program: rank 1 arrives after rank 0's deadline, unobserved; later kernels have
    ended
    as well.
    """
    with rank(timeout=60.0) as me:
        comm, count = me.comm, 200_000  # more than the rings take
        x, out, large = me.put(np.ones(count)), me.zeros(2 * count), me.put(np.ones(1000))

        def call() -> None:
            comm.gather(x, 1, out=out if me.rank == 1 else None, stream=0)
            if what == "all_reduce":
                comm.all_reduce(large, stream=0)

        call()
        me.synchronize()
        device = comm._device
        assert isinstance(device, DeviceCommunicator)
        soon = dataclasses.replace(device._comm_args, timeout_ns=int((0.3 + me.rank) * 1e9))
        device._messages._comm_args, device._comm_args = soon, soon
        device._messages._patterns.clear()
        device._drop_launches()
        exit_is_reported(me)
        if me.rank == 1:
            exit_is_reported(me)
        for _ in range(3):
            call()
        me.cuda.cuCtxSynchronize()
        if me.rank == 0:
            exit_is_reported(me)
        exit_is_reported(me)
        try:
            me.synchronize()
        except MiracclError as error:
            return told_by(error)
        return {"type": "none"}


def setup_fails_last() -> dict[str, Any]:
    """Rank 1's driver fails the last step of the GPU setup. No deadline passes."""
    with session() as world:
        me = EmulatedRank(world, 600.0)
        x = me.put(np.ones(1000))
        if me.rank == 1:
            me.cuda.refuse.add("cuEventCreate")
        try:
            me.comm.all_reduce(x, stream=0)
            me.synchronize()
        except MiracclError as error:
            return told_by(error)
        finally:
            exit_is_reported(me)
            me.comm.finalize()
        return {"type": "none"}
