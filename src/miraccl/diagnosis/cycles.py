"""Circles among programs and streams, each in a wait for the next one, which has not come, the last one for the first.

What each of them tells was true at some time of its own, and what it has come to does not change before its wait ends.  So of all in a
circle none can have been the first one whose wait ended, whatever these times were: none ever ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miraccl.diagnosis.waits import BlockedState, Wait, WaitForOperation
from miraccl.executor.cpu.kernels import layout

States = Mapping[str, BlockedState]
"""Of programs and streams, by name."""
Cycle = list[tuple[str, Wait]]
"""Names, with the waits for the following one."""


def find_cycle(start: str, places: States) -> tuple[Wait | None, Cycle]:
    """The circle that ``start`` is in, or waits for, and the wait by which it gets there; no circle if there is none."""
    trail: Cycle = []
    seen: set[str] = set()

    def follow(name: str) -> Cycle:
        on_trail = [visited for visited, _ in trail]
        if name in on_trail:
            return trail[on_trail.index(name) :]
        if name in seen or name not in places:
            return []
        seen.add(name)
        for wait in places[name].waits:
            trail.append((name, wait))
            for other in wait.awaited:
                theirs = places.get(other)
                if (
                    theirs is not None
                    and theirs.waits
                    and wait.is_held_up(theirs)
                    and (circle := follow(other))
                ):
                    return list(circle)
            trail.pop()
        return []

    circle = follow(start)
    return (trail[0][1] if circle else None), circle


def logged_ops(wait: Wait, places: States) -> dict[str, Sequence[int]]:
    """What streams have called under the number of the operation ``wait``, as (signature, count), as far as they tell."""
    if not isinstance(wait, WaitForOperation):
        return {}
    number = str(wait.number & layout.SEQ_MASK)
    here = {
        name: place.progress[wait.key].op_log
        for name, place in places.items()
        if wait.key in place.progress
    }
    return {name: theirs[number] for name, theirs in here.items() if number in theirs}
