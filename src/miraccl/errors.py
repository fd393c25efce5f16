"""Errors that this package raises on purpose.

An error answers four questions: whose fault it is (``fault``), who is involved (``rank``, ``peer``,
``op``), what happened (the message) and what is still possible (``hint``). All of it survives
pickling, so that a launcher can show the error of a rank.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

Fault = Literal["usage", "peer", "system", "internal"]


class MiracclError(Exception):
    """Base class of all errors of this package.

    Attributes:
        fault: Origin of the error: ``"usage"`` (the caller can correct it), ``"peer"`` (another
            rank), ``"system"`` (kernel, network, disk) or ``"internal"`` (a bug of miraccl).
        message: The text without rank, operation and hint.
        rank: The rank that raises, or None.
        peer: The rank that the error is about, or None.
        op: The operation, such as ``"all_reduce #17"``, or None.
        hint: Advice on what to do next, or None.
    """

    fault: Fault = "internal"

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        op: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.op = op
        self.hint = hint

    def __str__(self) -> str:
        where = [f"rank {self.rank}" if self.rank is not None else "", self.op or ""]
        prefix = ", ".join(w for w in where if w)
        text = f"{prefix}: {self.message}" if prefix else self.message
        return f"{text} ({self.hint})" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.__dict__))


def _rebuild(cls: type[MiracclError], message: str, state: dict[str, Any]) -> MiracclError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return a hint with the known name closest to a misspelt one, None if none is close."""
    import difflib  # used for errors only

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else None


class InvalidUsage(MiracclError, ValueError):
    """An argument or call that is not allowed. No data was sent; the communicator stays usable."""

    fault: Fault = "usage"


class CommunicatorClosed(MiracclError):
    """The communicator was finalized or aborted before or during the call."""

    fault: Fault = "usage"


class ScheduleError(MiracclError):
    """A schedule does not implement its collective; the message names channel, rank, step and
    chunk.
    """

    fault: Fault = "usage"


class TopologyError(MiracclError, ValueError):
    """A topology file or description cannot be read; the message says where and what is allowed."""

    fault: Fault = "usage"


class SystemFailure(MiracclError, OSError):
    """The operating system refused a resource: memory, a socket, a descriptor or a thread."""

    fault: Fault = "system"

    def __str__(self) -> str:  # OSError defines its own __str__
        return MiracclError.__str__(self)


class MissingDependency(MiracclError, ImportError):
    """An optional dependency is not installed; the hint names the package to install."""

    fault: Fault = "usage"


class BootstrapError(MiracclError):
    """The ranks could not connect: a rank is missing, died or was rejected."""

    fault: Fault = "peer"


class AuthenticationError(BootstrapError):
    """A peer could not prove that it knows the secret of the job."""


class ProtocolError(MiracclError):
    """A peer sent data that violates the protocol."""

    fault: Fault = "peer"


class PlanMismatch(MiracclError):
    """Ranks use different settings or plans; the message names the ranks and the field that
    differs.
    """

    fault: Fault = "peer"


class CollectiveMismatch(MiracclError):
    """Ranks called operations that do not match; the message names the ranks and the field that
    differs.
    """

    fault: Fault = "usage"


class CollectiveTimeout(MiracclError, TimeoutError):
    """An operation passed its deadline.

    Attributes:
        graph: The wait-for graph, one line per rank; it is part of ``str(error)``.
    """

    fault: Fault = "peer"

    def __init__(self, message: str, *, graph: tuple[str, ...] = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.graph = graph

    def __str__(self) -> str:
        text = MiracclError.__str__(self)
        return "\n  ".join([text, *self.graph])


class PeerDied(MiracclError, ConnectionError):
    """The process of another rank ended while an operation needed it."""

    fault: Fault = "peer"

    def __str__(self) -> str:
        return MiracclError.__str__(self)


class TransferError(MiracclError):
    """A one-sided transfer failed; part of the target may have been written.

    Attributes:
        agent: Name of the other agent, or None.
        block: Index of the block at which it failed, in the order of the caller's list; -1 if it
            did not get that far.
        reason: Short name of the reason, such as ``"stale"``.
    """

    fault: Fault = "peer"

    def __init__(
        self,
        message: str,
        *,
        agent: str | None = None,
        block: int = -1,
        reason: str = "failed",
        **where: Any,
    ) -> None:
        super().__init__(message, **where)
        self.agent, self.block, self.reason = agent, block, reason


class TransferTimeout(TransferError, TimeoutError):
    """A one-sided transfer, or the end of a registration, passed its deadline."""

    def __str__(self) -> str:
        return MiracclError.__str__(self)


class TransferCancelled(TransferError):
    """The caller cancelled the transfer: no further byte is written."""

    fault: Fault = "usage"


class StaleDescriptor(TransferError):
    """The descriptor names memory that its owner no longer offers under it."""


class AgentLost(TransferError, ConnectionError):
    """The process of the other agent ended, or the connection to it did."""

    def __str__(self) -> str:
        return MiracclError.__str__(self)


class CommunicatorAborted(MiracclError):
    """A rank called ``abort()``; ``peer`` is that rank."""

    fault: Fault = "peer"


def descriptor_hint() -> str:
    """Return the hint for a process that has reached its limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "" if hard == resource.RLIM_INFINITY else f"; the hard limit is {hard}"
    return f"this process may open {soft} files: raise the limit with ulimit -n{limit}"


@contextmanager
def as_system_failure(text: str, **where: Any) -> Iterator[None]:
    """Convert ``OSError`` and failed thread creation inside the block to ``SystemFailure``.

    Args:
        text: What could not be done, such as "cannot open the segment"; the system's reason is
            appended.
        where: Attributes of the error (``rank``, ``peer``, ``op``, ``hint``).
    """
    try:
        yield
    except MiracclError:
        raise
    except OSError as error:
        if error.errno == errno.EMFILE:
            where.setdefault("hint", descriptor_hint())
        raise SystemFailure(f"{text}: {error.strerror or error}", **where) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise SystemFailure(
            f"{text}: {error}", hint="check the limit on processes (ulimit -u)", **where
        ) from error
