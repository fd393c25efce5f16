"""Contract of congestion controllers: pure integer functions over a state of eight integers.

The same text is interpreted by the specification and the simulator and compiled by the engine, so a
controller uses integers, comparisons, ``//`` and ``min``/``max`` only.  Slots ``WINDOW`` and
``RATE`` have the same meaning everywhere; the other six belong to the controller.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from dataclasses import dataclass

#: Congestion window in bytes.
WINDOW = 0
#: Pacing rate in bytes per second; 0 paces at 1.25 times the window per smoothed RTT.
RATE = 1
SLOTS = 8
#: Fractions are multiples of 2^-16.
ONE = 1 << 16
SECOND = 1_000_000_000
MIN_WINDOW_PACKETS = 4
#: RFC 6928: ten packets before the first acknowledgement.
INITIAL_WINDOW_PACKETS = 10
MAX_WINDOW = 1 << 30

State = MutableSequence[int]


@dataclass(frozen=True, slots=True)
class AckSample:
    """One acknowledgement of a path, as controllers see it.

    Times in ns, sizes in bytes.  ``sent_at`` is the send time of the largest packet newly
    acknowledged, ``delivery_rate`` in bytes per second (0: none), ``limited`` is True if the window
    was not full.
    """

    now: int
    rtt: int
    smoothed: int
    minimum: int
    acked: int
    marked: int
    in_flight: int
    sent_at: int
    delivery_rate: int
    limited: bool


@dataclass(frozen=True, slots=True)
class Controller:
    """One congestion controller; ``source`` names the paper or RFC.

    ``start(packet)`` returns the initial state for packets of that many bytes.  ``lost(state, now,
    lost, sent_at, packet)`` reports bytes lost and the send time of the newest lost packet;
    ``timeout`` a probe timeout; ``undo`` that the last reduction was caused by reordering.
    """

    name: str
    source: str
    summary: str
    start: Callable[[int], list[int]]
    acked: Callable[[State, AckSample, int], None]
    lost: Callable[[State, int, int, int, int], None]
    timeout: Callable[[State, int, int], None]
    undo: Callable[[State], None]


def initial(packet: int) -> list[int]:
    """State with the initial window and no pacing rate of its own."""
    state = [0] * SLOTS
    state[WINDOW] = INITIAL_WINDOW_PACKETS * packet
    return state


def clamp_window(state: State, window: int, packet: int) -> None:
    """Set the window within ``MIN_WINDOW_PACKETS`` packets and ``MAX_WINDOW`` bytes."""
    state[WINDOW] = max(MIN_WINDOW_PACKETS * packet, min(window, MAX_WINDOW))


def no_undo(state: State) -> None:
    """Keep the reduction."""


def cube_root(value: int) -> int:
    """Integer cube root, rounded down, of a value of at least 0 (bitwise, as in Linux's
    tcp_cubic.c).
    """
    root = 0
    for shift in range(63, -1, -3):
        root *= 2
        bit = 3 * root * (root + 1) + 1
        if (value >> shift) >= bit:
            value -= bit << shift
            root += 1
    return root
