"""TIMELY: a rate steered by the gradient of the RTT (Mittal et al., SIGCOMM 2015, algorithm 1).

The delay thresholds are above the path's minimum RTT instead of absolute.
"""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
    ONE,
    RATE,
    SECOND,
    WINDOW,
    AckSample,
    Controller,
    State,
    clamp_window,
    initial,
    no_undo,
)

#: Slots: previous RTT, smoothed RTT difference, completed increase rounds, time of the last update.
PREVIOUS, GRADIENT, STREAK, UPDATED = 2, 3, 4, 5
LOW_NS, HIGH_NS = 50_000, 1_000_000
#: EWMA weight, multiplicative decrease, additive step in bytes per second (10 Mbit/s), streak for
#: HAI.
ALPHA_Q16 = ONE * 7 // 8
BETA_Q16 = ONE * 8 // 10
STEP = 1_250_000
HAI_STREAK = 5
MIN_RATE = 125_000


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Update the rate once per RTT and derive the window from it."""
    if not state[RATE]:
        state[RATE] = max(MIN_RATE, state[WINDOW] * SECOND // max(sample.rtt, 1))
        state[PREVIOUS] = sample.rtt
    difference = sample.rtt - state[PREVIOUS]
    state[PREVIOUS] = sample.rtt
    state[GRADIENT] += (difference - state[GRADIENT]) * (ONE - ALPHA_Q16) // ONE
    if sample.now - state[UPDATED] < sample.smoothed:
        return
    state[UPDATED] = sample.now
    queued = sample.rtt - sample.minimum
    if queued > HIGH_NS:
        state[STREAK] = 0
        cut = BETA_Q16 * (queued - HIGH_NS) // queued
        state[RATE] -= state[RATE] * cut // ONE
    elif queued < LOW_NS or state[GRADIENT] <= 0:
        state[STREAK] += 1
        # at least 1/16 per RTT, so that fast links are reached in tens of round trips
        step = max(STEP, state[RATE] // 16)
        state[RATE] += step * (5 if state[STREAK] >= HAI_STREAK else 1)
    else:
        state[STREAK] = 0
        cut = BETA_Q16 * state[GRADIENT] // max(sample.minimum, 1)
        state[RATE] -= state[RATE] * min(cut, ONE // 2) // ONE
    state[RATE] = max(MIN_RATE, state[RATE])
    clamp_window(state, 2 * state[RATE] * max(sample.smoothed, 1) // SECOND, packet)


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Ignore single losses: the paper's fabric loses nothing; delay is the signal."""


def timeout(state: State, now: int, packet: int) -> None:
    """Halve the rate."""
    state[RATE] = max(MIN_RATE, state[RATE] // 2)
    clamp_window(state, state[WINDOW] // 2, packet)


TIMELY = Controller(
    "timely",
    "Mittal et al., TIMELY, SIGCOMM 2015",
    "steers the rate by the gradient of the round-trip time",
    initial,
    acked,
    lost,
    timeout,
    no_undo,
)
