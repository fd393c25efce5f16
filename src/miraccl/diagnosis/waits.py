"""What programs and streams wait for, and how far they have come, as processes tell one another (``whereabouts``).

Each kind of wait says itself whether somebody who is in a wait, too, keeps it from ending.  Between processes all this is JSON: they are of
one version, which communicators see to when they begin (``fabric.Beliefs``).
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANY_RANK = -1  # instead of a rank


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How far a rank has come in a communicator: operations and meetings, by rank messages ``sent`` and ``taken``, and ``large`` ones that
    were taken where these are counted apart. To and from which ranks it ``sends`` and ``receives`` as well; ``aside``: operations that it
    has called already may be to come. ``called``: its last operations, by number (as on boards) signature and count."""

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
    """``awaited``: programs (the tokens of their processes) and streams, of which every one that has not come keeps this one from going on.

    ``number``: of what is waited for, in the communicator or under the name ``key``.  ``rank``: this process's there.  ``op``: in words;
    ``collective``: the name of the call, where that is known.  ``end(text)`` makes the wait raise ``CollectiveMismatch``.
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
        """Another one for each wait of a program or stream."""
        return f"{type(self).__name__} {self.key} {self.number}"

    @abc.abstractmethod
    def is_held_up(self, theirs: BlockedState) -> bool:
        """Whether one of ``awaited``, which is in a wait of its own, has not come."""

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
    """The names of what others are told."""
    return [each.name for each in dataclasses.fields(kind) if each.name != "end"]


class WaitForStream(Wait):
    """Of a program, its ``number``-th, for what a stream of its own has to do."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        return not any(isinstance(wait, WaitForHost) for wait in theirs.waits)


class WaitForHost(Wait):
    """Of a stream that has nothing to do, for its program. ``key``: the ``ident`` of the wait that this is in."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        return any(wait.ident == self.key for wait in theirs.waits)


class WaitForInit(Wait):
    """For others to come to the creation ``key``."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        return self.key not in theirs.inits


class WaitForControlOp(Wait):
    """On the control plane."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        come = theirs.progress.get(self.key)
        return come is not None and come.control_ops < self.number


@dataclass(frozen=True, kw_only=True)
class WaitForOperation(Wait):
    """For others to come to an operation. ``taken``: how many messages of this rank the awaited one must have taken, where the wait is for
    that; else 0."""

    must_receive: int = 0

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.must_receive}"

    def is_held_up(self, theirs: BlockedState) -> bool:
        come = theirs.progress.get(self.key)
        if (
            come is None
            or come.background
            or (self.must_receive and come.received[self.rank] >= self.must_receive)
        ):
            return False
        return come.operations < self.number


class PeerWait(Wait):
    """For one other rank."""

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.awaited[0]}"


class WaitForMessage(PeerWait):
    """For the message of a rank after the first ``number``."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        come = theirs.progress.get(self.key)
        return (
            come is not None
            and not come.background
            and self.rank not in come.sends
            and come.sent[self.rank] == self.number
        )


class WaitForCredit(PeerWait):
    """Until a rank has taken ``number`` messages of this one."""

    def is_held_up(self, theirs: BlockedState) -> bool:
        come = theirs.progress.get(self.key)
        if come is None or come.background or come.received[self.rank] >= self.number:
            return False
        return not {self.rank, ANY_RANK} & set(come.receives)


@dataclass(frozen=True, kw_only=True)
class WaitForPackets(PeerWait):
    """Of a kernel, for a message, where only its holder can tell whether it comes (``executor/cuda/source/p2p.cuh``): until the count that
    the holder has under the name ``what`` has come to ``number``. ``holds`` has a bit for each rank for whose rows the launch that waits
    does nothing."""

    counter: str
    suspended: int

    @property
    def ident(self) -> str:
        return f"{super().ident} {self.counter}"

    def is_held_up(self, theirs: BlockedState) -> bool:
        come = theirs.progress.get(self.key)
        in_launch = [wait.suspended for wait in theirs.waits if isinstance(wait, WaitForPackets)]
        if come is None or (in_launch and not any(holds >> self.rank & 1 for holds in in_launch)):
            return False
        counts: Sequence[int] = getattr(come, self.counter)
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
    """Where a program or stream is: what it waits for, each of which keeps it from going on; and, found out after that, how far it has
    come, by the communicators' keys, and to which creations."""

    waits: Sequence[Wait] = ()
    progress: Mapping[str, RankProgress] = field(default_factory=dict)
    inits: Collection[str] = ()

    def to_json(self) -> dict[str, Any]:
        come = {key: dataclasses.asdict(come) for key, come in self.progress.items()}
        return {
            "waits": [wait.to_json() for wait in self.waits],
            "come": come,
            "made": list(self.inits),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BlockedState:
        waits = [Wait.from_json(wait) for wait in data["waits"]]
        return cls(
            waits, {key: RankProgress(**come) for key, come in data["come"].items()}, data["made"]
        )


def stream_name(token: str, key: str, rank: int) -> str:
    """The name of a rank's stream in the communicator ``key``; ranks may be threads of one process."""
    return f"{token}/{key}/{rank}"
