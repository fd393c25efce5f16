"""Random programs on emulated GPUs: streams, graphs, windows, groups, background, on one and two
hosts.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

from tests.gpu.emulator import folder, needs_compiler
from tests.gpu.programs import __main__ as command
from tests.gpu.programs import records
from tests.gpu.programs.draw import draw
from tests.gpu.programs.rank import ProgramRank, touched
from tests.runtime.sweep_ranks import act_as_hosts
from tests.support.ranks import run_ranks

SEEDS = range(150)
#: in the last one a thread begins with work that is not the library's, which needs a context
RUN = [(1, "int32"), (2, "int32"), (18, "float32")]


def run_seeds(seeds: list[tuple[int, str]], ranks_per_host: int) -> None:
    act_as_hosts(ranks_per_host)
    np.seterr(all="ignore")
    rank, nranks = int(os.environ["MIRACCL_RANK"]), int(os.environ["MIRACCL_NRANKS"])
    for seed, dtype in seeds:
        try:
            ProgramRank(
                draw(seed, "own", nranks, "emulated", nsteps=25, dtypes=[dtype]), rank, {}
            ).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.multiprocess
@needs_compiler
@pytest.mark.parametrize(("nranks", "ranks_per_host"), [(2, 0), (2, 1)])
def test_programs_on_emulated_gpus(nranks: int, ranks_per_host: int) -> None:
    run_ranks(
        run_seeds,
        nranks,
        RUN,
        ranks_per_host,
        env={"MIRACCL_EMULATOR_CACHE": str(folder())},
        timeout=180.0,
    )


@pytest.mark.parametrize("nranks", [3, 4])
def test_only_gpu_calls_name_streams_and_background_memory_is_untouched(
    nranks: int,
) -> None:
    """Including all GPU memory in background use, or none: the first GPU operation then has no
    memory.
    """
    for seed in SEEDS:
        program = draw(seed, "own", nranks, "emulated", nsteps=30, dtypes=["int32"])
        pending: dict[int, set[int]] = {}
        for step in program.steps:
            assert not touched([step]) & set().union(*pending.values()), (seed, step)
            for call in every_call(step):
                on_gpu = {program.buffers[view.buffer].on_gpu for view in call.views}
                assert len(on_gpu) == 1, (seed, call)
                assert on_gpu == {True} or not call.names_stream, (seed, call)
            if isinstance(step, records.Call | records.Messages) and step.form.endswith("async"):
                pending[step.number] = touched([step])
            elif isinstance(step, records.Wait):
                del pending[step.number]


def every_call(step: records.Step) -> list[records.Call | records.Messages]:
    """Yield the step itself, or those in a batch, a graph or threads."""
    match step:
        case records.Call() | records.Messages():
            return [step]
        case records.Batch(steps=parts) | records.Graph(body=parts):
            return [call for part in parts for call in every_call(part)]
        case records.Beside(bodies=bodies):
            return [call for body in bodies for part in body for call in every_call(part)]
    return []


@pytest.mark.parametrize("api", ["torch", "both"])
def test_pytorch_is_rejected_on_emulated_gpus(
    api: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["programs", "--device", "emulated", "--api", api, "--show"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    said = capsys.readouterr()
    assert f"--api {api} needs tensors of PyTorch" in said.err
    assert "allowed with --device emulated is --api own" in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("device", "apis"), [("emulated", ["own", "own"]), ("cpu", ["own", "torch"])]
)
def test_programs_on_emulated_gpus_use_miraccl_calls(
    device: str,
    apis: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["programs", "--device", device, "--seeds", "2", "--steps", "5", "--show"]
    )
    assert command.main() == 0
    assert [
        line.split(", ")[1]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("seed ")
    ] == apis
