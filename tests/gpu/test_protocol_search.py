"""Tools of the proofs in ``test_protocols``: single operations, combined steps, and the partial
order
agree.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from miraccl.types import Collective

from .protocols.chain import chain
from .protocols.chunks import ChunkQueue, chunks
from .protocols.chunks import ChunkRules as Bulk
from .protocols.order import unordered
from .protocols.program import Kind, MemoryCell, ModelSystem, Thread
from .protocols.ring import ring
from .protocols.rows import warp_queue
from .protocols.search import search
from .protocols.shots import rooted, shots
from .protocols.steps import StepRules as Simple
from .protocols.steps import line, steps
from .protocols.trees import trees

MOST = 40_000  # states of a search


def agree(system: ModelSystem) -> bool:
    """Return True if a system is correct, by all three tools."""
    every, few, one = (
        search(system, every=True, most=MOST),
        search(system, most=MOST),
        unordered(system),
    )
    assert bool(every.wrong) == bool(few.wrong) == bool(one), f"{every}\n\n{few}\n\n{one}"
    return not one


def small_systems() -> Iterator[tuple[str, ModelSystem]]:
    for nslots in (1, 2, 3):
        for rounds in (1, 2):
            yield (
                f"shots {nslots} {rounds}",
                shots(
                    2, tiles=6 - rounds, nslots=nslots, lookahead=int(nslots == 3), rounds=rounds
                ),
            )
        yield f"ring {nslots}", ring(2, tiles=5, nslots=nslots)
    for weaker in (
        {},
        {"awaits_cleared": False},
        {"early": 1},
        {"all_acks": True},
        {"hellos": False},
        {"halves": 1},
    ):
        yield f"chain {weaker}", chain(2, tiles=3, nslots=1, launches=2, **weaker)
    for awaits_cleared in (True, False):
        yield (
            f"shots, settles {awaits_cleared}",
            shots(2, tiles=5, nslots=4, lookahead=1, awaits_cleared=awaits_cleared),
        )
        yield (
            f"tree, settles {awaits_cleared}",
            trees(
                Collective.ALL_REDUCE,
                2,
                tiles=5,
                nslots=2,
                which=(0,),
                awaits_cleared=awaits_cleared,
            ),
        )
    for halves in (1, 2):
        yield (
            f"three ranks, halves {halves}",
            shots(3, tiles=1, nslots=1, lookahead=0, launches=3, halves=halves),
        )
        yield f"two threads, halves {halves}", rooted(2, broadcasts=True, launches=3, halves=halves)
    for nslots in (1, 2):
        for more in (
            {},
            {"left": 0},
            {"fences": False},
            {"last_heads": False},
            {"reads": True},
            {"reads": True, "last_heads": False},
        ):
            yield f"steps {nslots} {more}", steps(line(2, 3), Simple(nslots=nslots, **more))
    for more in ({}, {"early": 1}, {"credit_first": True}):
        yield f"lane {more}", warp_queue([1, 2, 1, 2, 2], fifo=4, quarter=1, **more)
    for more in ({}, {"fences": False}, {"waits_freed": False}):
        yield (
            f"chunks {more}",
            chunks([[ChunkQueue(1, (3,), 0, 2)]], Bulk(**more), blocks=1, taking=1),
        )


SMALL = dict(small_systems())


@pytest.mark.parametrize("name", SMALL)
def test_kernels(name: str) -> None:
    agree(SMALL[name])


def test_correct_and_weakened_kernels() -> None:
    assert 10 < sum(not unordered(system) for system in SMALL.values()) < len(SMALL) - 10


def random_system(rng: random.Random) -> ModelSystem:
    """Return two or three ranks with random sends and receives, usually nearly correct."""
    nranks, launches = rng.choice([2, 2, 3]), rng.choice([1, 1, 2, 3])
    system = ModelSystem(nranks)
    threads = [system.thread(rank) for rank in range(nranks)]
    ways = []
    for number in range(rng.randint(1, 4)):
        src, dst = rng.sample(range(nranks), 2)
        kind = rng.choice([Kind.PACKET, Kind.PACKET, *Kind])
        ways.append(
            (
                threads[src],
                threads[dst],
                [
                    MemoryCell(f"cell {number} of half {parity}", dst, kind, parity)
                    for parity in range(2)
                ],
            )
        )
    halves = rng.choice([1, 2, 2])
    for launch in range(launches):
        for thread in threads:
            thread.begin(launch, launch % halves)
        random_launch(
            rng,
            [(source, target, cells[launch % halves]) for source, target, cells in ways],
            8 // launches,
        )
        for thread in threads:
            thread.end()
    return system


def random_launch(
    rng: random.Random, ways: list[tuple[Thread, Thread, MemoryCell]], most: int
) -> None:
    sent: Counter[MemoryCell] = Counter()
    taken: Counter[MemoryCell] = Counter()

    def recv(target: Thread, cell: MemoryCell) -> None:
        reads = {Kind.PACKET: target.recv, Kind.COUNTER: target.reach, Kind.BUFFER: target.read}
        reads.get(cell.kind, target.wait_for)(cell, taken[cell])
        taken[cell] += 1

    for _ in range(rng.randint(2, most)):
        source, target, cell = rng.choice(ways)
        if sent[cell] > taken[cell] and rng.random() < 0.75:
            recv(target, cell)
            if cell.kind is Kind.PACKET and rng.random() < 0.6:
                target.seen_empty(cell)
        else:
            source.store(cell, sent[cell])
            sent[cell] += 1
            if rng.random() < 0.3:
                source.fence()
    for _, target, cell in ways:
        while taken[cell] < sent[cell] and (cell.kind is Kind.PACKET or rng.random() < 0.8):
            recv(target, cell)
        if cell.kind is not Kind.PACKET and sent[cell]:
            target.clear(cell, sent[cell] - 1)


def test_random_systems() -> None:
    right = sum(agree(random_system(random.Random(seed))) for seed in range(300))
    assert 30 < right < 270
