"""Fixed window: no congestion control, for lossless fabrics whose admission is the receiver's."""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
    WINDOW,
    AckSample,
    Controller,
    State,
    initial,
    no_undo,
)

#: Bytes in flight per path; two super-packets of 64 KiB fill 10 Gbit/s at 100 us.
FIXED_WINDOW = 1 << 20


def start(packet: int) -> list[int]:
    """Return the state with the fixed window."""
    state = initial(packet)
    state[WINDOW] = FIXED_WINDOW
    return state


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Ignore the acknowledgement."""


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Ignore the loss."""


def timeout(state: State, now: int, packet: int) -> None:
    """Ignore the timeout."""


FIXED = Controller(
    "fixed",
    "none",
    "constant window of 1 MiB per path",
    start,
    acked,
    lost,
    timeout,
    no_undo,
)
