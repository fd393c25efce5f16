"""Random programs: generated ones keep the rules, run on CPU memory, and report errors and
hangs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')", exc_type=ImportError
)

from tests.gpu.programs import records
from tests.gpu.programs.draw import draw
from tests.gpu.programs.orchestrator import ProgramJob, RankProcesses
from tests.gpu.programs.rank import ProgramRank, touched
from tests.support.ranks import run_ranks
from tests.torch import programs

SEEDS = range(40)


@pytest.mark.multiprocess
@pytest.mark.parametrize("api", ["own", "torch"])
@pytest.mark.parametrize("nranks", [2, 3])
def test_programs_on_cpu_memory(api: str, nranks: int, tmp_path: Path) -> None:
    first = 1000 * nranks
    run_ranks(
        programs.run_seeds,
        nranks,
        str(tmp_path / "meet"),
        api,
        list(range(first, first + 4)),
        30,
        timeout=120.0,
    )


@pytest.mark.parametrize("api", ["own", "torch"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_seed_is_a_program(api: str, device: str) -> None:
    assert draw(5, api, 4, device) == draw(5, api, 4, device)
    assert draw(5, api, 4, device).steps != draw(6, api, 4, device).steps


@pytest.mark.parametrize("api", ["own", "torch"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_programs_keep_the_rules(api: str, device: str) -> None:
    """Views lie in their buffers, background memory is untouched until waited for, graphs use GPU
    memory.
    """
    for seed in SEEDS:
        program = draw(seed, api, 4, device)
        for steps in bodies(program.steps):
            pending: dict[int, set[int]] = {}
            for step in steps:
                busy = set().union(*pending.values())
                assert not touched([step]) & busy, (seed, step)
                if isinstance(step, records.Call | records.Messages):
                    for view in step.views:
                        for first, count in view.spans:
                            assert (
                                0
                                <= first
                                <= first + count * view.step - (view.step - 1) * (count > 0)
                                <= program.buffers[view.buffer].count
                            )
                    if step.form.endswith("async"):
                        pending[step.number] = touched([step])
                elif isinstance(step, records.Wait):
                    del pending[step.number]
            assert not pending, seed
        graphs = [step for step in program.steps if isinstance(step, records.Graph)]
        assert device == "cpu" or all(program.buffers[b].on_gpu for b in touched(graphs))


def bodies(steps: Any) -> list[Any]:
    """Yield these steps and those of nested graphs and threads."""
    inner = [step.body for step in steps if isinstance(step, records.Graph)]
    return [
        steps,
        *inner,
        *(body for step in steps if isinstance(step, records.Beside) for body in step.bodies),
    ]


def test_a_wrong_element_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip one bit of one buffer in a program of one rank."""
    program = draw(3, "own", 1, "cpu", nsteps=20)
    rank = ProgramRank(program, 0, {})
    monkeypatch.setattr(rank.calls, "check", lambda: rank.place.memory[4].bits.__ixor__(1))
    with pytest.raises(AssertionError, match=r"are wrong, .* buffer 4, touched by"):
        rank.run()
    rank.calls.close()


@pytest.mark.multiprocess
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    job = ProgramJob(
        seeds=range(1),
        nranks=2,
        device="cpu",
        apis=("own",),
        limit_s=120.0,
        options={"nsteps": 20, "dtypes": ["int32"]},
    )
    crew = RankProcesses(job, tmp_path)

    def waits_for_the_other() -> bool:
        crew.send_signal(0, signal.SIGUSR1)  # it writes where it is
        return "miraccl_calls.py" in crew.written(0)

    try:
        assert crew.run(0, 0) == ""
        crew.send_signal(1, signal.SIGSTOP)
        error = crew.run(0, 1, waits_for_the_other)
    finally:
        crew.end(kill=True)
    assert "rank 0: did not end\n    was at: meets the others" in error
    assert "rank 1: did not end\n    was at: the end" in error
    assert "miraccl_calls.py" in error  # the stack of rank 0
