"""Skips the tests outside of a guest with Soft-RoCE devices."""

from __future__ import annotations

import os

import pytest

from miraccl.topo.hca import read_hcas


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    ready = os.environ.get("RUN_IN_VM") == "1" and any(h.name == "rxe0" for h in read_hcas())
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.guest)
            if not ready:
                item.add_marker(
                    pytest.mark.skip(reason="needs a guest with Soft-RoCE: make test-guest")
                )
