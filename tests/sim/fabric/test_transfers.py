"""Transfers: the compiled fabric against the interpreted one, and published completion times."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from miraccl.errors import InvalidUsage
from miraccl.sim.fabric import compiled, interpreted
from miraccl.sim.fabric.faults import LinkChange, both_directions
from miraccl.sim.fabric.topology import FabricTopology, LinkProfile, fat_tree, star
from miraccl.sim.fabric.transfers import (
    Balance,
    Control,
    FabricTransfer,
    TransferConfig,
    TransferRequest,
)

US, GIGA = 1_000, 1_000_000_000
PACKET, NBYTES = 4150, 2_000_000
PROFILE = LinkProfile(rate=100 * GIGA, latency=1 * US, queue=35 * PACKET, trimming=True)
#: The permutation of htsim's ``perm_16n_16c_2MB.cm``.
PERMUTATION_16 = {
    7: 5,
    15: 1,
    0: 13,
    14: 8,
    1: 3,
    6: 7,
    5: 11,
    9: 12,
    11: 4,
    3: 14,
    12: 15,
    2: 10,
    13: 2,
    10: 6,
    4: 0,
    8: 9,
}


def permutation(nhosts: int, seed: int, nbytes: int = NBYTES) -> list[FabricTransfer]:
    """Random cycle over all hosts."""
    order = list(range(nhosts))
    random.Random(seed).shuffle(order)
    return [FabricTransfer(order[i - 1], order[i], nbytes) for i in range(nhosts)]


def first_core_link(tree: FabricTopology) -> int:
    """Number of the first link from an aggregation switch to a core switch."""
    half = round((4 * tree.hosts) ** (1 / 3)) // 2
    core = tree.hosts + tree.switches - half * half
    return next(i for i, link in enumerate(tree.links) if link.target >= core)


TREE = fat_tree(4, PROFILE)
CORE = first_core_link(TREE)
SMALL = permutation(16, 1, 100_000)
DOWN = both_directions(LinkChange(time=5 * US, link=CORE, up=False), CORE + 1)


@pytest.mark.parametrize(
    ("transfers", "config", "changes", "profile"),
    [
        (SMALL, TransferConfig(), (), PROFILE),
        (
            [FabricTransfer(i, 15, 150_000, i * 700) for i in range(15)],
            TransferConfig(),
            (),
            PROFILE,
        ),
        (SMALL, TransferConfig(entropies=1), (), PROFILE),
        (SMALL, TransferConfig(balance=Balance.RECYCLE), DOWN, replace(PROFILE, mark_above=20_000)),
        (SMALL, TransferConfig(), DOWN, PROFILE),
        (SMALL, TransferConfig(), (LinkChange(time=0, link=CORE, rate=10 * GIGA),), PROFILE),
        (SMALL, TransferConfig(), (LinkChange(time=9 * US, link=CORE, loss=0.5),), PROFILE),
        (
            [*SMALL, *(FabricTransfer(i, 15, 100_000) for i in range(8))],
            TransferConfig(control=Control.SENDER, window=10),
            (),
            replace(PROFILE, trimming=False, mark_above=20_000, loss=0.01),
        ),
    ],
    ids=["spray", "incast", "ecmp", "recycle-down", "spray-down", "slow", "lossy", "sender"],
)
def test_compiled_and_interpreted_agree(
    transfers: list[FabricTransfer],
    config: TransferConfig,
    changes: tuple[LinkChange, ...],
    profile: LinkProfile,
) -> None:
    tree = TREE if profile is PROFILE else fat_tree(4, profile)
    request = TransferRequest(tree, transfers, config, changes, seed=7)
    result = compiled.run(request)
    assert result == interpreted.run(request), "also the number of events"
    assert result.slowest > 0


def slowest_us(
    tree: FabricTopology, transfers: list[FabricTransfer], entropies: int = 128
) -> float:
    config = TransferConfig(entropies=entropies)
    return compiled.run(TransferRequest(tree, transfers, config)).slowest / US


def test_published_bounds_on_16_hosts() -> None:
    """Bounds in us of the EQDS authors, htsim ``validate.txt``; ideal: 490 packets of 332 ns."""
    one, back = FabricTransfer(0, 13, NBYTES), FabricTransfer(13, 0, NBYTES)
    assert 163 < slowest_us(TREE, [one]) <= 180
    assert slowest_us(TREE, [one, back]) <= 190
    assert slowest_us(TREE, [FabricTransfer(i, 15, NBYTES) for i in range(15)]) <= 2500
    pairs = [FabricTransfer(a, b, NBYTES) for a, b in PERMUTATION_16.items()]
    assert slowest_us(TREE, pairs, entropies=128) <= 210
    assert 400 < slowest_us(TREE, pairs, entropies=1) <= 1300


def test_published_bounds_on_128_hosts() -> None:
    """A flow beside flows of hosts that send to many is not slowed by credits they cannot use."""
    tree = fat_tree(8, PROFILE)
    pairs = [(1, 0), (2, 0), *((2, 4 + i) for i in range(9))]
    pairs += [(3, 0), *((3, 13 + i) for i in range(9))]
    request = TransferRequest(tree, [FabricTransfer(a, b, NBYTES) for a, b in pairs])
    result = compiled.run(request)
    assert result.completion[0] / US <= 215
    assert result.slowest / US <= 2500
    assert slowest_us(tree, [FabricTransfer(i, 127, NBYTES) for i in range(127)]) <= 23_000


@pytest.mark.skipif(not os.environ.get("TEST_SLOW"), reason="17 million events; TEST_SLOW=1")
def test_published_bounds_on_1024_hosts() -> None:
    tree = fat_tree(16, PROFILE)
    assert slowest_us(tree, permutation(1024, 0), entropies=128) <= 220
    assert slowest_us(tree, permutation(1024, 0), entropies=1) <= 1300


def test_a_dead_core_link_stops_no_transfer() -> None:
    """Recycled entropies leave a dead link; spraying keeps losing a share of the packets."""
    down = both_directions(LinkChange(time=50 * US, link=CORE, up=False), CORE + 1)
    pairs = [FabricTransfer(a, b, NBYTES) for a, b in PERMUTATION_16.items()]
    tree = fat_tree(4, replace(PROFILE, mark_above=PROFILE.queue // 2))
    lost = {}
    for balance in Balance:
        config = TransferConfig(balance=balance)
        result = compiled.run(TransferRequest(tree, pairs, config, down))
        assert result.slowest > 0
        lost[balance] = result.lost
    assert lost[Balance.RECYCLE] < lost[Balance.SPRAY] / 2


def test_the_same_seed_gives_the_same_run() -> None:
    requests = [TransferRequest(TREE, SMALL, seed=seed) for seed in (1, 1, 2)]
    results = [compiled.run(request) for request in requests]
    assert results[0] == results[1] != results[2]


def test_a_run_ends_at_its_time_limit() -> None:
    request = TransferRequest(TREE, [FabricTransfer(0, 13, NBYTES)])
    for run in (compiled.run, interpreted.run):
        assert run(request, until=20 * US).completion == (-1,)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(InvalidUsage, match="host 3 to 3 of 16"):
        TransferRequest(TREE, [FabricTransfer(3, 3, 1)])
    with pytest.raises(InvalidUsage, match="must be even"):
        fat_tree(3, PROFILE)
    with pytest.raises(InvalidUsage, match="link 0 with jitter"):
        compiled.run(TransferRequest(star(2, LinkProfile(jitter=1)), [FabricTransfer(0, 1, 1)]))
