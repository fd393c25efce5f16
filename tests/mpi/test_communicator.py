"""``init(mpi_comm)`` over objects that are no more than Get_rank, Get_size and bcast; ranks are
threads.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import miraccl
from miraccl.api import init
from tests.bootstrap.kit import in_threads

PATIENCE = 30.0


class Wire:
    """Stand-in for MPI: broadcasts rank 0's object."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.boxes: list[queue.Queue[Any]] = [queue.Queue() for _ in range(nranks)]
        self.broadcasts = 0

    def ranks(self) -> list[Comm]:
        return [Comm(self, rank) for rank in range(self.nranks)]


class Comm:
    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def Get_rank(self) -> int:  # noqa: N802
        return self.rank

    def Get_size(self) -> int:  # noqa: N802
        return self.wire.nranks

    def bcast(self, value: Any, root: int) -> Any:
        assert root == 0
        if self.rank != 0:
            assert value is None
            return self.wire.boxes[self.rank].get(timeout=PATIENCE)
        self.wire.broadcasts += 1
        for box in self.wire.boxes[1:]:
            box.put(value)
        return value


def _on_all(nranks: int, action: Callable[[Comm], Any]) -> tuple[Wire, list[Any]]:
    wire = Wire(nranks)
    return wire, in_threads([lambda comm=comm: action(comm) for comm in wire.ranks()])


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_same_ranks_in_the_same_order(nranks: int) -> None:
    def gather(mpi: Comm) -> Any:
        with miraccl.init(mpi, timeout=PATIENCE) as comm:
            assert (comm.rank, comm.nranks) == (mpi.rank, nranks)
            return comm.all_gather(np.array([10 * mpi.rank])).tolist()

    wire, results = _on_all(nranks, gather)
    assert results == [[10 * rank for rank in range(nranks)]] * nranks
    assert wire.broadcasts == 1


def test_nobody_waits_for_a_rank_0_that_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise miraccl.SystemFailure("no socket today")

    monkeypatch.setattr(init, "create_hub", refuse)
    _, (first, second) = _on_all(2, lambda mpi: miraccl.init(mpi))
    assert isinstance(first, miraccl.SystemFailure)
    assert isinstance(second, miraccl.BootstrapError)
    assert "rank 1: rank 0 cannot open the rendezvous: no socket today" in str(second)


def test_wrong_options_are_refused_on_every_rank() -> None:
    _, results = _on_all(2, lambda mpi: miraccl.init(mpi, timeout=-1))
    assert [type(r) for r in results] == [miraccl.InvalidUsage, miraccl.BootstrapError]
    assert all("timeout is -1" in str(r) for r in results)


@pytest.mark.parametrize("wrong", [3, "world", object(), {"timeout": 3}])
def test_what_is_no_communicator(wrong: Any) -> None:
    with pytest.raises(
        miraccl.InvalidUsage, match=r"without Get_rank, Get_size, bcast.*pass options by name"
    ):
        miraccl.init(wrong)


def test_communicators_that_cannot_be() -> None:
    class Null(Comm):
        def __bool__(self) -> bool:
            return False

    class Inter(Comm):
        def Is_inter(self) -> bool:  # noqa: N802
            return True

    with pytest.raises(miraccl.InvalidUsage, match="mpi is the class Inter"):
        miraccl.init(Inter)
    with pytest.raises(miraccl.InvalidUsage, match=r"null communicator.* or has freed it"):
        miraccl.init(Null(Wire(1), 0))
    with pytest.raises(miraccl.InvalidUsage, match=r"two groups .*Merge"):
        miraccl.init(Inter(Wire(1), 0))
