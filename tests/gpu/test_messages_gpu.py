"""Messages, uneven collectives, background and groups on real GPUs; ranks share a GPU if there is
only
one.
"""

from __future__ import annotations

import functools

import pytest

from tests.gpu.gpus import GPUS, ON_GPUS
from tests.gpu.message_worker import UNLIKE
from tests.gpu.ranks import run_cases

pytestmark = ON_GPUS
RANKS = sorted({2, min(4, GPUS), GPUS if GPUS <= 8 else 8} - {0, 1})
CASES = ["sizes", "all_pairs", "many", "graphs", "large", "mixed", "uneven"]
CASES += ["captured_by_some", "background", "groups", "prepared", "dlpack"]
WORKER = "tests.gpu.message_worker"


@functools.cache
def answers(nranks: int) -> list[list[str]]:
    """Results of all cases from one set of processes, since starting them takes longer than the
    cases.
    """
    return run_cases([{"case": name} for name in CASES], nranks, module=WORKER)


@pytest.mark.parametrize("nranks", RANKS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=CASES)
def test_messages(number: int, nranks: int) -> None:
    assert answers(nranks)[number] == [""] * nranks


@pytest.mark.parametrize("case", UNLIKE)
def test_message_collectives_do_not_mix(case: str) -> None:
    assert run_cases([{"case": case}], 3, module=WORKER) == [[""] * 3]


@pytest.mark.parametrize("how", ["mismatch", "timeout", "abort"])
def test_failures_are_reported(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TIMEOUT", "2" if how == "timeout" else "30")
    assert run_cases([{"case": how}], 2, module=WORKER) == [["", ""]]
