"""The thread that carries pieces of GPU data between a stream and the network.

A stream copies a piece to pinned memory and writes the number of its job into the slot's word ``ready``.  This thread sees it, runs the
piece, and stores 1 to ``done``, for which the stream waits.  The stream itself clears ``done`` before it writes ``ready``: nothing here
counts launches, so what a CUDA graph has captured may be replayed any number of times.

There may be several such threads, each a lane with slots of its own: lane l has the slots l, l + lanes, ...  Pieces of a job come in order,
and jobs one after another, each beginning with a lane's first slot: for a lane there is always exactly one word to look at.  A job of
``stride`` 1 takes lane 0 only; one whose stride is the number of lanes deals its pieces out to all of them.  After a fault nothing is run
any more, but every piece is still answered, so that no stream waits for ever.

The thread looks without pause for ``SPIN_S`` after something happened, then ever more rarely; with nothing announced and nothing captured
it sleeps until ``announce``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from miraccl import trace
from miraccl.transport.fifo import Atomics, native_atomics

log = trace.logger("proxy")

SLOT_STRIDE = 128
READY_OFFSET, DONE_OFFSET = 0, 64  # of 8-byte words; streams write and wait for the lower half
SPIN_S = 0.002
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 50e-6, 1e-3
PAUSE_SHARE = 1 / 20  # of the time since something happened: what is looked for so late is late by 5% at most
CLOSE_WAIT_S = 10.0


class Job(Protocol):
    """What is run when a stream says that a piece is there. ``captured``: a graph may bring it at any time."""

    npieces: int
    stride: int
    captured: bool

    def run(self, piece: int, slot: int) -> None: ...


def slot_of(piece: int, stride: int, nslots: int, lanes: int) -> int:
    """The slot of a piece: pieces of one lane go around its slots."""
    return piece % nslots if stride == lanes else piece * lanes % nslots


class StagingProxy:
    """Answers the slots of one lane, whose words lie at ``flags`` (``nslots`` times ``SLOT_STRIDE`` bytes of zeros, for all lanes).

    ``on_fault(error)`` is called once, in the thread, with what the first piece that failed raised; from then on nothing is run.
    ``start`` begins the thread; without it ``step`` may be called instead.
    """

    def __init__(
        self,
        flags: int,
        nslots: int,
        *,
        on_fault: Callable[[Exception], None],
        lane: int = 0,
        lanes: int = 1,
        atomics: Atomics | None = None,
    ) -> None:
        assert nslots % lanes == 0
        self._flags, self._nslots, self._on_fault = flags, nslots, on_fault
        self.lane, self.lanes = lane, lanes
        self._atomics = atomics or native_atomics()
        self._jobs: dict[int, Job] = {}
        self._bell = threading.Event()
        self._stopping = self._captured = False
        self.draining = False
        self._slot, self._done = lane, 0  # where the next piece comes, and pieces of its job that this lane has answered
        self._announced = self._finished = 0
        self._thread: threading.Thread | None = None

    def register(self, job: Job) -> int:
        """The number that a stream writes to ``ready`` for pieces of ``job``; it is registered with all lanes, in the same order."""
        number = len(self._jobs) + 1
        self._jobs[number] = job
        self._captured |= job.captured and self.takes_part(job)
        return number

    def takes_part(self, job: Job) -> bool:
        """Whether pieces of a job come to this lane."""
        return self.lane < min(job.stride, job.npieces)

    def announce(self) -> None:
        """A job is about to be enqueued that is not captured, and that comes to this lane."""
        self._announced += 1
        self._bell.set()

    def drain(self) -> None:
        """Run nothing any more, but answer. Any thread may call it."""
        self.draining = True
        self._bell.set()

    # ---- the thread

    def start(self, name: str) -> None:
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, when no stream waits any more; may be called twice."""
        self._stopping = True
        self._bell.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)

    def step(self) -> bool:
        """Answer one piece if it is there; says whether it was."""
        slot = self._slot
        ready = self._flags + slot * SLOT_STRIDE + READY_OFFSET
        number = self._atomics.load_acquire(ready)
        if not number:
            return False
        self._atomics.store_release(ready, 0)
        job = self._jobs[number]
        piece = self.lane + self._done * job.stride
        if not self.draining:
            try:
                job.run(piece, slot)
            except Exception as error:
                self.draining = True
                log.info("piece %d of %d was not run: %s", piece + 1, job.npieces, error)
                self._on_fault(error)
        self._done += 1
        self._slot = (slot + self.lanes) % self._nslots
        if piece + job.stride >= job.npieces:
            self._slot, self._done = self.lane, 0
            self._finished += not job.captured
        self._atomics.store_release(self._flags + slot * SLOT_STRIDE + DONE_OFFSET, 1)
        return True

    def pause(self, idle: float) -> float:
        """How long to wait before the next look, ``idle`` seconds after something happened; 0 is not at all."""
        if idle < SPIN_S:
            return 0.0
        if self._done == 0 and self._announced == self._finished and not self._captured:
            return 1.0
        return min(LONGEST_PAUSE_S, max(SHORTEST_PAUSE_S, idle * PAUSE_SHARE))

    def _loop(self) -> None:
        last = time.monotonic()
        while not self._stopping:
            if self.step():
                last = time.monotonic()
                continue
            pause = self.pause(time.monotonic() - last)
            if not pause:
                time.sleep(0)  # lets go of the interpreter's lock
            elif self._bell.wait(pause):
                self._bell.clear()
                last = time.monotonic()
