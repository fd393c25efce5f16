"""Sealed messages of the control plane, as records.

``group`` is 0 for the whole job and a 64-bit name for communicators split from it. Ranks in
messages are always ranks of the whole job. In a message that the hub forwards, ``rank`` is the
sender; the hub sets it and does not trust the sender's value.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

Layout = tuple[tuple[str, str], ...]


class RejectCode(enum.IntEnum):
    """Reason why a rank could not join."""

    DUPLICATE = 1
    NRANKS = 2
    MISSING = 3
    DIED = 4
    LEFT = 5
    CLOSED = 6
    ALREADY_FORMED = 7  # the job at this hub has met without this process


@dataclass(frozen=True, kw_only=True)
class Join:
    """Description of a rank that joins.

    ``host``, ``network``, ``token``: fingerprints of its host, its loopback and its process.
    ``loopback``: ranks that share it may use it to reach this one. ``timeout_left`` of its
    ``timeout_total`` seconds remain to wait for the others.
    """

    host: str
    network: str
    token: bytes
    pid: int
    addresses: tuple[str, ...]
    loopback: bool
    timeout_total: float
    timeout_left: float

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
    group: int
    rank: int
    payload: bytes

    KIND: ClassVar[int] = 24
    LAYOUT: ClassVar[Layout] = (("group", "u64"), ("rank", "u32"), ("payload", "bytes"))


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

    ``rank``: the querying rank on the way to the hub, the replying rank on the way from it.
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


def _table(*records: type[Any]) -> dict[int, type[Any]]:
    return {record.KIND: record for record in records}


#: What the hub may receive, and what a member may receive.
TO_HUB = _table(
    Join, OpenGroup, Gather, NoticeMessage, StatusQuery, StatusReply, LeaveGroup, Goodbye
)
TO_MEMBER = _table(
    Accepted,
    JoinRejected,
    Welcome,
    Gathered,
    GatherTimeout,
    NoticeMessage,
    StatusQuery,
    StatusReply,
    LeaveGroup,
    Gone,
    HubClosing,
)
