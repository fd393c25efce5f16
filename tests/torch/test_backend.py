"""The PyTorch backend against plain computations and Gloo.

Importing torch takes two seconds per rank, so each test starts a world once for many checks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

from tests.support.ranks import ROOT, run_ranks
from tests.torch import calls, failures, gradients, groups, matrix, messages, ordered, training
from tests.torch.worlds import in_turn

pytestmark = pytest.mark.multiprocess
TABLE = ("<!-- table -->\n", "\n<!-- end of table -->")


def test_miraccl_alone_does_not_import_torch() -> None:
    command = "import sys, miraccl.api.init; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", command], cwd=ROOT / "src", timeout=60, check=False
        ).returncode
        == 0
    )


def test_every_cell_of_the_documented_table(tmp_path: Path) -> None:
    tables = run_ranks(matrix.measure, 2, str(tmp_path / "meet"), timeout=200.0)
    marks = (
        matrix.LEFT_OUT,
        matrix.AS_GLOO,
        matrix.ALONE,
        matrix.OTHERWISE,
        matrix.REFUSED,
    )  # from good to bad
    table = {
        row: {
            column: max((t[row][column] for t in tables), key=marks.index)
            for column in matrix.DTYPES
        }
        for row in tables[0]
    }
    text = (ROOT / "docs" / "guide" / "pytorch-types.md").read_text("utf-8")
    documented = text.partition(TABLE[0])[2].partition(TABLE[1])[0]
    matrix.complete(table, documented)
    assert documented == matrix.markdown(table), (
        f"docs/guide/pytorch-types.md should say:\n{matrix.markdown(table)}"
    )


@pytest.mark.parametrize(
    ("nranks", "checks"),
    [
        (
            3,
            (
                calls.layouts,
                calls.uneven,
                calls.handles,
                calls.profiled,
                calls.pending,
                calls.short_forms,
            ),
        ),
        (
            3,
            (
                messages.point_to_point,
                messages.tags,
                messages.floods,
                messages.any_source,
                messages.threads,
                messages.futures,
            ),
        ),
        (
            3,
            (
                messages.progress_during_other_calls,
                messages.starts_as_progress_sleeps,
                messages.arrived_before_poll,
                messages.compiled_only,
                messages.fair_any_source,
                messages.reports_while_late,
                messages.closed_while_late,
            ),
        ),
        (
            3,
            (
                messages.misfits,
                groups.objects_and_groups,
                groups.beside_gloo,
                groups.same_file_again,
                groups.same_file_at_once,
                groups.split,
                groups.by_hand,
                groups.descriptors,
                groups.dropped,
            ),
        ),
        (
            3,
            (
                groups.several_backends,
                groups.monitored,
                groups.monitored_at_the_last_moment,
                groups.deadlines,
                groups.deadlines_during_operations,
                groups.callbacks_in_order,
                failures.rejected_arguments,
                ordered.deterministic,
            ),
        ),
        (
            2,
            (
                training.losses,
                training.joined,
                gradients.differentiated,
                gradients.unused,
                training.sparse,
                training.dtensor,
                training.pipelines,
                training.checkpoint,
                training.sharded,
                training.compiled,
                training.recorded,
            ),
        ),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, int) else " ".join(check.__name__ for check in value)
    ),
)
def test_calls(nranks: int, checks: tuple[Any, ...], tmp_path: Path) -> None:
    run_ranks(
        in_turn,
        nranks,
        str(tmp_path / "meet"),
        [(check.__module__, check.__name__) for check in checks],
        timeout=200.0,
    )


def test_calls_over_udp(tmp_path: Path) -> None:
    checks = [calls.layouts, calls.uneven, messages.tags, messages.floods, groups.split]
    run_ranks(
        in_turn,
        3,
        str(tmp_path / "meet"),
        [(check.__module__, check.__name__) for check in checks],
        timeout=200.0,
        env={"MIRACCL_NET": "udp", "MIRACCL_SHM_DISABLE": "1"},
    )


@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)
@pytest.mark.skipif(
    not os.environ.get("TEST_SLOW"), reason="slow: make test-engines runs it (TEST_SLOW=1)"
)
def test_compiled_by_inductor(tmp_path: Path) -> None:
    run_ranks(training.compiled_by_inductor, 2, str(tmp_path / "meet"), timeout=200.0)


def test_failures_name_their_reason(tmp_path: Path) -> None:
    """Compare (rank, text of its error) for each kind of failure."""
    expected: dict[Any, list[tuple[str, ...]]] = {
        failures.mismatch: [("CollectiveMismatch", "count")] * 2,
        failures.other_splits: [("CollectiveMismatch", "rank 1 expects 16 bytes, rank 0 sent 12")]
        * 2,
        failures.late_rank: [("CollectiveTimeout", "rank 1", "rank 1: ", "failures.py"), ()],
        failures.late_message: [
            ("CollectiveTimeout", "timed out after 1 s", "rank 1", "tag 6", "rank 1: "),
            ("CollectiveTimeout",),
        ],
        failures.late_backward: [
            ("CollectiveTimeout", "timeout of 1 s", "rank 1: ", "failures.py"),
            (),
        ],
        failures.late_future: [
            ("CollectiveTimeout", "timed out after 1 s", "rank 1", "tag 6", "rank 1: "),
            (),
        ],
        failures.late_from_anyone: [
            (
                "CollectiveTimeout",
                "timed out after 1 s",
                "any rank",
                "tag 6",
                "rank 0: waits for any rank",
            ),
            (),
        ],
        failures.aborted: [(), ("CommunicatorAborted", "rank 0")],
        failures.all_aborted: [(), ("CommunicatorAborted", "rank 0")],
        failures.interrupted: [
            ("from a handler",),
            ("CommunicatorAborted", "signal handler", "rank 0"),
        ],
        failures.interrupted_in_between: [
            ("from a handler",),
            ("CommunicatorAborted", "TimeoutError", "rank 0"),
        ],
    }
    told = run_ranks(
        failures.in_turn,
        2,
        str(tmp_path / "meet"),
        [check.__name__ for check in expected],
        timeout=120.0,
    )
    for rank, texts in enumerate(told):
        for check, text in zip(expected, texts, strict=True):
            words = expected[check][rank]
            assert bool(words) == bool(text), (check.__name__, rank, text)
            assert all(word in text for word in words), (check.__name__, rank, text)
