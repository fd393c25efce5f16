"""Schedules with aggregators: participants that only add, as a parameter server or a switch does.

A rank sends its input once and receives the sum once, S bytes each way instead of the 2 (n - 1) / n
S of a ring. That pays if an aggregator can receive from all ranks at once: its link is faster than
theirs, or there are several aggregators. Sources: OmniReduce (SIGCOMM 2021), SHARP (COM-HPC 2016),
NCCL's CollNet.

============= ===================================== =================== =============
schedule      aggregators                           blocks per rank     latency steps
============= ===================================== =================== =============
star          a, each for a share of the block      1 up, 1 down        2
star_scatter  a, reduce_scatter of n blocks         n up, 1 down        2
star_gather   a, all_gather of n blocks             1 up, n - 1 down    2
two_level     one per group of ranks and a root     1 up, 1 down        4
rail_trees    one per local rank, over the hosts    (2 L - 1) / L       4
============= ===================================== =================== =============

The latency is that of one slice. Blocks are cut into slices, and a rank sends ``AHEAD`` slices
before it waits for the first sum: its link carries data in both directions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from miraccl.errors import InvalidUsage
from miraccl.schedule.ir import Schedule, Step
from miraccl.schedule.steps import copy, inp, out, recv, recv_reduce_all, scratch, send
from miraccl.types import Collective

#: slices of the share of an aggregator, and slices in flight between it and a rank; a FIFO holds 8
SLICES, AHEAD, STAR_AHEAD = 16, 4, 6
#: Bytes of a slice. An aggregator waits for one of each rank before it answers, so that a link is
#: idle for two of them; smaller ones cost more than that.
SLICE_BYTES, MAX_SLICES = 256 << 10, 128


def _schedule(
    name: str,
    nranks: int,
    programs: Sequence[Iterator[Step]],
    parts: int,
    scratch_chunks: int,
    collective: Collective = Collective.ALL_REDUCE,
) -> Schedule:
    return Schedule(
        name=name,
        collective=collective,
        nranks=nranks,
        aggregators=len(programs) - nranks,
        parts=parts,
        channels=(tuple(tuple(steps) for steps in programs),),
        scratch_chunks=scratch_chunks,
    )


def _check(nranks: int, aggregators: int, slices: int) -> None:
    if min(nranks, aggregators, slices) < 1:
        raise InvalidUsage(
            f"cannot build a schedule for {nranks} ranks, {aggregators} aggregators and {slices}"
            " slices: at least 1 of each is required"
        )


def count_slices(block_bytes: int, aggregators: int) -> int:
    """Return the slices of the share of an aggregator, a power of two."""
    wanted = -(-block_bytes // (aggregators * SLICE_BYTES))
    return min(MAX_SLICES, 1 << max(0, wanted - 1).bit_length())


def _exchange(parts: int, server: Sequence[int], ahead: int) -> Iterator[Step]:
    """Yield the steps of a rank: part p goes to ``server[p]``, and its sum comes back."""
    for part in range(parts + ahead):
        if part < parts:
            yield send(inp(part), server[part])
        if part >= ahead:
            yield recv(out(part - ahead), server[part - ahead])


@lru_cache(maxsize=64)
def star(nranks: int, aggregators: int = 1, slices: int = SLICES) -> Schedule:
    """Return an all_reduce in which each aggregator adds a share of the block, in rank order."""
    _check(nranks, aggregators, slices)
    parts = aggregators * slices
    server = [nranks + part % aggregators for part in range(parts)]

    def aggregator(number: int) -> Iterator[Step]:
        for part in range(number, parts, aggregators):
            yield recv_reduce_all(None, scratch(part), range(nranks))
            for rank in range(nranks):
                # Each aggregator starts with another rank.
                yield send(scratch(part), (rank + number) % nranks)

    programs = [_exchange(parts, server, STAR_AHEAD * aggregators) for _ in range(nranks)]
    programs += [aggregator(number) for number in range(aggregators)]
    return _schedule("star", nranks, programs, parts, parts)


@lru_cache(maxsize=64)
def star_scatter(nranks: int, aggregators: int = 1, slices: int = SLICES) -> Schedule:
    """Return a reduce_scatter in which each aggregator adds a share of every block."""
    _check(nranks, aggregators, slices)
    parts, ahead = aggregators * slices, AHEAD * aggregators * nranks
    items = [(part, block) for part in range(parts) for block in range(nranks)]

    def rank_steps(rank: int) -> Iterator[Step]:
        for number in range(len(items) + ahead):
            if number < len(items):
                part, block = items[number]
                yield send(inp(block * parts + part), nranks + part % aggregators)
            if number >= ahead and items[number - ahead][1] == rank:
                part = items[number - ahead][0]
                yield recv(out(part), nranks + part % aggregators)

    def aggregator(number: int) -> Iterator[Step]:
        for part in range(number, parts, aggregators):
            for block in range(nranks):
                yield recv_reduce_all(None, scratch(part), range(nranks))
                yield send(scratch(part), block)

    programs = [rank_steps(rank) for rank in range(nranks)]
    programs += [aggregator(number) for number in range(aggregators)]
    return _schedule(
        "star_scatter", nranks, programs, parts, parts, collective=Collective.REDUCE_SCATTER
    )


@lru_cache(maxsize=64)
def star_gather(nranks: int, aggregators: int = 1, slices: int = SLICES) -> Schedule:
    """Return an all_gather in which each aggregator passes on a share of every block."""
    _check(nranks, aggregators, slices)
    parts, ahead = aggregators * slices, AHEAD * aggregators

    def rank_steps(rank: int) -> Iterator[Step]:
        for part in range(parts + ahead):
            if part < parts:
                yield send(inp(part), nranks + part % aggregators)
                yield copy(inp(part), out(rank * parts + part))
            if part >= ahead:
                done = part - ahead
                for block in range(nranks):
                    if block != rank:
                        yield recv(out(block * parts + done), nranks + done % aggregators)

    def aggregator(number: int) -> Iterator[Step]:
        for part in range(number, parts, aggregators):
            for block in range(nranks):
                yield recv(scratch(part), block)
                for rank in range(nranks):
                    if rank != block:
                        yield send(scratch(part), rank)

    programs = [rank_steps(rank) for rank in range(nranks)]
    programs += [aggregator(number) for number in range(aggregators)]
    return _schedule(
        "star_gather", nranks, programs, parts, parts, collective=Collective.ALL_GATHER
    )


@lru_cache(maxsize=64)
def two_level(nranks: int, group: int, slices: int = SLICES) -> Schedule:
    """Return an all_reduce over a tree: an aggregator per ``group`` of ranks, and a root."""
    groups = [range(first, min(first + group, nranks)) for first in range(0, nranks, max(1, group))]
    _check(nranks, len(groups), slices)
    root = nranks + len(groups)

    def leaf(number: int) -> Iterator[Step]:
        for part in range(slices + AHEAD):
            if part < slices:
                yield recv_reduce_all(None, scratch(part), groups[number])
                yield send(scratch(part), root)
            if part >= AHEAD:
                yield recv(scratch(part - AHEAD), root)
                for rank in groups[number]:
                    yield send(scratch(part - AHEAD), rank)

    def top() -> Iterator[Step]:
        leaves = range(nranks, root)
        for part in range(slices):
            yield recv_reduce_all(None, scratch(part), leaves)
            for peer in leaves:
                yield send(scratch(part), peer)

    def rank_steps(rank: int) -> Iterator[Step]:
        return _exchange(slices, [nranks + rank // group] * slices, 2 * AHEAD - 1)

    programs = [rank_steps(rank) for rank in range(nranks)]
    programs += [leaf(number) for number in range(len(groups))]
    return _schedule("two_level", nranks, [*programs, top()], slices, slices)


@lru_cache(maxsize=64)
def rail_trees(hosts: int, local: int) -> Schedule:
    """Return an all_reduce over ``hosts`` hosts of ``local`` ranks with an aggregator per rail.

    The ranks of a host reduce and gather among themselves; local rank l of every host exchanges
    part l with aggregator l.
    """
    _check(hosts, local, 1)
    nranks = hosts * local

    def rank_steps(rank: int) -> Iterator[Step]:
        host, own = divmod(rank, local)
        mates = [host * local + other for other in range(local)]
        others = mates[own + 1 :] + mates[:own]
        for mate in others:
            yield send(inp(mate % local), mate)
        if local > 1:
            yield recv_reduce_all(inp(own), out(own), mates)
        yield send(out(own) if local > 1 else inp(own), nranks + own)
        yield recv(out(own), nranks + own)
        for mate in others:
            yield send(out(own), mate)
        for mate in reversed(others):
            yield recv(out(mate % local), mate)

    def aggregator(rail: int) -> Iterator[Step]:
        members = [host * local + rail for host in range(hosts)]
        yield recv_reduce_all(None, scratch(rail), members)
        for rank in members:
            yield send(scratch(rail), rank)

    programs = [rank_steps(rank) for rank in range(nranks)]
    programs += [aggregator(rail) for rail in range(local)]
    return _schedule("rail_trees", nranks, programs, local, local)


#: form of each collective that any number of aggregators runs
STARS: dict[Collective, Callable[[int, int, int], Schedule]] = {
    Collective.ALL_REDUCE: star,
    Collective.REDUCE_SCATTER: star_scatter,
    Collective.ALL_GATHER: star_gather,
}


def forms(
    collective: Collective, nranks: int, aggregators: int, hosts: int = 1, slices: int = SLICES
) -> tuple[Schedule, ...]:
    """Return the schedules of a collective that use all of ``aggregators``, the star first.

    Args:
        hosts: Hosts of the ranks, each with the ranks of one range of equal length; 1 if they are
            not.
        slices: Slices of each aggregator's share.
    """
    found = [STARS[collective](nranks, aggregators, slices)]
    if collective is Collective.ALL_REDUCE:
        group = -(-nranks // max(1, aggregators - 1))
        if group > 1 and -(-nranks // group) == aggregators - 1 > 1:
            found.append(two_level(nranks, group, slices))
        if hosts > 1 and nranks == hosts * aggregators:
            found.append(rail_trees(hosts, aggregators))
    return tuple(found)
