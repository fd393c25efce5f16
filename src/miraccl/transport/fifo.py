"""FIFO between two ranks: layout of its words in memory, and access to words and lines from Python.

A FIFO has one direction, from a source rank to a destination rank. Compiled executors use the
constants below; this file defines them.

- Message number m (from 0) uses descriptor line, CTS line and slot ``m % NSLOTS``.
- A line's flag is written last, with release; it is ``m + 1`` for a line of message m, 0 for an
  empty line. A descriptor flag of ``-(m + 1)`` announces a message that is larger than a slot:
  words 1 and 2 are valid, the payload waits for a CTS.
- ``tail`` is the number of messages consumed: written with release by the receiver if both ends
  map the FIFO; on the send side of a FIFO with a proxy, written by the proxy once the kernel has
  all bytes of the message. A sender never writes line or slot m before ``m - tail < NSLOTS``.
- The CTS ring is for connections with ``IN_PLACE``: the receiver names the memory for message m
  before it waits for it.

The ring of flagged lines comes from FastForward (Giacomoni et al., PPoPP 2008): the consumer polls
the slot itself, not a shared head. The split into descriptors (the ``size`` FIFO) and tail is that
of NCCL's ``ncclConnFifo``.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import mmap
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from miraccl.errors import as_system_failure
from miraccl.native import atomics

NSLOTS: Final = 8
"""Messages in flight per FIFO; NCCL_STEPS has the same value."""
LINE_BYTES: Final = 64
WORD_BYTES: Final = 8
PAGE_BYTES: Final = 4096

WORD_FLAG: Final = 0
WORD_SIGNATURE: Final = 1
WORD_NBYTES: Final = 2
WORD_MODE: Final = 3
WORD_ADDRESS: Final = 4
WORD_INLINE: Final = 4
"""Inline payload starts here and ends with the line."""
INLINE_BYTES: Final = (LINE_BYTES // WORD_BYTES - WORD_INLINE) * WORD_BYTES

WORD_CTS_ADDRESS: Final = 1
WORD_CTS_BYTES: Final = 2

DESC_OFFSET: Final = 0
CTS_OFFSET: Final = DESC_OFFSET + NSLOTS * LINE_BYTES
TAIL_OFFSET: Final = CTS_OFFSET + NSLOTS * LINE_BYTES
"""The tail has 128 bytes of its own: the prefetcher of x86 fetches pairs of lines."""
RETURNED_OFFSET: Final = TAIL_OFFSET + WORD_BYTES
"""Slots returned for the last messages, a byte each: 0 for the message's own, else 1 + a number.

Numbers below NSLOTS are slots of this FIFO's memory, those from NSLOTS on of the FIFO in the other
direction.
"""
SLOTS_OFFSET: Final = PAGE_BYTES


class Mode(enum.IntEnum):
    """Place of a posted message's payload."""

    SLOT = 0
    """In slot ``m % NSLOTS``."""
    INLINE = 1
    """In words 4 to 7 of the descriptor line, at most ``INLINE_BYTES``."""
    WINDOW = 2
    """In a window that the receiver has mapped, at word 4 (shared memory only)."""
    ADDRESS = 3
    """In the sender's own memory, at word 4."""
    LANDED = 4
    """Already at the address for which the receiver posted a CTS."""
    OVERSIZE = 5
    """Nowhere: larger than the posted receive buffer; the ranks disagree on the operation."""
    SIGNAL = 6
    """No payload: words 4 and 5 are the locations of the sender's buffers (shared memory only)."""
    MOVED = 7
    """In the slot whose number is in word 4: slots have changed hands (shared memory, between
    compiled executors only).
    """


def fifo_bytes(slot_bytes: int) -> int:
    """Return the size in bytes of a FIFO with slots of ``slot_bytes``, a multiple of the page."""
    return SLOTS_OFFSET + NSLOTS * slot_bytes


def check_slot_bytes(slot_bytes: int) -> int:
    """Return ``slot_bytes`` if it is a positive multiple of the page. Raises ``ValueError``."""
    if slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
        raise ValueError(
            f"cannot use slots of {slot_bytes} bytes: allowed are multiples of {PAGE_BYTES}"
        )
    return slot_bytes


DEFAULT_BUDGET: Final = 4 << 20
"""Bytes of all send slots of a rank; NCCL takes 4 MiB per connection."""
MIN_SLOT_BYTES: Final = 2 * PAGE_BYTES
MAX_SLOT_BYTES: Final = 64 << 10


