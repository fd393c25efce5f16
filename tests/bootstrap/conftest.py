from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest

from miraccl.bootstrap import join
from miraccl.deadline import Deadline
from tests.bootstrap.kit import PATIENCE, Child


@pytest.fixture
def spawn() -> Iterator[Callable[[Callable[[Connection], None]], Child]]:
    """Makes ``Child`` processes and ends them after the test."""
    children: list[Child] = []

    def make(main: Callable[[Connection], None]) -> Child:
        children.append(Child(main))
        return children[-1]

    yield make
    for child in children:
        child.end()


@pytest.fixture
def patience_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Deadline]:
    """Make deadlines count from the moment the hub receives a rank's Join, however late that is."""
    original = join._join
    monkeypatch.setattr(
        join,
        "_join",
        lambda sock, remote, deadline, port: replace(
            original(sock, remote, deadline, port), timeout_left=deadline.seconds
        ),
    )
    return lambda seconds: Deadline(seconds=seconds, at=time.monotonic() + PATIENCE)
