"""Search of all interleavings of a ``System``, breadth first; an error is reported with its
shortest
trace.

A state is the position of each thread, the landed values, and the stores in flight. Errors are

  - a store that lands on a packet, even if it was received but its clear is in flight, or on a
    buffer that has not been read;
  - a clear that lands on another value than the one it was meant for;
  - a read of another value than the thread expects;
  - a launch that begins while data of an earlier one are in its half, or in flight to it;
  - a state in which no thread can proceed before all have ended;
  - halves that are not empty at the end.

``every=True`` makes each operation and each landing a step of its own. Otherwise a step is as many
operations of a thread as commute with those of others (Lipton 1975): waits up to the next store or
read, and all stores up to the next wait, since a satisfied wait stays satisfied. A packet lands at
its issue, because a late packet is a late reader; a thread's clears land when they must, that is
when it loads, fences or ends, since only a lost packet could tell. Words and buffers land on their
own. ``test_protocols`` compares the two modes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .program import EMPTY, LAUNCH, Code, Kind, ModelSystem, ThreadOp

#: A step is waits, then reads that an overwrite may race, then stores; a launch ends and the next
#: begins in one step.
PHASE = dict.fromkeys(Code, 0) | {
    Code.READ: 1,
    Code.AWAIT: 1,
    Code.STORE: 2,
    Code.CLEAR: 2,
    Code.ARRIVE: 3,
    Code.BEGIN: 3,
}


class Flight(NamedTuple):
    """Store in flight; ``source`` is the rank, or the thread if only its own stores are ordered."""

    source: int
    cell: int
    thread: int
    value: int  # value written
    clears: int  # value cleared


class State(NamedTuple):
    places: tuple[int, ...]  # of the threads, in their operations
    cells: tuple[int, ...]  # negative: has been read, and may be written over
    flights: tuple[Flight, ...]  # sorted by source and cell, else in the order of their issue


@dataclass(frozen=True)
class Found:
    """Result of a search; ``wrong`` is empty if there is no error."""

    wrong: str
    states: int
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*self.trace, self.wrong or f"nothing wrong in {self.states} states"])


class Wrong(Exception):
    pass


def search(system: ModelSystem, *, every: bool = False, most: int = 150_000) -> Found:
    """Explore all behaviours; raise ``OverflowError`` beyond ``most`` states."""
    return _Search(system, every).run(most)


class _Search:
    def __init__(self, system: ModelSystem, every: bool) -> None:
        self.system, self.every = system, every
        self.ranks = [thread.rank for thread in system.threads]
        alone = [self.ranks.count(rank) == 1 for rank in self.ranks]
        self.ops = [
            [op for op in thread.ops if op.code is not Code.ARRIVE or not one]
            for thread, one in zip(system.threads, alone, strict=True)
        ]
        self.reached = 0  # of the last thread that went on, the place behind its last operation
        self.words = [cell.kind in (Kind.WORD, Kind.COUNTER) for cell in system.cells]
        self.instant = [not every and cell.kind is Kind.PACKET for cell in system.cells]
        sends = {
            (op.cell, rank)
            for ops, rank in zip(self.ops, self.ranks, strict=True)
            for op in ops
            if op.code is Code.STORE and self.instant[op.cell]
        }
        assert len({cell for cell, _ in sends}) == len(sends), (
            "a place for packets has one sender, or they would not do to land at once"
        )
        self.siblings = [
            [other for other, rank in enumerate(self.ranks) if rank == own_count]
            for own_count in self.ranks
        ]
        self.ends = [
            {op.value: packet_cell for packet_cell, op in enumerate(ops) if op.code is Code.END}
            for ops in self.ops
        ]

    def run(self, most: int) -> Found:
        first = State((0,) * len(self.ops), (EMPTY,) * len(self.words), ())
        before: dict[State, tuple[State, tuple[int, int]] | None] = {first: None}
        queue = deque([first])
        while queue:
            state = queue.popleft()
            stuck = True
            for move in self.moves(state):
                try:
                    peers_after = self.step(state, *move)
                except Wrong as wrong:
                    return Found(
                        str(wrong),
                        len(before),
                        (*self.trace(before, state), self.text(state, move)),
                    )
                if peers_after is None:
                    continue
                stuck = False
                if peers_after not in before:
                    before[peers_after] = (state, move)
                    queue.append(peers_after)
            if stuck and (wrong_end := self.at_end(state)):
                return Found(wrong_end, len(before), tuple(self.trace(before, state)))
            if len(before) > most:
                raise OverflowError(f"more than {most} states")
        return Found("", len(before))

    def moves(self, state: State) -> list[tuple[int, int]]:
        """Yield (-1, thread) for a thread's next operations and (number, -1) for a store that
        lands.
        """
        found = [
            (-1, thread)
            for thread, packet_cell in enumerate(state.places)
            if packet_cell < len(self.ops[thread])
        ]
        last = (-1, -1)
        for number, flight in enumerate(state.flights):
            if flight[:2] != last:
                found.append((number, -1))
            last = flight[:2]
        return found

    def step(self, state: State, flight: int, thread: int) -> State | None:
        if thread < 0:
            cells = list(state.cells)
            self.land(cells, state.flights[flight], state.flights)
            return State(
                state.places, tuple(cells), state.flights[:flight] + state.flights[flight + 1 :]
            )
        return self.advance(state, thread)

    def land(self, cells: list[int], flight: Flight, flights: Sequence[Flight]) -> None:
        there = cells[flight.cell]
        if flight.value == EMPTY:
            if there not in (flight.clears, -flight.clears) and not self.words[flight.cell]:
                raise Wrong(f"WRONG: this clears {self.system.value(flight.cell, there)}")
        elif there > EMPTY and not self.words[flight.cell]:
            cleared = any(other.cell == flight.cell and other.clears for other in flights)
            why = ", and its clear on the way" if cleared else ""
            raise Wrong(
                f"WRONG: {self.system.value(flight.cell, there)} is still in "
                f"{self.system.location(flight.cell)}{why}"
            )
        cells[flight.cell] = flight.value

    def advance(self, state: State, thread: int) -> State | None:
        """Return the state after a thread's next operations; None if it waits."""
        ops, packet_cell, phase = self.ops[thread], state.places[thread], 0
        cells, flights = list(state.cells), list(state.flights)
        while packet_cell < len(ops) and (
            PHASE[ops[packet_cell].code] >= phase or self.is_lazy(ops[packet_cell])
        ):
            op = ops[packet_cell]
            flights = self.clears_land(op, thread, cells, flights)
            if not self.may(op, thread, state.places, cells, flights):
                if phase == 0:
                    return None
                break
            packet_cell += 1
            self.reached = packet_cell
            self.do(op, thread, cells, flights)
            if self.every:
                break
            if not self.is_lazy(op):
                phase = PHASE[Code.BEGIN] if op.code is Code.END else PHASE[op.code]
        flights.sort(key=lambda flight: flight[:2])  # stable: in the order of their issue
        places = (*state.places[:thread], packet_cell, *state.places[thread + 1 :])
        return State(places, tuple(cells), tuple(flights))

    def is_lazy(self, op: ThreadOp) -> bool:
        return op.code is Code.CLEAR and self.instant[op.cell]

    def clears_land(
        self, op: ThreadOp, thread: int, cells: list[int], flights: list[Flight]
    ) -> list[Flight]:
        """Land the clears of packets that ``op`` waits for; if it keeps waiting, they might land
        later.
        """
        if self.every or op.code not in (Code.RECV, Code.SEEN, Code.FENCE, Code.END):
            return flights
        kept = []
        for flight in flights:
            if (
                flight.thread == thread
                and self.instant[flight.cell]
                and (op.code >= Code.FENCE or flight.cell == op.cell)
            ):
                self.land(cells, flight, flights)
            else:
                kept.append(flight)
        return kept

    def may(
        self,
        op: ThreadOp,
        thread: int,
        places: tuple[int, ...],
        cells: list[int],
        flights: list[Flight],
    ) -> bool:
        """Return True if the thread may perform ``op``."""
        there = EMPTY
        if Code.RECV <= op.code <= Code.SEEN:
            if any(flight.thread == thread and flight.cell == op.cell for flight in flights):
                return False
            there = cells[op.cell]
        match op.code:
            case Code.RECV:
                return there != EMPTY
            case Code.REACH:
                return there >= op.value
            case Code.AWAIT:
                return abs(there) == op.value
            case Code.SEEN:
                return there == EMPTY
            case Code.FENCE:
                return all(flight.thread != thread for flight in flights)
            case Code.END:
                rank = self.ranks[thread]
                if any(
                    flight.thread == thread and self.system.cells[flight.cell].rank == rank
                    for flight in flights
                ):
                    return False
                # the rank's other threads have ended, and their stores have landed
                if any(
                    places[other] < self.ends[other][op.value]
                    for other in self.siblings[thread]
                    if other != thread
                ):
                    return False
                return all(
                    self.ranks[flight.thread] != rank or self.system.cells[flight.cell].rank != rank
                    for flight in flights
                )
        return True

    def do(self, op: ThreadOp, thread: int, cells: list[int], flights: list[Flight]) -> None:
        match op.code:
            case Code.STORE | Code.CLEAR:
                source = self.ranks[thread] if self.system.ordered else thread
                value, clears = (op.value, EMPTY) if op.code is Code.STORE else (EMPTY, op.value)
                flight = Flight(source, op.cell, thread, value, clears)
                if op.code is Code.STORE and self.instant[op.cell]:
                    self.land(cells, flight, flights)
                else:
                    flights.append(flight)
            case Code.RECV | Code.READ:
                if abs(cells[op.cell]) != op.value:
                    raise Wrong(
                        f"WRONG: {self.system.value(op.cell, cells[op.cell])} is in "
                        f"{self.system.location(op.cell)}"
                    )
                if op.code is Code.READ:
                    cells[op.cell] = -op.value
            case Code.AWAIT:
                cells[op.cell] = -op.value
            case Code.BEGIN:
                self.begin(op, cells, flights)

    def begin(self, op: ThreadOp, cells: list[int], flights: list[Flight]) -> None:
        for cell, there in enumerate(cells):
            if (
                self.system.cells[cell].parity == op.cell
                and there != EMPTY
                and abs(there) // LAUNCH < op.value
            ):
                raise Wrong(
                    f"WRONG: {self.system.value(cell, there)} is still in "
                    f"{self.system.location(cell)}"
                )
        for flight in flights:
            if (
                self.system.cells[flight.cell].parity == op.cell
                and max(flight.value, flight.clears) // LAUNCH < op.value
            ):
                raise Wrong(f"WRONG: a store to {self.system.location(flight.cell)} is under way")

    def at_end(self, state: State) -> str:
        """Return the errors of a state in which nothing can happen any more."""
        waiting = [
            thread
            for thread, packet_cell in enumerate(state.places)
            if packet_cell < len(self.ops[thread])
        ]
        if waiting:
            lines = (
                f"{self.system.threads[t].name} waits: "
                f"{self.system.text(self.ops[t][state.places[t]])}"
                for t in waiting
            )
            return "WRONG: nobody can go on; " + "; ".join(lines)
        left = [
            cell
            for cell, there in enumerate(state.cells)
            if self.system.cells[cell].parity is not None and there != EMPTY
        ]
        return f"WRONG: {self.system.location(left[0])} is not empty" if left else ""

    # ---- the way to a state, in words

    def trace(
        self, before: dict[State, tuple[State, tuple[int, int]] | None], state: State
    ) -> list[str]:
        lines: list[str] = []
        while (step := before[state]) is not None:
            state, move = step
            lines.append(self.text(state, move))
        return lines[::-1]

    def text(self, state: State, move: tuple[int, int]) -> str:
        number, thread = move
        if thread < 0:
            flight = state.flights[number]
            clear = f"the clear of {self.system.value(flight.cell, flight.clears)}"
            what = clear if flight.value == EMPTY else self.system.value(flight.cell, flight.value)
            return f"{what} lands in {self.system.location(flight.cell)}"
        try:
            peers_after = self.advance(state, thread)
            last = state.places[thread] if peers_after is None else peers_after.places[thread]
        except Wrong:
            last = self.reached
        return f"{self.system.threads[thread].name}: " + self.system.texts(
            self.ops[thread][state.places[thread] : last]
        )
