"""Threads, the memory cells they share, and their operations.

A kernel decides nothing by the values it reads: it waits for the next packet or word, and proceeds.
A model thread is therefore a list of operations, written by the methods of ``Thread`` in the order
of the lines of its ``.cuh``.

The memory model is what the kernels rely on. A store is in flight from its issue until it lands, at
any later time; stores of one rank to one cell land in issue order, all others in any order. A load
reads landed values; after a store of its own thread to the same cell it waits for that store, which
is served by the cache in which it lands. ``fence`` waits until all stores of the thread have
landed. The end of a kernel does so only for stores to the rank's own memory: for those to peers it
is not needed.

A model thread stands for one of a rank's threads, or for a warp or block whose threads act
together. Only threads of equal number on different ranks communicate, and threads of different
numbers share no cell, so one per rank is enough, except for what a rank does as a whole: a launch
ends when all its threads have ended (``Thread.end``), and the cells that the next one uses are
arbitrary (``Thread.begin``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY = 0
LAUNCH = 1 << 20  # values are numbers, above them that of the launch


class Kind(enum.Enum):
    """Purpose of a cell, and the errors it must not have."""

    PACKET = enum.auto()  # written only while empty; the reader clears it
    BUFFER = enum.auto()  # read after another signal; only read values are overwritten
    FLAGGED = enum.auto()  # the same, but the reader waits for the very value
    WORD = enum.auto()  # the reader waits for the very value, and not every value has a reader
    COUNTER = enum.auto()  # grows; a wait ends at the value or a larger one


class MemoryCell(NamedTuple):
    name: str
    rank: int  # owner of the memory
    kind: Kind
    parity: int | None  # of a half, which is empty when a launch begins to use it


class Code(enum.IntEnum):
    STORE = 0
    CLEAR = 1
    RECV = 2  # waits
    REACH = 3  # waits
    READ = 4
    AWAIT = 5  # waits
    SEEN = 6  # waits
    FENCE = 7  # waits
    END = 8  # waits
    BEGIN = 9
    ARRIVE = 10  # to the end, where the rank's other threads wait


class ThreadOp(NamedTuple):
    code: Code
    cell: int = 0
    value: int = 0


@dataclass
class Thread:
    """Thread of ``rank``; a kernel's model appends its operations by these methods."""

    system: ModelSystem
    rank: int
    name: str
    ops: list[ThreadOp] = field(default_factory=list)
    launch: int = 0

    def begin(self, launch: int, parity: int) -> None:
        """Begin a launch, which may use its half on any rank: no earlier data may be there or in
        flight.
        """
        self.launch = launch
        self.ops.append(ThreadOp(Code.BEGIN, parity, launch))

    def end(self) -> None:
        """End the kernel, on all threads of the rank."""
        self.ops += [ThreadOp(Code.ARRIVE, 0, self.launch), ThreadOp(Code.END, 0, self.launch)]

    def store(self, cell: MemoryCell, number: int) -> None:
        self._add(Code.STORE, cell, number)

    def clear(self, cell: MemoryCell, number: int = 0) -> None:
        """Clear a packet that this thread has received."""
        self._add(Code.CLEAR, cell, number)

    def recv(self, cell: MemoryCell, number: int) -> None:
        """Wait for a packet, which must be this one, and clear it."""
        self._add(Code.RECV, cell, number)
        self.clear(cell, number)

    def seen_empty(self, cell: MemoryCell) -> None:
        """Wait until loads return a cell cleared by this thread as cleared (``await_cleared``)."""
        self._add(Code.SEEN, cell, 0)

    def reach(self, cell: MemoryCell, number: int) -> None:
        """Wait until a counter is at least ``number``."""
        self._add(Code.REACH, cell, number)

    def read(self, cell: MemoryCell, number: int) -> None:
        """Read a value, which must be this one."""
        self._add(Code.READ, cell, number)

    def wait_for(self, cell: MemoryCell, number: int) -> None:
        """Wait for exactly this value."""
        self._add(Code.AWAIT, cell, number)

    def fence(self) -> None:
        self.ops.append(ThreadOp(Code.FENCE))

    def _add(self, code: Code, cell: MemoryCell, number: int) -> None:
        self.ops.append(
            ThreadOp(
                code,
                self.system.index(cell),
                (0 if cell.parity is None else self.launch * LAUNCH) + number + 1,
            )
        )


class ModelSystem:
    """All ranks.

    ``ordered``: stores of a rank to one cell land in issue order for all its threads, else only for
    each thread.
    """

    def __init__(self, nranks: int, *, ordered: bool = True) -> None:
        self.nranks, self.ordered = nranks, ordered
        self.cells: list[MemoryCell] = []
        self.threads: list[Thread] = []
        self._numbers: dict[MemoryCell, int] = {}

    def index(self, cell: MemoryCell) -> int:
        number = self._numbers.setdefault(cell, len(self.cells))
        if number == len(self.cells):
            self.cells.append(cell)
        return number

    def thread(self, rank: int, name: str = "") -> Thread:
        self.threads.append(Thread(self, rank, f"rank {rank}{name and ', ' + name}"))
        return self.threads[-1]

    def value(self, cell: int, value: int) -> str:
        """Return a cell's value as text."""
        if value == EMPTY:
            return "nothing"
        launch, number = divmod(abs(value), LAUNCH)
        what = "" if self.cells[cell].kind in (Kind.WORD, Kind.COUNTER) else "tile "
        return f"{what}{number - 1}" + (f" of launch {launch}" if launch else "")

    def location(self, cell: int) -> str:
        return f"{self.cells[cell].name} at rank {self.cells[cell].rank}"

    def texts(self, ops: Sequence[ThreadOp]) -> str:
        """Return operations as text; a take includes its clear."""
        alone = [
            op
            for before, op in zip([None, *ops], ops)
            if op.code is not Code.CLEAR or before is None or before.code is not Code.RECV
        ]
        return ", ".join(map(self.text, alone))

    def text(self, op: ThreadOp) -> str:
        if op.code is Code.FENCE:
            return "fence"
        if op.code in (Code.BEGIN, Code.ARRIVE, Code.END):
            return {Code.BEGIN: "begins", Code.ARRIVE: "has done all of", Code.END: "ends"}[
                op.code
            ] + f" launch {op.value}"
        cell, value = self.location(op.cell), self.value(op.cell, op.value)
        return {
            Code.STORE: f"sends {value} to {cell}",
            Code.CLEAR: f"clears {cell}",
            Code.RECV: f"receives {value} from {cell}",
            Code.REACH: f"sees {value} or more in {cell}",
            Code.READ: f"reads {value} in {cell}",
            Code.AWAIT: f"sees {value} in {cell}",
            Code.SEEN: f"sees {cell} empty",
        }[op.code]
