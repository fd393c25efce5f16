"""The PyTorch backend against plain computations and against Gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')")

from tests.support.ranks import ROOT, run_ranks
from tests.torch import calls, matrix

pytestmark = pytest.mark.multiprocess
TABLE = ("<!-- table -->\n", "\n<!-- end of table -->")


def test_miraccl_alone_does_not_import_torch() -> None:
    command = "import sys, miraccl.comm.start; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT / "src", timeout=60, check=False).returncode == 0


def test_every_cell_of_the_documented_table(tmp_path: Path) -> None:
    tables = run_ranks(matrix.measure, 2, str(tmp_path / "meet"))
    marks = (matrix.AS_GLOO, matrix.ALONE, matrix.OTHERWISE, matrix.REFUSED)  # from good to bad
    table = {row: {column: max((t[row][column] for t in tables), key=marks.index) for column in matrix.DTYPES} for row in tables[0]}
    text = (ROOT / "docs" / "torch.md").read_text("utf-8")
    documented = text.partition(TABLE[0])[2].partition(TABLE[1])[0]
    assert documented == matrix.markdown(table), f"docs/torch.md should say:\n{matrix.markdown(table)}"


@pytest.mark.parametrize(
    "names",
    [["layouts", "uneven", "point_to_point", "refusals"], ["handles", "groups_and_objects", "same_file_again", "beside_gloo"]],
    ids=" ".join,
)
def test_calls(names: list[str], tmp_path: Path) -> None:
    run_ranks(calls.in_turn, 3, str(tmp_path / "meet"), names)


def test_models_train_as_on_gloo(tmp_path: Path) -> None:
    for by_name in run_ranks(calls.train, 2, str(tmp_path / "meet"), 5):
        for name, (ours, theirs) in by_name.items():
            assert ours == theirs, name
            assert ours[-1] < ours[0], name


@pytest.mark.parametrize(
    ("check", "nranks", "words"),
    [
        (calls.mismatch, 2, ("CollectiveMismatch", "count")),
        (calls.lonely, 2, ("CollectiveTimeout", "rank 1")),
        (calls.aborted, 2, ("CommunicatorAborted", "rank 0")),
    ],
)
def test_failures_are_told_with_their_reason(check: Any, nranks: int, words: tuple[str, ...], tmp_path: Path) -> None:
    told = [text for text in run_ranks(check, nranks, str(tmp_path / "meet")) if text]
    assert len(told) == (2 if check is calls.mismatch else 1)
    assert all(word in text for text in told for word in words), told
