"""States of a link and of its messages, and the tables of their transitions: (state, trigger) -> state.

What is not in a table does not happen: the machine looks every transition up and fails as an internal error otherwise.
``docs/design/transports.md`` has them as pictures.
"""

from __future__ import annotations

import enum


class SendState(enum.Enum):
    """Of one outgoing message."""

    WAIT_CREDIT = "wait credit"
    WAIT_CTS = "wait want"
    SENDING = "sending"
    QUEUED = "handed"
    WRITTEN = "taken"


class RecvState(enum.Enum):
    """Of one incoming message."""

    ANNOUNCED = "announced"
    LANDING = "landing"
    COMPLETE = "complete"
    DELIVERED = "delivered"


class LinkState(enum.Enum):
    OPEN = "open"
    DRAINING = "draining"
    CLOSING = "closing"
    FINISHED = "finished"
    LOST = "lost"


SEND_TABLE: dict[tuple[SendState, str], SendState] = {
    (SendState.WAIT_CREDIT, "credit"): SendState.SENDING,
    (SendState.WAIT_CREDIT, "credit, no want"): SendState.WAIT_CTS,
    (SendState.WAIT_CTS, "want"): SendState.SENDING,
    (SendState.WAIT_CTS, "consumed unseen"): SendState.WRITTEN,
    (SendState.SENDING, "last piece queued"): SendState.QUEUED,
    (SendState.QUEUED, "all frames taken"): SendState.WRITTEN,
}
RECV_TABLE: dict[tuple[RecvState | None, str], RecvState] = {
    (None, "announce"): RecvState.ANNOUNCED,
    (None, "announce, want too small"): RecvState.COMPLETE,
    (None, "piece"): RecvState.LANDING,
    (RecvState.ANNOUNCED, "piece"): RecvState.LANDING,
    (RecvState.ANNOUNCED, "want too small"): RecvState.COMPLETE,
    (RecvState.LANDING, "piece"): RecvState.LANDING,
    (RecvState.LANDING, "all placed"): RecvState.COMPLETE,
    (RecvState.COMPLETE, "all before delivered"): RecvState.DELIVERED,
}
LINK_TABLE: dict[tuple[LinkState, str], LinkState] = {
    (LinkState.OPEN, "close asked"): LinkState.DRAINING,
    (LinkState.DRAINING, "all taken"): LinkState.CLOSING,
    (LinkState.DRAINING, "peer closed"): LinkState.FINISHED,
    (LinkState.CLOSING, "close taken, peer closed"): LinkState.FINISHED,
    **{
        (state, "lost"): LinkState.LOST
        for state in (LinkState.OPEN, LinkState.DRAINING, LinkState.CLOSING)
    },
}
