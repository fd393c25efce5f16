"""Every rank says who it is and what the sum over all ranks is: ``add_up.py init|torch FOLDER``."""

from __future__ import annotations

import os
import sys

from tests.launchers.programs.groups import connected, tell

kind, folder = sys.argv[1:]
with connected(kind) as (rank, nranks, add_up):
    assert rank == int(os.environ["RANK"])
    tell(folder, rank=rank, nranks=nranks, total=add_up(10**rank))
