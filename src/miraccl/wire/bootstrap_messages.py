"""Sealed messages of the control plane, as records.

``group`` is 0 for the whole job and a 64-bit name for communicators split from it. Ranks in
messages are always ranks of the whole job. In a message that the hub forwards, ``rank`` is the
sender; the hub sets it and does not trust the sender's value.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from miraccl.errors import ProtocolError

Layout = tuple[tuple[str, str], ...]


class RejectCode(enum.IntEnum):
    """Reason why a rank could not join."""

    DUPLICATE = 1
    NRANKS = 2
    MISSING = 3
    DIED = 4
    LEFT = 5
    CLOSED = 6
    ALREADY_FORMED = 7  # the job at this hub has formed without this process
    LOST = 8  # the successor of a hub counts this rank as lost


@dataclass(frozen=True, kw_only=True)
class Join:
    """Description of a rank that joins.

    ``host``, ``network``, ``token``: fingerprints of its host, its loopback and its process.
    ``loopback``: ranks that share it may use it to reach this one. ``timeout_left`` of its
    ``timeout_total`` seconds remain to wait for the others. ``standby_port``: port at which this
    rank listens in case it has to succeed the hub, 0 if it cannot.
    """

    host: str
    network: str
    token: bytes
    pid: int
    addresses: tuple[str, ...]
    loopback: bool
    timeout_total: float
    timeout_left: float
    standby_port: int

    KIND: ClassVar[int] = 16
    LAYOUT: ClassVar[Layout] = (
        ("host", "text"),
        ("network", "text"),
        ("token", "bytes"),
        ("pid", "u32"),
        ("addresses", "texts"),
        ("loopback", "flag"),
        ("timeout_total", "time"),
        ("timeout_left", "time"),
        ("standby_port", "u32"),
    )


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """The hub has registered the rank, which now waits for the others."""

    KIND: ClassVar[int] = 17
    LAYOUT: ClassVar[Layout] = ()


@dataclass(frozen=True, kw_only=True)
class JoinRejected:
    code: int
    text: str
    ranks: tuple[int, ...]

    KIND: ClassVar[int] = 18
    LAYOUT: ClassVar[Layout] = (("code", "u16"), ("text", "text"), ("ranks", "u32s"))


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """All ranks have joined: the encoded ``Join`` of every rank, and the token of the hub's
    process.
    """

    hub_token: bytes
    members: tuple[bytes, ...]

    KIND: ClassVar[int] = 19
    LAYOUT: ClassVar[Layout] = (("hub_token", "bytes"), ("members", "blobs"))


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    group: int
    ranks: tuple[int, ...]

    KIND: ClassVar[int] = 20
    LAYOUT: ClassVar[Layout] = (("group", "u64"), ("ranks", "u32s"))


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One rank's part of an all_gather.

    The n-th call with a tag on one rank matches the n-th call with it on the others.
    """

    group: int
    tag: str
    round: int
    timeout: float
    data: bytes

    KIND: ClassVar[int] = 21
    LAYOUT: ClassVar[Layout] = (
        ("group", "u64"),
        ("tag", "text"),
        ("round", "u32"),
        ("timeout", "time"),
        ("data", "bytes"),
    )


@dataclass(frozen=True, kw_only=True)
class Gathered:
    group: int
    tag: str
    round: int
    parts: tuple[bytes, ...]

    KIND: ClassVar[int] = 22
    LAYOUT: ClassVar[Layout] = (
        ("group", "u64"),
        ("tag", "text"),
        ("round", "u32"),
        ("parts", "blobs"),
    )


@dataclass(frozen=True, kw_only=True)
class GatherTimeout:
    """The deadline of this rank's part has passed; ``missing``: ranks without a part."""

    group: int
    tag: str
    round: int
    missing: tuple[int, ...]

    KIND: ClassVar[int] = 23
    LAYOUT: ClassVar[Layout] = (
        ("group", "u64"),
        ("tag", "text"),
        ("round", "u32"),
        ("missing", "u32s"),
    )


@dataclass(frozen=True, kw_only=True)
class NoticeMessage:
    """A notice to all other ranks of the group.

    ``seq`` numbers the notices of one rank from 1, so that receivers recognise those that the rank
    sends again to the successor of a hub.
    """

    group: int
    rank: int
    seq: int
    payload: bytes

    KIND: ClassVar[int] = 24
    LAYOUT: ClassVar[Layout] = (
        ("group", "u64"),
        ("rank", "u32"),
        ("seq", "u32"),
        ("payload", "bytes"),
    )


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    group: int
    rank: int
    ident: int

    KIND: ClassVar[int] = 25
    LAYOUT: ClassVar[Layout] = (("group", "u64"), ("rank", "u32"), ("ident", "u32"))


