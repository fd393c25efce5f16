"""Entry point of the ``miraccl`` command; each subcommand is imported when it is used.

Imports click only: ``miraccl --help`` must not import numpy or numba. The one-line summaries of the
overview are therefore in ``COMMANDS`` and not in the command modules.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from typing import Any

import click

import miraccl
from miraccl.address_space import require_address_space
from miraccl.errors import MiracclError
from miraccl.tools.options import SuggestingGroup

#: command -> (module:attribute, summary for the overview)
COMMANDS = {
    "perf": (
        "miraccl.tools.perf.cli:perf",
        "Measure a collective: the table of nccl-tests, every element checked.",
    ),
    "run": ("miraccl.tools.run:run", "Start ranks of a program, on one host or several."),
    "aggregator": (
        "miraccl.tools.aggregator:aggregator",
        "Add up for the ranks of a job, as a parameter server does.",
    ),
    "topo": ("miraccl.tools.topo_cli:topo", "Show, read and compare the topology of machines."),
    "plan": ("miraccl.tools.plan_cli:plan", "Show the chosen algorithms and channels, and why."),
    "schedule": (
        "miraccl.tools.schedule_cli:schedule",
        "Show, prove, draw and simulate the steps of an algorithm.",
    ),
    "net": (
        "miraccl.tools.net.cli:net",
        "Show interfaces, measure the network to a host, watch the paths of a job.",
    ),
    "env": ("miraccl.tools.env:env", "List every setting, its value and its origin."),
    "doctor": (
        "miraccl.tools.doctor:doctor",
        "Check what this machine offers and what is missing.",
    ),
    "completion": (
        "miraccl.tools.completion:completion",
        "Print the completion script of bash, zsh or fish.",
    ),
}


#: command -> libraries that it loads
_LIBRARIES = {
    "perf": ("numpy", "llvmlite"),
    "topo": ("numpy",),
    "plan": ("numpy", "llvmlite"),
    "schedule": ("numpy",),
}


class LazyGroup(SuggestingGroup):
    """Group that imports its commands on first use (click documentation, "Lazily loading
    subcommands").
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, attribute = COMMANDS[cmd_name][0].split(":")
        if cmd_name in _LIBRARIES:
            require_address_space(*_LIBRARIES[cmd_name], do=f"run miraccl {cmd_name}")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click would exit with 1, the status of a failed measurement
            print("miraccl: interrupted", file=sys.stderr)
            ctx.exit(130)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(miraccl.__version__, prog_name="miraccl", message="%(prog)s %(version)s")
def cli() -> None:
    """Collective communication between processes, hosts and GPUs, with every decision explained.

    \b
    Examples:
      miraccl perf all_reduce --ranks 4 --sizes 8,1K,256K,4M
      miraccl perf all_reduce --devices cuda --compare nccl
      miraccl run -n 4 train.py --epochs 3
      torchrun --nproc-per-node 4 --no-python miraccl perf all_reduce
      miraccl doctor
    """


def report(error: MiracclError) -> int:
    """Print an error and return the exit status: 2 for usage errors, 1 for others."""
    details = getattr(error, "details", "")
    if details:
        print(details.rstrip(), file=sys.stderr)
    print(f"miraccl: {error}", file=sys.stderr)
    return 2 if error.fault == "usage" else 1


def main(args: list[str] | None = None) -> Any:
    """Run the command line; never returns."""
    _open_standard_streams()
    if "_MIRACCL_COMPLETE" in os.environ:  # a shell completes a command line
        from miraccl.tools.completion import install

        install()
    try:
        try:
            sys.exit(cli.main(args, prog_name="miraccl", standalone_mode=True))
        finally:
            sys.stdout.flush()  # report write errors here, not at interpreter shutdown
    except MiracclError as error:
        sys.exit(report(error))
    except MemoryError:
        print("miraccl: out of memory: see the limits of this process (ulimit -a)", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        if error.errno == errno.ENOSPC:
            print(f"miraccl: cannot write the output: {error.strerror}", file=sys.stderr)
        # The reader of our output has exited, as in `miraccl env | head`, or the disk is full:
        # discard the remaining output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)


def _open_standard_streams() -> None:
    """Open closed standard streams on /dev/null and make standard output encode any text."""
    # With a closed stream (``>&-``) the next socket would get its number and receive the output.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # open until the process exits
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    # Characters that the encoding lacks (file names that are not text) are escaped.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
