"""Ranks of the tests of the GPU setup of a communicator, on a fake driver."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np

from miraccl.api.communicator import Communicator
from miraccl.bootstrap import Session, control_link
from miraccl.bootstrap.session import LinkSession
from miraccl.deadline import Deadline
from miraccl.errors import MiracclError
from miraccl.runtime.gpu.communicator import DeviceCommunicator
from miraccl.runtime.multinode.streams import StagingStreams
from miraccl.runtime.options import Options
from miraccl.runtime.setup_phases import SetupPhases
from miraccl.transport.connect_round import ConnectRound
from miraccl.transport.cuda_fds import FdChannel
from miraccl.wire.stream import HandshakeState
from tests.diagnosis.fault_ranks import seen
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.fake_ranks import session

LIMIT_S, CALL_S = 30.0, 25.0


class SetupRank:
    """Rank with its communicator; ``apart``: every rank is a host of its own."""

    def __init__(self, world: Session, apart: bool, timeout: float) -> None:
        if apart:
            os.environ["MIRACCL_HOSTID"] = f"host{world.rank}"
        self.cuda = FakeCuda(home=world.rank).install()
        self.comm = Communicator.from_session(world, Options.create(timeout=timeout))
        self.world, self.rank, self.nranks = world, world.rank, world.nranks

    def set_up(self) -> None:
        self.comm.explain("all_reduce", 4096, device=f"cuda:{self.rank}")

    def warm_up(self) -> None:
        """Import and compile everything that a process does once."""
        part = self.comm.split(0)
        assert part is not None
        part.explain("all_reduce", 4096, device=f"cuda:{self.rank}")
        part.finalize()

    def window(self) -> None:
        self.comm.empty(10, device=f"cuda:{self.rank}")

    def error_of(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Return the error of ``call`` and its duration in seconds."""
        start = time.monotonic()
        try:
            call()
        except MiracclError as error:
            return {
                **seen(error),
                "op": error.op,
                "peer": error.peer,
                "seconds": time.monotonic() - start,
            }
        return {"type": "none", "seconds": time.monotonic() - start}


@contextlib.contextmanager
def rank(apart: bool, timeout: float) -> Iterator[SetupRank]:
    with session() as world:
        me = SetupRank(world, apart, timeout)
        yield me
        me.comm.finalize()


def _at_phases(prefixes: tuple[str, ...], act: Callable[[Deadline], Deadline | None]) -> None:
    """Run ``act`` before this rank enters phases with this name prefix; it may replace their
    deadline.
    """
    gather = LinkSession.all_gather

    def later(session: LinkSession, data: bytes, tag: str, timeout: Any = None) -> list[bytes]:
        if tag.startswith(prefixes) and isinstance(timeout, Deadline):
            timeout = act(timeout) or timeout
        return gather(session, data, tag, timeout)

    vars_of: Any = LinkSession
    vars_of.all_gather = later


class PhaseDeadlines:
    """Deadline that passes while rank 0 waits for rank 1, which waits for rank 0's error."""

    def __init__(self, me: SetupRank) -> None:
        control_link.GRACE_SECONDS = LIMIT_S  # the hub reports late ranks
        self._rank, self._gather, self._over = me.rank, me.world.all_gather, False
        self._gather(b"", "ready", LIMIT_S)

    def pass_at(self, deadline: Deadline) -> Deadline:
        """Return rank 0's deadline from the first call on; rank 1's first one returns late."""
        if not self._over:
            self._over = True
            self._gather(b"", "both are here", LIMIT_S)
            if self._rank == 1:
                self._gather(b"", "told", LIMIT_S)
        return deadline if self._rank == 1 else replace(deadline, at=time.monotonic())

    def told(self, me: SetupRank, call: Callable[[], Any]) -> dict[str, Any]:
        told = me.error_of(call)
        if me.rank != 1:
            self._gather(b"", "told", LIMIT_S)
        self._gather(b"", "seen", LIMIT_S)
        return told


