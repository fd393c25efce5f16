"""The command line: helpful errors, lazy imports, small commands."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import miraccl
from miraccl.errors import MiracclError
from miraccl.schedule import catalog
from miraccl.tools import cli, doctor, doctor_gpu, doctor_verbs, env
from miraccl.tools.findings import DoctorFinding
from miraccl.tools.gpu_facts import CudaFacts, GpuInfo
from miraccl.tools.schedule_draw import draw_svg
from miraccl.tools.schedule_timeline import compute_timeline
from miraccl.types import Collective
from tests.topo.golden import TOPOLOGIES
from tests.topo.test_hca import add_device


def invoke(*args: str, env: dict[str, str] | None = None) -> Result:
    """Run the command in this process; errors become exit statuses as in ``main``."""
    result = CliRunner().invoke(cli.cli, list(args), env=env)
    if isinstance(result.exception, MiracclError):
        result.exit_code = 2 if result.exception.fault == "usage" else 1
    return result


def message(result: Result) -> str:
    return f"{result.output} {result.exception or ''}"


def test_version_and_help() -> None:
    assert invoke("--version").output == f"miraccl {miraccl.__version__}\n"
    overview = invoke("--help").output
    assert all(name in overview for name in cli.COMMANDS)


def test_the_overview_imports_nothing_slow() -> None:
    code = (
        "import sys; from miraccl.tools import cli; cli.cli(['--help'], standalone_mode=False);"
        " print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert not {"numpy", "numba", "rich", "matplotlib", "miraccl.runtime"} & set(loaded)


@pytest.mark.parametrize("name", ["perf", "run", "schedule", "env", "doctor"])
def test_help_of_each_command_has_examples(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert "Example" in result.output


@pytest.mark.parametrize("name", ["topo", "schedule"])
def test_summaries_of_subcommands_are_not_truncated(name: str) -> None:
    commands = invoke(name, "--help").output.partition("\nCommands:\n")[2]
    assert commands
    assert "..." not in commands


def test_help_of_each_subcommand_has_an_example() -> None:
    for group in ("topo", "schedule"):
        inner = cli.cli.get_command(click.Context(cli.cli), group)
        assert isinstance(inner, click.Group)
        for name in inner.list_commands(click.Context(inner)):
            assert f"miraccl {group} {name}" in invoke(group, name, "--help").output


def test_examples_have_gpus_and_a_launcher() -> None:
    overview = invoke("--help").output
    assert "--devices cuda" in overview
    assert "torchrun" in overview


def test_perf_help_marks_options_for_cpu_memory() -> None:
    words = " ".join(invoke("perf", "--help").output.split())
    for option in ("fresh", "persistent"):
        assert f"--{option} CPU memory: " in words
    assert "CUDA events" in words


def test_misspelt_commands_get_suggestions() -> None:
    assert "did you mean 'perf'" in message(invoke("pref"))
    assert "known commands:" in message(invoke("xyzzy"))
    assert "did you mean 'show'" in message(invoke("schedule", "shwo"))
    assert "Did you mean '--explain'" in message(invoke("plan", "--explian"))
    assert "did you mean 'all_reduce'" in message(invoke("perf", "all_redcue"))
    assert "did you mean '--nproc'" in str(invoke("run", "--nporc", "2", "x.py").exception)
    assert "check, detect, diff, dump, show" in message(invoke("topo", "xyzzy"))


@pytest.mark.parametrize(
    "args",
    [
        ("plan", "--json"),
        ("plan", "--html"),
        ("topo", "show", "--json"),
        ("topo", "detect", "--out"),
        ("env", "--json"),
    ],
)
def test_unwritable_outputs_are_rejected_before_the_work(args: tuple[str, ...]) -> None:
    result = invoke(*args, "/no such folder/out")
    assert result.exit_code == 2
    assert "no folder '/no such folder'" in message(result)


def test_file_names_that_are_not_text_are_printed(tmp_path: Path) -> None:
    """Such names are escaped if the encoding of the output is strict."""
    env = {
        **os.environ,
        "PYTHONIOENCODING": "utf-8:strict",
        "MIRACCL_TOPO_FILE": os.fsdecode(bytes(tmp_path) + b"/b\xffr.xml"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "miraccl", "env"],
        capture_output=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"/b\\udcffr.xml" in done.stdout


def test_commands_run_without_standard_output() -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            (
                f"{shlex.quote(sys.executable)} -m miraccl perf all_reduce -r 2 -s 8 -n 1 --batches"
                " 1 >&-"
            ),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert all(line.startswith("miraccl: ") for line in done.stderr.splitlines()), (
        done.stderr
    )  # messages of compilation on first use are allowed


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_reported_in_one_line() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "miraccl", "env"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "miraccl: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["frobnicate"], "all_reduce"),
        (["all_reduce", "--sizes", "12Q"], "256K"),
        (["all_reduce", "--sizes", "0"], "must be at least 1 byte"),
        (["all_reduce", "--dtype", "float31"], "float32"),
        (["all_reduce", "--redop", "xor"], "premul_sum"),
        (["all_gather", "--redop", "sum"], "does not reduce"),
        (["broadcast", "--root", "5", "--ranks", "3"], "0..2"),
        (["all_reduce", "--sizes", "8", "--min-bytes", "8"], "use either"),
        (["all_reduce", "--min-bytes", "1M", "--max-bytes", "1K"], "no size"),
        (["all_reduce", "--factor", "1"], "--factor"),
        (["all_reduce", "--devices", "cuda:0,0"], "lists a GPU twice"),
        (["all_reduce", "--peer-python", "python3"], "--compare"),
        (
            ["all_reduce", "--compare", "mpi", "--peer-python", "/nonexistent/python"],
            "pip install mpi4py",
        ),
        (["sendrecv", "--persistent"], "no persistent form"),
        (["all_reduce", "--root", "0"], "broadcast, reduce, gather, scatter"),
        (["all_reduce", "--min-bytes", "0"], "must be at least 1 byte"),
        (
            ["all_reduce", "--ranks", "3", "--sizes", "1000000G"],
            f"the buffers of 3 ranks need {6000000 << 30} bytes, this machine has",
        ),
        (["all_reduce", "--factor", "nan"], "finite"),
        (["all_reduce", "--factor", "1.0001"], "x>=1.01"),
        (["all_reduce", "--timeout", "inf"], "finite"),
        (["all_reduce", "--json", "/no such folder/rows.json"], "no folder"),
        (["all_reduce", "--json", "/"], "folder"),
        (["all_reduce", "--plot", "/no such folder/rows.svg"], "no folder"),
        (["all_reduce", "--plot", "rows.xyz"], ".svg, .png, .pdf"),
        (["all_reduce", "--sizes", "9" * 400], "sizes below 2**63 bytes"),
        (["all_reduce", "--algo", "nope"], "known are: bruck, chain"),
        (
            ["all_reduce", "--algo", "pairwise"],
            "--algo pairwise has no all_reduce over 2 ranks; available: ",
        ),
        (["sendrecv", "--algo", "ring"], "--algo is for collectives"),
        (
            ["sendrecv", "--explain"],
            "--explain is for operations with several algorithms, not sendrecv",
        ),
        (
            ["barrier", "--explain"],
            "--explain is for operations with several algorithms, not barrier",
        ),
        (
            ["all_reduce", "--explain", "--json", "-"],
            "--explain is part of the table, which --json - omits: give --json a file",
        ),
        (["all_reduce", "--proto", "ll128"], "allowed are simple and ll"),
        (["barrier", "--sizes", "8"], "a barrier has no size"),
        (["barrier", "--max-bytes", "8"], "a barrier has no size"),
        (
            ["all_reduce", "--sizes", "8,1K", "--factor", "4"],
            "--factor is for a range of sizes: add --min-bytes or --max-bytes",
        ),
        (["all_reduce", "--bound", "3"], "--against and --bound are for the picture"),
        (["barrier", "--plot", "rows.svg"], "--plot draws busbw, which is 0 for a barrier"),
        (
            ["all_reduce", "--ranks", "1", "--plot", "rows.svg"],
            "--plot draws busbw, which is 0 for all_reduce on one rank",
        ),
    ],
)
def test_errors_of_perf_name_allowed_values(args: list[str], expected: str) -> None:
    result = invoke("perf", *args)
    assert result.exit_code == 2
    assert expected in message(result)


def test_schedule_commands(tmp_path: Path) -> None:
    assert "ring" in invoke("schedule", "list").output
    shown = invoke("schedule", "show", "ring", "--ranks", "3", "--rank", "1").output
    assert "channel 0 rank 1" in shown
    assert "rank 2\n" not in shown
    text = tmp_path / "ring.txt"
    text.write_text(invoke("schedule", "show", "ring", "--ranks", "3").output)
    assert "over 3 ranks: right" in invoke("schedule", "verify", str(text)).output
    proved = invoke("schedule", "verify", "ring", "--collective", "all_gather", "--ranks", "2-5")
    assert proved.exit_code == 0
    assert proved.output.count(": right") == 4
    assert "adds in" not in proved.output
    proved = invoke("schedule", "verify", "two_shot", "--ranks", "2-5")
    assert proved.output.count(": right, adds in rank order, ") == 4
    target = tmp_path / "ring.svg"
    assert invoke("schedule", "draw", "ring", "--ranks", "4", "--out", str(target)).exit_code == 0
    assert ET.parse(target).getroot().tag.endswith("svg")


def _every_schedule() -> list[tuple[str, Collective, int]]:
    return [
        (name, collective, nranks)
        for name in catalog.names()
        for collective in sorted(catalog.get(name).collectives)
        for nranks in (1, 4, 5)
        if catalog.get(name).supports(collective, nranks)
    ]


@pytest.mark.parametrize(("name", "collective", "nranks"), _every_schedule())
def test_every_algorithm_can_be_drawn(name: str, collective: Collective, nranks: int) -> None:
    schedule = catalog.build(name, collective, nranks)
    timeline = compute_timeline(schedule)
    steps = sum(len(steps) for channel in schedule.channels for steps in channel)
    assert len(timeline.events) == steps
    for arrow in timeline.arrows:
        assert arrow.sender.end <= arrow.receiver.start
    per_rank: dict[tuple[int, int], list[int]] = {}
    for event in timeline.events:
        per_rank.setdefault((event.channel, event.rank), []).append(event.start)
    assert all(sorted(set(starts)) == starts for starts in per_rank.values()), (
        "a rank runs one step at a time, in order"
    )
    drawing = ET.fromstring(draw_svg(schedule))
    assert (
        sum(
            element.tag.endswith("}g") and element.find("{*}title") is not None
            for element in drawing.iter()
        )
        == steps
    )


_WRONG_PLUGIN = """
from miraccl.schedule.catalog import register
from miraccl.schedule.ir import Buffer, Op, Ref, Schedule, Step
from miraccl.types import Collective

