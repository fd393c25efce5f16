"""One cluster for all tests of this folder: its start takes longer than they do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from tests.ray.cluster import two_nodes

    with two_nodes() as made:
        yield made
