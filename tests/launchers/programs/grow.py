"""Job that a second agent joins while it runs: ``grow.py init|torch FOLDER``.

Two ranks sum numbers until torchrun stops them because more ranks have joined; the ranks of the
larger job do it once and exit.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.launchers.programs.groups import connect, write_line

FEW, LIMIT_S = 2, 60.0
kind, folder = sys.argv[1:]
deadline = time.monotonic() + LIMIT_S
with connect(kind) as (rank, nranks, add_up):
    while nranks == FEW:
        assert add_up(1) == FEW
        (Path(folder) / "running").touch()
        assert time.monotonic() < deadline, "no rank has joined"
    write_line(folder, rank=rank, nranks=nranks, total=add_up(10**rank))
