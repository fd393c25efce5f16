"""Fair-share network: virtual time, its actions, and transfers that share the bandwidth of links.

Transfers are fluid, without packets or queues; ``sim.fabric`` has both.

Rates are max-min fair (Bertsekas and Gallager, "Data Networks", 6.5.2): the most contended link is
divided equally among its transfers, then the next one with what is left.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Action = Callable[[], None]


@dataclass(eq=False, slots=True)
class Flow:
    """A transfer in progress.

    ``load`` has the links with the number of times each is crossed; ``rate`` is in bytes per us.
    """

    remaining: float
    load: tuple[tuple[int, int], ...]
    done: Action
    rate: float = 0.0


class FairShareNetwork:
    """Virtual time and the transfers in progress.

    Args:
        capacities: Bytes per microsecond of each link.
        shuffle: Reorders the actions that are due at the same instant; None keeps the order in
            which they were started.

    Attributes:
        now: Virtual time in us, from 0.
        carried: Bytes that the transfers started so far move over each link.
    """

    def __init__(
        self, capacities: Sequence[float], shuffle: Callable[[list[Action]], None] | None = None
    ) -> None:
        self.now = 0.0
        self.carried = [0.0] * len(capacities)
        self._capacities, self._shuffle = capacities, shuffle
        self._flows: list[Flow] = []
        self._actions: list[tuple[float, int, Action]] = []
        self._numbers = 0
        self._rates_are_current = True

    def call_at(self, instant: float, action: Action) -> None:
        """Call ``action`` at ``instant`` in us, not before the current step of time is over."""
        self._numbers += 1
        heapq.heappush(self._actions, (max(instant, self.now), self._numbers, action))

    def start(self, nbytes: float, load: Counter[int], done: Action) -> Flow:
        """Start a transfer of ``nbytes`` over ``load`` and call ``done`` at its end."""
        flow = Flow(nbytes, tuple(load.items()), done)
        self._flows.append(flow)
        self._rates_are_current = False
        for link, times in load.items():
            self.carried[link] += nbytes * times
        return flow

    def cancel(self, flows: Sequence[Flow]) -> None:
        """End transfers without calling their ``done``."""
        self._flows = [flow for flow in self._flows if flow not in flows]
        self._rates_are_current = False

    def next_time(self) -> float:
        """Return the instant of the next action or end of a transfer; infinite if there is none."""
        self._share_bandwidth()
        ends = min((flow.remaining / flow.rate for flow in self._flows), default=math.inf)
        return min(self.now + ends, self._actions[0][0] if self._actions else math.inf)

    def advance(self, instant: float) -> None:
        """Move time to ``instant``, at most ``next_time()``, and call what is due then."""
        self._share_bandwidth()
        passed, self.now = instant - self.now, instant
        due: list[Action] = []
        going: list[Flow] = []
        for flow in self._flows:
            flow.remaining -= passed * flow.rate
            # Tolerance for rounding of the clock: a picosecond and less.
            if flow.remaining <= flow.rate * max(1e-12 * instant, 1e-9):
                due.append(flow.done)
            else:
                going.append(flow)
        self._rates_are_current = not due
        self._flows = going
        while self._actions and self._actions[0][0] <= instant:
            due.append(heapq.heappop(self._actions)[2])
        if self._shuffle is not None:
            self._shuffle(due)
        for action in due:
            action()

    def _share_bandwidth(self) -> None:
        """Set max-min fair rates: fix the flows of the most contended links, then repeat with the
        rest.
        """
        if self._rates_are_current:
            return
        self._rates_are_current = True
        demand: dict[int, int] = {}
        for flow in self._flows:
            for link, times in flow.load:
                demand[link] = demand.get(link, 0) + times
        left = {link: self._capacities[link] for link in demand}
        open_flows = self._flows
        while open_flows:
            shares = {link: left[link] / times for link, times in demand.items()}
            level = min(shares.values())
            # Links of equal contention are fixed together; the tolerance is for rounding.
            limit = level * (1 + 1e-12)
            tightest = {link for link, share in shares.items() if share <= limit}
            going = []
            for flow in open_flows:
                load = flow.load
                for link, _ in load:
                    if link in tightest:
                        break
                else:
                    going.append(flow)
                    continue
                flow.rate = level
                for link, times in load:
                    left[link] -= level * times
                    demand[link] -= times
            demand = {link: times for link, times in demand.items() if times}
            open_flows = going
