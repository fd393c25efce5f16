"""``torch.distributed`` under any launcher, twice: ``anywhere.py FOLDER``.

Each rank writes a file with the number of ranks and the sums.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.launchers.programs.groups import connect

sums = []
for _ in range(2):
    with connect("miraccl://") as (rank, nranks, add_up):
        sums.append(add_up(10**rank))
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps([nranks, sums]))
