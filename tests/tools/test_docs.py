"""The documents name what there is: public names, errors, options, settings, commands, files, and figures of the newest tables."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from pathlib import Path

import click
import pytest

import miraccl
from miraccl import errors, params
from miraccl.runtime.options import Options
from miraccl.tools import cli
from miraccl.tools.env import LAUNCH_VARIABLES
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.name: path.read_text("utf-8") for path in DOCUMENTS}
API = TEXTS["api.md"]
#: what other rooms of the package make communicators with
_OF_THE_PACKAGE = {"from_session", "split_within"}
_SUFFIXES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def _is_named(word: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text) is not None


def test_the_page_on_the_api_has_all_of_it() -> None:
    options = [
        name
        for name, p in inspect.signature(Options.create).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    ]
    methods = [
        name
        for cls in (miraccl.Communicator, miraccl.Work)
        for name in vars(cls) | vars(cls.__base__)
        if name[0] != "_"
    ]
    wanted = (
        {*miraccl.__all__, *options, *methods} - _OF_THE_PACKAGE - {"__version__", "is_completed"}
    )
    forms = {name for name in wanted if name.endswith("_init")}
    assert {name.removesuffix("_init") for name in forms} < wanted
    missing = [name for name in sorted(wanted - forms) if not _is_named(name, API)]
    assert missing == []


@pytest.mark.parametrize("package", ["torch", "ray"])
def test_the_page_of_a_package_has_all_of_it(package: str) -> None:
    """What ``__all__`` names, read without the import, which needs PyTorch or Ray."""
    (names,) = re.findall(
        r"^__all__ = (\[.*?\])$",
        (ROOT / "src" / "miraccl" / package / "__init__.py").read_text(),
        re.MULTILINE,
    )
    assert [name for name in json.loads(names) if not _is_named(name, TEXTS[f"{package}.md"])] == []


def test_the_page_on_the_api_has_every_error() -> None:
    found = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.MiracclError)
    }
    assert len(found) > 12
    assert [
        name for name in sorted(found) if not re.search(rf"`(errors\.|miraccl\.)?{name}`", API)
    ] == []


def test_commands_are_in_a_document() -> None:
    text = "\n".join(TEXTS.values())

    def commands(group: click.Group, path: str) -> list[str]:
        context = click.Context(group)
        inner = {name: group.get_command(context, name) for name in group.list_commands(context)}
        return [
            full
            for name, command in inner.items()
            for full in (
                commands(command, f"{path} {name}")
                if isinstance(command, click.Group)
                else [f"{path} {name}"]
            )
        ]

    assert [
        command for command in commands(cli.cli, "miraccl") if not _is_named(command, text)
    ] == []


def test_the_readme_names_every_benchmark() -> None:
    scripts = [
        path
        for path in (ROOT / "bench").glob("*.py")
        if f"python bench/{path.name}" in path.read_text()
    ]
    assert len(scripts) > 12
    assert [
        path.name
        for path in scripts
        if not re.search(rf"`(bench/)?{path.name}`", TEXTS["README.md"])
    ] == []


@pytest.mark.parametrize("name", TEXTS)
def test_settings_that_a_document_names_exist(name: str) -> None:
    declared = {f"MIRACCL_{setting}" for setting in (*params.PARAMS, *LAUNCH_VARIABLES)}
    declared |= {f"NCCL_{param.nccl}" for param in params.PARAMS.values()}
    declared |= {
        "MIRACCL_TEST_MPIRUN",
        "MIRACCL_EMULATOR_CACHE",
        "MIRACCL_X",
        "NCCL_X",
    }  # of the tests; any
    declared |= {
        "NCCL_IB_HCA",
        "NCCL_NET",
        "NCCL_LAUNCH_MODE",
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "NCCL_STEPS",
    }  # named as NCCL's own
    assert (
        set(re.findall(r"\b(?:MIRACCL|NCCL)_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", TEXTS[name])) - declared
        == set()
    )


@pytest.mark.parametrize("name", TEXTS)
def test_files_that_a_document_names_exist(name: str) -> None:
    """Names with a folder of the repository or the package, and files of bench/results, which pages shorten to what differs."""
    folders = (
        ROOT,
        *(
            ROOT / "src" / "miraccl" / part
            for part in ("", "comm", "executor/cpu", "executor/cuda")
        ),
    )
    tops = sorted(
        {
            path.name
            for folder in folders
            for path in folder.iterdir()
            if path.is_dir() and path.name[0].isalpha()
        }
        - {"device"}
    )
    named = re.findall(rf"`((?:{'|'.join(tops)})/[\w./-]+\.(?:py|cuh|md|xml|toml))`", TEXTS[name])
    missing = [
        file
        for file in named
        if "NAME" not in file and not any((folder / file).exists() for folder in folders)
    ]
    results = re.findall(
        r"\b(?:gpu|cpu|torch-\w+|training)-2026-\d\d-\d\d[\w-]*\.(?:md|json)\b", TEXTS[name]
    )
    missing += [file for file in results if not (ROOT / "bench" / "results" / file).exists()]
    assert missing == []


def test_the_table_of_all_reduce_has_the_figures_of_the_tables() -> None:
    """Of each number of GPUs: NCCL's time, ours and the ratio, as in the newest file; and the README's, which are taken from it."""
    times: dict[tuple[int, int], tuple[float, float]] = {}
    for nranks in (2, 4, 8):
        newest = sorted((ROOT / "bench" / "results").glob(f"gpu-*-{nranks}xH200.json"))
        file = [path for path in newest if re.fullmatch(r"gpu-[\d-]+xH200", path.stem)][-1]
        assert (
            file.name.removesuffix(".json") in TEXTS["performance.md"]
            or f"-{nranks}xH200.md" in TEXTS["performance.md"]
        )
        for row in json.loads(file.read_text())["rows"]:
            if (row["op"], row["dtype"]) == ("all_reduce", "bfloat16"):
                times.setdefault(
                    (nranks, row["bytes"]), (row["nccl_us"], row["time_us"])
                )  # the graph's come before those of calls
    rows = re.findall(
        r"^\| (\d+)(?: (\w\w))? \| (.+) \|$",
        TEXTS["performance.md"].partition("\n## Other operations")[0],
        re.MULTILINE,
    )
    assert len(rows) == 11
    for number, suffix, rest in rows:
        cells = [float(cell.strip("* ")) for cell in rest.split("|")]
        for index, nranks in enumerate((2, 4, 8)):
            theirs, ours = times[nranks, int(number) * _SUFFIXES.get(suffix, 1)]
            assert cells[4 * index : 4 * index + 2] == pytest.approx([theirs, ours], rel=0.005)
            assert cells[4 * index + 2] == pytest.approx(theirs / ours, rel=0.01)
    readme = re.search(r"all_reduce of 16 bytes takes .*?\(", TEXTS["README.md"], re.DOTALL)
    assert readme
    shown = [float(figure) for figure in re.findall(r"\d+\.\d", readme[0])]
    wanted = [
        times[nranks, size][side]
        for size in (16, 1 << 20)
        for side in (1, 0)
        for nranks in (2, 4, 8)
    ]
    assert shown == pytest.approx(wanted, abs=0.0501)


def _run_on_two_ranks(folder: Path, program: str) -> list[str]:
    """The lines that the ranks print, each with its rank in front."""
    (folder / "program.py").write_text(program)
    command = [warm_python(), "-m", "miraccl", "run", "-n", "2", "--tag", "program.py"]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.multiprocess
def test_the_schedule_and_the_program_on_algorithms_run(tmp_path: Path) -> None:
    (schedule,) = re.findall(r"```\n(schedule .*?)```", TEXTS["algorithms.md"], re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", TEXTS["algorithms.md"], re.DOTALL)
    (tmp_path / "swap.txt").write_text(schedule)
    assert _run_on_two_ranks(tmp_path, program) == [
        f"[{rank}] [3. 3. 3. 3.] swap" for rank in range(2)
    ]


_PREAMBLE = """
import numpy as np, miraccl
with miraccl.init() as comm:
    a, b, x = (np.full(8, comm.rank + offset, np.float32) for offset in range(3))
"""


@pytest.mark.multiprocess
def test_the_programs_on_the_api_run(tmp_path: Path) -> None:
    """But for the first, which begins communicators in all ways there are, and lines on GPU memory."""
    blocks = re.findall(r"```python\n(.*?)```", API, re.DOTALL)[1:]
    assert len(blocks) == 3
    lines = [line for block in blocks for line in block.splitlines() if 'device="cuda"' not in line]
    program = _PREAMBLE + "\n".join(f"    {line}" for line in [*lines, "print(x.shape)"])
    assert _run_on_two_ranks(tmp_path, program) == [f"[{rank}] (1048576,)" for rank in range(2)]
