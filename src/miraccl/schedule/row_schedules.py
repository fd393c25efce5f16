"""Schedules of rows for the sparse all-reduce, one per number of ranks.

``two_shot`` by rows: the union of all ranks' rows is cut into one list per rank, the owner. A rank
sends an owner those of its rows that it has; the owner adds in rank order, rounds once and returns
all its rows. This is the protocol of OmniReduce (SIGCOMM 2021) without servers: each rank adds up a
share, and absent rows are known from bitmaps instead of from the offset of the next block.
"""

from __future__ import annotations

from functools import lru_cache

from miraccl.schedule import catalog
from miraccl.schedule.ir import Schedule
from miraccl.schedule.rows import by_rows
from miraccl.types import Collective

#: algorithm of whole chunks whose steps the rows follow
DENSE_FORM = "two_shot"
NAME = "sparse_two_shot"


@lru_cache(maxsize=64)
def build(nranks: int) -> Schedule:
    """Return the schedule for ``nranks`` ranks."""
    return by_rows(catalog.build(DENSE_FORM, Collective.ALL_REDUCE, nranks), NAME)
