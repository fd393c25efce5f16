"""Control-plane traffic between the ranks of a running job: groups, all-gathers, notices, status.

A group is the ranks of a communicator; ``WORLD`` is the whole job. A rank that is gone, or has left
a group, ends the gathers in progress there. A message that breaks a rule raises ``ProtocolError``,
and the hub drops its sender.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from miraccl.errors import InvalidUsage, ProtocolError
from miraccl.wire import framing
from miraccl.wire.bootstrap import format_ranks
from miraccl.wire.bootstrap_messages import (
    Gather,
    Gathered,
    GatherMissing,
    GatherTimeout,
    LeaveGroup,
    NoticeMessage,
    OpenGroup,
    StatusQuery,
    StatusReply,
)

WORLD = 0


@dataclass(kw_only=True)
class _Group:
    """``left``: reason by rank of those that have left the group."""

    ranks: tuple[int, ...]
    left: dict[int, str] = field(default_factory=dict)

    def others(self, rank: int) -> list[int]:
        return [other for other in self.ranks if other != rank and other not in self.left]


@dataclass(kw_only=True)
class _Round:
    """One all_gather in progress: parts by rank, and the deadline of each rank that waits."""

    parts: dict[int, bytes] = field(default_factory=dict)
    deadlines: dict[int, float] = field(default_factory=dict)


class Groups:
    """All groups of a job. ``send(ranks, message)`` sends to those of the ranks that are
    connected.
    """

    def __init__(self, send: Callable[[Iterable[int], Any], None]) -> None:
        self._send = send
        self._nranks = 0
        self._gone: set[int] = set()
        self._groups: dict[int, _Group] = {}
        self._rounds: dict[tuple[int, str, int], _Round] = {}  # by group, tag and number

    def open_world(self, nranks: int, gone: Iterable[int] = ()) -> None:
        """Open group ``WORLD``: all ranks have joined, except those that are ``gone`` already."""
        self._nranks = nranks
        self._gone.update(gone)
        self._groups[WORLD] = _Group(ranks=tuple(range(nranks)))

    def deadlines(self) -> Iterator[float]:
        for gather in self._rounds.values():
            yield from gather.deadlines.values()

    def tick(self, now: float) -> None:
        """Notify the ranks whose gather timed out of the ranks that are missing."""
        for (group, tag, number), gather in self._rounds.items():
            for rank in [rank for rank, deadline in gather.deadlines.items() if deadline <= now]:
                del gather.deadlines[rank]
                missing = tuple(r for r in self._groups[group].ranks if r not in gather.parts)
                self._send(
                    (rank,), GatherTimeout(group=group, tag=tag, round=number, missing=missing)
                )

    def handle(self, rank: int, message: Any, now: float) -> None:
        """Handle a message of a rank."""
        if isinstance(message, OpenGroup):
            self._open(rank, message)
            return
        if isinstance(message, StatusReply):
            back = StatusReply(
                group=message.group, rank=rank, ident=message.ident, payload=message.payload
            )
            self._send((message.rank,), back)
            return
        group = self._groups.get(message.group)
        if group is None or rank not in group.ranks or rank in group.left:
            raise ProtocolError(f"rank {rank} is not in group {message.group:x}")
        if isinstance(message, Gather):
            self._gather(group, rank, message, now)
        elif isinstance(message, NoticeMessage):
            self._send(
                group.others(rank),
                NoticeMessage(
                    group=message.group, rank=rank, seq=message.seq, payload=message.payload
                ),
            )
        elif isinstance(message, StatusQuery):
            self._send(
                group.others(rank), StatusQuery(group=message.group, rank=rank, ident=message.ident)
            )
        else:
            assert isinstance(message, LeaveGroup)
            group.left[rank] = message.reason
            self._send(
                group.others(rank),
                LeaveGroup(group=message.group, rank=rank, reason=message.reason),
            )
            self._end_rounds(message.group)

    def request_missing(self) -> None:
        """Ask for the parts of incomplete gathers that ranks may have sent to the lost hub only."""
        for (number, tag, round_), gather in self._rounds.items():
            missing = [r for r in self._groups[number].ranks if r not in gather.parts]
            self._send(missing, GatherMissing(group=number, tag=tag, round=round_))

    def _open(self, rank: int, message: OpenGroup) -> None:
        ranks = message.ranks
        if (
            rank not in ranks
            or len(set(ranks)) != len(ranks)
            or max(ranks) >= self._nranks
            or message.group == WORLD
        ):
            raise ProtocolError(f"rank {rank} opens a group of {format_ranks(ranks)}")
        group = self._groups.setdefault(message.group, _Group(ranks=ranks))
        if group.ranks != ranks:
            raise ProtocolError(f"rank {rank} opens group {message.group:x} with other ranks")
        for other, reason in group.left.items():
            self._send((rank,), LeaveGroup(group=message.group, rank=other, reason=reason))

    def _gather(self, group: _Group, rank: int, message: Gather, now: float) -> None:
        if any(r in group.left or r in self._gone for r in group.ranks):
            return  # it cannot complete; the rank has been notified of the departure
        key = (message.group, message.tag, message.round)
        gather = self._rounds.setdefault(key, _Round())
        if rank in gather.parts:
            raise ProtocolError(f"rank {rank} gave its part of all_gather {message.tag!r} twice")
        gather.parts[rank] = message.data
        gather.deadlines[rank] = now + message.timeout
        if len(gather.parts) < len(group.ranks):
            return
        del self._rounds[key]
        parts = tuple(gather.parts[r] for r in group.ranks)
        try:
            self._send(
                group.ranks,
                Gathered(group=message.group, tag=message.tag, round=message.round, parts=parts),
            )
        except InvalidUsage:
            raise ProtocolError(
                f"all_gather {message.tag!r} exceeds {framing.MAX_FRAME_BYTES} bytes in all"
            ) from None

    def remove_rank(self, rank: int) -> None:
        """Remove a rank that is gone from the job."""
        self._gone.add(rank)
        for number in [number for number, group in self._groups.items() if rank in group.ranks]:
            self._end_rounds(number)

    def _end_rounds(self, number: int) -> None:
        """Drop the gathers of a group that has lost a rank, and the group once it is empty.

        The members know that these gathers fail from the message about the rank.
        """
        for key in [key for key in self._rounds if key[0] == number]:
            del self._rounds[key]
        group = self._groups[number]
        if number != WORLD and all(
            rank in group.left or rank in self._gone for rank in group.ranks
        ):
            del self._groups[number]

    def end(self) -> None:
        self._rounds.clear()

    def validate_state(self) -> None:
        for (group, _, _), gather in self._rounds.items():
            assert gather.parts.keys() < set(self._groups[group].ranks)
            assert gather.deadlines.keys() <= gather.parts.keys()
