"""Job that survives a killed rank through a restart: ``resume.py init|torch FOLDER VICTIM``.

Ranks sum a number in every step; rank 0 saves the state after it. In the first generation the
victim kills itself with SIGKILL; the others record the error they see. They ignore the agent's
SIGTERM, so that they exit through that error. The next generation resumes from the saved state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from tests.launchers.programs.groups import connect, write_line

STEPS, FATAL = 6, 3
kind, folder, victim = sys.argv[1:]
generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
state = Path(folder) / "state"


def saved_step() -> int:
    """Return the step after which the state was saved last."""
    return int(state.read_text().split()[0]) if state.exists() else 0


if generation == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
try:
    with connect(kind) as (rank, nranks, add_up):
        step, total = map(int, state.read_text().split()) if state.exists() else (0, 0)
        first = step
        while step < STEPS:
            if generation == 0 and step == FATAL and rank == int(victim):
                while saved_step() < FATAL:  # rank 0 must have saved this step
                    time.sleep(0.001)
                os.kill(os.getpid(), signal.SIGKILL)
            step, total = step + 1, total + add_up(step + rank)
            if rank == 0:
                part = state.with_suffix(".part")
                part.write_text(f"{step} {total}")
                part.rename(state)
        write_line(folder, generation=generation, first=first, total=total, nranks=nranks)
except Exception as error:
    write_line(folder, generation=generation, error=type(error).__name__, text=str(error))
    raise
