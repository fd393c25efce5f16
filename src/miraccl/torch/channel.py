"""What this package needs from inside a communicator: deadlines of single operations, and its wires for messages with tags.

Everything else here uses the communicator's public calls; whoever changes ``comm.member`` finds in this file what depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from miraccl import params
from miraccl.comm.arguments import Array, view
from miraccl.comm.communicator import Communicator
from miraccl.comm.exchange import Entry, Exchange, Transfer
from miraccl.comm.seat import MemberSeat
from miraccl.errors import CollectiveTimeout, MiracclError
from miraccl.executor.cpu.kernels import layout as at
from miraccl.types import Collective

STATUS_WAIT_S = 1.5


def timeout_of(comm: Communicator) -> float:
    """Seconds that an operation on CPU memory may take."""
    return comm._member.fabric.timeout


def set_timeout(comm: Communicator, seconds: float) -> None:
    """The deadline of every operation on CPU memory from now on; one beyond ``params.FOREVER`` means that."""
    seconds = min(seconds, params.FOREVER)
    comm._member.fabric.timeout = seconds
    comm._member.context.set(at.CTX_TIMEOUT_NS, int(seconds * 1e9))


def run_beside(comm: Communicator, on: bool) -> None:
    """Whether other threads than that of the program are inside the communicator, so that one that waits there keeps nothing else from
    running."""
    comm._member.context.set(at.CTX_ASIDE, int(on))


def seat_of(comm: Communicator) -> MemberSeat:
    """For those who look for where programs wait."""
    return comm._member.seat


@contextmanager
def deadline(comm: Communicator, seconds: float | None) -> Iterator[None]:
    """Inside the block, ``seconds`` is the deadline of operations; None: the communicator's own."""
    if seconds is None:
        yield
        return
    before = timeout_of(comm)
    set_timeout(comm, seconds)
    try:
        yield
    finally:
        set_timeout(comm, before)


def wait_for_graph(comm: Communicator) -> tuple[str, ...]:
    """One line per rank: what it does, and where its program is. Takes up to ``STATUS_WAIT_S``."""
    member = comm._member
    try:
        statuses = member.session.request_status(STATUS_WAIT_S)
    except MiracclError:
        statuses = {}
    return member.faults.wait_for_graph(statuses)


def check_gpu(comm: Communicator, name: str) -> None:
    """Raise what kernels of the communicator have found so far; never waits for them."""
    if comm._device is not None:
        comm._device.check(name)


class Wire(Exchange):
    """The sends and receives of a communicator that is used for nothing else; its caller lets one thread in at a time."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._member = comm, comm._member
        member = comm._member
        super().__init__(comm.rank, member.context.wires, member.context.door("exchange", Collective.SEND_RECV))

    def start(self, array: Array, peer: int, *, receives: bool) -> Entry:
        """Take in one message of bytes. It goes on in ``go_on``."""
        return self.add([self._transfer(array, peer, receives)])[0]

    def _transfer(self, array: Array, peer: int, receives: bool) -> Transfer:
        where = "recv" if receives else "send"
        return Transfer(receives=receives, peer=peer, memory=view(array, "x", writes=receives, where=where))

    def _check(self) -> None:
        if self._member.faults.fault is not None:
            raise self._member.faults.fault

    def header(self, array: Array, peer: int, *, receives: bool) -> Entry:
        """What ``take_in`` and ``put`` take, for memory that is used again and again."""
        return self._entry(self._transfer(array, peer, receives))

    def received(self, peer: int) -> int:
        """How many messages of a rank have come."""
        return self._member.context.received(peer)

    def must_be_taken(self, entry: Entry) -> int:
        """How many messages the peer must have taken for a send to go on."""
        if entry.words[at.OP_DONE // 8] >= entry.words[at.OP_ROUNDS // 8]:
            return int(entry.words[at.OP_MARK // 8])
        return self._member.context.sent()[entry.transfer.peer] - (at.NSLOTS - 1)

    def put(self, entry: Entry) -> bool:
        """Post a message that fits into one slot, if there is room and nothing is before it; else nothing has happened."""
        if any([e.transfer.peer == entry.transfer.peer and not e.transfer.receives for e in self._open]):  # noqa: C419
            return False
        self._check()
        code = self.at_once(entry)
        if code != at.OK:
            self._member._conclude(code, "send/recv")
        return entry.done

    def go_on(self, must: Sequence[Entry], limit_s: float) -> bool:
        """Advance everything: until ``must`` has ended or ``limit_s`` has passed, or, without any, as far as it goes at once.

        False if the time was up, which leaves everything as it is.  Raises the communicator's fault.
        """
        member = self._member
        self._check()
        member.context.set(at.CTX_TIMEOUT_NS, max(1, int(limit_s * 1e9)))
        code = self.advance([e for e in must if not e.done])
        if code == at.ERR_TIMEOUT:
            return False
        if code != at.OK:
            member._conclude(code, "send/recv")
        return True

    def expire(self, text: str, peer: int | None) -> MiracclError:
        """Break the communicator: a message has passed its deadline. The error has the wait-for graph."""
        member = self._member
        graph = wait_for_graph(self._comm)
        error = CollectiveTimeout(text, graph=graph, rank=member.rank, peer=peer, op="send/recv")
        return member.faults.spread(error, "timeout")


def as_bytes(array: Array) -> Array:
    """The bytes of a flat array."""
    return array.view(np.uint8)
