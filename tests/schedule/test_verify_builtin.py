"""Every built-in schedule is verified for up to 33 ranks (``SIZES``), in and out of place.

Direct safety and rank order are verified if the catalog declares them.
"""

from __future__ import annotations

import pytest

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.layout import in_place_forms
from miraccl.schedule.verify import is_direct_safe, verify
from miraccl.types import Collective
from tests.schedule.helpers import ALL_TO_ALL, BUILTIN, SIZES, schedules

#: every built-in schedule runs on FIFOs of two messages, but for some made for networks; the
#: executors have more
SHALLOW = 2
DEEPER = {"staggered_ring": 3}


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_correct_for_up_to_33_ranks(name, collective):
    """A proof with ``direct`` implies one without, so one proof per size and form is enough."""
    ordered = catalog.get(name).rank_ordered
    for schedule in schedules(name, collective, SIZES):
        for in_place in in_place_forms(collective):
            direct = catalog.supports_direct(
                name, collective, schedule.nranks, schedule.root, in_place=in_place
            )
            depth = DEEPER.get(name, SHALLOW)
            verify(
                schedule, in_place=in_place, fifo_depth=depth, direct=direct, rank_ordered=ordered
            )


@pytest.mark.parametrize(
    ("name", "collective", "nranks"),
    [
        ("ring", Collective.ALL_REDUCE, 100),
        ("double_binary_tree", Collective.ALL_REDUCE, 300),
        ("double_binary_tree", Collective.REDUCE, 255),
        ("recursive_halving_doubling", Collective.ALL_REDUCE, 100),
        ("recursive_doubling", Collective.ALL_REDUCE, 200),
        ("pat", Collective.ALL_GATHER, 73),
        ("pat", Collective.REDUCE_SCATTER, 73),
        ("bruck", Collective.ALL_GATHER, 77),
        ("bruck", Collective.ALL_TO_ALL, 65),
        ("two_shot", Collective.ALL_REDUCE, 64),
        ("two_shot_put", Collective.ALL_REDUCE, 64),
        ("pairwise", Collective.ALL_TO_ALL, 72),
        ("chain", Collective.BROADCAST, 512),
        ("dissemination", Collective.BARRIER, 200),
        ("one_shot", Collective.GATHER, 500),
    ],
)
def test_correct_for_many_ranks(name, collective, nranks):
    for schedule in schedules(name, collective, (nranks,)):
        verify(
            schedule,
            in_place=collective is not ALL_TO_ALL,
            rank_ordered=catalog.get(name).rank_ordered,
        )


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_undeclared_direct_is_unsafe(name, collective):
    """Collectives not declared as direct are unsafe for some size."""
    algorithm = catalog.get(name)
    for in_place in in_place_forms(collective):
        if collective not in (algorithm.direct_in_place if in_place else algorithm.direct):
            assert not all(
                is_direct_safe(schedule, in_place)
                for schedule in schedules(name, collective, range(2, 9))
            )


@pytest.mark.parametrize(
    ("name", "collective"),
    [case for case in BUILTIN if case[1].reduces and not catalog.get(case[0]).rank_ordered],
)
def test_undeclared_rank_order_does_not_hold(name, collective):
    """Algorithms not declared as rank_ordered are rejected with ``rank_ordered``."""
    for schedule in schedules(name, collective, (4, 8)):
        with pytest.raises(ScheduleError, match="in rank order"):
            verify(schedule, rank_ordered=True)


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_addressable_memory_is_declared(name, collective):
    for schedule in schedules(name, collective, (2, 4, 5)):
        assert schedule.needs_addressable_memory == catalog.get(name).needs_addressable_memory
