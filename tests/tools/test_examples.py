"""The program in the README runs, commands are understood as printed, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from miraccl.tools import cli
from tests.support.documents import PAGES, ROOT
from tests.support.warm_python import warm_python

DOCUMENTS = [path for path in PAGES if path.name != "cli.md"]
_PLACEHOLDERS = {"N": "2", "OP": "all_reduce"}


@pytest.mark.multiprocess
def test_the_program_in_the_readme_runs(tmp_path: Path) -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(block)
    command = [warm_python(), "-m", "miraccl", "run", "-n", "2", str(program)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr
    assert "Candidate" in done.stdout


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)
def test_links_lead_somewhere(document: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?://)([^)#]*)(?:#([^)]+))?\)", document.read_text()
    ):
        linked = document.parent / target if target else document
        assert linked.exists(), f"{document.name} links to {target}, which is not there"
        headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in [
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        ]


@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda document: str(document.relative_to(ROOT))
)
def test_programs_in_documents_are_python(document: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL):
        ast.parse(block)


def _helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield the ``--help`` texts of a command and its subcommands."""
    yield command.get_help(context)
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from _helps(inner, click.Context(inner, info_name=name, parent=context))


def _code(page: str) -> str:
    """Fenced and indented blocks of a page."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    fenced = [text for language, text in fences if not language]
    return "\n".join([*fenced, *re.findall(r"^    .*$", page, re.MULTILINE)])


def _commands() -> list[str]:
    """Arguments of the miraccl commands in documents, examples and help texts."""
    files = [*DOCUMENTS, *sorted((ROOT / "examples").glob("*.py"))]
    texts = [
        *(_code(file.read_text()) if file.suffix == ".md" else file.read_text() for file in files),
        *_helps(cli.cli, click.Context(cli.cli, info_name="miraccl")),
    ]
    prefix = r"(?:[A-Z_]+=\S+ )*(?:(?:torchrun|mpirun|srun) .*)?"
    lines = [
        line
        for text in texts
        for line in re.findall(
            # not the output of a command, which begins with "miraccl run: "
            rf"^(?:    +|\$ )?{prefix}\bmiraccl ([a-z]+(?![\w]*:).*)$",
            text,
            re.MULTILINE,
        )
    ]
    found = [re.split(r"[|>]", part)[0] for line in lines for part in line.split("; miraccl ")]
    inline = [
        text
        for file in files[: len(DOCUMENTS)]
        for text in re.findall(r"`miraccl ([a-z][^`|]*)`", file.read_text())
    ]
    return sorted({" ".join(shlex.split(text, comments=True)) for text in [*found, *inline]})


@pytest.mark.parametrize(
    "command", [command for command in _commands() if command.split()[-1] != "--help"]
)
def test_a_command_is_understood_as_printed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options, names and values are parsed; files and GPUs are not checked."""
    monkeypatch.chdir(tmp_path)
    context, words = (
        click.Context(cli.cli),
        [_PLACEHOLDERS.get(word, word) for word in shlex.split(command)],
    )
    found: click.Command = cli.cli
    while isinstance(found, click.Group) and words and not words[0].startswith("-"):
        _, inner, words = found.resolve_command(context, words)
        assert inner is not None
        found = inner
    if words:
        found.make_context(found.name, words)