def deadline_in_phases(apart: bool, what: str) -> dict[str, Any]:
    """The deadline passes in the third phase; return the number of deadlines, and if it is the
    call's.
    """
    with rank(apart, LIMIT_S) as me:
        me.warm_up()
        if what == "window":
            me.set_up()
            assert me.comm._device is not None
            me.comm._device.session.timeout = CALL_S
        me.world.timeout = CALL_S
        clock, deadlines, take = PhaseDeadlines(me), list[Deadline](), FdChannel.receive

        def third(deadline: Deadline) -> Deadline:
            deadlines.append(deadline)
            return deadline if len(deadlines) < 3 else passed(clock.pass_at(deadline))

        def passed(deadline: Deadline) -> Deadline:
            """Nobody leaves because there is no window: rank 1 must not wait for rank 0, either."""
            return (
                replace(deadline, at=time.monotonic())
                if what == "window" and len(deadlines) > 2
                else deadline
            )

        _at_phases(("gpu", "fabric", "direct"), third)
        cast(Any, FdChannel).receive = lambda door, peers, deadline, *more: take(
            door, peers, passed(deadline), *more
        )
        begun = time.monotonic()
        told = clock.told(me, me.set_up if what == "set-up" else me.window)
        in_time = begun <= deadlines[0].at - CALL_S <= time.monotonic()
        return {**told, "deadlines": len(set(deadlines)), "of the call": in_time}


def absent(apart: bool, stage: str) -> dict[str, Any]:
    """Rank 1 enters a phase, or sends its descriptors, only after the others have reported it."""
    with rank(apart, LIMIT_S) as me:
        me.warm_up()
        me.world.timeout = CALL_S
        clock = PhaseDeadlines(me)
        if stage != "door":
            _at_phases((stage,), clock.pass_at)
        elif me.rank == 1:
            push = FdChannel.send

            def late(*args: Any) -> None:
                clock.pass_at(args[-1])
                push(*args)

            cast(Any, FdChannel).send = late
        else:
            take = FdChannel.receive

            def take_until(door: FdChannel, peers: Any, deadline: Deadline, *more: Any) -> Any:
                return take(door, peers, clock.pass_at(deadline), *more)

            cast(Any, FdChannel).receive = take_until
            _at_phases(("gpu mapped",), clock.pass_at)
        return clock.told(me, me.set_up)


def fails_alone(apart: bool, call: str) -> list[dict[str, Any]]:
    """A driver call fails on rank 1; CPU operations continue, GPU ones after a success."""
    with rank(apart, 600.0) as me:
        if me.rank == 1:
            me.cuda.refuse.add(call)
        told = [me.error_of(me.set_up)]
        assert not me.cuda.live
        assert not me.cuda.pinned
        x = np.ones(100)
        me.comm.all_reduce(x)
        assert (x == me.nranks).all()
        me.cuda.refuse.clear()
        return [*told, me.error_of(me.set_up), me.error_of(me.window)]


def two_threads(fails: bool) -> tuple[int, list[dict[str, Any]]]:
    """A second thread joins a GPU setup, which rank 1's driver may fail; return setups and both
    errors.
    """
    with rank(False, 600.0) as me:
        me.warm_up()
        inside, begin, begun = threading.Event(), DeviceCommunicator.__init__, list[int]()
        if fails and me.rank == 1:
            me.cuda.refuse.add("cuMemHostAlloc")

        def begin_slowly(side: DeviceCommunicator, *args: Any, **more: Any) -> None:
            begun.append(threading.get_ident())
            inside.set()
            limit = time.monotonic() + 0.5
            while len(begun) == 1 and time.monotonic() < limit:
                time.sleep(0.01)
            try:
                begin(side, *args, **more)
            finally:
                me.cuda.refuse.clear()

        vars_of: Any = DeviceCommunicator
        vars_of.__init__ = begin_slowly
        told: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda: told.append(me.error_of(me.set_up))) for _ in range(2)
        ]
        threads[0].start()
        assert inside.wait(LIMIT_S)
        threads[1].start()
        for thread in threads:
            thread.join(LIMIT_S)
        return len(begun), told


