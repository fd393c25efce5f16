"""What this package needs from inside a communicator: deadlines of single operations, and its wires for messages with tags.

Everything else here uses the communicator's public calls; whoever changes ``comm.member`` finds in this file what depends on it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from miraccl import params
from miraccl.api.communicator import Communicator
from miraccl.errors import CollectiveTimeout, MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.ops.arguments import Array, view
from miraccl.runtime.exchange import Entry, Exchange, Transfer
from miraccl.runtime.wait_state import CoreWaitState
from miraccl.types import Collective

#: What nobody finds a second time: the message is lost, and with it the communicator.
_FATAL = frozenset((layout.ERR_INTERRUPTED, layout.ERR_MISMATCH, layout.ERR_SIZE, layout.ERR_CMA))


def timeout_of(comm: Communicator) -> float:
    """Seconds that an operation on CPU memory may take."""
    return comm._core.fabric.timeout


def set_timeout(comm: Communicator, seconds: float) -> None:
    """The deadline of every operation on CPU memory from now on; one beyond ``params.FOREVER`` means that."""
    seconds = min(seconds, params.FOREVER)
    comm._core.fabric.timeout = seconds
    comm._core.context.set(layout.CTX_TIMEOUT_NS, int(seconds * 1e9))


def set_background(comm: Communicator, on: bool) -> None:
    """Whether other threads than that of the program are inside the communicator, so that one that waits there keeps nothing else from
    running."""
    comm._core.context.set(layout.CTX_ASIDE, int(on))


def wait_state_of(comm: Communicator) -> CoreWaitState:
    """For those who look for where programs wait."""
    return comm._core.wait_state


def wait_for_graph(comm: Communicator) -> tuple[str, ...]:
    """One line per rank: what it does, and where its program is."""
    faults = comm._core.faults
    return faults.wait_for_graph(faults.query_statuses())


def is_on_one_host(comm: Communicator) -> bool:
    return len(set(comm._core.fabric.hosts)) <= 1


def check_gpu(comm: Communicator, name: str) -> None:
    """Raise what kernels of the communicator have found so far; never waits for them."""
    if comm._device is not None:
        comm._device.check(name)


def refresh_gpu_faults(comm: Communicator) -> None:
    """Have ``check_gpu`` tell what kernels that have ended left for the next ones to find."""
    side: Any = comm._device
    if side is not None:
        getattr(side, "local", side).judge()


class TaggedExchange(Exchange):
    """The sends and receives of a communicator that is used for nothing else; its caller lets one thread in at a time.

    ``put`` and ``take`` are for messages with tags (``kernels.tagged``); headers from each rank are received into memory of their own.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._member, self._faults = comm, comm._core, comm._core.faults
        context = comm._core.context
        super().__init__(comm.rank, context.wires, context.door("exchange", Collective.SEND_RECV))
        self._send_tagged, self._recv_tagged = (
            context.door("put_tagged", Collective.SEND_RECV),
            context.door("take_tagged", Collective.SEND_RECV),
        )
        self._row = np.zeros(layout.OP_SIZE // 8, np.int64)
        self._row_address = int(self._row.ctypes.data)
        self._first = 0  # the place of the source that is looked at first

    @functools.cached_property
    def _incoming(self) -> tuple[int, list[Entry]]:
        """The receives of headers, one of each other rank, and the address of their table."""
        peers = [peer for peer in range(self._comm.nranks) if peer != self._rank]
        memory = np.zeros((len(peers), layout.HEADER_BYTES), np.uint8)
        return self.table(
            [self._transfer(part, peer, True) for part, peer in zip(memory, peers, strict=True)]
        )

    def _table_index(self, source: int) -> int:
        return source - (source > self._rank)

    def header_from(self, source: int) -> Entry:
        """The receive of the next header of a rank."""
        return self._incoming[1][self._table_index(source)]

    def start(self, array: Array, peer: int, *, receives: bool) -> Entry:
        """Take in one message of bytes. It goes on in ``go_on``."""
        return self.add([self._transfer(array, peer, receives)])[0]

    def _transfer(self, array: Array, peer: int, receives: bool) -> Transfer:
        where = "recv" if receives else "send"
        return Transfer(
            receives=receives, peer=peer, memory=view(array, "x", writes=receives, where=where)
        )

    def _check(self) -> None:
        if self._faults.fault is not None:
            raise self._faults.fault

    def header_to(self, array: Array, peer: int) -> Entry:
        """A send that ``take_in`` takes, of memory that is used again and again."""
        return self._entry(self._transfer(array, peer, False))

    def received(self, peer: int) -> int:
        """How many messages of a rank have come."""
        return self._member.context.received(peer)

    def required_consumption(self, entry: Entry) -> int:
        """How many messages the peer must have taken for a send to go on (``kernels.p2p.messages_taken``, where that waits)."""
        if entry.words[layout.OP_DONE // 8] >= entry.words[layout.OP_ROUNDS // 8]:
            return int(entry.words[layout.OP_MARK // 8])
        return self._member.context.sent()[entry.transfer.peer] - (layout.NSLOTS - 1)

    def send_tagged(self, peer: int, tag: int, address: int, nbytes: int) -> int:
        """Send a message with a tag, if nothing is before it and there is room: ``at.OK``; ``at.UNDER_WAY``, where ``rest`` takes in the
        rest of it; else nothing has happened. Raises what it finds wrong, as ``take`` does."""
        if self._faults.fault is not None:
            return layout.NEED_PLAN  # the next attempt fails, with all messages
        if self._open and any(
            [  # noqa: C419
                e.transfer.peer == peer and not e.transfer.receives for e in self._open
            ]
        ):
            return layout.NEED_PLAN
        code = self._send_tagged(peer, tag, address, nbytes, self._row_address)
        if code in _FATAL:
            self._member.check_result(code, "send")
        return code

    def recv_tagged(
        self, source: int | None, tag: int, address: int, nbytes: int, limit_ns: int
    ) -> int:
        """Receive the next message of a source, or of any rank, if it has this tag and size and comes in time: its source;
        -``at.UNDER_WAY``, where ``rest`` takes in the rest of it; else, below 0, nothing has happened.  Only headers may be open."""
        table, entries = self._incoming
        if self._faults.fault is not None or source == self._rank or not entries:
            return -layout.NEED_PLAN
        if source is None:
            found = self._recv_tagged(
                table, len(entries), self._first, tag, address, nbytes, self._row_address, limit_ns
            )
            if found >= 0:
                self._first = (self._table_index(found) + 1) % len(entries)
        else:
            row = table + self._table_index(source) * layout.OP_SIZE
            found = self._recv_tagged(row, 1, 0, tag, address, nbytes, self._row_address, limit_ns)
        if -found in _FATAL:
            self._member.check_result(-found, "recv")
        return found

    def remainder(self, array: Array) -> Entry:
        """Take in what a ``put`` or ``take`` of this memory has left."""
        receives, peer = (
            bool(self._row[layout.OP_RECEIVES // 8]),
            int(self._row[layout.OP_PEER // 8]),
        )
        words = self._row.copy()
        entry = Entry(
            transfer=self._transfer(array, peer, receives),
            words=words,
            address=int(words.ctypes.data),
        )
        self.take_in(entry)
        return entry

    def progress(self, must: Sequence[Entry], limit_s: float, any_of: Sequence[Entry] = ()) -> bool:
        """Advance everything: until ``must`` has ended, or one of ``any_of``, or ``limit_s`` has passed; without either, as far as it goes
        at once.

        False if the time was up, which leaves everything as it is.  Raises the communicator's fault.
        """
        member = self._member
        self._check()
        member.context.set(layout.CTX_TIMEOUT_NS, max(1, int(limit_s * 1e9)))
        code = self.advance([e for e in must if not e.done], any_of=any_of)
        if code == layout.ERR_TIMEOUT:
            return False
        if code != layout.OK:
            member.check_result(code, "send/recv")
        return True

    def break_at_deadline(self, text: str, peer: int | None) -> MiracclError:
        """Break the communicator: a message has passed its deadline. The error has the wait-for graph."""
        member = self._member
        graph = wait_for_graph(self._comm)
        error = CollectiveTimeout(text, graph=graph, rank=member.rank, peer=peer, op="send/recv")
        return member.faults.propagate(error)
