"""Copies of copy engines: each byte of the schedule once, no two ranks to one peer at a time."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from miraccl.errors import InvalidUsage
from miraccl.executor.cuda.copies import BlockCopy, block_copies, faster_min_bytes, is_supported
from miraccl.executor.cuda.staged_copies import ALGORITHMS
from miraccl.planning.cta_limits import CtaLimits
from miraccl.runtime.gpu.engines import CopyEngines
from miraccl.schedule import catalog
from miraccl.types import Collective


@pytest.mark.parametrize("nranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "collective", [collective for collective in Collective if is_supported(collective, 3)]
)
def test_every_block_arrives_once(collective: Collective, nranks: int) -> None:
    schedule = catalog.build("one_shot", collective, nranks)
    all_copies = [block_copies(schedule, rank) for rank in range(nranks)]
    arrived = {
        (copy.peer, copy.target): (rank, copy.source)
        for rank, copies in enumerate(all_copies)
        for copy in copies
    }
    assert len(arrived) == sum(map(len, all_copies)) == nranks * nranks
    for (peer, target), (rank, source) in arrived.items():
        assert target == rank
        assert source == (peer if collective is Collective.ALL_TO_ALL else 0)


@pytest.mark.parametrize("nranks", [2, 3, 8])
def test_no_two_ranks_write_to_one_peer_at_a_time(nranks: int) -> None:
    schedule = catalog.build("one_shot", Collective.ALL_GATHER, nranks)
    for place in range(nranks):
        assert {block_copies(schedule, rank)[place].peer for rank in range(nranks)} == set(
            range(nranks)
        )


def test_the_own_copy_is_first() -> None:
    assert block_copies(catalog.build("one_shot", Collective.ALL_GATHER, 3), 1)[0] == BlockCopy(
        peer=1, source=0, target=1
    )


@pytest.mark.parametrize(
    ("algo", "collective"),
    [
        ("ring", Collective.ALL_GATHER),
        ("ring", Collective.ALL_REDUCE),
        ("chain", Collective.BROADCAST),
    ],
)
def test_copy_engines_reject_reductions(algo: str, collective: Collective) -> None:
    with pytest.raises(InvalidUsage, match="copy engines"):
        block_copies(catalog.build(algo, collective, 3), 1)


@pytest.mark.parametrize(
    ("nranks", "none", "windows"),
    [(2, False, True), (2, False, False), (4, False, True), (4, True, False)],
)
def test_fast_calls_are_disabled_where_copy_engines_may_run(
    nranks: int, none: bool, windows: bool
) -> None:
    """Fast calls do not know window positions: they are disabled where positions decide."""
    gpu, kernels, comm_args = Mock(), Mock(), Mock()
    engines = CopyEngines(
        gpu, kernels, comm_args, Mock(nranks=nranks), CtaLimits(max_sms=128, copy_engines_only=none)
    )
    for collective in Collective:
        for nbytes in (1, 1 << 20, 1 << 30):
            taken = none and collective in ALGORITHMS
            if windows and is_supported(collective, nranks):
                taken = nbytes * (nranks - 1) >= faster_min_bytes(collective, nranks)
            assert engines.may_handle(collective, windows, nbytes) is taken
