"""Phases in which ranks create a communicator or its GPU side, under one deadline.

A phase is one all-gather of the control plane. One thread runs the phases. Other threads may know
that they cannot succeed and cancel them: the proxy's, which sees a connection break, and one that
finalizes the parent communicator.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from miraccl.bootstrap.contract import Session
from miraccl.bootstrap.events import Event, PeerLeft, PeerLost
from miraccl.deadline import Deadline
from miraccl.errors import (
    BootstrapError,
    CollectiveTimeout,
    CommunicatorAborted,
    MiracclError,
    PeerDied,
    ProtocolError,
)

HINT = "all of its phases share one deadline"


class SetupPhases:
    """Setup phases of the ranks of ``session``, which end at a common deadline.

    Args:
        session: Control plane of the ranks.
        deadline: End of all phases; the session's timeout for operations applies as well.
        activity: What the ranks do, for messages; default "making <session>".
    """

    def __init__(
        self, session: Session, deadline: Deadline | None = None, activity: str = ""
    ) -> None:
        self.session, self.activity = session, activity or f"making {session.name}"
        self.deadline = Deadline.after(session.timeout).within(deadline or session.timeout)
        self._current = ""
        self._error: MiracclError | None = None
        self._children: list[SetupPhases] = []

    def child(self, session: Session, activity: str = "") -> SetupPhases:
        """Return phases of some of the ranks with the same deadline, cancelled with these."""
        part = SetupPhases(session, self.deadline, activity)
        self._children.append(part)
        if self._error is not None:
            part.cancel(self._error)
        return part

    def exchange(self, name: str, value: Any) -> list[Any]:
        """Run the phase ``name`` and return the JSON ``value`` of all ranks in rank order.

        Raises:
            ProtocolError: A rank sent something else than JSON; further errors as ``gather``.
        """
        blobs = self.gather(name, json.dumps(value).encode())
        try:
            return [json.loads(blob) for blob in blobs]
        except ValueError as error:
            raise ProtocolError(f"a rank sent a malformed record in phase {name!r}") from error

    def gather(self, name: str, data: bytes = b"") -> list[bytes]:
        """Run the phase ``name`` and return the ``data`` of all ranks in rank order.

        Raises:
            CollectiveTimeout: Ranks are missing at the deadline; the message names them.
            MiracclError: The phases were cancelled.
        """
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
        """Cancel the phases when a rank of the session dies or leaves inside the block."""
        over = False

        def on_event(event: Event) -> None:
            if isinstance(event, PeerLost | PeerLeft) and not over:
                died = isinstance(event, PeerLost)
                who = f"rank {event.rank}" if event.rank >= 0 else "the control plane"
                text = f"{who} {'died' if died else 'left'}: {event.reason}"
                self.cancel(
                    (PeerDied if died else BootstrapError)(
                        text, rank=self.session.rank, peer=event.rank
                    )
                )

        self.session.on_event(on_event)
        try:
            yield
        finally:
            over = True
            self.session.off_event(on_event)

    def check(self) -> None:
        """Raise the error with which the phases were cancelled, if any."""
        if self._error is not None:
            self._error.op = self._error.op or self._op
            raise self._error

    def cancel(self, error: MiracclError) -> None:
        """Make the thread that runs the phases raise ``error``, unless it has completed the last
        one.

        Callable from any thread.
        """
        self._error = self._error or error
        self.session.end_gather(self._current, error.message)
        for part in list(self._children):
            part.cancel(error)

    def give_up(self, error: BaseException) -> None:
        """Close this rank's session because of ``error``; the other ranks are notified at once."""
        self.session.close(f"gave up {self.activity}: {error}"[:500])


class PendingSetup:
    """Setup of communicators created from another one, cancelled when a rank leaves that."""

    def __init__(self) -> None:
        self._open: dict[SetupPhases, tuple[int, ...]] = {}
        self._error: MiracclError | None = None

    @contextmanager
    def track(self, setup: SetupPhases, ranks: Sequence[int]) -> Iterator[None]:
        """Register ``setup``, run with these ranks of the parent communicator, for the block."""
        self._open[setup] = tuple(ranks)
        try:
            if self._error is not None:
                raise self._error
            yield
        finally:
            del self._open[setup]

    def on_event(self, event: Event) -> None:
        """Handle a rank that has left the parent communicator; called on the watcher thread."""
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
        """Cancel all tracked setups: this rank leaves the parent communicator."""
        self._error = self._error or error
        for stages in list(self._open):
            stages.cancel(error)
