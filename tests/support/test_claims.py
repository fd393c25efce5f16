"""Files of tests that the processes of .ci/test share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import conftest


def test_a_file_is_run_by_the_process_that_claims_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "_CLAIMS", str(tmp_path))
    claim = conftest._claim.__wrapped__
    assert claim("tests/gpu/test_trees.py")
    assert not claim("tests/gpu/test_trees.py")
    assert claim("tests/graph/test_trees.py")
