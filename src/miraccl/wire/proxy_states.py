"""States of a link and of its messages, and their transition tables: (state, trigger) -> state.

A transition that is not in a table is an internal error. ``docs/design/transports.md`` draws them.
"""

from __future__ import annotations

import enum


class SendState(enum.Enum):
    """State of an outgoing message."""

    WAIT_CREDIT = "wait credit"
    WAIT_CTS = "wait CTS"
    SENDING = "sending"
    QUEUED = "queued"
    WRITTEN = "written"


class RecvState(enum.Enum):
    """State of an incoming message."""

    ANNOUNCED = "announced"
    LANDING = "landing"
    COMPLETE = "complete"
    DELIVERED = "delivered"


class LinkState(enum.Enum):
    """State of a link."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSING = "closing"
    FINISHED = "finished"
    LOST = "lost"


SEND_TABLE: dict[tuple[SendState, str], SendState] = {
    (SendState.WAIT_CREDIT, "credit"): SendState.SENDING,
    (SendState.WAIT_CREDIT, "credit, no CTS"): SendState.WAIT_CTS,
    (SendState.WAIT_CTS, "CTS"): SendState.SENDING,
    (SendState.WAIT_CTS, "consumed unseen"): SendState.WRITTEN,
    (SendState.SENDING, "last segment queued"): SendState.QUEUED,
    (SendState.QUEUED, "all frames written"): SendState.WRITTEN,
}
RECV_TABLE: dict[tuple[RecvState | None, str], RecvState] = {
    (None, "announce"): RecvState.ANNOUNCED,
    (None, "announce, buffer too small"): RecvState.COMPLETE,
    (None, "segment"): RecvState.LANDING,
    (RecvState.ANNOUNCED, "segment"): RecvState.LANDING,
    (RecvState.ANNOUNCED, "buffer too small"): RecvState.COMPLETE,
    (RecvState.LANDING, "segment"): RecvState.LANDING,
    (RecvState.LANDING, "all placed"): RecvState.COMPLETE,
    (RecvState.COMPLETE, "all before delivered"): RecvState.DELIVERED,
}
LINK_TABLE: dict[tuple[LinkState, str], LinkState] = {
    (LinkState.OPEN, "close requested"): LinkState.DRAINING,
    (LinkState.DRAINING, "all written"): LinkState.CLOSING,
    (LinkState.DRAINING, "peer closed"): LinkState.FINISHED,
    (LinkState.CLOSING, "close written, peer closed"): LinkState.FINISHED,
    **{
        (state, "lost"): LinkState.LOST
        for state in (LinkState.OPEN, LinkState.DRAINING, LinkState.CLOSING)
    },
}
