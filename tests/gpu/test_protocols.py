"""Rules by which kernels reuse memory (docs/design/kernels.md): each is sufficient, and each is
necessary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from miraccl.executor.cuda import layout, lower, schedules, staged_copies
from miraccl.executor.cuda.buffer_halves import min_slots
from miraccl.executor.cuda.plan import TREES, DevicePlan, Request
from miraccl.schedule import catalog
from miraccl.schedule.algos import double_binary_tree
from miraccl.schedule.ir import Schedule
from miraccl.types import Collective, DType, RedOp

from .protocols.chain import chain
from .protocols.chunks import ChunkQueue, chunks
from .protocols.chunks import ChunkRules as Bulk
from .protocols.order import unkept, unordered
from .protocols.program import ModelSystem
from .protocols.ring import ring
from .protocols.rows import warp_queue
from .protocols.search import search
from .protocols.shots import parts, rooted, shots
from .protocols.staged import StagedRules as Copies
from .protocols.staged import staged
from .protocols.steps import StepRules as Simple
from .protocols.steps import line, steps
from .protocols.trees import trees

RANKS = range(2, layout.MAX_RANKS + 1)
ONE_WAY = (Collective.BROADCAST, Collective.REDUCE)
MOST = 40_000  # states of a search
SCHEDULES = [
    ("ring", Collective.ALL_REDUCE),
    ("ring", Collective.ALL_GATHER),
    ("ring", Collective.REDUCE_SCATTER),
    ("chain", Collective.BROADCAST),
    ("chain", Collective.REDUCE),
    ("one_shot", Collective.ALL_REDUCE),
    ("two_shot", Collective.ALL_REDUCE),
    (TREES, Collective.ALL_REDUCE),
    (TREES, Collective.BROADCAST),
]


def lookahead_of(algo: str, nranks: int, nslots: int) -> int:
    """Return the lookahead of an operation of several tiles."""
    request = Request(
        collective=Collective.ALL_REDUCE, dtype=DType.FLOAT32, op=RedOp.SUM, count=1, nranks=nranks
    )
    plan = DevicePlan(algo=algo, proto="ll128", blocks=1, threads=32, unroll=1)
    return lower._lookahead(plan, request, 1000, nslots)


def built(algo: str, collective: Collective, nranks: int) -> Schedule:
    return catalog.build(algo, collective, nranks)


def holds(system: ModelSystem) -> bool:
    """Return True if a system is correct; ``search`` and ``order`` must agree."""
    found = search(system, most=MOST)
    assert bool(found.wrong) == bool(unordered(system)), (
        f"{found}\nbut {unordered(system) or 'all is in order'}"
    )
    return not found.wrong


def always(system: ModelSystem) -> bool:
    """Return True if a system, too large to be searched, is correct."""
    return not unordered(system)


# ---- packets


def enough(lookahead: int, rounds: int) -> int:
    """Return the slots that shots need."""
    return 2 * lookahead + 2 if rounds == 1 else min(2 * lookahead + 2, lookahead + 3)


@pytest.mark.parametrize("nranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_shots_need_twice_the_lookahead_and_two_slots(nranks: int, rounds: int) -> None:
    look = holds if nranks * rounds < 6 else always
    for lookahead in (0, 1):
        nslots = enough(lookahead, rounds)
        assert look(
            shots(nranks, tiles=2 * nslots + 1, nslots=nslots, lookahead=lookahead, rounds=rounds)
        )
        assert not look(
            shots(
                nranks, tiles=2 * nslots + 1, nslots=nslots - 1, lookahead=lookahead, rounds=rounds
            )
        )
        assert not look(
            shots(
                nranks,
                tiles=2 * nslots + 1,
                nslots=nslots,
                lookahead=lookahead,
                rounds=rounds,
                awaits_cleared=False,
            )
        )


@pytest.mark.parametrize("rounds", [1, 2])
def test_shots_of_any_number_of_ranks_and_slots(rounds: int) -> None:
    """Production values are correct, and one_shot is at its limit. two_shot could send further
    ahead.
    """
    for nranks in (2, 3, 8):
        for nslots in range(2, 10):
            usual = lookahead_of("one_shot", nranks, nslots)
            most = max(
                lookahead for lookahead in range(nslots) if enough(lookahead, rounds) <= nslots
            )
            assert usual <= most
            assert usual == most or rounds == 2
            for lookahead in {usual, most}:
                assert always(
                    shots(
                        nranks,
                        tiles=2 * nslots + 1,
                        nslots=nslots,
                        lookahead=lookahead,
                        rounds=rounds,
                    )
                )
            assert not always(
                shots(
                    nranks, tiles=2 * nslots + 1, nslots=nslots, lookahead=most + 1, rounds=rounds
                )
            )


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("counts", [(2,), (2, 2), (2, 1, 1, 2), (1, 2, 1, 3, 3), (5, 4, 1)])
def test_double_buffered_tiles_are_launches(counts: Sequence[int], nranks: int) -> None:
    """After any launch and before any other (``Thread.begin``)."""
    look = holds if nranks == 2 and sum(counts) < 5 else always
    assert look(parts(nranks, counts))
    assert always(parts(nranks, counts, threads=2))
    assert len(counts) > 1 or not unkept(parts(nranks, counts))
    assert look(parts(nranks, counts, awaits_cleared=False)) == (counts == (2,)), (
        "nobody uses these places again"
    )
    assert always(parts(nranks, counts, awaits_peers=False)) == (max(counts) == 2)
    assert always(parts(nranks, counts, uneven=True, threads=2)) == (counts == (2,))


@pytest.mark.parametrize("nranks", RANKS)
def test_a_ring_needs_one_slot_more_than_ranks(nranks: int) -> None:
    least = min_slots("ring", nranks)
    look = holds if nranks == 2 else always
    for nslots in (least, least + 1):
        assert look(ring(nranks, tiles=2 * nslots + 2, nslots=nslots))
        assert not look(ring(nranks, tiles=2 * nslots + 2, nslots=nslots, awaits_cleared=False))
    assert not look(ring(nranks, tiles=2 * least + 2, nslots=least - 1))


def test_a_ring_of_three_with_one_slot_fewer() -> None:
    """A search of nine tiles in four slots, 655,140 states, finds no error."""
    assert search(ring(3, tiles=4, nslots=min_slots("ring", 3) - 1), most=MOST).wrong


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_acks_of_a_chain(nranks: int) -> None:
    for nslots in (1, 2) if nranks < 4 else (1,):
        assert holds(chain(nranks, tiles=2 * nslots + 1, nslots=nslots))
        assert not holds(chain(nranks, tiles=2 * nslots + 1, nslots=nslots, early=1))
        assert not holds(chain(nranks, tiles=2 * nslots + 1, nslots=nslots, awaits_cleared=False))
        assert not holds(chain(nranks, tiles=2 * nslots + 1, nslots=nslots, all_acks=True)), (
            "an ack that nobody waits for stays behind"
        )


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("collective", ONE_WAY)
def test_acks_along_trees(collective: Collective, nranks: int) -> None:
    look = holds if nranks <= 4 else always
    for nslots in (1, 2):
        for which in ((0,), (1,)):
            assert look(trees(collective, nranks, tiles=2 * nslots + 1, nslots=nslots, which=which))
            assert not look(
                trees(collective, nranks, tiles=2 * nslots + 1, nslots=nslots, which=which, early=1)
            )
            assert not look(
                trees(
                    collective,
                    nranks,
                    tiles=2 * nslots + 1,
                    nslots=nslots,
                    which=which,
                    awaits_cleared=False,
                )
            )


@pytest.mark.parametrize("nranks", RANKS)
def test_all_reduce_along_trees_needs_two_slots_more_than_its_lag(nranks: int) -> None:
    usual = double_binary_tree.latency(Collective.ALL_REDUCE, nranks)
    for nslots in range(2, usual + 4):
        lag = lookahead_of(TREES, nranks, nslots)
        look = (
            holds
            if nranks == 2 or (nranks == 3 and nslots <= 4) or (nranks == 4 and nslots == 2)
            else always
        )
        for which in ((0,), (1,)) if look is holds else ((0, 1),):
            assert look(
                trees(
                    Collective.ALL_REDUCE,
                    nranks,
                    tiles=2 * nslots + 1,
                    nslots=nslots,
                    lag=lag,
                    which=which,
                )
            )
            assert not look(
                trees(
                    Collective.ALL_REDUCE,
                    nranks,
                    tiles=2 * nslots + 1,
                    nslots=nslots,
                    lag=nslots - 1,
                    which=which,
                )
            )
            assert not look(
                trees(
                    Collective.ALL_REDUCE,
                    nranks,
                    tiles=2 * nslots + 1,
                    nslots=nslots,
                    lag=lag,
                    which=which,
                    awaits_cleared=False,
                )
            )


# ---- from launch to launch


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_two_halves_suffice_if_results_contain_all_ranks(nranks: int) -> None:
    tree = double_binary_tree.latency(Collective.ALL_REDUCE, nranks)
    for halves in (2, 1):
        look = holds if nranks < 4 else always
        assert look(shots(nranks, tiles=1, nslots=1, lookahead=0, launches=4, halves=halves)) == (
            halves == 2
        )
        assert look(
            shots(nranks, tiles=1, nslots=1, lookahead=0, rounds=2, launches=4, halves=halves)
        ) == (halves == 2)
        look = holds if nranks < 3 else always
        assert look(ring(nranks, tiles=1, nslots=1, launches=4, halves=halves)) == (halves == 2)
        assert always(
            trees(
                Collective.ALL_REDUCE,
                nranks,
                tiles=3,
                nslots=3,
                lag=min(2, tree),
                launches=5,
                halves=halves,
            )
        ) == (halves == 2)


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_two_halves_and_hellos_suffice_if_data_flow_one_way(nranks: int) -> None:
    for halves, hellos in ((2, True), (1, True), (2, False)):
        right = halves == 2 and hellos
        assert (
            holds(chain(nranks, tiles=1, nslots=1, launches=4, halves=halves, hellos=hellos))
            == right
        )
        for broadcasts in (True, False):
            look = holds if nranks == 2 else always
            assert (
                look(
                    rooted(nranks, broadcasts=broadcasts, launches=4, halves=halves, hellos=hellos)
                )
                == right
            )
        for collective in ONE_WAY:
            assert (
                holds(
                    trees(
                        collective,
                        nranks,
                        tiles=1,
                        nslots=1,
                        which=(0,),
                        launches=3,
                        halves=halves,
                        hellos=hellos,
                    )
                )
                == right
            )


def all_to_all_kernels(nranks: int, tiles: int) -> Iterator[ModelSystem]:
    """Return a launch of each kernel whose results contain data of all ranks."""
    nslots = min(tiles, 4)
    for rounds in (1, 2):
        yield shots(nranks, tiles=tiles, nslots=nslots, lookahead=nslots // 4, rounds=rounds)
    yield ring(nranks, tiles=2 * tiles, nslots=min(2 * tiles, nranks + 1))
    yield trees(Collective.ALL_REDUCE, nranks, tiles=tiles, nslots=nslots, lag=min(2, tiles - 1))


def one_way(nranks: int, tiles: int, hellos: bool = True) -> Iterator[ModelSystem]:
    """Return a launch of each other packet kernel."""
    nslots = min(tiles, 4)
    for collective in ONE_WAY:
        yield trees(collective, nranks, tiles=tiles, nslots=nslots, hellos=hellos)
        yield rooted(nranks, broadcasts=collective is Collective.BROADCAST, hellos=hellos)
    yield chain(nranks, tiles=tiles, nslots=nslots, hellos=hellos)


@pytest.mark.parametrize("nranks", RANKS)
def test_any_kernel_may_follow_any_other(nranks: int) -> None:
    for tiles in (1, 11):
        for system in (*all_to_all_kernels(nranks, tiles), *one_way(nranks, tiles)):
            assert unkept(system) == ""
    for algo, collective in SCHEDULES:
        assert (
            unkept(steps(built(algo, collective, nranks), Simple(nslots=layout.FIFO_SLOTS))) == ""
        )
    for system in one_way(nranks, 1, hellos=False):
        assert "may end before all have begun" in unkept(system)


# ---- protocol Simple


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("algo", "collective"), SCHEDULES)
def test_heads_and_tails(algo: str, collective: Collective, reads: bool) -> None:
    for nranks in (2, 3, 4, 8):
        schedule = built(algo, collective, nranks)
        assert always(steps(schedule, Simple(nslots=layout.FIFO_SLOTS, reads=reads), rounds=3))
        assert always(steps(schedule, Simple(nslots=layout.FIFO_SLOTS, reads=reads), launches=5))
        assert not always(
            steps(schedule, Simple(nslots=layout.FIFO_SLOTS, reads=reads), launches=3, halves=1)
        )
        assert not always(
            steps(schedule, Simple(nslots=layout.FIFO_SLOTS, fences=False, reads=reads))
        )
        assert not always(
            steps(schedule, Simple(nslots=layout.FIFO_SLOTS, last_heads=False, reads=reads))
        )


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("nranks", [2, 3])
def test_heads_and_tails_of_a_few_messages(nranks: int, reads: bool) -> None:
    """Two slots, each used three times; unread messages are not overwritten."""
    look = holds if nranks == 2 else always
    assert look(steps(line(nranks, 5), Simple(nslots=2, reads=reads)))
    for weaker in ({"left": 0}, {"fences": False}, {"last_heads": False}):
        assert not look(steps(line(nranks, 5), Simple(nslots=2, reads=reads, **weaker)))


@pytest.mark.parametrize("nranks", RANKS)
def test_signals(nranks: int) -> None:
    """All signals are awaited, so none arrives after its word is cleared; an all_reduce hears from
    all
    ranks.
    """
    for algo, collective in (
        ("two_shot_put", Collective.ALL_REDUCE),
        ("two_shot_put", Collective.ALL_GATHER),
    ):
        schedule = built(algo, collective, nranks)
        assert unkept(steps(schedule, Simple(nslots=layout.FIFO_SLOTS), rounds=2)) == ""
        assert always(
            steps(schedule, Simple(nslots=layout.FIFO_SLOTS, awaits_peers=False), launches=4)
        )
        assert not always(
            steps(
                schedule, Simple(nslots=layout.FIFO_SLOTS, awaits_peers=False), launches=3, halves=1
            )
        )
    assert (
        unkept(
            steps(
                built("dissemination", Collective.BARRIER, nranks),
                Simple(nslots=layout.FIFO_SLOTS),
                rounds=2,
            )
        )
        == ""
    )


def test_two_slots_of_a_fifo_are_enough_for_the_schedules_of_the_catalog() -> None:
    looked = 0
    for algo in catalog.names():
        entry = catalog.get(algo)
        if not entry.builtin or entry.network:  # the FIFOs between hosts are deeper
            continue
        for collective in entry.collectives:
            for nranks in (n for n in (2, 3, 4, 8) if entry.supports(collective, n)):
                schedule = built(algo, collective, nranks)
                assert schedules.fifo_slots(schedule) == layout.FIFO_SLOTS
                for channel in schedule.channels:
                    assert (
                        unkept(
                            steps(
                                replace(schedule, channels=(channel,)),
                                Simple(nslots=layout.FIFO_SLOTS),
                            )
                        )
                        == ""
                    )
                    looked += 1
    assert looked > 60


def test_a_ring_needs_two_slots_of_a_fifo() -> None:
    """With one slot, all ranks have sent and wait. Every schedule is verified with two."""
    for nranks in (2, 3, 4, 8):
        for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER):
            schedule = built("ring", collective, nranks)
            assert always(steps(schedule, Simple(nslots=layout.FIFO_SLOTS)))
            if nranks > 2 or collective is Collective.ALL_REDUCE:
                assert not always(steps(schedule, Simple(nslots=layout.FIFO_SLOTS - 1)))


def test_ranks_without_op_records_overrun_the_halves() -> None:
    """``await_peer_ops``: heads inform a sender only about its next rank. The op log needs two
    entries.
    """
    schedule = line(4, 1)
    assert always(steps(schedule, Simple(nslots=2), launches=5))
    assert not always(steps(schedule, Simple(nslots=2, awaits_peers=False), launches=5))
    assert not always(steps(schedule, Simple(nslots=2, entries=1), launches=5))
    assert holds(steps(line(2, 1), Simple(nslots=2), launches=3))


# ---- messages


def test_credit_for_rows() -> None:
    rng = random.Random(1)
    rows = layout.FIFO_ROWS
    for _ in range(40):
        counts = [rng.randint(1, 8) for _ in range(30)]
        assert always(warp_queue(counts, fifo=rows, quarter=rows // 4))
    assert not always(warp_queue([1] * 40, fifo=rows, quarter=rows // 4, early=1))
    assert not always(warp_queue([8] * 8, fifo=rows, quarter=rows // 4, credit_first=True))
    for counts in ([1, 2, 1, 2, 2, 1, 2, 1], [2] * 6):
        assert holds(warp_queue(counts, fifo=4, quarter=1))
        assert not holds(warp_queue(counts, fifo=4, quarter=1, credit_first=True))


def test_a_row_fifo_holds_a_warps_rows_and_those_without_credit() -> None:
    """8 rows, and up to a quarter less one that were received without credit: 11 would suffice."""
    counts = [3, 8, 5, 1, 8, 8, 2, 7, 8, 8, 4, 8]
    assert always(warp_queue(counts, fifo=8 + 3, quarter=4))
    assert not always(warp_queue(counts, fifo=8 + 2, quarter=4))


@pytest.mark.parametrize(("blocks", "taking"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_grants_and_slots_of_large_messages(blocks: int, taking: int) -> None:
    queues = [[ChunkQueue(1, (5, 4), 0, 2)]]
    assert holds(chunks(queues, Bulk(), blocks=blocks, taking=taking))
    for weaker in ({"fences": False}, {"waits_freed": False}, {"waits_grant": False}):
        assert not holds(chunks(queues, Bulk(**weaker), blocks=blocks, taking=taking))


def test_queues_that_share_the_pool_from_launch_to_launch() -> None:
    both, second, first = (
        [ChunkQueue(1, (4,), 0, 2), ChunkQueue(2, (3, 3), 2, 2)],
        [ChunkQueue(2, (5,), 0, 4)],
        [ChunkQueue(1, (3, 6), 0, 4)],
    )
    for blocks, taking in ((1, 1), (2, 3), (3, 2)):
        assert always(chunks([both, second, first, both], Bulk(), blocks=blocks, taking=taking))
        assert not always(
            chunks(
                [both, second, first, both], Bulk(waits_grant=False), blocks=blocks, taking=taking
            )
        )


def test_every_block_of_a_sender_has_a_chunk() -> None:
    """A block without one might miss a grant. Large messages have more chunks than a launch has
    blocks.
    """
    assert not holds(chunks([[ChunkQueue(1, (1, 1, 1), 0, 2)]], Bulk(), blocks=2, taking=1))
    least = -(
        -(layout.BULK_MIN_BYTES - 16 * max(first for _, first in layout.GROUP_SIZES.values()))
        // layout.CHUNK_BYTES
    )
    assert least == 1024 > 2 * 256, "two blocks for each of more multiprocessors than a GPU has"


def test_slots_that_are_not_reused_are_not_reported_free() -> None:
    """The word of a slot's last chunk would not be awaited.

    The next message's word for the slot comes from another multiprocessor and may land before it;
    the sender would wait for ever.
    """
    queues = [[ChunkQueue(1, (4, 4), 0, 3)]]
    assert holds(chunks(queues, Bulk(), blocks=1, taking=2))
    assert not holds(chunks(queues, Bulk(all_freed=True), blocks=1, taking=2))
    assert holds(chunks(queues, Bulk(all_freed=True), blocks=1, taking=2, ordered=True))


# ---- copies


@pytest.mark.parametrize("nranks", [2, 3, 4])
@pytest.mark.parametrize("collective", staged_copies.ALGORITHMS)
def test_copies_through_staging_memory(collective: Collective, nranks: int) -> None:
    """Slots are used three times, in two operations; the halves are empty when the next launch
    begins.
    """
    schedule = built(staged_copies.ALGORITHMS[collective], collective, nranks)
    chunks = 2 * layout.COPY_SLOTS + 1
    assert always(staged(schedule, Copies(), chunks=chunks, operations=2))
    for weaker in ({"fences": False}, {"all_free": True}, {"barriers": False}):
        assert not always(staged(schedule, Copies(**weaker), chunks=chunks, operations=2))
    assert not always(staged(schedule, Copies(early=1), chunks=chunks))


# ---- the documentation


def test_the_trace_in_the_documentation() -> None:
    found = str(search(chain(2, tiles=2, nslots=1, awaits_cleared=False, hellos=False)))
    text = (Path(__file__).parents[2] / "docs" / "design" / "kernels.md").read_text()
    assert found in text, found
