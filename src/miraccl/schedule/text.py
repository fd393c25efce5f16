"""Text form of schedules: ``dump`` and ``parse``.

    schedule "ring" all_reduce nranks 2 parts 2 root 0 scratch 0
    note "anything"
    channel 0
      rank 0
        send input[1] to 1
        recv_reduce_copy_send input[0] -> output[0] from 1 to 1
        recv -> output[1] from 1
      rank 1
        ...

A step consists of its primitive and those of its operands it has: ``src``, ``-> dst``, ``from``
recv_peer, ``to`` send_peer, ``peers``. ``input[4+2]`` denotes chunks 4 and 5, ``input[4]@1`` the
rows of chunk 4 that table 1 lists; lines such as ``table 1 ranks 0 2`` after the notes define the
tables. Lines such as ``shard 4 ranks 0 2 to 3`` say that ranks 0 and 2 hold chunk 4 and rank 3
needs it. Indentation is free, ``#`` starts a comment. ``parse(dump(s)) == s`` for every schedule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from miraccl.errors import ScheduleError
from miraccl.schedule.ir import Buffer, ChunkRanks, Op, Ref, Schedule, Step
from miraccl.types import Collective

T = TypeVar("T")
#: limit of the ranks of a table, because a text may contain any number
MAX_TABLE_RANKS = 1 << 16

_FIELDS = ("nranks", "parts", "root", "scratch", "aggregators")
_OPS = {op.name.lower(): op for op in Op}
_BUFFERS = {buffer.name.lower(): buffer for buffer in Buffer}
_COLLECTIVES = {collective.label: collective for collective in Collective}
_REF = re.compile(r"(input|output|scratch)\[(\d{1,9})(?:\+(\d{1,9}))?\](?:@(\d{1,9}))?")
_TABLE = re.compile(r"(\d{1,9}) ranks((?: \d{1,9})+)")
_SHARD = re.compile(r"(\d{1,9}) ranks((?: \d{1,9})*) to((?: \d{1,9})*)")
_HEADER = re.compile(r'("(?:[^"\\]|\\.)*")\s+(\w+)((?:\s+\w+\s+\d{1,9})*)')


def dump(schedule: Schedule) -> str:
    """Return the text form of ``schedule``."""
    lines = [
        f"schedule {json.dumps(schedule.name)} {schedule.collective.label} nranks"
        f" {schedule.nranks} parts {schedule.parts} root {schedule.root} scratch"
        f" {schedule.scratch_chunks}"
        + (f" aggregators {schedule.aggregators}" if schedule.aggregators else "")
    ]
    lines += [f"note {json.dumps(note)}" for note in schedule.notes]
    for number, ranks_of_table in enumerate(schedule.tables):
        lines.append(f"table {number} ranks{_format_ranks(ranks_of_table)}")
    for number, ranks in enumerate(schedule.shards):
        holders, targets = map(_format_ranks, ranks)
        lines.append(f"shard {number} ranks{holders} to{targets}")
    for channel, programs in enumerate(schedule.channels):
        lines.append(f"channel {channel}")
        for rank, steps in enumerate(programs):
            lines.append(f"  rank {rank}")
            lines += [f"    {format_step(step)}" for step in steps]
    return "\n".join(lines) + "\n"


def _format_ranks(ranks: int) -> str:
    """Return the ranks of a bit set, each with a space before it."""
    return "".join(f" {rank}" for rank in range(ranks.bit_length()) if ranks >> rank & 1)


def format_step(step: Step) -> str:
    """Return a step as one line, such as ``recv_reduce_copy input[3] -> output[3] from 0``."""
    words = [step.op.name.lower()]
    if step.src is not None:
        words.append(str(step.src))
    if step.dst is not None:
        words.append(f"-> {step.dst}")
    if step.recv_peer is not None:
        words.append(f"from {step.recv_peer}")
    if step.send_peer is not None:
        words.append(f"to {step.send_peer}")
    if step.peers:
        words.append("peers " + " ".join(map(str, step.peers)))
    return " ".join(words)


def format_location(schedule: Schedule, channel: int, rank: int, number: int) -> str:
    """Name a step for errors, such as ``ring: channel 0, rank 1, step 2 (send input[0] to 2)``."""
    return (
        f"{schedule.name}: channel {channel}, rank {rank}, step"
        f" {number} ({format_step(schedule.channels[channel][rank][number])})"
    )


def parse(text: str) -> Schedule:
    """Parse the text form of a schedule; raise ``ScheduleError`` with the line number.

    Only the syntax is checked; ``verify`` checks the meaning.
    """
    reader = _ScheduleParser()
    for number, line in enumerate(text.splitlines(), start=1):
        reader.number = number
        line = _without_comment(line).strip()
        if line:
            reader.parse_line(line)
    return reader.finish()


def _without_comment(line: str) -> str:
    """Return ``line`` up to a ``#`` outside of quotes."""
    match = re.match(r'(?:[^"#]|"(?:[^"\\]|\\.)*"?)*', line)
    return match.group() if match else line


