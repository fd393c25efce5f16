"""Sends and receives that carry tagged messages, for ``torch.matching``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from miraccl.errors import CollectiveTimeout, MiracclError
from miraccl.executor.cpu.kernels import layout
from miraccl.ops.host_arrays import Array, view
from miraccl.runtime.core_access import CoreAccess
from miraccl.runtime.exchange import Transfer, TransferEntry, TransferTable
from miraccl.types import Collective

#: Codes that are reported once only: the message is lost, and with it the communicator.
_FATAL = frozenset((layout.ERR_INTERRUPTED, layout.ERR_MISMATCH, layout.ERR_SIZE, layout.ERR_CMA))


class TaggedExchange(TransferTable):
    """Sends and receives of the communicator that carries a group's tagged messages.

    The caller serialises access.  ``send_tagged`` and ``recv_tagged`` are compiled
    (``executor.cpu.kernels.tagged``); headers from each rank are received into fixed memory.
    """

    def __init__(self, access: CoreAccess) -> None:
        core = access.core
        self._access, self._core, self._nranks = access, core, core.nranks
        context = core.context
        super().__init__(
            core.rank, context.connections, context.fast_call("exchange", Collective.SEND_RECV)
        )
        self._send_tagged, self._recv_tagged = (
            context.fast_call("send_tagged", Collective.SEND_RECV),
            context.fast_call("recv_tagged", Collective.SEND_RECV),
        )
        self._row = np.zeros(layout.OP_SIZE // 8, np.int64)
        self._row_address = int(self._row.ctypes.data)
        self._first = 0  # table index that is polled first

    @functools.cached_property
    def _incoming(self) -> tuple[int, list[TransferEntry]]:
        """Address of the table of header receives, and its entries, one per other rank."""
        peers = [peer for peer in range(self._nranks) if peer != self._rank]
        memory = np.zeros((len(peers), layout.HEADER_BYTES), np.uint8)
        return self.table(
            [self._transfer(part, peer, True) for part, peer in zip(memory, peers, strict=True)]
        )

    def _table_index(self, source: int) -> int:
        return source - (source > self._rank)

    def header_from(self, source: int) -> TransferEntry:
        """Return the receive of the next header from rank ``source``."""
        return self._incoming[1][self._table_index(source)]

    def start(self, array: Array, peer: int, *, receives: bool) -> TransferEntry:
        """Enqueue one message of bytes; ``progress`` advances it."""
        return self.add([self._transfer(array, peer, receives)])[0]

    def _transfer(self, array: Array, peer: int, receives: bool) -> Transfer:
        where = "recv" if receives else "send"
        return Transfer(
            receives=receives, peer=peer, memory=view(array, "x", writes=receives, where=where)
        )

    def _check(self) -> None:
        if self._core.faults.fault is not None:
            raise self._core.faults.fault

    def header_to(self, array: Array, peer: int) -> TransferEntry:
        """Create a reusable send of a header to rank ``peer``."""
        return self._entry(self._transfer(array, peer, False))

    def received(self, peer: int) -> int:
        """Return the number of messages received from rank ``peer``."""
        return self._core.context.messages_received(peer)

    def required_consumption(self, entry: TransferEntry) -> int:
        """Return how many messages the peer must have consumed before this send can continue.

        Mirrors the wait in ``executor.cpu.kernels.p2p``.
        """
        if entry.words[layout.OP_DONE // 8] >= entry.words[layout.OP_SEGMENTS // 8]:
            return int(entry.words[layout.OP_MARK // 8])
        return self._core.context.messages_sent()[entry.transfer.peer] - (layout.NSLOTS - 1)

    def send_tagged(self, peer: int, tag: int, address: int, nbytes: int) -> int:
        """Send a tagged message at once if no other send is queued and the FIFO has room.

        Returns:
            ``layout.OK`` if sent; ``layout.IN_PROGRESS`` if started, in which case ``remainder``
            enqueues the
            rest; any other code if nothing was sent.

        Raises:
            MiracclError: The communicator is broken.
        """
        if self._core.faults.fault is not None:
            return layout.NOT_HANDLED  # the next progress call fails every message
        if self._open and any(
            [  # noqa: C419
                e.transfer.peer == peer and not e.transfer.receives for e in self._open
            ]
        ):
            return layout.NOT_HANDLED
        code = self._send_tagged(peer, tag, address, nbytes, self._row_address)
        if code in _FATAL:
            self._core.check_result(code, "send")
        return code

    def recv_tagged(
        self, source: int | None, tag: int, address: int, nbytes: int, limit_ns: int
    ) -> int:
        """Receive the next message of a rank, or of any rank, if tag and size match within
        ``limit_ns``.

        Only header receives may be open.

        Returns:
            The source rank; ``-layout.IN_PROGRESS`` if started, and ``remainder`` enqueues
            the rest;
            any other negative code if nothing was received.
        """
        table, entries = self._incoming
        if self._core.faults.fault is not None or source == self._rank or not entries:
            return -layout.NOT_HANDLED
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
            self._core.check_result(-found, "recv")
        return found

    def remainder(self, array: Array) -> TransferEntry:
        """Enqueue the unfinished part of the last ``send_tagged`` or ``recv_tagged`` of this
        memory.
        """
        receives, peer = (
            bool(self._row[layout.OP_RECEIVES // 8]),
            int(self._row[layout.OP_PEER // 8]),
        )
        words = self._row.copy()
        entry = TransferEntry(
            transfer=self._transfer(array, peer, receives),
            words=words,
            address=int(words.ctypes.data),
        )
        self.enqueue(entry)
        return entry

    def progress(
        self, must: Sequence[TransferEntry], limit_s: float, any_of: Sequence[TransferEntry] = ()
    ) -> bool:
        """Advance all open entries.

        Args:
            must: Return once all of these are done.
            limit_s: Give up after this many seconds, leaving everything as it is.
            any_of: Return once one of these is done.  Without ``must`` and ``any_of``, return as
                soon as
                nothing more can be done without waiting.

        Returns:
            False if the time ran out.

        Raises:
            MiracclError: The communicator is broken.
        """
        core = self._core
        self._check()
        core.context.set(layout.CTX_TIMEOUT_NS, max(1, int(limit_s * 1e9)))
        code = self.advance([e for e in must if not e.done], any_of=any_of)
        if code == layout.ERR_TIMEOUT:
            return False
        if code != layout.OK:
            core.check_result(code, "send/recv")
        return True

    def break_at_deadline(self, text: str, peer: int | None) -> MiracclError:
        """Break the communicator because a message missed its deadline; return the error to raise.

        The error carries the wait-for graph.
        """
        graph = self._access.wait_for_graph()
        error = CollectiveTimeout(text, graph=graph, rank=self._rank, peer=peer, op="send/recv")
        return self._access.break_with(error)
