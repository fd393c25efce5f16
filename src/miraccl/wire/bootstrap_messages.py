"""The sealed messages of the control plane, as records.

``group`` is 0 for the whole job and a 64-bit name for communicators split from it; ranks in messages are always ranks of the whole job.
In a message that the hub passes on, ``rank`` is the sender; the hub sets it, what the sender wrote there is not trusted.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

Layout = tuple[tuple[str, str], ...]


class RejectCode(enum.IntEnum):
    """Why a meeting did not come about."""

    DUPLICATE = 1
    NRANKS = 2
    MISSING = 3
    DIED = 4
    LEFT = 5
    CLOSED = 6
    ALREADY_FORMED = 7  # the job at this hub has met without this process


@dataclass(frozen=True, kw_only=True)
class Join:
    """What a rank tells about itself.

    ``host``, ``network`` and ``token`` name its host, its loopback and its process; ``loopback``: ranks that share it may use it to
    reach this one.  Of ``patience`` seconds in all it has ``timeout`` left to wait for the others.
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
    """The hub holds the rank now; it waits for the others."""

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
    """All have met: the encoded ``Join`` of every rank in order, and the token of the process that holds the hub."""

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
    """One rank's part of an all_gather; the n-th call with a tag on one rank meets the n-th call of the others."""

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
    """The deadline of this rank's part has passed; ``missing`` had not come."""

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
    """On its way to the hub ``rank`` is who asked, on its way from the hub it is who answers."""

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
    """The last message of a rank: whatever happens to its connection now is no loss."""

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
