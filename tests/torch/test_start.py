"""Creation of groups that fails: every rank gets the reason and nothing stays open."""

from __future__ import annotations

import datetime
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

import torch
import torch.distributed as dist

from miraccl.bootstrap import create_hub
from miraccl.deadline import Deadline
from miraccl.errors import BootstrapError, SystemFailure
from miraccl.torch import group_creation, start, store_join
from tests.bootstrap.kit import PATIENCE, in_threads
from tests.support.fault_injection import limit_descriptors, open_files


@pytest.fixture
def no_meeting_point_is_left() -> Iterator[None]:
    files, threads = open_files(), threading.enumerate()
    yield
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("miraccl") and thread not in threads
    ]
    assert open_files() <= files


def meet(store: Any, rank: int, patience: float) -> int:
    """Join a group as one of two ranks; return how many ranks it has met."""
    timeout = datetime.timedelta(seconds=patience)
    opts = types.SimpleNamespace(
        timeout=timeout, group_id="", group_rank=rank, global_ranks_in_group=[]
    )
    with start._rendezvous(
        store, rank, 2, Deadline.after(patience), group_creation.GroupCreation(opts)
    ) as comm:
        return int(comm.all_reduce(np.ones(1))[0])


class WatchedStore:
    """A store of two ranks that signals when rank 1 has read the id."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.was_read = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        value = self.values[key]
        self.was_read.set()
        return value


def meet_again(store: WatchedStore) -> None:
    """Join as both ranks; rank 1 reads a stale id before rank 0 publishes a new one."""

    def later() -> int:
        assert store.was_read.wait(PATIENCE)
        return meet(store, 0, PATIENCE)

    store.was_read.clear()
    assert in_threads([later, lambda: meet(store, 1, PATIENCE)]) == [2, 2]
    assert store.values == {store_join.KEY: b"none"}


def test_a_rank_0_that_is_short_of_descriptors_tells_the_others(
    no_meeting_point_is_left: None,
) -> None:
    store = dist.HashStore()
    with limit_descriptors(0), pytest.raises(SystemFailure, match="Too many open files"):
        meet(store, 0, 1.0)
    with pytest.raises(
        BootstrapError, match=r"rank 0 cannot start the control plane: .*Too many open files"
    ):
        meet(store, 1, 1.0)


def test_a_second_try_after_a_failure_of_rank_0() -> None:
    """Report rank 0's failure to rank 1 once."""
    store = WatchedStore()
    with limit_descriptors(0), pytest.raises(SystemFailure, match="Too many open files"):
        meet(store, 0, 1.0)
    with pytest.raises(BootstrapError, match="rank 0 cannot start the control plane"):
        meet(store, 1, PATIENCE)
    meet_again(store)


def test_a_second_try_after_rank_0_has_waited_in_vain() -> None:
    store = WatchedStore()
    with pytest.raises(BootstrapError):
        meet(store, 0, 0.05)
    assert store.values == {store_join.KEY: b"none"}
    meet_again(store)


def test_a_second_try_while_rank_0_is_at_the_first() -> None:
    """Keep rank 1, which gave up, from joining the first attempt again."""

    def enough() -> None:
        raise BootstrapError("enough")

    store = WatchedStore()
    ident, root = create_hub(nranks=2)
    store.set(store_join.KEY, str(ident))
    with pytest.raises(BootstrapError, match="enough"):
        store_join._join_as_peer(store, 1, 2, Deadline.after(PATIENCE), enough)
    meet_again(store)
    assert root.alive
    root.close("the end of the test")


def test_a_second_try_after_rank_0_was_killed() -> None:
    """Start rank 1 anew while the store still holds the killed rank 0's id."""
    store = WatchedStore()
    ident, root = create_hub(nranks=2)
    root.close("killed")
    store.set(store_join.KEY, str(ident))
    meet_again(store)


def test_a_rank_0_that_gives_up_closes_the_meeting_point(no_meeting_point_is_left: None) -> None:
    with pytest.raises(
        BootstrapError
    ):  # in words that hang on how far the thread of the meeting point has come
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
        assert not [
            thread
            for thread in threading.enumerate()
            if thread.name == "miraccl-hub" and thread not in before
        ]
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
