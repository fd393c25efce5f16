"""PyTorch's own ``distributed_test`` on miraccl beside Gloo, as a table.

\b
    python -m miraccl.tools.torch_suite                       # all tests, both backends
    python -m miraccl.tools.torch_suite --test all_reduce     # those whose names contain this

The tests come with the installed wheel of PyTorch; they need the package ``expecttest``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from miraccl.errors import MissingDependency

BACKENDS = ("miraccl", "gloo")


@dataclass(frozen=True, kw_only=True)
class SuiteOutcome:
    """Outcome of one test on one backend: ``passed``, ``failed`` or ``skipped``, with a reason."""

    outcome: str
    reason: str = ""


def run_backend(
    backend: str, patterns: tuple[str, ...], ranks: int, *, echo: bool = False
) -> Iterator[tuple[str, SuiteOutcome]]:
    """Run the tests on one backend; yield each outcome as it comes.

    Raises:
        MissingDependency: PyTorch or ``expecttest`` is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="miraccl-torch-suite-") as folder:
        environment = {
            **os.environ,
            "MIRACCL_SUITE_BACKEND": backend,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "TEMP_DIR": folder,
        }
        command = [sys.executable, "-m", "miraccl.tools.torch_suite_worker", *patterns]
        with (
            open(os.path.join(folder, "log"), "w+") as log,
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith('{"test"'):
                    continue
                record = json.loads(line)
                if echo:
                    click.echo(f"{backend}: {record['test']}: {record['outcome']}", err=True)
                yield (
                    record["test"],
                    SuiteOutcome(outcome=record["outcome"], reason=record["reason"]),
                )
            process.wait()
            log.seek(0)
            text = log.read()
        if process.returncode and "No module named" in text:
            raise MissingDependency(
                f"cannot run PyTorch's tests: {text.strip().splitlines()[-1]}",
                hint="pip install torch expecttest",
            )


def differences(
    results: dict[str, dict[str, SuiteOutcome]],
) -> list[tuple[str, SuiteOutcome, SuiteOutcome]]:
    """Return the tests whose outcome differs between miraccl and Gloo."""
    ours, theirs = results["miraccl"], results["gloo"]
    return [
        (name, ours[name], theirs[name])
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name].outcome != theirs[name].outcome
    ]


def table(results: dict[str, dict[str, SuiteOutcome]]) -> str:
    """Format the counts, and the tests that differ, as Markdown."""
    lines = ["| backend | passed | failed | skipped |", "|---|---|---|---|"]
    for backend, outcomes in results.items():
        counts = [
            sum(o.outcome == kind for o in outcomes.values())
            for kind in ("passed", "failed", "skipped")
        ]
        lines.append(f"| {backend} | {counts[0]} | {counts[1]} | {counts[2]} |")
    if set(BACKENDS) <= set(results):
        found = differences(results)
        if found:
            lines += ["", "| test | miraccl | Gloo | reason |", "|---|---|---|---|"]
        for name, ours, theirs in found:
            reason = (ours if ours.outcome == "failed" else theirs).reason.replace("|", "\\|")
            lines.append(f"| `{name}` | {ours.outcome} | {theirs.outcome} | {reason[:160]} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--test", "patterns", multiple=True, help="Part of a test's name; may be repeated.")
@click.option("--backend", multiple=True, type=click.Choice(BACKENDS), default=BACKENDS)
@click.option("--ranks", default=3, show_default=True, type=click.IntRange(2, 8))
@click.option("--json", "as_json", is_flag=True, help="Print the outcomes as JSON.")
def main(patterns: tuple[str, ...], backend: tuple[str, ...], ranks: int, as_json: bool) -> None:
    """Run the tests on each backend and print the table."""
    results: dict[str, dict[str, SuiteOutcome]] = {}
    for name in backend:
        results[name] = dict(run_backend(name, patterns, ranks, echo=True))
    if as_json:
        plain: Any = {
            b: {t: {"outcome": o.outcome, "reason": o.reason} for t, o in outcomes.items()}
            for b, outcomes in results.items()
        }
        click.echo(json.dumps(plain, indent=2))
    else:
        click.echo(table(results))


if __name__ == "__main__":
    main()
