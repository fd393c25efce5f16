"""NewReno as in RFC 9002 section 7: slow start, additive increase, one halving per round of
losses.
"""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
    WINDOW,
    AckSample,
    Controller,
    State,
    clamp_window,
    initial,
)

#: Slots: threshold of slow start (0: none yet), send time that ends the recovery period, window and
#: threshold before the last reduction, bytes acknowledged towards the next increase.
THRESHOLD, RECOVERY, OLD_WINDOW, OLD_THRESHOLD, CREDIT = 2, 3, 4, 5, 6


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Grow by the bytes acknowledged in slow start, else by one packet per window."""
    if sample.limited or sample.sent_at <= state[RECOVERY]:
        return
    if sample.marked:
        lost(state, sample.now, 0, sample.sent_at, packet)
        return
    if not state[THRESHOLD] or state[WINDOW] < state[THRESHOLD]:
        clamp_window(state, state[WINDOW] + sample.acked, packet)
        return
    state[CREDIT] += sample.acked
    while state[CREDIT] >= state[WINDOW]:
        state[CREDIT] -= state[WINDOW]
        clamp_window(state, state[WINDOW] + packet, packet)


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Halve the window once per recovery period."""
    if sent_at <= state[RECOVERY]:
        return
    state[OLD_WINDOW], state[OLD_THRESHOLD] = state[WINDOW], state[THRESHOLD]
    state[RECOVERY], state[CREDIT] = now, 0
    clamp_window(state, state[WINDOW] // 2, packet)
    state[THRESHOLD] = state[WINDOW]


def timeout(state: State, now: int, packet: int) -> None:
    """Shrink to the minimum window (RFC 9002 section 7.6, persistent congestion)."""
    state[THRESHOLD] = max(state[WINDOW] // 2, 2 * packet)
    state[RECOVERY] = now
    clamp_window(state, 0, packet)


def undo(state: State) -> None:
    """Restore window and threshold from before the last reduction."""
    if state[OLD_WINDOW]:
        state[WINDOW] = max(state[WINDOW], state[OLD_WINDOW])
        state[THRESHOLD] = max(state[THRESHOLD], state[OLD_THRESHOLD])


RENO = Controller(
    "reno",
    "RFC 9002 section 7, RFC 5681",
    "halves the window per round of losses, adds a packet per round trip",
    initial,
    acked,
    lost,
    timeout,
    undo,
)
