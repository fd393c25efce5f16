"""What the ranks of a host say that they run on GPU memory: who has come to an operation, what others ran last, who ran another one.

A kernel that all ranks take part in writes the number and the signature of its launch to the boards of all peers when it begins
(executor/cuda/source/packets.cuh); so does a collective that is messages, with a number of its own and with how many launches there were
before it (source/p2p.cuh).  Kernels compare what is there while they wait.  The host does once a wait has passed its deadline, and when the
GPU has ended its work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from miraccl.executor.cuda import layout
from miraccl.executor.cuda.gpu import Gpu
from miraccl.executor.cuda.moves import move_tag

_STATE = struct.Struct(f"<{layout.STATE_COPIES + 1}Q")
_ENTRY = struct.Struct("<IIII")
_ENTRIES = _ENTRY.size * layout.BOARD_ENTRIES
_HEAD_BYTES = layout.BOARD_OFFSET + layout.MAX_RANKS * _ENTRIES
_MOVE = struct.Struct(layout.MOVE)
_MOVES = _MOVE.size * layout.MOVE_ENTRIES
_STOPPED = layout.STATE_OFFSET + 8 * layout.STATE_STOPPED
_WAIT_NEED, _WAIT_HOLDS, _NEED_SENT, _NEED_BULK = (
    56,
    48,
    0,
    2,
)  # of the words of waits in source/p2p.cuh
_COUNTS = ("sent", "taken", "large")  # of ``Come``, by NEED_*
_ALL, _HALF = 1 << 32, 1 << 31  # numbers wrap


def _is_after(number: int, other: int) -> bool:
    return 0 < (number - other) % _ALL < _HALF


@dataclass(frozen=True)
class Move:
    """A collective that is messages, as a rank says: ``launches`` are those of other collectives before it."""

    tag: int
    signature: int
    launches: int


@dataclass(frozen=True)
class Said:
    """What a rank says of its last operations: by number the signatures of launches, and collectives that are messages. ``launch`` and
    ``move`` are the numbers of the last ones, 0 before the first."""

    launches: Mapping[int, int]
    moves: Mapping[int, Move]
    launch: int = 0
    move: int = 0

    @property
    def last(self) -> tuple[int, int] | None:
        """Number and signature of the last operation, the number 0 for messages; None before the first."""
        if self.move and not _is_after(self.launch, self.moves[self.move].launches):
            return 0, self.moves[self.move].signature
        return (self.launch, self.launches[self.launch]) if self.launch in self.launches else None

    def upto(self, number: int) -> Said:
        """Without what this rank enqueued after the operation in which its wait failed: a launch, or (0) its last collective that is
        messages, for no more of these begin then."""
        launch = number or self.moves[self.move].launches if number or self.move else self.launch
        launches = {
            other: signature
            for other, signature in self.launches.items()
            if not _is_after(other, launch)
        }
        return Said(launches, self.moves, _last(launches), self.move)


def _said(launches: Mapping[int, int], moves: bytes) -> Said:
    entries = _MOVE.iter_unpack(moves)
    found = {
        n: Move(tag, what, before)
        for n, tag, what, before in entries
        if n and tag == move_tag(n, before, what)
    }  # whole ones
    return Said(launches, found, _last(launches), _last(found))


def _last(numbers: Mapping[int, object]) -> int:
    """The one after all others; they are close to one another."""
    return next(
        (number for number in numbers if not any(_is_after(other, number) for other in numbers)), 0
    )


def _another(mine: Said, theirs: Said) -> tuple[int, int] | None:
    """Number and signature, as ``Said.last`` has them, of an operation of ``mine`` in whose place the other rank says another."""
    for number, signature in mine.launches.items():
        if theirs.launches.get(number, signature) != signature:
            return number, signature
    for number, move in mine.moves.items():
        if number in theirs.moves and theirs.moves[number].tag != move.tag:
            return 0, move.signature
    return None


def _in_another_order(mine: Said, theirs: Said) -> tuple[int, int] | None:
    """The same of one that the other rank has left out, where it has gone on, or that this rank has gone on to without one of the other."""
    if (
        mine.move
        and _is_after(mine.move, theirs.move)
        and _is_after(theirs.launch, mine.moves[mine.move].launches)
    ):
        return 0, mine.moves[
            mine.move
        ].signature  # it is past the launches before this one without it
    if (
        theirs.move
        and _is_after(theirs.move, mine.move)
        and _is_after(mine.launch, before := theirs.moves[theirs.move].launches)
    ):
        number = (before + 1) % _ALL
        return (number, mine.launches[number]) if number in mine.launches else mine.last
    return None


@dataclass(frozen=True)
class Ahead:
    """An operation, named as ``Said.last`` names one, that ``rank`` has begun and ``behind`` has not; one of them is this rank (None)."""

    rank: int | None
    behind: int | None
    number: int
    signature: int


@dataclass(frozen=True)
class Boards:
    """What this rank has run, and what its peers say. ``stopped(rank)``: whether a peer's wait has failed, after which launches that it had
    enqueued still begin."""

    mine: Said
    theirs: Mapping[int, Said]
    stopped: Callable[[int], bool] = lambda _: False

    def has_begun(self, rank: int, number: int) -> bool:
        """Whether a peer has begun launch ``number``, 0: the last collective of this rank that is messages."""
        said = self.theirs.get(rank, Said({}, {}))
        if number:
            return said.launch != 0 and not _is_after(number, said.launch)
        return said.move != 0 and not _is_after(self.mine.move, said.move)

    def describe(self, rank: int, number: int, name: Callable[[int, int], str]) -> str:
        """What a peer does about an operation; ``name(number, signature)`` is what one is called."""
        return (
            "has begun it"
            if self.has_begun(rank, number)
            else f"never came to it; {self.last(rank, name)}"
        )

    def last(self, rank: int, name: Callable[[int, int], str]) -> str:
        """What a peer ran last."""
        said = self.theirs[rank].last if rank in self.theirs else None
        return f"its last was {name(*said)}" if said is not None else "it has run nothing yet"

    @property
    def all_have_come(self) -> bool:
        """Whether all peers have begun what this rank has."""
        mine = self.mine
        return not any(
            _is_after(mine.launch, said.launch) or _is_after(mine.move, said.move)
            for said in self.theirs.values()
        )

    def ahead(self) -> Ahead | None:
        """Where this rank and a peer have not begun equally many operations."""
        for peer, said in self.theirs.items():
            if said.launch != self.mine.launch:
                is_mine = _is_after(self.mine.launch, said.launch)
                who = self.mine if is_mine else said
                number, signature = who.launch, who.launches.get(who.launch, 0)
            elif said.move != self.mine.move:
                is_mine = _is_after(self.mine.move, said.move)
                who = self.mine if is_mine else said
                number, signature = 0, who.moves[who.move].signature
            else:
                continue
            return Ahead(None if is_mine else peer, peer if is_mine else None, number, signature)
        return None

    def unlike(self, failed: int | None = None) -> tuple[int, int, int] | None:
        """A peer that ran another operation in the place of one of this rank's, and number and signature of that one. ``failed``: in which
        a wait of this rank did, as in ``Said.upto``."""
        mine = self.mine if failed is None else self.mine.upto(failed)
        for peer, said in self.theirs.items():
            found = _another(mine, said)
            if (
                found is None
                and (found := _in_another_order(mine, said)) is not None
                and self.stopped(peer)
            ):
                found = None
            if found is not None:
                return peer, *found
        return None


class Regions(Protocol):
    """Where the memory of a rank and of its peers lies: ``transport.cuda_p2p.SymmetricMemory``, ``executor.cuda.lower.CommArgs``."""

    @property
    def rank(self) -> int: ...
    @property
    def own(self) -> int: ...
    @property
    def inboxes(self) -> Sequence[int]: ...
    @property
    def outboxes(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Head:
    """The beginning of this rank's memory: its state and, where peers share this memory, the boards. One copy."""

    state: tuple[int, ...]
    content: bytes

    @property
    def place(self) -> tuple[int, int]:
        """How many launches, and collectives that are messages, there were on this rank's GPU."""
        return self.state[layout.STATE_LAUNCH] % _ALL, self.state[layout.STATE_MOVES] >> 32

    @property
    def begun(self) -> tuple[int, int]:
        """Number and signature of the last launch that has begun, 0 before the first."""
        noted = {
            word >> 32: word % _ALL
            for word in self.state[layout.STATE_SIGNATURES :][: layout.BOARD_ENTRIES]
            if word
        }
        return (number := _last(noted)), noted.get(number, 0)

    @property
    def stopped(self) -> bool:
        """Whether a wait of this rank has failed."""
        return self.state[layout.STATE_STOPPED] != 0

    @property
    def copies(self) -> tuple[int, int] | None:
        """Number and signature of the launch after which copies go on that wait for peers; None: none do."""
        number = self.state[layout.STATE_COPIES] % _ALL
        return (
            (number, self.state[layout.STATE_SIGNATURES + number % layout.BOARD_ENTRIES] % _ALL)
            if number
            else None
        )


