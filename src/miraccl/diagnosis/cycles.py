"""Cycles in the wait-for graph of host programs and GPU streams.

Each node reports its state at a time of its own. The result is still sound: the progress of a node
cannot change before one of its waits ends, so in a cycle no wait can have been the first to end,
whatever the times of the reports were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miraccl.diagnosis.waits import BlockedState, Wait, WaitForOperation
from miraccl.executor.cpu.kernels import layout

States = Mapping[str, BlockedState]
"""States of host programs and streams by name."""
Cycle = list[tuple[str, Wait]]
"""Names in order, each with its wait for the next one; the last one waits for the first."""


def find_cycle(start: str, states: States) -> tuple[Wait | None, Cycle]:
    """Find the cycle that ``start`` is in or waits for.

    Returns the wait of ``start`` that leads to the cycle, and the cycle; ``(None, [])`` if there is
    none.
    """
    trail: Cycle = []
    seen: set[str] = set()

    def follow(name: str) -> Cycle:
        on_trail = [visited for visited, _ in trail]
        if name in on_trail:
            return trail[on_trail.index(name) :]
        if name in seen or name not in states:
            return []
        seen.add(name)
        for wait in states[name].waits:
            trail.append((name, wait))
            for other in wait.awaited:
                peer = states.get(other)
                if (
                    peer is not None
                    and peer.waits
                    and wait.is_blocked_by(peer)
                    and (cycle := follow(other))
                ):
                    return list(cycle)
            trail.pop()
        return []

    cycle = follow(start)
    return (trail[0][1] if cycle else None), cycle


def logged_ops(wait: Wait, states: States) -> dict[str, Sequence[int]]:
    """Return what each stream has logged under the operation number of ``wait``.

    (signature, count) by stream name, of the streams whose log still holds that operation.
    """
    if not isinstance(wait, WaitForOperation):
        return {}
    number = str(wait.number & layout.SEQ_MASK)
    logs = {
        name: state.progress[wait.key].op_log
        for name, state in states.items()
        if wait.key in state.progress
    }
    return {name: log[number] for name, log in logs.items() if number in log}