def slot_bytes_for(npeers: int, budget: int = 0, max_slot_bytes: int = MAX_SLOT_BYTES) -> int:
    """Return the slot size with ``npeers`` peers that share ``budget`` bytes.

    It is a power of two, the same on all ranks that count the same peers.
    """
    share = (budget or DEFAULT_BUDGET) // max(1, npeers) // NSLOTS
    size = MIN_SLOT_BYTES
    while size * 2 <= min(share, max_slot_bytes):
        size *= 2
    return size


# --- memory by address

# Slices of one view over all of user space: a ctypes array per call would make a new type per size
# (20 us instead of 0.1). It starts at the second page, because a view at address 0 counts as NULL.
_VIEW_START = PAGE_BYTES
_MEMORY = memoryview((ctypes.c_ubyte * ((1 << 47) - _VIEW_START)).from_address(_VIEW_START)).cast(
    "B"
)
_WORDS = _MEMORY.cast("q")


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return a writable view of ``nbytes`` bytes of this process; the caller guarantees the
    memory.
    """
    if nbytes and (address < _VIEW_START or nbytes < 0 or address + nbytes > 1 << 47):
        raise ValueError(f"cannot view memory at {address:#x} + {nbytes}: it is not in user space")
    start = address - _VIEW_START if nbytes else 0
    return _MEMORY[start : start + nbytes]


class Atomics(Protocol):
    """Loads and stores of aligned int64 words at an address; see ``native_atomics``."""

    def load_acquire(self, address: int, /) -> int: ...
    def store_release(self, address: int, value: int, /) -> Any: ...
    def exchange(self, address: int, value: int, /) -> int: ...


class PlainAtomics:
    """Stand-in without compiled code, valid only while all parties are threads ordered by the
    GIL.
    """

    def load_acquire(self, address: int, /) -> int:
        return _WORDS[(address - _VIEW_START) >> 3]

    def store_release(self, address: int, value: int, /) -> None:
        _WORDS[(address - _VIEW_START) >> 3] = value

    def exchange(self, address: int, value: int, /) -> int:
        index = (address - _VIEW_START) >> 3
        old, _WORDS[index] = _WORDS[index], value
        return old


class _NativeAtomics:
    def __init__(self) -> None:
        self.load_acquire: Callable[[int], int] = atomics.bound("load_word")
        self.store_release: Callable[[int, int], Any] = atomics.bound("store_word")
        self.exchange: Callable[[int, int], int] = atomics.bound("exchange_word")


@functools.cache
def native_atomics() -> Atomics:
    """Return compiled atomics, for memory that compiled code or another process uses as well."""
    return _NativeAtomics()


class Descriptor(NamedTuple):
    """Descriptor line: ``signature`` of the operation, ``nbytes``, ``mode``, and word 4."""

    signature: int
    nbytes: int
    mode: int
    address: int


def read_words(line: int, first: int, count: int) -> list[int]:
    """Return ``count`` words of a line; valid only after its flag was loaded with acquire."""
    start = ((line - _VIEW_START) >> 3) + first
    return _WORDS[start : start + count].tolist()


def flags_view(ring: int) -> memoryview:
    """Return the flags of all lines of a ring as a strided view, to compare them in one
    operation.
    """
    start = (ring - _VIEW_START) >> 3
    words = LINE_BYTES // WORD_BYTES
    return _WORDS[start : start + NSLOTS * words : words]


def write_words(line: int, first: int, values: list[int]) -> None:
    """Write words of a line; publish them with a release store of the flag afterwards."""
    start = ((line - _VIEW_START) >> 3) + first
    for index, value in enumerate(values):
        _WORDS[start + index] = value


def read_descriptor(line: int) -> Descriptor:
    return Descriptor(*read_words(line, WORD_SIGNATURE, 4))


class PrivateMemory:
    """Private zeroed memory, page aligned, freed with the last reference. Raises
    ``SystemFailure``.
    """

    def __init__(self, nbytes: int) -> None:
        with as_system_failure(f"cannot allocate {nbytes} bytes of memory"):
            self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class FifoMemory(PrivateMemory):
    """Private memory of one FIFO."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = check_slot_bytes(slot_bytes)
        super().__init__(fifo_bytes(slot_bytes))