@register("broken_for_a_test", collectives=[Collective.ALL_REDUCE], description="Adds nothing.")
def build(collective, nranks, root):
    copy = Step(op=Op.COPY, src=Ref(Buffer.INPUT, 0), dst=Ref(Buffer.OUTPUT, 0))
    channels = (((copy,),) * nranks,)
    return Schedule(
        name="broken_for_a_test", collective=collective, nranks=nranks, parts=1, channels=channels
    )
"""


def test_proofs_as_json(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_WRONG_PLUGIN)
    target = tmp_path / "proofs.json"
    done = invoke("schedule", "verify", "two_shot", "--ranks", "1-3", "--json", str(target))
    assert done.exit_code == 0
    assert len(done.output.splitlines()) == 3
    records = json.loads(target.read_text())
    assert [record["ranks"] for record in records] == [1, 2, 3]
    assert all(record["right"] and record["rank_ordered"] for record in records)
    assert records[2]["messages"] == 12
    assert records[2]["error"] == ""
    command = ["schedule", "verify", "broken_for_a_test", "--load", str(plugin), "--ranks", "2"]
    process = subprocess.run(
        [sys.executable, "-m", "miraccl", *command, "--json", "-"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 1
    (record,) = json.loads(process.stdout)
    assert not record["right"]
    assert "rank 0" in record["error"]


def test_a_wrong_schedule_is_rejected(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(_WRONG_PLUGIN)
    command = [
        "-m",
        "miraccl",
        "schedule",
        "verify",
        "broken_for_a_test",
        "--load",
        str(plugin),
        "--ranks",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "WRONG" in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["show", "nope"],
        ["verify", "ring", "--ranks", "x"],
        ["verify", "ring", "--ranks", "5-2"],
        ["show", "no_such_file.txt"],
        ["show", sys.executable + "/../" + Path(sys.executable).name],
        ["draw", "ring", "--ranks", "300"],
        ["verify", "ring", "--ranks", "\N{SUPERSCRIPT TWO}"],
        ["show", "ring", "--load", "no_such_file.py"],
        ["verify", "chain", "--collective", "broadcast", "--ranks", "2-4", "--root", "4"],
    ],
)
def test_schedule_errors(args: list[str]) -> None:
    assert invoke("schedule", *args).exit_code == 2


@pytest.mark.parametrize("command", ["show", "verify", "draw", "simulate"])
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ranks", "2"], "the schedule in ring has ranks 3"),
        (["--collective", "all_gather"], "has collective all_reduce"),
        (["--root", "1"], "has root 0"),
        (["--load", "plugin.py"], "cannot combine --load with a schedule file"),
    ],
)
def test_options_that_contradict_a_schedule_file_are_rejected(
    command: str, args: list[str], words: str, tmp_path: Path
) -> None:
    name = str(tmp_path / "ring")
    Path(name).write_text(invoke("schedule", "show", "ring", "--ranks", "3").output)
    assert (
        invoke(
            "schedule", command, name, "--ranks", "3", "--collective", "all_reduce", "--root", "0"
        ).exit_code
        == 0
    )
    result = invoke("schedule", command, name, *args)
    assert result.exit_code == 2
    assert words in message(result).replace(name, "ring")


def test_schedule_files_need_no_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(invoke("schedule", "show", "ring", "--ranks", "3").output)
    Path("two_shot").write_text("an algorithm has this name, too")
    assert "ring all_reduce over 3 ranks: right" in invoke("schedule", "verify", "mine").output
    assert (
        "two_shot all_reduce over 4 ranks: right" in invoke("schedule", "verify", "two_shot").output
    )


def test_an_invalid_rank_is_rejected_before_any_output() -> None:
    result = invoke("schedule", "show", "ring", "--ranks", "3", "--rank", "3")
    assert result.exit_code == 2
    assert message(result).strip() == "cannot show --rank 3: the schedule has ranks 0..2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n\ndef (", "SyntaxError: invalid syntax (plugin.py, line 3)"),
        ("import miraccl\n\n1 / 0", "plugin.py, line 3: ZeroDivisionError: division by zero"),
        (
            "import no_such_module_at_all",
            "ModuleNotFoundError: No module named 'no_such_module_at_all'",
        ),
        ("from miraccl.schedule import catalog\ncatalog.get('nope')", "unknown algorithm 'nope'"),
    ],
)
def test_a_failing_plugin_is_reported_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(text)
    result = invoke("schedule", "show", "ring", "--load", str(plugin))
    assert result.exit_code == 2
    assert words in message(result)


def test_schedules_are_simulated_on_links_and_machines(tmp_path: Path) -> None:
    rows = json.loads(
        invoke(
            "schedule",
            "simulate",
            "ring",
            "-r",
            "4",
            "-s",
            "8,4M",
            "--bandwidth",
            "100",
            "--json",
            "-",
        ).output
    )
    assert [row["bytes"] for row in rows] == [8, 4 << 20]
    assert rows[1]["time_us"] == pytest.approx(
        12 * ((1 << 19) / 1e5 + 1), rel=1e-6
    )  # two rounds of 6 messages
    text = invoke(
        "schedule",
        "simulate",
        "two_shot",
        "--topo",
        str(TOPOLOGIES / "nvidia-dgxh100.xml"),
        "--nodes",
        "2",
        "-s",
        "1M",
    ).output
    assert "two_shot all_reduce over 16 ranks, 128 links" in text
    assert "PCI GPU/0-1b000 to PCI/0-15000@0, " in text
    assert "over 4 ranks" in invoke("schedule", "simulate", "dissemination", "-c", "barrier").output


def test_a_simulated_run_is_a_trace(tmp_path: Path) -> None:
    target = tmp_path / "run.json"
    assert (
        invoke(
            "schedule", "simulate", "ring", "-r", "3", "-s", "3000", "--trace", str(target)
        ).exit_code
        == 0
    )
    events = [
        event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"
    ]
    steps = [event for event in events if event["name"] != "wait"]
    assert len(steps) == sum(
        len(steps)
        for channel in catalog.build("ring", Collective.ALL_REDUCE, 3).channels
        for steps in channel
    )
    for rank in range(3):
        mine = sorted(
            (event for event in events if event["pid"] == rank), key=lambda event: event["ts"]
        )
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-9 for a, b in itertools.pairwise(mine)), (
            "waits and steps do not overlap"
        )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mesh", "--topo", "x.xml"], "cannot combine --topo"),
        (["--nodes", "2"], "without --topo"),
        (["--topo", "no_such.xml"], "No such file"),
        (["--topo", str(TOPOLOGIES / "nvidia-dgxh100.xml"), "-r", "4"], "the machine has 8 ranks"),
        (["--bandwidth", "0"], "x>0"),
        (["--bandwidth", "nan"], "finite"),
        (["--slot", "0"], "--slot must be at least 1 byte"),
        (["--trace", "-", "--json", "-"], "cannot write both --trace and --json"),
        (["--sizes", "8,0"], "a size must be at least 1 byte"),
        (["--slot", "1", "--sizes", "1G"], "use larger slots"),
    ],
)
def test_errors_of_simulate_name_allowed_values(args: list[str], words: str) -> None:
    result = invoke("schedule", "simulate", "ring", *args)
    assert result.exit_code == 2
    assert words in message(result)


def test_a_wrong_schedule_is_not_simulated(tmp_path: Path) -> None:
    text = tmp_path / "wrong.txt"
    text.write_text('schedule "wrong" broadcast nranks 2\nchannel 0\nrank 0\nrank 1\n')
    result = invoke("schedule", "simulate", str(text))
    assert result.exit_code == 2
    assert "output[0] of rank 0 is not written" in message(result)


def test_env_reports_the_origin_of_values() -> None:
    records = {
        r["name"]: r
        for r in env.collect(
            {"MIRACCL_TIMEOUT": "7", "NCCL_ALGO": "RING", "MIRACCL_BUFFSIZE": "lots"}
        )
    }
    assert (records["TIMEOUT"]["value"], records["TIMEOUT"]["source"]) == (7.0, "MIRACCL_TIMEOUT")
    assert (records["ALGO"]["value"], records["ALGO"]["source"]) == ("ring", "NCCL_ALGO")
    assert "allowed is a number" in records["BUFFSIZE"]["error"]
    assert records["PROTO"]["source"] == "default"


def test_env_prints_and_writes_json() -> None:
    assert "MIRACCL_ALGO" in invoke("env").output
    assert {r["name"] for r in json.loads(invoke("env", "--json", "-").output)} >= {
        "ALGO",
        "TIMEOUT",
    }
    only = invoke("env", "--set", env={"MIRACCL_PROTO": "ll"}).output
    assert "MIRACCL_PROTO" in only
    assert "MIRACCL_TIMEOUT" not in only
    assert invoke("env", "--markdown", "--json", "-").exit_code == 2


def test_env_reports_unknown_variables() -> None:
    assert env.unknown_variables({"MIRACCL_TIMEOUTS": "3", "MIRACCL_RANK": "0", "OTHER": ""}) == [
        ("MIRACCL_TIMEOUTS", "MIRACCL_TIMEOUT")
    ]


def test_doctor_reports_requirements() -> None:
    findings = {f["name"]: f for f in json.loads(invoke("doctor", "--json", "-").output)}
    assert findings["numpy"]["status"] == "ok"
    assert set(findings) <= set(doctor.CHECKS)
    assert set(doctor.CHECKS) - set(findings) <= {*doctor_gpu.CHECKS, *doctor_verbs.CHECKS}
    assert all(f["advice"] for f in findings.values() if f["status"] == "missing")


def test_doctor_names_the_extra_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    found = {f.name: (f.status, f.advice.partition(":")[0]) for f in doctor.examine()}
    assert found["torch"] == ("note", "pip install 'miraccl[torch]'")
    assert found["numpy"] == ("missing", "pip install numpy")


def test_doctor_checks_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found() -> DoctorFinding:
        return next(finding for finding in doctor.examine() if finding.name == "cache")

    monkeypatch.setattr(doctor, "CHECKS", {"cache": doctor.CHECKS["cache"]})
    monkeypatch.setenv("HOME", str(tmp_path))  # below the temporary folder, and fine
    for name in ("MIRACCL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert (found().status, found().found) == ("ok", f"{tmp_path}/.cache/miraccl is writable")
    monkeypatch.setattr(doctor, "CACHE_BYTES", 1 << 62)
    assert found().status == "note"
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIRACCL_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(doctor, "CACHE_BYTES", 1)
    assert found().found.startswith(f"{tmp_path}/file is not writable, ")
    assert "MIRACCL_CACHE_DIR" in found().advice


def test_doctor_reports_rdma_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_verbs.check_rdma(tmp_path) is None
    add_device(tmp_path, "mlx5_0")
    add_device(tmp_path, "mlx5_1", state="1: DOWN")
    found = doctor_verbs.check_rdma(tmp_path)
    assert found is not None
    assert found.found.startswith("verbs uses mlx5_0:1; ")
    assert "port mlx5_1:1 is DOWN" in found.found
    assert "check the cable" in found.advice


def test_doctor_explains_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_device(tmp_path, "mlx5_0")
    gpu = GpuInfo(
        ordinal=0,
        name="H100",
        bus_id="0000:01:00.0",
        sm=90,
        multiprocessors=132,
        memory_bytes=1 << 36,
        posix_handles=True,
        mode=0,
    )
    monkeypatch.setattr(doctor_gpu, "facts", lambda: CudaFacts(gpus=(gpu,)))
    found = doctor_verbs.check_flush(tmp_path)
    assert found is not None
    assert found.found.startswith("none: GPUs from compute capability 9.0")
    assert doctor_verbs.check_flush(tmp_path / "none") is None


def test_doctor_survives_a_failing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> DoctorFinding:
        raise RuntimeError("boom")

    monkeypatch.setitem(doctor.CHECKS, "futex", fails)
    (finding,) = (f for f in doctor.examine() if f.name == "futex")
    assert "boom" in finding.found
