"""Ranks of the tests of how the GPU side of a communicator is made, on a driver that is pretended."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from miraccl.bootstrap import Session
from miraccl.comm.communicator import Communicator
from miraccl.comm.device.hosts.streams import PeerStreams
from miraccl.comm.member import Options
from miraccl.comm.stages import Stages
from miraccl.errors import MiracclError
from miraccl.transport.cuda_fds import Door
from miraccl.transport.meeting import Meeting
from miraccl.wire.stream import HandshakeState
from tests.comm.fault_ranks import seen
from tests.gpu.fake_cuda import FakeCuda
from tests.gpu.fake_ranks import session

EACH_S = 0.4


class Rank:
    """``apart``: every rank is a host of its own."""

    def __init__(self, world: Session, apart: bool, timeout: float) -> None:
        if apart:
            os.environ["MIRACCL_HOSTID"] = f"host{world.rank}"
        self.cuda = FakeCuda().install()
        self.comm = Communicator.from_session(world, Options.create(timeout=timeout))
        self.world, self.rank, self.nranks = world, world.rank, world.nranks

    def set_up(self) -> None:
        self.comm.explain("all_reduce", 4096, device=f"cuda:{self.rank}")

    def warm_up(self) -> None:
        """What is imported and compiled once in a process is."""
        part = self.comm.split(0)
        assert part is not None
        part.explain("all_reduce", 4096, device=f"cuda:{self.rank}")
        part.finalize()

    def window(self) -> None:
        self.comm.empty(10, device=f"cuda:{self.rank}")

    def told(self, call: Callable[[], Any]) -> dict[str, Any]:
        """What ``call`` raises, with the seconds that it took."""
        start = time.monotonic()
        try:
            call()
        except MiracclError as error:
            return {**seen(error), "op": error.op, "peer": error.peer, "seconds": time.monotonic() - start}
        return {"type": "none", "seconds": time.monotonic() - start}


@contextlib.contextmanager
def rank(apart: bool, timeout: float) -> Iterator[Rank]:
    with session() as world:
        me = Rank(world, apart, timeout)
        yield me
        me.comm.finalize()


def _at_stages(prefixes: tuple[str, ...], act: Callable[[], Any]) -> None:
    """Before this rank takes part in stages whose names begin so, it does ``act``."""
    gather = Session.all_gather

    def later(session: Session, data: bytes, tag: str, timeout: Any = None) -> list[bytes]:
        if tag.startswith(prefixes):
            act()
        return gather(session, data, tag, timeout)

    vars_of: Any = Session
    vars_of.all_gather = later


def slow(apart: bool, what: str, limit: float) -> dict[str, Any]:
    """Rank 1 takes ``EACH_S`` before each stage."""
    with rank(apart, 30.0) as me:
        me.warm_up()
        if what == "window":
            me.set_up()
            assert me.comm._device is not None
            me.comm._device.session.timeout = limit
        me.world.timeout = limit
        me.world.all_gather(b"", "ready", 30.0)
        if me.rank == 1:
            _at_stages(("gpu", "fabric"), lambda: time.sleep(EACH_S))
        told = me.told(me.set_up if what == "set-up" else me.window)
        me.world.all_gather(b"", "told", 30.0)
        return told


def absent(apart: bool, stage: str) -> dict[str, Any]:
    """Rank 1 does not come to a stage, or with its descriptors to the others' doors, before these have been told so; then it does."""
    with rank(apart, 30.0) as me:
        me.warm_up()
        me.world.timeout = 0.5
        gather, held = me.world.all_gather, threading.Event()
        me.world.all_gather(b"", "ready", 30.0)

        def hold() -> None:
            if not held.is_set():
                held.set()
                gather(b"", "told", 30.0)

        if me.rank == 1 and stage == "door":
            push, vars_of = Door.push, cast(Any, Door)

            def late(*args: Any) -> None:
                hold()
                push(*args)

            vars_of.push = late
        elif me.rank == 1:
            _at_stages((stage,), hold)
        told = me.told(me.set_up)
        if me.rank != 1:
            gather(b"", "told", 30.0)
        gather(b"", "seen", 30.0)
        return told


def fails_alone(apart: bool, call: str) -> list[dict[str, Any]]:
    """The driver refuses something on rank 1; then operations on CPU memory go on, and so do those on GPU memory once it has it."""
    with rank(apart, 600.0) as me:
        if me.rank == 1:
            me.cuda.refuse.add(call)
        told = [me.told(me.set_up)]
        assert not me.cuda.live
        assert not me.cuda.pinned
        x = np.ones(100)
        me.comm.all_reduce(x)
        assert (x == me.nranks).all()
        me.cuda.refuse.clear()
        return [*told, me.told(me.set_up), me.told(me.window)]


def no_window() -> list[dict[str, Any]]:
    """Rank 1 has no memory for a window, and then it has."""
    with rank(False, 600.0) as me:
        me.set_up()
        if me.rank == 1:
            me.cuda.refuse |= {"cuMemCreate", "cuMemAlloc"}
        told = me.told(me.window)
        me.cuda.refuse.clear()
        return [told, me.told(me.window)]


def dies_at_the_door() -> dict[str, Any]:
    """Rank 1 dies when it is to pass its descriptors."""
    with session() as world:
        me = Rank(world, False, 600.0)
        if me.rank == 1:
            vars_of: Any = Door
            vars_of.push = lambda *args: os._exit(3)
        return me.told(me.set_up)


def aborted(stage: str) -> dict[str, Any]:
    """Rank 0 aborts from another thread while rank 1 waits for it in a stage among hosts."""
    with rank(True, 600.0) as me:
        if me.rank == 0:

            def abort() -> None:
                thread = threading.Thread(target=me.comm.abort, args=("for a test",))
                thread.start()
                thread.join(30)

            _at_stages((stage,), abort)
        return me.told(me.set_up)


def aborts_late(stage: str) -> dict[str, Any]:
    """As ``aborted``, but the thread of rank 0 is late: rank 1 has heard of the abort and left before rank 0 knows of it itself."""
    with rank(True, 600.0) as me:
        left, faults, vars_of = threading.Event(), me.comm._member.faults, cast(Any, Stages)
        settle, end = faults.settle, Stages.end

        def settle_late(error: MiracclError) -> MiracclError:
            left.wait(2.0)
            return settle(error)

        def end_and_say(stages: Stages, error: MiracclError) -> None:
            end(stages, error)
            left.set()

        if me.rank == 0:
            vars(faults)["settle"], vars_of.end = settle_late, end_and_say
            _at_stages((stage,), threading.Thread(target=me.comm.abort, args=("for a test",)).start)
        return me.told(me.set_up)


def cut_before_the_welcome(which: str) -> dict[str, Any]:
    """Rank 1 has proved itself on a stream of lanes and heard the proof of rank 0, to which its welcome does not come any more."""
    with rank(True, 600.0) as me:
        begin, read, now = PeerStreams.__init__, Meeting._read, [""]

        def named(self: PeerStreams, stages: Any, member: Any, peers: Any, name: str) -> None:
            now[0] = name
            begin(self, stages, member, peers, name)

        def cut(meeting: Meeting, approach: Any) -> None:
            if now[0] == which and approach.machine.state is HandshakeState.WAIT_WELCOME:
                now[0] = ""
                approach.sock.shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError(errno.ECONNRESET, "for a test")
            read(meeting, approach)

        streams: Any = PeerStreams
        meeting: Any = Meeting
        streams.__init__, meeting._read = named, cut
        return me.told(me.set_up)
