"""The constants of the cost model for this machine: from the cache, or the defaults until they have been measured."""

from __future__ import annotations

import functools

from miraccl.comm.model import Constants
from miraccl.native import cache

CACHE_FILE = "cpu-constants-1.json"


@functools.cache
def load_constants() -> Constants:
    """What ``measure`` left in the cache folder, else defaults."""
    data = cache.read(CACHE_FILE)
    if data is not None:
        try:
            return Constants.from_json(data.decode())
        except (ValueError, TypeError):
            pass
    return Constants()
