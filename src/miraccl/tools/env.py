"""``miraccl env``: every declared setting with its value, origin and meaning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click

from miraccl import params
from miraccl.errors import InvalidUsage
from miraccl.tools.options import OutputFile, write_json

_PREFIXES = ("MIRACCL_",)
#: set by launchers for the ranks they start; documented with `miraccl run`, not parameters
LAUNCH_VARIABLES = (
    "RANK",
    "NRANKS",
    "LOCAL_RANK",
    "LOCAL_NRANKS",
    "UNIQUE_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@click.command(short_help="List every setting.")
@click.option(
    "--json",
    "json_target",
    type=OutputFile(),
    metavar="FILE",
    help="Write a list of JSON objects; - is standard output.",
)
@click.option(
    "--markdown",
    is_flag=True,
    help="Print the table of docs/guide/reference/settings.md, with defaults only.",
)
@click.option(
    "--set", "only_set", is_flag=True, help="Only settings that differ from their default."
)
def env(json_target: str | None, markdown: bool, only_set: bool) -> None:
    """List every setting: name, value, where the value came from, and what it does.

    MIRACCL_X sets setting X. Where NCCL has a variable of the same meaning, NCCL_X is read too,
    after MIRACCL_X. Variables that begin with MIRACCL_ and are unknown are reported.

    \b
    Examples:
      miraccl env
      MIRACCL_ALGO=ring miraccl env --set
      miraccl env --json - | jq '.[] | select(.name == "TIMEOUT")'
    """
    if markdown and (json_target or only_set):
        raise click.UsageError(
            "cannot combine --markdown with --json or --set: it prints the table of all settings"
        )
    if markdown:
        print(render_markdown())
        return
    records = [r for r in collect(os.environ) if not only_set or r["source"] != "default"]
    if json_target:
        write_json(json_target, records)
        return
    _print_table(records)
    for name, close in unknown_variables(os.environ):
        hint = f"; did you mean {close}?" if close else ""
        click.echo(f"note: {name} is set but unknown{hint}", err=True)


def collect(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return one record per parameter, sorted by name.

    A value that cannot be parsed has the key ``error`` and the value None.
    """
    records = []
    for name, param in sorted(params.PARAMS.items()):
        record: dict[str, Any] = {
            "name": name,
            "kind": param.kind,
            "unit": param.unit,
            "nccl": param.nccl,
            "help": param.help,
        }
        try:
            value, source = param.resolve(environ)
            record |= {"value": value, "source": source}
        except InvalidUsage as error:
            record |= {"value": None, "source": "error", "error": str(error)}
        records.append(record)
    return records


def unknown_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the undeclared variables with the prefix MIRACCL_, each with the closest declared name
    or
    "".
    """
    import difflib

    known = [f"MIRACCL_{name}" for name in (*params.PARAMS, *LAUNCH_VARIABLES)]
    unknown = [name for name in sorted(environ) if name.startswith(_PREFIXES) and name not in known]
    return [(name, next(iter(difflib.get_close_matches(name, known, n=1)), "")) for name in unknown]


def _print_table(records: list[dict[str, Any]]) -> None:
    rows = [
        (
            f"MIRACCL_{r['name']}",
            r.get("error") or _format_value(r["value"], r["unit"]),
            r["source"],
            r["help"],
        )
        for r in records
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for row in rows:
        print(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]
            ).rstrip()
        )


def _format_value(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {unit}".strip() if text else '""'


def render_markdown() -> str:
    """Return the table of docs/guide/reference/settings.md; a test keeps the file equal to it."""
    lines = ["| variable | default | kind | also read | meaning |", "|---|---|---|---|---|"]
    for name, param in sorted(params.PARAMS.items()):
        nccl = f"`NCCL_{param.nccl}`" if param.nccl else ""
        default = _format_value(param.default, param.unit).replace('""', "empty")
        lines.append(f"| `MIRACCL_{name}` | {default} | {param.kind} | {nccl} | {param.help} |")
    return "\n".join(lines)