def no_memory() -> list[dict[str, Any]]:
    """Rank 1, without the peer access of the others, cannot allocate memory for the GPU setup."""
    os.environ["MIRACCL_P2P_DISABLE"] = str(int(os.environ["MIRACCL_RANK"] == "1"))
    with rank(False, 600.0) as me:
        if me.rank == 1:
            me.cuda.refuse |= {"cuMemCreate", "cuMemAlloc"}
        told = me.error_of(me.set_up)
        me.cuda.refuse.clear()
        return [told, me.error_of(me.set_up)]


def no_window(access: bool) -> list[dict[str, Any]]:
    """Rank 1 cannot allocate a window, then it can; with or without the peer ``access`` of the
    others.
    """
    os.environ["MIRACCL_P2P_DISABLE"] = str(int(os.environ["MIRACCL_RANK"] == "1" and not access))
    with rank(False, 600.0) as me:
        me.set_up()
        if me.rank == 1:
            me.cuda.refuse |= {"cuMemCreate", "cuMemAlloc"}
        told = me.error_of(me.window)
        me.cuda.refuse.clear()
        return [told, me.error_of(me.window)]


def dies_before_descriptors() -> dict[str, Any]:
    """Rank 1 dies when it should send its descriptors."""
    with session() as world:
        me = SetupRank(world, False, 600.0)
        if me.rank == 1:
            vars_of: Any = FdChannel
            vars_of.send = lambda *args: os._exit(3)
        return me.error_of(me.set_up)


def aborted(stage: str) -> dict[str, Any]:
    """Rank 0 aborts from another thread while rank 1 waits for it in an inter-node phase."""
    with rank(True, 600.0) as me:
        if me.rank == 0:

            def abort(_: Deadline) -> None:
                thread = threading.Thread(target=me.comm.abort, args=("for a test",))
                thread.start()
                thread.join(30)

            _at_phases((stage,), abort)
        return me.error_of(me.set_up)


def aborts_late(stage: str) -> dict[str, Any]:
    """Like ``aborted``, but rank 1 leaves before rank 0's own thread notices the abort."""
    with rank(True, 600.0) as me:
        left, faults, vars_of = threading.Event(), me.comm._core.faults, cast(Any, SetupPhases)
        settle, end = faults.set_fault, SetupPhases.cancel

        def settle_late(error: MiracclError) -> MiracclError:
            left.wait(2.0)
            return settle(error)

        def end_and_say(stages: SetupPhases, error: MiracclError) -> None:
            end(stages, error)
            left.set()

        if me.rank == 0:
            vars(faults)["set_fault"], vars_of.end = settle_late, end_and_say
            thread = threading.Thread(target=me.comm.abort, args=("for a test",))
            _at_phases((stage,), lambda _: thread.start())
        return me.error_of(me.set_up)


def cut_before_welcome(which: str) -> dict[str, Any]:
    """Rank 1 is authenticated on a connection and loses rank 0's welcome message."""
    with rank(True, 600.0) as me:
        begin, read, now = StagingStreams.__init__, ConnectRound._read, [""]

        def named(self: StagingStreams, stages: Any, member: Any, peers: Any, name: str) -> None:
            now[0] = name
            begin(self, stages, member, peers, name)

        def cut(meeting: ConnectRound, approach: Any) -> None:
            if now[0] == which and approach.machine.state is HandshakeState.WAIT_WELCOME:
                now[0] = ""
                approach.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError(errno.ECONNRESET, "for a test")
            read(meeting, approach)

        streams: Any = StagingStreams
        meeting: Any = ConnectRound
        streams.__init__, meeting._read = named, cut
        return me.error_of(me.set_up)