def read_head(gpu: Gpu, where: Regions) -> Head:
    """What ``read_boards`` begins with."""
    content = gpu.read(where.own, _HEAD_BYTES)
    return Head(_STATE.unpack_from(content, layout.STATE_OFFSET), content)


@dataclass(frozen=True)
class UnderWay:
    """A launch that a rank is in, and ranks without which it does not end, and which have not begun it."""

    number: int
    signature: int
    awaited: tuple[int, ...]


def read_under_way(gpu: Gpu, where: Regions) -> UnderWay | None:
    """The launch that this rank is in and cannot end yet, as others have not come. (The count of launches does not tell: one thread adds to
    it, which may have waited for nobody.)"""
    head = read_head(gpu, where)
    number, signature = head.begun
    peers = [rank for rank in range(len(where.outboxes)) if rank != where.rank]
    if not peers or not number or head.stopped:
        return None
    told, _, _, word = _ENTRY.unpack(
        gpu.read(where.outboxes[peers[0]] + _entry_of(where.rank, number), _ENTRY.size)
    )
    above = layout.NEEDS_ALL_SHIFT + 1
    if told != number or word >> above != number % (_ALL >> above):
        return None
    needed = peers if word & layout.NEEDS_ALL else [rank for rank in peers if word >> rank & 1]
    awaited = [
        rank for rank in needed if _is_after(number, _last_told(gpu, where.inboxes[rank], rank))
    ]
    return UnderWay(number, signature, tuple(awaited)) if awaited else None


