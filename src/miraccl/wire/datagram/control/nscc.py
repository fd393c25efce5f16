"""NSCC-like control from ECN and delay (UEC 1.0; Bonato et al., SMaRTT-REPS, arXiv 2404.01630).

Four cases by (marked, delay above target): proportional increase, fair increase, fair decrease,
multiplicative decrease; and a quick adaptation to the bytes delivered when most of a window was
lost.
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

#: Slots: end of the round, bytes acknowledged and lost in it, time of the last decrease.
ROUND_END, ROUND_ACKED, ROUND_LOST, DECREASED, STARTED = 2, 3, 4, 5, 6
TARGET_QUEUE_NS = 400_000
FAIR_PACKETS = 1
MAX_CUT_Q16 = ONE // 2


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Apply the case of the sample, scaled by the share of the window that it acknowledges."""
    _close_round(state, sample, packet)
    window = state[WINDOW]
    queued = max(0, sample.rtt - sample.minimum)
    fair = FAIR_PACKETS * packet * sample.acked // max(window, 1)
    if not sample.marked and queued < TARGET_QUEUE_NS:
        if sample.limited:
            return
        if not state[STARTED]:
            clamp_window(state, window + sample.acked, packet)
            return
        room = (TARGET_QUEUE_NS - queued) * ONE // TARGET_QUEUE_NS
        clamp_window(state, window + sample.acked * room // (4 * ONE) + fair, packet)
    elif not sample.marked:
        state[STARTED] = 1
        if not sample.limited:
            clamp_window(state, window + fair, packet)
        if queued > 2 * TARGET_QUEUE_NS:
            _cut(state, sample, queued, packet)
    elif queued < TARGET_QUEUE_NS:
        state[STARTED] = 1
        clamp_window(state, window - sample.acked * packet // max(packet, window // 8), packet)
    else:
        state[STARTED] = 1
        _cut(state, sample, queued, packet)


def _cut(state: State, sample: AckSample, queued: int, packet: int) -> None:
    if sample.now - state[DECREASED] < sample.smoothed:
        return
    state[DECREASED] = sample.now
    cut = min((queued - TARGET_QUEUE_NS) * ONE // queued * 8 // 10, MAX_CUT_Q16)
    clamp_window(state, state[WINDOW] - state[WINDOW] * cut // ONE, packet)


def _close_round(state: State, sample: AckSample, packet: int) -> None:
    """QuickAdapt: a round that lost most of its bytes sets the window to what was delivered."""
    state[ROUND_ACKED] += sample.acked
    if sample.now < state[ROUND_END]:
        return
    if state[ROUND_LOST] > state[ROUND_ACKED]:
        clamp_window(state, state[ROUND_ACKED], packet)
    state[ROUND_END] = sample.now + sample.smoothed
    state[ROUND_ACKED] = state[ROUND_LOST] = 0


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Count the loss for the quick adaptation."""
    state[ROUND_LOST] += nbytes


def timeout(state: State, now: int, packet: int) -> None:
    """Halve the window."""
    state[STARTED] = 1
    clamp_window(state, state[WINDOW] // 2, packet)


NSCC = Controller(
    "nscc",
    "UEC 1.0 NSCC; Bonato et al., SMaRTT-REPS, arXiv 2404.01630",
    "combines ECN marks and delay, adapts at once to heavy loss",
    initial,
    acked,
    lost,
    timeout,
    no_undo,
)
