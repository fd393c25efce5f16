"""The PyTorch backend on GPU memory; ranks share GPUs if there are too few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

from tests.gpu.gpus import GPUS, NEEDS_GPU
from tests.support.ranks import ROOT, run_ranks
from tests.torch import cuda, matrix
from tests.torch.worlds import in_turn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    NEEDS_GPU,
]
TABLE = ("<!-- table for GPU memory -->\n", "\n<!-- end of table -->")
TIMEOUT_S = 300.0


@pytest.mark.parametrize("nranks", sorted({2, min(4, GPUS)} - {0, 1}))
@pytest.mark.parametrize(
    "check",
    [
        cuda.order,
        cuda.memory,
        cuda.futures,
        cuda.graphs,
        cuda.shapes,
        cuda.messages,
        cuda.beside,
        cuda.bound,
        cuda.training,
        cuda.quantized,
        cuda.tensors,
        cuda.symmetric,
    ],
    ids=lambda check: check.__name__,
)
def test_gpu_memory(check: Any, nranks: int, tmp_path: Path) -> None:
    run_ranks(
        in_turn,
        nranks,
        str(tmp_path / "meet"),
        [(check.__module__, check.__name__)],
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("nranks", [2, 4])
def test_a_barrier_tells_all_ranks_of_a_mismatch(nranks: int, tmp_path: Path) -> None:
    for said in run_ranks(cuda.different, nranks, str(tmp_path / "meet"), timeout=TIMEOUT_S):
        assert all("CollectiveMismatch" in text for text in said), said


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    text, _ = run_ranks(cuda.late, 2, str(tmp_path / "meet"), timeout=TIMEOUT_S)
    assert "CollectiveTimeout" in text
    assert "rank 1" in text
    assert "cuda.py" in text  # where its program is


def test_every_cell_of_the_table_for_gpu_memory(tmp_path: Path) -> None:
    """Compare each mark with the documented table, made with one GPU per rank; wrong results
    raise.
    """
    tables = run_ranks(matrix.measure_on_gpu, 2, str(tmp_path / "meet"), timeout=TIMEOUT_S)
    marks = (matrix.AS_GLOO, matrix.ALONE, matrix.OTHERWISE, matrix.REFUSED)
    table = {
        row: {
            column: max((t[row][column] for t in tables), key=marks.index)
            for column in matrix.DTYPES
        }
        for row in tables[0]
    }
    (tmp_path / "table.md").write_text(matrix.markdown(table))
    print(matrix.markdown(table))
    text = (ROOT / "docs" / "guide" / "pytorch-types.md").read_text("utf-8")
    documented = text.partition(TABLE[0])[2].partition(TABLE[1])[0]
    if documented and GPUS >= 2:
        assert documented == matrix.markdown(table), (
            f"docs/guide/pytorch-types.md should say:\n{matrix.markdown(table)}"
        )
