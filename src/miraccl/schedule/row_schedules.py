"""Schedules of rows for the sparse all-reduce, by number of ranks and of segments.

``two_shot`` by rows: the union of all ranks' rows is cut into one list per segment and rank, the
owner. A rank sends an owner those of its rows that it has; the owner adds in rank order, rounds
once and returns all its rows. This is the protocol of OmniReduce (SIGCOMM 2021) without servers:
each rank adds up a share, and absent rows are known from bitmaps instead of from the offset of the
next block.

Segments overlap: a rank sends its rows of a segment ``AHEAD`` segments before it adds up its own,
and receives the sums as much later. That is OmniReduce's look-ahead, as data: one segment waits for
both latencies of every message, several wait for them once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from miraccl.schedule import catalog
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.rows import by_rows
from miraccl.schedule.steps import inp, one_channel, out, peers_after, recv, recv_reduce_all, send
from miraccl.types import Collective

#: algorithm of whole chunks whose steps one segment follows
DENSE_FORM = "two_shot"
NAME = "sparse_two_shot"
#: algorithm between GPUs of a host, and its name by rows
DIRECT_FORM, DIRECT_NAME = "one_shot", "sparse_one_shot"
#: Segments between a rank's rows and the sum, and between the sum and its receipt. Twice as many
#: messages are in flight in a FIFO, which holds 8.
AHEAD = 3
#: Most segments, and most parts of the schedule: tables have a list per part.
MAX_SEGMENTS, MAX_PARTS = 16, 128
#: Fewer bytes in a message cost more than they overlap.
MIN_MESSAGE_BYTES = 32 << 10


def count_segments(nranks: int, union_bytes: int) -> int:
    """Return the number of segments for rows of ``union_bytes``: 1, 4 or ``MAX_SEGMENTS``."""
    for segments in (MAX_SEGMENTS, MAX_SEGMENTS // 4):
        parts = segments * nranks
        if parts <= MAX_PARTS and union_bytes >= parts * MIN_MESSAGE_BYTES:
            return segments
    return 1


@lru_cache(maxsize=64)
def build(nranks: int, segments: int = 1) -> Schedule:
    """Return the schedule for ``nranks`` ranks; part ``s * nranks + r`` belongs to rank r."""
    if segments == 1 or nranks == 1:
        return by_rows(catalog.build(DENSE_FORM, Collective.ALL_REDUCE, nranks), NAME)
    whole = one_channel(
        NAME,
        Collective.ALL_REDUCE,
        (_overlapped(rank, nranks, segments) for rank in range(nranks)),
        parts=nranks * segments,
    )
    return by_rows(whole, NAME)


@lru_cache(maxsize=64)
def build_one_shot(nranks: int) -> Schedule:
    """Return the schedule in which every rank sends its rows to all and adds up the union.

    Rows that only one rank has move as often as in ``two_shot`` by rows, n - 1 times, but in one
    step: between GPUs of a host, where they are sent while the scan goes on, that is faster.
    """
    dense = catalog.build(DIRECT_FORM, Collective.ALL_REDUCE, nranks)
    return by_rows(dense, DIRECT_NAME)


def _overlapped(rank: int, nranks: int, segments: int) -> Iterator[Step]:
    peers = peers_after(rank, nranks)
    for turn in range(segments + 2 * AHEAD):
        if turn < segments:
            yield from (send(inp(turn * nranks + peer), peer) for peer in peers)
        if 0 <= (added := turn - AHEAD) < segments:
            own = added * nranks + rank
            yield recv_reduce_all(inp(own), out(own), range(nranks))
            yield from (send(out(own), peer) for peer in peers)
        if (returned := turn - 2 * AHEAD) >= 0:
            yield from (recv(out(returned * nranks + peer), peer) for peer in reversed(peers))
