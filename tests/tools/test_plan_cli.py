"""``miraccl plan``: tables, JSON, cache, files, errors."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from miraccl.errors import InvalidUsage
from miraccl.graph.channel_graph import graph_from_json, graphs_from_xml
from miraccl.tools import options, plan_cli
from miraccl.topo import detect
from miraccl.topo.detect import detect_machine
from miraccl.topo.system_json import system_from_json
from tests.topo.golden import DATA, TOPOLOGIES

H100 = str(TOPOLOGIES / "nvidia-dgxh100.xml")
PCIE = str(TOPOLOGIES / "pcie8-2s-2nic.xml")


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Cache plans in a folder of the test; compiled kernels stay in the default folder."""
    folder = tmp_path / "plans"
    folder.mkdir()
    monkeypatch.setattr(plan_cli, "plan_folder", lambda: folder)
    return folder


def call(*args: str, status: int = 0, **environ: str) -> str:
    result = CliRunner().invoke(
        plan_cli.plan, args, catch_exceptions=False, env={**environ, "COLUMNS": "160"}
    )
    assert result.exit_code == status, result.output
    return result.stdout


def test_an_empty_topology_name_is_rejected() -> None:
    call("--topo", "", status=2)


def test_help_has_examples() -> None:
    assert "Examples" in call("--help")


def test_tables_show_every_stage() -> None:
    text = call("--topo", H100, "--nodes", "2")
    for words in (
        "nvidia-dgxh100.xml: 2 x 8 GPUs",
        "System:",
        "Paths of the GPUs",
        "Channel graphs",
        "Rings",
        "Trees of depth 8",
        "Model:",
    ):
        assert words in text
    assert "0 8        0 7 6 5 4 3 2 1 9 10 11 12 13 14 15 8" in text
    assert "NVL 370.8: GPU 1-7" in text
    assert "Bounds on bus bandwidth" in text
    assert "Why:" not in text


def test_explain_prints_reasons() -> None:
    text = call("--topo", H100, "--explain")
    assert "Why: search" in text
    assert "each searched channel carries both trees" in text
    assert "18 NVLinks of 20.6 GB/s (sm 90)" in " ".join(
        text.split()
    )  # lines are wrapped at the width of the terminal


def test_piped_output_has_no_trailing_blanks() -> None:
    lines = call("--topo", H100, "--explain").splitlines()
    assert not [line for line in lines if line != line.rstrip()]
    assert any(len(line) > 160 and line.startswith("  - ") for line in lines)


def test_a_collective_without_an_algorithm() -> None:
    data = json.loads(call("--topo", H100, "--json", "-", NCCL_ALGO="tree"))
    assert data["tuning"]["choice"]["Broadcast"][0] == [8, None, None, 0, 0, 0]
    assert re.search(r"^ +8 B +- +- +- +- +Tree/LL", call("--topo", H100, NCCL_ALGO="tree"), re.M)


@pytest.mark.parametrize("what", ["--topo", "--accelerators", "NCCL_GRAPH_FILE"])
def test_endless_files_are_rejected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MAX_INPUT_BYTES", 1 << 20)
    monkeypatch.setenv(what.strip("-"), "/dev/zero")
    with pytest.raises(InvalidUsage, match=r"cannot read the [\w ]+ /dev/zero: larger than 1 MiB"):
        call("--topo", H100, *((what, "/dev/zero") if what.startswith("-") else ()))


def test_cpu_ranks_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "detect_machine", lambda: detect_machine(gpus=[], cpu_ranks=2))
    assert call().startswith(
        "this machine (CPU ranks, planned as if they were GPUs): 1 x 2 GPUs, 2 ranks"
    )


def test_tables_in_files_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = CliRunner().invoke(plan_cli.plan, ["--topo", H100, "--nodes", "2"]).stdout.splitlines()
    assert any(
        line.split() == ["size", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]
        for line in lines
    )
    assert max(map(len, lines)) > 100


def test_json_contains_the_plan_only() -> None:
    data = json.loads(call("--topo", PCIE, "--nodes", "2", "--gpus", "0,1,4", "--json", "-"))
    assert data["topology"] == "pcie8-2s-2nic.xml"
    assert (data["nranks"], data["gpus"], data["domains"]) == (6, [0, 1, 4], [[0, 1], [2]])
    assert "explain" not in data
    assert data["env"] == {}


def test_json_with_reasons() -> None:
    data = json.loads(call("--topo", PCIE, "--explain", "--json", "-"))
    assert set(data["explain"]) == {"paths", "search", "channels", "tuning", "sentences"}
    assert data["bound"]["allReduce"] > 0


def test_environment_settings_apply() -> None:
    data = json.loads(call("--topo", PCIE, "--json", "-", NCCL_ALGO="ring", NCCL_MAX_NCHANNELS="1"))
    assert data["comm"]["nChannels"] == 1
    assert data["env"] == {"NCCL_ALGO": "ring", "NCCL_MAX_NCHANNELS": "1"}
    assert {row[1] for row in data["tuning"]["choice"]["AllReduce"]} == {"Ring"}


