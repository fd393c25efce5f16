"""The page about writing algorithms: its program, outputs and tables are those of the code."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from miraccl.schedule import catalog
from miraccl.schedule.ir import OPERANDS, Op
from miraccl.schedule.text import format_step, parse, parse_step
from miraccl.schedule.verify import verify
from miraccl.tools.cli import cli

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "writing-algorithms.md").read_text("utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)
ALGORITHM, RUN = [code for language, code in BLOCKS if language == "python"]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(autouse=True)
def _unregistered() -> Iterator[None]:
    yield
    if "exchange" in catalog.names():
        catalog.unregister("exchange")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "exchange.py"
    path.write_text(ALGORITHM)
    return path


def output(*arguments: str) -> str:
    return CliRunner().invoke(cli, ["schedule", *arguments]).output


def test_the_proof_and_the_simulation_print_what_the_page_shows(program: Path) -> None:
    proof = output("verify", "exchange", "--load", str(program), "--ranks", "2-16")
    assert proof.strip() in PAGE
    catalog.unregister("exchange")
    common = ("--ranks", "8", "--sizes", "1K,1M,64M", "--bandwidth", "50")
    times = output("simulate", "exchange", "--load", str(program), *common)
    for line in (times + output("simulate", "ring", *common)).splitlines():
        assert line in PAGE or line.startswith("# simulated")


def test_the_mistake_is_found_as_shown(program: Path) -> None:
    mistake = ALGORITHM.replace("mine, distance = out(0), 2 * distance", "distance = 2 * distance")
    assert mistake != ALGORITHM
    program.write_text(mistake)
    proof = output("verify", "exchange", "--load", str(program), "--ranks", "4")
    assert words(proof) in words(PAGE)


def test_the_run_prints_what_its_comment_says(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(program.parent))
    try:
        exec(compile(RUN, "run.py", "exec"), {})
    finally:
        sys.modules.pop("exchange", None)
    printed = capsys.readouterr().out.strip()
    assert f"# {printed}" in RUN


def rows(heading: str) -> list[list[str]]:
    """Return the cells of all tables below a heading, without their heads."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_has_every_primitive_in_its_text_form() -> None:
    shown = [cells[0].strip("`") for cells in rows("Primitives") if cells[0].startswith("`")]
    steps = [parse_step(text) for text in shown]
    assert [step.op for step in steps] == list(Op) == list(OPERANDS)
    assert [format_step(step) for step in steps] == shown


def test_the_table_has_every_argument_of_register() -> None:
    documented = {
        name
        for cells in rows("Arguments of `register`")
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert documented == set(inspect.signature(catalog.register).parameters)


def test_the_file_is_a_correct_schedule() -> None:
    (text,) = [code for language, code in BLOCKS if code.startswith('schedule "swap"')]
    verify(parse(text))
