"""Types of command-line options that several commands share."""

from __future__ import annotations

from typing import Any

import click

from miraccl.params import parse_size


class Size(click.ParamType[int]):
    """Bytes with an optional K, M or G."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class Sizes(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of sizes."""

    name = "size,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(parse_size(part) for part in str(value).split(","))
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def write_json(target: str, value: Any) -> None:
    """Write ``value`` to a file, or to standard output if ``target`` is ``-``."""
    import json

    text = json.dumps(value, indent=1)
    if target == "-":
        print(text)
        return
    try:
        with open(target, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except OSError as error:
        raise click.FileError(target, error.strerror) from None
