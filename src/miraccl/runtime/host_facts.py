"""Facts of the host that connections depend on: cores, NUMA domain, caches."""

from __future__ import annotations

import contextlib
import os

from miraccl import params


def allowed_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def numa_domain() -> int:
    """Return the NUMA domain of this thread's first allowed processor (sysfs); -1 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        cpu = min(os.sched_getaffinity(0))
        for entry in os.listdir(f"/sys/devices/system/cpu/cpu{cpu}"):
            if entry.startswith("node"):
                return int(entry[4:])
    return -1


def last_level_cache_bytes() -> int:
    """Return the size of the largest cache of CPU 0 (sysfs); 32 MiB if unknown."""
    sizes = []
    for index in range(8):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size") as file:
                sizes.append(params.parse_size(file.read().strip()))
        except (OSError, ValueError):
            continue
    return max(sizes, default=0) or 32 << 20
