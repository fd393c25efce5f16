"""What the ranks of a host say that they run on GPU memory: who has come to a launch, and what the others ran last.

A kernel that all ranks take part in writes the number and the signature of its launch to the boards of all peers when it begins
(executor/cuda/source/packets.cuh).  Boards are read when a wait has passed its deadline.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.driver import Gpu
from miraccl.executor.cuda.lower import CommArgs

_STATE = struct.Struct(f"<{layout.STATE_SIGNATURES + layout.BOARD_ENTRIES}Q")
_ENTRY = struct.Struct("<IIII")
_ENTRIES = _ENTRY.size * layout.BOARD_ENTRIES
_HALF = 1 << 31


@dataclass(frozen=True)
class BoardEntry:
    """What a rank says of a launch: its number, from 1, and 32 bits of what it runs."""

    number: int
    signature: int


@dataclass(frozen=True)
class Boards:
    """By peer what it says of its newest launch, None before the first."""

    newest: Mapping[int, BoardEntry | None]

    def has_begun(self, rank: int, number: int) -> bool:
        """Whether a peer has begun launch ``number``; numbers wrap at 2^32."""
        newest = self.newest.get(rank)
        return newest is not None and (newest.number - number) % (1 << 32) < _HALF

    def describe(self, rank: int, number: int, name: Callable[[int, int], str]) -> str:
        """What a peer does about launch ``number``; ``name(number, signature)`` is what a launch is called."""
        if self.has_begun(rank, number):
            return "has begun it"
        newest = self.newest.get(rank)
        last = f"its last was {name(newest.number, newest.signature)}" if newest else "it has run nothing yet"
        return f"never came to it; {last}"


@dataclass(frozen=True)
class Last:
    """A rank's last launch; ``peer`` ran another operation in its place, if not None."""

    number: int
    signature: int
    peer: int | None


def read_last(gpu: Gpu, args: CommArgs, judged: int) -> Last | None:
    """This rank's last launch, whose GPU has ended its work, as a launch after it would compare it (``judge`` of packets.cuh); None if
    that is launch ``judged``, or if there was none."""
    words = _STATE.unpack(gpu.read(args.own + layout.STATE_OFFSET, _STATE.size))
    number = words[layout.STATE_LAUNCH] % (1 << 32)
    noted = words[layout.STATE_SIGNATURES + number % layout.BOARD_ENTRIES]
    if number == judged or noted >> 32 != number:
        return None
    mine = BoardEntry(number, noted % (1 << 32))
    for peer, inbox in enumerate(args.inboxes):
        if peer != args.rank:
            at = inbox + layout.BOARD_OFFSET + peer * _ENTRIES + number % layout.BOARD_ENTRIES * _ENTRY.size
            said = BoardEntry(*_ENTRY.unpack(gpu.read(at, _ENTRY.size))[:2])
            if said.number == number and said != mine:
                return Last(number, mine.signature, peer)
    return Last(number, mine.signature, None)


def read_boards(gpu: Gpu, args: CommArgs, number: int) -> Boards:
    """The boards of all peers, when this rank is at launch ``number``."""
    newest = {}
    for peer, inbox in enumerate(args.inboxes):
        if peer != args.rank:
            newest[peer] = _newest(gpu.read(inbox + layout.BOARD_OFFSET + peer * _ENTRIES, _ENTRIES), number)
    return Boards(newest)


def _newest(entries: bytes, number: int) -> BoardEntry | None:
    """The entry furthest on, seen from launch ``number``; entries are zeros where nothing was said."""
    said: Sequence[BoardEntry] = [BoardEntry(*entry[:2]) for entry in _ENTRY.iter_unpack(entries) if entry[0]]
    return max(said, key=lambda entry: (entry.number - number + _HALF) % (1 << 32), default=None)
