"""What the kernels of a rank wait for, for those who look for circles of waits (``comm.whereabouts``).

Kernels compare what they run with one another, and find circles of messages themselves.  What else ranks wait for they cannot know:
messages of some against a broadcast of others, what goes between hosts, calls on CPU memory.  The lookout reads what kernels say of their
waits, and how far they have come, where somebody waits for long.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from miraccl.bootstrap import Session
from miraccl.comm import whereabouts
from miraccl.comm.device.looks import Looks
from miraccl.comm.faults import SEND_RECV
from miraccl.comm.whereabouts import OPERATION, ROWS, Report, Wait, nothing_come, stream_of

End = Callable[[str, str], None]
"""``end(op, text)`` makes ``CollectiveMismatch`` the communicator's fault."""


class KernelWaits:
    """Those of one rank. ``key`` is that of the session of the host's ranks, ``named(rank)`` the stream of one of these."""

    def __init__(self, looks: Looks, key: str, rank: int, named: Callable[[int], str], end: End) -> None:
        self._looks, self._key, self._rank, self._named, self._end = looks, key, rank, named, end

    def waits(self) -> list[Wait]:
        """The launch that they are in, or its messages."""
        found = self._looks.under_way()
        if found is not None:
            op = self._looks.name(found.number, found.signature)
            return [self._wait(OPERATION, op, *found.awaited, number=found.number)]
        messages = self._looks.waits()
        return [self._wait(ROWS, "send/recv", m.peer, number=m.count, taken=int(m.sends), holds=m.holds) for m in messages]

    def _wait(self, kind: str, op: str, *ranks: int, **more: Any) -> Wait:
        end, name = functools.partial(self._end, op), SEND_RECV if kind == ROWS else ""
        awaited = tuple(map(self._named, ranks))
        op = f"{op} on GPU memory"
        return Wait(kind=kind, key=self._key, awaited=awaited, op=op, end=end, rank=self._rank, collective=name, **more)

    def come(self) -> dict[str, dict[str, Any]]:
        """How far they have come."""
        come = self._looks.come()
        if come is None:
            return {}
        return {self._key: nothing_come() | {"operations": come.begun, "sent": come.sent, "taken": come.taken}}


class KernelSeat:
    """The stream (``whereabouts.Stream``) of a rank of a communicator of one host."""

    needs_look = True

    def __init__(self, session: Session, looks: Looks, end: End, is_done: Callable[[], bool]) -> None:
        """``is_done()``: whether nothing is enqueued any more, and no graph may bring anything; it may ask the driver."""
        self._session, self._is_done = session, is_done
        self._lock = threading.Lock()  # held while somebody looks
        self._closed = False
        self._seen: Report = [], {}  # as the lookout has seen it last
        self.name = self._named(session.rank)
        self.kernels = KernelWaits(looks, session.key, session.rank, self._named, end)

    def _named(self, rank: int) -> str:
        return stream_of(self._session.tokens[rank], self._session.key, rank)

    @property
    def session(self) -> Session | None:
        return None if self._closed else self._session

    def look(self) -> None:
        program = whereabouts.current()
        with self._lock:
            if not self._closed:
                self._seen = self._find(program)

    def _find(self, program: Wait | None) -> Report:
        waits = self.kernels.waits()
        if not waits and program is not None and self._is_done():
            waits = [whereabouts.no_call(program, self._session.tokens[self._session.rank])]
        return waits, self.kernels.come()

    def report(self, program: Wait | None) -> Report:
        return self._seen

    def close(self) -> None:
        """Nobody looks any more."""
        whereabouts.disregard(self)
        with self._lock:
            self._closed, self._seen = True, ([], {})
