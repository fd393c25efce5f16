"""Proof for any size of what ``search`` explores: the partial order of all executions.

Threads decide nothing by the values they read, so the executions of a ``System`` are the
linearisations of one partial order: a thread's operations are sequential, and a wait follows the
store it waits for. One execution determines it (Kahn 1974, Mazurkiewicz 1977; model checkers that
explore one order of commuting operations use the same: Flanagan and Godefroid 2005). A system is
correct if

  - two stores to one cell by different ranks are ordered: the issuer of the second knows that the
    first has landed;
  - a store follows all reads of the value it overwrites, and a read of a buffer follows the landing
    of its value;
  - a launch begins after everything that earlier ones did with its half has landed, and found it
    empty.

A thread's knowledge comes with the values it reads: the progress of their senders, and the stores
these knew to have landed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from .program import EMPTY, LAUNCH, Code, Kind, ModelSystem, ThreadOp

Knowledge = NDArray[
    np.int32
]  # operations that each thread has done; then, stores that have landed in each cell


@dataclass
class Store:
    source: int
    thread: int
    op: ThreadOp
    known: Knowledge
    reads: list[tuple[int, int]] = field(default_factory=list)  # (thread, operation)

    @property
    def value(self) -> int:
        return EMPTY if self.op.code is Code.CLEAR else self.op.value


def unordered(system: ModelSystem) -> str:
    """Return what is left to chance; empty if nothing."""
    return _Run(system).run()


def unkept(system: ModelSystem) -> str:
    """Return the violated guarantees of a launch; empty if none.

    A rank that ends it has learned, directly or through others, that every rank has begun it; and
    its own half of the packet buffer is empty, with no store in flight to it. So a rank that begins
    the launch after the next finds that half empty on all ranks, whatever the kernels are.
    """
    run = _Run(system)
    return run.run() or run.promise()


class _Run:
    def __init__(self, system: ModelSystem) -> None:
        self.system = system
        self.ranks = [thread.rank for thread in system.threads]
        self.threads = len(self.ranks)
        self.known = [np.zeros(self.threads + len(system.cells), np.int32) for _ in self.ranks]
        self.places = [0] * self.threads
        self.stores: list[list[Store]] = [[] for _ in system.cells]
        self.flying: list[list[tuple[int, int]]] = [
            [] for _ in self.ranks
        ]  # stores of each thread: cell, and how many this had with it
        self.begun: list[tuple[int, ThreadOp, Knowledge]] = []
        self.ended: list[tuple[int, Knowledge]] = []
        self.wrong = ""

    def run(self) -> str:
        moved = True
        while moved and not self.wrong:
            moved = False
            for thread, ops in enumerate(op.ops for op in self.system.threads):
                while (
                    not self.wrong
                    and self.places[thread] < len(ops)
                    and self.do(thread, ops[self.places[thread]])
                ):
                    moved = True
        if not self.wrong and any(
            packet_cell < len(thread.ops)
            for packet_cell, thread in zip(self.places, self.system.threads)
        ):
            return "nobody can go on"
        return self.wrong or self.look_back()

    def do(self, thread: int, op: ThreadOp) -> bool:
        """Perform one operation; return False if it has to wait."""
        known, packet_cell = self.known[thread], self.places[thread]
        if op.code in (Code.STORE, Code.CLEAR):
            self.issue(thread, op)
        elif op.code is Code.ARRIVE:
            pass
        elif op.code is Code.FENCE:
            self.land(known, self.flying[thread])
            self.flying[thread].clear()
        elif op.code is Code.BEGIN:
            self.begun.append((thread, op, known.copy()))
        elif op.code is Code.END:
            return self.end(thread, op)
        else:
            number = self.met(op)
            if number is None:
                return False
            landed = self.threads + op.cell
            if number:
                read = self.stores[op.cell][number - 1]
                if op.code is Code.READ and known[landed] < number:
                    self.tell(thread, op, "it may not have landed")
                np.maximum(known, read.known, out=known)
                read.reads.append((thread, packet_cell))
                known[landed] = max(known[landed], number)
        known[thread] = self.places[thread] = packet_cell + 1
        return True

    def issue(self, thread: int, op: ThreadOp) -> None:
        source = self.ranks[thread] if self.system.ordered else thread
        history = self.stores[op.cell]
        if (
            op.code is Code.STORE
            and history
            and history[-1].value != EMPTY
            and self.system.cells[op.cell].kind is Kind.PACKET
        ):
            self.tell(thread, op, f"{self.system.value(op.cell, history[-1].value)} is still there")
        history.append(Store(source, thread, op, self.known[thread].copy()))
        self.flying[thread].append((op.cell, len(history)))

    def met(self, op: ThreadOp) -> int | None:
        """Return the number (from 1) of the store whose value a read gets; None if it has not been
        sent.
        """
        history = self.stores[op.cell]
        last = history[-1].value if history else EMPTY
        if op.code is Code.REACH:
            first = len(history)
            while first and history[first - 1].value >= op.value:
                first -= 1
            return first + 1 if first < len(history) else None
        if op.code is Code.SEEN:
            return len(history) if last == EMPTY else None
        if op.code is Code.AWAIT or last == EMPTY:
            return len(history) if last == op.value else None
        if last != op.value:
            self.wrong = f"{self.system.text(op)}, where {self.system.value(op.cell, last)} is"
        return len(history)

    def end(self, thread: int, op: ThreadOp) -> bool:
        """End all threads of a rank together; their stores to the rank's own memory have landed."""
        rank = self.ranks[thread]
        team = [other for other, own_count in enumerate(self.ranks) if own_count == rank]
        for other in team:
            ops = self.system.threads[other].ops
            if self.places[other] == len(ops) or ops[self.places[other]] != op:
                return False
        known = np.maximum.reduce([self.known[other] for other in team])
        for other in team:
            self.land(
                known,
                [
                    (cell, count)
                    for cell, count in self.flying[other]
                    if self.system.cells[cell].rank == rank
                ],
            )
            self.places[other] += 1
            known[other] = self.places[other]
        for other in team:
            self.known[other] = known.copy()
        self.ended.append((rank, known))
        return True

    def land(self, known: Knowledge, flying: list[tuple[int, int]]) -> None:
        for cell, count in flying:
            known[self.threads + cell] = max(known[self.threads + cell], count)

    def look_back(self) -> str:
        for number, (cell, history) in enumerate(zip(self.system.cells, self.stores)):
            for count, (first, second) in enumerate(pairwise(history), 1):
                if first.source != second.source and second.known[self.threads + number] < count:
                    who = self.system.threads[first.thread].name
                    self.tell(
                        second.thread,
                        second.op,
                        f"nobody has told that what {who} did there has landed",
                    )
                for thread, packet_cell in first.reads if cell.kind is not Kind.COUNTER else ():
                    if thread != second.thread and second.known[thread] <= packet_cell:
                        self.tell(
                            second.thread,
                            second.op,
                            f"{self.system.threads[thread].name} may not have read what is there",
                        )
                if (
                    cell.kind in (Kind.BUFFER, Kind.FLAGGED)
                    and EMPTY not in (first.value, second.value)
                    and not first.reads
                ):
                    self.tell(second.thread, second.op, "nobody reads what is there")
            if cell.parity is not None and history and history[-1].value != EMPTY:
                self.wrong = self.wrong or f"{self.system.location(number)} is not empty at the end"
        for thread, op, known in self.begun:
            for number, (cell, history) in enumerate(zip(self.system.cells, self.stores)):
                if cell.parity != op.cell:
                    continue
                old = sum(store.op.value // LAUNCH < op.value for store in history)
                if known[self.threads + number] < old or (old and history[old - 1].value != EMPTY):
                    self.tell(thread, op, f"{self.system.location(number)} may not be empty")
        return self.wrong

    def promise(self) -> str:
        for rank, known in self.ended:
            begun = {own_count for thread, own_count in enumerate(self.ranks) if known[thread]}
            if len(begun) < self.system.nranks:
                return f"rank {rank} may end before all have begun"
            for number, (cell, history) in enumerate(zip(self.system.cells, self.stores)):
                if (
                    cell.parity is not None
                    and cell.rank == rank
                    and (known[self.threads + number] < len(history) or history[-1].value != EMPTY)
                ):
                    return f"{self.system.location(number)} may not be empty"
        return ""

    def tell(self, thread: int, op: ThreadOp, why: str) -> None:
        self.wrong = (
            self.wrong or f"{self.system.threads[thread].name} {self.system.text(op)}: {why}"
        )
