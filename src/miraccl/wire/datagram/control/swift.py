"""Swift: a window that keeps the delay at a target (Kumar et al., SIGCOMM 2020, algorithm 1).

Differences from the paper, for networks that lose packets without being full:

- A loss with a delay below the target is not congestion.  It reduces the window only if more than
  one byte in ``LOSS_SHARE`` of a round was lost.
- The base of the target is the minimum RTT of the path instead of a hop count.
"""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
    ONE,
    WINDOW,
    AckSample,
    Controller,
    State,
    clamp_window,
    initial,
    no_undo,
)

#: Slots: time of the last decrease, end of the current round, bytes acknowledged and lost in it,
#: 1 while in slow start (stored as 0: yes, 1: no), last delay over target in Q16.
DECREASED, ROUND_END, ROUND_ACKED, ROUND_LOST, STARTED, EXCESS = 2, 3, 4, 5, 6, 7
#: Queueing delay that the target allows, in ns: a standing queue below 1 ms.
TARGET_QUEUE_NS = 400_000
#: Additive increase per RTT in packets, decrease factor and its bound (paper: ai, beta, max_mdf).
INCREASE_PACKETS = 2
BETA_Q16 = ONE * 8 // 10
MAX_DECREASE_Q16 = ONE // 2
LOSS_SHARE = 4


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Grow below the target delay, shrink in proportion to the excess above it, once per RTT."""
    _count(state, sample, packet)
    target = sample.minimum + TARGET_QUEUE_NS
    window = state[WINDOW]
    if sample.rtt <= target and not sample.marked:
        state[EXCESS] = 0
        if sample.limited:
            return
        if not state[STARTED]:
            clamp_window(state, window + sample.acked, packet)
        else:
            # scaled by the distance to the target, so that large pipes fill in a few round trips
            room = (target - sample.rtt) * ONE // TARGET_QUEUE_NS
            step = INCREASE_PACKETS * packet + (window * room // ONE) // 8
            clamp_window(state, window + step * sample.acked // max(window, 1), packet)
        return
    state[STARTED] = 1
    excess = max(0, sample.rtt - target) * ONE // sample.rtt
    state[EXCESS] = max(excess, 1)
    if sample.now - state[DECREASED] >= sample.smoothed:
        cut = min(BETA_Q16 * excess // ONE, MAX_DECREASE_Q16)
        if sample.marked:
            cut = max(cut, ONE // 16)
        state[DECREASED] = sample.now
        clamp_window(state, window - window * cut // ONE, packet)


def _count(state: State, sample: AckSample, packet: int) -> None:
    """Close a round once per RTT: heavy loss is congestion whatever the delay."""
    state[ROUND_ACKED] += sample.acked
    if sample.now < state[ROUND_END]:
        return
    total = state[ROUND_ACKED] + state[ROUND_LOST]
    if state[ROUND_LOST] * LOSS_SHARE > total:
        state[STARTED] = 1
        clamp_window(state, state[WINDOW] * 3 // 4, packet)
    state[ROUND_END] = sample.now + sample.smoothed
    state[ROUND_ACKED] = state[ROUND_LOST] = 0


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Count the loss; reduce at once if the delay is above the target as well."""
    state[ROUND_LOST] += nbytes
    if state[EXCESS] and sent_at > state[DECREASED]:
        state[DECREASED] = now
        clamp_window(state, state[WINDOW] * 3 // 4, packet)


def timeout(state: State, now: int, packet: int) -> None:
    """Halve the window."""
    state[STARTED], state[DECREASED] = 1, now
    clamp_window(state, state[WINDOW] // 2, packet)


SWIFT = Controller(
    "swift",
    "Kumar et al., Swift, SIGCOMM 2020",
    "keeps the queueing delay at 0.4 ms, tolerates loss without delay",
    initial,
    acked,
    lost,
    timeout,
    no_undo,
)
