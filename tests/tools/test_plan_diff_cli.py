"""``miraccl plan diff``: files, saved plans, changes, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from miraccl.errors import InvalidUsage
from miraccl.tools import plan_cli
from tests.topo.golden import TOPOLOGIES

H100 = str(TOPOLOGIES / "nvidia-dgxh100.xml")
A100 = str(TOPOLOGIES / "nvidia-dgxa100.xml")


def call(*args: str, status: int = 1, **environ: str) -> str:
    result = CliRunner().invoke(
        plan_cli.plan, ["diff", *args], catch_exceptions=False, env={"COLUMNS": "200", **environ}
    )
    assert result.exit_code == status, result.output
    return result.stdout


def test_two_files() -> None:
    text = call(A100, H100, "--nodes", "2")
    assert text.startswith(
        "left   nvidia-dgxa100.xml, 2 nodes\nright  nvidia-dgxh100.xml, 2 nodes\n"
    )
    assert "ring graph" in text
    assert "AllReduce: algorithm/protocol" in text


def test_output_has_no_trailing_blanks() -> None:
    lines = call(H100, "--nodes", "2", "--scale", "NET/3=0.5").splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    assert lines[1] == "right  nvidia-dgxh100.xml, 2 nodes, NET/3 x 0.5"


def test_equal_plans() -> None:
    text = call(H100, H100, status=0)
    assert "The plans are equal." in text


def test_settings_apply_to_the_right_side() -> None:
    data = json.loads(call(H100, "--set", "NCCL_ALGO=ring", "--json", "-", NCCL_PROTO="simple"))
    assert data["settings"] == [{"name": "NCCL_ALGO", "left": "not set", "right": "ring"}]
    assert data["right"] == "nvidia-dgxh100.xml, NCCL_ALGO=ring"
    assert {row["right"]["algorithm"] for row in data["choices"]} == {"Ring"}
    assert {row["left"]["protocol"] for row in data["choices"]} == {"Simple"}


def test_removed_devices_and_node_counts() -> None:
    data = json.loads(call(H100, "--nodes", "2,4", "--without", "GPU/2", "--json", "-"))
    names = {d["name"]: (d["left"], d["right"]) for d in data["settings"]}
    assert names == {"nodes": ("2", "4"), "GPUs per node": ("8", "7")}


def test_gpus_are_selected_on_both_sides() -> None:
    data = json.loads(call(H100, "--gpus", "0,1", "--set", "NCCL_MAX_NCHANNELS=1", "--json", "-"))
    assert all(sorted(ring["left"]) == [0, 1] for ring in data["rings"])


def test_saved_plans(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    runner = CliRunner()
    arguments = ["--topo", H100, "--nodes", "2", "--no-cache", "--json", str(saved)]
    runner.invoke(plan_cli.plan, arguments, catch_exceptions=False)
    assert "equal" in call(str(saved), H100, "--nodes", "2", status=0)
    assert "without NET/3" in call(str(saved), "--without", "NET/3")
    with pytest.raises(InvalidUsage, match="cannot select GPUs of a saved plan"):
        call(str(saved), H100, "--gpus", "0,1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([H100], "cannot compare a plan with itself"),
        ([H100, "--without", "NET/99"], "cannot find the device NET/99"),
        ([H100, "--scale", "NET/3=0"], "cannot scale NET/3 by 0"),
        ([H100, "--set", "PATH=x"], "cannot set PATH"),
        ([H100, "--nodes", "1,2,3"], "expected one or two numbers"),
    ],
)
def test_invalid_arguments(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        call(*arguments)


@pytest.mark.parametrize("arguments", [["--scale", "NET/3"], ["--set", "NCCL_ALGO"]])
def test_malformed_options(arguments: list[str]) -> None:
    call(H100, *arguments, status=2)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    broken = tmp_path / "plan.json"
    broken.write_text("{")
    with pytest.raises(InvalidUsage, match=r"cannot read the plan .*plan\.json"):
        call(str(broken), H100)