def _entry_of(rank: int, number: int) -> int:
    """Where in a rank's memory the entry of ``rank`` for a launch is."""
    return (
        layout.BOARD_OFFSET
        + (rank * layout.BOARD_ENTRIES + number % layout.BOARD_ENTRIES) * _ENTRY.size
    )


def _last_told(gpu: Gpu, box: int, rank: int) -> int:
    """The number of the last launch that ``rank`` has said there that it has begun, 0 before the first."""
    entries = _ENTRY.iter_unpack(gpu.read(box + _entry_of(rank, 0), _ENTRIES))
    return _last({number: signature for number, signature, *_ in entries if number or signature})


@dataclass(frozen=True)
class Held:
    """What a rank says of a wait in messages: how far the peer's count ``what`` of ``Come`` must have come. ``holds``: a bit for each rank
    that the launch holds meanwhile (source/p2p.cuh)."""

    peer: int
    what: str
    count: int
    holds: int


def read_waits(gpu: Gpu, where: Regions) -> list[Held]:
    """The long waits of this rank in the launch of messages that it is in."""
    nranks = len(where.inboxes)
    if _read_word(gpu, where.own + _STOPPED):
        return []
    row = gpu.read(
        where.own + layout.WAITS_OFFSET + 8 * layout.MAX_RANKS * where.rank, 8 * layout.MAX_RANKS
    )
    found = []
    for peer, said in enumerate(struct.unpack(f"<{layout.MAX_RANKS}Q", row)[:nranks]):
        kind, count = said >> _WAIT_NEED & 3, said % (1 << _WAIT_HOLDS)
        if said >> 63 and not _has_ended(gpu, where, peer, kind, count):
            found.append(Held(peer, _COUNTS[kind], count, said >> _WAIT_HOLDS & 0xFF))
    return found


