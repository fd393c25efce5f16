"""Output of several ranks on one terminal: whole lines, and equal tracebacks once.

Ranks that fail together print the same traceback at the same time. A traceback is held back until
the others have had time to print theirs; equal ones, up to the number of the rank, are printed once
with the ranks that printed them, the cause first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

PARTIAL_S = 1.0  # time after which a line without an end is shown, such as a prompt or progress
HOLD_S = 2.0  # time to wait for equal tracebacks, and for the end of a rank after its own
MAX_HELD = 1 << 20  # bytes of a traceback, with what follows it, that are held back

_START = re.compile(rb"(?:\[rank\d+\]: )?Traceback \(most recent call last\):\s*")
_ADDRESS = re.compile(rb"0x[0-9a-f]+")
#: errors that a rank raises because another one has failed
_CONSEQUENCE = re.compile(rb"\b(?:PeerDied|CommunicatorAborted|CommunicatorClosed)\b")

Write = Callable[[int, bytes], None]


@dataclass(kw_only=True)
class _Stream:
    """Output of one rank on one stream that has not been printed."""

    partial: bytes = b""
    since: float = 0.0  # time at which ``partial`` began
    traceback: list[bytes] = field(default_factory=list)
    started: float = 0.0  # time at which ``traceback`` began


@dataclass(kw_only=True)
class _EqualTracebacks:
    """Equal tracebacks: their lines on the first of ``ranks``."""

    lines: list[bytes]
    ranks: list[int]


class RankOutput:
    """Lines of all ranks of a job.

    Args:
        write: Called with the stream (1 or 2) and bytes, which are whole lines, except for a line
            that has had no end for ``PARTIAL_S``.
        tag: Prefix each line with its rank.
    """

    def __init__(self, write: Write, *, tag: bool) -> None:
        self._write, self._tag = write, tag
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._open: tuple[int, int] | None = None  # stream with a line that is shown in part
        self._failed: list[int] = []  # ranks that have failed, in order

    def feed(self, rank: int, number: int, data: bytes, now: float) -> None:
        """Add output of stream ``number`` (1 or 2) of ``rank``."""
        stream = self._streams.setdefault((rank, number), _Stream())
        if not stream.partial:
            stream.since = now
        *lines, stream.partial = (stream.partial + data).split(b"\n")
        if lines:
            stream.since = now
            self._add(rank, number, lines, now)

    def close(self, rank: int, now: float) -> None:
        """End the last lines of a rank that has ended."""
        for number in (1, 2):
            stream = self._streams.get((rank, number))
            if stream is not None and stream.partial:
                last, stream.partial = stream.partial, b""
                self._add(rank, number, [last], now)

    def fail(self, rank: int) -> None:
        """Note that ``rank`` has failed: tracebacks are held until ``finish``."""
        self._failed.append(rank)

    def due(self) -> float | None:
        """Return the time at which ``poll`` has something to do, None if it has nothing."""
        times = [
            stream.since + PARTIAL_S
            for key, stream in self._streams.items()
            if stream.partial and not stream.traceback and key != self._open
        ]
        if not self._failed:
            times += [s.started + HOLD_S for s in self._streams.values() if s.traceback]
        return min(times, default=None)

    def poll(self, now: float) -> None:
        """Print what has waited long enough."""
        if not self._failed and any(
            stream.traceback and stream.started + HOLD_S <= now for stream in self._streams.values()
        ):
            self._print_tracebacks()
        for (rank, number), stream in self._streams.items():
            waiting = stream.partial and not stream.traceback and self._open != (rank, number)
            if waiting and stream.since + PARTIAL_S <= now:
                self._end_open_line()
                self._write(number, self._prefix([rank]) + stream.partial)
                stream.partial, self._open = b"", (rank, number)

    def finish(self) -> None:
        """Print everything that is left."""
        for rank in sorted({rank for rank, _ in self._streams}):
            self.close(rank, 0.0)
        self._print_tracebacks()
        self._end_open_line()

    # ---- lines

    def _add(self, rank: int, number: int, lines: list[bytes], now: float) -> None:
        stream = self._streams[rank, number]
        if number == 2 and not stream.traceback:
            for position, line in enumerate(lines):
                if _START.fullmatch(line):
                    self._print(rank, number, lines[:position])
                    stream.traceback, stream.started = lines[position:], now
                    return
        if not stream.traceback:
            self._print(rank, number, lines)
            return
        stream.traceback += lines
        if sum(map(len, stream.traceback)) > MAX_HELD:
            held, stream.traceback = stream.traceback, []
            self._print(rank, number, held)

    def _print(self, rank: int, number: int, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        first, prefix = b"", self._prefix([rank])
        if self._open == (rank, number):  # continue the line that is shown in part
            first, lines, self._open = lines[0] + b"\n", lines[1:], None
        else:
            self._end_open_line()
        self._write(number, first + b"".join(prefix + line + b"\n" for line in lines))

    def _end_open_line(self) -> None:
        if self._open is not None:
            self._write(self._open[1], b"\n")
            self._open = None

    def _prefix(self, ranks: Sequence[int]) -> bytes:
        return f"[{','.join(map(str, ranks))}] ".encode() if self._tag else b""

    # ---- tracebacks

    def _print_tracebacks(self) -> None:
        groups: dict[bytes, _EqualTracebacks] = {}
        for (rank, _), stream in sorted(
            ((key, s) for key, s in self._streams.items() if s.traceback),
            key=lambda item: (item[1].started, item[0]),
        ):
            key = _without_rank(stream.traceback, rank)
            group = groups.setdefault(key, _EqualTracebacks(lines=stream.traceback, ranks=[]))
            group.ranks.append(rank)
            stream.traceback = []
        cause = self._cause(list(groups.values()))
        for group in sorted(groups.values(), key=lambda group: group is not cause):
            self._end_open_line()
            ranks = sorted(group.ranks)
            head = f"miraccl run: {'first failure, ' if group is cause else ''}on {_names(ranks)}:"
            prefix = self._prefix(ranks)
            self._write(
                2, b"".join([head.encode() + b"\n", *(prefix + x + b"\n" for x in group.lines)])
            )

    def _cause(self, groups: Sequence[_EqualTracebacks]) -> _EqualTracebacks | None:
        """Return the group of the first failure, None if no rank has failed.

        A rank that fails because another one did may end before it.
        """
        by_rank = {rank: group for group in groups for rank in group.ranks}
        failed = [by_rank[rank] for rank in self._failed if rank in by_rank]
        causes = [group for group in failed if not _CONSEQUENCE.search(_last_line(group.lines))]
        if self._failed and self._failed[0] not in by_rank and not causes:
            return None  # it ended without a traceback, for instance by a signal
        return next(iter([*causes, *failed]), None)


def _without_rank(lines: Sequence[bytes], rank: int) -> bytes:
    """Return a traceback without what differs between ranks: their number, and addresses."""
    text = re.sub(rb"\brank ?%d\b" % rank, b"rank *", b"\n".join(lines))
    return _ADDRESS.sub(b"0x*", text)


def _last_line(lines: Sequence[bytes]) -> bytes:
    """Return the line of the exception: the last one that is not indented."""
    ends = [
        line
        for line in (re.sub(rb"^\[rank\d+\]: ", b"", line) for line in lines)
        if line.strip() and not line.startswith(b" ")
    ]
    return ends[-1] if ends else b""


def _names(ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0, 2 and 3 alike``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} alike"
