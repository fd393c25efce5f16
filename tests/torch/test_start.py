"""How a group begins, where that does not go well: the others are told, and nothing stays open."""

from __future__ import annotations

import datetime
import threading
import types
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError)

import torch
import torch.distributed as dist

from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, SystemFailure
from miraccl.torch import start
from tests.support.accidents import few_descriptors, open_files


@pytest.fixture
def no_meeting_point_is_left() -> Iterator[None]:
    files, threads = open_files(), threading.enumerate()
    yield
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("miraccl") and thread not in threads]
    assert open_files() <= files


def meet(store: dist.Store, rank: int, patience: float) -> None:
    """One of two ranks on its way into a group."""
    timeout = datetime.timedelta(seconds=patience)
    opts = types.SimpleNamespace(timeout=timeout, group_id="", group_rank=rank, global_ranks_in_group=[])
    start._meet(store, rank, 2, Deadline.after(patience), start._NewGroup(opts))


def test_a_rank_0_that_is_short_of_descriptors_tells_the_others(no_meeting_point_is_left: None) -> None:
    store = dist.HashStore()
    with few_descriptors(0), pytest.raises(SystemFailure, match="Too many open files"):
        meet(store, 0, 1.0)
    with pytest.raises(BootstrapError, match=r"rank 0 could not open the meeting point: .*Too many open files"):
        meet(store, 1, 1.0)


def test_a_rank_0_that_gives_up_closes_the_meeting_point(no_meeting_point_is_left: None) -> None:
    late = "no hub of this job answered"  # where the thread of the meeting point has not come to it by then
    with pytest.raises(BootstrapError, match=f"rank 1 of 2 never arrived|{late}"):
        meet(dist.HashStore(), 0, 0.05)


def test_a_store_that_fails_leaves_no_meeting_point(no_meeting_point_is_left: None) -> None:
    class Gone(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="the store is gone"):
        meet(Gone(), 0, 1.0)


def test_a_group_of_one_needs_no_meeting_point() -> None:
    before = threading.enumerate()
    dist.init_process_group("miraccl", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert not [thread for thread in threading.enumerate() if thread.name == "miraccl-hub" and thread not in before]
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