def test_disabled_collnet_stays_off() -> None:
    on, off = (
        json.loads(
            call(
                "--topo", H100, "--nodes", "2", "--collnet", "--json", "-", NCCL_COLLNET_ENABLE=text
            )
        )
        for text in "10"
    )
    assert (on["collnet"], on["comm"]["collnetEnable"]) == (1, 1)
    assert (off["collnet"], off["comm"]["collnetEnable"], off["env"]) == (
        0,
        0,
        {"NCCL_COLLNET_ENABLE": "0"},
    )
    plain = json.loads(call("--topo", H100, "--nodes", "2", "--json", "-", NCCL_COLLNET_ENABLE="0"))
    assert plain == off  # the environment is recorded in both cases
    assert (
        off["tuning"] == json.loads(call("--topo", H100, "--nodes", "2", "--json", "-"))["tuning"]
    )


def test_the_second_run_uses_the_cache(plans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = call("--topo", PCIE, "--json", "-")
    assert len(list(plans.iterdir())) == 1
    monkeypatch.setattr(plan_cli, "_compute", lambda *args: pytest.fail("planned again"))
    assert call("--topo", PCIE, "--json", "-") == first


def test_no_cache_writes_nothing(plans: Path) -> None:
    call("--topo", PCIE, "--no-cache", "--json", "-")
    assert list(plans.iterdir()) == []


def test_graphs_in_nccls_format_can_replace_the_search(tmp_path: Path) -> None:
    file = tmp_path / "graphs.xml"
    data = json.loads(call("--topo", H100, "--json", "-"))
    call("--topo", H100, "--graph-xml", str(file))
    graphs = graphs_from_xml(file.read_text(), system_from_json(data["system"]))
    assert [graphs[g.kind].intra for g in map(graph_from_json, data["graphs"])] == [
        g.intra for g in map(graph_from_json, data["graphs"])
    ]
    again = json.loads(call("--topo", H100, "--json", "-", NCCL_GRAPH_FILE=str(file)))
    assert again["comm"] == data["comm"]


def test_graph_dump_file(tmp_path: Path) -> None:
    call("--topo", PCIE, NCCL_GRAPH_DUMP_FILE=str(tmp_path / "dump.xml"))
    assert (tmp_path / "dump.xml").read_text().startswith('<graphs version="1">')


def test_an_empty_graph_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "empty.xml").write_text("\n")
    with pytest.raises(InvalidUsage, match=r"cannot use the graph file .*empty\.xml: it is empty"):
        call("--topo", PCIE, NCCL_GRAPH_FILE=str(tmp_path / "empty.xml"))


def test_topology_dump_file(tmp_path: Path) -> None:
    dump, sipu = tmp_path / "dump.xml", DATA / "accelerators"
    described = ["--topo", str(sipu / "sipu.xml"), "--accelerators", str(sipu / "sipu.toml")]
    for args in (
        ["--topo", H100, "--gpus", "2,0"],
        [*described, "--gpus", "3,1"],
        [*described, "--collnet", "--fuse"],
    ):
        plan = json.loads(call(*args, "--json", "-", NCCL_TOPO_DUMP_FILE=str(dump)))
        again = json.loads(call("--topo", str(dump), "--json", "-"))
        assert {key: again[key] for key in ("system", "paths", "domains")} == {
            key: plan[key] for key in ("system", "paths", "domains")
        }


def test_a_topology_may_come_from_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(Path(PCIE).read_bytes(),))
    writer.start()
    assert json.loads(call("--topo", str(pipe), "--json", "-"))["nranks"] == 8
    writer.join()


def test_pictures(tmp_path: Path) -> None:
    svg, html = tmp_path / "machine.svg", tmp_path / "plan.html"
    call("--topo", H100, "--svg", str(svg), "--html", str(html))
    assert svg.read_text().startswith("<svg")
    assert html.read_text().startswith("<!doctype html>")


def test_described_accelerators() -> None:
    sipu = DATA / "accelerators"
    text = call(
        "--topo", str(sipu / "sipu.xml"), "--accelerators", str(sipu / "sipu.toml"), "--json", "-"
    )
    assert json.loads(text)["nranks"] > 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--topo", "/nowhere.xml"], "cannot read the topology file"),
        (["--topo", PCIE, "--gpus", "a"], "device numbers"),
        (["--topo", PCIE, "--nodes", "1000000000"], "1<=x<=16384"),
        (["--topo", PCIE, "--json", "-", "--svg", "-"], "cannot write several outputs"),
    ],
)
def test_usage_errors(args: list[str], words: str) -> None:
    result = CliRunner().invoke(plan_cli.plan, args)
    assert words in f"{result.output} {result.exception}"
    assert result.exit_code == 2 or isinstance(result.exception, InvalidUsage)


def test_long_rings_are_truncated() -> None:
    assert "more" in call("--topo", H100, "--nodes", "32")
