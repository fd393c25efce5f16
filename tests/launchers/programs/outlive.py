"""Ranks die in turn; the others shrink and go on.

``outlive.py FOLDER [ID]``: with a path ID, rank 0 makes a unique id and writes it there. The ranks
die in the order of ``OUTLIVE_ORDER``, numbers with commas between them; without it the lowest one
dies first, which has the control plane. The last rank writes what it has seen to FOLDER/last.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import miraccl


def communicator(path: str) -> miraccl.Communicator:
    if not path:
        return miraccl.init(timeout=60)
    rank, nranks, file = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(path)
    if rank == 0:
        draft = file.with_suffix(".draft")
        draft.write_text(str(miraccl.get_unique_id()))
        draft.rename(file)
    while not file.exists():
        time.sleep(0.01)
    return miraccl.Communicator(nranks, file.read_text(), rank, timeout=60)


def main(folder: Path, path: str) -> None:
    comm, world, sums, seconds = communicator(path), 0, [], []
    world = comm.nranks
    original = comm.rank
    order = os.environ.get("OUTLIVE_ORDER") or ",".join(map(str, range(world)))
    deaths = [int(rank) for rank in order.split(",")]
    while comm.nranks > 1:
        sums.append(float(comm.all_reduce(np.ones(3))[0]))
        if original == deaths[len(sums) - 1]:
            comm.barrier()
            os._exit(0)  # like a crash; torchrun would end all ranks for another status
        begun = time.monotonic()
        try:
            comm.barrier()
            while True:
                comm.all_reduce(np.ones(3))
        except miraccl.PeerDied:
            comm = comm.shrink()
        seconds.append(time.monotonic() - begun)
    sums.append(float(comm.all_reduce(np.ones(3))[0]))
    report = {"rank": original, "nranks": world, "sums": sums, "seconds": seconds}
    (folder / "last.json").write_text(json.dumps(report))
    comm.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