@dataclass(frozen=True, kw_only=True)
class StatusReply:
    """Reply to a status query.

    ``rank``: the querying rank when sent to the hub, the replying rank when sent by it.
    """

    group: int
    rank: int
    ident: int
    payload: bytes

    KIND: ClassVar[int] = 26
    LAYOUT: ClassVar[Layout] = (
        ("group", "u64"),
        ("rank", "u32"),
        ("ident", "u32"),
        ("payload", "bytes"),
    )


@dataclass(frozen=True, kw_only=True)
class LeaveGroup:
    group: int
    rank: int
    reason: str

    KIND: ClassVar[int] = 27
    LAYOUT: ClassVar[Layout] = (("group", "u64"), ("rank", "u32"), ("reason", "text"))


@dataclass(frozen=True, kw_only=True)
class Goodbye:
    """Last message of a rank: the end of its connection afterwards is not a loss."""

    reason: str

    KIND: ClassVar[int] = 28
    LAYOUT: ClassVar[Layout] = (("reason", "text"),)


@dataclass(frozen=True, kw_only=True)
class Gone:
    """A rank left the job (``left``) or was lost."""

    rank: int
    left: bool
    reason: str

    KIND: ClassVar[int] = 29
    LAYOUT: ClassVar[Layout] = (("rank", "u32"), ("left", "flag"), ("reason", "text"))


@dataclass(frozen=True, kw_only=True)
class HubClosing:
    """The hub ends on purpose; the control plane is gone after this."""

    reason: str

    KIND: ClassVar[int] = 30
    LAYOUT: ClassVar[Layout] = (("reason", "text"),)


@dataclass(frozen=True, kw_only=True)
class Rejoin:
    """A rank of a formed job joins the successor of its hub.

    ``token``: that of its ``Join``. ``gone``, ``left``, ``reasons``: the ranks that it knows to be
    gone, whether each of them left in good order, and why.
    """

    token: bytes
    gone: tuple[int, ...]
    left: tuple[int, ...]
    reasons: tuple[str, ...]

    KIND: ClassVar[int] = 31
    LAYOUT: ClassVar[Layout] = (
        ("token", "bytes"),
        ("gone", "u32s"),
        ("left", "u32s"),
        ("reasons", "texts"),
    )


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """All survivors have rejoined; ``gone``, ``left``, ``reasons`` as in ``Rejoin``, of all
    ranks.
    """

    gone: tuple[int, ...]
    left: tuple[int, ...]
    reasons: tuple[str, ...]

    KIND: ClassVar[int] = 32
    LAYOUT: ClassVar[Layout] = (("gone", "u32s"), ("left", "u32s"), ("reasons", "texts"))


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """The rank has sent all again that the lost hub may not have completed."""

    KIND: ClassVar[int] = 33
    LAYOUT: ClassVar[Layout] = ()


@dataclass(frozen=True, kw_only=True)
class GatherMissing:
    """Other ranks still wait in this all_gather: the rank sends its part again if it has one."""

    group: int
    tag: str
    round: int

    KIND: ClassVar[int] = 34
    LAYOUT: ClassVar[Layout] = (("group", "u64"), ("tag", "text"), ("round", "u32"))


def pack_gone(gone: Iterable[Gone]) -> dict[str, Any]:
    """Return the fields ``gone``, ``left`` and ``reasons`` of ``Rejoin`` and ``Resumed``."""
    all_gone = list(gone)
    return {
        "gone": tuple(each.rank for each in all_gone),
        "left": tuple(int(each.left) for each in all_gone),
        "reasons": tuple(each.reason for each in all_gone),
    }


def unpack_gone(message: Rejoin | Resumed) -> list[Gone]:
    """Return the records that ``pack_gone`` packed; raises ``ProtocolError``."""
    if not len(message.gone) == len(message.left) == len(message.reasons):
        raise ProtocolError("the lists of a message about lost ranks differ in length")
    return [
        Gone(rank=rank, left=bool(left), reason=reason)
        for rank, left, reason in zip(message.gone, message.left, message.reasons, strict=True)
    ]


def _table(*records: type[Any]) -> dict[int, type[Any]]:
    return {record.KIND: record for record in records}


#: What the hub may receive, and what a member may receive.
TO_HUB = _table(
    Join,
    Rejoin,
    Replayed,
    OpenGroup,
    Gather,
    NoticeMessage,
    StatusQuery,
    StatusReply,
    LeaveGroup,
    Goodbye,
)
TO_MEMBER = _table(
    Accepted,
    JoinRejected,
    Welcome,
    Resumed,
    Gathered,
    GatherTimeout,
    GatherMissing,
    NoticeMessage,
    StatusQuery,
    StatusReply,
    LeaveGroup,
    Gone,
    HubClosing,
)
