"""Communicators of virtual ranks over the compiled engine, in virtual time.

The ranks have the library's own core, planner and engine: the control plane is an
``InMemoryJob``, the connections are those of a ``MemoryFabric``. Messages take no time. A rank runs
until the engine would sleep; then the clock draws the rank that runs next, so that a seed gives one
interleaving of the compiled code, and a deadline passes at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

from miraccl.api.communicator import Communicator
from miraccl.bootstrap.memory import InMemoryJob
from miraccl.executor.cpu.context import VirtualSleeper
from miraccl.executor.cpu.kernels.layout import CTRL_DOORBELL, ERR_ABORTED
from miraccl.planning.cost_model import CpuConstants
from miraccl.runtime.engine_state import ControlPage
from miraccl.runtime.memory_fabric import MemoryFabric
from miraccl.runtime.options import Options
from miraccl.sim.serial_clock import SerialClock

#: Bytes of a rank's window; only touched pages take memory.
WINDOW_BYTES = 64 << 20
Record = Callable[[int, str], None]


class EngineRanks:
    """Virtual ranks of one run; to be made and closed within the clock.

    Args:
        hosts: Name of the host by rank.
        record: Called with (rank, description) before each sleep of the engine.
    """

    def __init__(
        self,
        clock: SerialClock,
        hosts: list[str],
        options: Options,
        constants: CpuConstants,
        record: Record,
    ) -> None:
        self._clock, self._options, self._constants = clock, options, constants
        self._record = record
        self._stopped: dict[int, BaseException] = {}  # raised by the clock within the engine
        self._job = InMemoryJob(len(hosts), timeout=options.timeout, hosts=hosts)

    def open(self, rank: int) -> Communicator:
        """Return the communicator of all ranks; collective, in the threads of the ranks."""
        sleeper = VirtualSleeper(self._clock.now_address, partial(self._sleep, rank))
        return Communicator.from_session(
            self._job.sessions[rank],
            self._options,
            open_fabric=partial(MemoryFabric, window_bytes=WINDOW_BYTES, sleeper=sleeper),
            constants=self._constants,
        )

    def _sleep(self, rank: int, doorbell: int, value: int, nanoseconds: int) -> None:
        """Block a rank in the engine until its doorbell rings; called by compiled code."""
        page = ControlPage(doorbell - CTRL_DOORBELL)
        now = page.board()
        self._record(rank, f"operation {now['seq']}, step {now['step']}, rank {now['peer']}")
        word = ctypes.c_int32.from_address(doorbell)
        try:
            self._clock.block(lambda: word.value != value, nanoseconds * 1e-9)
        except BaseException as error:  # must not pass through compiled code
            self._stopped[rank] = error
            page.set_abort(ERR_ABORTED)

    def stopped(self, rank: int) -> BaseException | None:
        """Return the error with which the clock has ended a wait of ``rank``, if it has."""
        return self._stopped.get(rank)

    def kill(self, rank: int, reason: str) -> None:
        """Let a rank die: the others see it on the control plane."""
        self._job.kill(rank, reason)

    def close(self) -> None:
        self._job.close()