def parse_step(text: str) -> Step:
    """Parse one step; raise ``ValueError`` with the reason."""
    words = text.split()
    if words[0] not in _OPS:
        raise ValueError(f"{words[0]!r} is not a primitive; allowed are {', '.join(_OPS)}")
    step, rest = _Operands(), words[1:]
    while rest:
        word = rest.pop(0)
        if word in ("->", "from", "to") and not rest:
            raise ValueError(f"{word!r} needs an operand")
        if word == "->":
            step.dst = _set_once("dst", step.dst, parse_ref(rest.pop(0)))
        elif word == "from":
            step.recv_peer = _set_once("from", step.recv_peer, _rank(rest.pop(0)))
        elif word == "to":
            step.send_peer = _set_once("to", step.send_peer, _rank(rest.pop(0)))
        elif word == "peers":
            step.peers, rest = tuple(_rank(peer) for peer in rest), []
        else:
            step.src = _set_once("src", step.src, parse_ref(word))
    return Step(
        op=_OPS[words[0]],
        src=step.src,
        dst=step.dst,
        recv_peer=step.recv_peer,
        send_peer=step.send_peer,
        peers=step.peers,
    )


@dataclass
class _Operands:
    src: Ref | None = None
    dst: Ref | None = None
    recv_peer: int | None = None
    send_peer: int | None = None
    peers: tuple[int, ...] = ()


def parse_ref(text: str) -> Ref:
    """Parse a reference such as ``output[3]`` or ``output[3+2]``; raise ``ValueError``."""
    match = _REF.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a reference such as output[3] or input[4+2]")
    table = None if match[4] is None else int(match[4])
    return Ref(_BUFFERS[match[1]], int(match[2]), int(match[3] or 1), table)