def _has_ended(gpu: Gpu, where: Regions, peer: int, kind: int, count: int) -> bool:
    """Whether a wait for ``peer`` has got what it was for: of a large message slots, which come before it is taken and counted."""
    if kind == _NEED_BULK:
        granted = (
            _read_word(
                gpu, where.inboxes[peer] + layout.BULK_GRANTS_OFFSET + peer * layout.BULK_STRIDE
            )
            >> 32
        )
        return not _is_after(count % _ALL, granted)
    has = (
        where.own + layout.LANE_TAKEN_OFFSET
        if kind == _NEED_SENT
        else where.inboxes[peer] + layout.LANE_CREDIT_OFFSET
    )
    return (
        _read_word(gpu, has + peer * layout.message_lanes(len(where.inboxes)) * layout.WORD_STRIDE)
        >= count
    )


@dataclass(frozen=True)
class Come:
    """How far a rank's kernels have come: the number of the last launch that has begun, and by peer rows of the first lane that they have
    sent to it, and told it that they have taken, and ``large`` messages that they have taken."""

    begun: int
    sent: tuple[int, ...]
    taken: tuple[int, ...]
    large: tuple[int, ...]


def read_come(gpu: Gpu, where: Regions) -> Come:
    lanes = layout.message_lanes(len(where.inboxes))
    sent, taken, large = [], [], []
    for peer, outbox in enumerate(where.outboxes):
        near = peer == where.rank
        sent.append(
            0
            if near
            else _read_word(
                gpu, where.own + layout.LANE_SENT_OFFSET + peer * lanes * layout.WORD_STRIDE
            )
        )
        taken.append(
            0
            if near
            else _read_word(
                gpu, outbox + layout.LANE_CREDIT_OFFSET + where.rank * lanes * layout.WORD_STRIDE
            )
        )
        counted = (
            where.own + layout.BULK_COUNTS_OFFSET + (layout.MAX_RANKS + peer) * layout.BULK_STRIDE
        )
        large.append(0 if near else _read_word(gpu, counted))
    return Come(read_head(gpu, where).begun[0], tuple(sent), tuple(taken), tuple(large))


def _read_word(gpu: Gpu, address: int) -> int:
    return int.from_bytes(gpu.read(address, 8), "little")


def read_boards(gpu: Gpu, where: Regions, head: Head | None = None) -> Boards:
    """The boards of all peers, and what this rank has noted of its own operations. Memory that peers share is read once; ``head`` if it
    was read before."""
    head = head or read_head(gpu, where)
    noted = head.state[layout.STATE_SIGNATURES : layout.STATE_SIGNATURES + layout.BOARD_ENTRIES]
    peers = {peer: inbox for peer, inbox in enumerate(where.inboxes) if peer != where.rank}
    # launches first: what a peer did before it began one is there then
    heads = {
        box: head.content if box == where.own else gpu.read(box, _HEAD_BYTES)
        for box in set(peers.values())
    }
    moves = {
        box: gpu.read(box + layout.MOVES_OFFSET, layout.MAX_RANKS * _MOVES)
        for box in {where.own, *peers.values()}
    }
    mine = _said(
        {word >> 32: word % _ALL for word in noted if word},
        _part(moves[where.own], where.rank, _MOVES),
    )
    theirs = {}
    for peer, box in peers.items():
        entries = _ENTRY.iter_unpack(_part(heads[box][layout.BOARD_OFFSET :], peer, _ENTRIES))
        launched = {number: signature for number, signature, *_ in entries if number or signature}
        theirs[peer] = _said(launched, _part(moves[box], peer, _MOVES))
    return Boards(mine, theirs, lambda peer: any(gpu.read(where.outboxes[peer] + _STOPPED, 8)))


def _part(entries: bytes, rank: int, nbytes: int) -> bytes:
    return entries[rank * nbytes : (rank + 1) * nbytes]
