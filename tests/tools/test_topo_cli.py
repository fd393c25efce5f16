"""``miraccl topo``: commands, explanations, files, errors."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from miraccl.errors import InvalidUsage, TopologyError
from miraccl.tools.topo_cli import topo
from miraccl.topo.build import MAX_NODES, build_system
from miraccl.topo.xmlfile import parse_topology
from tests.topo.golden import DATA, TOPOLOGIES

H100 = str(TOPOLOGIES / "nvidia-dgxh100.xml")
A100 = str(TOPOLOGIES / "nvidia-dgxa100.xml")
SIPU = [
    str(DATA / "accelerators" / "sipu.xml"),
    "--accelerators",
    str(DATA / "accelerators" / "sipu.toml"),
]


def call(*args: str, status: int = 0) -> str:
    result = CliRunner().invoke(topo, args, catch_exceptions=False)
    assert result.exit_code == status, result.output
    return result.stdout


@pytest.mark.parametrize("command", ["detect", "show", "dump", "check", "diff"])
def test_help_has_examples(command):
    text = call(command, "--help")
    assert "Example" in text


def test_show_prints_tree_and_paths():
    text = call("show", H100, "--nodes", "2")
    assert text.startswith("maxBw 48 GB/s, totalBw 370.8 GB/s, 8 GPUs, 8 nets")
    assert "NVL 370.8 GB/s - NVS/0-0" in text
    assert "│ GPU7 │" in text
    assert "PXN 48" in text


def test_show_json_is_the_reference_form():
    shown = json.loads(call("show", H100, "--gpus", "1,0", "--json", "-"))
    assert [gpu["rank"] for gpu in shown["system"]["GPU"]] == [1, 0]
    assert shown["domains"] == [[1, 0]] or shown["domains"] == [[0, 1]]
    assert set(shown["paths"]) == {"GPU", "NET"}


def test_show_explains():
    text = call("show", A100, "--nodes", "2", "--explain", "gpu0,NET3")
    assert "PXN, 24 GB/s" in text
    assert "<- limits" in text
    reasons = json.loads(call("show", A100, "--explain", "all", "--json", "-"))["reasons"]
    assert len(reasons) == 3 * 8 * 8 + 2 * 8 * 4 + 8  # a net has no path to the NVSwitch


def test_show_explains_separate_gpus():
    text = call(
        "show",
        str(TOPOLOGIES / "pcie4-4nic-netfaster.xml"),
        "--nodes",
        "2",
        "--explain",
        "GPU0,GPU1",
    )
    assert "count as different nodes: both GPUs have a NIC within PXB" in text


@pytest.mark.parametrize(
    "wanted",
    [
        "",
        "GPU0",
        "GPU0,GPU99",
        "GPU0,GPU" + "9" * 5000,
        "CPU0,GPU0",
        "x,y",
        "GPU0,NET0,NET1",
        "NET0,NET1",
    ],
)
def test_nodes_that_do_not_exist(wanted):
    with pytest.raises(InvalidUsage, match="cannot explain"):
        call("show", H100, "--explain", wanted)


def test_valid_nodes_are_listed():
    with pytest.raises(
        InvalidUsage, match=r"'GPU9' is not one of GPU0 to GPU7, NET0 to NET7, CPU0 to CPU1, NVS0$"
    ):
        call("show", H100, "--explain", "GPU0,GPU9")


@pytest.mark.parametrize(
    "args",
    [["show", ""], ["check", ""], ["dump", ""], ["diff", H100, ""], ["detect", "--base", ""]],
)
def test_empty_file_names_are_rejected(args):
    result = CliRunner().invoke(topo, args)
    assert result.exit_code == 2
    assert "the file name is empty" in result.stderr


def test_wrong_gpus():
    result = CliRunner().invoke(topo, ["show", H100, "--gpus", "a"])
    assert result.exit_code == 2
    assert "device numbers such as 0,2,3" in result.output
    with pytest.raises(TopologyError, match="cannot select GPU 17"):
        call("show", H100, "--gpus", "17")


def test_names_in_files_are_not_markup(tmp_path):
    file = tmp_path / "[bold].xml"
    text = (TOPOLOGIES / "nvidia-dgxh100.xml").read_text()
    file.write_text(
        text.replace('"mlx5_0"', '"[/b]:cat:"').replace('sm="90"', 'sm="90" accelerator="[/x]"')
    )
    assert "NET/0-0 [/b]:cat: (400 Gbit/s" in call("show", str(file))
    table = call("diff", H100, str(file), status=1)
    assert "[bold].xml" in table
    assert "[/x]" in table


def test_dump_keeps_a_file_and_selects(tmp_path):
    with open(H100) as file:
        assert call("dump", H100) == file.read()
    out = tmp_path / "half.xml"
    call("dump", H100, "--gpus", "0,1", "--out", str(out))
    assert sum(node.name == "gpu" for node in parse_topology(out.read_text()).root.walk()) == 2
    assert "<silink" in call("dump", *SIPU)


def test_check_reports_problems_in_its_status(tmp_path):
    assert call("check", A100) == "no problems: the file is complete\n"
    text = call("check", *SIPU)
    assert (
        "link_speed of a nic is 'Unknown': 8 GT/s assumed, with 16 lanes 12 GB/s (2 times)" in text
    )
    assert "fix: write the real one" in text
    broken = tmp_path / "broken.xml"
    broken.write_text('<system version="1">\n<cpu numaid="0">')
    findings = json.loads(call("check", str(broken), "--json", "-", status=1))
    assert findings[0]["severity"] == "error"
    assert findings[0]["line"] == 2
    assert f"error: line 2: {findings[0]['text']}" in call("check", str(broken), status=1)
    assert str(broken) not in findings[0]["text"]
    with pytest.raises(TopologyError, match="/dev/zero: larger than 8388608 bytes"):
        call("check", A100, "--accelerators", "/dev/zero")


def test_diff_and_its_status():
    assert call("diff", H100, H100) == "the machines are equal\n"
    assert "GPU sm" in call("diff", A100, H100, status=1)
    assert json.loads(call("diff", A100, H100, "--names", "--json", "-", status=1))


def test_detect_writes_a_file_that_can_be_shown(tmp_path):
    out = tmp_path / "here.xml"
    call("detect", "--root", str(tmp_path), "--cpu-ranks", "3", "--out", str(out))
    assert call("show", str(out)).startswith("maxBw 12 GB/s, totalBw 12 GB/s, 3 GPUs, 0 nets")
    tree = json.loads(call("detect", "--root", str(tmp_path), "--json", "-"))
    assert tree["element"] == "system"


def test_detect_writes_xml_and_json(tmp_path):
    out = tmp_path / "here.xml"
    tree = json.loads(
        call(
            "detect", "--root", str(tmp_path), "--cpu-ranks", "3", "--out", str(out), "--json", "-"
        )
    )
    assert tree["element"] == "system"
    assert call("show", str(out)).startswith("maxBw 12 GB/s, totalBw 12 GB/s, 3 GPUs, 0 nets")
    with pytest.raises(InvalidUsage, match="cannot write both --out and --json"):
        call("detect", "--out", "-", "--json", "-")


def test_environment_settings_apply(monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", A100)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "PHB 24" in call("show")


def test_the_largest_number_of_cpu_ranks(tmp_path):
    file = str(tmp_path / "machine.xml")
    call("detect", "--cpu-ranks", str(MAX_NODES), "--out", file)
    assert (
        len(build_system(parse_topology((tmp_path / "machine.xml").read_text()).root).gpus)
        == MAX_NODES
    )
    call("detect", "--cpu-ranks", str(MAX_NODES + 1), status=2)
