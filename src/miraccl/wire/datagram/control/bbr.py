"""BBR-like control: the window and rate follow the measured bandwidth and minimum RTT.

After Cardwell et al., BBR, ACM Queue 14(5), 2016: startup at gain 2.89, drain, then a cycle of
eight round trips that probes with 5/4 and drains with 3/4.  The maximum bandwidth decays by 1/32
per round instead of a windowed filter, which needs no history.
"""

from __future__ import annotations

from miraccl.wire.datagram.control.base import (
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

#: Slots: maximum bandwidth, bandwidth at the last growth check, rounds without growth, end of the
#: round, position in the gain cycle, 1 once the pipe is full.
BANDWIDTH, CHECKED, STALLED, ROUND_END, CYCLE, FULL = 2, 3, 4, 5, 6, 7
#: Gains in 1/256: startup 2/ln 2, probe, drain.
STARTUP, PROBE_UP, PROBE_DOWN, CRUISE = 739, 320, 192, 256
CYCLE_LENGTH = 8


def acked(state: State, sample: AckSample, packet: int) -> None:
    """Update the bandwidth estimate, and the gain once per round trip."""
    rate = sample.delivery_rate
    if rate > state[BANDWIDTH] or (not sample.limited and not state[BANDWIDTH]):
        state[BANDWIDTH] = rate
    if sample.now >= state[ROUND_END]:
        state[ROUND_END] = sample.now + sample.smoothed
        _next_round(state, sample)
    if not state[BANDWIDTH]:
        clamp_window(state, state[WINDOW] + sample.acked, packet)
        return
    gain = _gain(state)
    state[RATE] = max(packet * 100, state[BANDWIDTH] * gain // 256)
    pipe = state[BANDWIDTH] * max(sample.minimum, 1) // SECOND
    factor = STARTUP if not state[FULL] else 512
    clamp_window(state, pipe * factor // 256 + 3 * packet, packet)


def _next_round(state: State, sample: AckSample) -> None:
    if not state[FULL]:
        if state[BANDWIDTH] > state[CHECKED] * 5 // 4:
            state[CHECKED], state[STALLED] = state[BANDWIDTH], 0
        elif not sample.limited:
            state[STALLED] += 1
            if state[STALLED] >= 3:
                state[FULL] = 1
        return
    state[CYCLE] = (state[CYCLE] + 1) % CYCLE_LENGTH
    if not sample.limited:
        state[BANDWIDTH] -= state[BANDWIDTH] // 32


def _gain(state: State) -> int:
    if not state[FULL]:
        return STARTUP
    if state[CYCLE] == 0:
        return PROBE_UP
    return PROBE_DOWN if state[CYCLE] == 1 else CRUISE


def lost(state: State, now: int, nbytes: int, sent_at: int, packet: int) -> None:
    """Ignore single losses, as BBR version 1."""


def timeout(state: State, now: int, packet: int) -> None:
    """Shrink to the minimum window until the next acknowledgement."""
    clamp_window(state, 0, packet)


BBR = Controller(
    "bbr",
    "Cardwell et al., BBR, ACM Queue 14(5), 2016",
    "follows measured bandwidth and minimum round-trip time",
    initial,
    acked,
    lost,
    timeout,
    no_undo,
)
