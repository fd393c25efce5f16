from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest

from tests.bootstrap.kit import Child


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
