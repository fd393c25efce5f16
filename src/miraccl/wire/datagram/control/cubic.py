"""CUBIC (RFC 9438) with integers: time in ms, window in packets."""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
    WINDOW,
    AckSample,
    Controller,
    State,
    clamp_window,
    cube_root,
    initial,
    no_undo,
)

#: Slots: threshold of slow start, send time that ends recovery, window at the last reduction, start
#: of the epoch, time K to reach that window again in ms.
THRESHOLD, RECOVERY, MAX_WINDOW_SEEN, EPOCH, K_MS = 2, 3, 4, 5, 6
#: RFC 9438: C = 0.4, multiplicative decrease to 0.7.
C_NUMERATOR, C_DENOMINATOR = 2, 5
BETA_NUMERATOR, BETA_DENOMINATOR = 7, 10
#: Bound of the time since an epoch: the cubic times the packet fits into 64 bits.
MAX_ELAPSED_MS = 30_000
#: Milliseconds cubed per second cubed.
MS3 = 1_000_000_000


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Slow start, then W(t) = C (t - K)^3 + W_max, never below what Reno would have (RFC 9438
    4.3).
    """
    if sample.limited or sample.sent_at <= state[RECOVERY]:
        return
    if sample.marked:
        lost(state, sample.now, 0, sample.sent_at, packet)
        return
    if not state[THRESHOLD] or state[WINDOW] < state[THRESHOLD]:
        clamp_window(state, state[WINDOW] + sample.acked, packet)
        return
    if not state[EPOCH]:
        state[EPOCH] = sample.now
        deficit = max(0, state[MAX_WINDOW_SEEN] - state[WINDOW])
        state[K_MS] = cube_root(deficit * C_DENOMINATOR * MS3 // (C_NUMERATOR * packet))
    elapsed = (sample.now - state[EPOCH] + sample.smoothed) // 1_000_000 - state[K_MS]
    elapsed = min(elapsed, MAX_ELAPSED_MS)
    cubed = elapsed * elapsed * elapsed
    target = state[MAX_WINDOW_SEEN] + C_NUMERATOR * cubed * packet // (C_DENOMINATOR * MS3)
    target = min(target, state[WINDOW] * 3 // 2)
    reno = packet * sample.acked // (2 * state[WINDOW]) + 1
    if target > state[WINDOW]:
        step = (target - state[WINDOW]) * sample.acked // state[WINDOW]
        clamp_window(state, state[WINDOW] + max(step, reno), packet)
    else:
        clamp_window(state, state[WINDOW] + reno, packet)


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Reduce to 0.7 of the window once per recovery period, with fast convergence."""
    if sent_at <= state[RECOVERY]:
        return
    window = state[WINDOW]
    state[MAX_WINDOW_SEEN] = window if window >= state[MAX_WINDOW_SEEN] else window * 17 // 20
    state[RECOVERY], state[EPOCH] = now, 0
    clamp_window(state, window * BETA_NUMERATOR // BETA_DENOMINATOR, packet)
    state[THRESHOLD] = state[WINDOW]


def timeout(state: State, now: int, packet: int) -> None:
    """Shrink to the minimum window and start again."""
    state[THRESHOLD] = max(state[WINDOW] * BETA_NUMERATOR // BETA_DENOMINATOR, 2 * packet)
    state[RECOVERY], state[EPOCH] = now, 0
    clamp_window(state, 0, packet)


CUBIC = Controller(
    "cubic",
    "RFC 9438",
    "grows as a cubic of the time since the last loss",
    initial,
    acked,
    lost,
    timeout,
    no_undo,
)
