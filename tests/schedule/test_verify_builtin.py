"""Every built-in schedule is proved right: for 1 to 33 ranks, in and out of place, direct and in the order of the ranks where the
catalog says so."""

from __future__ import annotations

import pytest

from miraccl.errors import ScheduleError
from miraccl.schedule import catalog
from miraccl.schedule.layout import in_place_forms
from miraccl.schedule.verify import is_direct_safe, verify
from miraccl.types import Collective
from tests.schedule.helpers import ALL_TO_ALL, BUILTIN, schedules

#: every built-in schedule runs on FIFOs of two messages; the executors have more
SHALLOW = 2


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_right_for_1_to_33_ranks(name, collective):
    """A proof with ``direct`` is also one without, so that each size takes one per place."""
    ordered = catalog.get(name).rank_ordered
    for schedule in schedules(name, collective, range(1, 34)):
        for in_place in in_place_forms(collective):
            direct = catalog.supports_direct(
                name, collective, schedule.nranks, schedule.root, in_place=in_place
            )
            verify(
                schedule, in_place=in_place, fifo_depth=SHALLOW, direct=direct, rank_ordered=ordered
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
def test_right_for_many_ranks(name, collective, nranks):
    for schedule in schedules(name, collective, (nranks,)):
        verify(
            schedule,
            in_place=collective is not ALL_TO_ALL,
            rank_ordered=catalog.get(name).rank_ordered,
        )


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_direct_is_declared_as_it_is(name, collective):
    """What is declared is safe for every size (above); what is not declared is unsafe for some."""
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
def test_what_is_not_declared_as_ordered_is_not(name, collective):
    """What is declared is, for every size (above)."""
    for schedule in schedules(name, collective, (4, 8)):
        with pytest.raises(ScheduleError, match="in the order of the ranks"):
            verify(schedule, rank_ordered=True)


@pytest.mark.parametrize(("name", "collective"), BUILTIN)
def test_addressable_memory_is_declared_as_it_is(name, collective):
    for schedule in schedules(name, collective, (2, 4, 5)):
        assert schedule.needs_addressable_memory == catalog.get(name).needs_addressable_memory
