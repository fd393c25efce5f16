"""Ranks that act as hosts of their own and may open few files; each prints how it ends."""

from __future__ import annotations

import os
import resource
import sys

import miraccl

os.environ["MIRACCL_HOSTID"] = f"host {os.environ['MIRACCL_RANK']}"
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    with miraccl.init(timeout=30) as comm:
        comm.barrier()
    print("works", flush=True)
except miraccl.MiracclError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
