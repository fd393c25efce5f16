"""A small GPT and a small ResNet train with DDP and FSDP2 to the same bits as on Gloo.

Runs bench/training.py in its smallest form.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'miraccl[torch]')")

from tests.support.warm_python import TORCH, warm_python

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiprocess


ARMS = {
    2: "gloo,miraccl,miraccl:one_shot,none",
    4: "gloo,miraccl,miraccl:two_shot,miraccl:one_shot,gloo:rank_order,miraccl:down_ring,none",
}


@pytest.fixture(scope="module", params=list(ARMS))
def record(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return the benchmark's record for 2 or 4 ranks."""
    path = tmp_path_factory.mktemp("training") / "record.json"
    command = [
        warm_python(*TORCH),
        str(ROOT / "bench" / "training.py"),
        "--ranks",
        str(request.param),
        "--backend",
        ARMS[request.param],
    ]
    command += ["--size", "small", "--steps", "2", "--rounds", "1", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("model", ["gpt", "resnet"])
def test_losses_and_weights_are_the_same_bits(
    record: dict[str, Any], model: str, parallel: str
) -> None:
    """Results are equal on two ranks with any algorithm, on four if the order of additions is
    equal.
    """
    (one,) = (r for r in record["records"] if (r["model"], r["parallel"]) == (model, parallel))
    seen = {arm: (of_arm["losses"], of_arm["digests"]) for arm, of_arm in one["arms"].items()}
    losses, digests = seen["miraccl"]
    if one["ranks"] == 2:
        assert seen["miraccl"] == seen["miraccl:one_shot"] == seen["gloo"]
    else:
        assert seen["miraccl:down_ring"] == seen["gloo"]
        assert seen["miraccl:one_shot"] == seen["miraccl:two_shot"] == seen["gloo:rank_order"]
    assert len(losses) == len(digests) == one["ranks"]
    assert len(losses[0]) == 2
    assert seen["none"][1] != digests, "training alone gives other weights"


def test_the_benchmark_detects_a_changed_bit(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    training = importlib.import_module("training")
    assert training.broken(record["records"]) == record["broken"] == []
    changed, nranks = copy.deepcopy(record["records"]), record["records"][0]["ranks"]
    arm = "miraccl" if nranks == 2 else "miraccl:down_ring"
    changed[-1]["arms"][arm]["losses"][1][1] *= 1 + 2**-23
    assert f"resnet fsdp2, {nranks} ranks: {arm} differs from gloo" in training.broken(changed)
