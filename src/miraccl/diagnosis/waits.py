"""Records of the wait-for graph: blocked operations and the progress of each rank.

Processes exchange these records as JSON in their answers to status queries (``blocked_ops``). Each
kind of wait decides by itself, in ``is_blocked_by``, whether a peer that is blocked too keeps it
from ending. All ranks of a communicator run one version of the library (``AgreedConfig``), so the
JSON needs no versioning.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Stands for any source in a posted receive, as MPI_ANY_SOURCE.
ANY_RANK = -1


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """Counters of one rank in one communicator. They only grow.

    ``operations`` and ``control_ops``: number of the last operation and control-plane operation
    that the rank has entered. ``sent`` and ``received``: messages by peer; ``large``: received
    messages above the eager limit, where these are counted apart. ``sends`` and ``receives``:
    peers of posted sends and receives that have not completed. ``background``: operations already
    submitted may not have started yet. ``op_log``: (signature, count) of the last operations by
    their number, modulo ``SEQ_MASK``.
    """

    operations: int = 0
    control_ops: int = 0
    sent: Sequence[int] = ()
    received: Sequence[int] = ()
    large: Sequence[int] = ()
    sends: Collection[int] = ()
    receives: Collection[int] = ()
    background: bool = False
    op_log: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Wait(abc.ABC):
    """One blocked operation of a host program or of a GPU stream.

    ``key`` and ``number`` identify what is waited for: the communicator's key (or the name of a
    communicator that is being created) and the operation's number in it. ``awaited``: names of the
    host programs (process tokens) and streams that must all arrive before the wait can end.
    ``rank``: rank of the waiter in that communicator. ``op``: description for error messages;
    ``collective``: name of the call, where it is known. ``fail(text)``: makes the wait raise
    ``CollectiveMismatch``; it stays in this process.
    """

    key: str
    awaited: tuple[str, ...]
    op: str
    number: int = 0
    rank: int = 0
    collective: str = ""
    fail: Callable[[str], None] = field(default=lambda _: None, compare=False)

    @property
    def ident(self) -> str:
        """Name of this wait, distinct from all other waits of the same host program or stream."""
        return f"{type(self).__name__} {self.key} {self.number}"

    @abc.abstractmethod
    def is_blocked_by(self, peer: BlockedState) -> bool:
        """Return True if ``peer``, a blocked member of ``awaited``, has not arrived."""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            **{name: getattr(self, name) for name in _wire_fields(type(self))},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Wait:
        kind = _KINDS[data["kind"]]
        return kind(
            **{name: data[name] for name in _wire_fields(kind)}
            | {"awaited": tuple(data["awaited"])}
        )


def _wire_fields(kind: type[Wait]) -> list[str]:
    return [each.name for each in dataclasses.fields(kind) if each.name != "fail"]


class WaitForStream(Wait):
    """The host waits for one of its own GPU streams; ``number`` counts such waits."""

    def is_blocked_by(self, peer: BlockedState) -> bool:
        return not any(isinstance(wait, WaitForHost) for wait in peer.waits)


class WaitForHost(Wait):
    """An idle stream waits for the next call of its host program.

    ``key`` is the ``ident`` of the wait in which the host is blocked.
    """

    def is_blocked_by(self, peer: BlockedState) -> bool:
        return any(wait.ident == self.key for wait in peer.waits)


class WaitForInit(Wait):
    """A rank waits for the others to start creating the communicator named ``key``."""

    def is_blocked_by(self, peer: BlockedState) -> bool:
        return self.key not in peer.inits


class WaitForControlOp(Wait):
    """A rank waits in an operation of the control plane."""

    def is_blocked_by(self, peer: BlockedState) -> bool:
        progress = peer.progress.get(self.key)
        return progress is not None and progress.control_ops < self.number


@dataclass(frozen=True, kw_only=True)
class WaitForOperation(Wait):
    """A rank waits in a collective for peers that have not entered it.

    ``must_receive``: number of messages of this rank that the awaited peer must have received for
    the wait to end; 0 if the wait is not for send credit.
    """

    must_receive: int = 0

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.must_receive}"

    def is_blocked_by(self, peer: BlockedState) -> bool:
        progress = peer.progress.get(self.key)
        if progress is None or progress.background:
            return False
        if self.must_receive and progress.received[self.rank] >= self.must_receive:
            return False
        return progress.operations < self.number


class PeerWait(Wait):
    """A wait for one peer."""

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.awaited[0]}"


class WaitForMessage(PeerWait):
    """A posted receive waits for the message after the first ``number`` ones of a peer."""

    def is_blocked_by(self, peer: BlockedState) -> bool:
        progress = peer.progress.get(self.key)
        return (
            progress is not None
            and not progress.background
            and self.rank not in progress.sends
            and progress.sent[self.rank] == self.number
        )


class WaitForCredit(PeerWait):
    """A send waits until a peer has received ``number`` messages of this rank."""

    def is_blocked_by(self, peer: BlockedState) -> bool:
        progress = peer.progress.get(self.key)
        if progress is None or progress.background or progress.received[self.rank] >= self.number:
            return False
        return not {self.rank, ANY_RANK} & set(progress.receives)


@dataclass(frozen=True, kw_only=True)
class WaitForPackets(PeerWait):
    """A kernel waits until a counter of its peer reaches ``number``.

    ``counter``: name of the counter in ``RankProgress``; only the peer knows whether it will grow
    (``executor/cuda/source/p2p.cuh``). ``suspended``: bit mask of the ranks whose packets the
    waiting launch does not serve until this wait ends.
    """

    counter: str
    suspended: int

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.counter}"

    def is_blocked_by(self, peer: BlockedState) -> bool:
        progress = peer.progress.get(self.key)
        if progress is None:
            return False
        masks = [wait.suspended for wait in peer.waits if isinstance(wait, WaitForPackets)]
        if masks and not any(mask >> self.rank & 1 for mask in masks):
            return False
        counts: Sequence[int] = getattr(progress, self.counter)
        return counts[self.rank] < self.number


_KINDS: dict[str, type[Wait]] = {
    kind.__name__: kind
    for kind in (
        WaitForStream,
        WaitForHost,
        WaitForInit,
        WaitForControlOp,
        WaitForOperation,
        WaitForMessage,
        WaitForCredit,
        WaitForPackets,
    )
}


@dataclass(frozen=True)
class BlockedState:
    """State of one host program or GPU stream: a node of the wait-for graph.

    ``waits``: blocked operations, each of which keeps it from continuing. ``progress``: counters by
    communicator key, and ``inits``: names of communicators whose creation it has started; both are
    read after ``waits``, so a wait that ended in between shows in the counters.
    """

    waits: Sequence[Wait] = ()
    progress: Mapping[str, RankProgress] = field(default_factory=dict)
    inits: Collection[str] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "waits": [wait.to_json() for wait in self.waits],
            "progress": {key: dataclasses.asdict(each) for key, each in self.progress.items()},
            "inits": list(self.inits),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlockedState:
        waits = [Wait.from_json(wait) for wait in data["waits"]]
        progress = {key: RankProgress(**each) for key, each in data["progress"].items()}
        return cls(waits, progress, data["inits"])


def stream_name(token: str, key: str, rank: int) -> str:
    """Return the name of a rank's stream in communicator ``key``; ranks may share a process."""
    return f"{token}/{key}/{rank}"
