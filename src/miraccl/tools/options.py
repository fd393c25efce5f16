"""Option types, groups and file access shared by the commands."""

from __future__ import annotations

import math
import os
from typing import Any

import click
from click.shell_completion import CompletionItem

from miraccl.errors import InvalidUsage, did_you_mean
from miraccl.params import parse_size
from miraccl.tools.completion import complete_files

MAX_INPUT_BYTES = 256 << 20  # a ring of 1024 ranks takes 102 MB as text
MAX_NODES = 16_384  # planning 131,072 GPUs takes 9 s and 430 MB


class Size(click.ParamType[int]):
    """Number of bytes with an optional suffix K, M or G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class Sizes(click.ParamType[tuple[int, ...]]):
    """Comma-separated list of sizes."""

    name = "size,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(parse_size(part) for part in str(value).split(","))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class File(click.Path):
    """File name. Rejects the empty name, which an unset shell variable gives.

    Shells offer files with one of ``suffixes`` for it, or all files if there are none.
    """

    def __init__(self, *suffixes: str) -> None:
        super().__init__()
        self.suffixes = suffixes

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return complete_files(*self.suffixes)(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("the file name is empty", param, ctx)
        return super().convert(value, param, ctx)


class Numbers(click.ParamType[tuple[int, ...]]):
    """Comma-separated list of device numbers."""

    name = "number,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: expected device numbers such as 0,2,3", param, ctx)


class Finite(click.FloatRange):
    """Range of numbers that excludes infinity and NaN, which pass click's comparison."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class SuggestingChoice(click.Choice[str]):
    """Choice that suggests the closest allowed value for a misspelt one."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        message = super().get_invalid_choice_message(value, ctx).rstrip(".")
        hint = did_you_mean(str(value), self.choices)
        return f"{message} ({hint})" if hint else message


class OutputFile(click.ParamType[str]):
    """Writable file, or - for standard output; checked before the command does any work."""

    name = "file"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        return complete_files()(ctx, param, incomplete)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        folder = os.path.dirname(path) or "."
        if path == "-":
            return path
        if os.path.isdir(path):
            self.fail(f"{path!r} is a folder; expected a file", param, ctx)
        if not os.path.isdir(folder):
            self.fail(f"cannot write {path!r}: no folder {folder!r}", param, ctx)
        if not os.access(path if os.path.exists(path) else folder, os.W_OK):
            self.fail(f"cannot write {path!r}: permission denied", param, ctx)
        return path


class SuggestingGroup(click.Group):
    """Group that suggests a command when an unknown one is given."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            hint = did_you_mean(args[0], known) or f"known commands: {', '.join(known)}"
            raise click.UsageError(f"unknown command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


def read_bytes(path: str, what: str) -> bytes:
    """Read the file that an option names; ``what`` is its kind in error messages.

    Raise ``InvalidUsage`` if it cannot be read or is larger than ``MAX_INPUT_BYTES``.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_INPUT_BYTES + 1)
    except OSError as error:
        raise InvalidUsage(f"cannot read the {what} {path}: {error.strerror}") from None
    if len(data) > MAX_INPUT_BYTES:
        raise InvalidUsage(
            f"cannot read the {what} {path}: larger than {MAX_INPUT_BYTES >> 20} MiB"
        )
    return data


def write_json(target: str, value: Any) -> None:
    """Write ``value`` as JSON to a file, or to standard output if ``target`` is ``-``."""
    import json

    write_text(target, json.dumps(value, indent=1) + "\n")


def write_text(target: str, text: str) -> None:
    """Write ``text`` to a file, or to standard output if ``target`` is ``-``."""
    if target == "-":
        print(text, end="")
        return
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise click.FileError(target, error.strerror) from None


#: ``--accelerators``, of commands that read a topology.
accelerators_option = click.option(
    "--accelerators",
    multiple=True,
    metavar="TOML",
    shell_complete=complete_files(".toml"),
    help="Description of accelerators NCCL does not know; repeatable.",
)