def _rank(text: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{text!r} is not a rank")
    return int(text)


def _set_once(name: str, before: T | None, value: T) -> T:
    if before is not None:
        raise ValueError(f"{name} is given twice")
    return value


class _ScheduleParser:
    """Parser state: the lines of one schedule read so far."""

    def __init__(self) -> None:
        self.number = 0
        self.header: tuple[str, Collective, dict[str, int]] | None = None
        self.notes: list[str] = []
        self.tables: list[int] = []
        self.shards: list[ChunkRanks] = []
        self.channels: list[list[list[Step]]] = []

    def fail(self, problem: str) -> NoReturn:
        raise ScheduleError(f"line {self.number}: {problem}")

    def parse_line(self, line: str) -> None:
        keyword, _, rest = line.partition(" ")
        handlers: dict[str, Callable[[str], None]] = {
            "schedule": self.parse_header,
            "note": self.add_note,
            "table": self.add_table,
            "shard": self.add_shard,
            "channel": self.add_channel,
            "rank": self.add_rank,
        }
        if keyword != "schedule" and self.header is None:
            self.fail(
                'a schedule starts with a line such as: schedule "ring" all_reduce nranks 2 parts 2'
                " root 0 scratch 0"
            )
        if keyword in handlers:
            handlers[keyword](rest.strip())
            return
        if not self.channels or not self.channels[-1]:
            self.fail("a step must follow a channel and a rank")
        try:
            self.channels[-1][-1].append(parse_step(line))
        except ValueError as error:
            self.fail(str(error))

    def parse_header(self, rest: str) -> None:
        match = _HEADER.fullmatch(rest)
        if self.header is not None:
            self.fail("a text contains one schedule only")
        if match is None:
            self.fail(
                f'cannot parse {rest!r}: expected "name" collective nranks 2 parts 2 root 0'
                " scratch 0"
            )
        if match[2] not in _COLLECTIVES:
            self.fail(f"{match[2]!r} is not a collective; allowed are {', '.join(_COLLECTIVES)}")
        words = match[3].split()
        fields = {key: int(value) for key, value in zip(words[::2], words[1::2])}
        if unknown := set(fields) - set(_FIELDS):
            self.fail(f"unknown field {min(unknown)!r}; allowed are {', '.join(_FIELDS)}")
        if "nranks" not in fields:
            self.fail("nranks is missing")
        self.header = (self.parse_string(match[1]), _COLLECTIVES[match[2]], fields)

    def parse_string(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.fail(f"{text} is not a quoted string")
        return value

    def add_note(self, rest: str) -> None:
        self.notes.append(self.parse_string(rest))

    def add_table(self, rest: str) -> None:
        match = _TABLE.fullmatch(" ".join(rest.split()))
        if match is None or int(match[1]) != len(self.tables):
            self.fail(
                f"cannot parse {rest!r}: expected a table such as: table {len(self.tables)} ranks"
                " 0 2"
            )
        self.tables.append(self._rank_bits(match[2]))

    def add_shard(self, rest: str) -> None:
        match = _SHARD.fullmatch(" ".join(rest.split()))
        if match is None or int(match[1]) != len(self.shards):
            self.fail(
                f"cannot parse {rest!r}: expected a shard such as: shard {len(self.shards)} ranks 0"
                " 2 to 3"
            )
        self.shards.append(ChunkRanks(self._rank_bits(match[2]), self._rank_bits(match[3])))

    def _rank_bits(self, text: str) -> int:
        ranks = {int(rank) for rank in text.split()}
        if max(ranks, default=0) >= MAX_TABLE_RANKS:
            self.fail(f"rank {max(ranks)} is too large; allowed are ranks below {MAX_TABLE_RANKS}")
        return sum(1 << rank for rank in ranks)

    def add_channel(self, rest: str) -> None:
        if rest != str(len(self.channels)):
            self.fail(
                f"channels must be numbered in order: expected channel {len(self.channels)}, got"
                f" {rest!r}"
            )
        self.channels.append([])

    def add_rank(self, rest: str) -> None:
        if not self.channels:
            self.fail("a rank must follow a channel")
        if rest != str(len(self.channels[-1])):
            self.fail(
                f"ranks must be numbered in order: expected rank {len(self.channels[-1])}, got"
                f" {rest!r}"
            )
        self.channels[-1].append([])

    def finish(self) -> Schedule:
        if self.header is None:
            raise ScheduleError("the text contains no schedule")
        name, collective, fields = self.header
        try:
            return Schedule(
                name=name,
                collective=collective,
                nranks=fields["nranks"],
                parts=fields.get("parts", 1),
                root=fields.get("root", 0),
                scratch_chunks=fields.get("scratch", 0),
                aggregators=fields.get("aggregators", 0),
                channels=tuple(tuple(tuple(steps) for steps in ranks) for ranks in self.channels),
                notes=tuple(self.notes),
                tables=tuple(self.tables),
                shards=tuple(self.shards),
            )
        except ValueError as error:
            raise ScheduleError(str(error)) from None
