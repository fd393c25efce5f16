"""Six hosts with few descriptors: the job works, or the error names the limit and the remedy."""

from __future__ import annotations

import pytest

from tests.launchers.jobs import RANK_PROGRAMS, run_together
from tests.support.warm_python import warm_python

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("limit", [40, 22])
def test_six_hosts(limit: int) -> None:
    program = str(RANK_PROGRAMS / "few_files.py")
    command = [warm_python(), "-m", "miraccl", "run", "-n", "6", program, str(limit)]
    (ended,) = run_together([command], [{"MIRACCL_BOOTSTRAP_TIMEOUT": "8"}], timeout=60)
    lines = [line for line in ended.stdout.splitlines() if line]
    if all(line.endswith("works") for line in lines):
        assert limit == 40, f"{limit} files are enough for six hosts: lower the limit"
        return
    assert any("SystemFailure" in line for line in lines), ended.stdout
    assert f"this process may open {limit} files: raise the limit with ulimit -n" in ended.stdout
