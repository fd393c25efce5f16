"""Open sends and receives of a communicator: the table that ``kernels.p2p`` advances.

Messages between two ranks in one direction keep the order of the calls; there is no other order. A
message of a rank to itself is copied as soon as both halves are posted, the n-th send to the n-th
receive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miraccl.errors import InvalidUsage
from miraccl.executor.cpu import sizes
from miraccl.executor.cpu.context import PeerConnections
from miraccl.executor.cpu.kernels import layout
from miraccl.executor.cpu.lower import Words, signature
from miraccl.native import atomics
from miraccl.ops import check
from miraccl.ops.host_arrays import HostMemory
from miraccl.types import Collective, RedOp

_RECEIVES, _DONE, _ROUNDS = layout.OP_RECEIVES // 8, layout.OP_DONE // 8, layout.OP_SEGMENTS // 8
_MARK, _MUST, _AFTER = layout.OP_MARK // 8, layout.OP_WAIT // 8, layout.OP_PREDECESSOR // 8


Transfer = check.CheckedTransfer[HostMemory]


@dataclass(eq=False, kw_only=True)
class TransferEntry:
    """A transfer in progress; ``words``, at ``address``, is its table row between calls."""

    transfer: Transfer
    words: Words
    address: int
    done: bool = False


def count_segments(wire: PeerConnections, nbytes: int) -> int:
    """Return the number of segments of a message, as ``kernels.p2p`` counts them."""
    in_place = bool(wire.capabilities & layout.CAP_IN_PLACE)
    segment = sizes.NET_SEGMENT_BYTES if in_place else wire.slot_bytes
    return sizes.count_segments(nbytes, sizes.lead_bytes(nbytes, segment, in_place), segment)


class TransferTable:
    """All open transfers of one rank.

    ``advance`` serves one thread; ``add`` may run on another one at the same time. A second thread
    in ``advance`` gets ``BUSY`` and changes nothing. ``advance`` waits for ``try_advance``, which
    is short.
    """

    def __init__(
        self,
        rank: int,
        wires: Mapping[int, PeerConnections],
        advance_table: Callable[[int, int], int],
    ) -> None:
        self._rank, self._wires, self._advance_table = rank, wires, advance_table
        self._open: list[TransferEntry] = []
        self._self_transfers: list[TransferEntry] = []
        self._lock = threading.Lock()
        self._caller_lock = threading.Lock()  # held by the application thread in ``advance``
        self._engine_lock = threading.Lock()  # held while the engine runs

    @property
    def in_flight(self) -> list[TransferEntry]:
        """Transfers over a connection that have not ended."""
        return list(self._open)

    @property
    def has_in_flight(self) -> bool:
        return bool(self._open)

    def add(self, transfers: Sequence[Transfer]) -> list[TransferEntry]:
        """Enqueue transfers in order. Messages to this rank itself are copied at once if both
        halves
        exist.
        """
        entries = [self._entry(t) for t in transfers]
        mine = [e for e in entries if e.transfer.peer == self._rank]
        pairs = self._match([*self._self_transfers, *mine])
        with self._lock:
            self._open += [e for e in entries if e.transfer.peer != self._rank]
            self._self_transfers += mine
        for send, receive in pairs:
            np.copyto(
                receive.transfer.memory.array.reshape(-1), send.transfer.memory.array.reshape(-1)
            )
            send.done = receive.done = True
        self._self_transfers = [e for e in self._self_transfers if not e.done]
        return entries

    def cancel(self, entries: Sequence[TransferEntry]) -> None:
        """Remove the entries that have not started."""
        with self._lock:
            self._open = [e for e in self._open if e not in entries or e.words[_DONE]]
            self._self_transfers = [e for e in self._self_transfers if e not in entries]

    def table(self, transfers: Sequence[Transfer]) -> tuple[int, list[TransferEntry]]:
        """Return (address, entries) of one table whose rows are the words of the entries."""
        table = np.zeros((len(transfers), layout.OP_SIZE // 8), np.int64)
        entries = []
        for row, transfer in zip(table, transfers, strict=True):
            row[:] = self._build_row(transfer)
            entries.append(
                TransferEntry(transfer=transfer, words=row, address=int(row.ctypes.data))
            )
        return int(table.ctypes.data), entries

    def reset(self, entry: TransferEntry) -> TransferEntry:
        """Make an entry that has ended ready to run again."""
        entry.done = False
        entry.words[_DONE] = entry.words[_MARK] = 0
        return entry

    def enqueue(self, entry: TransferEntry) -> None:
        """Add an existing entry over a connection, which may have started already."""
        with self._lock:
            self._open.append(entry)

    def reject_unmatched_self(self, transfers: Sequence[Transfer]) -> None:
        """Raise if one of ``transfers``, which run as one group, sends to this rank without its
        match.
        """
        mine = [t for t in transfers if t.peer == self._rank]
        sends = sum(not t.receives for t in mine) + sum(
            not e.transfer.receives for e in self._self_transfers
        )
        receives = sum(t.receives for t in mine) + sum(
            e.transfer.receives for e in self._self_transfers
        )
        if mine and sends != receives:
            raise self._unmatched_self_error(sends, receives)

    def _unmatched_self_error(self, sends: int, receives: int) -> InvalidUsage:
        text = f"rank {self._rank} sends itself {sends} messages and receives {receives} of them"
        return InvalidUsage(
            text,
            hint="post the receive in the same group, or before the send",
        )

    def check_can_complete(self, entries: Sequence[TransferEntry]) -> None:
        """Raise if one of ``entries`` is a message of this rank to itself without its match."""
        if any(e.transfer.peer == self._rank and not e.done for e in entries):
            receives = sum(e.transfer.receives for e in self._self_transfers)
            raise self._unmatched_self_error(len(self._self_transfers) - receives, receives)

    @staticmethod
    def _match(entries: Sequence[TransferEntry]) -> list[tuple[TransferEntry, TransferEntry]]:
        pairs = list(
            zip(
                [e for e in entries if not e.transfer.receives],
                [e for e in entries if e.transfer.receives],
                strict=False,
            )
        )
        for send, receive in pairs:
            a, b = send.transfer.memory, receive.transfer.memory
            if a.dtype is not b.dtype or a.count != b.count:
                raise InvalidUsage(
                    f"a rank sends itself {a.count} x {a.dtype.label} and receives "
                    f"{b.count} x {b.dtype.label}"
                )
        return pairs

    def _entry(self, transfer: Transfer) -> TransferEntry:
        words = self._build_row(transfer)
        return TransferEntry(transfer=transfer, words=words, address=int(words.ctypes.data))

    def _build_row(self, transfer: Transfer) -> Words:
        row = np.zeros(layout.OP_SIZE // 8, np.int64)
        memory = transfer.memory
        wire = self._wires.get(transfer.peer)
        if wire is None:  # this rank itself
            return row
        for place, value in (
            (layout.OP_RECEIVES, int(transfer.receives)),
            (layout.OP_PEER, transfer.peer),
            (layout.OP_ADDR, memory.address),
            (layout.OP_BYTES, memory.nbytes),
            (
                layout.OP_SIG,
                signature(Collective.SEND_RECV, memory.dtype, RedOp.SUM, 0, memory.count),
            ),
            (layout.OP_SEGMENTS, count_segments(wire, memory.nbytes)),
            (layout.OP_COUNT, memory.count),
        ):
            row[place // 8] = value
        return row

    def advance(
        self,
        must: Sequence[TransferEntry],
        among: Sequence[TransferEntry] | None = None,
        any_of: Sequence[TransferEntry] = (),
    ) -> int:
        """Advance transfers until all of ``must`` or one of ``any_of`` has ended.

        Args:
            must: Entries that all have to end.
            among: Entries that may advance; None for all.
            any_of: Entries of which one has to end. Without ``must`` and ``any_of`` the call does
                not block.

        Returns:
            A result code of the engine (``layout``).
        """
        if not self._caller_lock.acquire(blocking=False):
            return layout.BUSY
        try:
            with self._engine_lock:
                return self._advance(must, among, any_of)
        finally:
            self._caller_lock.release()

    def try_advance(self) -> tuple[int, bool | None]:
        """Advance transfers without blocking.

        Returns:
            (result code of the engine, True if a transfer advanced); None in place of the latter if
            another thread is in ``advance`` and does the work.
        """
        if not self._engine_lock.acquire(blocking=False):
            return layout.OK, None
        try:
            before = self._completed_pieces()
            return self._advance([], None, []), self._completed_pieces() != before
        finally:
            self._engine_lock.release()

    def _completed_pieces(self) -> tuple[int, int]:
        """Return (open transfers, completed pieces of them)."""
        entries = self.in_flight
        return len(entries), sum(int(e.words[_DONE]) for e in entries)

    def _advance(
        self,
        must: Sequence[TransferEntry],
        among: Sequence[TransferEntry] | None,
        any_of: Sequence[TransferEntry],
    ) -> int:
        with self._lock:
            entries = [e for e in self._open if among is None or e in among]
        if not entries:
            return layout.OK
        wanted = {id(e): layout.WAIT_ANY for e in any_of} | {id(e): layout.WAIT_ALL for e in must}
        alone = len(entries) == 1
        code = (
            self._advance_one(entries[0], wanted.get(id(entries[0]), 0))
            if alone
            else self._advance_all(entries, wanted)
        )
        with self._lock:
            self._open = [e for e in self._open if not e.done]
        return code

    def _advance_one(self, entry: TransferEntry, must: int) -> int:
        """Advance a single entry with its own words as the table, without copies."""
        entry.words[_AFTER], entry.words[_MUST] = -1, must
        code = self._advance_table(entry.address, 1)
        entry.done = entry.done or self._has_ended(entry.words)
        return code

    def _advance_all(self, entries: Sequence[TransferEntry], wanted: Mapping[int, int]) -> int:
        table = np.zeros((len(entries), layout.OP_SIZE // 8), np.int64)
        last: dict[tuple[int, bool], int] = {}
        for i, entry in enumerate(entries):
            key = entry.transfer.peer, entry.transfer.receives
            table[i] = entry.words
            table[i, _AFTER] = last.get(key, -1)
            table[i, _MUST] = wanted.get(id(entry), 0)
            last[key] = i
        code = self._advance_table(int(table.ctypes.data), len(entries))
        for row, entry in zip(table, entries, strict=True):
            entry.words[:] = row
            entry.done = entry.done or self._has_ended(row)
        return code

    def _has_ended(self, row: Words) -> bool:
        """Return True if all pieces are done and the peer has read those that were posted by
        address.
        """
        if row[_DONE] < row[_ROUNDS]:
            return False
        if row[_RECEIVES] or not row[_MARK]:
            return True
        return int(row[_MARK]) <= atomics.load_acquire(
            self._wires[int(row[layout.OP_PEER // 8])].send_tail
        )
