"""Write rank and sum over all ranks for each kind: ``add_up.py init|torch|init,torch FOLDER``."""

from __future__ import annotations

import os
import sys

from tests.launchers.programs.groups import connect, write_line

kinds, folder = sys.argv[1:]
for kind in kinds.split(","):
    with connect(kind) as (rank, nranks, add_up):
        assert rank == int(os.environ["RANK"])
        write_line(folder, kind=kind, rank=rank, nranks=nranks, total=add_up(10**rank))
