"""Registered memory of an agent: the table that its peers read, and the end of a registration.

The table is a shared segment. An entry has the range, rights and generation of a region; its key is
in private memory, where the owner's thread checks requests from the network.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from miraccl import clock
from miraccl.deadline import Deadline
from miraccl.errors import InvalidUsage, SystemFailure, TransferTimeout
from miraccl.p2p import segment_layout as layout
from miraccl.p2p.arrays import Memory, windows
from miraccl.p2p.descriptors import RemoteMemory, row_bytes
from miraccl.p2p.native_calls import exchange_word, load_word, store_word
from miraccl.transport.fifo import PrivateMemory
from miraccl.transport.region import KEY_BYTES, Rights
from miraccl.transport.shared_segment import ShmSegment

#: Pauses of ``deregister`` between two looks at the accesses under way.
MIN_PAUSE_S, MAX_PAUSE_S = 20e-6, 2e-3


def key_check(key: bytes) -> int:
    """Return the word by which an initiator of the host recognises a wrong key."""
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little", signed=True)


class AccessLines(Protocol):
    """Accesses of one peer to regions of this agent."""

    @property
    def peer_name(self) -> str: ...

    def accesses(self, slot: int) -> bool:
        """Return True if an access to the region in ``slot`` is under way."""


class RegionTable:
    """Table of the registered regions of one agent. Raises ``SystemFailure`` without memory."""

    def __init__(self) -> None:
        self.segment = ShmSegment.create("miraccl-p2p-table", layout.TABLE_BYTES)
        self.inode = os.fstat(self.segment.fd).st_ino
        self.keys = PrivateMemory(layout.MAX_REGIONS * KEY_BYTES)
        self._free = list(range(layout.MAX_REGIONS - 1, -1, -1))
        self._lock = threading.Lock()

    @property
    def doorbell(self) -> int:
        """Address of the page with the wake-up word."""
        return self.segment.address

    def entry(self, slot: int) -> int:
        return self.segment.address + layout.TABLE_ENTRIES + slot * layout.ENTRY_BYTES

    def generation(self, slot: int) -> int:
        return int(load_word()(self.entry(slot) + layout.ENTRY_GENERATION))

    def publish(self, memory: Memory, rights: Rights, key: bytes) -> tuple[int, int]:
        """Enter a region; return (slot, generation). Raises ``SystemFailure`` if it is full."""
        with self._lock:
            if not self._free:
                raise SystemFailure(
                    f"cannot register: the agent has {layout.MAX_REGIONS} regions, the most allowed"
                )
            slot = self._free.pop()
        entry, store = self.entry(slot), store_word()
        window = windows.find(memory.address, memory.nbytes) if memory.device < 0 else None
        store(entry + layout.ENTRY_ADDRESS, memory.address)
        store(entry + layout.ENTRY_NBYTES, memory.nbytes)
        store(entry + layout.ENTRY_RIGHTS, int(rights))
        store(entry + layout.ENTRY_KEY_CHECK, key_check(key))
        store(entry + layout.ENTRY_FD, window[0].fd if window else -1)
        if window:
            store(entry + layout.ENTRY_INODE, os.fstat(window[0].fd).st_ino)
            store(entry + layout.ENTRY_OFFSET, window[1])
        for i in (0, 8):
            word = int.from_bytes(key[i : i + 8], "little", signed=True)
            store(self.keys.address + slot * KEY_BYTES + i, word)
        generation = self.generation(slot) + 1
        store(entry + layout.ENTRY_GENERATION, generation)
        return slot, generation

    def retire(self, slot: int) -> None:
        """End the generation of a region: no further access begins. A full fence follows."""
        address = self.entry(slot) + layout.ENTRY_GENERATION
        exchange_word()(address, int(load_word()(address)) + 1)

    def free(self, slot: int) -> None:
        """Allow the slot to be used again, once no access is under way."""
        with self._lock:
            self._free.append(slot)

    def close(self) -> None:
        self.segment.release()


class Registration:
    """Memory that peers may access until ``deregister``; a context manager that deregisters.

    Attributes:
        key: 128-bit random key.
        generation: Number of the registration in its slot of the table.
        memory: Range, shape and dtype.
    """

    def __init__(
        self,
        table: RegionTable,
        memory: Memory,
        rights: Rights,
        *,
        identity: Callable[[], tuple[bytes, str, str]],
        lines: Callable[[], Iterable[AccessLines]],
        timeout: float,
        block_nbytes: int = 0,
        ended: Callable[[Registration], None] = lambda registration: None,
        handle: bytes = b"",
    ) -> None:
        self._table, self._identity, self._lines = table, identity, lines
        self._timeout, self._ended, self._handle = timeout, ended, handle
        self.memory, self.rights = memory, rights
        self.block_nbytes = block_nbytes or row_bytes(memory.shape, memory.nbytes)
        if not 0 < self.block_nbytes <= max(memory.nbytes, 1):
            raise InvalidUsage(
                f"cannot register: block_nbytes is {block_nbytes}; allowed are 1 to {memory.nbytes}"
            )
        self.key = clock.random_bytes(KEY_BYTES)
        self.slot, self.generation = table.publish(memory, rights, self.key)
        self._lock = threading.Lock()
        self._retired = self._freed = False

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def active(self) -> bool:
        """True until ``deregister`` is called."""
        return not self._retired

    def describe(self, access: Rights | None = None) -> RemoteMemory:
        agent, name, address = self._identity()
        memory = self.memory
        return RemoteMemory(
            agent=agent,
            slot=self.slot,
            generation=self.generation,
            key=self.key,
            offset=0,
            nbytes=memory.nbytes,
            block_nbytes=self.block_nbytes,
            rights=self.rights if access is None else access,
            shape=memory.shape,
            dtype=memory.dtype,
            device=memory.device,
            name=name,
            address=address,
            handle=self._handle,
        )

    def advertise(self, *, rows: tuple[int, int] | None = None) -> bytes:
        """Return the descriptor of the memory, or of some of its rows.

        Args:
            rows: First row and the one after the last, of the first axis.

        Raises:
            InvalidUsage: The rows are not in the memory, or the registration has ended.
        """
        if self._retired:
            raise InvalidUsage("cannot advertise: the registration has ended")
        described = self.describe()
        return (described.rows(*rows) if rows is not None else described).encode()

    def deregister(self, timeout: float | None = None) -> None:
        """End the registration; return when no further access can come.

        Args:
            timeout: Seconds to wait for accesses under way, default the agent's.

        Raises:
            TransferTimeout: A peer still holds the memory; the message names it. No new access
                begins, and the memory must be kept until a second call returns.
        """
        deadline = Deadline.after(self._timeout if timeout is None else timeout)
        with self._lock:
            if self._freed:
                return
            if not self._retired:
                self._retired = True
                self._table.retire(self.slot)
            pause = MIN_PAUSE_S
            while holder := next((o for o in self._lines() if o.accesses(self.slot)), None):
                if not deadline.left:
                    raise TransferTimeout(
                        f"cannot deregister {self.nbytes} bytes: agent {holder.peer_name!r} still "
                        f"accesses them after {deadline.seconds:g} s",
                        agent=holder.peer_name,
                        reason="held",
                        hint="keep the memory, and call deregister again",
                    )
                clock.sleep(min(pause, deadline.left))
                pause = min(2 * pause, MAX_PAUSE_S)
            self._freed = True
            self._table.free(self.slot)
        self._ended(self)

    revoke = deregister

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.deregister()
