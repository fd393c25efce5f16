"""The stages in which ranks make a communicator or its GPU side, the deadline that all of them share, and how they end early.

A stage is a round of the control plane's all-gather.  One thread goes through them.  Others may know that they cannot come to a good end:
the proxy's, which sees a connection break, and one that finalizes the communicator from which this one is made.

There are no locks, as a signal handler may finalize, too: who begins something says so and looks then whether it has been ended, and who
ends it says so before it looks for what has begun.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from miraccl.bootstrap import Event, PeerLeft, PeerLost, Session
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
    ProtocolError,
)

HINT = "all its stages share one deadline"


class SetupPhases:
    """Those of a communicator of the ranks of ``session``, or of ``what`` they do; they end by its deadline for operations, and by
    ``deadline`` where that comes first."""

    def __init__(
        self, session: Session, deadline: Deadline | None = None, activity: str = ""
    ) -> None:
        self.session, self.activity = session, activity or f"making {session.name}"
        self.deadline = Deadline.after(session.timeout).within(deadline or session.timeout)
        self._current = ""
        self._error: MiracclError | None = None
        self._children: list[SetupPhases] = []

    def child(self, session: Session, activity: str = "") -> SetupPhases:
        """Stages of some of the ranks, with the deadline of these, which end when these do."""
        part = SetupPhases(session, self.deadline, activity)
        self._children.append(part)
        if self._error is not None:
            part.cancel(self._error)
        return part

    def exchange(self, name: str, value: Any) -> list[Any]:
        """The stage ``name``: everybody's ``value`` (of JSON) by rank. Raises as ``gather``."""
        blobs = self.gather(name, json.dumps(value).encode())
        try:
            return [json.loads(blob) for blob in blobs]
        except ValueError as error:
            raise ProtocolError(f"a rank's record for {name!r} is malformed") from error

    def gather(self, name: str, data: bytes = b"") -> list[bytes]:
        """The stage ``name``: everybody's ``data`` by rank. Raises ``CollectiveTimeout`` naming the ranks that did not come."""
        self._current = name
        self.check()
        try:
            return self.session.all_gather(data, name, self.deadline)
        except CommunicatorAborted:
            self.check()
            raise
        except (CollectiveTimeout, BootstrapError, PeerDied) as error:
            error.op, error.hint = (
                self._op,
                HINT if isinstance(error, CollectiveTimeout) else error.hint,
            )
            raise

    @property
    def _op(self) -> str:
        return f"{self._current!r} of {self.activity}" if self._current else self.activity

    @contextmanager
    def cancel_on_loss(self) -> Iterator[None]:
        """Inside the block they end when a rank of the session dies or leaves it, wherever this one waits."""
        over = False

        def hear(event: Event) -> None:
            if isinstance(event, PeerLost | PeerLeft) and not over:
                died = isinstance(event, PeerLost)
                who = f"rank {event.rank}" if event.rank >= 0 else "the launcher"
                text = f"{who} {'died' if died else 'left'}: {event.reason}"
                self.cancel(
                    (PeerDied if died else BootstrapError)(
                        text, rank=self.session.rank, peer=event.rank
                    )
                )

        self.session.on_event(hear)
        try:
            yield
        finally:
            over = True
            self.session.off_event(hear)

    def check(self) -> None:
        """Raise what has ended the stages."""
        if self._error is not None:
            self._error.op = self._error.op or self._op
            raise self._error

    def cancel(self, error: MiracclError) -> None:
        """Any thread: the one that goes through the stages raises ``error``, unless it has come to the end of the last one."""
        self._error = self._error or error
        self.session.end_gather(self._current, error.message)
        for part in list(self._children):
            part.cancel(error)

    def give_up(self, error: BaseException) -> None:
        """This rank gives up and leaves the session: the others are told so at once."""
        self.session.close(f"gave {self.activity} up: {error}"[:500])


class PendingSetup:
    """The stages of communicators that are made from one, of ranks that have not left it: they end when one of these leaves."""

    def __init__(self) -> None:
        self._open: dict[SetupPhases, tuple[int, ...]] = {}
        self._error: MiracclError | None = None

    @contextmanager
    def track(self, setup: SetupPhases, ranks: Sequence[int]) -> Iterator[None]:
        """Inside the block a thread goes through ``stages``, with these ranks of the communicator."""
        self._open[setup] = tuple(ranks)
        try:
            if self._error is not None:
                raise self._error
            yield
        finally:
            del self._open[setup]

    def on_event(self, event: Event) -> None:
        """From the watcher: a rank has left the communicator, which does not end its connection, as a death does."""
        if isinstance(event, PeerLeft):
            for stages, ranks in list(self._open.items()):
                if event.rank in ranks:
                    stages.cancel(
                        PeerDied(
                            f"rank {event.rank} has left the communicator ({event.reason})",
                            peer=event.rank,
                        )
                    )

    def cancel(self, error: MiracclError) -> None:
        """This rank leaves."""
        self._error = self._error or error
        for stages in list(self._open):
            stages.cancel(error)
